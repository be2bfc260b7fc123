"""shards.py, collector.py and devices.py answer without a training job."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from jobs import clean_environment, torchrun

PROBES = Path(__file__).resolve().parents[2] / "probes"

LOADERS = '''
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Rows(Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, index):
        return torch.tensor([float(index), index ** 2.0])

def sharded():
    return DataLoader(Rows(), batch_size=8, sampler=DistributedSampler(Rows()))

def same():
    return DataLoader(Rows(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))

class Own:
    """No torch DataLoader."""
    def __init__(self, rank, world):
        self.rank, self.world, self.epoch = rank, world, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(self.epoch)).tolist()[self.rank::self.world]
        for start in range(0, len(order), 8):
            yield torch.stack([Rows()[i] for i in order[start:start + 8]])

def own_sharded():
    return Own(torch.distributed.get_rank(), torch.distributed.get_world_size())

def own_same():
    return Own(0, 1)
'''


def start(script: str, *args: str, cwd: Path, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*torchrun(nproc), str(PROBES / script), *args],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), PROBES / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("loader", "effective", "batches"),
    [("sharded", 2.0, 8), ("same", 1.0, 16), ("own_sharded", 2.0, 8), ("own_same", 1.0, 16)],
)
def test_shards(tmp_path: Path, loader: str, effective: float, batches: int) -> None:
    (tmp_path / "loaders.py").write_text(LOADERS)
    done = start("shards.py", "--loader", f"loaders:{loader}", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank 1, epoch 1: {batches} batches, {batches * 8} samples" in done.stdout
    audit = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert audit["effective_gpus"] == pytest.approx(effective)


@pytest.mark.distributed
def test_shards_with_a_loader_that_is_not_there(tmp_path: Path) -> None:
    done = start("shards.py", "--loader", "nowhere:make", cwd=tmp_path, nproc=1)
    assert done.returncode != 0
    assert "shards.py: --loader nowhere:make: No module named 'nowhere'" in done.stderr


@pytest.mark.distributed
def test_each_collector_gives_the_same_answer(tmp_path: Path) -> None:
    answers = {}
    for backend in ("store", "gloo"):
        done = start("collector.py", "--backend", backend, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        answers[backend] = [line for line in done.stdout.splitlines() if "planted" in line]
    assert len(answers["store"]) == 1
    assert answers["store"] == answers["gloo"]


@pytest.mark.distributed
def test_devices(tmp_path: Path) -> None:
    done = start("devices.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "host0" in line]
    assert [line[:2] for line in lines] == [["0", "0"], ["1", "1"]]


def test_a_shared_device_is_named() -> None:
    devices = load("devices.py")
    seats = [
        devices.Seat(rank=0, local_rank=0, host="a", device="cuda:0", uuid="x"),
        devices.Seat(rank=1, local_rank=1, host="a", device="cuda:0", uuid="x"),
        devices.Seat(rank=2, local_rank=0, host="b", device="cuda:0", uuid="x"),
    ]
    assert devices.describe(seats)[1] == ["ranks 0 and 1 share one device on host0"]


@pytest.mark.parametrize(
    ("script", "args"),
    [("shards.py", ["--loader", "a:b"]), ("collector.py", ["--backend", "gloo"]), ("devices.py", [])],
)
def test_without_ranks_it_says_how_to_start(tmp_path: Path, script: str, args: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(PROBES / script), *args],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "torchrun --standalone --nproc-per-node=2" in done.stderr
