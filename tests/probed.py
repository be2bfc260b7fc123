"""Run a script with the hooks but without the command line, and read its journals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ddp_audit.journal import JournalContent, read_journal
from ddp_audit.settings import VARIABLE, Settings

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "ddp_audit" / "boot" / "site"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a script left behind; journals by rank."""

    code: int
    output: str
    journals: tuple[JournalContent, ...]

    def events(self, name: str, rank: int = 0) -> list[dict]:
        """The events of one name in one rank's journal."""
        return [event for event in self.journals[rank].events if event["event"] == name]


def run(
    folder: Path, code: str, *, nproc: int = 1, probe: bool = True, args: tuple[str, ...] = (), **environment: str
) -> Result:
    """Run ``code`` as a script: plainly, or with ``nproc`` ranks under torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    script, out = folder / "job.py", folder / "out"
    script.write_text(code)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH")}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    if probe:
        settings = Settings(out=str(out), run_id="ab", form="supervise", python=sys.executable)
        env |= {VARIABLE: settings.to_json(), "_DDP_AUDIT_OUT": str(out), "PYTHONPATH": str(SITE)}
    command = [sys.executable, str(script), *args]
    if nproc > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command = [sys.executable, *launcher, str(script), *args]
    for _ in range(3):
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
        if "terminate called without an active exception" not in done.stderr:
            break
    found = [read_journal(path) for path in sorted((out / "journal").glob("*.journal"))]
    return Result(
        code=done.returncode, output=done.stdout + done.stderr, journals=tuple(j for j in found if j is not None)
    )
