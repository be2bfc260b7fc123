"""``ddp-audit report``: formats, places, refusals, codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from render import audits

import ddp_audit.collect.merge
import ddp_audit.judge
from ddp_audit.cli import exit_codes, main, report
from ddp_audit.records import Audit

Report = Callable[..., int]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Audit], Path]:
    """Make every folder hold this audit."""

    def use(audit: Audit) -> Path:
        monkeypatch.setattr(ddp_audit.collect.merge, "merge", lambda folders: folders)
        monkeypatch.setattr(ddp_audit.judge, "judge", lambda evidence: audit)
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        return folder

    return use


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("failing", [], 1),
        ("failing", ["--fail-on", "never"], 0),
        ("uneven", [], 0),
        ("uneven", ["--fail-on", "warning"], 1),
        ("inconclusive", [], 3),
        ("inconclusive", ["--allow-inconclusive"], 0),
        ("inconclusive", ["--fail-on", "never"], 0),
        ("passing", [], 0),
        ("nothing", [], 3),
    ],
)
def test_exit_codes(judged: Callable[[Audit], Path], name: str, options: list[str], code: int) -> None:
    folder = judged(audits.GALLERY[name]())
    assert main.run(["report", str(folder), *options]) == code


def test_suppressed_finding_does_not_gate() -> None:
    base = audits.failing()
    checks = tuple(replace(f, suppressed="known") for f in base.checks)
    assert exit_codes.exit_code(replace(base, checks=checks), "warning", False) == 0


def test_text_is_plain_off_a_terminal(judged: Callable[[Audit], Path], capfd: pytest.CaptureFixture[str]) -> None:
    main.run(["report", str(judged(audits.failing()))])
    out = capfd.readouterr()
    assert out.out.startswith("✖ fail  2 GPUs")
    assert "\x1b" not in out.out
    assert out.err == ""
    main.run(["report", "--color", "always", str(judged(audits.failing()))])
    assert "\x1b[" in capfd.readouterr().out


def test_json_to_standard_output(judged: Callable[[Audit], Path], capfd: pytest.CaptureFixture[str]) -> None:
    main.run(["report", str(judged(audits.failing())), "--format", "json"])
    assert json.loads(capfd.readouterr().out)["verdict"] == "fail"


def test_html_goes_beside_the_evidence(judged: Callable[[Audit], Path], capfd: pytest.CaptureFixture[str]) -> None:
    folder = judged(audits.passing())
    (folder / "report.html").write_text("old")
    assert main.run(["report", str(folder), "--format", "html"]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    out = capfd.readouterr().out.splitlines()
    assert len(out) == 3
    assert out[2].startswith(f"report: {folder / 'report.html'} (")
    assert os.listdir(folder) == ["report.html"], "no part file is left"


def test_named_file_is_not_overwritten(
    judged: Callable[[Audit], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, target = judged(audits.failing()), tmp_path / "mine.html"
    target.write_text("mine")
    call = ["report", str(folder), "--format", "html", "-o", str(target)]
    assert main.run(call) == 2
    assert target.read_text() == "mine"
    assert capfd.readouterr().err == (
        f"ddp-audit report: '{target}' exists; give another -o, or --force to overwrite it\n"
    )
    assert main.run([*call, "--force"]) == 1
    assert target.read_text(encoding="utf-8") != "mine"


def test_file_is_written_before_the_gate_closes(judged: Callable[[Audit], Path], tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    assert main.run(["report", str(judged(audits.failing())), "-f", "json", "-o", str(target)]) == 1
    assert json.loads(target.read_text())["verdict"] == "fail"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["DIR", "--format", "junit"], "format 'junit' comes with a later version; available: text, html, json"),
        (["DIR", "--format", "pdf"], "format 'pdf' is not known; available: text, html, json"),
        (["/nowhere/at/all"], "no folder '/nowhere/at/all'"),
        (["FILE"], "is a file; name the folder"),
        (["DIR"], "holds no evidence"),
        (["DIR", "-o", "/nowhere/at/all/x.html"], "evidence"),
        (["--fail-on", "maybe", "DIR"], "maybe"),
        (["DIR", "--colour"], "no such option"),
        ([], "missing argument"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    folder = tmp_path / "empty"
    folder.mkdir()
    assert main.run(["report", *({"DIR": str(folder), "FILE": str(file)}.get(word, word) for word in words)]) == 2
    out = capfd.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    assert message.lower() in out.err.lower()


def test_place_that_cannot_be_written(judged: Callable[[Audit], Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report", str(judged(audits.passing())), "-o", "/nowhere/at/all/x.txt"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "cannot write '/nowhere/at/all/x.txt'" in err


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.html"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        report.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.html"]


def test_ascii_output() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from render import audits; import ddp_audit.judge, "
        "ddp_audit.collect.merge as m; m.merge = lambda f: f; ddp_audit.judge.judge = lambda e: audits.failing(); "
        "from ddp_audit.cli import main; sys.exit(main.run(['report', '.']))"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, timeout=60, check=False)
    assert out.returncode == 1
    assert out.stdout.startswith(b"x fail  2 GPUs")


def test_text_and_json_load_no_plotting() -> None:
    code = (
        "import sys; from ddp_audit.cli import report, checks, explain, schema; "
        "print(sorted({'matplotlib', 'torch', 'jinja2', 'numpy', 'pandas', 'wandb'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
