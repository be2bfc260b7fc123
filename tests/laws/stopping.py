"""A long job that would write a checkpoint at its end; it notes every optimizer step in steps-RANK.txt.

usage: stopping.py plain|two-optimizers|accumulate|lightning|accelerate|trainer [--broken]
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--broken", action="store_true", help="every rank draws the same batches")
args = parser.parse_args()

NUM_STEPS = 3000
CHECKPOINTS = "checkpoints"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(8 * NUM_STEPS, 4, generator=generator), torch.randn(8 * NUM_STEPS, 1))


def rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0"))


class Counting(torch.optim.SGD):
    """Notes its steps; rank 1 is slower."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        loss = super().step(closure)
        time.sleep(0.004 * rank())
        with open(f"steps-{rank()}.txt", "a") as file:
            file.write("x")
        return loss


def save(model: nn.Module) -> None:
    os.makedirs(CHECKPOINTS, exist_ok=True)
    torch.save(model.state_dict(), f"{CHECKPOINTS}/final-{rank()}.pt")


def plain() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = data()
    sampler = None if args.broken else DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, shuffle=args.broken)
    one, two = DistributedDataParallel(nn.Linear(4, 1)), DistributedDataParallel(nn.Linear(4, 1))
    first, second = Counting(one.parameters(), lr=0.01), torch.optim.SGD(two.parameters(), lr=0.01)
    for i, (x, y) in enumerate(loader):
        last = args.mode != "accumulate" or i % 3 == 2
        nn.functional.mse_loss(one(x), y).backward()
        if args.mode == "two-optimizers":
            nn.functional.mse_loss(two(x), y).backward()
            second.step()
            second.zero_grad()
        if last:
            first.step()
            first.zero_grad()
    save(one)
    dist.barrier()
    dist.destroy_process_group()


def lightning() -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Counting(self.parameters(), lr=0.01)

        def on_train_end(self) -> None:
            save(self.net)

    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        default_root_dir=CHECKPOINTS,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=not args.broken,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=4, shuffle=True))


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = Counting(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4, shuffle=True))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    save(model)
    accelerator.end_training()


def trainer() -> None:
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.line(x), labels)}

    model = Net()
    dataset = [{"x": x, "labels": y} for x, y in zip(*data().tensors, strict=True)]
    arguments = TrainingArguments(
        output_dir=CHECKPOINTS,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="epoch",
        disable_tqdm=True,
    )
    chosen = Trainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        optimizers=(Counting(model.parameters(), lr=0.01), None),
    )
    chosen.train()
    chosen.save_model(CHECKPOINTS)


if __name__ == "__main__":
    {"lightning": lightning, "accelerate": accelerate, "trainer": trainer}.get(args.mode, plain)()
