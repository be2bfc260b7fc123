"""Exact counting of samples over replicas: who read what, and what was read twice.

Two ways that give the same answer. Dense indices go through a byte map, one owner range at a time,
so that memory stays bounded whatever the length of the data set. Anything else is partitioned by
owner, so that each part is sorted on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddp_audit.records import U64Array

RANGE = 1 << 22  # indices per owner range: a map of 4 MB per replica count, below law 5's memory
PART = 1 << 20  # values per partition: sorted in cache-friendly pieces of 8 MB
DENSE = 16  # a byte map pays while the range is at most this many times the number of values


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts over R replicas.

    Attributes:
        num_read_R: int64, shape (R,); samples read, repeats counted.
        num_distinct_R: int64, shape (R,); distinct samples per replica.
        num_union: distinct samples over all replicas.
        num_shared: distinct samples that two or more replicas read.
        shared_RR: int64, shape (R, R); distinct samples that both replicas read, the diagonal is
            ``num_distinct_R``. Zero off the diagonal when pairs were not asked for.
    """

    num_read_R: npt.NDArray[np.int64]
    num_distinct_R: npt.NDArray[np.int64]
    num_union: int
    num_shared: int
    shared_RR: npt.NDArray[np.int64]

    @property
    def num_overlap(self) -> int:
        """How often a sample was read by a further replica: sum of distinct less the union."""
        return int(self.num_distinct_R.sum()) - self.num_union


def distinct(values: U64Array) -> U64Array:
    """The distinct values, ascending. Sorting is several times faster here than ``np.unique``, which hashes."""
    ordered = np.sort(values)
    if not len(ordered):
        return ordered
    fresh = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]


def _dense(samples: Sequence[U64Array], length: int) -> Iterator[list[npt.NDArray[np.bool_]]]:
    """Per owner range, which of its indices each replica read."""
    for begin in range(0, length, RANGE):
        end = min(begin + RANGE, length)
        seen: list[npt.NDArray[np.bool_]] = []
        for part in samples:
            flags = np.zeros(end - begin, dtype=np.bool_)
            flags[(part[(part >= begin) & (part < end)] - np.uint64(begin)).astype(np.int64)] = True
            seen.append(flags)
        yield seen


def _hashed(samples: Sequence[U64Array]) -> Iterator[list[npt.NDArray[np.bool_]]]:
    """Per owner partition, which of its values each replica read."""
    total = sum(len(part) for part in samples)
    num_owners = max(1, -(-total // PART))
    # digests are uniform in their low bits, indices too: no further mixing is needed
    owners = [part % np.uint64(num_owners) if num_owners > 1 else None for part in samples]
    for owner in range(num_owners):
        mine = [
            distinct(part if owner_of is None else part[owner_of == owner])
            for part, owner_of in zip(samples, owners, strict=True)
        ]
        union = distinct(np.concatenate([*mine, np.empty(0, np.uint64)]))
        seen = []
        for values in mine:
            flags = np.zeros(len(union), dtype=np.bool_)
            flags[np.searchsorted(union, values)] = True
            seen.append(flags)
        yield seen


def coverage(samples: Sequence[U64Array], *, pairs: bool = True) -> Coverage:
    """Count samples.

    Args:
        samples: one flat uint64 array per replica: dataset indices or sample digests.
        pairs: also count for each two replicas what both read; its cost grows with R squared.
    """
    num = len(samples)
    num_values = sum(len(part) for part in samples)
    top = max((int(part.max()) for part in samples if len(part)), default=-1)
    pieces = _dense(samples, top + 1) if top < DENSE * max(num_values, 1024) else _hashed(samples)
    num_distinct_R = np.zeros(num, dtype=np.int64)
    shared_RR = np.zeros((num, num), dtype=np.int64)
    union = shared = 0
    for seen in pieces:
        times = np.zeros(len(seen[0]) if seen else 0, dtype=np.int32)
        for a, flags in enumerate(seen):
            times += flags
            num_distinct_R[a] += int(flags.sum())
            for b in range(a if pairs else 0):
                shared_RR[a, b] += int(np.count_nonzero(flags & seen[b]))
        union += int(np.count_nonzero(times))
        shared += int(np.count_nonzero(times > 1))
    shared_RR += shared_RR.T
    np.fill_diagonal(shared_RR, num_distinct_R)
    return Coverage(
        num_read_R=np.array([len(part) for part in samples], dtype=np.int64),
        num_distinct_R=num_distinct_R,
        num_union=union,
        num_shared=shared,
        shared_RR=shared_RR,
    )


def window_counts(
    windows: Sequence[npt.NDArray[np.int64]], samples: Sequence[U64Array], num_windows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count inside many small windows (optimizer steps) at once.

    Args:
        windows: per replica, int64, the window of each sample, 0 <= window < num_windows.
        samples: per replica, uint64, the samples.

    Returns:
        (union, total), int64, shape (num_windows,): distinct samples over all replicas, and the
        sum over replicas of their own distinct samples.
    """
    union = np.zeros(num_windows, dtype=np.int64)
    total = np.zeros(num_windows, dtype=np.int64)
    own: list[tuple[npt.NDArray[np.int64], U64Array]] = []
    for window, values in zip(windows, samples, strict=True):
        first = _first_of_each(window, values)
        own.append(first)
        total += np.bincount(first[0], minlength=num_windows)
    if own:
        both = _first_of_each(np.concatenate([w for w, _ in own]), np.concatenate([v for _, v in own]))
        union += np.bincount(both[0], minlength=num_windows)
    return union, total


def _first_of_each(window: npt.NDArray[np.int64], values: U64Array) -> tuple[npt.NDArray[np.int64], U64Array]:
    """The distinct (window, value) pairs, sorted."""
    if not len(values):
        return window, values
    order = np.lexsort((values, window))
    window, values = window[order], values[order]
    fresh = np.ones(len(values), dtype=np.bool_)
    fresh[1:] = (window[1:] != window[:-1]) | (values[1:] != values[:-1])
    return window[fresh], values[fresh]
