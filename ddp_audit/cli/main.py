"""The entry point: one group of commands, each loaded only when it is called."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

import ddp_audit
from ddp_audit.cli import exit_codes

COMMANDS: Mapping[str, str] = {
    "probe": "Run a training job and say whether its ranks do different work.",
    "report": "Judge recorded evidence and show the result.",
    "checks": "List all checks.",
    "explain": "Explain a check: what it proves, why it matters, how to fix it.",
    "demo": "Train a broken and a fixed job and show both verdicts.",
    "schema": "Print the JSON schema of a result.",
}
"""Name and one line each, so that ``--help`` need not load them; a command's module has its name."""


class LazyGroup(click.Group):
    """Loads ``ddp_audit.cli.<name>`` when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a user's first day."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or ``None`` when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ddp_audit.cli.{cmd_name}")
        found = getattr(module, "command", None) or getattr(module, cmd_name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, with a guess at what was meant.

        Raises:
            click.UsageError: there is no such command.
        """
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command '{name}'; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a traceback when ddp-audit itself fails.")
@click.version_option(ddp_audit.__version__, prog_name="ddp-audit")
@click.pass_context
def group(ctx: click.Context, debug: bool) -> None:
    """Do my N GPUs do the work of N?

    Watches an unmodified data-parallel training job and says, by evidence, whether its ranks do
    different work.

    \b
    Examples:
      ddp-audit probe torchrun --nproc-per-node=2 train.py
      ddp-audit report ddp-audit-out/latest
      ddp-audit explain DDP101
    """


def main() -> NoReturn:
    """Run the command line and exit with its code; see ``exit_codes``."""
    sys.exit(run(sys.argv[1:]))


def _stand_in_streams() -> None:
    """A stream that was closed at start is ``None`` to Python: what we say then goes nowhere, as it was meant to.

    The null device is not inherited, so a job finds its streams as closed as they were.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def run(args: list[str]) -> int:
    """Run the command line.

    Args:
        args: the words after ``ddp-audit``.

    Returns:
        The exit code; what went wrong is one line on standard error.
    """
    _stand_in_streams()
    try:
        value: Any = group.main(args=args, prog_name="ddp-audit", standalone_mode=False)
        sys.stdout.flush()
        return value if isinstance(value, int) else exit_codes.OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return exit_codes.BAD_INPUT
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "ddp-audit"
        text = " ".join(error.format_message().split())
        text = text[:1].lower() + text[1:] if text[1:2].islower() else text
        hint = f" (see '{path} --help')" if isinstance(error, click.UsageError) and "ddp-audit" not in text else ""
        click.echo(f"{path}: {text.rstrip('.')}{hint}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("ddp-audit: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone: end as if by SIGPIPE, without Python's own complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        if "--debug" in args[:1] or os.environ.get("DDP_AUDIT_DEBUG"):
            import traceback

            traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        click.echo(
            f"ddp-audit: internal error: {text}. This is a bug in ddp-audit; "
            "'ddp-audit --debug …' shows where, and is what a report of it needs.",
            err=True,
        )
        return exit_codes.INTERNAL_ERROR


if __name__ == "__main__":
    main()
