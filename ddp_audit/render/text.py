"""The verdict for a terminal: one line per finding, fix indented, counts last, paths last."""

from __future__ import annotations

from collections.abc import Iterable

from ddp_audit.records import Audit, Finding, Verdict
from ddp_audit.render import words

_STYLES = {"fail": "1;31", "warn": "1;33", "pass": "1;32", "inconclusive": "1;36", "crashed": "1;35", "note": "2"}
_ASCII_GLYPHS = {"✖": "x", "▲": "!", "✔": "ok", "–": "-", "·": "-", "µ": "u", "×": "x", "…": "...", "└": "`", "─": "-"}
_MOST_NOTES = 3  # the HTML report has all; a terminal that scrolls hides the verdict


def render(
    audit: Audit, *, color: bool, width: int = 80, ascii_only: bool = False, report_path: str | None = None
) -> str:
    """The audit as lines of text, each at most ``width`` columns, with a final line feed.

    A job with verdict pass that has ended gets exactly three lines: headline, what the probe cost,
    report path (two without a path). Further lines only where something must be known: notes on
    what was missing, and that the job still runs.

    Args:
        audit: what was judged.
        color: write SGR colour codes; they never carry meaning alone.
        width: columns, at least 40.
        ascii_only: for outputs that cannot encode the glyphs; other characters come as escapes.
        report_path: last line; ``None`` when no report was written.
    """
    page = _Page(width=max(40, width), color=color, ascii_only=ascii_only)
    if audit.verdict is Verdict.PASS:
        _healthy(page, audit)
    else:
        _unhealthy(page, audit)
    if report_path is not None:
        page.path(f"report: {words.one_line(report_path)}")
    return "\n".join(page.lines) + "\n"


def _healthy(page: _Page, audit: Audit) -> None:
    facts = [words.ranks_stated(audit), words.count(audit.num_steps, "step")]
    first = [words.one_line(audit.headline)]
    second = [words.cost(audit)]
    # What does not fit beside the headline moves to the second line, so that it stays three lines.
    for fact in facts:
        (first if page.fits("✔ pass  ", [*first, fact]) else second).append(fact)
    # A pass must not hide what was not judged; the report says why and what would settle it.
    not_judged = [finding.id for finding in words.with_tone(audit, "inconclusive")]
    if not_judged:
        names = ", ".join([not_judged[0], *(name.removeprefix("DDP") for name in not_judged[1:])])
        second.append(f"not judged: {names}")
    answers = [part for part in words.counts(audit) if not part.endswith(("passed", "inconclusive"))]
    for part in answers:
        if page.fits("", [*second, part]):
            second.append(part)
    page.line("✔ pass  ", " · ".join(first), tone="pass", mark="✔ pass", wrap=False)
    page.line("", " · ".join(second), wrap=False)
    _notes(page, audit)
    if audit.running:
        page.line("", _running(audit))


def _notes(page: _Page, audit: Audit) -> None:
    notes = audit.provenance.notes
    for note in notes[:_MOST_NOTES]:
        page.line("note: ", words.one_line(note), indent=6)
    if len(notes) > _MOST_NOTES:
        page.line("", f"{words.count(len(notes) - _MOST_NOTES, 'more note')} in the report")


def _unhealthy(page: _Page, audit: Audit) -> None:
    tone = words.VERDICT_TONES[audit.verdict]
    mark = f"{words.GLYPHS[tone]} {audit.verdict.value}"
    page.line(f"{mark}  ", words.one_line(audit.headline), tone=tone, mark=mark, indent=2)
    facts = [f"ddp-audit {audit.tool_version}", words.ranks_stated(audit), words.count(audit.num_steps, "step")]
    facts.append(audit.provenance.backend)
    page.line("", " · ".join(words.one_line(fact) for fact in facts if fact), indent=2)
    if audit.running:
        page.line("", _running(audit))
    for fault in words.faults(audit):
        _finding(page, fault.finding)
        for consequence in fault.consequences:
            _finding(page, consequence, nested=True)
    for finding in words.with_tone(audit, "crashed"):
        _finding(page, finding)
    for sentence in audit.core_unanswered:
        page.line("? unanswered  ", words.one_line(sentence), tone="inconclusive", mark="? unanswered", indent=2)
    for mark, why in _by_reason(words.with_tone(audit, "inconclusive")):
        page.line(f"{mark}  ", why, tone="inconclusive", mark=mark, indent=2)
    off = sorted({words.one_line(state.hook) for state in audit.provenance.hook_states})
    if off:
        page.line("", f"hooks that were off: {', '.join(off)}", indent=2)
    _notes(page, audit)
    heads = [fault.finding for fault in words.faults(audit)] or words.with_tone(audit, "crashed", "inconclusive")
    parts = [", ".join(words.counts(audit)), *([f"ddp-audit explain {heads[0].id}"] if heads else [])]
    if page.fits("", parts):
        page.line("", " · ".join(parts))
    else:
        for part in parts:
            page.line("", part)
    page.line("", words.cost(audit), tone="note", mark=words.cost(audit))


def _running(audit: Audit) -> str:
    return f"the job is still running: judged on {words.count(audit.num_steps, 'step')} so far, on all ranks"


def _finding(page: _Page, finding: Finding, *, nested: bool = False) -> None:
    tone = words.tone(finding)
    word = {"warn": "warn", "crashed": "crashed"}.get(tone, words.label(finding))
    mark = f"{words.GLYPHS[tone]} {finding.id} {word}"
    head = ("  └─ " if nested else "") + f"{mark}  "
    page.line(head, words.one_line(finding.message), tone=tone, mark=mark)
    indent = " " * len(head)
    if nested:
        return  # the fix of the cause is the fix
    if place := words.place(finding.location):
        page.line(f"{indent}at: ", place)
    if finding.cause:
        page.line(f"{indent}cause: ", words.one_line(finding.cause))
    if finding.fix:
        first, *more = [line for line in words.plain(finding.fix).splitlines() if line.strip()] or [""]
        page.line(f"{indent}fix: ", first)
        for line in more:
            page.line(f"{indent}     ", line.rstrip(), code=True)


def _by_reason(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Checks that lack the same thing share a line: (mark, what was seen and what would settle it)."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(words.one_line(finding.why_inconclusive or finding.message), []).append(finding)
    lines: list[tuple[str, str]] = []
    for why, group in groups.items():
        seen = {words.one_line(finding.message).rstrip(".") for finding in group}
        text = f"to settle it: {why}"
        if len(seen) == 1:
            (only,) = seen
            text = f"{only}; {text}" if only != why.rstrip(".") else only
        ids = [finding.id for finding in group]
        names = ", ".join([ids[0], *(name.removeprefix("DDP") for name in ids[1:])])
        if len(ids) <= 3:
            lines.append((f"? {names} inconclusive", text))
        else:
            lines.append((f"? {len(ids)} inconclusive", f"{text} ({names})"))
    return lines


class _Page:
    """Lines under construction."""

    def __init__(self, width: int, color: bool, ascii_only: bool) -> None:
        self.lines: list[str] = []
        self.width = width
        self.color = color
        self.ascii_only = ascii_only

    def fits(self, head: str, parts: list[str]) -> bool:
        """Whether head and parts, joined by a middle dot, stay within the width."""
        return len(self._spell(head + " · ".join(parts))) <= self.width

    def path(self, text: str) -> None:
        """A line that is never wrapped: a path must stay whole to be clicked or copied."""
        self.lines.append(self._spell(text))

    def _spell(self, text: str) -> str:
        """``text`` in characters that the output can encode. Before wrapping, because it can grow."""
        if not self.ascii_only:
            return text
        for glyph, spelled in _ASCII_GLYPHS.items():
            text = text.replace(glyph, spelled)
        return text.encode("ascii", "backslashreplace").decode("ascii")

    def line(
        self,
        head: str,
        text: str,
        *,
        tone: str = "",
        mark: str = "",
        indent: int | None = None,
        wrap: bool = True,
        code: bool = False,
    ) -> None:
        """Add ``head`` and ``text``, wrapped with a hanging indent.

        Args:
            tone, mark: paint this part of the first line.
            indent: of further lines; as long as ``head`` when ``None``.
            wrap: False for lines that must stay one line; they are cut when too long.
            code: keep leading blanks of ``text``; a line too long is continued further right.
        """
        head, text, mark = self._spell(head), self._spell(text), self._spell(mark)
        rest = " " * min(len(head) if indent is None else indent, self.width // 2)
        if not wrap:
            whole = (head + text).rstrip()
            dots = self._spell("…")
            lines = [whole if len(whole) <= self.width else whole[: self.width - len(dots)] + dots]
        elif code:
            blanks = " " * (len(text) - len(text.lstrip()))
            lines = _wrapped(head + blanks, text, rest + blanks + "    ", self.width)
        else:
            lines = _wrapped(head, text, rest, self.width)
        if self.color and tone and mark:
            lines[0] = lines[0].replace(mark, f"\x1b[{_STYLES[tone]}m{mark}\x1b[0m", 1)
        self.lines += lines


def _wrapped(head: str, text: str, rest: str, width: int) -> list[str]:
    lines: list[str] = []
    current = head
    empty = True
    for word in text.split():
        while True:
            room = width - len(current) - (0 if empty else 1)
            if len(word) <= room:
                current += word if empty else f" {word}"
                empty = False
                break
            if not empty or (len(current) > len(rest) and current.strip()):
                lines.append(current.rstrip())
                current, empty = rest, True
                continue
            lines.append(current + word[:room])  # one word longer than a line
            current, word = rest, word[room:]
    return [*lines, current.rstrip()] if current.strip() or not lines else lines
