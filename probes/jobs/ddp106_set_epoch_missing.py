"""A DistributedSampler is asked to shuffle, and nobody calls set_epoch.

It seeds with its epoch number, which stays 0: every epoch has the order of the first.

Broken, it trips DDP106 set-epoch-missing.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp106_set_epoch_missing.py --broken
"""

from __future__ import annotations

from common import BATCH_SIZE, Rows, broken, end, network, start, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Forgotten:
    """Hands on a loader's batches and hides its sampler, as a wrapper of a loader does when it forgets set_epoch."""

    def __init__(self, loader: DataLoader) -> None:  # type: ignore[type-arg]
        self.loader = loader

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.loader)


def main(is_broken: bool) -> None:
    start()
    dataset = Rows()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    train(DistributedDataParallel(network()), Forgotten(loader) if is_broken else loader)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
