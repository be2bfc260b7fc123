"""Do the ranks read different samples? Ask a loader, without a training job.

Each rank makes the loader, walks it for some epochs, hashes what it gets and says how long its shard is. The
ranks gather that, and ``ddp-audit`` gives the verdict it would give on a job with this loader: the walk is
watched by the probe, with a model of one weight in place of yours.

    torchrun --standalone --nproc-per-node=2 probes/shards.py --loader pkg.mod:make_loader

``make_loader()`` takes no argument and returns any iterable of batches: a torch DataLoader, or one of your own.
It is called after the process group exists. ``set_epoch`` is called where the loader, its sampler or its data
set has one; ``--no-set-epoch`` leaves it out. Runs on the CPU with gloo; the report is at ``--out``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STARTED = "SHARDS_PROBED"
"""Set once this script has started itself anew under the probe."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", required=True, metavar="MODULE:FUNCTION", help="what makes the loader")
    parser.add_argument("--epochs", type=int, default=2, help="how often to walk it (default: 2)")
    parser.add_argument("--steps", type=int, help="end each walk after this many batches; for endless loaders")
    parser.add_argument("--no-set-epoch", action="store_true", help="never call set_epoch")
    parser.add_argument("--out", type=Path, default=Path("ddp-audit-out/shards"), help="folder of the report")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it on several ranks: torchrun --standalone --nproc-per-node=2 probes/shards.py …")
    if args.loader.count(":") != 1:
        parser.error(f"--loader {args.loader}: expected MODULE:FUNCTION, such as data.loaders:make_loader")
    return args


def start_probed(out: Path) -> None:
    """Become this script under ``ddp-audit probe``."""
    os.environ[STARTED] = "1"
    words = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(out), os.path.abspath(__file__), *sys.argv[1:]]
    os.execv(sys.executable, words)


def make_loader(name: str) -> Iterable[Any]:
    """Import ``pkg.mod:function`` from the working folder or the environment, and call it."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        loader: Iterable[Any] = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"shards.py: --loader {name}: {error}") from error
    return loader


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the loader, or to what it reads from."""
    for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)


def main() -> None:
    args = parse()
    if STARTED not in os.environ:
        start_probed(args.out)
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from ddp_audit import record_samples
    from ddp_audit.hooks.digest import batch_digest

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = make_loader(args.loader)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []  # per epoch: (batches, samples, hash over the samples in order)
    for epoch in range(args.epochs):
        if not args.no_set_epoch:
            set_epoch(loader, epoch)
        num_batches, samples = 0, []
        for batch in loader:
            found = batch_digest(batch, getattr(loader, "batch_size", None), whole=True)
            digests = found.whole if found.whole is not None else found.samples
            ids = [found.content >> 1] if digests is None else [int(d) >> 1 for d in digests]  # ids are int64
            samples += ids
            if not isinstance(loader, DataLoader):
                record_samples(ids)  # the probe knows the samples of a torch DataLoader itself
            optimizer.zero_grad()
            model(torch.ones(max(len(ids), 1), 1)).mean().backward()
            optimizer.step()
            num_batches += 1
            if num_batches == args.steps:
                break
        seen.append((num_batches, len(samples), hash(tuple(samples)) & 0xFFFFFFFF))
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, seen)
    if rank == 0:
        for other, epochs in enumerate(gathered):
            for epoch, (num_batches, num_samples, order) in enumerate(epochs):
                print(f"rank {other}, epoch {epoch}: {num_batches} batches, {num_samples} samples, order {order:08x}")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
