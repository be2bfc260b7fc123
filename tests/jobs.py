"""Start training jobs in tests, with and without the probe, under a time limit.

``from jobs import run_job``. Each run is a process of its own session, ended whole when its time is up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEARDOWN_ABORT = "terminate called without an active exception"
"""What gloo's own teardown prints when it aborts a rank at exit, now and then, with or without a probe."""

REPOSITORY = Path(__file__).resolve().parents[1]

LAUNCHERS: dict[str, tuple[str, ...]] = {
    # the form of probe that stands around the launcher
    "torchrun": ("{torchrun}", "{script}"),
    "python": ("{python}", "{script}"),
    # the form that stands inside each rank; {probe} is nothing without a probe
    "inside": ("{torchrun}", "--no-python", "{probe}", "{script}"),
    "module": ("{torchrun}", "-m", "ddp_audit", "probe", "{options}", "{script}"),
}
INSIDE = ("inside", "module")

_LEAKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)


@dataclass(slots=True)
class Repeats:
    """How many runs were made and how many of them gloo's teardown aborted."""

    runs: int = 0
    aborts: int = 0


REPEATS = {True: Repeats(), False: Repeats()}
"""By whether the run was probed; printed at the end of the tests, compared by ``--compare-repeats``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """What a finished job left behind.

    Attributes:
        code: exit code as the shell would see it; negative = ended by that signal.
        out: the probe's output folder, whether it exists or not.
        repeats: how often the run was repeated for gloo's teardown abort.
    """

    command: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float
    cwd: Path
    out: Path
    repeats: int

    @property
    def log(self) -> str:
        return self.stdout + self.stderr

    @property
    def audit(self) -> dict[str, Any]:
        """The parsed ``audit.json``.

        Raises:
            AssertionError: there is none; the text holds the end of the job's output.
        """
        path = self.out / "audit.json"
        assert path.exists(), (
            f"no audit.json in {sorted(p.name for p in self.out.glob('*'))}; exit {self.code}\n{self.log[-3000:]}"
        )
        value: dict[str, Any] = json.loads(path.read_text())
        return value

    @property
    def failed(self) -> set[str]:
        """Kinds whose check found a fault."""
        return {check["kind"] for check in self.audit["checks"] if check["outcome"] == "fail"}

    @property
    def journals(self) -> list[Path]:
        return sorted((self.out / "journal").glob("*.journal"))


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's or a probe's variables, one thread per process, offline."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in _LEAKS and not k.startswith(("DDP_AUDIT", "_DDP_AUDIT", "TORCHELASTIC", "SLURM_", "OMPI_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1"}
    return env | dict(extra or {})


def ddp_audit(
    *args: str, cwd: Path, timeout: float = 60, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``ddp-audit ARGS`` as a child process; its output as text."""
    return subprocess.run(
        [sys.executable, "-m", "ddp_audit", *args],
        cwd=cwd,
        env=clean_environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def torchrun(nproc: int) -> tuple[str, ...]:
    """torchrun on one node, by this interpreter, on a free port of its own."""
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")


def job_command(
    script: Path, args: Sequence[str], nproc: int, launcher: str | Sequence[str], probe: bool, options: Sequence[str]
) -> list[str]:
    """The whole command line of a job; see ``run_job``."""
    inside = launcher in INSIDE
    parts = list(LAUNCHERS[launcher] if isinstance(launcher, str) else launcher)
    if launcher == "module" and not probe:
        parts = list(LAUNCHERS["torchrun"])
    probing = [sys.executable, "-m", "ddp_audit", "probe", *options] if probe else [sys.executable]
    groups = {"{torchrun}": torchrun(nproc), "{probe}": probing, "{options}": options}
    command: list[str] = []
    for part in parts:
        if part in groups:
            command += groups[part]
        else:
            command.append(part.format(python=sys.executable, script=script, nproc=nproc))
    command += args
    return command if inside or not probe else [*probing, "--", *command]


def run_job(
    script: Path | str,
    *args: str,
    cwd: Path,
    nproc: int = 2,
    launcher: str | Sequence[str] = "torchrun",
    probe: bool = True,
    options: Sequence[str] = (),
    out: Path | None = None,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> JobRun:
    """Run a job to its end.

    Args:
        script: a file, or source text, which is written to ``cwd/job.py``.
        launcher: a name of ``LAUNCHERS``, or a command whose parts may hold ``{python}``, ``{script}``, ``{nproc}``.
        options: of ``ddp-audit probe``, ``--out`` aside.
        out: output folder; default ``cwd/audit``.
        timeout: seconds; past them the job's processes are killed and the test fails.

    A run in which gloo's teardown aborted a rank is made once more, and counted.

    Raises:
        AssertionError: the job had not ended in time.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    if isinstance(script, str):
        path = cwd / "job.py"
        path.write_text(script)
        script = path
    out = out or cwd / "audit"
    command = job_command(script, args, nproc, launcher, probe, ["--out", str(out), *options])
    repeats = 0
    while True:
        REPEATS[probe].runs += 1
        start = time.monotonic()
        code, stdout, stderr = _run(command, cwd, clean_environment(env), timeout)
        aborted = TEARDOWN_ABORT in stderr
        REPEATS[probe].aborts += aborted
        if not aborted or repeats:
            break
        repeats += 1
    return JobRun(
        command=tuple(command),
        code=code,
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - start,
        cwd=cwd,
        out=out,
        repeats=repeats,
    )


def _run(command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float) -> tuple[int, str, str]:
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # torchrun gives each rank a session of its own, so the group is not enough
            for pid in [*_descendants(process.pid), process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            stdout, stderr = process.communicate(timeout=10)
            raise AssertionError(
                f"no end after {timeout} s: {' '.join(command)}\n{stdout[-2000:]}{stderr[-4000:]}"
            ) from None
    return process.returncode, stdout, stderr


def _descendants(pid: int) -> list[int]:
    """Children of a process and theirs, deepest first, from /proc."""
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += [*_descendants(int(child)), int(child)]
    return found
