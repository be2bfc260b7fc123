"""The watcher shows the verdict whatever becomes of rank 0."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from launching import PROBE, environment, run

JOB = """
    import os, signal, sys, time
    from ddp_audit import journal, settings
    from ddp_audit.boot import watch

    options = settings.from_environment()
    writer = journal.JournalWriter(options.journal_folder, journal.file_name(0, 0, os.getpid(), "ab"))
    watch.start_watcher(options)
    watch.start_watcher(options)
    try:
        print("child", os.waitpid(-1, os.WNOHANG), flush=True)
    except ChildProcessError:
        print("no child", flush=True)
    time.sleep(0.5)
    END
"""
LEAVE = "watch.await_verdict(options); print('left', os.listdir(options.out).count('audit.json'), flush=True)"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(LEAVE, 0, id="in-order"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, id="SIGTERM"),
        pytest.param("os._exit(5)", 5, id="_exit"),
    ],
)
def test_one_verdict(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB).replace("END", end))
    env = environment(RANK="0", WORLD_SIZE="1")
    start = time.monotonic()
    done = run((*PROBE, "--out", "o", "job.py"), tmp_path, env)  # returns once the watcher let go of stdout
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("no child\n")
    assert time.monotonic() - start < 15
    marks = [n for n in os.listdir(tmp_path / "o") if n.startswith((".verdict", ".leaving", ".watcher"))]
    assert marks == []
    assert [n for n in os.listdir(tmp_path / "o") if n.startswith(".ended")]
    assert json.loads((tmp_path / "o" / "run.json").read_text())["form"] == "rank"
    if end == LEAVE and (tmp_path / "o" / "audit.json").exists():
        assert "left 1" in done.stdout
        assert done.stdout.index("0 of 1 rank") < done.stdout.index("left")


def test_a_watcher_that_cannot_start_holds_nobody_up(tmp_path: Path) -> None:
    """Neither its absence nor a wait for it goes beyond the deadline."""
    code = JOB.replace("watch.start_watcher(options)\n", "watch.started_in = os.getpid()\n", 1)
    (tmp_path / "job.py").write_text(textwrap.dedent(code).replace("END", "watch.await_verdict(options)"))
    start = time.monotonic()
    done = run((*PROBE, "--deadline", "1", "job.py"), tmp_path, environment(RANK="0", WORLD_SIZE="1"))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 6


def test_restarts_end_in_one_verdict(tmp_path: Path) -> None:
    """The first attempt fails by an exception, the launcher starts a second: one verdict, after it."""
    end = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('first')\n    " + LEAVE
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB.replace("END", end)))
    probe = " ".join([*PROBE[:-2], "--deadline", "5", "--out", "o", "job.py"])
    (tmp_path / "agent.sh").write_text(
        f"export TORCHELASTIC_RUN_ID=x LOCAL_WORLD_SIZE=1 TORCHELASTIC_MAX_RESTARTS=1\n"
        f"TORCHELASTIC_RESTART_COUNT=0 {probe}\nsleep 1\nTORCHELASTIC_RESTART_COUNT=1 {probe}\n"
    )
    done = run(("sh", "agent.sh"), tmp_path, environment(RANK="0", WORLD_SIZE="1"))
    assert done.returncode == 0, done.stderr
    assert "ValueError: first" in done.stderr
    assert done.stdout.count("no child") == 2
    assert done.stdout.count("report: ") == 1, done.stdout
    assert len(list((tmp_path / "o" / "journal").glob("*.journal"))) == 2
