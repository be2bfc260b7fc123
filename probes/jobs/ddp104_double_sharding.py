"""A sampler that deals rows to ranks is dealt to ranks once more.

Each rank keeps only every N-th row of its own share: with N ranks, 1/N of the data set is read.

Broken, it trips DDP104 double-sharding.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp104_double_sharding.py --broken
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from common import BATCH_SIZE, Rows, broken, end, network, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler


class EveryNth(Sampler[int]):
    """What a framework adds when it does not see that a sampler is sharded already."""

    def __init__(self, sampler: DistributedSampler[int], num_replicas: int, rank: int) -> None:
        self.sampler, self.num_replicas, self.rank = sampler, num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return len(self.sampler) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


def main(is_broken: bool) -> None:
    rank, world_size = start()
    dataset = Rows()
    once: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True)
    sampler = EveryNth(once, world_size, rank) if is_broken else once
    train(DistributedDataParallel(network()), DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
