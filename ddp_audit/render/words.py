"""What all renderers share: order, names, numbers and safe text, so that formats cannot disagree."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_audit.records import Audit, Finding, Location, Outcome, Severity, Verdict

GLYPHS = {"fail": "✖", "warn": "▲", "pass": "✔", "inconclusive": "?", "note": "–", "crashed": "!"}
"""One glyph per tone; a glyph never stands without its word."""

VERDICT_TONES = {
    Verdict.FAIL: "fail",
    Verdict.WARN: "warn",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.PASS: "pass",
}

_TONE_ORDER = ("fail", "warn", "crashed", "inconclusive", "note", "pass", "not_applicable")
_FRACTIONS = frozenset({"share", "fraction", "ratio"})
_LONGEST_UNIT = 12  # longer ones are whole phrases and would hide the number
_SINGULAR = {"samples": "sample", "batches": "batch", "steps": "step", "ranks": "rank", "epochs": "epoch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A finding with what follows from it (``caused_by``), worst first."""

    finding: Finding
    consequences: tuple[Finding, ...]


def tone(finding: Finding) -> str:
    """fail, warn, note (findings by weight), crashed, inconclusive, pass or not_applicable."""
    if finding.outcome is Outcome.FAIL:
        return {Severity.ERROR: "fail", Severity.WARNING: "warn", Severity.NOTE: "note"}[finding.severity]
    return "crashed" if finding.outcome is Outcome.ERROR else finding.outcome.value


def label(finding: Finding) -> str:
    """The word beside the glyph."""
    names = {"fail": "error", "warn": "warning", "crashed": "check crashed", "not_applicable": "not applicable"}
    kind = tone(finding)
    return names.get(kind, kind)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, warnings, checks that crashed, inconclusive, notes, passed, not applicable; ids inside each."""
    return sorted(findings, key=lambda f: (_TONE_ORDER.index(tone(f)), f.id))


def shown(audit: Audit) -> list[Finding]:
    """Findings that count: those a user suppressed are left out and counted apart."""
    return [f for f in ordered(audit.checks) if f.suppressed is None]


def faults(audit: Audit) -> list[Fault]:
    """Findings (outcome fail), each consequence under its cause.

    A consequence whose cause is not itself a finding here stands alone, and chains of causes hang
    below their first one, so nothing is lost or shown twice.
    """
    found = [f for f in shown(audit) if f.outcome is Outcome.FAIL]
    by_id = {f.id: f for f in found}

    def root(finding: Finding) -> str:
        seen = {finding.id}
        while finding.caused_by in by_id and finding.caused_by not in seen:
            finding = by_id[finding.caused_by]
            seen.add(finding.id)
        return finding.id

    roots = {f.id: root(f) for f in found}
    # Two checks that name each other have no first one: each then stands alone.
    heads = [f for f in found if roots[f.id] == f.id or roots[roots[f.id]] != roots[f.id]]
    names = {f.id for f in heads}
    return [
        Fault(
            finding=head,
            consequences=tuple(f for f in found if f.id not in names and roots[f.id] == head.id),
        )
        for head in heads
    ]


def with_tone(audit: Audit, *tones: str) -> list[Finding]:
    """Findings that count with one of these tones, in order."""
    return [f for f in shown(audit) if tone(f) in tones]


def count(number: int, noun: str) -> str:
    """``1 finding``, ``2 findings``, ``3 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}".replace(",", " ")


def counts(audit: Audit) -> list[str]:
    """The summary of outcomes, for instance ``2 findings``, ``1 inconclusive``, ``9 passed``."""
    parts = [(len([f for f in shown(audit) if f.outcome is Outcome.FAIL]), "finding")]
    out = [count(number, noun) for number, noun in parts if number]
    for kind, word in (
        ("crashed", "crashed"),
        ("inconclusive", "inconclusive"),
        ("pass", "passed"),
        ("not_applicable", "not applicable"),
    ):
        if number := len(with_tone(audit, kind)):
            out.append(f"{number} {word}")
    if suppressed := sum(f.suppressed is not None for f in audit.checks):
        out.append(f"{suppressed} suppressed")
    return out or ["no checks ran"]


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(set(numbers)), None]:
        if run and number == run[-1] + 1:
            run.append(number)
            continue
        if len(run) == 2:
            parts += [str(run[0]), str(run[1])]
        elif run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [number] if number is not None else []
    return ", ".join(parts)


def ranks_of(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-7 and 9``; empty for none."""
    if not numbers:
        return ""
    if len(set(numbers)) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {' and '.join(ranges(numbers).rsplit(', ', 1))}"


def number(value: float | None) -> str:
    """At most four digits that matter: ``1``, ``0.513``, ``12 480``; ``unknown`` for none."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", " ")


def quantity(value: float | None, unit: str | None) -> str:
    """A number with its unit; shares become per cent, and a long unit is left to ``explained_unit``."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if _is_fraction(unit):
        percent = value * 100
        text = f"{percent:.3g}" if abs(percent) < 99.95 else f"{percent:.0f}"
        return f"{text} %"
    if not unit or len(unit) > _LONGEST_UNIT:
        return number(value)
    return f"{number(value)} {_SINGULAR.get(unit, unit) if value == 1 else unit}"


def explained_unit(unit: str | None) -> str:
    """What a number counts, where ``quantity`` does not say so: ``share of steps with the same batch``."""
    return unit if unit and unit not in _FRACTIONS and (_is_fraction(unit) or len(unit) > _LONGEST_UNIT) else ""


def _is_fraction(unit: str | None) -> bool:
    return unit is not None and (unit in _FRACTIONS or unit.startswith("share of "))


def gpus(value: float) -> str:
    """Effective GPUs, always with one decimal: ``1.0``."""
    return f"{value:.1f}"


def size(num_bytes: int) -> str:
    """``812 bytes``, ``127 kB``, ``1.2 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    if num_bytes < 999_500:
        return f"{num_bytes / 1000:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB"


def duration_us(microseconds: float) -> str:
    """``41 µs``, ``1.3 ms``."""
    return f"{microseconds:.0f} µs" if microseconds < 999.5 else f"{microseconds / 1000:.2g} ms"


def ranks_stated(audit: Audit) -> str:
    """Ranks expected against ranks that left a journal; said in every report."""
    if audit.world_size is None:
        return f"{count(audit.ranks_seen, 'rank')} seen, number expected unknown"
    text = f"{audit.ranks_seen} of {count(audit.world_size, 'rank')} seen"
    return f"{text}, no journal of {ranks_of(audit.ranks_missing)}" if audit.ranks_missing else text


def cost(audit: Audit) -> str:
    """What the probe cost, by its own clock."""
    overhead = audit.overhead
    if overhead.mean_us_per_step is None:
        return f"probe cost unknown, {size(overhead.journal_bytes)} of journal"
    share = "" if overhead.share_of_step is None else f" ({overhead.share_of_step * 100:.2g} % of a step)"
    return f"probe {duration_us(overhead.mean_us_per_step)} per step{share}, {size(overhead.journal_bytes)} of journal"


def place(location: Location | None) -> str:
    """``train.py:41``; never an absolute path (law 4)."""
    return "" if location is None else f"{public_path(location.file)}:{location.line}"


def public_path(path: str) -> str:
    """A path without what names a machine or a user: absolute ones are cut to their last part."""
    path = plain(path)
    absolute = path.startswith(("/", "\\", "~")) or re.match(r"[A-Za-z]:[\\/]", path) is not None
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if absolute else path


def public_command(command: str) -> str:
    """The command that makes a report again, with absolute paths cut to their last part."""
    return " ".join(public_path(word) for word in plain(command).split())


def plain(text: str) -> str:
    """Text without control and direction characters, which could rewrite a terminal line or a table cell.

    Line feeds stay; tabs become blanks; lone surrogates, which no encoding can write, are replaced.
    """

    def safe(char: str) -> str:
        if char == "\n":
            return char
        if char == "\t":
            return " "
        return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char

    return "".join(map(safe, text))


def one_line(text: str) -> str:
    """``plain`` with all white space runs as one blank."""
    return " ".join(plain(text).split())
