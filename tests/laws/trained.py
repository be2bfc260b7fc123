"""A seeded job that leaves every loss, its final weights and its random states in result-RANK.json.

usage: trained.py ddp|lightning|accelerate|trainer [--ending ok|code3|raise|sigterm|sigkill]
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("framework")
parser.add_argument("--ending", default="ok")
parser.add_argument("--folder", default=".")
args = parser.parse_args()

losses: list[str] = []


class Noisy(Dataset):
    """Uses all three random streams, in the worker or the main process."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(12, generator=generator) + 0.1 * torch.randn(12)
        x += 0.01 * random.random() + float(np.random.rand()) * 0.01
        return {"x": x, "labels": x.sum().unsqueeze(0)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.body(x), labels)}


def note(loss: torch.Tensor) -> torch.Tensor:
    losses.append(loss.detach().double().item().hex())
    return loss


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def finish(model: nn.Module) -> None:
    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    result = {
        "losses": losses,
        "weights": weights.hexdigest(),
        "torch": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy": hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(),
        "random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
    }
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    with open(os.path.join(args.folder, f"result-{rank}.json"), "w") as file:
        json.dump(result, file)


def with_ddp() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    seed(5 + dist.get_rank())
    data = Noisy()
    sampler = DistributedSampler(data, seed=1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch, workers in enumerate((0, 2)):
        loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            note(model(**batch)["loss"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finish(model.module)
    if dist.get_rank() == 1:
        if args.ending == "code3":
            sys.exit(3)
        if args.ending == "raise":
            raise RuntimeError("as planned")
        if args.ending in ("sigterm", "sigkill"):
            os.kill(os.getpid(), signal.SIGTERM if args.ending == "sigterm" else signal.SIGKILL)
    if args.ending == "ok":
        dist.barrier()
    dist.destroy_process_group()


def with_lightning() -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return note(self.net(**batch)["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    L.seed_everything(5)
    module = Module()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1))
    finish(module)


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seed(5 + accelerator.process_index)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = note(model(**batch)["loss"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    finish(accelerator.unwrap_model(model))
    accelerator.end_training()


def with_trainer() -> None:
    import tempfile

    from transformers import Trainer, TrainingArguments, set_seed

    class Noting(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]
            loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
            note(loss[0] if return_outputs else loss)
            return loss

    set_seed(5)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Noting(model=Net(), args=arguments, train_dataset=Noisy())
        trainer.train()
        finish(trainer.model)


if __name__ == "__main__":
    {"ddp": with_ddp, "lightning": with_lightning, "accelerate": with_accelerate, "trainer": with_trainer}[
        args.framework
    ]()
