"""The sampler's seed holds the rank, so each rank takes its share of another permutation.

Shards of two permutations overlap: within an epoch some rows are read twice and others not at all.

Broken, it trips DDP102 overlapping-shards.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp102_overlapping_shards.py --broken
"""

from __future__ import annotations

from common import BATCH_SIZE, Rows, broken, end, network, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(is_broken: bool) -> None:
    rank, _ = start()
    dataset = Rows()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=rank if is_broken else 0)
    train(DistributedDataParallel(network()), DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
