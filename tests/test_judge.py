"""The judge: the measure, the verdict, core questions, cause before consequence."""

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
    Rank,
    batches_of,
    evidence,
    permutation,
    sharded,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_audit.checks import ALL_CHECKS
from ddp_audit.checks.streams import View
from ddp_audit.judge import judge
from ddp_audit.records import (
    Audit,
    CheckInfo,
    Finding,
    MeshInfo,
    Outcome,
    SamplerInfo,
    Severity,
    Verdict,
)

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


def test_same_batches_are_exactly_half(tmp_path: Path) -> None:
    """Whatever unequal steps share by chance, at the border of two epochs: equal batches lose exactly half."""
    epochs = [batches_of(permutation(160, epoch), 8) for epoch in range(3)]
    ranks = [Rank(epochs=epochs, samplers=(BATCHED, RANDOM), dataset_length=160) for _ in range(2)]
    share = View(evidence(tmp_path, ranks)).groups[0].step_share
    assert share is not None
    assert share.chance > 0
    assert share.fraction == 0.5
    assert audit_of(tmp_path / "again", ranks).distinct_fraction_epoch == 0.5


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


# --------------------------------------------------------------------------- verdict and robustness


class Raising:
    """A check with a bug."""

    CHECK: CheckInfo = replace(ALL_CHECKS[0].CHECK, id="DDP999", kind="mine")

    def run(self, view: View) -> Finding:
        raise RuntimeError("bug")


class Mine(Raising):
    """A user's own check."""

    def run(self, view: View) -> Finding:
        return Finding(
            id="DDP999", kind="mine", outcome=Outcome.FAIL, severity=Severity.NOTE, message=f"{len(view.ranks)} ranks"
        )


def test_a_check_that_raises_costs_its_own_answer(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, sharded()), checks=(*ALL_CHECKS, Raising()), created=0.0)
    assert audit.checks[-1].outcome is Outcome.ERROR
    assert "RuntimeError: bug" in audit.checks[-1].message
    assert audit.verdict is Verdict.PASS


def test_a_check_of_the_users_own_and_notes(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, sharded()), checks=(*ALL_CHECKS, Mine()), created=0.0)
    assert audit.checks[-1].message == "2 ranks"
    assert audit.verdict is Verdict.PASS  # notes never change it


@pytest.mark.parametrize(("required", "verdict"), [("DDP106", Verdict.INCONCLUSIVE), ("DDP101", Verdict.PASS)])
def test_required_checks_are_core(tmp_path: Path, required: str, verdict: Verdict) -> None:
    audit = audit_of(tmp_path, sharded(num_epochs=1), require=(required,))
    assert audit.verdict is verdict
    assert len(audit.core_unanswered) == (verdict is Verdict.INCONCLUSIVE)


def test_required_check_that_does_not_exist(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, sharded(), require=("DDP998",))
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert "DDP998" in audit.core_unanswered[0]


def test_few_steps_are_no_pass(tmp_path: Path) -> None:
    ranks = [replace(r, epochs=[r.epochs[0][:7]]) for r in sharded()]
    audit = audit_of(tmp_path, ranks)
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert audit.core_unanswered[0].startswith("Do replicas read different samples?")


def test_gradients_unseen_are_no_pass(tmp_path: Path) -> None:
    ranks = [replace(r, wrapper=None, grads=lambda _: 0) for r in sharded()]
    audit = audit_of(tmp_path, ranks)
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert any(question.startswith("Are gradients shared?") for question in audit.core_unanswered)


def test_one_rank_alone_passes(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, [Rank(epochs=[batches_of(range(80), 8)], wrapper=None, group=False)])
    assert audit.verdict is Verdict.PASS
    assert audit.effective_gpus == 1.0


def test_words_of_the_check_come_along(tmp_path: Path) -> None:
    for item in audit_of(tmp_path, same_batches()).checks:
        assert item.title
        assert item.why
        assert item.needs
        assert item.message[0].isupper() or item.message[0].isdigit()
        assert item.message.endswith(".")
        assert "!" not in item.message
        assert (item.outcome is Outcome.INCONCLUSIVE) == bool(item.why_inconclusive)
        if item.outcome is Outcome.FAIL:
            assert item.cause
            assert item.fix
            assert item.measured is not None
            assert item.unit


def test_sub_groups_are_compared_inside(tmp_path: Path) -> None:
    """Two DDP groups that read alike on purpose, for instance two models of an ensemble."""
    data = sharded(160, 2, 2)
    ranks = [replace(data[k % 2], group_ranks=(0, 1) if k < 2 else (2, 3)) for k in range(4)]
    audit = audit_of(tmp_path, ranks)
    assert [group.replicas for group in audit.groups] == [((0,), (1,)), ((2,), (3,))]
    assert audit.effective_gpus == 4.0
    assert not failed(audit)


def test_the_worst_group_counts(tmp_path: Path) -> None:
    alike = same_batches()
    ranks = [replace(r, group_ranks=(0, 1)) for r in sharded(80)] + [replace(r, group_ranks=(2, 3)) for r in alike]
    audit = audit_of(tmp_path, ranks)
    assert audit.effective_gpus == 2.0
    assert next(item for item in audit.checks if item.id == "DDP101").ranks == (2, 3)


def test_accumulated_batches_belong_to_their_step(tmp_path: Path) -> None:
    ranks = [replace(r, accumulate=2) for r in sharded(320, 2, 2)]
    audit = audit_of(tmp_path, ranks)
    assert audit.num_steps == 20
    assert audit.effective_gpus == 2.0
    assert not failed(audit)


def test_series_show_who_read_the_same(tmp_path: Path) -> None:
    ranks = [same_batches()[0], sharded(80, 2, 2)[1], same_batches()[1]]
    series = audit_of(tmp_path, ranks).series
    assert series.heat_ranks == (0, 1, 2)
    assert set(series.heat[0]) == {0}
    assert set(series.heat[1]) == {1, -1}  # it took half as many steps
    assert series.heat[2][:10] == (0,) * 10
    assert series.overlap[0][0] == 1.0
    assert series.overlap[0][2] == 1.0
    assert series.shard_label == "samples in the first finished epoch"
    assert series.shards == (80, 40, 80)


def test_series_are_bounded(tmp_path: Path) -> None:
    ranks = sharded(66 * 240, 66, 1, 1, content=False)
    audit = audit_of(tmp_path, ranks)
    assert len(audit.series.heat) == 64
    assert {len(row) for row in audit.series.heat} == {200}
    assert len(audit.series.overlap) == 16
    assert len(audit.series.shards) == 64
    assert audit.effective_gpus == 66.0


def test_rank_tables(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, sharded(160, 2, 3))
    row = audit.ranks[1]
    assert (row.rank, row.num_steps, row.num_epochs, row.shard_length, row.num_samples) == (1, 30, 3, 80, 240)
    assert row.ended
    assert row.data_share == pytest.approx(0.1, abs=0.02)
    assert audit.overhead.mean_us_per_step == pytest.approx(40)
    assert audit.overhead.journal_bytes > 0
    assert audit.samplers[-1].class_name == "DistributedSampler"
    assert audit.loaders[0].dataset_length == 160
    assert audit.provenance.evidence_sha256
    assert audit.provenance.backend == "gloo"


@pytest.mark.parametrize(("num_steps", "expected"), [(1, None), (20, 950.0 / 19), (65, 20.0)])
def test_cost_per_step_leaves_out_what_is_taken_on_purpose(
    tmp_path: Path, num_steps: int, expected: float | None
) -> None:
    """1 ms of start-up, then 50 µs; from step 32 on 20 µs."""
    ranks = sharded(num_steps * 16, 2, 1)
    merged = evidence(tmp_path, ranks)
    steps = np.array(merged.steps)
    steps["probe_us"] = np.where(steps["step"] == 0, 1000, np.where(steps["step"] < 32, 50, 20))
    found = judge(replace(merged, steps=steps), created=0.0).overhead.mean_us_per_step
    assert found == (None if expected is None else pytest.approx(expected))


def test_cost_is_that_of_all_optimizers_of_a_step(tmp_path: Path) -> None:
    merged = evidence(tmp_path, sharded(160, 1, 1))
    twice = np.repeat(np.array(merged.steps), 2)
    twice["optimizer"][1::2] = 1
    keys = np.repeat(np.array(merged.steps_key), 2, axis=0)
    assert judge(replace(merged, steps=twice, steps_key=keys), created=0.0).overhead.mean_us_per_step == 80


def test_a_rank_without_an_end_is_a_note(tmp_path: Path) -> None:
    ranks = sharded(160, 2, 2)
    audit = audit_of(tmp_path, [ranks[0], replace(ranks[1], ended=False, pid=2**22 + 1)])
    assert audit.provenance.notes == ("rank 1 did not end normally",)
    assert audit.verdict is Verdict.PASS
    running = replace(evidence(tmp_path / "b", [ranks[0], replace(ranks[1], ended=False)]), running=True)
    assert judge(running, created=0.0).provenance.notes == ()


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_numbering_of_ranks_does_not_matter(order: list[int]) -> None:
    data = [*same_batches(), *sharded(80, 2, 2)]
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        straight = audit_of(Path(one), data)
        turned = audit_of(Path(other), [data[k] for k in order])
    assert turned.effective_gpus == pytest.approx(straight.effective_gpus)
    assert outcomes(turned) == outcomes(straight)
    assert turned.verdict is straight.verdict


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 50))
def test_names_of_samples_do_not_matter(step: int) -> None:
    """Multiplying all indices changes neither the measure nor any outcome."""
    data = own_permutation()
    renamed = [
        replace(r, epochs=[[[k * step for k in b] for b in e] for e in r.epochs], dataset_length=None) for r in data
    ]
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        straight = audit_of(Path(one), [replace(r, dataset_length=None) for r in data])
        turned = audit_of(Path(other), renamed)
    assert turned.effective_gpus == straight.effective_gpus
    assert outcomes(turned) == outcomes(straight)


def test_a_low_measure_without_a_finding_is_no_pass(tmp_path: Path) -> None:
    """Whatever the checks miss, "2 GPUs do the work of 1.0" never stands beside a pass."""
    seen = evidence(tmp_path, same_batches())
    quiet = [check for check in ALL_CHECKS if check.CHECK.id >= "DDP200"]
    audit = judge(seen, checks=quiet, created=0.0)
    assert audit.effective_gpus == pytest.approx(1.0)
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert any("distinct" in question for question in audit.core_unanswered)
