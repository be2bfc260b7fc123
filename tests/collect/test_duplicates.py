"""The exact duplicate count against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_audit.collect import duplicates
from ddp_audit.collect.duplicates import Coverage, coverage, window_counts

DENSE = st.integers(0, 60)
HASHED = st.integers(0, 2**64 - 1)
REPLICAS = st.lists(st.lists(DENSE, max_size=40), min_size=1, max_size=5)
HASHED_REPLICAS = st.lists(
    st.lists(st.one_of(HASHED, st.sampled_from([0, 7, 2**63, 2**64 - 1])), max_size=40), min_size=1, max_size=5
)


def brute_force(samples: list[list[int]]) -> dict[str, object]:
    sets = [set(rows) for rows in samples]
    union = set().union(*sets)
    return {
        "read": [len(rows) for rows in samples],
        "distinct": [len(rows) for rows in sets],
        "union": len(union),
        "shared": sum(1 for item in union if sum(item in rows for rows in sets) > 1),
        "pairs": {(a, b): len(sets[a] & sets[b]) for a, b in combinations(range(len(sets)), 2)},
    }


def told(counts: Coverage) -> dict[str, object]:
    num = len(counts.num_read_R)
    return {
        "read": counts.num_read_R.tolist(),
        "distinct": counts.num_distinct_R.tolist(),
        "union": counts.num_union,
        "shared": counts.num_shared,
        "pairs": {(a, b): int(counts.shared_RR[a, b]) for a, b in combinations(range(num), 2)},
    }


def arrays(samples: list[list[int]]) -> list[np.ndarray]:
    return [np.array(rows, dtype=np.uint64) for rows in samples]


@settings(deadline=None)
@given(st.one_of(REPLICAS, HASHED_REPLICAS))
def test_equals_brute_force(samples: list[list[int]]) -> None:
    assert told(coverage(arrays(samples))) == brute_force(samples)


@settings(deadline=None, max_examples=50)
@given(REPLICAS, st.integers(1, 7), st.integers(1, 5))
def test_size_of_the_parts_does_not_matter(samples: list[list[int]], size: int, dense: int) -> None:
    """Owner ranges and partitions of a few values give what one part gives, both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "RANGE", size)
        patch.setattr(duplicates, "PART", size)
        assert told(coverage(arrays(samples))) == brute_force(samples)
        patch.setattr(duplicates, "DENSE", 0)
        assert told(coverage(arrays(samples))) == brute_force(samples)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 4), DENSE), max_size=40), min_size=1, max_size=4))
def test_windows_equal_brute_force(samples: list[list[tuple[int, int]]]) -> None:
    windows = [np.array([w for w, _ in rows], dtype=np.int64) for rows in samples]
    values = [np.array([v for _, v in rows], dtype=np.uint64) for rows in samples]
    union, total = window_counts(windows, values, 5)
    for window in range(5):
        sets = [{v for w, v in rows if w == window} for rows in samples]
        assert union[window] == len(set().union(*sets))
        assert total[window] == sum(len(rows) for rows in sets)


def test_planted_duplicates_are_all_found() -> None:
    rng = np.random.default_rng(0)
    base = rng.permutation(1_000_000).astype(np.uint64)
    shares = [base[rank::4] for rank in range(4)]
    planted = [np.concatenate([share, np.roll(shares, 1, axis=0)[rank][:250]]) for rank, share in enumerate(shares)]
    counts = coverage(planted)
    assert counts.num_union == 1_000_000
    assert counts.num_overlap == 1000
    assert counts.num_shared == 1000


def test_no_replica_at_all() -> None:
    assert coverage([]).num_union == 0
    assert coverage([np.empty(0, np.uint64)]).num_union == 0
