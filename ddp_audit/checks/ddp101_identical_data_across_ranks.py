"""DDP101: replicas read the same batches in the same order."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ddp_audit.checks.common import (
    dataset_word,
    finding,
    inconclusive,
    leaf_sampler,
    levels_of,
    loader_word,
    named_steps,
    over_groups,
    percent,
    ranks_text,
    short_of_data,
)
from ddp_audit.checks.streams import MIN_STEPS, Group, View
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, Severity

CHECK = CheckInfo(
    id="DDP101",
    kind="identical-data-across-ranks",
    severity=Severity.ERROR,
    title="Each replica reads its own batches",
    failure_title="Replicas read the same batches",
    why="N GPUs that read the same batch do the work of one GPU, N times over: the bill grows, the batch does not.",
    explanation=(
        "Every pair of replicas is compared step by step: by sample indices where equal indices are known to be "
        "equal samples, else by the content of the batches, else by the inputs of the wrapped model. The check fails "
        "when a pair has the same samples at every common step and each of the two read at least 8 distinct batches. "
        "Steps at which a replica repeats its own previous batch prove nothing and are left out: constant dummy input "
        "is inconclusive. Content that was hashed in part only counts when whole batches confirm it. Peers that hold "
        "parts of one model (tensor, context or pipeline parallel) must read the same data and are one replica."
    ),
    needs="L1, L2 or L3 on every replica, 8 common steps",
    fix="loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))",
    broken="""loader = DataLoader(dataset, batch_size=32, shuffle=True)  # same seed on each rank, same order
for batch in loader:
    train_step(batch)""",
    fixed="""sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        train_step(batch)""",
)


def _cause(group: Group) -> tuple[str, str]:
    """(cause, fix), in the names of the user's own classes."""
    loader, samplers = group.loader, group.samplers
    num = len(group.replicas)
    name, data = loader_word(loader), dataset_word(loader)
    if loader is None:
        return (
            "no loader was seen: every rank makes its batches from equal seeds or from the same list",
            "take every N-th sample of one common order, indices[rank::world_size], or mix the rank into the seed",
        )
    told = [s for s in samplers if s.num_replicas is not None]
    if told and all(s.num_replicas == 1 for s in told):
        early = " because it was built before the process group" if loader.before_group else ""
        return (
            f"{told[0].class_name} believes the world is 1 rank{early}; there are {num} replicas",
            f"build {told[0].class_name} after init_process_group, or pass num_replicas={num} and rank=RANK to it",
        )
    if (
        told
        and len({s.rank for r in group.readers for s in r.iterations[r.training[0]].samplers if s.rank is not None})
        == 1
    ):
        return (
            f"{told[0].class_name} was given rank {told[0].rank} on every rank",
            f"pass rank=torch.distributed.get_rank() to {told[0].class_name}",
        )
    if loader.dataset_iterable:
        return (
            f"{data} is an iterable data set that is not split by rank: every rank reads the whole stream",
            f"in {data}.__iter__ take every N-th item by rank and loader worker "
            "(or datasets.distributed.split_dataset_by_node, or a node splitter)",
        )
    leaf = leaf_sampler(samplers)
    if loader.family == "nodes" or (loader.family == "dataloader" and "DataLoader" not in loader.class_names):
        inner = f" with {leaf.class_name} inside" if leaf is not None else ""
        return (
            f"{name}{inner} is no torch DataLoader, so no framework could put a distributed sampler into it",
            f"give {name} a sampler that knows the ranks: DistributedSampler(dataset) in place of "
            f"{leaf.class_name if leaf is not None else 'its own'}",
        )
    if leaf is not None and not told:
        seeds = ""
        digests = [r.iterations[r.training[0]].rng_digests for r in group.readers if r.training]
        random = (leaf.shuffle is True) or "Random" in leaf.class_name
        known = [item for item in digests if item is not None]
        alike = len(known) == len(digests) > 1 and any(len({item[k] for item in known}) == 1 for k in range(3))
        if random and alike:
            seeds = ", and equal seeds give every rank the same order"
        if leaf.class_name in ("RandomSampler", "SequentialSampler"):
            fix = f"{name}(dataset, sampler=DistributedSampler(dataset)) in place of {leaf.class_name}"
        elif leaf.replacement:
            fix = (
                f"draw 1/{num} of the samples on each rank, with a generator of {leaf.class_name} that is seeded by "
                "seed + rank"
            )
        else:
            fix = f"give {leaf.class_name} the rank and the world size, and let it deal each rank its own share"
        return f"the sampler {leaf.class_name} does not know the ranks{seeds}", fix
    return (
        f"{name} draws from equal seeds on every rank",
        "give the sampler the rank and world size, or mix the rank into the seed of endless random draws",
    )


def _judge(group: Group) -> Finding:
    short = short_of_data(CHECK, group)
    if short is not None:
        return short
    steps = group.common_steps
    at = [np.searchsorted(stream.steps, steps) for stream in group.streams]
    order_RS = np.stack([stream.order_S[i] for stream, i in zip(group.streams, at, strict=True)])
    set_RS = np.stack([stream.set_S[i] for stream, i in zip(group.streams, at, strict=True)])
    listed_RS = np.stack([stream.listed_S[i] for stream, i in zip(group.streams, at, strict=True)])
    whole_RS = np.stack([stream.whole_S[i] for stream, i in zip(group.streams, at, strict=True)])
    opaque_RS = np.stack([stream.opaque_S[i] for stream, i in zip(group.streams, at, strict=True)])
    moving_RS = np.ones(order_RS.shape, dtype=np.bool_)
    moving_RS[:, 1:] = order_RS[:, 1:] != order_RS[:, :-1]
    distinct_R = [len(np.unique(row)) for row in order_RS]
    shares: list[tuple[float, int, int]] = []
    identical: list[tuple[int, int]] = []
    doubtful: list[str] = []
    for a, b in combinations(range(len(order_RS)), 2):
        same_S = order_RS[a] == order_RS[b]
        same_S |= listed_RS[a] & listed_RS[b] & (set_RS[a] == set_RS[b])
        shares.append((float(same_S.mean()), a, b))
        if not same_S.all():
            continue
        telling_S = moving_RS[a] & moving_RS[b]
        whole_S = telling_S & whole_RS[a] & whole_RS[b] & ~opaque_RS[a] & ~opaque_RS[b]
        if min(distinct_R[a], distinct_R[b]) < MIN_STEPS or int(telling_S.sum()) < MIN_STEPS:
            doubtful.append(
                f"at least {MIN_STEPS} distinct batches per rank; "
                f"{ranks_text((group.replicas[a][0],))} read {distinct_R[a]}, and constant data prove nothing"
            )
        elif int(whole_S.sum()) < MIN_STEPS:
            doubtful.append(f"{MIN_STEPS} batches of which every byte can be hashed; {int(whole_S.sum())} were")
        else:
            identical.append((a, b))
    share, a, b = max(shares)
    level = group.level[0]
    facts = {
        "measured": share,
        "limit": 1.0,
        "unit": "share of steps with the same batch",
        "levels": levels_of(group),
    }
    if identical:
        alike = sorted({rank for pair in identical for item in pair for rank in group.replicas[item]})
        cause, fix = _cause(group)
        what = {Level.L1: "samples", Level.L2: "batches", Level.L3: "model inputs"}[level] if level else "batches"
        return finding(
            CHECK,
            Outcome.FAIL,
            f"{ranks_text(alike).capitalize()} read the same {what} at {len(steps)} of {len(steps)} steps.",
            cause=cause,
            fix=fix,
            ranks=tuple(alike),
            steps=named_steps(group.view, steps),
            location=group.location,
            **facts,
        )
    first = (group.replicas[a][0], group.replicas[b][0])
    equal = round(share * len(steps))
    if doubtful:
        return inconclusive(
            CHECK,
            f"{ranks_text(first).capitalize()} read the same batch at {equal} of {len(steps)} steps, "
            "but the batches do not prove it.",
            doubtful[0],
            ranks=group.ranks,
            **facts,
        )
    return finding(
        CHECK,
        Outcome.PASS,
        f"{ranks_text(group.ranks).capitalize()} read different batches; the closest pair ({ranks_text(first)}) "
        f"agrees at {equal} of {len(steps)} steps ({percent(share)}).",
        ranks=group.ranks,
        **facts,
    )


def run(view: View) -> Finding:
    """Compare every pair of replicas step by step.

    Returns:
        FAIL when a pair has the same samples at every common step; INCONCLUSIVE when there are
        fewer than 8 steps or distinct batches, or the digests do not cover whole batches.
    """
    return over_groups(CHECK, view, _judge)
