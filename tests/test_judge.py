"""The judge: the measure, the verdict, core questions, cause before consequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence_builder import (
    BATCHED,
    RANDOM,
    Rank,
    batches_of,
    evidence,
    permutation,
    sharded,
)

from ddp_audit.judge import judge
from ddp_audit.records import Audit, MeshInfo, Outcome, SamplerInfo, Verdict

WEIGHTED = SamplerInfo(class_name="WeightedRandomSampler", replacement=True, num_samples=80)


def audit_of(folder: Path, ranks: Sequence[Rank], **run: object) -> Audit:
    """Merge and judge."""
    return judge(evidence(folder, ranks, **run), created=0.0)


def outcomes(audit: Audit) -> dict[str, Outcome]:
    """Outcome per id."""
    return {item.id: item.outcome for item in audit.checks}


def failed(audit: Audit) -> set[str]:
    """Ids that failed."""
    return {item.id for item in audit.checks if item.outcome is Outcome.FAIL}


def same_batches(world: int = 2, **fields: object) -> list[Rank]:
    """shuffle=True, the same seed everywhere."""
    epochs = [batches_of(permutation(80, epoch), 8) for epoch in range(2)]
    return [Rank(epochs=epochs, samplers=(BATCHED, RANDOM), dataset_length=80, **fields) for _ in range(world)]


def own_permutation(world: int = 2) -> list[Rank]:
    """Each rank walks all rows in an order of its own."""
    return [
        Rank(
            epochs=[batches_of(permutation(160, 10 * rank + epoch), 8) for epoch in range(2)],
            samplers=(BATCHED, RANDOM),
            dataset_length=160,
        )
        for rank in range(world)
    ]


def weighted(world: int) -> list[Rank]:
    """With replacement, a generator per rank."""
    ranks = []
    for rank in range(world):
        rng = np.random.default_rng(rank)
        weights = np.arange(1, 401) / np.arange(1, 401).sum()
        epochs = [batches_of([int(k) for k in rng.choice(400, 80, p=weights)], 8) for _ in range(3)]
        ranks.append(Rank(epochs=epochs, samplers=(BATCHED, WEIGHTED), dataset_length=400))
    return ranks


def lagged() -> list[Rank]:
    """Rank 1 reads what rank 0 read one step before."""
    first = [batches_of(permutation(160, epoch), 8) for epoch in range(2)]
    second = [[epoch[-1], *epoch[:-1]] for epoch in first]
    return [Rank(epochs=e, samplers=(BATCHED, RANDOM), dataset_length=160) for e in (first, second)]


def tensor_parallel(dp: int = 4, tp: int = 2) -> list[Rank]:
    """dp x tp, the tp peers read the same batches."""
    data = sharded(320, dp, 2)
    mesh = MeshInfo(shape=(dp, tp), dim_names=("dp", "tp"), ranks=tuple(range(dp * tp)))
    ranks = []
    for rank in range(dp * tp):
        peers = tuple(range(rank % tp, dp * tp, tp))
        ranks.append(
            replace(
                data[rank // tp],
                model_mesh=mesh,
                model_dims=(1,),
                num_dtensors=4,
                group_ranks=peers,
                params=lambda step, r=rank: 1000 + step + r,
                initial=rank,
            )
        )
    return ranks


def test_distributed_sampler_of_odd_length_is_whole(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, sharded(151, 2, 3))
    assert audit.effective_gpus == 2.0
    assert audit.distinct_fraction_step == 1.0
    assert audit.distinct_fraction_epoch == 1.0
    assert audit.verdict is Verdict.PASS
    assert audit.headline == "2 GPUs do the work of 2"
    assert not failed(audit)
    assert audit.core_unanswered == ()


def test_same_batches_everywhere_is_one(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, same_batches())
    assert audit.effective_gpus == 1.0
    assert audit.verdict is Verdict.FAIL
    assert audit.headline == "2 GPUs do the work of 1.0"
    assert failed(audit) == {"DDP101"}


def test_own_permutation_is_whole_by_step_and_one_by_epoch(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, own_permutation())
    assert audit.distinct_fraction_step == 1.0
    assert audit.distinct_fraction_epoch == 0.5
    assert audit.effective_gpus == 1.0
    assert failed(audit) == {"DDP103"}


@pytest.mark.parametrize("world", [2, 4])
def test_weighted_with_replacement_is_whole(tmp_path: Path, world: int) -> None:
    audit = audit_of(tmp_path, weighted(world))
    assert audit.effective_gpus == world
    assert audit.distinct_fraction_epoch is None
    assert audit.verdict is Verdict.PASS


def test_one_batch_lag_is_one_by_epoch(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, lagged())
    assert audit.distinct_fraction_step == 1.0
    assert audit.distinct_fraction_epoch == 0.5
    assert audit.effective_gpus == 1.0
    assert outcomes(audit)["DDP101"] is Outcome.PASS
    assert outcomes(audit)["DDP103"] is Outcome.FAIL


def test_tensor_parallel_peers_are_one_replica(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, tensor_parallel())
    assert audit.headline == "8 GPUs (4 replicas x 2 tensor-parallel) do the work of 8"
    assert audit.replicas == 4
    assert audit.effective_gpus == 8.0
    assert audit.groups[0].replicas == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert not failed(audit)


@pytest.mark.parametrize(("split", "length", "effective"), [(True, 48, 2.0), (False, 96, 1.0)])
def test_hand_written_loops_have_epochs_too(tmp_path: Path, split: bool, length: int, effective: float) -> None:
    """Shards that change from epoch to epoch: no rank repeats its samples, all ranks together do."""
    ranks = []
    for rank in range(2):
        orders = [permutation(96, epoch) for epoch in range(3)]
        stream = [index for order in orders for index in (order[rank::2] if split else order)]
        epochs = [batches_of(stream, 8)]
        ranks.append(Rank(epochs=epochs, index=False, content=False, forward=True, location=None, finished=False))
    audit = audit_of(tmp_path, ranks)
    assert [(r.shard_length, r.num_epochs) for r in audit.ranks] == [(length, 3)] * 2
    assert audit.effective_gpus == pytest.approx(effective)
