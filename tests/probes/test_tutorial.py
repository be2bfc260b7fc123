"""The tutorial job: sound by default, and each of its faults is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import JobRun, clean_environment, torchrun

SCRIPT = Path(__file__).resolve().parents[2] / "probes" / "jobs" / "tutorial_ddp.py"
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("launcher", ["torchrun", "inside"])
def test_sound(job: Callable[..., JobRun], launcher: str) -> None:
    run = job(SCRIPT, launcher=launcher)
    assert run.code == 0, run.log
    assert (run.audit["verdict"], run.failed) == ("pass", set())
    assert run.audit["effective_gpus"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("fault", "kind"), [("no-sampler", "identical-data-across-ranks"), ("no-set-epoch", "set-epoch-missing")]
)
def test_broken(job: Callable[..., JobRun], fault: str, kind: str) -> None:
    run = job(SCRIPT, "--broken", fault)
    assert run.code == 0, run.log
    assert kind in run.failed


def test_device_fault_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    words = [*torchrun(1), str(SCRIPT), "--broken", "global-rank-device"]

    done = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment({"CUDA_VISIBLE_DEVICES": ""}),
    )
    assert done.returncode != 0
    assert "needs a GPU" in done.stderr


def test_same_loss_with_and_without_the_probe(job: Callable[..., JobRun], tmp_path: Path) -> None:
    lines = [
        [
            line
            for line in job(SCRIPT, probe=probe, cwd=tmp_path / str(probe)).stdout.splitlines()
            if "mean loss" in line
        ]
        for probe in (False, True)
    ]
    assert lines[0]
    assert lines[0] == lines[1]


def test_help_without_a_launcher() -> None:

    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "no-set-epoch" in done.stdout
