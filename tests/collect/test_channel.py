"""The channel between ranks, on real stores: folders, collectors, dead ranks, agreed stops."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_audit.collect.channel import identical_ranks

JOB = Path(__file__).with_name("channel_job.py")
pytestmark = pytest.mark.distributed


def start(
    root: Path, collector: str, mode: str, world: int = 2
) -> tuple[list[subprocess.CompletedProcess[str]], float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    begun = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(rank), str(world), str(port), str(root), collector, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world)
    ]
    done = []
    for process in ranks:
        out, err = process.communicate(timeout=90)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done, time.monotonic() - begun


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_every_collector_brings_the_same_bytes(tmp_path: Path) -> None:
    found = {}
    for collector in ("auto", "store", "gloo"):
        done, _ = start(tmp_path / collector, collector, "apart", world=3)
        assert [d.returncode for d in done] == [0, 0, 0], done[0].stderr + done[1].stderr
        found[collector] = digests(tmp_path / collector / "node0" / "journal")
    assert len(found["auto"]) == 6
    assert found["auto"] == found["store"] == found["gloo"]
    for rank in (1, 2):
        assert digests(tmp_path / "auto" / f"node{rank}" / "journal").items() <= found["auto"].items()


def test_a_folder_that_all_can_see_is_shared(tmp_path: Path) -> None:
    done, _ = start(tmp_path, "auto", "shared")
    assert [d.returncode for d in done] == [0, 0]
    assert len(digests(tmp_path / "shared" / "journal")) == 4


@pytest.mark.parametrize("collector", ["auto", "gloo"])
def test_a_dead_rank_costs_no_more_than_the_deadline(tmp_path: Path, collector: str) -> None:
    done, seconds = start(tmp_path, collector, "killed")
    assert done[0].returncode == 0, done[0].stderr
    assert done[1].returncode == -9
    assert [name for name in digests(tmp_path / "node0" / "journal") if name.startswith("rank00001")] == []
    assert seconds < 3.0 + 30  # the deadline, and generous time for the imports of torch


def test_a_late_rank_makes_all_take_the_same_branch(tmp_path: Path) -> None:
    done, _ = start(tmp_path, "gloo", "late")
    assert [d.returncode for d in done] == [0, 0], done[1].stderr
    assert "Traceback" not in done[0].stderr + done[1].stderr


def test_identical_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    done, _ = start(tmp_path, "auto", "abort-equal", world=3)
    assert [d.returncode for d in done] == [0, 0, 0], done[0].stderr
    stops = {line for d in done for line in d.stdout.splitlines() if line.startswith("stopped")}
    assert len(stops) == 1
    assert stops != {"stopped after 1500"}
    assert done[0].stderr.count("DDP101") == 1
    assert "DDP101" not in done[1].stderr


def test_different_ranks_are_never_stopped(tmp_path: Path) -> None:
    done, _ = start(tmp_path, "auto", "abort-different")
    assert {d.stdout.splitlines()[0] for d in done} == {"stopped after 1500"}
    assert "DDP101" not in done[0].stderr


@pytest.mark.parametrize(
    ("posts", "expected"),
    [
        pytest.param({0: ([0, 1], [*range(1, 21)]), 1: ([0, 1], [*range(1, 21)])}, (0, 1), id="equal"),
        pytest.param({0: ([0, 1], [*range(1, 21)]), 1: ([0, 1], [*range(2, 22)])}, (), id="different"),
        pytest.param({0: (None, [*range(1, 21)]), 1: (None, [*range(1, 21)])}, (), id="no-wrapper-known"),
        pytest.param({0: ([0], [*range(1, 21)]), 1: ([1], [*range(1, 21)])}, (), id="model-parallel-peers"),
        pytest.param({0: ([0, 1], [5] * 20), 1: ([0, 1], [5] * 20)}, (), id="constant-data"),
        pytest.param({0: ([0, 1], [0] * 20), 1: ([0, 1], [0] * 20)}, (), id="not-taken"),
    ],
)
def test_identical_ranks(posts: dict[int, tuple[list[int] | None, list[int]]], expected: tuple[int, ...]) -> None:
    assert identical_ranks(posts) == expected
