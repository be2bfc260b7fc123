"""Brings journals to rank 0 where it cannot read them from disk.

Through the store by default: nobody has to be alive at the same moment, so it works for whoever
survives. Through an all-gather over a process group of our own when ``--collector gloo|nccl`` asks
for it: only after every rank said it is ready and all agreed to go, so that no rank ever waits
for a dead one. All ways bring the same bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_audit.settings import Settings

if TYPE_CHECKING:
    from ddp_audit.collect.channel import Identity, StoreClient

CHUNK = 1 << 20  # bytes per store value: 1 MiB takes some 20 ms, more holds up other clients
MAX_CARRIED = 64 << 20  # compressed bytes per rank; the store keeps them in rank 0's or the launcher's memory
POLL_SECONDS = 0.02
PLACE = "place"
"""Key of a rank that knows where it writes; ``carries`` beside it when that is not rank 0's folder."""
SAFE_NAME = re.compile(r"[A-Za-z0-9._-]+")


def one_node() -> bool:
    """Whether the launcher's variables say that all ranks run on this node."""
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is not None and local == world


def journal_files(journal: Path) -> list[Path]:
    """The main file and its list files."""
    return [journal, *sorted(journal.parent.glob(journal.stem + ".lists[0-9]*"))]


def pack(journal: Path | None) -> bytes:
    """A journal's files as one compressed block; list files are left out beyond ``MAX_CARRIED``."""
    block = b""
    if journal is None:
        return block
    for path in journal_files(journal):
        data = zlib.compress(path.read_bytes(), 1)
        head = json.dumps({"name": path.name, "length": len(data)}).encode()
        if block and len(block) + len(data) > MAX_CARRIED:
            break
        block += len(head).to_bytes(4, "little") + head + data
    return block


def unpack(block: bytes, folder: Path) -> list[Path]:
    """Write the files of a block into ``folder``, atomically; files that are there stay.

    Raises:
        ValueError: the block is cut or names a path.
        OSError: the folder cannot be written.
    """
    written: list[Path] = []
    at = 0
    while at < len(block):
        size = int.from_bytes(block[at : at + 4], "little")
        head = json.loads(block[at + 4 : at + 4 + size])
        at += 4 + size
        data = block[at : at + head["length"]]
        at += head["length"]
        if len(data) != head["length"] or not SAFE_NAME.fullmatch(head["name"]):
            raise ValueError("a carried journal is damaged")
        target = folder / head["name"]
        if not target.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            part.write_bytes(zlib.decompress(data))
            os.replace(part, target)
            written.append(target)
    return written


def exchange(
    client: StoreClient,
    settings: Settings,
    identity: Identity,
    folder: Path,
    journal: Path | None,
    *,
    carries: bool,
) -> None:
    """Bring what rank 0 lacks into its folder, by the collector that was asked for.

    Takes at most ``settings.deadline`` seconds on any rank.

    Raises:
        StoreGoneError: the store ended meanwhile.
    """
    limit = time.monotonic() + settings.deadline
    if settings.collector in ("gloo", "nccl"):
        if _gather(client, settings, identity, folder, journal, limit):
            return
        carries = identity.rank != 0  # not agreed: fall back on the store
        if carries:
            client.set(f"carries/{identity.rank}", "1")
    elif settings.collector == "store" and identity.rank != 0:
        carries = True
        client.set(f"carries/{identity.rank}", "1")
    if carries:
        send(client, identity.rank, pack(journal))
    elif identity.rank == 0:
        receive(client, identity.world_size, folder, limit, everyone=settings.collector == "store")


def send(client: StoreClient, rank: int, block: bytes) -> None:
    """Put a block into the store; the index comes last and says that all of it is there."""
    count = 0
    for start in range(0, len(block), CHUNK):
        client.set(f"block/{rank}/{count}", block[start : start + CHUNK])
        count += 1
    client.set(f"index/{rank}", str(count))


def receive(client: StoreClient, world_size: int, folder: Path, limit: float, *, everyone: bool) -> None:
    """Rank 0: wait until ``limit`` for the blocks of those that carry, and write them.

    A rank may not yet have found out where it writes when a short job ends on rank 0: it is waited for, too.
    """
    others = set(range(1, world_size))
    waiting = others if everyone else set()
    undecided = set() if everyone or one_node() else set(others)
    if not everyone and not undecided:
        waiting = {rank for rank in others if client.peek(f"carries/{rank}")}
    while waiting or undecided:
        for rank in sorted(undecided):
            if client.peek(f"{PLACE}/{rank}") is not None:
                undecided.discard(rank)
                if client.peek(f"carries/{rank}"):
                    waiting.add(rank)
        for rank in sorted(waiting):
            index = client.peek(f"index/{rank}")
            if index is None:
                continue
            parts = [client.peek(f"block/{rank}/{i}") or b"" for i in range(int(index))]
            with contextlib.suppress(OSError, ValueError):
                unpack(b"".join(parts), folder)
            waiting.discard(rank)
        if time.monotonic() > limit:
            return
        if waiting or undecided:
            time.sleep(POLL_SECONDS)


def _gather(
    client: StoreClient, settings: Settings, identity: Identity, folder: Path, journal: Path | None, limit: float
) -> bool:
    """All-gather of the journals over a group of our own. False when the ranks did not agree to."""
    client.set(f"ready/{identity.rank}", "1")
    missing = set(range(identity.world_size))
    while missing and time.monotonic() < limit:
        missing = {rank for rank in missing if client.peek(f"ready/{rank}") is None}
        if missing:
            time.sleep(POLL_SECONDS)
    if client.decide("gather", "abort" if missing else "go") != "go":
        return False
    torch = sys.modules["torch"]
    timeout = datetime.timedelta(seconds=max(1.0, limit - time.monotonic()))
    group, device = _own_group(torch, client, settings.collector, identity, timeout)
    block = pack(journal)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(identity.world_size)]
    _allgather(group, sizes, torch.tensor([len(block)], dtype=torch.int64, device=device), timeout)
    longest = max(1, *(int(size) for size in sizes))
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    if block:
        mine[: len(block)] = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(device)
    blocks = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(identity.world_size)]
    _allgather(group, blocks, mine, timeout)
    if identity.rank == 0:
        for size, data in zip(sizes, blocks, strict=True):
            with contextlib.suppress(OSError, ValueError):
                unpack(data.cpu().numpy()[: int(size)].tobytes(), folder)
    return True


def _own_group(
    torch: Any, client: StoreClient, backend: str, identity: Identity, timeout: datetime.timedelta
) -> tuple[Any, Any]:
    dist = torch.distributed
    store = dist.PrefixStore(f"_ddp_audit/gather/{identity.restart}", client.raw)
    if backend == "nccl":  # written, never run
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, identity.rank, identity.world_size, options)
        return group, torch.device("cuda", torch.cuda.current_device())
    return dist.ProcessGroupGloo(store, identity.rank, identity.world_size, timeout), torch.device("cpu")


def _allgather(group: Any, outputs: list[Any], mine: Any, timeout: datetime.timedelta) -> None:
    work = group.allgather([outputs], [mine])
    work.wait(timeout)
