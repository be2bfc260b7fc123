"""Exit codes: the numbers a pipeline gates on. Never changed, only added to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_audit.records import Audit

OK = 0
FINDING = 1
BAD_INPUT = 2  # click's own code for bad usage
INCONCLUSIVE = 3
INTERNAL_ERROR = 4

FAIL_ON = ("error", "warning", "never")


def exit_code(audit: Audit, fail_on: str, allow_inconclusive: bool) -> int:
    """The code that an audit gates with.

    Args:
        audit: what was judged.
        fail_on: lowest severity that gives 1: ``error``, ``warning`` or ``never``.
        allow_inconclusive: an unanswered core question gives 0 instead of 3.

    Returns:
        0, 1 or 3. ``never`` gives 0 whatever was found; a finding goes before an open question.
    """
    from ddp_audit.records import Outcome, Severity, Verdict  # brings numpy, which --help does without

    if fail_on == "never":
        return OK
    gate = {"error": {Severity.ERROR}, "warning": {Severity.ERROR, Severity.WARNING}}[fail_on]
    found = [f for f in audit.checks if f.outcome is Outcome.FAIL and f.suppressed is None]
    if any(f.severity in gate for f in found):
        return FINDING
    unanswered = audit.verdict is Verdict.INCONCLUSIVE or bool(audit.core_unanswered)
    return INCONCLUSIVE if unanswered and not allow_inconclusive else OK
