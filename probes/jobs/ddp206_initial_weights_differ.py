"""Gradients are averaged by hand, and every rank starts from weights of its own.

DDP would have sent rank 0's weights around at the start; here nobody does, and the models never meet.

Broken, it trips DDP206 initial-weights-differ.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp206_initial_weights_differ.py --broken
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import Rows, broken, end, network, sharded, start, train


def main(is_broken: bool) -> None:
    rank, world_size = start()
    torch.manual_seed(rank)
    model = network()
    if not is_broken:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)

    def average_gradients() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size

    train(model, sharded(Rows()), before_step=average_gradients)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
