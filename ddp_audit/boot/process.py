"""What every Python process of a probed job does at its start, and the few lines it leaves behind.

``processes.jsonl`` is the evidence for a job in which no rank was seen: which processes Python
started with our environment, and which of them imported torch. A line holds numbers only. A process
made by ``fork`` writes none: loader workers would fill the file, and a rank proves itself by its journal.
"""

from __future__ import annotations

import os
import sys
import time

from ddp_audit.boot.targets import TARGETS

TYPE_CHECKING = False  # typing takes longer to import than all of ours; type checkers know the name
if TYPE_CHECKING:
    from typing import Any

FILE = "processes.jsonl"
OUT_VARIABLE = "_DDP_AUDIT_OUT"
"""The output folder once more, so that no JSON need be parsed at the start of a process."""

LEADER_VARIABLE = "_DDP_AUDIT_LEADER"
"""Pid of the process that shows the verdict of a job run inside its ranks, if no rank proves itself."""

MAX_BYTES = 1 << 20  # a job that starts Python for every sample must not fill the disk
OLDEST_PYTHON = (3, 11)

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def tell(event: str, **fields: int | str) -> None:
    """Append one line to ``processes.jsonl``. Never raises.

    Args:
        event: start, torch or hook_failed.
        fields: numbers, or words of our own and class names (written unescaped).
    """
    try:
        parts = [f'"pid":{os.getpid()}', f'"event":"{event}"']
        parts += [f'"{k}":{v}' if isinstance(v, int) else f'"{k}":"{v}"' for k, v in fields.items()]
        path = os.path.join(os.environ[OUT_VARIABLE], FILE)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < MAX_BYTES:
                os.write(fd, ("{" + ",".join(parts) + "}\n").encode())
        finally:
            os.close(fd)
    except (OSError, KeyError):
        pass  # no folder on this node, a full disk: the job goes on, the report counts what is there


def _after_import(name: str, module: Any) -> None:
    """Call the hook of a module that was just imported."""
    if name == "torch":
        tell("torch")
    target = TARGETS.get(name)
    if target is None:
        return
    try:
        hook, _, function = target.partition(":")
        __import__(hook)
        getattr(sys.modules[hook], function)(module)
    except Exception as error:
        tell("hook_failed", target=name, error=type(error).__name__)


def _leader_exit() -> None:
    """Show that no rank proved itself, where nobody supervises who could say so."""
    watch = sys.modules.get("ddp_audit.boot.watch")
    if os.environ.get(LEADER_VARIABLE) != str(os.getpid()):
        return  # a forked child leaves through the same handlers
    if watch is not None and watch.started_in == os.getpid():
        return
    try:
        from ddp_audit import settings as options
        from ddp_audit.boot import watch as watcher

        settings = options.from_environment()
        if settings is not None:
            watcher.start_watcher(settings)
            watcher.await_verdict(settings)
    except Exception as error:
        tell("hook_failed", target="exit", error=type(error).__name__)


def start() -> None:
    """Leave a line and watch for the modules of the name table."""
    usable = sys.version_info >= OLDEST_PYTHON
    tell(
        "start",
        ppid=os.getppid(),
        time=int(time.time()),
        ranked=int(any(name in os.environ for name in RANK_VARIABLES)),
        python=sys.version_info[0] * 100 + sys.version_info[1],
    )
    if not usable:
        return
    from ddp_audit.boot import imports

    imports.install(frozenset((*TARGETS, "torch")), _after_import)
    if os.environ.get(LEADER_VARIABLE) == str(os.getpid()):
        import atexit

        atexit.register(_leader_exit)
