"""``ddp-audit report``: judge recorded evidence again and show the result."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ddp_audit.cli import exit_codes

if TYPE_CHECKING:
    from ddp_audit.records import Audit

FORMATS = ("text", "html", "json")
LATER_FORMATS = ("junit", "github", "markdown")


def _known_format(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value in FORMATS:
        return value
    later = "comes with a later version" if value in LATER_FORMATS else "is not known"
    raise click.BadParameter(f"format '{value}' {later}; available: {', '.join(FORMATS)}", ctx, param)


@click.command(name="report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-f",
    "--format",
    "fmt",
    metavar=f"[{'|'.join(FORMATS)}]",
    callback=_known_format,
    default="text",
    show_default=True,
    help="How to write the result.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write it; - for standard output. Default: text and json to standard output, "
    "html to report.html in the first DIR.",
)
@click.option(
    "--fail-on",
    type=click.Choice(exit_codes.FAIL_ON),
    default="error",
    show_default=True,
    help="Lowest severity that exits 1.",
)
@click.option("--allow-inconclusive", is_flag=True, help="Exit 0 instead of 3 when a core question has no answer.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour the text.",
)
@click.pass_context
def command(
    ctx: click.Context,
    folders: tuple[Path, ...],
    fmt: str,
    output: str | None,
    fail_on: str,
    allow_inconclusive: bool,
    force: bool,
    color: str,
) -> None:
    """Judge the evidence in each DIR again and show the result.

    Several DIRs are the folders of one job that its nodes wrote apart. Works on the folder of a
    job that is still running, and says so.

    \b
    Examples:
      ddp-audit report ddp-audit-out/latest
      ddp-audit report ddp-audit-out/latest --format html -o report.html
      ddp-audit report node0/out node1/out --format json -o - --fail-on warning

    \b
    Exit codes: 0 fine, 1 a finding at or above --fail-on, 2 bad usage or unreadable
    input, 3 a core question without an answer, 4 a bug in ddp-audit.
    """
    target = None if output in (None, "-") else Path(str(output))
    if target is not None and target.exists() and not force:
        _refuse(ctx, f"'{target}' exists; give another -o, or --force to overwrite it")
    audit = _judged(ctx, folders)
    if fmt == "html" and output is None:
        target = folders[0] / "report.html"
    if fmt == "text":
        text = _text(audit, color, _newest_report(folders), to_terminal=target is None)
    elif fmt == "json":
        from ddp_audit.render import json as render_json

        text = render_json.render(audit)
    else:
        from ddp_audit.render import html as render_html

        text = render_html.render(audit)
    if target is None:
        click.echo(text, nl=False, color=True)
    else:
        try:
            write_atomically(target, text)
        except OSError as error:
            _refuse(ctx, f"cannot write '{target}': {error.strerror or error}; give another place with -o")
        click.echo(_text(audit, color, f"{target} ({_size(text)})", to_terminal=True), nl=False, color=True)
    ctx.exit(exit_codes.exit_code(audit, fail_on, allow_inconclusive))


def _judged(ctx: click.Context, folders: tuple[Path, ...]) -> Audit:
    from ddp_audit.collect.evidence import EvidenceError
    from ddp_audit.collect.merge import merge
    from ddp_audit.judge import judge

    for folder in folders:
        if not folder.exists():
            _refuse(ctx, f"no folder '{folder}'; name one that 'ddp-audit probe' wrote, such as ddp-audit-out/latest")
        if not folder.is_dir():
            _refuse(ctx, f"'{folder}' is a file; name the folder that 'ddp-audit probe' wrote")
    try:
        evidence = merge(folders)
    except EvidenceError as error:
        _refuse(ctx, " ".join(str(error).split()))
    except OSError as error:
        _refuse(ctx, f"cannot read '{error.filename or folders[0]}': {error.strerror or error}")
    return judge(evidence)


def _refuse(ctx: click.Context, message: str) -> NoReturn:
    click.echo(f"ddp-audit report: {message}", err=True)
    ctx.exit(exit_codes.BAD_INPUT)


def _newest_report(folders: tuple[Path, ...]) -> str | None:
    report = folders[0] / "report.html"
    try:
        return f"{report} ({_size_of(report.stat().st_size)})"
    except OSError:
        return None


def _text(audit: Audit, color: str, report_path: str | None, *, to_terminal: bool) -> str:
    from ddp_audit.render import text as render_text

    painted = to_terminal and wants_color(color)
    ascii_only = to_terminal and not can_encode_glyphs()
    return render_text.render(audit, color=painted, ascii_only=ascii_only, report_path=report_path)


def wants_color(color: str = "auto") -> bool:
    """Whether standard output gets colour: on request, else only a terminal and never with ``NO_COLOR``."""
    if color != "auto":
        return color == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_encode_glyphs() -> bool:
    """Whether standard output's encoding holds the glyphs of the verdict."""
    try:
        "✖▲✔–·µ└─…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 so that a reader sees the old file or the whole new one.

    Raises:
        OSError: the folder is missing, read-only or full; no part file is left.
    """
    data = text.encode()
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # mkstemp made it 0600; a report that -o names is meant to be shared
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _size(text: str) -> str:
    return _size_of(len(text.encode()))


def _size_of(num_bytes: int) -> str:
    from ddp_audit.render.words import size

    return size(num_bytes)
