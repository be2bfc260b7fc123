"""``torchdata.nodes`` pipelines: L1 where a sampler feeds them, L2 always.

``LoaderIterator`` is what the loop consumes from. The sampler node's draws are kept in order; a
parallel mapper that delivers out of order tells the source number of each item. Draws are mapped
through a ``Batcher`` between sampler and loader. Any other node that changes the count leaves the
batch without indices.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ddp_audit.hooks import digest, loaders, samplers
from ddp_audit.hooks.delivery import index_bytes, make_batch
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.loaders import LOADERS, Loader
from ddp_audit.hooks.places import user_location
from ddp_audit.hooks.state import PROBE, Batch, Iteration, after_fork
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import LoaderInfo

_hook = hook("nodes")
MAX_DRAWS = 1 << 16
SAME_COUNT = frozenset(
    (
        "Mapper",
        "ParallelMapper",
        "_ParallelMapperImpl",
        "_InlineMapperIter",
        "_ParallelMapperIter",
        "Prefetcher",
        "PinMemory",
    )
)
"""Nodes that return one item for each item they take, in the order in which they took them."""


@dataclass(slots=True, eq=False)
class Draws:
    """What a sampler node drew since its last reset; consumed ones are dropped from the front."""

    first: int = 0
    items: deque[Any] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Running:
    """One iterator over a pipeline."""

    record: Loader
    start: dict[str, Any] | None = None
    iteration: Iteration | None = None
    num_items: int = 0
    plan: Any = None  # see _plan
    ahead: Batch | None = None  # cached by has_next
    peeking: bool = False


def _died(value: Running) -> None:
    if value.iteration is not None:
        PROBE.dead.append(value.iteration)


DRAWS: WeakIdMap[Draws] = WeakIdMap()
ORDER: WeakIdMap[deque[int]] = WeakIdMap()
RUNNING: WeakIdMap[Running] = WeakIdMap(_died)


def _forget() -> None:
    DRAWS.clear()
    ORDER.clear()
    RUNNING.clear()


after_fork(_forget)


@dataclass(slots=True, eq=False)
class Plan:
    """How items of the loader come from draws of the sampler."""

    sampler: Any  # weak reference to the SamplerWrapper
    batch_size: int  # draws per item; 0 = one draw, which may itself be a list
    drop_last: bool
    mapper: Any  # weak reference to an out-of-order mapper's node, or None
    prebatch: int
    names: tuple[str, ...]


def _chain(root: Any) -> list[Any]:
    found: list[Any] = []
    node = root
    while node is not None and len(found) < 32:
        found.append(node)
        own = samplers.fields(node)
        # ``_it`` first: it is the iterator that really runs inside a mapper or prefetcher node.
        node = (
            own.get("_it")
            if type(node).__name__ in ("Mapper", "ParallelMapper", "Prefetcher", "PinMemory", "_ParallelMapperImpl")
            else None
        )
        if node is None:
            node = own.get("source", own.get("root"))
        if any(node is one for one in found):
            return found
    return found


def _plan(root: Any) -> Plan | None:
    """``None`` when the pipeline has no sampler, or a node whose effect on the count is unknown."""
    nodes = _chain(root)
    names = [type(node).__name__ for node in nodes]
    if not names or names[-1] != "SamplerWrapper":
        return None
    batch_size, drop_last, prebatch, mapper = 0, False, 0, None
    depth = 0
    for node, name in zip(nodes[:-1], names, strict=False):
        own = samplers.fields(node)
        if name == "Unbatcher":
            depth += 1
        elif name == "Batcher":
            if depth:
                depth -= 1  # the pair that ``prebatch`` puts around a mapper
                prebatch = int(own.get("batch_size", 0))
            elif batch_size:
                return None
            else:
                batch_size, drop_last = int(own.get("batch_size", 0)), bool(own.get("drop_last", True))
        elif name == "_SingleThreadedMapper" or name in SAME_COUNT:
            if name == "_ParallelMapperIter" and own.get("in_order") is False:
                if mapper is not None or (batch_size and not any(n == "Batcher" for n in names[names.index(name) :])):
                    return None  # batches made of items in any order
                mapper = weakref.ref(node)
        else:
            return None
    return Plan(weakref.ref(nodes[-1]), batch_size, drop_last, mapper, prebatch, tuple(names))


def _drew(node: Any, item: Any) -> None:
    draws = DRAWS.get(node)
    if draws is None:
        draws = Draws()
        DRAWS.set(node, draws)
    if len(draws.items) >= MAX_DRAWS:
        draws.items.popleft()
        draws.first += 1
    draws.items.append(item if isinstance(item, int) else index_bytes(item))


def _sampler_reset(node: Any) -> None:
    DRAWS.set(node, Draws())


def _order(node: Any, number: int) -> None:
    if samplers.fields(node).get("in_order") is not False:
        return
    order = ORDER.get(node)
    if order is None:
        order = deque(maxlen=MAX_DRAWS)
        ORDER.set(node, order)
    order.append(int(number))


def _index_of(running: Running) -> bytes | None:
    """Indices of the item that is being returned."""
    plan: Plan | None = running.plan
    ordinal = running.num_items
    if plan is None:
        return None
    node = plan.sampler()
    draws = DRAWS.get(node) if node is not None else None
    if draws is None:
        return None
    if plan.mapper is not None:
        mapper = plan.mapper()
        order = ORDER.get(mapper) if mapper is not None else None
        if order is None:
            return None
        if plan.prebatch:
            inside = ordinal % plan.prebatch
            if not order:
                return None
            number = order[0] * plan.prebatch + inside
            if inside == plan.prebatch - 1:
                order.popleft()
        elif order:
            number = order.popleft()
        else:
            return None
    else:
        number = ordinal
    size = plan.batch_size or 1
    start = number * size - draws.first
    if start < 0 or start >= len(draws.items):
        return None
    taken = [draws.items[i] for i in range(start, min(start + size, len(draws.items)))]
    if plan.mapper is None:  # in order: what came before is never asked for again
        for _ in range(start + len(taken)):
            draws.items.popleft()
        draws.first += start + len(taken)
    if any(item is None for item in taken):
        return None
    if all(isinstance(item, int) for item in taken):
        return index_bytes(taken)
    return b"".join(item if isinstance(item, bytes) else index_bytes(item) or b"" for item in taken)


def _constructed(loader: Any) -> None:
    loaders.constructed(loader, user_location(3))
    for node in _chain(samplers.fields(loader).get("root")):
        for one in samplers.chain(samplers.fields(node).get("sampler")):
            if hasattr(type(one), "set_epoch"):
                samplers.watch(one)


def _sampler_chain(root: Any) -> list[Any]:
    nodes = _chain(root)
    return samplers.chain(samplers.fields(nodes[-1]).get("sampler")) if nodes else []


def _began(iterator: Any) -> None:
    own = samplers.fields(iterator)
    loader = own.get("loader")
    record = LOADERS.get(loader)
    if record is None:
        record = loaders.constructed(loader, None)
    running = RUNNING.get(iterator)
    if running is None:
        running = Running(record=record)
        RUNNING.set(iterator, running)
    elif running.iteration is not None:
        PROBE.end_iteration(running.iteration)
    running.iteration, running.num_items, running.ahead = None, 0, None
    running.plan = _plan(own.get("root"))
    if record.info is None:
        _describe(own.get("root"), record, running.plan)
    chain = _sampler_chain(own.get("root"))
    dataset = (
        samplers.fields(chain[-1]).get("data_source", samplers.fields(chain[-1]).get("dataset")) if chain else None
    )
    running.start = loaders.start_fields(record, chain, dataset)


def _expected(plan: Plan | None) -> int | None:
    """Items of a whole epoch, by the sampler's length."""
    node = plan.sampler() if plan is not None else None
    length = loaders.length_of(samplers.fields(node).get("sampler")) if node is not None else None
    if plan is None or length is None or not plan.batch_size:
        return length
    return length // plan.batch_size if plan.drop_last else -(-length // plan.batch_size)


def _first(running: Running) -> Iteration:
    record = running.record
    loaders.announce(record)
    if record.current is not None and not record.current.ended:
        PROBE.end_iteration(record.current)
    running.iteration = record.current = PROBE.begin_iteration(record.number, running.start or {}, record.expected)
    return running.iteration


def _describe(root: Any, record: Loader, plan: Plan | None) -> None:
    nodes = _chain(root)
    chain = _sampler_chain(root)
    dataset = None
    for one in reversed(chain):
        found = samplers.fields(one)
        dataset = found.get("data_source", found.get("dataset"))
        if dataset is not None:
            break
    sizes = [samplers.as_int(samplers.fields(one).get("batch_size")) for one in (*nodes, *chain)]
    workers = [samplers.as_int(samplers.fields(node).get("num_workers")) or 0 for node in nodes]
    orders = [samplers.as_bool(samplers.fields(node).get("in_order")) for node in nodes]
    record.batch_size = next((size for size in sizes if size is not None), None)
    record.expected = _expected(plan)
    record.info = LoaderInfo(
        loader=0,
        family="nodes",
        class_names=("Loader", *dict.fromkeys(type(node).__name__ for node in nodes)),
        location=record.location,
        site_ordinal=record.site_ordinal,
        before_group=record.before_group,
        dataset_class=type(dataset).__name__ if dataset is not None else None,
        dataset_length=loaders.length_of(dataset) if dataset is not None else None,
        dataset_digest=digest.dataset_digest(dataset) if dataset is not None else None,
        dataset_iterable=plan is None,
        length=None,
        batch_size=record.batch_size,
        drop_last=plan.drop_last if plan is not None and plan.batch_size else None,
        num_workers=max(workers, default=0),
        persistent_workers=None,
        in_order=next((order for order in orders if order is not None), None),
    )


def _delivered(iterator: Any, data: Any, cached: bool, wait_ns: int) -> None:
    running = RUNNING.get(iterator)
    if running is None:
        return
    if cached:
        batch, running.ahead = running.ahead, None
        if batch is not None:
            PROBE.deliver(batch.iteration, batch)
        return
    iteration = running.iteration or _first(running)
    batch = make_batch(iteration, data, _index_of(running), -1, wait_ns, running.record.batch_size)
    running.num_items += 1
    PROBE.wait_ns += wait_ns
    if running.peeking:
        running.ahead = batch
    else:
        PROBE.deliver(iteration, batch)


def _exhausted(iterator: Any) -> None:
    running = RUNNING.get(iterator)
    if running is None or running.peeking:
        return
    iteration = running.iteration or _first(running)
    iteration.exhausted = True
    PROBE.end_iteration(iteration)


def _peek(iterator: Any, value: bool) -> None:
    running = RUNNING.get(iterator)
    if running is not None:
        running.peeking = value


constructed = _hook.protect(_constructed)
began = _hook.protect(_began)
delivered = _hook.protect(_delivered)
exhausted = _hook.protect(_exhausted)
peek = _hook.protect(_peek)
drew = _hook.protect(_drew)
sampler_reset = _hook.protect(_sampler_reset)
order = _hook.protect(_order)


def install_adapters(module: Any) -> None:
    """Patch ``torchdata.nodes.adapters.SamplerWrapper``."""
    kind = getattr(module, "SamplerWrapper", None)
    if kind is None or not all(name in vars(kind) for name in ("next", "reset")):
        _hook.unavailable("torchdata.nodes SamplerWrapper")
        return
    next_, reset_ = kind.next, kind.reset

    @unseen
    @functools.wraps(next_)
    def next(self: Any) -> Any:
        item = next_(self)
        drew(self, item)
        return item

    @unseen
    @functools.wraps(reset_)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reset_(self, *args, **kwargs)
        sampler_reset(self)
        return result

    kind.next, kind.reset = next, reset


def install_map(module: Any) -> None:
    """Patch ``torchdata.nodes.map._ParallelMapperIter``."""
    kind = getattr(module, "_ParallelMapperIter", None)
    original = vars(kind).get("_maybe_update_snapshot") if kind is not None else None
    if original is None:
        _hook.unavailable("torchdata.nodes _ParallelMapperIter")
        return

    @unseen
    @functools.wraps(original)
    def _maybe_update_snapshot(self: Any, idx: int) -> Any:
        order(self, idx)
        return original(self, idx)

    kind._maybe_update_snapshot = _maybe_update_snapshot  # type: ignore[union-attr]


def install_loader(module: Any) -> None:
    """Patch ``torchdata.nodes.loader``."""
    loader, kind = getattr(module, "Loader", None), getattr(module, "LoaderIterator", None)
    if loader is None or kind is None or not all(name in vars(kind) for name in ("next", "reset", "has_next")):
        _hook.unavailable("torchdata.nodes LoaderIterator")
        return
    init, next_, reset_, has_next_ = loader.__init__, kind.next, kind.reset, kind.has_next

    @unseen
    @functools.wraps(init)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        constructed(self)

    @unseen
    @functools.wraps(next_)
    def next(self: Any) -> Any:
        cached = getattr(self, "_cached_item", None) is not None
        start = time.perf_counter_ns()
        try:
            item = next_(self)
        except StopIteration:
            exhausted(self)
            raise
        delivered(self, item, cached, time.perf_counter_ns() - start)
        return item

    @unseen
    @functools.wraps(reset_)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reset_(self, *args, **kwargs)
        began(self)
        return result

    @unseen
    @functools.wraps(has_next_)
    def has_next(self: Any) -> Any:
        peek(self, True)
        try:
            return has_next_(self)
        finally:
            peek(self, False)

    loader.__init__ = built
    kind.next, kind.reset, kind.has_next = next, reset, has_next
