"""Every rank shuffles the whole data set by itself, with the same seed.

No sampler knows of ranks, and equal seeds give equal orders: the ranks read the same batches.

Broken, it trips DDP101 identical-data-across-ranks.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp101_identical_data_across_ranks.py --broken
"""

from __future__ import annotations

import torch
from common import BATCH_SIZE, Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main(is_broken: bool) -> None:
    start()
    dataset = Rows()
    if is_broken:
        same_order = torch.Generator().manual_seed(0)
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, generator=same_order)
    else:
        loader = sharded(dataset)
    train(DistributedDataParallel(network()), loader)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
