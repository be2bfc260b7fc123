"""The demo shows the fault and its fix, with numbers that come from the audits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from jobs import ddp_audit

from ddp_audit.cli import demo


def audit(**changes: object) -> dict[str, object]:
    rank = {"shard_length": 100, "num_steps": 30, "num_epochs": 3}
    return {
        "verdict": "pass",
        "headline": "2 GPUs do the work of 2.0",
        "world_size": 2,
        "effective_gpus": 2.0,
        "distinct_fraction": 1.0,
        "ranks": [rank, rank],
        **changes,
    }


def test_cells_come_from_the_audit() -> None:
    shown = demo.summarise(audit(), Path("report.html"))
    assert (shown.effective_gpus, shown.shard_length, shown.disjoint, shown.steps_per_epoch) == (
        "2.0 of 2",
        "100 samples",
        "yes",
        "10",
    )


def test_missing_values_are_said_to_be_unknown() -> None:
    rank = {"shard_length": None, "num_steps": 30, "num_epochs": 0}
    shown = demo.summarise(audit(effective_gpus=None, distinct_fraction=None, ranks=[rank]), Path("report.html"))
    assert {shown.effective_gpus, shown.shard_length, shown.disjoint, shown.steps_per_epoch} == {"unknown"}


def test_almost_disjoint_is_not_disjoint() -> None:
    assert demo.summarise(audit(distinct_fraction=0.999), Path("report.html")).disjoint == "no"


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(demo.command)
    assert result.exit_code == 2
    assert "does not have: pip install torch" in result.output


@pytest.mark.distributed
def test_a_job_that_fails_shows_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise SystemExit('no room at the inn')")
    with pytest.raises(demo.DemoError, match=r"job\.py ended with exit code 1"):
        demo.run(script, tmp_path / "out")
    assert "no room at the inn" in capsys.readouterr().err


@pytest.mark.distributed
def test_broken_then_fixed_in_an_empty_folder(tmp_path: Path) -> None:
    start = time.monotonic()
    done = ddp_audit("demo", cwd=tmp_path, timeout=240)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in done.stdout.splitlines() if "│" in line}
    cells = {name: tuple(cell.strip() for cell in row) for name, row in rows.items()}
    assert cells == {
        "verdict": ("FAIL", "PASS"),
        "effective GPUs": ("1.0 of 2", "2.0 of 2"),
        "shard length": ("512 samples", "256 samples"),
        "shards disjoint": ("no", "yes"),
        "steps per epoch": ("32", "16"),
    }
    for name in ("broken", "fixed"):
        folder = tmp_path / "ddp-audit-out" / "demo" / name
        assert str(Path("ddp-audit-out/demo", name, "report.html")) in done.stdout
        assert (folder / "report.html").stat().st_size > 1000
    fails = {
        check["kind"]
        for check in json.loads((tmp_path / "ddp-audit-out/demo/broken/audit.json").read_text())["checks"]
        if check["outcome"] == "fail" and not check["caused_by"]
    }
    assert fails == {"identical-data-across-ranks"}
    assert seconds < 120, "under a minute is promised; twice that on a busy machine"


@pytest.mark.slow
@pytest.mark.distributed
def test_from_the_built_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """Built and installed into an environment of its own, which borrows only the dependencies of this one."""
    repository = Path(__file__).resolve().parents[2]
    copy = tmp_path / "source"
    shutil.copytree(
        repository, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path / "wheel", copy], check=True, timeout=240)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=120)
    shutil.rmtree(copy)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ddp_audit", "demo"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1.0 of 2" in done.stdout
    assert "2.0 of 2" in done.stdout
