"""Law 1: the training, its random streams, its exit code and its output are as without the probe."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import TEARDOWN_ABORT, clean_environment, run_job

JOB = Path(__file__).with_name("trained.py")
pytestmark = pytest.mark.distributed


def results(folder: Path) -> dict[str, Any]:
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))}
    assert len(found) == 2, sorted(found)
    return found


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [
        ("ddp", "torchrun"),
        ("ddp", "inside"),
        ("lightning", "python"),
        pytest.param("lightning", "torchrun", marks=pytest.mark.slow),
        pytest.param("accelerate", "torchrun", marks=pytest.mark.slow),
        pytest.param("trainer", "torchrun", marks=pytest.mark.slow),
    ],
)
def test_every_loss_weight_and_random_state_is_equal(tmp_path: Path, framework: str, launcher: str) -> None:
    found = {}
    for probe in (False, True):
        run = run_job(JOB, framework, cwd=tmp_path / str(probe), launcher=launcher, probe=probe, timeout=180)
        assert run.code == 0, run.log[-3000:]
        found[probe] = results(tmp_path / str(probe))
        if probe:
            assert run.audit["ranks_seen"] == 2
            assert run.failed == set(), run.audit["headline"]
    assert found[True] == found[False]
    assert len(found[True]["result-0.json"]["losses"]) >= 10


def scrub(text: str) -> list[str]:
    """Lines that a run prints, without our own, times, pids, ports, addresses and torch's log prefixes."""
    ours = re.compile(r"ddp-audit|DDP\d{3}|report:|probe cost|fix:")
    lines = [line for line in text.splitlines() if line.strip() and not ours.search(line)]
    return [re.sub(r"0x[0-9a-f]+|\d[\d:.,_-]*", "#", line) for line in lines]


@pytest.mark.parametrize("ending", ["ok", "code3", "raise", "sigterm", "sigkill"])
def test_exit_codes_under_torchrun(tmp_path: Path, ending: str) -> None:
    """Both forms of the probe against one run without it."""
    plain = run_job(JOB, "ddp", "--ending", ending, cwd=tmp_path / "plain", probe=False)
    for launcher in ("torchrun", "inside"):
        run = run_job(JOB, "ddp", "--ending", ending, cwd=tmp_path / launcher, launcher=launcher)
        assert run.code == plain.code, run.log[-3000:]
        if ending == "ok":
            assert [line for line in scrub(run.stderr) if line not in scrub(plain.stderr)] == []


@pytest.mark.parametrize("ending", ["ok", "code3", "raise", "sigterm", "sigkill"])
def test_exit_codes_of_plain_processes(tmp_path: Path, ending: str) -> None:
    codes = {}
    for probe in (False, True):
        for _ in range(3):
            codes[probe], log = two_processes(tmp_path / str(probe), ending, probe)
            if TEARDOWN_ABORT not in log:
                break
    assert codes[True] == codes[False]
    expected = {"ok": 0, "code3": 3, "raise": 1, "sigterm": -signal.SIGTERM, "sigkill": -signal.SIGKILL}[ending]
    assert codes[True][1] == expected


def two_processes(folder: Path, ending: str, probe: bool) -> tuple[list[int], str]:
    """The job as two processes that a user started by hand, each with its rank in the environment."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable]
    if probe:
        command += ["-m", "ddp_audit", "probe", "--out", str(folder / "audit"), "--deadline", "5"]
    ranks = [
        subprocess.Popen(
            [*command, str(JOB), "ddp", "--ending", ending, "--folder", str(folder)],
            env=clean_environment(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            ),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    log = ""
    for process in ranks:
        out, err = process.communicate(timeout=120)
        log += out + err
    if probe:
        assert os.listdir(folder / "audit" / "journal"), log[-2000:]
    return [process.returncode for process in ranks], log
