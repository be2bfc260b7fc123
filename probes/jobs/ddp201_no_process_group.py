"""The job is launched on several ranks and never makes a process group.

Each rank trains a model of its own on its share of the data; N small runs take the place of one.

Broken, it trips DDP201 no-process-group.

    torchrun --standalone --nproc-per-node=2 probes/jobs/ddp201_no_process_group.py --broken
"""

from __future__ import annotations

import torch
from common import Rows, broken, end, network, sharded, start, train
from torch.nn.parallel import DistributedDataParallel


def main(is_broken: bool) -> None:
    if is_broken:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        train(network(), sharded(Rows()))
    else:
        start()
        train(DistributedDataParallel(network()), sharded(Rows()))
    end()


if __name__ == "__main__":
    main(broken(__doc__))
