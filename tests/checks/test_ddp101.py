"""DDP101: identical batches, and healthy jobs that look like it."""

from __future__ import annotations

from collections.abc import Sequence
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
    digest,
    evidence,
    finding,
    permutation,
    sampler,
    sharded,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_audit.checks import ddp101_identical_data_across_ranks as ddp101
from ddp_audit.checks.streams import View
from ddp_audit.judge import judge
from ddp_audit.records import Level, MeshInfo, Outcome, SamplerInfo


def rank_of(rows: Sequence[Sequence[int]], **fields: object) -> Rank:
    """A rank that reads these batches in one epoch."""
    return Rank(epochs=[[list(row) for row in rows]], samplers=(BATCHED, RANDOM), dataset_length=1000, **fields)


def ones(indices: Sequence[int], **fields: object) -> Rank:
    """Batches of one sample each."""
    return rank_of([[index] for index in indices], **fields)


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        pytest.param([range(8), range(8, 16)], Outcome.PASS, id="disjoint"),
        pytest.param([range(8), range(8)], Outcome.FAIL, id="identical-at-the-limit-of-8"),
        pytest.param([range(8), [1, 0, *range(2, 8)]], Outcome.PASS, id="same-set-other-order"),
        pytest.param([range(20), [*range(19), 99]], Outcome.PASS, id="one-step-differs"),
        pytest.param([range(7), range(7)], Outcome.INCONCLUSIVE, id="too-few-steps"),
        pytest.param([range(7), range(7, 14)], Outcome.INCONCLUSIVE, id="too-few-steps-disjoint"),
        pytest.param([[5] * 9, [5] * 9], Outcome.INCONCLUSIVE, id="constant-data"),
        pytest.param([list(range(4)) * 5, list(range(4)) * 5], Outcome.INCONCLUSIVE, id="four-batches-over-and-over"),
        pytest.param([range(8)], Outcome.NOT_APPLICABLE, id="one-replica"),
        pytest.param([range(9), range(50, 59), range(9)], Outcome.FAIL, id="ranks-0-and-2"),
    ],
)
def test_outcome(tmp_path: Path, rows: list[Sequence[int]], outcome: Outcome) -> None:
    assert finding(tmp_path, [ones(row) for row in rows], "DDP101").outcome is outcome


@settings(max_examples=6, deadline=None)
@given(st.permutations(range(3)))
def test_rank_order_does_not_matter(order: list[int]) -> None:
    rows = [range(8), range(8, 16), range(8)]
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        found = ddp101.run(View(evidence(Path(one), [ones(rows[i]) for i in order])))
        straight = ddp101.run(View(evidence(Path(other), [ones(row) for row in rows])))
    assert found.outcome is straight.outcome
    assert found.measured == straight.measured
    assert found.ranks == tuple(sorted(order.index(i) for i in (0, 2)))


def test_message_names_ranks_steps_and_value(tmp_path: Path) -> None:
    ranks = [ones(range(9)), ones(range(50, 59)), ones(range(9))]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.message == "Ranks 0 and 2 read the same samples at 9 of 9 steps."
    assert found.ranks == (0, 2)
    assert found.steps == tuple(range(9))
    assert found.measured == 1.0
    assert found.levels == (Level.L1,)
    assert found.location is not None
    assert (found.location.file, found.location.line) == ("train.py", 41)


def test_order_inside_a_step_does_not_save(tmp_path: Path) -> None:
    rows = [[2 * k, 2 * k + 1] for k in range(10)]
    swapped = [[b, a] for a, b in rows]
    assert finding(tmp_path, [rank_of(rows), rank_of(swapped)], "DDP101").outcome is Outcome.FAIL


@pytest.mark.parametrize("same_content", [True, False])
def test_content_where_no_indices_exist(tmp_path: Path, same_content: bool) -> None:
    ranks = [
        ones(range(12), index=False, content_salt=0 if same_content else rank, dataset_iterable=True)
        for rank in range(2)
    ]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is (Outcome.FAIL if same_content else Outcome.PASS)
    assert found.levels == (Level.L2,)


def test_local_shards_walked_from_zero_are_healthy(tmp_path: Path) -> None:
    """Each rank holds its own part and walks 0..n: equal indices, other samples."""
    epochs = [batches_of(range(40), 4) for _ in range(2)]
    ranks = [
        Rank(
            epochs=epochs, samplers=(BATCHED, SEQUENTIAL), dataset_length=40, dataset_digest=rank + 1, content_salt=rank
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.PASS


def test_local_shards_with_equal_facts_are_settled_by_content(tmp_path: Path) -> None:
    """Class, length and fingerprint agree (data behind a handle), the content does not."""
    epochs = [batches_of(range(40), 4) for _ in range(2)]
    ranks = [
        Rank(epochs=epochs, samplers=(BATCHED, SEQUENTIAL), dataset_length=40, content_salt=rank) for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.PASS


def test_equal_indices_of_unknown_data_are_inconclusive(tmp_path: Path) -> None:
    ranks = [ones(range(20), content=False, dataset_digest=None) for _ in range(2)]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.why_inconclusive


def test_lengths_differ_so_indices_say_nothing(tmp_path: Path) -> None:
    ranks = [replace(ones(range(20), content_salt=r), dataset_length=100 + r) for r in range(2)]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.PASS


def test_augmented_content_does_not_hide_equal_indices(tmp_path: Path) -> None:
    """Random augmentation: never the same content twice, so content says nothing against the index."""
    rows = [[index] for index in permutation(40, 1)]
    ranks = [rank_of(rows, content_salt=rank) for rank in range(2)]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.FAIL


@pytest.mark.parametrize(("whole", "outcome"), [(8, Outcome.FAIL), (7, Outcome.INCONCLUSIVE)])
def test_windowed_digests_need_whole_batches(tmp_path: Path, whole: int, outcome: Outcome) -> None:
    ranks = [ones(range(20), index=False, dataset_iterable=True, windowed=True, whole_batches=whole) for _ in range(2)]
    assert finding(tmp_path, ranks, "DDP101").outcome is outcome


def test_model_inputs_where_there_is_no_loader(tmp_path: Path) -> None:
    def hand_written(seed: int) -> Rank:
        return Rank(
            epochs=[batches_of(permutation(4000, seed)[:80], 4)],
            index=False,
            content=False,
            forward=True,
            location=None,
            dataset_class=None,
        )

    assert finding(tmp_path / "same", [hand_written(1), hand_written(1)], "DDP101").outcome is Outcome.FAIL
    assert finding(tmp_path / "own", [hand_written(1), hand_written(2)], "DDP101").outcome is Outcome.PASS


def test_constant_data_have_no_measure(tmp_path: Path) -> None:
    """Synthetic benchmark input: neither a fault nor half the work is shown by it."""
    ranks = [
        Rank(epochs=[[[1, 2]] * 20], index=False, content=False, forward=True, location=None, finished=False)
        for _ in range(2)
    ]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    assert not [item.id for item in audit.checks if item.outcome is Outcome.FAIL]
    assert audit.effective_gpus is None
    assert "1 distinct batch" in (audit.effective_gpus_why or "")


def test_slices_of_a_common_batch_are_healthy(tmp_path: Path) -> None:
    """All ranks load the global batch, and each feeds its part to the model."""
    rows = batches_of(permutation(96, 3), 8)
    ranks = [rank_of(rows, forward=True, forward_samples=lambda samples, r=rank: samples[r::2]) for rank in range(2)]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is Outcome.PASS
    assert found.levels == (Level.L3,)


@pytest.mark.parametrize(
    ("differ", "resized", "outcome"),
    [
        pytest.param(True, True, Outcome.INCONCLUSIVE, id="halves-of-each-sequence"),
        pytest.param(True, False, Outcome.FAIL, id="noise-on-equal-batches"),
        pytest.param(False, True, Outcome.FAIL, id="the-same-made-on-each-rank"),
    ],
)
def test_equal_batches_made_into_other_inputs(tmp_path: Path, differ: bool, resized: bool, outcome: Outcome) -> None:
    """Context parallelism and generation start from equal batches; noise on equal batches is the fault itself."""
    rows = batches_of(permutation(96, 3), 8)
    ranks = [
        rank_of(
            rows,
            forward=True,
            resized=resized,
            forward_samples=lambda samples, r=rank * differ: [1000 * (r + 1) + s for s in samples],
        )
        for rank in range(2)
    ]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    found = next(item for item in audit.checks if item.id == "DDP101")
    assert found.outcome is outcome
    if outcome is Outcome.INCONCLUSIVE:
        assert not [item.id for item in audit.checks if item.outcome is Outcome.FAIL]
        assert "--mesh" in (found.why_inconclusive or "")


def test_recorded_samples_count_as_indices(tmp_path: Path) -> None:
    ranks = [
        Rank(epochs=[[[k] for k in range(10)]], index=False, content=False, recorded=True, location=None)
        for _ in range(2)
    ]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is Outcome.FAIL
    assert found.levels == (Level.L1,)


def test_tensor_parallel_peers_may_read_alike(tmp_path: Path) -> None:
    mesh = MeshInfo(shape=(2,), dim_names=("tp",), ranks=(0, 1))
    ranks = [ones(range(20), wrapper=None, model_mesh=mesh, model_dims=(0,), num_dtensors=2) for _ in range(2)]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.NOT_APPLICABLE


def test_mesh_option_names_model_axes(tmp_path: Path) -> None:
    ranks = [ones(range(20), wrapper=None) for _ in range(2)]
    assert finding(tmp_path, ranks, "DDP101", mesh=(("tp", 2),)).outcome is Outcome.NOT_APPLICABLE


def test_mesh_of_other_size_is_named(tmp_path: Path) -> None:
    found = finding(tmp_path, [ones(range(20)) for _ in range(2)], "DDP101", mesh=(("dp", 2), ("tp", 2)))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "--mesh" in (found.why_inconclusive or "")


def test_parameters_of_other_shapes_ask_for_mesh(tmp_path: Path) -> None:
    ranks = [ones(range(20), wrapper=None, layout=rank) for rank in range(2)]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "--mesh" in (found.why_inconclusive or "")


def by_hand(starts: Sequence[int]) -> list[Rank]:
    """Ranks without wrapper that talk, each with parameters and gradients of its own, reading from ``starts[rank]``."""
    return [
        ones(
            range(start, start + 20),
            wrapper=None,
            initial=rank,
            num_other_collectives=40,
            grads=lambda step, rank=rank: 100 * (rank + 1) + step,
            params=lambda step, rank=rank: 1000 * (rank + 1) + step,
        )
        for rank, start in enumerate(starts)
    ]


def test_model_split_by_hand_asks_for_mesh(tmp_path: Path) -> None:
    """No wrapper, equal data, unequal parameters, collectives of its own: a hand-made tensor-parallel model."""
    audit = judge(evidence(tmp_path, by_hand([0, 0])), created=0.0)
    assert {item.id for item in audit.checks if item.outcome is Outcome.FAIL} == set(), "DDP207 included"
    found = next(item for item in audit.checks if item.id == "DDP101")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "--mesh" in (found.why_inconclusive or "")


def test_copies_of_a_model_split_by_hand_ask_for_mesh(tmp_path: Path) -> None:
    """Two parts, two copies: only the parts of one copy read alike."""
    found = finding(tmp_path, by_hand([0, 0, 500, 500]), "DDP101")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "--mesh" in (found.why_inconclusive or "")


def test_equal_gradients_are_copies_and_not_parts(tmp_path: Path) -> None:
    """Averaged by hand and never broadcast: the ranks are replicas, so equal data are a fault."""
    ranks = [replace(rank, grads=lambda step: 100 + step) for rank in by_hand([0, 0])]
    assert finding(tmp_path, ranks, "DDP101").outcome is Outcome.FAIL


WORLD_OF_ONE = sampler(1000, 0, 1)


@pytest.mark.parametrize(
    ("fields", "cause", "fix"),
    [
        ({"rng": (1, 2, 3)}, "RandomSampler does not know the ranks, and equal seeds", "in place of RandomSampler"),
        ({"samplers": (BATCHED, WORLD_OF_ONE)}, "believes the world is 1 rank", "num_replicas=2"),
        (
            {"family": "nodes", "class_names": ("EpisodeLoader", "BaseNode")},
            "EpisodeLoader with RandomSampler inside is no torch DataLoader",
            "give EpisodeLoader a sampler",
        ),
        (
            {"dataset_iterable": True, "index": False, "dataset_class": "Stream", "samplers": ()},
            "Stream is an iterable data set that is not split by rank",
            "Stream.__iter__",
        ),
        (
            {"samplers": (SamplerInfo(class_name="BucketBatches"),), "class_names": ("Buckets", "DataLoader")},
            "BucketBatches does not know the ranks",
            "give BucketBatches the rank and the world size",
        ),
        ({"samplers": (BATCHED, sampler(1000, 0, 2))}, "was given rank 0 on every rank", "get_rank()"),
    ],
)
def test_causes_use_the_users_names(tmp_path: Path, fields: dict[str, object], cause: str, fix: str) -> None:
    ranks = [replace(ones(range(20)), **fields) for _ in range(2)]
    found = finding(tmp_path, ranks, "DDP101")
    assert found.outcome is Outcome.FAIL
    assert cause in (found.cause or "")
    assert fix in (found.fix or "")


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(60, 200), st.integers(1, 4))
def test_a_distributed_sampler_never_alarms(world: int, length: int, size: int) -> None:
    with TemporaryDirectory() as folder:
        found = finding(Path(folder), sharded(length, world, 2, size), "DDP101")
    assert found.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)


def test_digest_of_the_builder_is_never_zero() -> None:
    assert all(digest([int(k)]) for k in np.arange(50))
