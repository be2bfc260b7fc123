"""The verdict on a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render import audits

from ddp_audit.records import Outcome
from ddp_audit.render import text

REPORT = "ddp-audit-out/latest/report.html"


def lines(name: str, **options: object) -> list[str]:
    values = {"color": False, "report_path": REPORT, **options}
    return text.render(audits.GALLERY[name](), **values).splitlines()  # type: ignore[arg-type]


def test_failing_job() -> None:
    assert lines("failing") == [
        "✖ fail  2 GPUs do the work of 1.0: ranks 0 and 1 read the same samples",
        "ddp-audit 0.1.0 · 2 of 2 ranks seen · 300 steps · nccl",
        "✖ DDP101 error  ranks 0 and 1 read the same batch at 300 of 300 common steps",
        "                at: train.py:41",
        "                cause: the sampler is RandomSampler, seeded alike on both ranks;",
        "                       nothing splits the data set",
        "                fix: sampler = DistributedSampler(dataset, shuffle=True)",
        "                     loader = DataLoader(dataset, batch_size=32,",
        "                         sampler=sampler)",
        "  └─ ▲ DDP103 warn  each of 2 replicas read all 9600 samples in the epoch",
        "▲ DDP106 warn  epochs 0 to 2 had the same order on all ranks",
        "               at: train.py:58",
        "               fix: for epoch in range(num_epochs):",
        "                        sampler.set_epoch(epoch)",
        "? DDP108 inconclusive  Not judged: 1 of 2 finished epochs was seen; to settle",
        "  it: a run of at least 2 epochs",
        "3 findings, 1 inconclusive, 8 passed, 1 not applicable",
        "ddp-audit explain DDP101",
        "probe 41 µs per step (0.42 % of a step), 1.2 MB of journal",
        f"report: {REPORT}",
    ]


def test_healthy_job_gets_three_lines() -> None:
    assert lines("passing") == [
        "✔ pass  2 GPUs do the work of 2.0 · 2 of 2 ranks seen · 300 steps",
        "probe 41 µs per step (0.42 % of a step), 1.2 MB of journal · 1 not applicable",
        f"report: {REPORT}",
    ]


def test_long_healthy_headline_keeps_three_lines_and_states_the_ranks() -> None:
    audit = replace(audits.passing(8), headline="8 GPUs (4 replicas x 2 tensor-parallel) do the work of 8")
    out = text.render(audit, color=False, report_path=REPORT).splitlines()
    assert len(out) == 3
    assert "8 of 8 ranks seen" in "".join(out)
    assert max(map(len, out)) <= 80


def test_missing_ranks_are_named_and_reasons_are_shared() -> None:
    out = lines("inconclusive")
    assert out[0].startswith("? inconclusive  2 of 4 ranks reported")
    assert "2 of 4 ranks seen, no journal of ranks 2 and 3" in " ".join(out)
    assert "? unanswered  Did every expected rank report?" in "\n".join(out)
    assert " ".join(" ".join(out).split()).count("the journals of ranks 2 and 3") == 1
    assert "hooks that were off: gradients" in out


def test_running_job_says_so() -> None:
    for make in (audits.passing, audits.failing):
        out = text.render(replace(make(), running=True), color=False)
        assert "the job is still running" in out


def test_notes_are_shown_below_a_pass_too() -> None:
    base = audits.passing()
    noted = replace(base, provenance=replace(base.provenance, notes=("rank 1 did not end normally",)))
    assert text.render(noted, color=False).splitlines()[2:] == ["note: rank 1 did not end normally"]


@pytest.mark.parametrize("name", audits.GALLERY)
@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_width(name: str, width: int, ascii_only: bool) -> None:
    out = lines(name, width=width, ascii_only=ascii_only, report_path=None)
    assert max(map(len, out)) <= width
    assert "\n".join(out).isascii() or not ascii_only


@pytest.mark.parametrize("name", audits.GALLERY)
def test_color_changes_no_character(name: str) -> None:
    painted = "\n".join(lines(name, color=True))
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == "\n".join(lines(name))
    assert "\x1b" not in "\n".join(lines(name))


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_user_text_cannot_steer_the_terminal(value: str) -> None:
    out = text.render(audits.hostile("\x1b[2J\r\x07\u202e" + value), color=False, report_path=value)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
    out.encode()


def test_suppressed_findings_are_counted_and_not_shown() -> None:
    base = audits.failing()
    checks = tuple(
        replace(f, suppressed="agreed with the team") if f.outcome is Outcome.FAIL else f for f in base.checks
    )
    out = text.render(replace(base, checks=checks), color=False)
    assert "✖ DDP101" not in out
    assert "3 suppressed" in out


def test_loads_nothing_heavy() -> None:
    code = (
        "import sys; import ddp_audit.render.text, ddp_audit.render.json; "
        "print(sorted({'matplotlib', 'torch', 'jinja2', 'pandas', 'wandb'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
