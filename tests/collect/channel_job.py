"""One rank of a group whose ranks write to folders of their own; started by test_channel.py.

usage: channel_job.py RANK WORLD PORT ROOT COLLECTOR MODE
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ddp_audit.collect.channel import Identity, open_channel
from ddp_audit.journal import JournalWriter, file_name, list_frame
from ddp_audit.records import ListKind
from ddp_audit.settings import Settings

rank, world, port, root, collector, mode = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    sys.argv[3],
    Path(sys.argv[4]),
    sys.argv[5],
    sys.argv[6],
)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world))
dist.init_process_group("gloo")
if mode != "shared" and rank > 0:  # as on a node with a disk of its own
    exists = Path.exists
    Path.exists = lambda self, **kw: not self.name.startswith(".first-node-") and exists(self, **kw)  # type: ignore[method-assign]
settings = Settings(
    out=str(root / ("shared" if mode == "shared" else f"node{rank}")),
    run_id=f"{rank:04x}",
    form="rank",
    collector=collector,
    deadline=3.0,
    abort_on="error" if mode.startswith("abort") else None,
)
channel = open_channel(settings, Identity(rank=rank, world_size=world, local_rank=0, restart=0, has_group=True))
assert channel.run_id == "0000", channel.run_id
channel.data_ranks = tuple(range(world))
writer = JournalWriter(channel.folder, file_name(rank, 0, 1000 + rank, "ab"))
writer.event("start", {"rank": rank, "big": "x" * 3_000_000 if rank == 1 else ""})
writer.lists(list_frame(0, ListKind.INDEX, bytes(8 * 64)))
if mode == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "late" and rank == 1:
    time.sleep(6)
counted = 0
if mode.startswith("abort"):
    for step in range(1500):
        time.sleep(0.004 if rank else 0.001)
        dist.barrier()
        counted += 1
        content = step + 1 if mode == "abort-equal" else 10_000 * (rank + 1) + step
        channel.step_done(step, content, counted)
        if channel.stop_at is not None and counted >= channel.stop_at and channel.confirm_stop(counted):
            break
    print(f"stopped after {counted}", flush=True)
channel.close(writer.path)
print(f"files {sorted(p.name for p in channel.folder.glob('rank*'))}", flush=True)
