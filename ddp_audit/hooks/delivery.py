"""From a delivered batch to the row that says what it was."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from torch import is_grad_enabled

from ddp_audit.hooks import digest
from ddp_audit.hooks.guard import hook
from ddp_audit.hooks.state import PROBE, U32, Batch, Iteration
from ddp_audit.records import BatchFlag, ListKind

_hook = hook("digest")
WHOLE_BATCHES = 8  # of an iteration; no error rests on windows alone
MAX_INDEX = 1 << 20
NOGRAD, HAS_INDEX, HAS_DIGESTS = int(BatchFlag.NOGRAD), int(BatchFlag.HAS_INDEX), int(BatchFlag.HAS_DIGESTS)
WINDOWED, WHOLE, OPAQUE = int(BatchFlag.WINDOWED), int(BatchFlag.WHOLE), int(BatchFlag.OPAQUE)


def index_bytes(index: Any) -> bytes | None:
    """A list of dataset indices as little-endian int64; ``None`` when they are no plain integers."""
    try:
        if isinstance(index, (list, tuple)):
            if len(index) > MAX_INDEX:
                return None
            return array("q", index).tobytes()
        if isinstance(index, (int, np.integer)):
            return array("q", [int(index)]).tobytes()
        if isinstance(index, (range, np.ndarray)):
            found = np.asarray(index)
            return found.astype("<i8").tobytes() if found.ndim == 1 and found.dtype.kind in "iu" else None
        if digest.is_tensor(index):
            return array("q", index.reshape(-1).tolist()).tobytes()
    except (TypeError, ValueError, OverflowError):
        return None  # keys, file names, (dataset, row) pairs: known by content then
    return None


def _take(record: Batch, data: Any, hint: int | None) -> None:
    whole = record.ordinal < WHOLE_BATCHES
    found = digest.batch_digest(data, hint, whole=whole)
    record.content = found.content
    record.sizes = digest.row_sizes(data, found.num_samples)
    if found.opaque:
        record.flags |= OPAQUE
    if found.windowed:
        record.flags |= WINDOWED
    elif found.content:
        record.flags |= WHOLE
    if not record.num_samples:
        record.num_samples = found.num_samples
    if found.samples is not None:
        record.flags |= HAS_DIGESTS
        record.lists.append((ListKind.DIGEST, found.samples.tobytes()))
        if found.whole is not None:
            record.flags |= WHOLE
            record.lists.append((ListKind.WHOLE, found.whole.tobytes()))


_take_safely = _hook.protect(_take)


def make_batch(
    iteration: Iteration, data: Any, index: bytes | None, worker: int, wait_ns: int, batch_size: int | None
) -> Batch:
    """The row of a batch that an iterator returned; content is taken as the schedule says.

    Args:
        index: from ``index_bytes``.
        worker: -1 = main process or unknown.
        batch_size: of the loader, a hint for the batch axis.
    """
    serial = PROBE.serial
    PROBE.serial = serial + 1
    flags = 0 if is_grad_enabled() else NOGRAD
    record = Batch(serial, iteration, iteration.num_batches, 0, min(wait_ns // 1000, U32), flags, worker, 0, index)
    if index is not None:
        record.num_samples = len(index) // 8
        record.flags = flags | HAS_INDEX
    if index is None or PROBE.due_next:
        _take_safely(record, data, record.num_samples or batch_size)
    return record
