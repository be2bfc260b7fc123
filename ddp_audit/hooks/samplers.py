"""What a chain of samplers says of itself, and how often ``set_epoch`` was called.

Attributes are read from the objects' own dictionaries: no property runs. ``set_epoch`` is counted
by patching the library class that defines it. A class of ``__main__`` is left alone, because tools
that pickle such classes by value would take our function along; there a changed ``epoch`` counts.
"""

from __future__ import annotations

import functools
from typing import Any

from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import SamplerInfo

_hook = hook("sampler")
MAX_CHAIN = 8
LINKS = ("batch_sampler", "sampler", "base_sampler", "dataset", "_sampler", "_dataset")
"""Fields under which a sampler holds the next one. ``dataset`` is there for Lightning's
``DistributedSamplerWrapper``, whose dataset is a wrapped sampler."""

_calls: WeakIdMap[list[int]] = WeakIdMap()
_patched: set[type] = set()


def fields(value: Any) -> dict[str, Any]:
    """The object's own dictionary; empty when it has none."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def as_int(value: Any) -> int | None:
    """A plain number, or ``None``."""
    return value if type(value) is int else None


def as_bool(value: Any) -> bool | None:
    """A plain truth value, or ``None``."""
    return value if type(value) is bool else None


def is_sampler(value: Any) -> bool:
    """Whether it makes an order: a torch Sampler, or an iterable that is told the epoch."""
    torch_sampler = any(
        kind.__name__ == "Sampler" and kind.__module__.startswith("torch.") for kind in type(value).__mro__
    )
    return torch_sampler or "ampler" in type(value).__name__


def chain(first: Any) -> list[Any]:
    """The samplers from the outermost inwards."""
    found: list[Any] = []
    current = first
    while current is not None and len(found) < MAX_CHAIN and not any(current is one for one in found):
        if isinstance(current, (list, tuple, range, str, bytes)):
            break
        found.append(current)
        own = fields(current)
        follow = None
        for name in LINKS:
            inner = own.get(name)
            if inner is None:
                continue
            if name.endswith("dataset"):
                # Lightning: dataset is a _DatasetSamplerWrapper around the user's sampler.
                inner = fields(inner).get("_sampler")
                if inner is None:
                    continue
            follow = inner
            break
        current = follow
    return found


def describe(sampler: Any) -> SamplerInfo:
    """One object of the chain, as it holds itself now."""
    own = fields(sampler)
    name = type(sampler).__name__
    replacement = as_bool(own.get("replacement"))
    num_samples = as_int(own.get("num_samples"))
    if num_samples is None:
        num_samples = as_int(own.get("_num_samples"))
    shuffle = as_bool(own.get("shuffle"))
    if shuffle is None and name in ("RandomSampler", "SeedableRandomSampler", "SubsetRandomSampler"):
        shuffle = True
    if shuffle is None and name == "SequentialSampler":
        shuffle = False
    return SamplerInfo(
        class_name=name,
        num_replicas=as_int(own.get("num_replicas", own.get("num_processes"))),
        rank=as_int(own.get("rank", own.get("process_index"))),
        seed=as_int(own.get("seed", own.get("initial_seed"))),
        epoch=as_int(own.get("epoch")),
        shuffle=shuffle,
        drop_last=as_bool(own.get("drop_last")),
        replacement=replacement,
        num_samples=num_samples,
        total_size=as_int(own.get("total_size")),
        batch_size=as_int(own.get("batch_size")),
        even_batches=as_bool(own.get("even_batches")),
        split_batches=as_bool(own.get("split_batches")),
        set_epoch=hasattr(type(sampler), "set_epoch"),
        seeded=own["generator"] is not None if "generator" in own else None,
    )


def _count_call(sampler: Any) -> None:
    counter = _calls.get(sampler)
    if counter is None:
        counter = [0]
        _calls.set(sampler, counter)
    counter[0] += 1


_count = _hook.protect(_count_call)


def _counting(function: Any) -> Any:
    @unseen
    @functools.wraps(function)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(self)
        return function(self, *args, **kwargs)

    return set_epoch


def _watch(value: Any) -> None:
    """Patch the class that defines ``set_epoch``, once."""
    for kind in type(value).__mro__:
        function = kind.__dict__.get("set_epoch")
        if function is None:
            continue
        if kind in _patched or kind.__module__ == "__main__" or not callable(function) or isinstance(function, type):
            return

        kind.set_epoch = _counting(function)  # type: ignore[attr-defined]
        _patched.add(kind)
        return


watch = _hook.protect(_watch)
"""Count ``set_epoch`` calls on objects of this kind from now on."""


def num_calls(value: Any) -> int:
    """Calls of ``set_epoch`` seen on this object."""
    counter = _calls.get(value)
    return counter[0] if counter is not None else 0
