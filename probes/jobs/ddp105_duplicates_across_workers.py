"""A stream is split by rank but not by loader worker.

Each worker of a rank reads the rank's whole share, so every row arrives once per worker.

Broken, it trips DDP105 duplicates-across-workers.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp105_duplicates_across_workers.py --broken
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import BATCH_SIZE, NUM_SAMPLES, Rows, broken, end, environment, network, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NUM_WORKERS = 2


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The rows of this rank, in file order."""

    def __init__(self, split_by_worker: bool) -> None:
        self.rows = Rows()
        self.split_by_worker = split_by_worker
        self.rank, self.world_size = environment()  # a worker knows no process group

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        mine = range(self.rank, NUM_SAMPLES, self.world_size)
        worker = get_worker_info()
        if self.split_by_worker and worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        return (self.rows[index] for index in mine)


def main(is_broken: bool) -> None:
    start()
    stream = Stream(split_by_worker=not is_broken)
    train(DistributedDataParallel(network()), DataLoader(stream, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
