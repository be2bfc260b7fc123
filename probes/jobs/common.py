"""What the jobs of this folder share: data, a small model, the training loop, ``--broken`` or ``--fixed``.

The part that a job is about, the loader or the synchronisation, stands in the job's own file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_SAMPLES = 256
BATCH_SIZE = 16
NUM_EPOCHS = 3
NUM_FEATURES = 16


def broken(doc: str | None) -> bool:
    """Whether the command line asks for the broken job. One of ``--broken`` and ``--fixed`` must be given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--broken", action="store_true", help="run with the fault")
    which.add_argument("--fixed", action="store_true", help="run with the fault mended")
    return bool(parser.parse_args().broken)


def start() -> tuple[int, int]:
    """Join the process group; (rank, world size). One thread per rank is enough for these models."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def end() -> None:
    """Leave the process group together."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def environment() -> tuple[int, int]:
    """(rank, world size) as the launcher says, without a process group."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows made from their index, equal on every rank: float32 features (16,) and target (1,)."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        return features, features[:4].sum().reshape(1)


def sharded(dataset: Rows, **options: object) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """The loader of a sound job; ``train`` calls ``set_epoch`` on its sampler."""
    rank, world_size = environment()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, **options)  # type: ignore[arg-type]


def network() -> torch.nn.Module:
    """A small regression model."""
    return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def train(
    forward: torch.nn.Module,
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    model: torch.nn.Module | None = None,
    num_epochs: int = NUM_EPOCHS,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
    epoch_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Train ``model`` (default: ``forward``) by calling ``forward``; rank 0 prints one line per epoch."""
    optimizer = torch.optim.SGD((model or forward).parameters(), lr=0.05)
    rank, _ = environment()
    for epoch in range(num_epochs):
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        num_steps, loss = 0, torch.zeros(())
        with epoch_context():
            for features, targets in loader:
                loss = torch.nn.functional.mse_loss(forward(features), targets)
                optimizer.zero_grad()
                loss.backward()
                before_step()
                optimizer.step()
                after_step()
                num_steps += 1
        if rank == 0:
            print(f"epoch {epoch}: {num_steps} steps, loss {loss.item():.4f}", flush=True)
