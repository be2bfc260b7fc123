"""Two nodes: two network namespaces joined by a veth pair, two ranks each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import TEARDOWN_ABORT, clean_environment

JOB = Path(__file__).with_name("job.py")
ADDRESSES = ("10.203.0.1", "10.203.0.2")
pytestmark = [pytest.mark.netns, pytest.mark.distributed]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Node:
    name: str
    device: str
    index: int

    def command(self, *command: str, private: Path | None = None) -> list[str]:
        """Run on this node; ``private``: a folder that is a disk of its own here."""
        if private is not None:
            private.mkdir(parents=True, exist_ok=True)
            command = ("sh", "-c", f'mount -t tmpfs none "{private}" && exec "$@"', "sh", *command)
        return ["ip", "netns", "exec", self.name, *command]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    tag = f"{os.getpid() % 100000}"
    pair = tuple(Node(f"ddpa{i}-{tag}", f"dda{i}x{tag}", i) for i in range(2))
    try:
        for node in pair:
            ip("netns", "add", node.name)
        ip("link", "add", pair[0].device, "type", "veth", "peer", "name", pair[1].device)
        for node in pair:
            ip("link", "set", node.device, "netns", node.name)
            for args in (
                ["addr", "add", f"{ADDRESSES[node.index]}/24", "dev", node.device],
                ["link", "set", "lo", "up"],
                ["link", "set", node.device, "up"],
            ):
                ip("-n", node.name, *args)
        yield pair
    finally:
        for node in pair:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", node.name)


def launch(node: Node, form: str, rendezvous: str, out: Path, private: bool, *args: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    if rendezvous == "static":
        torchrun += [f"--node_rank={node.index}", f"--master_addr={ADDRESSES[0]}", "--master_port=29400"]
    else:
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--rdzv-id=two"]
        # A namespace has no host name of its own by which torchrun could tell that it hosts the store.
        torchrun += [f"--local-addr={ADDRESSES[node.index]}", f"--rdzv-conf=is_host={int(node.index == 0)}"]
    probe = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(out)]
    command = (
        [*probe, "--", *torchrun, str(JOB), *args]
        if form == "around"
        else [*torchrun, "--no-python", *probe, str(JOB), *args]
    )
    return subprocess.Popen(
        node.command(*command, private=out if private else None),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out.parent,
        env=clean_environment({"GLOO_SOCKET_IFNAME": node.device, "TP_SOCKET_IFNAME": node.device}),
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 150) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout} s\n{out[-2000:]}\n{err[-2000:]}")
    return process.returncode, out + err


def run_both(
    nodes: tuple[Node, Node], form: str, rendezvous: str, tmp_path: Path, share: str, *args: str
) -> tuple[dict[str, Any], str]:
    """Run to the end on both nodes; the first node's audit and all output."""
    for attempt in range(3):
        root = tmp_path / f"try{attempt}"
        root.mkdir()
        outs = (root / "a", root / "a" if share in ("same", "private") else root / "b")
        running = [
            launch(node, form, rendezvous, out, share == "private" and node.index == 1, *args)
            for node, out in zip(nodes, outs, strict=True)
        ]
        results = [finish(process) for process in running]
        log = "".join(text for _, text in results)
        if TEARDOWN_ABORT in log and attempt < 2:
            continue
        assert [code for code, _ in results] == [0, 0], log[-4000:]
        reports = list(root.rglob("audit.json"))
        assert len(reports) == 1, f"{reports}\n{log[-3000:]}"
        return json.loads(reports[0].read_text()), log
    raise AssertionError("unreachable")


def verdict_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "4 ranks" in line and "ddp-audit " in line]


@pytest.mark.parametrize(
    ("form", "rendezvous", "share"),
    [
        ("around", "static", "same"),
        ("around", "c10d", "private"),
        ("inside", "static", "private"),
        ("inside", "c10d", "same"),
        pytest.param("around", "static", "private", marks=pytest.mark.slow),
        pytest.param("around", "c10d", "same", marks=pytest.mark.slow),
        pytest.param("around", "static", "apart", marks=pytest.mark.slow),
        pytest.param("inside", "static", "same", marks=pytest.mark.slow),
        pytest.param("inside", "c10d", "private", marks=pytest.mark.slow),
    ],
)
def test_one_report_with_four_ranks(nodes, tmp_path, form, rendezvous, share) -> None:
    """Folder shared under one name, shared under two names, or on a disk of each node's own."""
    audit, log = run_both(nodes, form, rendezvous, tmp_path, share)
    assert audit["world_size"] == audit["ranks_seen"] == 4
    assert audit["verdict"] == "pass", audit["headline"]
    assert audit["effective_gpus"] == pytest.approx(4.0, rel=0.03)
    assert log.count(audit["headline"][:40]) == 1, log


def test_the_fault_is_found_across_nodes(nodes, tmp_path) -> None:
    audit, _ = run_both(nodes, "around", "static", tmp_path, "private", "--broken")
    failed = {check["kind"] for check in audit["checks"] if check["outcome"] == "fail" and not check["caused_by"]}
    assert failed == {"identical-data-across-ranks"}
    assert audit["effective_gpus"] == pytest.approx(1.0)
    assert audit["checks"][0]["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["around", "inside"])
def test_a_killed_node_is_named_and_is_no_pass(nodes, tmp_path, form) -> None:
    out = tmp_path / "a"
    first = launch(nodes[0], form, "static", out, False, "--pause", "0.2")
    second = launch(nodes[1], form, "static", out, True, "--pause", "0.2")
    assert second.stdout is not None
    for line in second.stdout:
        if "at step 12" in line:
            break
    for pid in subprocess.run(
        ["ip", "netns", "pids", nodes[1].name], capture_output=True, text=True, check=True
    ).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    second.communicate(timeout=30)
    code, log = finish(first)
    assert code != 0
    audit_file = out / "audit.json"
    limit = time.monotonic() + 30  # inside the ranks the watcher may outlive the launcher by a little
    while not audit_file.exists() and time.monotonic() < limit:
        time.sleep(0.2)
    audit = json.loads(audit_file.read_text())
    assert audit["world_size"] == 4
    assert audit["verdict"] != "pass"
    assert audit["ranks_seen"] == 2
    assert "ranks 2 and 3 are missing" in log
