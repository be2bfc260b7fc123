"""A process group exists, and the model is not wrapped.

Nothing averages the gradients: the ranks' models part after the first step.

Broken, it trips DDP202 gradients-not-synced.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp202_gradients_not_synced.py --broken
"""

from __future__ import annotations

from common import Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel


def main(is_broken: bool) -> None:
    start()
    model = network()
    train(model if is_broken else DistributedDataParallel(model), sharded(Rows()))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
