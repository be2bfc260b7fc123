"""The process that shows the verdict of a job run inside its ranks; started by ``boot.watch``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddp_audit.boot import folder, watch
from ddp_audit.boot.supervise import alive, parent_of
from ddp_audit.cli import zero
from ddp_audit.cli.follow import FolderFollower, complete_mesh
from ddp_audit.settings import Settings

RESTART_WAIT = 3.0  # seconds in which a launcher that saw rank 0 die starts the next attempt


def main(words: list[str]) -> int:
    """``main([settings as JSON, pid of rank 0, its identity])``; always 0, nobody reads it."""
    settings = Settings.from_json(words[0])
    pid, identity = int(words[1]), words[2]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the job, whose end we wait for
    # Not niced: it sleeps while the job trains, and at the end rank 0 waits for it.
    out = Path(settings.out)
    agent = parent_of(pid)
    mine = out / f".watcher-{settings.run_id}"
    mine.write_text(str(os.getpid()))
    last = time.monotonic()

    def each() -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            folder.sign_of_life(out)
            last = time.monotonic()

    in_order = watch.await_end(settings, pid, identity, each)
    journals = FolderFollower(settings.journal_folder)
    if not in_order:
        # A launcher with restarts left may take its time to the next attempt, but lives that long.
        patience = float("inf") if watch.restarts_left(os.environ) else min(RESTART_WAIT, settings.deadline)
        if _replaced(mine, agent, time.monotonic() + patience, each):
            return 0
    limit = time.monotonic() + settings.deadline
    await_ranks(journals, limit - 0.3 * settings.deadline, but=pid)
    reason = None
    if not journals.journals:
        reason = zero.why_no_rank(out, launcher=None, child=None)
        folder.update_run(out, zero_reason=reason)
    complete_mesh(out, journals)

    def shown() -> None:
        watch.marker(out, "verdict", settings.run_id, pid).touch(mode=0o600)

    from ddp_audit.cli.finish import finish

    if finish(out, settings, print_text=True, shown=shown) is None and reason is not None:
        print(f"ddp-audit: no rank was seen: {reason}", file=sys.stderr, flush=True)
    folder.mark_ended(out, settings.run_id)
    limit = time.monotonic() + settings.deadline
    while alive(pid) and time.monotonic() < limit:
        time.sleep(watch.POLL)  # it looks for the mark until its own deadline
    for name in ("verdict", "leaving"):
        watch.marker(out, name, settings.run_id, pid).unlink(missing_ok=True)
    mine.unlink(missing_ok=True)
    return 0


def _replaced(mine: Path, agent: int | None, limit: float, each: Callable[[], None]) -> bool:
    """Whether the launcher started another attempt, whose rank 0 has a watcher of its own."""
    while time.monotonic() < limit:
        try:
            if mine.read_text() != str(os.getpid()):
                return True
        except OSError:
            return False
        if agent is None or agent <= 1 or not alive(agent):
            return False
        each()
        time.sleep(watch.POLL)
    return False


def await_ranks(journals: FolderFollower, limit: float, but: int = 0) -> None:
    """Wait until every journal has its end record or its process is gone, or until ``limit``.

    Args:
        but: a pid that is not waited for: rank 0 itself waits for us.
    """
    open_ones: dict[str, bool] = {}
    while True:
        journals.look()
        for name, one in journals.journals.items():
            if open_ones.get(name, True):
                ended = any(event.get("event") == "end" for event in one.events())
                # A pid of another node may be free here; its journal was then brought whole.
                open_ones[name] = not ended and one.pid != but and alive(one.pid)
        if not any(open_ones.values()) or time.monotonic() >= limit:
            return
        time.sleep(0.05)
