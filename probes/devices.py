"""Which device does each rank use? Prints rank, local rank, host (by number) and device, and names sharing.

    torchrun --standalone --nproc-per-node=2 probes/devices.py
    torchrun --nnodes=2 --nproc-per-node=8 --node_rank=0 --master_addr=ADDRESS --master_port=29500 probes/devices.py

Each rank takes the device that a sound job takes: the GPU of its local rank. ``--by-rank`` takes that of its
global rank, as faulty jobs do, which fails on the second node. Talks over gloo, since two ranks on one GPU can
form no NCCL group. Exits 1 when two ranks share a device. The GPU part is written, never run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits. ``host`` is a digest, so that no name is shown; ``uuid`` tells two GPUs apart."""

    rank: int
    local_rank: int
    host: str
    device: str
    uuid: str | None


def host_digest() -> str:
    """Equal for two processes exactly when they run on one booted machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return hashlib.blake2b((socket.gethostname() + (boot.read_text() if boot.exists() else "")).encode()).hexdigest()[
        :16
    ]


def take_seat(by_rank: bool) -> Seat:
    """Choose this rank's device and describe it."""
    import torch

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available():
        return Seat(rank=rank, local_rank=local_rank, host=host_digest(), device="cpu", uuid=None)
    index = rank if by_rank else local_rank
    torch.cuda.set_device(index)
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return Seat(rank=rank, local_rank=local_rank, host=host_digest(), device=f"cuda:{index}", uuid=uuid)


def describe(seats: list[Seat]) -> tuple[list[str], list[str]]:
    """Lines of the table, and one line for each device that several ranks share."""
    hosts = {host: f"host{i}" for i, host in enumerate(dict.fromkeys(seat.host for seat in seats))}
    lines = [f"{s.rank:>4}  {s.local_rank:>10}  {hosts[s.host]:<6}  {s.device:<8}  {s.uuid or '-'}" for s in seats]
    by_uuid: dict[tuple[str, str], list[int]] = {}
    for seat in seats:
        if seat.uuid is not None:
            by_uuid.setdefault((seat.host, seat.uuid), []).append(seat.rank)
    shared = [
        f"ranks {' and '.join(map(str, ranks))} share one device on {hosts[host]}"
        for (host, _), ranks in by_uuid.items()
        if len(ranks) > 1
    ]
    return ["rank  local rank  host    device    uuid", *lines], shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--by-rank", action="store_true", help="use the global rank as device number, as faulty jobs do"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it on several ranks: torchrun --standalone --nproc-per-node=2 probes/devices.py")
    import torch.distributed as dist

    dist.init_process_group("gloo")
    gathered: list[Seat | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, take_seat(args.by_rank))
    lines, shared = describe([seat for seat in gathered if seat is not None])
    if dist.get_rank() == 0:
        print("\n".join([*lines, *(shared or ["no device is shared"])]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
