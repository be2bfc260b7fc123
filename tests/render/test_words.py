"""Numbers, names and order that all formats share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render import audits

from ddp_audit.records import Outcome, Severity
from ddp_audit.render import words


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([7, 0, 1, 2, 2], "ranks 0-2 and 7"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
    ],
)
def test_ranks(numbers: list[int], text: str) -> None:
    assert words.ranks_of(numbers) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    named: set[int] = set()
    for part in words.ranges(sorted(numbers)).split(", "):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.0, "share", "100 %"),
        (0.01, "share of steps", "1 %"),
        (0.5126, "fraction", "51.3 %"),
        (0.99951, "share", "100 %"),
        (1.0, "batches", "1 batch"),
        (38.0, "batches", "38 batches"),
        (12480.0, None, "12 480"),
        (2.0, "optimizers whose parameters differ", "2"),
        (math.nan, "share", "unknown"),
        (None, None, "unknown"),
    ],
)
def test_quantity(value: float | None, unit: str | None, text: str) -> None:
    assert words.quantity(value, unit) == text


def test_a_unit_is_told_once() -> None:
    for unit in ("share", "share of steps", "batches", "optimizers whose parameters differ", None):
        assert (words.explained_unit(unit) != "") == (unit in ("share of steps", "optimizers whose parameters differ"))


@pytest.mark.parametrize(
    ("path", "public"),
    [
        ("train.py", "train.py"),
        ("src/train.py", "src/train.py"),
        ("/srv/alice/train.py", "train.py"),
        ("~/train.py", "train.py"),
        ("C:\\Users\\alice\\train.py", "train.py"),
        ("/srv/alice/out/", "out"),
    ],
)
def test_public_path(path: str, public: str) -> None:
    assert words.public_path(path) == public


def test_order() -> None:
    make = audits.finding
    findings = [
        make("DDP101", Outcome.NOT_APPLICABLE),
        make("DDP102", Outcome.PASS),
        make("DDP103", Outcome.FAIL, severity=Severity.NOTE),
        make("DDP104", Outcome.INCONCLUSIVE),
        make("DDP105", Outcome.ERROR),
        make("DDP106", Outcome.FAIL, severity=Severity.WARNING),
        make("DDP107", Outcome.FAIL, severity=Severity.ERROR),
    ]
    assert [f.id[-1] for f in words.ordered(findings)] == ["7", "6", "5", "4", "3", "2", "1"]


def test_chain_of_causes_hangs_below_the_first() -> None:
    base = audits.failing()
    checks = tuple(
        replace(f, outcome=Outcome.FAIL, caused_by={"DDP201": None, "DDP202": "DDP201", "DDP207": "DDP202"}[f.id])
        if f.id in ("DDP201", "DDP202", "DDP207")
        else replace(f, outcome=Outcome.PASS)
        for f in base.checks
    )
    (fault,) = words.faults(replace(base, checks=checks))
    assert fault.finding.id == "DDP201"
    assert [f.id for f in fault.consequences] == ["DDP202", "DDP207"]
