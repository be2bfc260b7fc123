"""The loop calls ``model.module`` in place of the wrapped model.

DDP readies its reduction in its own forward; without it the backward runs and no gradient is shared.

Broken, it trips DDP203 ddp-forward-bypassed.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp203_ddp_forward_bypassed.py --broken
"""

from __future__ import annotations

from common import Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel


def main(is_broken: bool) -> None:
    start()
    model = DistributedDataParallel(network())
    train(model.module if is_broken else model, sharded(Rows()), model=model)
    end()


if __name__ == "__main__":
    main(broken(__doc__))
