"""Weight noise after each step is drawn from a generator that differs per rank.

Gradients are shared and the start is equal, yet the replicas drift apart a little at every step.

Broken, it trips DDP207 params-diverge.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp207_params_diverge.py --broken
"""

from __future__ import annotations

import torch
from common import Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel

SCALE = 1e-3


def main(is_broken: bool) -> None:
    rank, _ = start()
    model = DistributedDataParallel(network())
    generator = torch.Generator().manual_seed(rank if is_broken else 0)

    @torch.no_grad()
    def add_noise() -> None:
        for parameter in model.parameters():
            parameter.add_(SCALE * torch.randn(parameter.shape, generator=generator))

    train(model, sharded(Rows()), after_step=add_noise)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
