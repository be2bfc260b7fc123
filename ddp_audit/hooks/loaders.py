"""What is known of each loader, shared by the hooks of the loader families."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddp_audit.hooks import digest, samplers
from ddp_audit.hooks.state import PROBE, Iteration, after_fork
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import LoaderInfo, Location

FRAMEWORK_MODULES = ("accelerate", "lightning", "pytorch_lightning", "transformers", "deepspeed", "datasets")


@dataclass(slots=True, eq=False)
class Loader:
    """One loader object, known from its construction or from its first iteration."""

    location: Location | None = None
    site_ordinal: int = 0
    before_group: bool | None = None
    number: int = -1  # given at the first iteration
    info: LoaderInfo | None = None  # read when the first iterator is made: the loader may be gone after
    expected: int | None = None  # len(loader)
    batch_size: int | None = None
    current: Iteration | None = None
    iteration_count: int = 0
    calls_before: int = 0
    epochs: dict[int, int] = field(default_factory=dict)  # position in the chain -> epoch at the last start


LOADERS: WeakIdMap[Loader] = WeakIdMap()
_sites: dict[tuple[str, int], int] = {}
_numbers = [0]
after_fork(LOADERS.clear)


def group_exists() -> bool | None:
    """Whether the default process group exists; ``None`` when torch was built without distributed."""
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return False
    return bool(dist.is_initialized()) if dist.is_available() else None


def constructed(loader: Any, location: Location | None) -> Loader:
    """A loader was built."""
    site = 0
    if location is not None:
        key = (location.file, location.line)
        site = _sites.get(key, 0)
        _sites[key] = site + 1
    before = group_exists()
    record = Loader(location=location, site_ordinal=site, before_group=None if before is None else not before)
    LOADERS.set(loader, record)
    return record


def length_of(value: Any) -> int | None:
    """``len(value)`` where it has one that works."""
    if not hasattr(type(value), "__len__"):
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError, ValueError):
        return None


def class_names(kind: type, stop: str) -> tuple[str, ...]:
    """Names of the class and its bases, up to and with the library's class ``stop``."""
    names: list[str] = []
    for base in kind.__mro__:
        if base is object or base.__name__ == "Generic":
            continue
        names.append(base.__name__)
        if base.__name__ == stop:
            break
    return tuple(names)


def frameworks_of(kinds: list[type]) -> tuple[str, ...]:
    """Frameworks whose classes are in the chain."""
    found = {kind.__module__.partition(".")[0] for kind in kinds}
    return tuple(sorted(name for name in FRAMEWORK_MODULES if name in found))


def rng_digests() -> tuple[int, int, int]:
    """Digests of the states of torch's, numpy's and Python's generators; nothing is drawn."""
    torch, numpy, random = sys.modules["torch"], sys.modules.get("numpy.random"), sys.modules.get("random")
    state = torch.default_generator.get_state()
    first = digest.bytes_digest(digest.tensor_words(state, 1))
    second = 0
    if numpy is not None:
        _, keys, position, *_ = numpy.get_state()
        second = digest.bytes_digest(keys.tobytes() + str(position).encode())
    third = digest.bytes_digest(repr(random.getstate()).encode()) if random is not None else 0
    return first, second, third


def start_fields(record: Loader, chain: list[Any], dataset: Any) -> dict[str, Any]:
    """Fields of ``IterationInfo`` as they are now, when iteration begins."""
    infos = [samplers.describe(one) for one in chain]
    calls = sum(samplers.num_calls(one) for one in (*chain, dataset))
    dataset_epoch = samplers.as_int(samplers.fields(dataset).get("epoch"))
    if dataset_epoch is None:
        dataset_epoch = samplers.as_int(samplers.fields(dataset).get("_epoch"))
    new_calls = calls - record.calls_before
    record.calls_before = calls
    for position, info in enumerate(infos):
        if info.epoch is not None:
            before = record.epochs.get(position)
            if before is not None and before != info.epoch and not new_calls:
                new_calls = 1  # told in a way we do not count, see samplers.py
            record.epochs[position] = info.epoch
    return {
        "samplers": [asdict(info) for info in infos],
        "dataset_epoch": dataset_epoch,
        "num_set_epoch_calls": new_calls,
        "rng_digests": rng_digests(),
    }


def announce(record: Loader) -> None:
    """Give the loader its number and write its event, once."""
    if record.number >= 0 or record.info is None:
        return
    record.number = _numbers[0]
    _numbers[0] += 1
    PROBE.event("loader", asdict(replace(record.info, loader=record.number)))


def _forget() -> None:
    _numbers[0] = 0
    _sites.clear()


after_fork(_forget)
