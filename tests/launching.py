"""Runs a command with and without the probe, as a shell would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROBE = (sys.executable, "-m", "ddp_audit", "probe", "--deadline", "5")
TIMEOUT = 150  # seconds; a guard against hangs, and machines that run tests are busy


def environment(**more: str) -> dict[str, str]:
    """The present one, without a probe around the tests, ddp-audit importable, and ``more``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DDP_AUDIT", "_DDP_AUDIT", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "VIRTUAL_ENV"):
        env.pop(name, None)
    return {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run(
    words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, text_in: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run to the end with a time limit; output captured."""
    return subprocess.run(
        list(words),
        cwd=cwd,
        env=dict(env) if env is not None else environment(),
        input=text_in,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def without_ours(text: str) -> str:
    """Output without the lines of ddp-audit itself: all from its first on, for it speaks last."""
    lines = text.splitlines(keepends=True)
    kept = []
    for line in lines:
        if line.startswith("ddp-audit"):
            break
        kept.append(line)
    return "".join(kept)
