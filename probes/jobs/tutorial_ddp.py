"""A production-style DDP script as tutorials teach it: a small language model on token sequences.

Sound by default: DistributedSampler and set_epoch, AdamW, gradient clipping, cross entropy, rank 0 prints and
saves. On one node:

    torchrun --standalone --nproc-per-node=2 probes/jobs/tutorial_ddp.py

On two nodes, on each with its own --node_rank (0 and 1) and the address of node 0:

    torchrun --nnodes=2 --nproc-per-node=2 --node_rank=0 --master_addr=ADDRESS --master_port=29500 \\
        probes/jobs/tutorial_ddp.py

``--broken`` picks a fault:

    no-sampler           the loader shuffles by itself on every rank: DDP101 or, with seeds that differ, DDP103
    no-set-epoch         every epoch has the order of the first: DDP106
    global-rank-device   set_device by global rank, which fails on the second node. Needs GPUs, on two nodes
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 64
FAULTS = ("no-sampler", "no-set-epoch", "global-rank-device")


class Sequences(Dataset[Tensor]):
    """Token sequences, int64 (length + 1,), made from their index: a walk through the vocabulary."""

    def __init__(self, num_sequences: int, length: int) -> None:
        self.num_sequences, self.length = num_sequences, length

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(index)
        strides = torch.randint(0, 4, (self.length + 1,), generator=random)
        start = torch.randint(0, VOCABULARY, (1,), generator=random)
        return (start + strides.cumsum(0)) % VOCABULARY


class Model(nn.Module):
    """A causal transformer of one layer."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, length) -> logits (batch, length, vocabulary)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broken", choices=FAULTS, help="run with this fault")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", type=Path, help="write the weights here, rank 0 only")
    args = parser.parse_args()
    if args.broken == "global-rank-device" and not torch.cuda.is_available():
        parser.error("--broken global-rank-device needs a GPU: without one there is no device to set")
    return args


def pick_device(by_global_rank: bool) -> torch.device:
    """One GPU per rank of a node, or the CPU."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    index = int(os.environ["RANK" if by_global_rank else "LOCAL_RANK"])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main() -> None:
    args = parse()
    device = pick_device(by_global_rank=args.broken == "global-rank-device")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)

    dataset = Sequences(args.sequences, args.length)
    sampler: DistributedSampler[int] | None = None
    if args.broken != "no-sampler":
        sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, shuffle=sampler is None, drop_last=True)

    model = DistributedDataParallel(
        Model(width=32, length=args.length).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        if sampler is not None and args.broken != "no-set-epoch":
            sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for batch in loader:
            tokens = batch.to(device, non_blocking=True)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            loss = criterion(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            total += loss.detach()
        mean = total / len(loader)
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(
                f"epoch {epoch}: {len(loader)} steps, mean loss {mean.item() / dist.get_world_size():.4f}", flush=True
            )
    if args.save is not None and rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
