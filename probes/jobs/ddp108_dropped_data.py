"""drop_last in the sampler and in the loader, with an order that never changes.

The rows that do not fill a batch are dropped, and they are the same rows in every epoch.

Broken, it trips DDP108 dropped-data.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp108_dropped_data.py --broken
"""

from __future__ import annotations

from common import Rows, broken, end, network, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

NUM_SAMPLES = 121
BATCH_SIZE = 20  # each rank has 60 rows
WASTEFUL_BATCH_SIZE = 32  # one batch of 60 rows, and 28 rows dropped


def main(is_broken: bool) -> None:
    start()
    dataset = Rows(NUM_SAMPLES)
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=False, drop_last=is_broken)
    size = WASTEFUL_BATCH_SIZE if is_broken else BATCH_SIZE
    train(
        DistributedDataParallel(network()),
        DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=is_broken),
        num_epochs=10 if is_broken else 3,
    )
    end()


if __name__ == "__main__":
    main(broken(__doc__))
