"""Data-parallel training as tutorials teach it; every rank tells the step it is at."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--broken", action="store_true")
parser.add_argument("--pause", type=float, default=0.0)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(3)
data = TensorDataset(torch.randn(320, 6), torch.randn(320, 1))
sampler = None if args.broken else DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=args.broken)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        time.sleep(args.pause)
        if step == 12:
            print(f"rank {dist.get_rank()} at step {step}", flush=True)
dist.barrier()
dist.destroy_process_group()
