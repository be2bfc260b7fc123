"""DDP102, DDP103 and DDP104: how an epoch is shared between replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from evidence_builder import (
    BATCHED,
    RANDOM,
    SEQUENTIAL,
    Rank,
    batches_of,
    distributed,
    evidence,
    finding,
    permutation,
    sampler,
    sharded,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_audit.judge import judge
from ddp_audit.records import Level, Outcome, SamplerInfo, Severity


def seeded_by_rank(length: int = 160, world: int = 2) -> list[Rank]:
    """DistributedSampler(seed=rank): the shares are cut from different orders."""
    return [
        Rank(
            epochs=[batches_of(distributed(length, rank, world, e, seed=rank + 1), 8) for e in range(2)],
            samplers=(BATCHED, sampler(length, rank, world, seed=rank)),
            dataset_length=length,
        )
        for rank in range(world)
    ]


def walked_by_all(world: int = 2, length: int = 160, **fields: object) -> list[Rank]:
    """Every rank walks all rows in its own order."""
    return [
        Rank(
            epochs=[batches_of(permutation(length, 10 * rank + e), 8) for e in range(2)],
            samplers=(BATCHED, RANDOM),
            dataset_length=length,
            **fields,
        )
        for rank in range(world)
    ]


# --------------------------------------------------------------------------- DDP102


def test_overlapping_shards_are_found(tmp_path: Path) -> None:
    found = finding(tmp_path, seeded_by_rank(), "DDP102")
    assert found.outcome is Outcome.FAIL
    assert found.measured == pytest.approx(0.25, abs=0.05)
    assert "DistributedSampler has another seed on each rank (0 and 1)" in (found.cause or "")
    assert "read by nobody" in found.message
    assert found.levels == (Level.L1,)


def test_overlap_is_the_only_finding(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, seeded_by_rank()), created=0.0)
    assert {item.id for item in audit.checks if item.outcome is Outcome.FAIL} == {"DDP102"}
    assert audit.effective_gpus == pytest.approx(1.5, abs=0.12)


def test_files_in_another_order_per_rank(tmp_path: Path) -> None:
    """Indices are disjoint, but index k is another row on each rank: content settles it."""
    orders = [permutation(160, 1), permutation(160, 2)]
    ranks = [
        Rank(
            epochs=[
                batches_of([orders[rank][k] for k in distributed(160, rank, 2, e, shuffle=False)], 8) for e in range(2)
            ],
            samplers=(BATCHED, sampler(160, rank, 2, shuffle=False)),
            dataset_length=160,
            dataset_digest=rank + 1,
            index=False,
        )
        for rank in range(2)
    ]
    found = finding(tmp_path, ranks, "DDP102")
    assert found.outcome is Outcome.FAIL
    assert found.levels == (Level.L2,)
    assert "sort file lists" in (found.fix or "")


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(40, 170), st.integers(1, 9), st.booleans())
def test_padding_is_no_overlap(world: int, length: int, size: int, reshuffle: bool) -> None:
    with TemporaryDirectory() as folder:
        audit = judge(evidence(Path(folder), sharded(length, world, 2, size, reshuffle=reshuffle)), created=0.0)
    assert all(i.outcome is not Outcome.FAIL for i in audit.checks if i.id in ("DDP101", "DDP102", "DDP103", "DDP104"))
    if audit.effective_gpus is not None:
        assert audit.effective_gpus >= 0.97 * world


def even_batches(length: int = 100, world: int = 2, size: int = 8) -> list[Rank]:
    """Accelerate: whole batches dealt in turn, the last ones filled from the beginning."""
    ranks = []
    for rank in range(world):
        epochs = []
        for epoch in range(2):
            order = permutation(length, epoch)
            rows = order + order[: -length % (world * size)]
            epochs.append(batches_of(rows, size)[rank::world])
        shard = SamplerInfo(class_name="BatchSamplerShard", num_replicas=world, rank=rank, even_batches=True)
        ranks.append(Rank(epochs=epochs, samplers=(shard, BATCHED, RANDOM), dataset_length=length))
    return ranks


def test_even_batches_are_no_overlap(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, even_batches()), created=0.0)
    assert not [item for item in audit.checks if item.outcome is Outcome.FAIL]
    assert audit.effective_gpus == pytest.approx(2.0, abs=0.06)


def test_shares_may_move_between_ranks(tmp_path: Path) -> None:
    """Epochs are never pooled: what rank 0 read in epoch 0, rank 1 may read in epoch 1."""
    halves = [list(range(80)), list(range(80, 160))]
    ranks = [
        Rank(
            epochs=[batches_of(halves[(rank + e) % 2], 8) for e in range(2)],
            samplers=(SamplerInfo(class_name="Rotating", num_replicas=2, rank=rank),),
            dataset_length=160,
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP102").outcome is Outcome.PASS


@pytest.mark.parametrize(("shared", "outcome"), [(8, Outcome.PASS), (9, Outcome.FAIL)])
def test_border_of_overlap(tmp_path: Path, shared: int, outcome: Outcome) -> None:
    """8 of 160 reads are the limit of 5 %; meeting it passes."""
    first = list(range(80))
    second = list(range(80 - shared, 160 - shared))
    ranks = [
        Rank(
            epochs=[
                batches_of(
                    [
                        *rows,
                    ],
                    8,
                )
            ],
            samplers=(sampler(200, rank, 2, total_size=200),),
            dataset_length=200,
        )
        for rank, rows in enumerate((first, second))
    ]
    assert finding(tmp_path, ranks, "DDP102").outcome is outcome


def endless(draws: list[list[int]], **fields: object) -> list[Rank]:
    """No epoch ever ends."""
    return [
        Rank(epochs=[batches_of(rows, 8)], samplers=(), finished=False, dataset_length=None, **fields) for rows in draws
    ]


def test_endless_draws_share_by_chance_only(tmp_path: Path) -> None:
    draws = [[int(k) for k in np.random.default_rng(r).integers(0, 200, 400)] for r in range(2)]
    audit = judge(evidence(tmp_path, endless(draws)), created=0.0)
    assert next(i for i in audit.checks if i.id == "DDP102").outcome is Outcome.PASS
    assert audit.effective_gpus == 2.0


def test_endless_draws_with_a_common_part(tmp_path: Path) -> None:
    """Half of each batch is drawn with a common seed."""
    common = np.random.default_rng(9).integers(0, 5000, 200)
    draws = []
    for rank in range(2):
        own = np.random.default_rng(rank).integers(0, 5000, 200)
        rows = np.concatenate([common.reshape(50, 4), own.reshape(50, 4)], axis=1)
        draws.append([int(k) for k in rows.ravel()])
    audit = judge(evidence(tmp_path, endless(draws)), created=0.0)
    found = next(i for i in audit.checks if i.id == "DDP102")
    assert found.outcome is Outcome.FAIL
    assert audit.effective_gpus == pytest.approx(1.5, abs=0.05)


# --------------------------------------------------------------------------- DDP103


def test_full_set_per_rank_is_found(tmp_path: Path) -> None:
    found = finding(tmp_path, walked_by_all(), "DDP103")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.WARNING
    assert "in 2 of 2 finished epochs" in found.message
    assert "RandomSampler" in (found.cause or "")


def test_the_same_order_some_steps_apart(tmp_path: Path) -> None:
    """Equal orders that never meet at a step are no identical batches, yet each rank reads everything."""
    order = batches_of(permutation(160, 3), 8)
    ranks = [Rank(epochs=epochs, samplers=(BATCHED, RANDOM), dataset_length=160)
             for epochs in ([order, order, order], [order[:1], order, order])]  # fmt: skip
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    found = {item.id: item for item in audit.checks}
    assert found["DDP101"].outcome is Outcome.PASS
    assert found["DDP103"].outcome is Outcome.FAIL
    assert "same order but at other steps" in found["DDP103"].message
    assert "seed of its own" not in (found["DDP103"].cause or "")


def test_full_set_per_rank_is_an_error_when_it_was_to_be_split(tmp_path: Path) -> None:
    ranks = [replace(r, samplers=(BATCHED, sampler(160, 0, 1))) for r in walked_by_all()]
    found = finding(tmp_path, ranks, "DDP103")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize(("dropped", "outcome"), [(8, Outcome.FAIL), (9, Outcome.PASS)])
def test_border_of_a_full_set(tmp_path: Path, dropped: int, outcome: Outcome) -> None:
    """152 of 160 are 95 %: the limit met exactly is a full set."""
    ranks = [
        Rank(
            epochs=[batches_of(permutation(160, rank)[: 160 - dropped], 8)],
            samplers=(BATCHED, RANDOM),
            dataset_length=160,
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP103").outcome is outcome


def test_unfinished_epochs_are_not_judged(tmp_path: Path) -> None:
    cut = [replace(r, finished=False, epochs=[r.epochs[0][:15]]) for r in walked_by_all()]
    found = finding(tmp_path, cut, "DDP103")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "finished epoch" in (found.why_inconclusive or "")


def test_loops_that_never_ask_for_the_end_finish_by_length(tmp_path: Path) -> None:
    ranks = [replace(r, finished=False, loader_length=20) for r in walked_by_all()]
    assert finding(tmp_path, ranks, "DDP103").outcome is Outcome.FAIL


def by_hand(split: bool, seeds: tuple[int, int], num_epochs: int = 3) -> list[Rank]:
    """No loader: the loop shuffles indices itself and feeds the model; one long stream."""
    ranks = []
    for rank in range(2):
        stream: list[int] = []
        for epoch in range(num_epochs):
            order = permutation(96, 100 * seeds[rank] + epoch)
            stream += order[rank::2] if split else order
        ranks.append(
            Rank(
                epochs=[batches_of(stream, 8)],
                index=False,
                content=False,
                forward=True,
                location=None,
                finished=False,
                dataset_class=None,
            )
        )
    return ranks


def test_hand_shuffled_indices(tmp_path: Path) -> None:
    found = finding(tmp_path, by_hand(split=False, seeds=(1, 2)), "DDP103")
    assert found.outcome is Outcome.FAIL
    assert found.levels == (Level.L3,)
    assert finding(tmp_path / "split", by_hand(split=True, seeds=(1, 1)), "DDP103").outcome is not Outcome.FAIL


# --------------------------------------------------------------------------- DDP104


def sharded_twice(length: int = 240) -> list[Rank]:
    """A share of a share."""
    ranks = []
    for rank in range(2):
        epochs = []
        for epoch in range(2):
            mine = distributed(length, rank, 2, epoch)
            epochs.append(batches_of(mine, 8)[rank::2])
        outer = SamplerInfo(class_name="BatchSamplerShard", num_replicas=2, rank=rank, even_batches=True)
        ranks.append(
            Rank(
                epochs=epochs,
                samplers=(outer, BATCHED, sampler(length, rank, 2)),
                dataset_length=length,
                frameworks=("accelerate",),
            )
        )
    return ranks


def test_double_sharding_is_found(tmp_path: Path) -> None:
    found = finding(tmp_path, sharded_twice(), "DDP104")
    assert found.outcome is Outcome.FAIL
    assert found.measured == pytest.approx(0.5, abs=0.05)
    assert "BatchSamplerShard" in (found.cause or "")
    assert "DistributedSampler" in (found.cause or "")


def test_drop_last_twice_is_no_double_sharding(tmp_path: Path) -> None:
    """111 rows, 64 used: one batch less a row is dropped per rank, and one row by the sampler."""
    ranks = [
        Rank(
            epochs=[batches_of(distributed(111, rank, 2, 0, shuffle=False, drop_last=True), 32, drop_last=True)] * 9,
            samplers=(
                replace(BATCHED, drop_last=True),
                sampler(111, rank, 2, shuffle=False, drop_last=True, num_samples=55, total_size=110),
            ),
            dataset_length=111,
            drop_last=True,
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP104").outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("salts", "world_of_sampler", "outcome"),
    [
        pytest.param((0, 1), 2, Outcome.FAIL, id="a-share-split-by-all-ranks"),
        pytest.param((0, 0), 2, Outcome.PASS, id="one-data-set"),
        pytest.param((0, 1), 1, Outcome.NOT_APPLICABLE, id="local-shards-read-whole"),
    ],
)
def test_a_share_of_its_own_split_again(
    tmp_path: Path, salts: tuple[int, int], world_of_sampler: int, outcome: Outcome
) -> None:
    ranks = []
    for rank, salt in enumerate(salts):
        chain = (BATCHED, sampler(160, rank % world_of_sampler, world_of_sampler))
        orders = [permutation(160, epoch)[rank % world_of_sampler :: world_of_sampler] for epoch in range(3)]
        epochs = [batches_of(order, 8) for order in orders]
        ranks.append(Rank(epochs=epochs, samplers=chain, dataset_length=160, content_salt=salt))
    assert finding(tmp_path, ranks, "DDP104").outcome is outcome


def test_a_chosen_half_is_no_double_sharding(tmp_path: Path) -> None:
    """A subset sampler that reads half of the set on purpose, split by rank once."""
    ranks = [
        Rank(
            epochs=[batches_of(permutation(120, e)[rank::2], 6) for e in range(2)],
            samplers=(SamplerInfo(class_name="EasyHalf", num_samples=60, num_replicas=2, rank=rank),),
            dataset_length=240,
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP104").outcome is Outcome.PASS


@pytest.mark.parametrize("check", ["DDP102", "DDP103", "DDP104"])
def test_healthy_looks(tmp_path: Path, check: str) -> None:
    weighted = SamplerInfo(class_name="WeightedRandomSampler", replacement=True)
    draws = [[int(k) for k in np.random.default_rng(r).integers(0, 160, 160)] for r in range(2)]
    with_replacement = [
        Rank(epochs=[batches_of(d, 8)], samplers=(BATCHED, weighted), dataset_length=160) for d in draws
    ]
    fixed = [
        Rank(
            epochs=[batches_of(distributed(160, rank, 2, 0, shuffle=False), 8)] * 3,
            samplers=(BATCHED, sampler(160, rank, 2, shuffle=False)),
            dataset_length=160,
        )
        for rank in range(2)
    ]
    local = [
        Rank(
            epochs=[batches_of(permutation(80, e), 8) for e in range(2)],
            samplers=(BATCHED, SEQUENTIAL),
            dataset_length=80,
            dataset_digest=rank + 1,
            content_salt=rank,
        )
        for rank in range(2)
    ]
    for name, ranks in {"replacement": with_replacement, "fixed": fixed, "local": local}.items():
        assert finding(tmp_path / name, ranks, check).outcome is not Outcome.FAIL, name


def test_identical_weighted_draws_are_one_gpu(tmp_path: Path) -> None:
    """With replacement from few rows chance overlap is large; equal batches still count once."""
    weighted = SamplerInfo(class_name="WeightedRandomSampler", replacement=True)
    draws = [int(k) for k in np.random.default_rng(3).integers(0, 60, 400)]
    ranks = [Rank(epochs=[batches_of(draws, 8)], samplers=(BATCHED, weighted), dataset_length=60) for _ in range(2)]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    assert audit.effective_gpus == pytest.approx(1.0)
    assert {item.id for item in audit.checks if item.outcome is Outcome.FAIL} == {"DDP101"}


def test_epochs_of_one_step_are_judged_by_their_samples(tmp_path: Path) -> None:
    ranks = [
        Rank(epochs=[[permutation(32, 10 * r + e)] for e in range(3)], samplers=(BATCHED, RANDOM), dataset_length=32)
        for r in range(2)
    ]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    found = {item.id: item.outcome for item in audit.checks}
    assert found["DDP101"] is Outcome.INCONCLUSIVE
    assert found["DDP103"] is Outcome.FAIL


def test_equal_rows_in_the_data_are_no_overlap(tmp_path: Path) -> None:
    """A stream told apart by content, in which 60 of 300 rows come twice."""
    ranks = [
        Rank(
            epochs=[batches_of([k // 2 if k < 120 else k for k in distributed(300, rank, 2, e)], 30) for e in range(2)],
            samplers=(),
            index=False,
            dataset_iterable=True,
        )
        for rank in range(2)
    ]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    assert next(i for i in audit.checks if i.id == "DDP102").outcome is Outcome.PASS
    assert audit.effective_gpus is not None
    assert audit.effective_gpus >= 1.94
