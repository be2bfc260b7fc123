"""``ddp-audit explain``: one check in full, from the words beside its code."""

from __future__ import annotations

import ast
import difflib
import textwrap
from typing import TYPE_CHECKING

import click

from ddp_audit.cli import exit_codes

if TYPE_CHECKING:
    from ddp_audit.records import CheckInfo

_WIDTH = 80


@click.command(name="explain", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("check", metavar="ID")
@click.pass_context
def command(ctx: click.Context, check: str) -> None:
    """Explain a check: what it proves, what it needs, when it errs, how to fix what it finds.

    ID is an id (DDP101, also 101) or a kind (identical-data-across-ranks).

    \b
    Examples:
      ddp-audit explain DDP101
      ddp-audit explain set-epoch-missing
    """
    from ddp_audit.checks import ALL_INFOS

    info = find(check, ALL_INFOS)
    if info is None:
        names = nearest(check, ALL_INFOS)
        hint = f"did you mean {' or '.join(names)}" if names else "'ddp-audit checks' lists all"
        click.echo(f"ddp-audit explain: no check '{check}'; {hint}", err=True)
        ctx.exit(exit_codes.BAD_INPUT)
    click.echo(page(info))


def find(name: str, infos: tuple[CheckInfo, ...]) -> CheckInfo | None:
    """The check with this id (any case, with or without its letters) or kind."""
    wanted = name.strip().lower().replace("_", "-")
    for info in infos:
        if wanted in (info.id.lower(), info.id.lower().removeprefix("ddp"), info.kind):
            return info
    return None


def nearest(name: str, infos: tuple[CheckInfo, ...], most: int = 3) -> list[str]:
    """Ids and kinds that look like ``name``, best first."""
    known = [info.id for info in infos] + [info.kind for info in infos]
    lower = {text.lower(): text for text in known}
    wanted = name.strip().lower().replace("_", "-")
    if wanted.isdigit():
        wanted = f"ddp{wanted}"
    close = difflib.get_close_matches(wanted, lower, n=most, cutoff=0.6)
    if len(wanted) >= 4:  # the beginning of a kind, perhaps misspelled
        start = {text[: len(wanted)]: text for text in reversed(lower)}
        close += [start[text] for text in difflib.get_close_matches(wanted, start, n=most, cutoff=0.75)]
    inside = [text for text in lower if len(wanted) >= 4 and wanted in text]
    return [lower[text] for text in dict.fromkeys([*close, *inside])][:most]


def page(info: CheckInfo) -> str:
    """The check as text, at most 80 columns wide but for code."""
    parts = [
        f"{info.id} {info.kind} ({info.severity.value}, since {info.since})",
        _paragraph(f"Finds: {info.failure_title}."),
        _paragraph(info.why),
        _paragraph(info.explanation),
        _paragraph(f"Needs: {info.needs}"),
        "Broken:\n" + _code(info.broken),
        "Fixed:\n" + _code(info.fixed),
        "Fix:\n" + _code(info.fix) if _is_code(info.fix) else _paragraph(f"Fix: {info.fix}"),
    ]
    return "\n\n".join(parts)


def _is_code(text: str) -> bool:
    try:
        ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return "\n" in text
    return True


def _paragraph(text: str) -> str:
    return "\n".join(textwrap.fill(" ".join(part.split()), _WIDTH) for part in text.strip().split("\n\n"))


def _code(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")
