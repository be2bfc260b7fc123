"""Law 1: the same seeded job with and without the hooks, bit for bit, and what its objects turn into."""

import json
import subprocess
import sys
from pathlib import Path

import probed
import pytest

JOB = Path(__file__).with_name("law_job.py").read_text()

LOAD = """
import sys, torch
from torch import nn
for name in ("net", "optimizer", "parameter", "sampler"):
    torch.load(f"{sys.argv[1]}/{name}0.pt", weights_only=False)
assert not any(name.partition(".")[0] == "ddp_audit" for name in sys.modules)
"""


@pytest.mark.distributed
def test_same_job(tmp_path: Path) -> None:
    found = {}
    for probe in (True, False):
        folder = tmp_path / str(probe)
        (folder / "data").mkdir(parents=True)
        result = probed.run(folder, JOB, nproc=2, probe=probe, args=(str(folder / "data"),))
        assert result.code == 0, result.output[-3000:]
        found[probe] = [json.loads((folder / "data" / f"rank{rank}.json").read_text()) for rank in range(2)]
        if probe:
            assert len(result.journals) == 2
            assert not result.events("hook")
            # 16 steps and forwards of the job, 3 for each order that compiles, and the forward of an export
            assert len(result.journals[0].steps) == 16 + 9
            assert len(result.journals[0].forwards) >= 16 + 9
            assert {int(row["wrapper"]) for row in result.journals[0].forwards} >= {0, 1, 2, 3}
    for rank in range(2):
        for key, value in found[False][rank].items():
            assert found[True][rank][key] == value, key
        assert not any(value for key, value in found[True][rank].items() if key.startswith("ours_"))
    # Rows is a class of the job's __main__.
    code = "import sys; sys.path.insert(0, sys.argv[2]); import job, __main__; __main__.Rows = job.Rows\n" + LOAD
    folder = tmp_path / "True"
    subprocess.run([sys.executable, "-c", code, str(folder / "data"), str(folder)], check=True, timeout=120, cwd=folder)


SMALL = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
if "file" in os.environ:
    dist.init_process_group("gloo", init_method="file://" + os.environ["file"], rank=0, world_size=1)
torch.manual_seed(1)
data = TensorDataset(torch.randn(48, 3))
sampler = DistributedSampler(data)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad(); loss = model(x).pow(2).sum(); loss.backward(); optimizer.step()
print("LOSS", loss.item())
dist.destroy_process_group()
sys.exit(3)
"""
BROKEN = ("dataloader", "optimizer", "journal", "all")
BROKEN_SLOW = (
    "digest", "sampler", "forward", "backward", "parameters", "gradient", "group", "wrappers", "device", "channel",
)  # fmt: skip


@pytest.mark.parametrize("name", [*BROKEN, *(pytest.param(name, marks=pytest.mark.slow) for name in BROKEN_SLOW)])
def test_a_broken_hook_changes_nothing_and_is_reported(name: str, tmp_path: Path) -> None:
    result = probed.run(tmp_path, SMALL, file=str(tmp_path / "store"), _DDP_AUDIT_BREAK=name)
    assert result.code == 3, result.output
    assert "LOSS" in result.output
    assert "Traceback" not in result.output
    if name in ("journal", "all"):
        assert not result.journals
        return
    states = {event["hook"]: event for event in result.events("hook")}
    assert name in states
    assert states[name]["reason"] == f"BrokenForTestError in {name}"
    assert set(states) == {name}


def test_cuda_is_never_asked(tmp_path: Path) -> None:
    guard = """
import torch
def refuse(*args, **kwargs): raise AssertionError("torch.cuda was asked")
kept = {"is_available", "is_initialized", "_is_compiled", "device_count", "_lazy_call"}
class Fake(type(torch.cuda)):
    def __getattribute__(self, name):
        if name in kept or name.startswith("__") or not callable(object.__getattribute__(self, name)):
            return object.__getattribute__(self, name)
        import sys
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return refuse if caller.startswith("ddp_audit") else object.__getattribute__(self, name)
torch.cuda.__class__ = Fake
"""
    result = probed.run(tmp_path, guard + SMALL, file=str(tmp_path / "store"))
    assert result.code == 3, result.output
    assert not result.events("hook")
    assert len(result.journals[0].steps) == 24
