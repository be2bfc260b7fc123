"""What the supervisor does while the job runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import PROBE, environment, run

from ddp_audit.boot import supervise

STOPS = """
    import os, signal, sys, time
    from ddp_audit import journal, settings

    options = settings.from_environment()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            if rank == 1:
                LATE
            name = journal.file_name(rank, 0, os.getpid(), "ab")
            writer = journal.JournalWriter(options.journal_folder, name)
            if rank == 0:
                time.sleep(1)  # until the supervisor has seen both
                writer.event("stopped", {"step": 3})
                os._exit(0)
            time.sleep(40)
    print("ended by", [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], flush=True)
    sys.exit(9)
"""
QUICK = (
    "import sys; from ddp_audit.cli import probe, main; probe.STOP_GRACE = 1.0; probe.KILL_GRACE = 1.0; "
    "sys.exit(main.run(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    ("late", "by"),
    [("pass", "-15"), ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "-9")],
    ids=["hears SIGTERM", "hears nothing"],
)
def test_a_rank_that_does_not_stop_is_ended(tmp_path: Path, late: str, by: str) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(STOPS).replace("LATE", late))
    words = (sys.executable, "-c", QUICK, "probe", "--steps", "3", "--out", "o", sys.executable, "job.py")
    done = run(words, tmp_path)
    assert f"ended by [0, {by}]\n" in done.stdout
    assert done.returncode == 0, done.stderr  # the gate's code: the job's 9 comes of our ending a rank


TRAINS = """
    import os, sys, time, torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 2)), batch_size=4)
    for batch, in loader:
        model(batch).sum().backward()
        optimizer.step()
    limit = time.monotonic() + 90
    iter(loader)  # the first epoch is over
    while not os.path.exists("o/report.html") and time.monotonic() < limit:
        time.sleep(0.1)
    print("report", os.path.exists("o/report.html"), '"running": true' in open("o/audit.json").read(), flush=True)
"""


@pytest.mark.distributed
def test_a_report_after_the_first_epoch(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(TRAINS))
    done = run((*PROBE, "--out", "o", sys.executable, "job.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("report True True\n"), done.stderr
    assert '"running": false' in (tmp_path / "o" / "audit.json").read_text()


def test_a_probe_inside_a_probe_stands_aside(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os; print(os.environ['_DDP_AUDIT_OUT'])\n")
    done = run((*PROBE, "--out", "o", "--", *PROBE, "--out", "inner", "job.py"), tmp_path)
    assert done.stdout.startswith(f"{tmp_path / 'o'}\n")
    assert not (tmp_path / "inner").exists()


def test_no_zombie_and_no_helper_is_left(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os; print(os.getppid(), flush=True)\n")
    with subprocess.Popen(
        (*PROBE, "job.py"), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.stdout.read()
        process.wait(timeout=30)
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True, check=False)
    assert listed.stdout.split() == []
    assert not supervise.alive(process.pid)
