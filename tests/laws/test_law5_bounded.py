"""Law 5: the journal is bounded, and the main faults are still found once its cap is reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

pytestmark = pytest.mark.distributed

JOB = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
fault = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(16_000, 2), torch.randn(16_000, 1))
sampler = DistributedSampler(data) if fault != "identical" else None
loader = DataLoader(data, batch_size=80, sampler=sampler, shuffle=sampler is None)
model = DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(16):
    if fault == "none":
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("identical", {"identical-data-across-ranks"}),
        ("repeated", {"set-epoch-missing"}),
        pytest.param("none", set(), marks=pytest.mark.slow),
    ],
)
def test_faults_are_found_beyond_the_cap(tmp_path: Path, fault: str, kinds: set[str]) -> None:
    run = run_job(JOB, fault, cwd=tmp_path, options=["--disk-cap", "1"], timeout=240)
    assert run.code == 0, run.log[-3000:]
    assert kinds <= run.failed
    assert not {"params-diverge", "uneven-shards", "dropped-data"} & run.failed
    assert kinds or not run.failed, run.audit["headline"]
    for rank in range(2):
        sizes = [path.stat().st_size for path in (run.out / "journal").glob(f"rank{rank:05d}*")]
        assert sum(sizes) <= 1.05 * (1 << 20)
        assert sum(sizes) > 0.4 * (1 << 20)  # the job is long enough to reach it
    assert any("cap" in note for note in run.audit["provenance"]["notes"]), run.audit["provenance"]["notes"]
