"""``ddp-audit checks``: list what is judged."""

from __future__ import annotations

import json

import click


@click.command(name="checks", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-f",
    "--format",
    "fmt",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How to write the list.",
)
def command(fmt: str) -> None:
    """List all checks: id, weight, what is true when it passes.

    \b
    Examples:
      ddp-audit checks
      ddp-audit checks --format json
    """
    from dataclasses import asdict

    from ddp_audit.checks import ALL_INFOS

    if fmt == "json":
        click.echo(json.dumps([asdict(info) for info in ALL_INFOS], indent=1, sort_keys=True, ensure_ascii=False))
        return
    width = max((len(info.kind) for info in ALL_INFOS), default=0)
    for info in ALL_INFOS:
        click.echo(f"{info.id}  {info.severity.value:<7}  {info.kind:<{width}}  {info.title}")
