"""The watcher of a job that is run inside its ranks: the one who is left to show the verdict.

Rank 0 starts it when it proves to be a rank. It is detached, so that it survives what ends rank 0,
and no child of rank 0, so that the job's own ``wait`` never meets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_audit.boot import folder
from ddp_audit.boot.supervise import alive
from ddp_audit.settings import Settings

started_in = 0
"""Pid of the process that started a watcher from this module's state; a forked child differs."""

POLL = 0.2  # seconds; two file look-ups per turn

_CODE = "import sys; sys.path.append(sys.argv[1]); from ddp_audit.cli.watcher import main; sys.exit(main(sys.argv[2:]))"
_INTERNAL = ("_DDP_AUDIT_OUT", "_DDP_AUDIT_SETTINGS", "_DDP_AUDIT_LEADER")


def marker(out: str | Path, name: str, run_id: str, pid: int) -> Path:
    """Path of a small file by which rank 0 and its watcher tell each other how far they are."""
    return Path(out) / f".{name}-{run_id}-{pid}"


def clean_environment(environ: dict[str, str]) -> dict[str, str]:
    """The environment without what makes a process a probed one."""
    env = {k: v for k, v in environ.items() if k not in _INTERNAL}
    here = str(Path(__file__).resolve().parent / "site")
    parts = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.realpath(p) != here]
    if parts:
        env["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        env.pop("PYTHONPATH", None)
    return env


def restarts_left(environ: Mapping[str, str]) -> bool:
    """Whether the launcher starts the ranks anew should they fail."""
    try:
        return int(environ["TORCHELASTIC_RESTART_COUNT"]) < int(environ["TORCHELASTIC_MAX_RESTARTS"])
    except (KeyError, ValueError):
        return False


def start_watcher(settings: Settings) -> None:
    """Start the watcher of this process. Never raises; returns within milliseconds.

    To be called in rank 0 of a job whose form is ``rank``, once; further calls do nothing.
    """
    global started_in
    if settings.form != "rank" or started_in == os.getpid():
        return
    started_in = os.getpid()
    try:
        root = str(Path(__file__).resolve().parents[2])
        python = settings.python or sys.executable
        identity = folder.process_identity(os.getpid())
        words = [python, "-P", "-c", _CODE, root, settings.to_json(), str(os.getpid()), identity[0] if identity else ""]
        # The shell leaves at once and is waited for here; the watcher it leaves behind has init as
        # its parent. close_fds: a copy of a socket would hide the death of this rank from its peers.
        shell = subprocess.Popen(
            ["/bin/sh", "-c", '"$0" "$@" </dev/null &', *words],
            stdin=subprocess.DEVNULL,
            env=clean_environment(dict(os.environ)),
            start_new_session=True,
            close_fds=True,
        )
        shell.wait(timeout=2.0)
    except Exception:
        pass  # the evidence is there; `ddp-audit report` shows it


def await_verdict(settings: Settings) -> None:
    """Wait until the watcher has shown the verdict, at most ``settings.deadline`` seconds.

    For the exit handler of rank 0, after its journal is closed: its launcher returns when this
    process does, and the verdict should be on the screen by then. Never raises.
    """
    if settings.form != "rank" or started_in != os.getpid():
        return
    if hasattr(sys, "last_type") and restarts_left(os.environ):
        return  # an exception ends us, and the launcher starts us anew: the verdict is for the end
    try:
        limit = time.monotonic() + settings.deadline
        shown = marker(settings.out, "verdict", settings.run_id, os.getpid())
        marker(settings.out, "leaving", settings.run_id, os.getpid()).touch(mode=0o600)
        while time.monotonic() < limit and not shown.exists():
            time.sleep(0.05)
    except Exception:
        pass


def await_end(settings: Settings, pid: int, identity: str, each: Callable[[], None]) -> bool:
    """Wait, in the watcher, until rank 0 leaves or is gone.

    Args:
        pid, identity: of rank 0.
        each: called at every turn.

    Returns:
        True when it left in order, False when it was ended.
    """
    leaving = marker(settings.out, "leaving", settings.run_id, pid)
    while True:
        if leaving.exists():
            return True
        now = folder.process_identity(pid)
        if now is None or (identity and now[0] != identity) or not alive(pid):
            return leaving.exists()
        each()
        time.sleep(POLL)
