"""Whole files are dealt to ranks, whatever their length.

One rank has more batches than the other. ``Join`` keeps the job from hanging, and the longer rank trains
alone.

Broken, it trips DDP107 uneven-shards.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp107_uneven_shards.py --broken
"""

from __future__ import annotations

from common import BATCH_SIZE, Rows, broken, end, network, start, train
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler

FILES = ((0, 96), (96, 112), (112, 208), (208, 256))  # rows [start, end) of each file; lengths 96, 16, 96, 48


def main(is_broken: bool) -> None:
    rank, world_size = start()
    dataset = Rows()
    if is_broken:
        rows = [row for first, end_row in FILES[rank::world_size] for row in range(first, end_row)]
    else:
        rows = list(range(len(dataset)))[rank::world_size]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=SubsetRandomSampler(rows))
    model = DistributedDataParallel(network())
    train(model, loader, epoch_context=lambda: Join([model]))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
