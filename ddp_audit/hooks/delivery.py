"""From a delivered batch to the row that says what it was."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import numpy as np

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
    torch = sys.modules["torch"]
    flags = 0 if torch.is_grad_enabled() else NOGRAD
    record = Batch(
        serial=PROBE.next_serial(),
        iteration=iteration,
        ordinal=iteration.num_batches,
        num_samples=0,
        wait_us=min(wait_ns // 1000, U32),
        flags=flags,
        worker=worker,
        content=0,
        index=0,
    )
    if index is not None:
        record.num_samples = len(index) // 8
        record.index = digest.bytes_digest(index)
        record.flags |= HAS_INDEX
        record.lists.append((ListKind.INDEX, index))
    if index is None or PROBE.due_next:
        _take_safely(record, data, record.num_samples or batch_size)
    return record
