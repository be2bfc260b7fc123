"""Law 2: whatever breaks in the probe, the job ends as it would have, in time, and the report says so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run_job

from ddp_audit.hooks.guard import HOOKS

pytestmark = pytest.mark.distributed

JOB = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
mode = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 4), torch.randn(160, 1))
sampler = DistributedSampler(data)
def train(epochs):
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("loss", nn.functional.mse_loss(model(x), y).item())
train(2)
if mode == "reinit":
    dist.barrier()
    dist.destroy_process_group()
    # Under torchrun a second env:// rendezvous finds the first one's keys and hangs, with or without a probe.
    again = {"rank": int(os.environ["RANK"]), "world_size": 2, "init_method": f"file://{os.getcwd()}/again"}
    dist.init_process_group("gloo", **again)
    train(2)
if mode == "hard-exit" and dist.get_rank() == 1:
    import os
    sys.stdout.flush()
    os._exit(0)
if mode == "fill":
    import time
    time.sleep(1)
    train(3)
if mode != "hard-exit":
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "hook", [pytest.param(h, marks=[] if i % 4 == 0 else pytest.mark.slow) for i, h in enumerate(sorted(HOOKS))]
)
def test_a_hook_that_raises_is_swallowed_and_named(tmp_path: Path, hook: str) -> None:
    run = run_job(JOB, cwd=tmp_path, env={"_DDP_AUDIT_BREAK": hook})
    assert run.code == 0, run.log[-3000:]
    assert run.stdout.count("loss") == 2
    assert "Traceback" not in run.log
    audit = run.audit
    assert not [check for check in audit["checks"] if check["outcome"] == "fail"], audit["headline"]
    states = {state["hook"] for state in audit["provenance"]["hook_states"]}
    used = {"dataloader", "optimizer", "forward", "backward", "group", "wrappers"}
    assert hook in states or hook not in used, states


def test_a_rank_that_never_reaches_the_collector(tmp_path: Path) -> None:
    run = run_job(JOB, "hard-exit", cwd=tmp_path, options=["--collector", "gloo", "--deadline", "4"])
    plain = run_job(JOB, "hard-exit", cwd=tmp_path / "plain", probe=False)
    assert run.code == plain.code
    assert run.audit["ranks_seen"] == 2
    assert run.seconds < plain.seconds + 4 + 15


def test_the_group_is_destroyed_and_made_again(tmp_path: Path) -> None:
    run = run_job(JOB, "reinit", cwd=tmp_path)
    assert run.code == 0, run.log[-3000:]
    assert run.failed == set(), run.audit["headline"]
    assert len(run.audit["attempts"]) == 2
    assert [attempt["judged"] for attempt in run.audit["attempts"]] == [False, True]


def test_a_store_that_dies(tmp_path: Path) -> None:
    """The store lives in rank 0, which ends first; nobody hangs and nothing is printed about it."""
    script = JOB.replace(
        'if mode != "hard-exit":\n    dist.barrier()\ndist.destroy_process_group()',
        """
import time
if dist.get_rank() == 0:
    print("first rank done", flush=True)
else:
    time.sleep(3)
""",
    )
    launcher = [
        "sh",
        "-c",
        "for r in 1 0; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT"
        " {python} {script} & done; wait",
    ]
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = run_job(script, cwd=tmp_path, launcher=launcher, env={"PORT": port}, options=["--deadline", "4"])
    assert run.code == 0, run.log[-3000:]
    assert run.audit["ranks_seen"] == 2
    assert "recvValue" not in run.stderr
    assert "Connection reset" not in run.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a tmpfs: sudo -E make test")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)], check=False)
    if made.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    run = run_job(JOB, cwd=tmp_path, out=small_disk / "audit")
    assert run.code == 0, run.log[-3000:]
    assert run.stdout.count("loss") == 2
    assert "Traceback" not in run.log


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, small_disk: Path) -> None:
    script = JOB.replace(
        "    time.sleep(1)\n",
        """    time.sleep(1)
    if dist.get_rank() == 0:
        try:
            with open(sys.argv[2], "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        except OSError:
            pass
    dist.barrier()
""",
    )
    run = run_job(script, "fill", str(small_disk / "filler"), cwd=tmp_path, out=small_disk / "audit")
    assert run.code == 0, run.log[-3000:]
    assert run.stdout.count("loss") == 4
    assert "Traceback" not in run.log
    assert "No space left" in run.log or "disk" in run.log


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the folder should be: root may write everywhere else."""
    (tmp_path / "taken").write_text("mine")
    run = run_job(JOB, cwd=tmp_path, out=tmp_path / "taken" / "audit")
    assert run.code == 0, run.log[-3000:]
    assert run.stdout.count("loss") == 2
    ours = [line for line in run.stderr.splitlines() if line.startswith("ddp-audit")]
    assert len(ours) == 1, ours
    assert (tmp_path / "taken").read_text() == "mine"


def test_journals_survive_a_killed_rank(tmp_path: Path) -> None:
    script = JOB.replace(
        "            optimizer.step()\n",
        """            optimizer.step()
            steps = globals().get("steps", 0) + 1
            globals()["steps"] = steps
            if steps == 15 and dist.get_rank() == 1:
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    begun = time.monotonic()
    run = run_job(script, cwd=tmp_path)
    assert run.code != 0
    assert time.monotonic() - begun < 120
    audit = run.audit
    assert audit["ranks_seen"] == 2
    assert min(rank["num_steps"] for rank in audit["ranks"]) >= 15 if "ranks" in audit else True
    assert json.dumps(audit).count("Traceback") == 0
