"""--steps and --abort-on: all ranks stop after the same step, and nothing of the job's end runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import JobRun, run_job

JOB = Path(__file__).with_name("stopping.py")
pytestmark = pytest.mark.distributed

MODES = [
    pytest.param("plain", "torchrun", id="plain"),
    pytest.param("two-optimizers", "torchrun", id="two-optimizers"),
    pytest.param("accumulate", "inside", id="accumulate-inside"),
    pytest.param("lightning", "python", id="lightning"),
    pytest.param("accelerate", "torchrun", id="accelerate", marks=pytest.mark.slow),
    pytest.param("trainer", "torchrun", id="trainer", marks=pytest.mark.slow),
]


def prepare(folder: Path) -> set[str]:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "best.pt").write_bytes(b"of an earlier run")
    return tree(folder)


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in (folder / "checkpoints").rglob("*") if p.is_file()}


def num_steps(run: JobRun) -> list[int]:
    """Optimizer steps of each rank. The step after which a rank leaves ends inside ``step`` and is not noted."""
    return [len((run.cwd / f"steps-{rank}.txt").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("mode", "launcher"), MODES)
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, mode: str, launcher: str) -> None:
    before = prepare(tmp_path)
    gate = [] if launcher == "inside" else ["--fail-on", "error"]
    run = run_job(JOB, mode, cwd=tmp_path, launcher=launcher, options=["--steps", "50", *gate], timeout=180)
    assert run.code == 0, run.log[-3000:]
    noted = num_steps(run)
    assert noted[0] == noted[1]
    assert noted[0] in (49, 50)
    assert tree(tmp_path) == before
    assert run.audit["ranks_seen"] == 2
    assert run.failed == set()


@pytest.mark.parametrize("mode", ["plain", "two-optimizers"])
def test_abort_on_error_stops_all_ranks_after_the_same_step(tmp_path: Path, mode: str) -> None:
    before = prepare(tmp_path)
    options = ["--abort-on", "error", "--fail-on", "error"]
    run = run_job(JOB, mode, "--broken", cwd=tmp_path, options=options, timeout=180)
    assert run.code == 1, run.log[-3000:]
    noted = num_steps(run)
    assert noted[0] == noted[1] < 2900
    assert tree(tmp_path) == before
    assert "identical-data-across-ranks" in run.failed


def test_a_healthy_job_is_not_aborted(tmp_path: Path) -> None:
    run = run_job(JOB, "plain", cwd=tmp_path, options=["--abort-on", "error", "--fail-on", "error"], timeout=240)
    assert run.code == 0, run.log[-3000:]
    assert (tmp_path / "checkpoints" / "final-0.pt").exists()


def test_hooks_that_never_loaded_are_no_pass(tmp_path: Path) -> None:
    launcher = ["{python}", "-I", "{script}"]
    run = run_job("import torch", cwd=tmp_path, launcher=launcher, options=["--steps", "50", "--fail-on", "error"])
    assert run.code == 3
    assert "-I" in run.log
