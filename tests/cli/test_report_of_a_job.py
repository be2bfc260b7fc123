"""``ddp-audit report`` on the evidence of a real job: valid, and the same again."""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources
from pathlib import Path

import pytest
from jobs import run_job

from ddp_audit.cli import main

pytestmark = pytest.mark.distributed

JOB = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.arange(640.0).view(160, 4), torch.zeros(160, 1))
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_job(JOB, cwd=tmp_path_factory.mktemp("job")).out


def json_of(folder: Path, target: Path) -> dict[str, object]:
    assert main.run(["report", str(folder), "-f", "json", "-o", str(target), "--force"]) == 1
    value = json.loads(target.read_text(encoding="utf-8"))
    del value["provenance"]["created"]
    assert isinstance(value, dict)
    return value


def test_same_again_and_as_the_probe_wrote_it(folder: Path, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    first = json_of(folder, tmp_path / "a.json")
    assert json_of(folder, tmp_path / "a.json") == first
    written = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    schema = json.loads(resources.files("ddp_audit").joinpath("schemas/audit-1.0.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(written)
    del written["provenance"]["created"]
    assert written == first
    assert written["verdict"] == "fail"
    assert next(c for c in written["checks"] if c["id"] == "DDP101")["outcome"] == "fail"


def test_page_again(folder: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        assert main.run(["report", str(folder), "-f", "html", "-o", str(tmp_path / name)]) == 1
        pages.append(re.sub(r"(page made</dt><dd>)[^<]*", r"\1", (tmp_path / name).read_text(encoding="utf-8")))
    assert pages[0] == pages[1]
    assert str(folder) not in pages[0]


def test_missing_rank_is_no_pass(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "evidence", ignore_errors=True)
    for journal in (copy / "journal").glob("rank00001-*"):
        journal.unlink()
    assert main.run(["report", str(copy)]) == 3
    out = capfd.readouterr().out
    assert "1 of 2 ranks seen, no journal of rank 1" in out
    assert out.startswith("? inconclusive")


def test_cut_json_is_one_line_and_code_2(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "run.json").write_text('{"run_id": "a', encoding="utf-8")
    assert main.run(["report", str(copy)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "run.json" in err
