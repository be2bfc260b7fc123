"""Every rank walks the whole data set in an order of its own.

Batches differ at each step, yet an epoch costs as many steps as on one rank and every row is read by all.

Broken, it trips DDP103 full-dataset-per-rank.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp103_full_dataset_per_rank.py --broken
"""

from __future__ import annotations

import torch
from common import BATCH_SIZE, Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main(is_broken: bool) -> None:
    rank, _ = start()
    dataset = Rows()
    if is_broken:
        own_order = torch.Generator().manual_seed(rank)
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, generator=own_order)
    else:
        loader = sharded(dataset)
    train(DistributedDataParallel(network()), loader)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
