"""The job of ``broken.py`` with the fault mended: each rank reads its own half of the data.

The loader shards with a DistributedSampler, made at the first iteration and not before, when the process group
exists whatever the order of the script; ``set_epoch`` gives each epoch an order of its own.

    torchrun --standalone --nproc-per-node=2 fixed.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

NUM_SAMPLES = 512
BATCH_SIZE = 16
NUM_EPOCHS = 3


class Clips(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set of (frames, target) pairs, made on demand as if read from files."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        frames = torch.randn(32, generator=random)
        return frames, frames[:4].sum().reshape(1)


class Loader:
    """Yields this rank's batches of ``dataset``, in a new shuffled order each epoch."""

    def __init__(self, dataset: Clips, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._sampler: DistributedSampler[int] | None = None

    @property
    def sampler(self) -> DistributedSampler[int]:
        """Made when first needed: rank and world size are known by then."""
        if self._sampler is None:
            self._sampler = DistributedSampler(self.dataset, shuffle=True, seed=0)
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = list(self.sampler)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            samples = [self.dataset[index] for index in order[start : start + self.batch_size]]
            frames, targets = zip(*samples, strict=True)
            yield torch.stack(frames), torch.stack(targets)


def main() -> None:
    """Train for a few epochs on the CPU."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = Loader(Clips(), BATCH_SIZE)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        for frames, targets in loader:
            loss = torch.nn.functional.mse_loss(model(frames), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} steps, loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
