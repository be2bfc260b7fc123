"""DDP104: two layers both split the data by rank, so jointly the ranks see 1/N of it."""

from __future__ import annotations

import numpy as np

from ddp_audit.checks.common import (
    count,
    dataset_word,
    finding,
    levels_of,
    not_applicable,
    over_groups,
    percent,
    ranks_text,
    short_of_epochs,
)
from ddp_audit.checks.streams import EpochSet, Group, View
from ddp_audit.collect.duplicates import distinct
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, Severity

SLACK = 1.1  # a second split leaves 1/N plus padding; a tenth more is allowed for it

CHECK = CheckInfo(
    id="DDP104",
    kind="double-sharding",
    severity=Severity.ERROR,
    title="The data are split by rank once",
    failure_title="The data are split by rank twice",
    why="Two splits in a row leave each epoch with 1/N of the data: the rest is never trained on in that epoch.",
    explanation=(
        "In a finished epoch the union over replicas is counted against the length of the data set. The check fails "
        "when it is about 1/N of it and a rank-aware sampler in the chain dealt out more samples than its rank got: "
        "something behind it split again. It also fails when every rank "
        "holds data of its own and a sampler for all ranks deals out 1/N of them. "
        "What drop_last can take (less than one batch per replica) is allowed for. "
        "A run that stops inside the epoch, by a step limit for instance, is not judged, and a sampler that picks a "
        "subset on purpose is not taken for a split."
    ),
    needs="one finished epoch with sample indices (L1)",
    fix="split in one place: hand the framework the plain data set and let it shard",
    broken="""loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
loader = accelerator.prepare(loader)  # shards what is already a share""",
    fixed="""loader = DataLoader(dataset, shuffle=True)
loader = accelerator.prepare(loader)""",
)


def _promised(item: EpochSet) -> tuple[int, str] | None:
    """What the rank-aware sampler closest to the data dealt to its rank, and its class."""
    for sampler in reversed(item.parts[0].iteration.samplers):
        if sampler.num_replicas is not None and sampler.num_replicas > 1 and sampler.num_samples:
            return sampler.num_samples, sampler.class_name
    return None


def _own_data(group: Group) -> Finding | None:
    """Each rank holds a share as its data set, and a sampler for all ranks splits that again.

    Proof: the sampler deals out 1/N of what a rank holds, yet over the epochs the ranks together read more
    different samples than one rank's data set has. One data set listed in another order per rank cannot do that.
    """
    num = len(group.replicas)
    parts = [part for item in group.epochs for part in item.parts]
    lengths = [part.loader.dataset_length or 0 if part.loader is not None else 0 for part in parts]
    chains = [[s for s in part.iteration.samplers if s.num_replicas == num] for part in parts]
    if num < 2 or not all(chains) or not all(lengths) or group.index_space[0] is not False or not group.stable_content:
        return None
    batch = max(len(part.last_batch) for part in parts)
    shares = [len(s) / length for s, length in zip((s for i in group.epochs for s in i.samples), lengths, strict=True)]
    union = len(distinct(np.concatenate([s for item in group.epochs for s in item.samples])))
    if max(shares) > SLACK / num + batch / min(lengths) or union <= SLACK * max(lengths):
        return None
    sampler = chains[0][0].class_name
    return finding(
        CHECK,
        Outcome.FAIL,
        f"Each of {ranks_text(group.ranks)} holds data of its own and reads {percent(max(shares))} of them per epoch: "
        f"about 1/{num}.",
        cause=f"{dataset_word(group.loader)} holds one rank's share, and {sampler} splits that by rank again",
        fix=f"give {sampler} the whole data set, or shuffle each rank's share without it",
        location=group.location,
        measured=max(shares),
        limit=SLACK / num,
        unit="share of its own data that a replica reads in one epoch",
        levels=levels_of(group),
        ranks=group.ranks,
    )


def _judge(group: Group) -> Finding:
    short = short_of_epochs(CHECK, group)
    if short is not None:
        return short
    level = group.level[0]
    own = _own_data(group) if level is Level.L2 else None
    if own is not None:
        return own
    lengths = [item.length for item in group.epochs]
    if level is not Level.L1 or not any(lengths):
        return not_applicable(CHECK, "No data set of known length is read by index.")
    num = len(group.replicas)
    worst = min(group.epochs, key=lambda item: item.counts.num_union / max(item.length or 1, 1))
    counts = worst.counts
    length = worst.length or 0
    share = counts.num_union / max(length, 1)
    batch = max((len(part.last_batch) for part in worst.parts), default=0)
    largest = max((part.loader.batch_size or batch for part in worst.parts if part.loader is not None), default=batch)
    dropped = num * (largest - 1) + num - 1  # a drop_last before and one after the split
    facts = {
        "measured": share,
        "limit": SLACK / num,
        "unit": "share of the data set that all replicas read together in one epoch",
        "levels": levels_of(group),
        "ranks": group.ranks,
    }
    promised = _promised(worst)
    aware = [s.class_name for s in worst.parts[0].iteration.samplers if (s.num_replicas or 1) > 1]
    frameworks = worst.parts[0].loader.frameworks if worst.parts[0].loader is not None else ()
    split_again = promised is not None and max(len(s) for s in worst.samples) * num <= SLACK * promised[0] + largest
    # below 1/N * 1.1 of the set, and more is missing than drop_last can take
    if share <= SLACK / num and length - counts.num_union > dropped:
        if promised is None:
            if len(set(aware)) < 2:
                return finding(
                    CHECK,
                    Outcome.PASS,
                    f"All replicas together read {percent(share)} of the data, by a sampler that is not split by rank.",
                    **facts,
                )
            split_again = True
        if split_again:
            sampler = promised[1] if promised is not None else aware[-1]
            second = next((name for name in aware if name != sampler), None)
            by = second or (f"{frameworks[0]}'s own split" if frameworks else "a second split by rank behind it")
            return finding(
                CHECK,
                Outcome.FAIL,
                f"In epoch {worst.number} {ranks_text(group.ranks)} together read {counts.num_union} of {length} "
                f"samples ({percent(share)}): about 1/{num}.",
                cause=f"{sampler} splits {dataset_word(group.loader)} by rank, and {by} splits its share again",
                fix=f"remove {sampler} and leave the split to {frameworks[0] if frameworks else by}",
                location=group.location,
                steps=(worst.step,) if worst.step is not None else (),
                **facts,
            )
        return finding(
            CHECK,
            Outcome.PASS,
            f"All replicas together read {percent(share)} of the data, which is what the sampler deals out.",
            **facts,
        )
    return finding(
        CHECK,
        Outcome.PASS,
        f"All replicas together read {percent(share)} of the {length} samples in each of "
        f"{count(len(group.epochs), 'finished epoch')} or more.",
        **facts,
    )


def run(view: View) -> Finding:
    """Count the union over replicas in a finished epoch against the length of the data set."""
    return over_groups(CHECK, view, _judge)
