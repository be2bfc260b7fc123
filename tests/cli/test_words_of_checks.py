"""``checks``, ``explain`` and ``schema``."""

from __future__ import annotations

import json

import pytest

from ddp_audit.checks import ALL_CHECKS
from ddp_audit.cli import main


def test_checks_lists_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["checks"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [check.CHECK.id for check in ALL_CHECKS]
    assert main.run(["checks", "--format", "json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [item["kind"] for item in listed] == [check.CHECK.kind for check in ALL_CHECKS]


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.CHECK.id)
def test_explain(check: object, capfd: pytest.CaptureFixture[str]) -> None:
    info = check.CHECK  # type: ignore[attr-defined]
    pages = []
    for name in (info.id, info.id.lower(), info.id[3:], info.kind, info.kind.replace("-", "_")):
        assert main.run(["explain", name]) == 0
        pages.append(capfd.readouterr().out)
    assert len(set(pages)) == 1
    for part in ("Finds:", "Needs:", "Broken:", "Fixed:", "Fix:"):
        assert part in pages[0]
    code = [line for line in pages[0].splitlines() if line.startswith("    ")]
    assert all(len(line) <= 80 for line in pages[0].splitlines() if line not in code)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("DDP1O1", "DDP101"),
        ("ddp110", "did you mean DDP10"),
        ("set-epok", "set-epoch-missing"),
        ("identical-data", "identical-data-across-ranks"),
        ("zzzzzz", "'ddp-audit checks' lists all"),
    ],
)
def test_did_you_mean(name: str, hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", name]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert hint in err


def test_schema(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["schema", "audit"]) == 0
    assert json.loads(capfd.readouterr().out)["$id"] == "urn:ddp-audit:schema:audit:1.0"
    for name, word in (("scan", "comes with a later version"), ("comparison", "later version"), ("x", "is not known")):
        assert main.run(["schema", name]) == 2
        err = capfd.readouterr().err
        assert word in err
        assert err.count("\n") == 1
