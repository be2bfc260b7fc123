"""Each known job, broken and fixed, under the probe: the fault is found, and nothing is found without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import JobRun

JOBS = Path(__file__).resolve().parents[2] / "probes" / "jobs"
KNOWN = sorted(JOBS.glob("ddp[0-9]*.py"))
pytestmark = pytest.mark.distributed


def kind_of(path: Path) -> str:
    return path.stem.split("_", 1)[1].replace("_", "-")


def test_there_is_a_job_for_each_kind() -> None:
    from ddp_audit.checks import ALL_CHECKS

    assert {kind_of(path) for path in KNOWN} == {info.kind for info in (check.CHECK for check in ALL_CHECKS)}


def test_each_job_names_the_check_it_trips() -> None:
    for path in KNOWN:
        number = re.match(r"ddp(\d+)_", path.name)
        assert number is not None
        assert f"it trips DDP{number[1]} {kind_of(path)}." in path.read_text()


@pytest.mark.parametrize("path", KNOWN, ids=kind_of)
def test_broken_job_is_found(job: Callable[..., JobRun], path: Path) -> None:
    run = job(path, "--broken")
    assert run.code == 0, run.log
    assert kind_of(path) in run.failed
    causes = {c["kind"] for c in run.audit["checks"] if c["outcome"] == "fail" and not c["caused_by"]}
    assert kind_of(path) in causes, "it is shown as a consequence of something else"
    assert run.audit["ranks_seen"] == 2


@pytest.mark.parametrize("path", KNOWN, ids=kind_of)
def test_fixed_job_is_left_alone(job: Callable[..., JobRun], path: Path) -> None:
    run = job(path, "--fixed")
    assert run.code == 0, run.log
    assert run.failed == set()
    assert run.audit["verdict"] == "pass", run.audit["core_unanswered"]
    assert run.audit["effective_gpus"] >= 0.97 * 2
