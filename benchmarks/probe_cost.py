"""What the probe costs, in microseconds per step and in bytes.

    make bench                                        all batches, about half an hour on 2 cores
    python benchmarks/probe_cost.py --quick           a try, some two minutes; too short for a verdict

Inside one process the hooks are switched off (A) and on (B) in blocks of 50 steps, in the order A B B A, so that
a machine that slows down or speeds up evenly adds the same to both. The difference comes with a bootstrap 95 %
interval over the ABBA groups, and beside it stands the control: the same blocks with the hooks off throughout.
Law 3 allows max(100 µs, 1 % of the step); the upper end must be within. Where the control's own interval is wider
than 50 µs this machine is too noisy to tell: "not resolved", and the probe's own clock decides.

What switching off does not take away: the patched methods are still entered and left again. The table of hooks
counts that too, in a run of its own, in which every hook is timed (which adds about 1 µs to each call).

Exits 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

BLOCK_STEPS = 50
MIN_GROUPS = 10  # of four blocks: 40 blocks
NOT_RESOLVED_US = 50.0
LIMIT_US, LIMIT_SHARE = 100.0, 0.01
BYTES_PER_STEP, BYTES_PER_VALUE = 200, 8  # law 5
EXTRA_MEMORY_MB = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A batch and how often it is measured.

    Attributes:
        shape: of one batch, batch axis first.
        kind: float, or int for token ids.
        groups: ABBA groups of a full run; the large batch's steps are long, so it has fewer.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    groups: int


CASES = {
    case.name: case
    for case in (
        Case("32x128-float", (32, 128), "float", 40),
        Case("256x512-int64", (256, 512), "int", 20),
        Case("4096x8-float", (4096, 8), "float", 20),
        Case("64x3x224x224-float", (64, 3, 224, 224), "float", 10),
    )
}
LOADERS = {
    "map": "indices known (L1), content on the schedule",
    "stream": "no indices: content (L2) of every batch",
    "hand": "no loader: the model's input (L3) at every step",
}


@dataclass(slots=True)
class Measured:
    """What one process measured. Times in µs per step."""

    step: float = 0.0
    differences: list[float] = field(default_factory=list)  # per ABBA group
    control: list[float] = field(default_factory=list)
    own_clock: float = 0.0
    first_steps: float = 0.0  # own clock over the first 32 steps
    hooks: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (µs per step, calls per step)
    resident_mb: float = 0.0
    num_steps: int = 0  # that the probe saw


# --------------------------------------------------------------------------- inside the measured process


def make_loader(case: Case, kind: str) -> Callable[[], Iterable[Any]]:
    """A function that gives a fresh iterable of at least one block of batches. Batches are views or one copy."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

    batch, *rest = case.shape
    num_rows = 2 * batch
    generator = torch.Generator().manual_seed(0)
    if case.kind == "int":
        pool = torch.randint(0, 1000, (num_rows, *rest), generator=generator)
    else:
        pool = torch.randn(num_rows, *rest, generator=generator)

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return batch * BLOCK_STEPS

        def __getitem__(self, indices: list[int]) -> Any:
            return pool[torch.tensor(indices) % num_rows]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for step in range(BLOCK_STEPS):
                yield pool[step % batch : step % batch + batch]

    if kind == "hand":
        return lambda: (pool[step % batch : step % batch + batch] for step in range(BLOCK_STEPS))
    loader: DataLoader[Any]
    if kind == "stream":
        loader = DataLoader(Stream(), batch_size=None)
    else:
        rows = Rows()
        sampler = BatchSampler(RandomSampler(rows), batch, drop_last=True)
        loader = DataLoader(rows, sampler=sampler, batch_size=None)
    return lambda: loader


def make_model(case: Case) -> Any:
    """A model that looks at part of its batch, so that its step is short and the probe's share large."""
    from torch import nn

    class First(nn.Module):
        """The first 16 columns."""

        def forward(self, rows: Any) -> Any:
            return rows[:, :16]

    if case.kind == "int":
        return nn.Sequential(First(), nn.EmbeddingBag(1000, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    if len(case.shape) == 4:
        return nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(147, 64), nn.ReLU(), nn.Linear(64, 1))
    width = case.shape[1]
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def resident_mb() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


class HookTimes:
    """Time inside each hook, nested ones taken out; put in place before any hook is made."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.stack: list[int] = []

    def install(self) -> None:
        from ddp_audit.hooks.guard import Hook

        protect, times = Hook.protect, self

        def timed(hook: Any, function: Any) -> Any:
            safe, name = protect(hook, function), hook.name

            def call(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter_ns()
                times.stack.append(0)
                try:
                    return safe(*args, **kwargs)
                finally:
                    spent = time.perf_counter_ns() - start
                    inner = times.stack.pop()
                    if times.stack:
                        times.stack[-1] += spent
                    times.spent_ns[name] = times.spent_ns.get(name, 0) + spent - inner
                    times.calls[name] = times.calls.get(name, 0) + 1

            return call

        Hook.protect = timed  # type: ignore[method-assign]


def measure(case: Case, kind: str, groups: int, what: str) -> Measured:
    """Run inside a probed process.

    Args:
        what: ``cost``: ABBA and control; ``hooks``: each hook timed; ``memory``: plain steps, then resident memory.
    """
    times = HookTimes()
    if what == "hooks":
        times.install()
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    guard: Any = None
    if "_DDP_AUDIT_SETTINGS" in os.environ:
        from ddp_audit.hooks import guard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    loader = make_loader(case, kind)
    model = DistributedDataParallel(make_model(case))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def block(on: bool) -> float:
        """50 steps; µs per step."""
        if guard is not None:
            guard.Hook.silent = not on
        batches = iter(loader())
        start = time.perf_counter_ns()
        for batch in batches:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        spent = time.perf_counter_ns() - start
        gc.collect()  # between blocks, so that no block pays for another's
        return spent / 1000 / BLOCK_STEPS

    found = Measured()

    def own_clock_ns() -> int:
        return int(guard.CLOCK.spent_ns) if guard is not None else 0

    before = own_clock_ns()
    block(True)  # the first 32 steps are always whole: shown apart, as is the warm-up of torch
    found.first_steps = (own_clock_ns() - before) / 1000 / BLOCK_STEPS
    block(False)
    if what == "memory":
        for _ in range(groups * 4):
            block(True)
        found.resident_mb = resident_mb()
    elif what == "hooks":
        times.spent_ns.clear()
        times.calls.clear()
        steps = groups * 2 * BLOCK_STEPS
        for _ in range(groups * 2):
            block(True)
        found.hooks = {n: (t / 1000 / steps, times.calls[n] / steps) for n, t in times.spent_ns.items()}
    else:
        off, spent_ns = [], 0
        for _ in range(groups):
            for on, differences in ((True, found.differences), (False, found.control)):
                first = block(False)
                before = own_clock_ns()
                inner = [block(on), block(on)]
                spent_ns += own_clock_ns() - before
                last = block(False)
                differences.append(fmean(inner) - fmean((first, last)))
                off += [first, last]
        found.step = fmean(off)
        found.own_clock = spent_ns / 1000 / (groups * 2 * BLOCK_STEPS)
    if guard is not None:
        guard.Hook.silent = False
        from ddp_audit.hooks.state import PROBE

        found.num_steps = PROBE.round + 1
        broken = {h.name: h.reason for h in guard.all_hooks() if h.num_errors}
        if broken:
            raise SystemExit(f"hooks failed, the measurement says nothing: {broken}")
    dist.destroy_process_group()
    return found


# --------------------------------------------------------------------------- the parent


def interval(values: list[float], num_draws: int = 4000) -> tuple[float, float, float]:
    """Mean and bootstrap 95 % interval (percentiles); the same values give the same interval."""
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(num_draws))
    return fmean(values), means[int(0.025 * num_draws)], means[int(0.975 * num_draws)]


@dataclass(frozen=True, slots=True)
class Judged:
    """One line of the result; ``holds`` is None when it was not resolved and the probe's clock decided."""

    holds: bool
    words: str


def judge_cost(
    step: float, cost: tuple[float, float, float], control: tuple[float, float, float], own: float
) -> Judged:
    """Law 3 by the upper end of the interval, or by the probe's own clock where the control is too wide."""
    limit = max(LIMIT_US, LIMIT_SHARE * step)
    if control[2] - control[1] > NOT_RESOLVED_US:
        return Judged(
            own <= limit, f"not resolved; by its own clock {'within' if own <= limit else 'OVER'} {limit:.0f} µs"
        )
    return Judged(cost[2] <= limit, f"{'within' if cost[2] <= limit else 'OVER'} {limit:.0f} µs")


def run_child(case: Case, kind: str, groups: int, what: str, folder: Path, probed: bool = True) -> Measured:
    """Measure in a fresh process, under the probe or not; journals stay in ``folder/out``."""
    result = folder / "measured.json"
    words = [sys.executable, os.path.abspath(__file__), "--child", what, "--case", case.name, "--loader", kind]
    words += ["--groups", str(groups), "--result", str(result)]
    if probed:
        words = [sys.executable, "-m", "ddp_audit", "probe", "--out", str(folder / "out"), "--no-live", "--", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode or not result.exists():
        raise SystemExit(f"{case.name}, {kind}, {what} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    raw = json.loads(result.read_text())
    result.unlink()
    return Measured(**raw)


def disk(folder: Path, num_steps: int) -> tuple[float, float, float]:
    """Bytes per step: of rows, of rare events (a loader, an epoch, …), of sample lists."""
    from ddp_audit.journal import HEAD, read_journal

    rows = events = 0
    for path in (folder / "out" / "journal").glob("*.journal"):
        content = read_journal(path)
        assert content is not None
        found = sum(t.nbytes + len(t) * HEAD.size for t in (content.batches, content.forwards, content.steps))
        rows += found
        events += path.stat().st_size - found
    lists = sum(path.stat().st_size for path in (folder / "out" / "journal").glob("*.lists*"))
    return rows / num_steps, events / num_steps, lists / num_steps


def bench(case: Case, kind: str, quick: bool, with_hooks: bool) -> bool:
    """Measure one batch with one loader and print it. False when a limit is exceeded."""
    groups = 3 if quick else max(MIN_GROUPS, case.groups)
    print(f"\n{case.name}, {kind}: {LOADERS[kind]}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="ddp-audit-bench-"))
    try:
        found = run_child(case, kind, groups, "cost", folder)
        cost, control = interval(found.differences), interval(found.control)
        judged = judge_cost(found.step, cost, control, found.own_clock)
        print(f"  step without hooks  {found.step:9.1f} µs, {groups * 4} blocks of {BLOCK_STEPS} steps")
        print(
            f"  hooks on less off   {cost[0]:9.1f} µs per step   95 % {cost[1]:.1f} to {cost[2]:.1f}   {judged.words}"
        )
        print(f"  control, off twice  {control[0]:9.1f} µs per step   95 % {control[1]:.1f} to {control[2]:.1f}")
        print(f"  probe's own clock   {found.own_clock:9.1f} µs per step; in the first block {found.first_steps:.1f}")
        rows, events, lists = disk(folder, found.num_steps)
        allowed = 2 * case.shape[0] * BYTES_PER_VALUE
        print(f"  journal rows        {rows:9.1f} bytes per step ({BYTES_PER_STEP} allowed)")
        print(f"  sample lists        {lists:9.1f} bytes per step ({allowed} allowed, {BYTES_PER_VALUE} per value)")
        print(
            f"  rare events         {events:9.1f} bytes per step, with an epoch every {BLOCK_STEPS} steps", flush=True
        )
        holds = judged.holds and rows <= BYTES_PER_STEP and lists <= allowed
        shutil.rmtree(folder / "out")

        if with_hooks:
            spent = run_child(case, kind, 2 if quick else 5, "hooks", folder).hooks
            print("  hook                 µs per step   calls per step")
            for name, (microseconds, calls) in sorted(spent.items(), key=lambda item: -item[1][0]):
                print(f"    {name:<18} {microseconds:11.1f}   {calls:14.1f}")
            shutil.rmtree(folder / "out")
            memory = [
                run_child(case, kind, 2 if quick else 10, "memory", folder, probed).resident_mb
                for probed in (False, True)
            ]
            extra = memory[1] - memory[0]
            print(f"  resident memory     {extra:9.1f} MB more with the probe ({EXTRA_MEMORY_MB} allowed)", flush=True)
            holds = holds and extra <= EXTRA_MEMORY_MB
        return holds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 groups per batch, map loader only: to try it out")
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES), help="only these batches")
    parser.add_argument("--loader", nargs="*", choices=list(LOADERS), help="only these loaders")
    parser.add_argument("--child", choices=["cost", "hooks", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = measure(CASES[args.case[0]], args.loader[0], args.groups, args.child)
        args.result.write_text(json.dumps(asdict(found)))
        return 0
    loaders = args.loader or (["map"] if args.quick else list(LOADERS))
    print(
        f"one rank, gloo, CPU, one thread, {os.cpu_count()} cores; law 3 allows max({LIMIT_US:.0f} µs, 1 % of the step)"
    )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(
            f"other programs are running (load {load:.1f} on {cores} cores): the times below are not the probe's alone"
        )
    results = {
        f"{name} {kind}": bench(CASES[name], kind, args.quick, with_hooks=kind == loaders[0])
        for name in args.case
        for kind in loaders
    }
    over = [name for name, holds in results.items() if not holds]
    print(
        f"\n{len(results) - len(over)} of {len(results)} within the limits"
        + (f"; over: {', '.join(over)}" if over else "")
    )
    if args.quick:
        print("a quick run is too short for a verdict: make bench")
    return 1 if over and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
