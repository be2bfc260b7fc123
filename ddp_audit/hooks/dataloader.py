"""torch's DataLoader and every subclass: L1, L2, consumption, waiting time.

The iterator's base class is the one place all of them pass: ``_next_index`` draws, ``__next__``
returns. What the loop got counts. A single-process iterator returns its draws in order; a
multi-process one may not, there the task that left ``_task_info`` is the one being returned.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ddp_audit.hooks import digest, holding, loaders, samplers
from ddp_audit.hooks.delivery import index_bytes, make_batch
from ddp_audit.hooks.guard import BrokenForTestError, Hook, hook, unseen
from ddp_audit.hooks.loaders import LOADERS, Loader
from ddp_audit.hooks.places import user_location
from ddp_audit.hooks.state import PROBE, Iteration, after_fork
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import LoaderInfo

_hook = hook("dataloader")


@dataclass(slots=True, eq=False)
class LoaderIterator:
    """One iterator object."""

    record: Loader
    map_style: bool
    constructing: bool = False  # StatefulDataLoader replays batches inside __init__ when it resumes
    start: dict[str, Any] | None = None
    iteration: Iteration | None = None
    drawn: deque[bytes | None] = field(default_factory=deque)  # single process
    tasks: dict[int, bytes | None] = field(default_factory=dict)  # task id -> indices
    worker: int = -1


def _died(value: LoaderIterator) -> None:
    if value.iteration is not None:
        PROBE.dead.append(value.iteration)


ITERATORS: WeakIdMap[LoaderIterator] = WeakIdMap(_died)
after_fork(ITERATORS.clear)


def _inner(loader: Any) -> Any:
    """The outermost sampler of a loader; ``None`` for an iterable dataset."""
    own = samplers.fields(loader)
    found = own.get("batch_sampler")
    return found if found is not None else own.get("sampler")


def _constructed(loader: Any) -> None:
    if LOADERS.get(loader) is not None:
        return  # a subclass called __init__ twice
    loaders.constructed(loader, user_location(3))
    own = samplers.fields(loader)
    for one in (*samplers.chain(_inner(loader)), own.get("dataset")):
        if one is not None and hasattr(type(one), "set_epoch"):
            samplers.watch(one)


def _began(iterator: Any, loader: Any) -> None:
    """A new iterator, or a persistent one started again."""
    record = LOADERS.get(loader)
    if record is None:
        record = loaders.constructed(loader, None)
    known = ITERATORS.get(iterator)
    if known is None:
        map_style = int(samplers.fields(iterator).get("_dataset_kind", 0)) == 0
        known = LoaderIterator(record=record, map_style=map_style)
        ITERATORS.set(iterator, known)
    elif known.iteration is not None:
        PROBE.end_iteration(known.iteration)
        known.iteration = None
    known.drawn.clear()
    known.tasks.clear()
    if record.info is None:
        _describe(loader, record)
    own = samplers.fields(loader)
    known.start = loaders.start_fields(record, samplers.chain(_inner(loader)), own.get("dataset"))


def _drew(iterator: Any, index: Any) -> None:
    known = ITERATORS.get(iterator)
    if known is None or not known.map_style:
        return
    data = index_bytes(index)
    send = samplers.fields(iterator).get("_send_idx")
    if send is None:
        known.drawn.append(data)
    else:
        known.tasks[send] = data


def _attribute(iterator: Any, known: LoaderIterator) -> bytes | None:
    """The indices of the batch that is being returned."""
    if not known.map_style:
        return None
    own = samplers.fields(iterator)
    outstanding = own.get("_task_info")
    if outstanding is None:
        return known.drawn.popleft() if known.drawn else None
    task = own.get("_rcvd_idx", 0) - 1
    if task not in known.tasks or task in outstanding:
        gone = [number for number in known.tasks if number not in outstanding]
        if len(gone) != 1:
            return None
        task = gone[0]
    return known.tasks.pop(task)


def _first(known: LoaderIterator) -> Iteration:
    """The iteration's number, given when its first batch is asked for."""
    record = known.record
    loaders.announce(record)
    if record.current is not None and not record.current.ended:
        PROBE.end_iteration(record.current)  # a new iterator of the same loader: the old one was left
    iteration = PROBE.begin_iteration(record.number, known.start or {}, record.expected)
    known.iteration = record.current = iteration
    return iteration


def _describe(loader: Any, record: Loader) -> None:
    own = samplers.fields(loader)
    dataset = own.get("dataset")
    chain = samplers.chain(_inner(loader))
    kind = type(loader)
    stateful = any(base.__name__ == "StatefulDataLoader" for base in kind.__mro__)
    torch_iterable = any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("torch.") for base in type(dataset).__mro__
    )
    batch_size = samplers.as_int(own.get("batch_size"))
    if batch_size is None:
        sizes = [samplers.as_int(samplers.fields(one).get("batch_size")) for one in chain]
        batch_size = next((size for size in sizes if size is not None), None)
    record.batch_size = batch_size
    fingerprint = digest.dataset_digest(dataset) if not torch_iterable else None
    outer = holding.outer_class(loader)
    kinds = [kind, *(type(one) for one in chain), *([outer] if outer else [])]
    length = None if torch_iterable else loaders.length_of(loader)
    record.expected = length
    record.info = LoaderInfo(
        loader=0,
        family="stateful_dataloader" if stateful else "dataloader",
        class_names=loaders.class_names(outer or kind, "DataLoader"),
        location=record.location,
        site_ordinal=record.site_ordinal,
        before_group=record.before_group,
        dataset_class=type(dataset).__name__,
        dataset_length=None if torch_iterable else loaders.length_of(dataset),
        dataset_digest=fingerprint,
        dataset_iterable=torch_iterable,
        length=length,
        batch_size=batch_size,
        drop_last=samplers.as_bool(own.get("drop_last")),
        num_workers=samplers.as_int(own.get("num_workers")) or 0,
        persistent_workers=samplers.as_bool(own.get("persistent_workers")),
        in_order=samplers.as_bool(own.get("in_order")),
        frameworks=loaders.frameworks_of(kinds),
    )


def _delivered(iterator: Any, data: Any, wait_ns: int) -> None:
    known = ITERATORS.get(iterator)
    if known is None:
        return
    index = _attribute(iterator, known)
    if known.constructing:
        return
    PROBE.wait_ns += wait_ns
    held = holding.holder()
    if held is not None and held.dispatcher:
        return  # what it hands out counts, not what it reads
    iteration = known.iteration or _first(known)
    batch = make_batch(iteration, data, index, known.worker, wait_ns, known.record.batch_size)
    if held is not None:
        held.hold(iteration, batch)
    else:
        PROBE.deliver(iteration, batch)
    known.worker = -1


def _exhausted(iterator: Any) -> None:
    known = ITERATORS.get(iterator)
    if known is None or known.constructing or holding.content_only(known.record):
        return
    iteration = known.iteration or _first(known)
    iteration.exhausted = True
    held = holding.holder()
    if held is not None:
        held.exhausted = iteration
    else:
        PROBE.end_iteration(iteration)
    known.start = known.start or {}


def _worker_of(iterator: Any, worker: int) -> None:
    known = ITERATORS.get(iterator)
    if known is not None:
        known.worker = int(worker)


constructed = _hook.protect(_constructed)
began = _hook.protect(_began)
delivered = _hook.protect(_delivered)
exhausted = _hook.protect(_exhausted)
worker_of = _hook.protect(_worker_of)


def patch_init(loader_class: Any) -> None:
    """Note where loaders of this class are built."""
    original = loader_class.__init__

    @unseen
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        constructed(self)

    loader_class.__init__ = init


def patch_process_data(iterator_class: Any) -> None:
    """Note which worker made the batch that is being returned."""
    original = iterator_class._process_data

    @unseen
    @functools.wraps(original)
    def _process_data(self: Any, data: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        worker_of(self, worker)
        return original(self, data, worker, *args, **kwargs)

    iterator_class._process_data = _process_data


def install(module: Any) -> None:
    """Patch ``torch.utils.data.dataloader``."""
    base = getattr(module, "_BaseDataLoaderIter", None)
    parallel = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if base is None or not all(name in vars(base) for name in ("__init__", "_reset", "_next_index", "__next__")):
        _hook.unavailable("DataLoader iterators")
        return
    patch_init(module.DataLoader)
    init, reset, next_index, next_ = base.__init__, base._reset, base._next_index, base.__next__

    @unseen
    @functools.wraps(init)
    def new_init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        init(self, loader, *args, **kwargs)
        began(self, loader)

    @unseen
    @functools.wraps(reset)
    def new_reset(self: Any, loader: Any, first_iter: bool = False, *args: Any, **kwargs: Any) -> Any:
        result = reset(self, loader, first_iter, *args, **kwargs)
        if not first_iter:
            began(self, loader)
        return result

    @unseen
    @functools.wraps(next_index)
    def new_next_index(self: Any) -> Any:
        index = next_index(self)
        if not (_hook.off or Hook.silent):  # in place of a guard: it runs for every batch
            try:
                if _hook.broken:
                    raise BrokenForTestError
                _drew(self, index)
            except Exception as error:
                _hook.failed(error)
        return index

    @unseen
    @functools.wraps(next_)
    def new_next(self: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            data = next_(self)
        except StopIteration:
            exhausted(self)
            raise
        delivered(self, data, time.perf_counter_ns() - start)
        return data

    base.__init__, base._reset, base._next_index, base.__next__ = new_init, new_reset, new_next_index, new_next
    if parallel is not None and "_process_data" in vars(parallel):
        patch_process_data(parallel)


def install_stateful(module: Any) -> None:
    """Patch ``torchdata.stateful_dataloader.stateful_dataloader``."""
    state = hook("stateful_dataloader")
    loader = getattr(module, "StatefulDataLoader", None)
    names = ("_StatefulSingleProcessDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter")
    kinds: list[Any] = [getattr(module, name, None) for name in names]
    if loader is None or None in kinds:
        state.unavailable("StatefulDataLoader iterators")
        return
    patch_init(loader)
    base_init = vars(kinds[0].__mro__[1]).get("__init__")
    if base_init is None:
        state.unavailable("StatefulDataLoader iterators")
        return

    def constructing(iterator: Any, value: bool) -> None:
        known = ITERATORS.get(iterator)
        if known is not None:
            known.constructing = value

    mark = state.protect(constructing)
    stateful_base: Any = kinds[0].__mro__[1]

    @unseen
    @functools.wraps(base_init)
    def base_init_marked(self: Any, *args: Any, **kwargs: Any) -> None:
        base_init(self, *args, **kwargs)
        mark(self, True)

    stateful_base.__init__ = base_init_marked
    for kind in kinds:
        original = kind.__init__

        def wrap(original: Any) -> Any:
            @unseen
            @functools.wraps(original)
            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                try:
                    original(self, *args, **kwargs)
                finally:
                    mark(self, False)

            return init

        kind.__init__ = wrap(original)
    if "_process_data" in vars(kinds[1]):
        patch_process_data(kinds[1])
