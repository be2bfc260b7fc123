"""The end of a probe: merge, judge, print, write. One failed part never costs the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_audit.boot.folder import write_atomic
from ddp_audit.settings import Settings

if TYPE_CHECKING:
    from ddp_audit.records import Audit

AUDIT_FILE = "audit.json"
REPORT_FILE = "report.html"


def finish(
    out: Path,
    settings: Settings,
    *,
    print_text: bool,
    shown: Callable[[], None] | None = None,
) -> Audit | None:
    """Judge what lies in a folder and write evidence, ``audit.json`` and ``report.html`` there.

    Args:
        out: the output folder.
        settings: of the probe; not needed to read the folder, kept for its deadline.
        print_text: show the verdict on standard output.
        shown: called once the verdict is printed and ``audit.json`` written, before the report is.

    Returns:
        The audit; ``None`` when it could not be made. What failed is said on standard error, one
        line each; nothing is raised.
    """
    try:
        from ddp_audit.collect import merge

        evidence = merge.merge([out])
        if not evidence.running:
            _part("evidence", lambda: _save(evidence, out), print_text)
        from ddp_audit.judge import judge

        audit = judge(evidence)
    except Exception as error:
        _say(f"no verdict, judging {out} failed: {_one_line(error)}", print_text)
        if shown is not None:
            shown()
        return None
    if print_text:
        _part("the verdict", lambda: show(audit, out), print_text)
    _part(AUDIT_FILE, lambda: write_atomic(out / AUDIT_FILE, _json(audit).encode()), print_text)
    if shown is not None:
        shown()
    _part(REPORT_FILE, lambda: write_atomic(out / REPORT_FILE, _html(audit).encode()), print_text)
    return audit


def _save(evidence: object, out: Path) -> None:
    from ddp_audit.collect import evidence as store

    store.save(evidence, out)  # type: ignore[arg-type]


def _json(audit: Audit) -> str:
    from ddp_audit.render import json

    return json.render(audit)


def _html(audit: Audit) -> str:
    from ddp_audit.render import html

    return html.render(audit)


def show(audit: Audit, out: Path) -> None:
    """Print the verdict to standard output in one piece: ranks may still write beside it."""
    from ddp_audit.cli.report import can_encode_glyphs, wants_color
    from ddp_audit.render import text

    path = out / REPORT_FILE
    try:
        name = os.path.relpath(path)
    except ValueError:
        name = str(path)
    if name.startswith(".." + os.sep + ".."):
        name = str(path)
    said = text.render(audit, color=wants_color(), ascii_only=not can_encode_glyphs(), report_path=name)
    sys.stdout.write(said)
    sys.stdout.flush()


def _part(what: str, do: Callable[[], object], loud: bool) -> None:
    try:
        do()
    except Exception as error:
        _say(f"{what} could not be written: {_one_line(error)}", loud)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no further word"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def _say(text: str, loud: bool) -> None:
    if loud:
        print(f"ddp-audit: {text}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    """A report while the job runs: ``main([settings as JSON])``, silent, in a process of its own."""
    os.nice(10)
    settings = Settings.from_json(words[0])
    finish(Path(settings.out), settings, print_text=False)
    return 0
