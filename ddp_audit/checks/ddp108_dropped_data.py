"""DDP108: a sizeable part of the data is never used, the same part in each epoch."""

from __future__ import annotations

import numpy as np

from ddp_audit.checks.common import (
    count,
    finding,
    levels_of,
    loader_word,
    not_applicable,
    over_groups,
    percent,
    ranks_text,
    short_of_epochs,
)
from ddp_audit.checks.streams import Group, View
from ddp_audit.collect.duplicates import distinct
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, SamplerInfo, Severity

LIMIT = 0.10  # of the data set; below it drop_last and flooring are a rounding matter

PLAIN = ("SequentialSampler", "RandomSampler", "DistributedSampler", "BatchSampler", "BatchSamplerShard")
"""Samplers that are meant to cover the whole set; any other may leave rows out on purpose."""

CHECK = CheckInfo(
    id="DDP108",
    kind="dropped-data",
    severity=Severity.WARNING,
    title="All data are used over the epochs",
    failure_title="Part of the data is never used",
    why="Rows that are dropped in every epoch are paid for and never trained on.",
    explanation=(
        "The union over all replicas and all finished epochs is counted against the length of the data set, where "
        "the sampler chain is meant to cover it. The check fails when more than 10 % is missing, the same rows in each "
        "of two or more epochs. Shuffled epochs with drop_last leave out other rows each time and pass; subsets, "
        "filters and samplers of the user's own are not judged."
    ),
    needs="two finished epochs with sample indices (L1)",
    fix="set drop_last in one place only, shuffle before dropping, or use a smaller batch",
    broken="""sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)""",
    fixed="""sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)""",
)


def _covers(samplers: tuple[SamplerInfo, ...], length: int) -> bool:
    """The chain is meant to deal out the whole set."""
    if not samplers or any(s.class_name not in PLAIN for s in samplers):
        return False
    leaf = samplers[-1]
    if leaf.num_replicas is None and leaf.num_samples is not None:
        return leaf.num_samples >= length  # RandomSampler(num_samples=…) picks some on purpose
    return True


def _judge(group: Group) -> Finding:
    # not short_of_epochs(2) first: a subset sampler is not applicable whatever was seen
    short = short_of_epochs(CHECK, group)
    if short is not None:
        return short
    level = group.level[0]
    slot = group.epochs[0].slot
    epochs = [item for item in group.epochs if item.slot == slot]
    length = epochs[0].length
    if level is not Level.L1 or not length:
        return not_applicable(CHECK, "No data set of known length is read by index.")
    samplers = epochs[0].parts[0].iteration.samplers
    if not _covers(samplers, length):
        return not_applicable(CHECK, "The sampler may leave rows out on purpose.")
    if len(epochs) < 2:
        return short_of_epochs(CHECK, group, 2) or not_applicable(CHECK, "One epoch of each loader was seen.")
    unions = [distinct(np.concatenate(item.samples)) for item in epochs]
    union = distinct(np.concatenate(unions))
    missing = length - len(union)
    share = missing / length
    same = all(len(one) <= len(union) and np.array_equal(one, union) for one in unions)
    facts = {
        "measured": share,
        "limit": LIMIT,
        "unit": "share of the data set that no epoch uses",
        "levels": levels_of(group),
        "ranks": group.ranks,
    }
    if share > LIMIT and same:
        dropping = [s.class_name for s in samplers if s.drop_last]
        loader = group.loader
        if loader is not None and loader.drop_last and "BatchSampler" not in dropping:
            dropping.append(loader.class_names[0] if loader.class_names else "the loader")
        names = list(dict.fromkeys(dropping)) or [loader_word(loader)]
        if len(names) > 1:
            where = f"{' and '.join(names)} both drop what does not fill (drop_last)"
        elif dropping:
            where = f"{names[0]} drops what does not fill (drop_last)"
        else:
            where = f"{names[0]} leaves rows out"
        again = " and the order is fixed, so it is always the same rows" if not any(s.shuffle for s in samplers) else ""
        return finding(
            CHECK,
            Outcome.FAIL,
            f"{missing} of {length} samples ({percent(share)}) are used in none of {count(len(epochs), 'epoch')} by "
            f"{ranks_text(group.ranks)}, the same ones each time.",
            cause=f"{where}{again}",
            fix="set drop_last in one place only and shuffle before dropping, or use a smaller batch",
            location=group.location,
            **facts,
        )
    return finding(
        CHECK,
        Outcome.PASS,
        f"{percent(1 - share)} of {length} samples are used over {count(len(epochs), 'epoch')}"
        + ("." if same or share <= LIMIT else "; what is left out changes from epoch to epoch."),
        **facts,
    )


def run(view: View) -> Finding:
    """Count what no epoch uses, where the sampler is meant to cover the data."""
    return over_groups(CHECK, view, _judge)
