"""What the loop consumed is what the journal says, for every kind of loader."""

import json
from pathlib import Path

import numpy as np
import probed
import pytest

from ddp_audit.journal import JournalContent
from ddp_audit.records import BatchFlag, ListKind

LOADERS = {
    "plain": "DataLoader(ds, batch_size=4, shuffle=True)",
    "workers": "DataLoader(ds, batch_size=4, shuffle=True, num_workers=2)",
    "persistent": "DataLoader(ds, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)",
    "any_order": "DataLoader(slow, batch_size=4, shuffle=True, num_workers=2, in_order=False)",
    "batch_sampler": "DataLoader(ds, batch_sampler=BatchSampler(RandomSampler(ds), 4, True), num_workers=1)",
    "no_batch": "DataLoader(ds, batch_size=None, shuffle=True)",
    "temporary": None,
    "broken_off": "DataLoader(ds, batch_size=4, shuffle=True, num_workers=2)",
    "stateful": "StatefulDataLoader(ds, batch_size=4, shuffle=True)",
    "stateful_workers": "StatefulDataLoader(ds, batch_size=4, shuffle=True, num_workers=2)",
    "nodes": "nodes(lambda n: tn.Mapper(tn.Batcher(n, 4, drop_last=False), load))",
    "nodes_threads": "nodes(lambda n: tn.ParallelMapper(tn.Batcher(n, 4, drop_last=False), load, num_workers=2))",
    "nodes_any_order": "nodes(lambda n: tn.ParallelMapper(tn.Batcher(n, 4), load, num_workers=2, in_order=False))",
    "nodes_prebatch": "nodes(lambda n: tn.ParallelMapper(tn.Batcher(n, 4), load, num_workers=2, prebatch=2))",
    "nodes_prefetch": "nodes(lambda n: tn.Prefetcher(tn.Mapper(tn.Batcher(n, 4), load), 3))",
    "nodes_batch_sampler": "tn.Loader(tn.Mapper(tn.SamplerWrapper(BatchSampler(RandomSampler(ds), 4, False)), load))",
}

JOB = """
import json, random, sys, time
import torch, torchdata.nodes as tn
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

class Rows(Dataset):
    def __init__(self, slow=False): self.slow = slow
    def __len__(self): return 22
    def __getitem__(self, i):
        if self.slow and i % 5 == 0: time.sleep(0.02)
        return torch.tensor([i, i * 3], dtype=torch.float32)
ds, slow = Rows(), Rows(True)
def load(indices):
    time.sleep(random.random() / 200)
    return torch.stack([ds[i] for i in indices])
def nodes(make): return tn.Loader(make(tn.SamplerWrapper(RandomSampler(ds))))
LOADERS = json.loads(sys.argv[1])
model = nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
consumed = []
def step(name, epoch, x):
    x = x.reshape(-1, 2)
    consumed.append([name, epoch, [int(v) for v in x[:, 0]]])
    opt.zero_grad(); model(x).sum().backward(); opt.step()
for name, text in LOADERS.items():
    loader = eval(text) if text else None
    for epoch in range(2):
        for n, x in enumerate(loader if text else DataLoader(ds, batch_size=4, shuffle=True)):
            step(name, epoch, x)
            if name == "broken_off" and n == 1: break
loader = StatefulDataLoader(ds, batch_size=4, shuffle=True)
it = iter(loader)
for _ in range(2): step("before", 0, next(it))
state = loader.state_dict()
fresh = StatefulDataLoader(ds, batch_size=4, shuffle=True)
fresh.load_state_dict(state)
for x in fresh: step("resumed", 0, x)
print("CONSUMED" + json.dumps(consumed))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[probed.Result, list]:
    pytest.importorskip("torchdata.nodes")
    found = probed.run(tmp_path_factory.mktemp("loaders"), JOB, args=(json.dumps(LOADERS),))
    assert found.code == 0, found.output
    line = next(line for line in found.output.splitlines() if line.startswith("CONSUMED"))
    return found, json.loads(line.removeprefix("CONSUMED"))


def lists(journal: JournalContent, kind: ListKind) -> dict[int, list[int]]:
    """The lists of one kind by serial."""
    found, at = {}, 0
    for serial, number, length in journal.list_keys:
        if number == kind:
            found[serial] = journal.list_values[at : at + length].astype(np.int64).tolist()
        at += length
    return found


@pytest.mark.parametrize("name", [*LOADERS, "before", "resumed"])
def test_indices_are_those_consumed(name: str, result: tuple[probed.Result, list]) -> None:
    found, consumed = result
    journal = found.journals[0]
    index = lists(journal, ListKind.INDEX)
    by_step = {int(row["step"]): row for row in journal.batches}
    steps = [(step, ids) for step, (loader, _, ids) in enumerate(consumed) if loader == name]
    assert steps
    for step, ids in steps:
        row = by_step[step]
        assert row["flags"] & BatchFlag.TRAIN_LAST
        assert index.get(int(row["serial"])) == ids, (name, step)
        assert row["num_samples"] == len(ids)


def test_one_row_per_consumed_batch(result: tuple[probed.Result, list]) -> None:
    found, consumed = result
    assert len(found.journals[0].batches) == len(consumed)
    assert not found.events("hook")


def test_epochs(result: tuple[probed.Result, list]) -> None:
    found, _ = result
    ends = {event["iteration"]: event for event in found.events("iteration_end")}
    starts = found.events("iteration")
    assert len(ends) == len(starts)
    finished = [ends[start["iteration"]]["finished"] for start in starts]
    assert finished.count(False) == 3, finished  # twice broken_off, and the iterator left for the resumed one
    samples = [ends[start["iteration"]]["num_samples"] for start in starts[:2]]
    assert samples == [22, 22]
    sites = [event["location"]["line"] for event in found.events("loader")]
    assert all(sites)


def test_no_row_from_workers(result: tuple[probed.Result, list], tmp_path: Path) -> None:
    assert len(result[0].journals) == 1
