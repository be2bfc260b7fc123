"""Loaders that read ahead of the loop: Accelerate's shard and dispatcher.

Their inner loader returns a batch before the loop gets the one before it. Inside their generator
batches are held, and counted when the generator yields.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from ddp_audit.hooks import loaders, samplers
from ddp_audit.hooks.delivery import make_batch
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.loaders import LOADERS, Loader
from ddp_audit.hooks.state import PROBE, Batch, Iteration
from ddp_audit.records import LoaderInfo

_hook = hook("accelerate")
_local = threading.local()


class Holder:
    """Batches that a wrapping generator has read and not yet handed out."""

    def __init__(self, outer: Any) -> None:
        self.outer = weakref.ref(outer)
        self.outer_class = type(outer)
        self.held: list[tuple[Iteration, Batch]] = []
        self.exhausted: Iteration | None = None
        self.dispatcher = "Dispatcher" in type(outer).__name__
        self.iteration: Iteration | None = None

    def hold(self, iteration: Iteration, batch: Batch) -> None:
        """Keep a batch until it is handed out. Its ordinal is that of the delivery."""
        self.held.append((iteration, batch))

    def release(self) -> None:
        """The generator yields: one ahead while its source lasts, the newest once it is exhausted."""
        if not self.held:
            return
        at = len(self.held) - 1 if self.exhausted is not None or len(self.held) == 1 else len(self.held) - 2
        iteration, batch = self.held[at]
        del self.held[: at + 1]  # earlier ones were skipped by skip_first_batches
        batch.ordinal = iteration.num_batches
        PROBE.deliver(iteration, batch)


def holder() -> Holder | None:
    """The innermost generator that is running in this thread."""
    stack = getattr(_local, "stack", None)
    return stack[-1] if stack else None


def outer_class(loader: Any) -> type | None:
    """Class of the loader that wraps this one, while it runs."""
    held = holder()
    return held.outer_class if held is not None else None


def content_only(record: Loader) -> bool:
    """Whether what is read now is only handed on, split over the ranks."""
    held = holder()
    return held is not None and held.dispatcher


def _enter(held: Holder) -> None:
    if not hasattr(_local, "stack"):
        _local.stack = []
    _local.stack.append(held)


def _leave(held: Holder) -> None:
    stack = getattr(_local, "stack", [])
    if held in stack:
        stack.remove(held)


def _dispatched(held: Holder, data: Any) -> None:
    """A dispatcher hands out this rank's slice: content without indices."""
    outer = held.outer()
    record = LOADERS.get(outer)
    if record is None:
        record = loaders.constructed(outer, None)
    if held.iteration is None:
        own = samplers.fields(outer)
        base = own.get("base_dataloader")
        inner = samplers.fields(base)
        dataset = inner.get("dataset", own.get("dataset"))
        if record.info is None:
            inner_record = LOADERS.get(base)
            iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
            record.info = LoaderInfo(
                loader=0,
                family="dataloader",
                class_names=loaders.class_names(type(outer), "DataLoader"),
                location=inner_record.location if inner_record is not None else record.location,
                site_ordinal=inner_record.site_ordinal if inner_record is not None else record.site_ordinal,
                before_group=record.before_group,
                dataset_class=type(dataset).__name__,
                dataset_length=None if iterable else loaders.length_of(dataset),
                dataset_digest=None,
                dataset_iterable=iterable,
                length=None,
                batch_size=samplers.as_int(inner.get("batch_size")),
                drop_last=samplers.as_bool(own.get("_drop_last")),
                num_workers=samplers.as_int(inner.get("num_workers")) or 0,
                persistent_workers=samplers.as_bool(inner.get("persistent_workers")),
                in_order=samplers.as_bool(inner.get("in_order")),
                frameworks=("accelerate",),
            )
        loaders.announce(record)
        if record.current is not None and not record.current.ended:
            PROBE.end_iteration(record.current)
        held.iteration = record.current = PROBE.begin_iteration(
            record.number, loaders.start_fields(record, samplers.chain(inner.get("batch_sampler")), dataset)
        )
    PROBE.deliver(held.iteration, make_batch(held.iteration, data, None, -1, 0, None))


def _yields(held: Holder, data: Any) -> None:
    if held.dispatcher:
        _dispatched(held, data)
    else:
        held.release()


def _ends(held: Holder, finished: bool) -> None:
    if held.iteration is not None:
        held.iteration.exhausted = finished
        PROBE.end_iteration(held.iteration)
    if held.exhausted is not None:
        PROBE.end_iteration(held.exhausted)


enter = _hook.protect(_enter)
leave = _hook.protect(_leave)
yields = _hook.protect(_yields)
ends = _hook.protect(_ends)


def _wrap(kind: Any) -> None:
    original = kind.__iter__

    @unseen
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        held = Holder(self)
        source = original(self)
        finished = False
        try:
            while True:
                enter(held)
                try:
                    data = next(source)
                except StopIteration:
                    finished = True
                    break
                finally:
                    leave(held)
                yields(held, data)
                yield data
                del data  # as without us: not alive while the next one is read
        finally:
            if not finished:
                source.close()
            ends(held, finished)

    kind.__iter__ = iterate


def install_accelerate(module: Any) -> None:
    """Patch ``accelerate.data_loader``."""
    import inspect

    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        kind = getattr(module, name, None)
        if kind is None or not inspect.isgeneratorfunction(vars(kind).get("__iter__")):
            _hook.unavailable(f"accelerate {name}")
            continue
        _wrap(kind)
