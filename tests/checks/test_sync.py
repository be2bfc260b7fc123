"""DDP201, DDP202, DDP203, DDP206 and DDP207: are gradients shared, and do replicas stay equal?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from evidence_builder import Rank, evidence, finding, sharded

from ddp_audit.judge import judge
from ddp_audit.records import MeshInfo, Outcome, Severity


def own(rank: int, base: int = 0) -> Callable[[int], int]:
    """Digests that differ between ranks at every step."""
    return lambda step: 10_000 * (rank + 1) + step + base


def apart(**fields: object) -> list[Rank]:
    """No wrapper, nothing shared."""
    return [
        replace(r, wrapper=None, grads=own(k), params=own(k, 500), **fields) for k, r in enumerate(sharded(160, 2, 2))
    ]


def failed(folder: Path, ranks: list[Rank]) -> dict[str, str | None]:
    """Failed ids and what they are caused by."""
    audit = judge(evidence(folder, ranks), created=0.0)
    return {item.id: item.caused_by for item in audit.checks if item.outcome is Outcome.FAIL}


# --------------------------------------------------------------------------- DDP201


def test_processes_that_never_meet(tmp_path: Path) -> None:
    ranks = [replace(r, group=False) for r in apart()]
    found = finding(tmp_path, ranks, "DDP201")
    assert found.outcome is Outcome.FAIL
    assert found.message == (
        "Ranks 0 and 1 took optimizer steps and never made a process group; 2 ranks were launched."
    )
    assert failed(tmp_path / "all", ranks)["DDP207"] == "DDP201"


def test_two_equal_copies_are_a_consequence(tmp_path: Path) -> None:
    first = replace(apart()[0], group=False)
    found = failed(tmp_path, [first, first])
    assert found["DDP201"] is None
    assert found["DDP101"] == "DDP201"


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(sharded(), Outcome.PASS, id="group"),
        pytest.param([Rank(group=False, wrapper=None)] * 2, Outcome.NOT_APPLICABLE, id="no-step"),
        pytest.param([Rank(group=False, wrapper=None, steps=20)], Outcome.NOT_APPLICABLE, id="one-rank"),
        pytest.param(
            [Rank(group=False, wrapper=None, steps=20, other_frameworks=("horovod",))] * 2,
            Outcome.INCONCLUSIVE,
            id="horovod",
        ),
    ],
)
def test_group(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP201").outcome is outcome


def test_launched_for_two_but_each_believes_to_be_alone(tmp_path: Path) -> None:
    found = finding(tmp_path, [Rank(group=False, wrapper=None, steps=20)], "DDP201", launcher_ranks=2)
    assert found.outcome is Outcome.FAIL


# --------------------------------------------------------------------------- DDP202


def test_nothing_reduces(tmp_path: Path) -> None:
    found = finding(tmp_path, apart(), "DDP202")
    assert found.outcome is Outcome.FAIL
    assert found.measured == 1.0
    assert "20 of 20 steps" in found.message
    assert failed(tmp_path / "all", apart()) == {"DDP202": None, "DDP207": "DDP202"}


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param([replace(r, wrapper=None) for r in sharded()], Outcome.PASS, id="averaged-by-hand"),
        pytest.param(sharded(), Outcome.NOT_APPLICABLE, id="wrapped"),
        pytest.param(apart(final=9), Outcome.INCONCLUSIVE, id="meet-at-the-end"),
        pytest.param(apart(optimizer_class="PostLocalSGDOptimizer"), Outcome.INCONCLUSIVE, id="local-sgd"),
        pytest.param(apart(other_frameworks=("deepspeed",)), Outcome.INCONCLUSIVE, id="deepspeed"),
        pytest.param(apart(single_grads=lambda step: (1, 2, 3, step)), Outcome.INCONCLUSIVE, id="parts-are-shared"),
        pytest.param(
            [replace(r, layout=k) for k, r in enumerate(apart())], Outcome.INCONCLUSIVE, id="pipeline-by-hand"
        ),
        pytest.param([replace(r, grads=lambda _: 0) for r in apart()], Outcome.INCONCLUSIVE, id="no-digests"),
        pytest.param(
            [replace(r, grads=lambda s, k=k: 7 if s == 12 else own(k)(s)) for k, r in enumerate(apart())],
            Outcome.PASS,
            id="equal-once",
        ),
    ],
)
def test_reduction(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP202").outcome is outcome


def test_tensor_parallel_parts_have_gradients_of_their_own(tmp_path: Path) -> None:
    mesh = MeshInfo(shape=(2,), dim_names=("tp",), ranks=(0, 1))
    ranks = [replace(r, model_mesh=mesh, model_dims=(0,), num_dtensors=4, initial=k) for k, r in enumerate(apart())]
    assert failed(tmp_path, ranks) == {}


# --------------------------------------------------------------------------- DDP203


def test_loss_around_the_wrapper(tmp_path: Path) -> None:
    ranks = [replace(r, wrapper="ddp", forwards_per_step=0) for r in apart()]
    found = finding(tmp_path, ranks, "DDP203")
    assert found.outcome is Outcome.FAIL
    assert "20 of 20 steps of ranks 0 and 1 follow no forward of DistributedDataParallel" in found.message
    assert found.location is not None
    assert failed(tmp_path / "all", ranks) == {"DDP203": None, "DDP207": "DDP203"}


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(sharded(), Outcome.PASS, id="through-the-wrapper"),
        pytest.param(sharded(forwards_per_step=0), Outcome.PASS, id="reduced-by-hand"),
        pytest.param(
            [replace(r, grads=own(k)) for k, r in enumerate(sharded())], Outcome.PASS, id="no-sync-on-the-last"
        ),
        pytest.param(sharded(forwards_per_step=0, grads=lambda _: 0), Outcome.INCONCLUSIVE, id="no-digests"),
        pytest.param(apart(), Outcome.NOT_APPLICABLE, id="no-wrapper"),
    ],
)
def test_bypass(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP203").outcome is outcome


# --------------------------------------------------------------------------- DDP206 and DDP207


def by_hand(**fields: object) -> list[Rank]:
    """Gradients averaged by hand, parameters never broadcast."""
    return [
        replace(r, wrapper=None, initial=k, params=own(k), num_other_collectives=40, **fields)
        for k, r in enumerate(sharded())
    ]


def test_parameters_never_broadcast(tmp_path: Path) -> None:
    found = finding(tmp_path, by_hand(), "DDP206")
    assert found.outcome is Outcome.FAIL
    assert "equal at 30 of 30 steps" in found.message
    assert failed(tmp_path / "all", by_hand()) == {"DDP206": None, "DDP207": "DDP206"}


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(sharded(), Outcome.PASS, id="broadcast-by-the-wrapper"),
        pytest.param(apart(), Outcome.PASS, id="equal-seeds"),
        pytest.param(
            [replace(r, initial=k) for k, r in enumerate(apart())], Outcome.NOT_APPLICABLE, id="nothing-is-shared"
        ),
        pytest.param(by_hand(grads=lambda _: 0), Outcome.INCONCLUSIVE, id="no-gradients"),
        pytest.param(
            [replace(r, initial=k, num_dtensors=4, wrapper="fsdp2") for k, r in enumerate(sharded())],
            Outcome.NOT_APPLICABLE,
            id="fully-sharded",
        ),
    ],
)
def test_initial(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP206").outcome is outcome


def test_first_step_at_which_they_part(tmp_path: Path) -> None:
    ranks = [
        replace(r, params=lambda step, k=k: step + 1 if step < 12 else own(k)(step)) for k, r in enumerate(sharded())
    ]
    found = finding(tmp_path, ranks, "DDP207")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.WARNING
    assert found.steps == (12,)
    assert "first after step 12" in found.message


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(sharded(), Outcome.PASS, id="equal"),
        pytest.param([replace(r, params=own(k), final=4) for k, r in enumerate(sharded())], Outcome.PASS, id="meet"),
        pytest.param(
            [replace(r, params=own(k), wrapper="fsdp1") for k, r in enumerate(sharded())],
            Outcome.NOT_APPLICABLE,
            id="sharded",
        ),
        pytest.param(sharded(params=lambda _: 0), Outcome.INCONCLUSIVE, id="no-digests"),
    ],
)
def test_parameters(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP207").outcome is outcome
