"""``ddp-audit demo``: the fault and its fix, side by side, in under a minute."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

JOBS = ("broken", "fixed")
PROMISED = {"broken": "fail", "fixed": "pass"}
NUM_RANKS = 2
SHOWN_CHARACTERS = 6000
TEARDOWN_ABORT = "terminate called without an active exception"  # gloo's own teardown, with or without a probe
TIMEOUT_S = 300  # a run takes some ten seconds; past this, something holds it


class DemoError(click.ClickException):
    """The demo could not run; the text says what to do."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The cells of one job, all of them from its ``audit.json``."""

    verdict: str
    headline: str
    effective_gpus: str
    shard_length: str
    disjoint: str
    steps_per_epoch: str
    report: Path


@click.command(name="demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("ddp-audit-out/demo"),
    show_default=True,
    help="Folder for the two reports.",
)
@click.pass_context
def command(ctx: click.Context, out: Path) -> None:
    """Train a job whose two ranks read the same data, then the fixed job, and show both verdicts.

    Two processes on the CPU; needs nothing but torch, no data and no GPU. Under a minute.

    \b
    Example:
        ddp-audit demo --out my-demo
    """
    if importlib.util.find_spec("torch") is None:
        raise DemoError(f"the demo trains with torch, which {sys.executable} does not have: pip install torch")
    folder = Path(__file__).resolve().parents[1] / "demo"
    shown = []
    for name in JOBS:
        click.echo(f"training {folder.name}/{name}.py on {NUM_RANKS} ranks …", err=True)
        shown.append(summarise(run(folder / f"{name}.py", out / name), out / name / "report.html"))
    show(shown)
    if [s.verdict for s in shown] != [PROMISED[name] for name in JOBS]:
        click.echo(
            "These are not the verdicts that the demo promises: fail, then pass. See the reports for why.", err=True
        )
        ctx.exit(4)


def run(script: Path, out: Path) -> Mapping[str, Any]:
    """Probe one job to its end and return its audit.

    Raises:
        DemoError: the job failed, or left no audit; the end of its output is printed.
    """
    words = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(out), "--", sys.executable]
    words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("DDP_AUDIT", None)  # DDP_AUDIT=0 would leave nothing to show
    for _ in range(2):
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{script.name} had not ended after {TIMEOUT_S} s") from None
        if TEARDOWN_ABORT not in done.stderr:
            break
        click.echo("gloo aborted a rank at exit, which it does now and then: once more …", err=True)
    audit = out / "audit.json"
    if done.returncode or not audit.exists():
        click.echo((done.stdout + done.stderr).strip()[-SHOWN_CHARACTERS:], err=True)
        missing = "" if done.returncode else " and left no audit.json"
        raise DemoError(
            f"{script.name} ended with exit code {done.returncode}{missing}; above is the end of its output"
        )
    value: dict[str, Any] = json.loads(audit.read_text(encoding="utf-8"))
    return value


def summarise(audit: Mapping[str, Any], report: Path) -> Shown:
    """What the table shows of one audit; "unknown" where it holds no value."""
    ranks = audit["ranks"]
    lengths = sorted({r["shard_length"] for r in ranks if r["shard_length"] is not None})
    steps = sorted({r["num_steps"] / r["num_epochs"] for r in ranks if r["num_epochs"]})
    effective, distinct = audit["effective_gpus"], audit["distinct_fraction"]
    return Shown(
        verdict=audit["verdict"],
        headline=audit["headline"],
        effective_gpus="unknown" if effective is None else f"{effective:.1f} of {audit['world_size']}",
        shard_length=" and ".join(f"{n} samples" for n in lengths) or "unknown",
        disjoint="unknown" if distinct is None else "yes" if distinct == 1 else "no",
        steps_per_epoch=" and ".join(f"{n:g}" for n in steps) or "unknown",
        report=report,
    )


def show(shown: list[Shown]) -> None:
    """Print the two columns and where the reports are."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("")
    for name in JOBS:
        table.add_column(f"{name} job")
    for title, cells in (
        ("verdict", [s.verdict.upper() for s in shown]),
        ("effective GPUs", [s.effective_gpus for s in shown]),
        ("shard length", [s.shard_length for s in shown]),
        ("shards disjoint", [s.disjoint for s in shown]),
        ("steps per epoch", [s.steps_per_epoch for s in shown]),
    ):
        table.add_row(title, *cells)
    Console(highlight=False).print(table)
    for name, one in zip(JOBS, shown, strict=True):
        click.echo(f"{name}: {one.headline}")
        click.echo(f"{' ' * len(name)}  report: {one.report}")
