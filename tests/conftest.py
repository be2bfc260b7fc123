"""What all tests share: markers that need something of the machine, and the count of repeated runs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from math import comb
from pathlib import Path

import pytest
from hypothesis import settings
from jobs import REPEATS, JobRun, run_job

settings.register_profile("here", deadline=None, print_blob=True)  # two shared cores make any deadline a coin toss
settings.load_profile("here")

# Tests in this process import torch, too: one thread each, nothing from a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@functools.cache
def chromium() -> str | None:
    """Path of a Chromium, or ``None``."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@functools.cache
def missing_netns() -> str | None:
    """Why no network namespace can be made here, or ``None``."""
    if not shutil.which("ip"):
        return "needs iproute2: apt-get install iproute2"
    if os.geteuid() != 0:
        return "needs root: sudo -E make test"
    name = f"ddpa-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs the right to make network namespaces, such as a privileged container: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


@functools.cache
def missing_gpu() -> str | None:
    """Why no GPU test can run here, or ``None``; the driver's device file says so without loading torch."""
    return None if Path("/dev/nvidia0").exists() else "needs a CUDA device: make gpu-check"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compare-repeats",
        action="store_true",
        help="fail when gloo's teardown aborts more runs with the probe than without",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run; in CI the system packages must be there, so such a skip fails."""
    reason = None
    if item.get_closest_marker("browser") and not chromium():
        reason = "needs Chromium: apt-get install chromium"
    elif item.get_closest_marker("netns"):
        reason = missing_netns()
    if reason:
        if os.environ.get("CI"):
            pytest.fail(f"skipped in CI: {reason}", pytrace=False)
        pytest.skip(reason)
    if item.get_closest_marker("gpu") and (why := missing_gpu()):
        pytest.skip(why)


def more_with_probe() -> bool:
    """The probed runs were aborted more often than chance allows (one-sided hypergeometric, 5 %).

    A plain comparison of two small counts would fail every other time: aborts are rare and come at random.
    """
    probed, plain = REPEATS[True], REPEATS[False]
    runs, aborts = probed.runs + plain.runs, probed.aborts + plain.aborts
    if not (probed.aborts and plain.runs):
        return False
    tail = sum(comb(probed.runs, k) * comb(plain.runs, aborts - k) for k in range(probed.aborts, aborts + 1))
    return tail / comb(runs, aborts) < 0.05


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--compare-repeats") and more_with_probe() and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not any(count.runs for count in REPEATS.values()):
        return
    for probed, count in REPEATS.items():
        word = "with" if probed else "without"
        terminalreporter.write_line(f"jobs {word} the probe: {count.runs}, aborted by gloo's teardown: {count.aborts}")
    if config.getoption("--compare-repeats") and more_with_probe():
        terminalreporter.write_line("FAILED: gloo's teardown aborts more often with the probe", red=True)


@pytest.fixture(scope="session")
def browser_path() -> str:
    """The Chromium to drive; only for tests marked ``browser``."""
    path = chromium()
    assert path, "mark this test with pytest.mark.browser"
    return path


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobRun]:
    """``run_job`` in a folder of the test's own."""
    return functools.partial(run_job, cwd=tmp_path)
