"""The output folder: made, emptied of earlier evidence, and agreed on by all ranks of a node.

Ranks cannot talk before their process group exists. They agree by the identity of the process that
launched them, and one of them, who makes a marker file first, tidies for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT = "ddp-audit-out"
PREVIOUS = "previous"
RUN_FILE = "run.json"
ALIVE_FILE = ".alive"
EVIDENCE = ("journal", "audit.json", "report.html", RUN_FILE, "processes.jsonl", "moved.json")
"""Names of ours in a folder, besides those that start with ``evidence``; nothing else is ever moved."""

MARKS = (".run-", ".ended-", ".verdict-", ".leaving-", ".watcher-", ".first-node-", ".tmp-")

MARKER_WAIT = 5.0  # seconds that a rank waits for the one that tidies; moving is a few renames
STALE = 60.0  # seconds without a sign of life after which a folder's job is taken for dead


class FolderError(OSError):
    """Nothing can be written there; the job is then run unprobed."""


def process_identity(pid: int) -> tuple[str, float] | None:
    """(identity, start time) of a process on this host: equal pids of two times differ.

    Returns:
        A text of boot id, PID namespace and clock ticks, and the start in seconds since the epoch.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        ticks = int(stat[stat.rindex(")") + 2 :].split()[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            space = ""
    except (OSError, ValueError, IndexError):
        return None
    start = time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    return f"{boot}|{space}|{pid}|{ticks}", start


def launch_identity(environ: Mapping[str, str]) -> tuple[str, float, bool]:
    """The launch that this rank belongs to, as all its ranks find it without talking.

    Returns:
        Run id, start time, and whether ranks on other nodes may have the same id. The id outlives a
        restart by the launcher, which picks a new MASTER_PORT when it holds the rendezvous itself.
    """
    parent = process_identity(os.getppid())
    start = parent[1] if parent else time.time()
    elastic = environ.get("TORCHELASTIC_RUN_ID", "none")
    named = elastic != "none"
    job = [elastic, environ.get("MASTER_ADDR", ""), "" if named else environ.get("MASTER_PORT", "")]
    slurm = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if "TORCHELASTIC_RUN_ID" in environ:
        if environ.get("LOCAL_WORLD_SIZE", "") != environ.get("WORLD_SIZE", ""):
            return _digest(*job, *slurm), start, True
        return _digest(*job, parent[0] if parent else str(os.getppid())), start, True
    if all(slurm):
        return _digest(*slurm), start, True  # tasks may each have a parent of their own
    return _digest(*job, parent[0] if parent else str(os.getppid())), start, True


def job_digest(*parts: str) -> str:
    """Run id of what the nodes of one job have in common."""
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def new_run_id() -> str:
    """A run id that nobody else has."""
    return secrets.token_hex(8)


def stamp(moment: float) -> str:
    """A time as part of a file name, local time."""
    return time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(moment))


def open_folder(
    out: Path | None,
    *,
    run_id: str,
    start: float,
    shared: bool,
    run: Mapping[str, Any],
    restarted: bool = False,
) -> Path:
    """Make the folder ready for this launch.

    Args:
        out: what ``--out`` says; ``None`` = the default below the working folder.
        run_id: of this launch; with ``shared`` several processes come with the same one.
        start: seconds since the epoch; names the default folder.
        shared: other processes may open the same folder for the same launch.
        run: content of ``run.json``, written by the process that came first.
        restarted: this process was started anew by a launcher whose first ranks opened the folder.

    Returns:
        The absolute path.

    Raises:
        FolderError: it cannot be made or written.
    """
    try:
        if out is not None:
            folder = Path(os.path.abspath(out))
            _make(folder)
        else:
            folder = _default(Path.cwd() / DEFAULT, run_id=run_id, start=start, shared=shared)
        if _first(folder, run_id, restarted):
            _tidy(folder, keep=run_id)
            (folder / "journal").mkdir(mode=0o700, exist_ok=True)
            write_atomic(folder / RUN_FILE, json.dumps(dict(run), indent=1).encode())
            (folder / f".run-{run_id}").write_text("ready")
        else:
            _wait_ready(folder / f".run-{run_id}")
            if not os.access(folder, os.W_OK):
                raise FolderError(f"{folder} cannot be written")
    except OSError as error:
        raise FolderError(str(error)) from error
    if out is None:
        _latest(folder)
    return folder


def _make(folder: Path) -> None:
    """Make the folder private, and invisible to git. One that was there keeps its mode."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")


def _default(base: Path, *, run_id: str, start: float, shared: bool) -> Path:
    _make(base)
    name = stamp(start)
    if shared:
        name = f"{name}-{run_id[:6]}"
        folder = base / _claimed(base, run_id, name)
    else:
        folder, count = base / name, 1
        while folder.exists():
            count += 1
            folder = base / f"{name}-{count}"
    _make(folder)
    return folder


def _claimed(base: Path, run_id: str, name: str) -> str:
    """The folder name that the first of several nodes with this run id chose, unless it is long dead."""
    claim = base / f".claim-{run_id}"
    for _ in range(2):
        try:
            fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, name.encode())
            os.close(fd)
            return name
        except FileExistsError:
            _wait_ready(claim)
            other = claim.read_text().strip()
            if other == name or (other and "/" not in other and _alive(base / other)):
                return other
            claim.unlink(missing_ok=True)
    return name


def _alive(folder: Path) -> bool:
    """A sign of life within the last minute, or a folder so young that there was no time for one."""
    return any(_fresh(folder / name) for name in (ALIVE_FILE, RUN_FILE))


def sign_of_life(folder: Path) -> None:
    """Touch the file by which another node of the job sees that this one still runs."""
    try:
        (folder / ALIVE_FILE).touch(mode=0o600)
    except OSError:
        pass


def _first(folder: Path, run_id: str, restarted: bool) -> bool:
    """True for the one process of this launch that tidies the folder.

    Some run ids come back: nodes derive theirs from the command line. One whose job has ended, or
    has given no sign of life for a minute, is a new launch; a rank that was restarted never is.
    """
    marker = folder / f".run-{run_id}"
    ended = folder / f".ended-{run_id}"
    for _ in range(2):
        try:
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return True
        except FileExistsError:
            if restarted or not (ended.exists() or _dead(folder, marker)):
                return False
        try:
            # of several latecomers one wins the rename; the others then find the new marker
            old = folder / f".tmp-{os.getpid()}-marker"
            os.rename(marker, old)
            old.unlink()
            ended.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
    return False


def _dead(folder: Path, marker: Path) -> bool:
    return not any(_fresh(path) for path in (folder / ALIVE_FILE, marker))


def _fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < STALE
    except OSError:
        return False


def mark_ended(folder: Path, run_id: str) -> None:
    """Say that this launch is over: the same run id is a new launch from here on."""
    try:
        (folder / f".ended-{run_id}").touch(mode=0o600)
        (folder / ALIVE_FILE).unlink(missing_ok=True)
    except OSError:
        pass


def _wait_ready(marker: Path) -> None:
    limit = time.monotonic() + MARKER_WAIT
    while time.monotonic() < limit:
        try:
            if marker.stat().st_size:
                return
        except OSError:
            return
        time.sleep(0.01)


def _tidy(folder: Path, keep: str) -> None:
    """Move earlier evidence to ``previous/<time>/``; drop the marks of earlier launches."""
    names = [n for n in os.listdir(folder) if n in EVIDENCE or n.startswith("evidence")]
    for name in os.listdir(folder):
        if name.startswith(MARKS) and keep not in name:
            (folder / name).unlink(missing_ok=True)
    real = [n for n in names if n != "journal" or any(os.scandir(folder / n))]
    if not real:
        return
    when = max((folder / n).stat().st_mtime for n in real)
    target, count = folder / PREVIOUS / stamp(when), 1
    while target.exists():
        count += 1
        target = folder / PREVIOUS / f"{stamp(when)}-{count}"
    target.mkdir(mode=0o700, parents=True)
    for name in names:
        os.rename(folder / name, target / name)


def _latest(folder: Path) -> None:
    """Point ``latest`` to the folder; where links cannot be made there is none."""
    link = folder.parent / "latest"
    new = folder.parent / f".latest-{os.getpid()}"
    try:
        if os.path.lexists(link) and os.readlink(link) == folder.name:
            return
        os.symlink(folder.name, new)
        os.replace(new, link)
    except OSError:
        new.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees half of it.

    Raises:
        OSError: it could not be written; the old file is then still there.
    """
    new = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def update_run(folder: Path, **fields: Any) -> None:
    """Change fields of ``run.json``; a file that cannot be read or written stays as it is."""
    path = folder / RUN_FILE
    try:
        run = json.loads(path.read_text())
        if run.items() >= fields.items():
            return
        write_atomic(path, json.dumps({**run, **fields}, indent=1).encode())
    except (OSError, ValueError):
        pass
