"""Loaders that read ahead, sharded models, and ids told by hand."""

from pathlib import Path

import numpy as np
import probed
import pytest

from ddp_audit.records import BatchFlag, ForwardFlag, ListKind

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=DISPATCH))
torch.manual_seed(0)
model, data = nn.Linear(1, 1), TensorDataset(torch.arange(40.0).reshape(40, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
model, opt, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-5), loader)
for epoch in range(2):
    for n, (x,) in enumerate(acc.skip_first_batches(loader, 2) if epoch else loader):
        with open(f"got{acc.process_index}", "a") as file:
            print(*[int(v) for v in x.reshape(-1)], file=file)
        opt.zero_grad(); acc.backward(model(x).sum()); opt.step()
acc.end_training()
"""


def got(folder: Path, rank: int) -> list[list[int]]:
    """What the loop of a rank wrote down: a list of samples per step."""
    return [[int(v) for v in line.split()] for line in (folder / f"got{rank}").read_text().splitlines()]


@pytest.mark.distributed
@pytest.mark.slow
def test_accelerate_shard_counts_what_the_loop_got(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = probed.run(tmp_path, ACCELERATE.replace("DISPATCH", "False"), nproc=2)
    assert result.code == 0, result.output
    for rank in range(2):
        journal, at = result.journals[rank], 0
        index = {}
        for serial, kind, length in journal.list_keys:
            if kind == ListKind.INDEX:
                index[serial] = journal.list_values[at : at + length].astype(np.int64).tolist()
            at += length
        rows = {
            int(row["step"]): index[int(row["serial"])]
            for row in journal.batches
            if row["flags"] & BatchFlag.TRAIN_LAST
        }
        seen = got(tmp_path, rank)
        assert [rows.get(step) for step in range(len(seen))] == seen


@pytest.mark.distributed
@pytest.mark.slow
def test_accelerate_dispatcher_counts_slices(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = probed.run(tmp_path, ACCELERATE.replace("DISPATCH", "True"), nproc=2)
    assert result.code == 0, result.output
    for rank in range(2):
        journal = result.journals[rank]
        assert len(journal.batches) == len(got(tmp_path, rank)) == len(journal.steps)
        assert not (journal.batches["flags"] & BatchFlag.HAS_INDEX).any()
        assert (journal.batches["content"] != 0).all()


FSDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
g = torch.Generator().manual_seed(dist.get_rank())
import ddp_audit_absent if False else ddp_audit
for step in range(4):
    ddp_audit.record_samples(range(step * 6 + 3 * dist.get_rank(), step * 6 + 3 * dist.get_rank() + 3))
    opt.zero_grad(); model(torch.randn(3, 4, generator=g)).sum().backward(); opt.step()
dist.barrier(); dist.destroy_process_group()
""".replace("import ddp_audit_absent if False else ddp_audit", "import ddp_audit")


@pytest.mark.distributed
def test_fully_sharded(tmp_path: Path) -> None:
    result = probed.run(tmp_path, FSDP, nproc=2)
    assert result.code == 0, result.output
    for rank in range(2):
        journal = result.journals[rank]
        assert not result.events("hook", rank)
        (wrapper,) = result.events("wrapper", rank)
        assert wrapper["kind"] == "fsdp2"
        assert wrapper["group_ranks"] == [0, 1]
        assert wrapper["module_class"] == "Sequential"
        (parameters,) = result.events("parameters", rank)
        assert parameters["num_dtensors"] == 4
        assert parameters["model_mesh"] is None
        assert parameters["values_digest"] is None
        forwards = [row for row in journal.forwards if not row["flags"] & ForwardFlag.RECORDED]
        assert len(forwards) == 4
        recorded = [row for row in journal.forwards if row["flags"] & ForwardFlag.RECORDED]
        assert [int(row["step"]) for row in recorded] == [0, 1, 2, 3]
        assert (journal.steps["local_grad"] != 0).all()
    first, second = (result.journals[rank].steps["local_grad"] for rank in range(2))
    assert not (first == second).any()


DDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(120):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_times_come_from_the_log_of_ddp(tmp_path: Path) -> None:
    result = probed.run(tmp_path, DDP, nproc=2)
    assert result.code == 0, result.output
    for rank in range(2):
        assert not result.events("hook", rank)
        first, last = result.events("wrapper", rank)
        assert first["communication_us"] is None
        assert last["communication_us"] > 0
        assert last["backward_us"] > 0
        assert first["wrapper"] == last["wrapper"]
