"""A seeded job, then operations on its objects. Prints one JSON line per rank into the folder argv[1]."""

import copy
import hashlib
import inspect
import io
import json
import pickle
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(12) + i, torch.tensor(i % 3)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:12]


def of(tensor):
    return digest(tensor.detach().contiguous().numpy().tobytes())


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def attempt(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def compiled(order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, graphs = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), [0]

    def backend(graph, inputs):
        graphs[0] += 1
        return graph

    counters = torch._dynamo.utils.counters
    counters.clear()
    if order == "compile(ddp)":
        model = torch.compile(DistributedDataParallel(net), backend=backend)
    elif order == "ddp.compile":
        model = DistributedDataParallel(net)
        model.compile(backend=backend)
    elif order == "ddp(compile)":
        model = DistributedDataParallel(torch.compile(net, backend=backend, fullgraph=True))
    else:
        model = torch.compile(DistributedDataParallel(net), backend=backend, fullgraph=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 12) * i).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [graphs[0], losses, dict(counters["frames"]), sum(counters["graph_break"].values())]


def main():
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3 + rank)
    np.random.seed(4)
    random.seed(5)
    dataset = Rows()
    sampler = DistributedSampler(dataset)
    workers = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for source in (workers, loader):
            for x, y in source:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
    out = {
        "losses": losses,
        "weights": [of(p) for p in model.parameters()],
        "rng": [
            of(torch.get_rng_state()),
            digest(repr(random.getstate()).encode()),
            digest(repr(np.random.get_state()).encode()),
        ],
        "saved": digest(saved(net)),
        "state": digest(saved(model.state_dict())),
    }
    objects = {
        "net": net,
        "optimizer": optimizer,
        "sampler": sampler,
        "loader": loader,
        "parameter": net[0].weight,
        "model": model,
    }
    for name, thing in objects.items():
        data = attempt(lambda thing=thing: pickle.dumps(thing))
        out["ours_" + name] = isinstance(data, bytes) and b"ddp_audit" in data
        out["pickle_" + name] = len(data)
        out["copy_" + name] = attempt(lambda thing=thing: sorted(vars(copy.deepcopy(thing))))
        with open(f"{folder}/{name}{rank}.pt", "wb") as file:
            file.write(saved(thing) if name != "loader" else b"")
    out["pickle_workers"] = attempt(lambda: len(pickle.dumps(workers)))
    net.eval()
    out["jit"] = digest(torch.jit.script(net).code.encode())
    out["export"] = digest(str(torch.export.export(net, (torch.randn(8, 12),)).graph).encode())
    out["export_ddp"] = attempt(lambda: digest(str(torch.export.export(model, (torch.randn(8, 12),)).graph).encode()))
    out["fx"] = digest(str(torch.fx.symbolic_trace(net).graph).encode())
    functions = (
        DistributedDataParallel.__init__, DistributedDataParallel.__call__,
        torch.autograd.backward, dist.init_process_group, DataLoader.__init__,
        DistributedSampler.set_epoch, torch.nn.DataParallel.__init__,
    )  # fmt: skip
    for function in functions:
        names = (function.__name__, function.__qualname__, function.__module__, len(function.__doc__ or ""))
        out[f"function_{function.__qualname__}"] = [
            *names,
            str(inspect.signature(function)),
            digest(inspect.getsource(function).encode()),
        ]
    for order in ("compile(ddp)", "ddp.compile", "ddp(compile)", "fullgraph"):
        out[order] = attempt(lambda order=order: compiled(order))
    tensor = torch.randn(3)
    list(DataLoader([tensor], batch_size=None))
    tensor.resize_(100)
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(out, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
