"""Laws 4 and 6: no samples, arguments, environment values or names are kept, and nothing leaves the machine."""

from __future__ import annotations

import getpass
import socket
import stat
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.distributed

JOB = """
import argparse, sys
connects = []
sys.addaudithook(lambda event, args: connects.append(args[1]) if event == "socket.connect" else None)
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
parser = argparse.ArgumentParser()
parser.add_argument("--token")
args = parser.parse_args()
class Letters(Dataset):
    def __init__(self):
        self.rows = [f"dear-SECRETROW{i:04d}-yours" for i in range(160)]
    def __len__(self):
        return 160
    def __getitem__(self, i):
        return {"text": self.rows[i], "x": torch.full((4,), 31337.25 + i)}
dist.init_process_group("gloo")
torch.manual_seed(0)
sampler = DistributedSampler(Letters())
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
for batch in DataLoader(Letters(), batch_size=8, sampler=sampler):
    optimizer.zero_grad()
    model(batch["x"]).mean().backward()
    optimizer.step()
dist.barrier()
for address in connects:
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        import socket
        local = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        assert address[0] in local | {socket.gethostname()}, address
dist.destroy_process_group()
"""


def test_nothing_private_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "SECRETFOLDER"
    run = run_job(JOB, "--token", "SECRETARGUMENT", cwd=folder, env={"API_KEY": "SECRETVALUE", "USER": "SECRETUSER"})
    assert run.code == 0, run.log[-3000:]
    assert run.audit["verdict"] == "pass", run.audit["headline"]
    secrets = [b"SECRETROW", b"SECRETARGUMENT", b"SECRETVALUE", b"SECRETUSER", b"31337"]
    reports = [*secrets, b"SECRETFOLDER", socket.gethostname().encode(), str(Path.home()).encode()]
    if getpass.getuser() != "root":
        reports.append(getpass.getuser().encode())
    files = [path for path in run.out.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        data = path.read_bytes()
        wanted = reports if path.name in ("audit.json", "report.html") else secrets
        assert [word for word in wanted if word in data] == [], path.name


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    run = run_job(JOB, cwd=tmp_path)
    assert stat.S_IMODE(run.out.stat().st_mode) == 0o700
    assert (run.out / ".gitignore").read_text().strip() == "*"
