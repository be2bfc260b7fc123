"""Does the collector bring the same answer over each channel? Try one on this cluster.

    torchrun --standalone --nproc-per-node=2 probes/collector.py --backend store
    torchrun --standalone --nproc-per-node=2 probes/collector.py --backend gloo
    torchrun --standalone --nproc-per-node=2 probes/collector.py --backend nccl      needs one GPU per rank

A small job whose ranks share a known part of their samples runs under the probe, with ``--collector`` set to the
backend. The last line, from rank 0, is the answer: it must be the same for each backend, and must be the share
that was planted. Exits 1 when it is not. The NCCL way is written, never run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

STARTED = "COLLECTOR_PROBED"
BACKENDS = ("store", "gloo", "nccl")
NUM_STEPS = 40
BATCH_SIZE = 8
NUM_SHARED = 2  # of the samples of each batch, these are the same on every rank
WAIT_S = 30.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--out", type=Path, help="folder of the report; default ddp-audit-out/collector-BACKEND")
    args = parser.parse_args()
    args.out = args.out or Path(f"ddp-audit-out/collector-{args.backend}")
    if "RANK" not in os.environ:
        parser.error("start it on several ranks: torchrun --standalone --nproc-per-node=2 probes/collector.py …")
    return args


def start_probed(args: argparse.Namespace) -> int:
    """Run this script once more under ``ddp-audit probe``; rank 0 then reads the answer and compares it."""
    import subprocess

    words = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(args.out), "--collector", args.backend]
    started = time.time()
    code = subprocess.call([*words, os.path.abspath(__file__), *sys.argv[1:]], env={**os.environ, STARTED: "1"})
    if code or os.environ["RANK"] != "0":
        return code
    return compare(args, started)


def compare(args: argparse.Namespace, started: float) -> int:
    """Print the answer; 1 when it is not the planted one."""
    path = args.out / "audit.json"
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and path.stat().st_mtime >= started - 1) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not path.exists():
        print(f"collector.py: no audit came over {args.backend} within {WAIT_S:.0f} s", file=sys.stderr)
        return 1
    audit = json.loads(path.read_text())
    world_size = int(os.environ["WORLD_SIZE"])
    planted = (NUM_SHARED + world_size * (BATCH_SIZE - NUM_SHARED)) / (world_size * BATCH_SIZE)
    measured = audit["distinct_fraction_step"]
    print(
        f"ranks {audit['ranks_seen']} of {world_size}, distinct samples per step {measured}, planted {planted}",
        flush=True,
    )
    exact = measured is not None and abs(measured - planted) < 1e-9
    return 0 if exact and audit["ranks_seen"] == world_size else 1


def job() -> None:
    """Steps on synthetic samples whose ids are given to the probe."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ddp_audit import record_samples

    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = "nccl" in sys.argv[1:] or "--backend=nccl" in sys.argv[1:]
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    per_step = NUM_SHARED + world_size * (BATCH_SIZE - NUM_SHARED)
    for step in range(NUM_STEPS):
        first = step * per_step
        own = first + NUM_SHARED + rank * (BATCH_SIZE - NUM_SHARED)
        ids = [*range(first, first + NUM_SHARED), *range(own, own + BATCH_SIZE - NUM_SHARED)]
        record_samples(ids)
        optimizer.zero_grad()
        model(torch.tensor(ids, dtype=torch.float32, device=device).reshape(-1, 1) / 1e4).mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    args = parse()
    if STARTED not in os.environ:
        return start_probed(args)
    job()
    return 0


if __name__ == "__main__":
    sys.exit(main())
