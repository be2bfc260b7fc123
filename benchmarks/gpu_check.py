"""What can only be seen on a GPU, in under 5 minutes on one. Written, never run on a GPU.

    make gpu-check                                  on a machine with one CUDA device
    python benchmarks/gpu_check.py --rehearse       the same script on the CPU, to see that it works at all

1. sync     the probe under ``torch.cuda.set_sync_debug_mode("error")``: a hook that waited for the device would raise
2. digests  fingerprints of CUDA tensors equal those of their CPU copies, dtype by dtype and in a job
3. nccl     the NCCL all-gather at world size 1 gives the answer of gloo and of the store
4. devices  two gloo ranks on one device are seen as one device
5. cost     per step, by the probe's own clock: at most max(100 µs, 1 % of the step)
6. killed   the journal is whole after SIGKILL

Prints one line each; exits 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_STEPS = 120
KILLED_AT = 60
LATE_STEPS = 4  # digests on their way from the device may be missing at the end
TIMEOUT_S = 60


class CheckFailedError(Exception):
    """The text says what was found."""


# --------------------------------------------------------------------------- the job


def job(device_name: str, backend: str, sync: bool, kill: bool) -> None:
    """A hand-written loop whose batches lie on the device: only their fingerprints there can tell ranks apart."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(NUM_STEPS * 32 * world_size, 64, generator=torch.Generator().manual_seed(1)).to(device)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        if sync and step == 5:  # torch's own first steps wait for the device
            torch.cuda.set_sync_debug_mode("error")
        first = (step * world_size + rank) * 32
        optimizer.zero_grad()
        model(rows[first : first + 32]).square().mean().backward()
        optimizer.step()
        if kill and step == KILLED_AT:
            os.kill(os.getpid(), 9)
    if sync:
        torch.cuda.set_sync_debug_mode("default")
    dist.barrier()
    dist.destroy_process_group()


def run_job(
    out: Path, device: str, *, nproc: int = 1, backend: str, options: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> int:
    """The job under the probe; its exit code."""
    words = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(out), *options, "--", sys.executable]
    words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", os.path.abspath(__file__)]
    words += ["--job", "--device", device, "--backend", backend, *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    (out.parent / f"{out.name}.log").write_text(done.stdout + done.stderr)
    return done.returncode


def audit_of(out: Path) -> dict[str, Any]:
    """The audit of a job that ran.

    Raises:
        CheckFailedError: it left none.
    """
    path = out / "audit.json"
    if not path.exists():
        raise CheckFailedError(f"no audit: {(out.parent / f'{out.name}.log').read_text()[-1500:]}")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def evidence_of(out: Path) -> Any:
    from ddp_audit.collect.merge import merge

    return merge([out])


# --------------------------------------------------------------------------- the checks


def check_sync(folder: Path, device: str, backend: str) -> str:
    flags = ("--sync",) if device.startswith("cuda") else ()
    code = run_job(folder / "sync", device, backend=backend, flags=flags)
    if code:
        raise CheckFailedError(f"the job ended with {code}: {(folder / 'sync.log').read_text()[-1500:]}")
    failed = [state for state in audit_of(folder / "sync")["provenance"]["hook_states"] if state["num_errors"]]
    if failed:
        raise CheckFailedError(f"hooks waited for the device, or failed: {failed}")
    return f"{NUM_STEPS} steps, no hook waited for the device"


def check_digests(folder: Path, device: str, backend: str) -> str:
    import torch

    from ddp_audit.hooks import device_digest, digest

    kinds = (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    num_equal = 0
    for kind in kinds:
        for shape in ((32, 7), (64, 3, 32, 32), (5, 1), (8, 40000)):
            values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(kind)
            there = values.to(device)
            rows = shape[0]
            words = digest.tensor_words(values, rows)
            spec = digest.window(rows, words.shape[1], values.numel() * values.element_size())
            expected = digest.row_sums(words, spec).astype("uint64").tolist()
            sums = device_digest.row_sums(there, rows, spec)
            if sums is None or [int(v) & digest.MASK for v in sums.tolist()] != expected:
                raise CheckFailedError(f"{kind}, shape {shape}: device and CPU differ")
            num_equal += 1
    contents = []
    for name in {"cpu", device}:
        out = folder / f"digests-{name.replace(':', '')}"
        if code := run_job(out, name, backend="gloo"):
            raise CheckFailedError(f"the job on {name} ended with {code}")
        rows_ = evidence_of(out).forwards
        contents.append({int(row["step"]): int(row["content"]) for row in rows_ if row["content"]})
    common = set.intersection(*(set(found) for found in contents))
    if len(common) < NUM_STEPS // 4 or any(len({found[step] for found in contents}) > 1 for step in common):
        raise CheckFailedError(
            f"a job's inputs have other digests on {device} than on the CPU ({len(common)} common steps)"
        )
    return f"{num_equal} kinds and shapes equal, and {len(common)} inputs of a job"


def check_nccl(folder: Path, device: str, backend: str) -> str:
    answers = {}
    for collector in ("store", "gloo", *(("nccl",) if backend == "nccl" else ())):
        out = folder / f"collector-{collector}"
        if code := run_job(out, device, backend=backend, options=("--collector", collector)):
            raise CheckFailedError(f"--collector {collector}: the job ended with {code}")
        evidence = evidence_of(out)
        answers[collector] = (
            audit_of(out)["verdict"],
            [(int(row["step"]), int(row["content"])) for row in evidence.forwards][: NUM_STEPS // 2],
            len(evidence.steps),
        )
    if any(answer != answers["store"] for answer in answers.values()):
        raise CheckFailedError(f"the answers differ: { {name: (a[0], a[2]) for name, a in answers.items()} }")
    return f"{', '.join(answers)} give the same answer"


def check_devices(folder: Path, device: str, backend: str) -> str:
    if code := run_job(folder / "devices", device, nproc=2, backend="gloo"):
        raise CheckFailedError(f"the job ended with {code}")
    uuids = [journal.device_uuid for journal in evidence_of(folder / "devices").journals]
    if len(uuids) != 2 or len(set(uuids)) != 1 or (device.startswith("cuda") and uuids[0] is None):
        raise CheckFailedError(f"device ids of the two ranks: {uuids}")
    return "two ranks, one device id"


def check_cost(folder: Path, device: str, backend: str) -> str:
    if code := run_job(folder / "cost", device, backend=backend, options=("--no-live",)):
        raise CheckFailedError(f"the job ended with {code}")
    overhead = audit_of(folder / "cost")["overhead"]
    cost, share = overhead["mean_us_per_step"], overhead["share_of_step"]
    if cost is None or (cost > 100 and (share is None or share > 0.01)):
        raise CheckFailedError(f"{cost} µs per step, {share} of the step")
    return f"{cost:.1f} µs per step by the probe's own clock, the first steps included"


def check_killed(folder: Path, device: str, backend: str) -> str:
    run_job(folder / "killed", device, backend=backend, flags=("--kill",))
    evidence = evidence_of(folder / "killed")
    steps = {int(row["step"]) for row in evidence.steps}
    (journal,) = evidence.journals
    if journal.cut or journal.ended or not set(range(KILLED_AT - LATE_STEPS)) <= steps:
        raise CheckFailedError(f"{len(steps)} of {KILLED_AT + 1} steps, cut: {journal.cut}, ended: {journal.ended}")
    return f"{len(steps)} of {KILLED_AT + 1} steps are there"


CHECKS: dict[str, Callable[[Path, str, str], str]] = {
    "sync": check_sync,
    "digests": check_digests,
    "nccl": check_nccl,
    "devices": check_devices,
    "cost": check_cost,
    "killed": check_killed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; says nothing about a GPU")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="nccl", help=argparse.SUPPRESS)
    parser.add_argument("--sync", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.device, args.backend, args.sync, args.kill)
        return 0
    import torch

    if not args.rehearse and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here; --rehearse runs the script on the CPU", file=sys.stderr)
        return 2
    device, backend = ("cpu", "gloo") if args.rehearse else ("cuda:0", "nccl")
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'rehearsal on the CPU' if args.rehearse else torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ddp-audit-gpu-") as name:
        for title in args.only:
            try:
                print(f"ok    {title:<8} {CHECKS[title](Path(name), device, backend)}", flush=True)
            except (CheckFailedError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"FAIL  {title:<8} {error}", flush=True)
    print(f"{len(args.only) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
