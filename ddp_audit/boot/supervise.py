"""Start a command as a child and stand aside: terminal, streams, signals and exit are its own."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SI_KERNEL = 0x80  # si_code of a signal that the terminal sent: the whole foreground group has it already
TICK = 0.25  # seconds between two calls of ``tick``; short enough to see the pids of a job of a second

WITNESS_WAIT = 0.1  # seconds a signal is held back to learn whether the whole group got it

_NOT_PASSED = {
    "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT", "SIGWINCH",
    "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS", "SIGPIPE", "SIGXFSZ",
}  # fmt: skip
"""Faults of our own process, job control (which the terminal does for both), and what cannot be caught."""

_RESET = {signal.SIGPIPE, signal.SIGXFSZ}
"""Ignored by Python at its start; a program that is no Python must not inherit that."""


class StartError(OSError):
    """The command could not be started."""


def run_child(
    executable: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    tick: Callable[[int], None] | None = None,
) -> int:
    """Run to the end, passing on signals that were sent to this process alone.

    Args:
        executable, argv, env: as for ``execve``.
        tick: called with the child's pid at once and every ``TICK`` seconds while it runs.

    Returns:
        The child's exit code, or minus the number of the signal that ended it.

    Raises:
        StartError: it could not be started.
    """
    passed = {s for s in signal.valid_signals() if not isinstance(s, signal.Signals) or s.name not in _NOT_PASSED}
    waited = passed | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would take the exit code away
    witness = Witness(passed)
    try:
        child = _spawn(executable, argv, env, before)
        if tick is not None:
            tick(child)
        while True:
            code = _ended(child)
            if code is not None:
                return code
            got = signal.sigtimedwait(waited, TICK)
            if got is not None and got.si_signo != signal.SIGCHLD and got.si_code != SI_KERNEL:
                if not witness.got(got.si_signo):
                    os.kill(child, got.si_signo)  # not reaped yet, so the pid is still the child's
            elif got is None and tick is not None:
                tick(child)
    finally:
        witness.close()
        while signal.sigtimedwait(waited, 0) is not None:
            pass  # what came too late for the child must not hit the report
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Witness:
    """A process beside the child that does nothing but say which signals it got.

    A signal that it got too was sent to the whole process group (``timeout``, a batch system,
    ``kill -- -pgid``): the child has it already, and passing it on would give it twice.
    """

    def __init__(self, signals: set[int] | set[signal.Signals]) -> None:
        self._fd, inner = os.pipe()
        os.set_blocking(self._fd, False)
        self._seen: list[tuple[int, float]] = []
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:  # no process to be had: then signals to the group come twice, and the job runs
            self._pid = -1
        if self._pid == 0:
            try:
                for fd in (0, 1, 2):
                    os.close(fd)  # nobody who reads the job's output may wait for us
                while os.getppid() == parent:
                    got = signal.sigtimedwait(signals, 1.0)
                    if got is not None and got.si_code != SI_KERNEL:
                        os.write(inner, bytes([got.si_signo]))
            finally:
                os._exit(0)
        os.close(inner)

    def got(self, number: int) -> bool:
        """Whether it got this signal within the last half second; waits a moment for its word."""
        limit = time.monotonic() + WITNESS_WAIT
        while True:
            try:
                self._seen += [(one, time.monotonic()) for one in os.read(self._fd, 64)]
            except OSError:
                pass
            for item in self._seen:
                if item[0] == number and time.monotonic() - item[1] < 0.5:
                    self._seen.remove(item)
                    return True
            if time.monotonic() > limit:
                return False
            time.sleep(0.01)

    def close(self) -> None:
        """End it."""
        if self._pid > 0:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)


def _spawn(executable: str, argv: Sequence[str], env: Mapping[str, str], mask: set[int] | set[signal.Signals]) -> int:
    def spawn(file: str, words: Sequence[str]) -> int:
        return os.posix_spawn(file, list(words), dict(env), setsigmask=list(mask), setsigdef=list(_RESET))

    try:
        try:
            return spawn(executable, argv)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            return spawn("/bin/sh", ["/bin/sh", executable, *argv[1:]])  # a script without #!, as a shell would
    except OSError as error:
        raise StartError(error.errno, f"{argv[0]}: {os.strerror(error.errno or 0)}") from error


def _ended(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return None if pid == 0 else os.waitstatus_to_exitcode(status)


def become(executable: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Turn this process into the command; the pid stays.

    Raises:
        StartError: it could not be started.
    """
    for name in _RESET:
        signal.signal(name, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        try:
            os.execve(executable, list(argv), dict(env))
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve("/bin/sh", ["/bin/sh", executable, *argv[1:]], dict(env))
    except OSError as error:
        raise StartError(error.errno, f"{argv[0]}: {os.strerror(error.errno or 0)}") from error


def die_by(number: int) -> None:
    """End this process by a signal, without a core of its own. Returns only if that failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    time.sleep(1)  # a stop signal would come here; the caller then exits with 128 + number


def alive(pid: int) -> bool:
    """Whether a process of this host runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2 :].split()[0] not in ("Z", "X")


def parent_of(pid: int) -> int | None:
    """Parent pid, or ``None`` when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat[stat.rindex(")") + 2 :].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process leads back to another through its living parents."""
    at: int | None = pid
    for _ in range(64):
        if at is None or at <= 1:
            return False
        if at == ancestor:
            return True
        at = parent_of(at)
    return False
