"""DDP103: every replica walks the whole data set in an order of its own."""

from __future__ import annotations

import numpy as np

from ddp_audit.checks.common import (
    count,
    dataset_word,
    finding,
    inconclusive,
    leaf_sampler,
    levels_of,
    loader_word,
    not_applicable,
    over_groups,
    percent,
    ranks_text,
    short_of_epochs,
)
from ddp_audit.checks.streams import MIN_STEPS, EpochSet, Group, View
from ddp_audit.records import CheckInfo, Finding, Outcome, Severity

FULL = 0.95  # share of the set that counts as all of it: drop_last and padding take a few rows

CHECK = CheckInfo(
    id="DDP103",
    kind="full-dataset-per-rank",
    severity=Severity.WARNING,
    title="An epoch is one pass over the data, shared by the replicas",
    failure_title="Each replica walks the whole data set",
    why=(
        "N replicas make N passes per epoch: epoch time does not fall, and schedules and logs that count epochs "
        "count N times too little."
    ),
    explanation=(
        "In each finished epoch the distinct samples of a replica are counted against the whole set (its length, or "
        "the union over replicas where no length is known). The check fails when every replica covers at least 95 % "
        "of it and the orders differ. It is an error when the loader holds a sampler or a framework that was meant to "
        "split the data, else a warning: gradients are still useful. Endless sampling and sampling with "
        "replacement have no epochs and are not judged; equal orders are DDP101."
    ),
    needs="one finished epoch with sample lists (L1 or L2), or a stream that repeats a fixed set (L3)",
    fix="loader = DataLoader(dataset, sampler=DistributedSampler(dataset))",
    broken="""torch.manual_seed(seed + rank)
loader = DataLoader(dataset, batch_size=32, shuffle=True)""",
    fixed="""sampler = DistributedSampler(dataset, seed=seed)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)""",
)


def is_full(item: EpochSet) -> bool:
    """Every replica covers the whole set in this epoch."""
    counts = item.counts
    whole = max(item.length or 0, counts.num_union)
    return whole >= MIN_STEPS and bool((counts.num_distinct_R >= FULL * whole).all())


def _orders_differ(item: EpochSet) -> bool:
    first = item.samples[0]
    return any(not np.array_equal(first, other) for other in item.samples[1:])


def _judge(group: Group) -> Finding:
    short = short_of_epochs(CHECK, group)
    if short is not None:
        return short
    full = [item for item in group.epochs if is_full(item)]
    counts = group.epochs[0].counts
    whole = max(group.epochs[0].length or 0, counts.num_union)
    share = float(counts.num_distinct_R.min()) / max(whole, 1)
    facts = {
        "measured": share,
        "limit": FULL,
        "unit": "share of the data set per replica and epoch",
        "levels": levels_of(group),
        "ranks": group.ranks,
    }
    if not full or len(full) < len(group.epochs) / 2:
        return finding(
            CHECK,
            Outcome.PASS,
            f"A replica reads {percent(share)} of the {whole} samples per epoch.",
            **facts,
        )
    same_order = not any(_orders_differ(item) for item in full)
    if same_order and group.all_alike:
        return not_applicable(CHECK, "The replicas read the same at every step: that is DDP101's question.")
    if not group.whole_agree(full[0].samples):
        return inconclusive(
            CHECK, "Only windows of the samples were hashed.", "samples of which every byte can be hashed", **facts
        )
    loader, samplers = group.loader, group.samplers
    told = [s for s in samplers if s.num_replicas is not None]
    leaf = leaf_sampler(samplers)
    name = loader_word(loader)
    if told and told[0].num_replicas == 1:
        cause = f"{told[0].class_name} believes the world is 1 rank"
        fix = f"build {told[0].class_name} after init_process_group, or pass num_replicas={len(group.replicas)} to it"
    elif leaf is not None:
        own = "" if same_order else " and has a seed of its own on each"
        cause = f"the sampler {leaf.class_name} does not know the ranks{own}"
        fix = f"{name}(dataset, sampler=DistributedSampler(dataset)) in place of {leaf.class_name}"
    elif loader is not None and loader.dataset_iterable:
        cause = f"{dataset_word(loader)} is not split by rank"
        fix = f"in {dataset_word(loader)}.__iter__ take every N-th item by rank and loader worker"
    else:
        cause = "each rank shuffles all samples by itself and takes no share of them"
        fix = "shuffle with one seed on all ranks and take indices[rank::world_size]"
    meant = bool(told) or bool(loader is not None and loader.frameworks)
    return finding(
        CHECK,
        Outcome.FAIL,
        f"Each of {ranks_text(group.ranks)} read {percent(share)} of the {whole} samples in "
        f"{len(full)} of {count(len(group.epochs), 'finished epoch')}, "
        f"in {'the same order but at other steps' if same_order else 'different orders'}.",
        severity=Severity.ERROR if meant else Severity.WARNING,
        cause=cause,
        fix=fix,
        location=group.location,
        **facts,
    )


def run(view: View) -> Finding:
    """Count the share of the data set that each replica reads per finished epoch."""
    return over_groups(CHECK, view, _judge)
