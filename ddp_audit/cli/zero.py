"""Why no rank was seen, by evidence: what processes left behind, and what was seen of them in /proc."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_audit.boot.process import FILE, OLDEST_PYTHON
from ddp_audit.boot.supervise import alive
from ddp_audit.settings import VARIABLE

PYTHON_WORD = re.compile(r"^python\d*(\.\d+)?t?$")
MAX_PROCESSES = 256  # looked at per turn


@dataclass(slots=True)
class Seen:
    """What was seen of the child's processes while they ran. Words and values are not kept."""

    isolated: bool = False  # a Python with -I, -E or -S
    without_variable: bool = False  # a Python without our variable
    pythons: int = 0


def look(child: int, seen: Seen) -> None:
    """Look at the child and its descendants."""
    todo, num = [child], 0
    while todo and num < MAX_PROCESSES:
        pid = todo.pop()
        num += 1
        todo += children(pid)
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if not words or not PYTHON_WORD.match(os.path.basename(words[0])):
                continue
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        seen.pythons += 1
        seen.isolated |= is_isolated(words)
        seen.without_variable |= bool(environ) and f"{VARIABLE}=".encode() not in environ


def children(pid: int) -> list[int]:
    """Child pids of all threads; empty when the process is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except (OSError, ValueError):
        pass
    return found


def is_isolated(words: list[str]) -> bool:
    """Whether a python command line has -I, -E or -S among its own options."""
    skip = False
    for word in words[1:]:
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word in ("-", "-m", "-c"):
            return False
        if word in ("-W", "-X"):
            skip = True
        elif not word.startswith(("--", "-W", "-X")):
            flags = re.split("[cm]", word[1:])[0]
            if set(flags) & set("IES"):
                return True
            if flags != word[1:]:
                return False
    return False


def lines(out: Path) -> list[dict[str, Any]]:
    """The whole lines of ``processes.jsonl``."""
    try:
        text = (out / FILE).read_text()
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def why_no_rank(
    out: Path, *, launcher: str | None, child: int | None, seen: Seen | None = None, asked: int | None = None
) -> str:
    """One paragraph that goes on after "No rank was seen: ", without a last full stop.

    Args:
        out: the output folder.
        launcher: the launcher's name, when the command was one; its own process is no rank.
        child: its pid.
        seen: what was seen in /proc, where somebody looked.
        asked: ranks that the launcher was asked for.
    """
    return _reason(lines(out), launcher, child, seen, asked).rstrip(".")


def _reason(
    told: list[dict[str, Any]], launcher: str | None, child: int | None, seen: Seen | None, asked: int | None
) -> str:
    starts = [line for line in told if line.get("event") == "start"]
    with_torch = {line.get("pid") for line in told if line.get("event") == "torch"}
    ranked = [line for line in starts if line.get("ranked")]
    workers = ranked or [line for line in starts if launcher is None or line.get("pid") != child]
    few = ""
    if asked is not None and len(workers) < asked:
        few = f" The launcher was asked for {asked} ranks; {_processes(len(workers))} started."
    if not workers:
        if seen is not None and seen.isolated:
            return (
                "Python was started with -I, -E or -S, which keep it from loading ddp-audit. "
                "Leave these options out for a probed run." + few
            )
        if seen is not None and seen.without_variable:
            return (
                "the environment was not passed on to the job's Python. Pass it on (srun --export=ALL, "
                "mpirun -x, docker run -e), or put ddp-audit probe just before the script." + few
            )
        if starts:
            return (
                "the launcher ended before a Python process of the job started, or did not pass its "
                "environment on." + few
            )
        return (
            "no Python process started with the environment of ddp-audit. Either the command starts no Python, "
            "or its Python was started with -I, -E or -S, or the environment was not passed on." + few
        )
    old = [line["python"] for line in workers if line.get("python", 999) < OLDEST_PYTHON[0] * 100 + OLDEST_PYTHON[1]]
    if old:
        version = f"{old[0] // 100}.{old[0] % 100}"
        return f"the job's Python is {version}. Inside the ranks ddp-audit needs 3.11 or newer."
    if not any(line.get("pid") in with_torch for line in workers) and not with_torch - {child}:
        return f"torch was never imported ({_processes(len(workers))} of the job ran).{few}"
    failed = [line for line in told if line.get("event") == "hook_failed"]
    if failed:
        return (
            f"the hooks could not be loaded in the job's Python ({failed[0].get('error')} at the import of "
            f"{failed[0].get('target')}). They need numpy and a torch of 2.4 or newer there."
        )
    running = sum(alive(int(line.get("pid", 0))) for line in workers)
    if running:
        return f"none has proved to be one so far; {_processes(running)} of the job still run.{few}"
    return (
        "torch was imported, but no process made a process group, wrapped a model for data-parallel training "
        f"or made an optimizer step.{few}"
    )


def _processes(count: int) -> str:
    return f"{count} Python process" + ("" if count == 1 else "es")
