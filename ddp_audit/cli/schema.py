"""``ddp-audit schema``: print the JSON Schema of a result file."""

from __future__ import annotations

import click

from ddp_audit.cli import exit_codes

FILES = {"audit": "audit-1.0.json"}
LATER = ("comparison", "scan")


@click.command(name="schema", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="[audit|comparison|scan]")
@click.pass_context
def command(ctx: click.Context, name: str) -> None:
    """Print the JSON Schema of audit.json (of comparison and scan results in later versions).

    \b
    Example:
      ddp-audit schema audit > audit.schema.json
    """
    if name not in FILES:
        later = "comes with a later version" if name in LATER else "is not known"
        click.echo(f"ddp-audit schema: '{name}' {later}; available: {', '.join(FILES)}", err=True)
        ctx.exit(exit_codes.BAD_INPUT)
    from importlib import resources

    click.echo(resources.files("ddp_audit").joinpath("schemas", FILES[name]).read_text(encoding="utf-8"), nl=False)
