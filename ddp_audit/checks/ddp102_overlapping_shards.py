"""DDP102: the replicas' shares of one epoch overlap, and some samples are read by none."""

from __future__ import annotations

from ddp_audit.checks import ddp103_full_dataset_per_rank as full_check
from ddp_audit.checks.common import (
    count,
    finding,
    inconclusive,
    levels_of,
    loader_word,
    not_comparable,
    over_groups,
    percent,
    ranks_text,
    short_of_data,
    short_of_epochs,
)
from ddp_audit.checks.streams import SIGNIFICANT_Z, EpochSet, Group, View, explained_padding
from ddp_audit.records import CheckInfo, Finding, Outcome, Severity

LIMIT = 0.05  # shared reads beyond padding, of all reads; double rows in real data stay well below
UNREAD = 0.02  # share of the set that nobody reads: below it drop_last explains what is missing

CHECK = CheckInfo(
    id="DDP102",
    kind="overlapping-shards",
    severity=Severity.ERROR,
    title="The replicas' shares of an epoch are disjoint",
    failure_title="Shares of the data overlap",
    why="Samples that two replicas read are trained on twice per epoch, while others are not read at all.",
    explanation=(
        "Inside one finished epoch the samples that a second replica reads too are counted, less what padding "
        "explains (DistributedSampler pads by total_size - len(dataset), even batches by at most one global batch). "
        "The check fails when more than 5 % of all reads are such repeats and the union stays clearly below the data "
        "set, or the reads add up to clearly more than it. Shares that move between ranks from epoch to epoch are "
        "fine: epochs are never pooled. Without epochs, or with replacement, equal optimizer steps are compared and "
        "the overlap at unequal steps is taken off as chance; only an excess of 4 standard errors counts."
    ),
    needs="one finished epoch with sample lists, or 8 common steps of endless sampling",
    fix="sampler = DistributedSampler(dataset, seed=0)  # one seed and one epoch number on all ranks",
    broken="""sampler = DistributedSampler(dataset, seed=rank)  # each rank cuts its share from another order""",
    fixed="""sampler = DistributedSampler(dataset, seed=0)
...
sampler.set_epoch(epoch)  # on every rank""",
)


def _overlap(item: EpochSet) -> tuple[int, int, int]:
    """(further reads beyond padding, union, sum of distinct reads)."""
    counts = item.counts
    further = max(0, counts.num_overlap - explained_padding(item))
    return further, counts.num_union, int(counts.num_distinct_R.sum())


def _cause(group: Group) -> tuple[str, str]:
    chains = [r.iterations[r.training[0]].samplers for r in group.readers if r.training]
    name = loader_word(group.loader)
    for field, word in (("seed", "seed"), ("epoch", "epoch number")):
        for position in range(min((len(chain) for chain in chains), default=0)):
            values = [getattr(chain[position], field) for chain in chains]
            if None not in values and len(set(values)) > 1:
                sampler = chains[0][position].class_name
                shown = " and ".join(str(value) for value in sorted(set(values))[:4])
                return (
                    f"{sampler} has another {word} on each rank ({shown}), so the shares come from different orders",
                    f"give {sampler} the same {word} on all ranks; keep per-rank seeds for augmentation",
                )
    loaders = [r.loaders.get(r.iterations[r.training[0]].loader) for r in group.readers if r.training]
    digests = {loader.dataset_digest for loader in loaders if loader is not None}
    if len(digests) > 1 and None not in digests:
        return (
            "the data set is not the same on all ranks, for instance files listed in another order",
            "sort file lists, and split with one seed on all ranks",
        )
    return (
        f"the ranks' shares in {name} are cut from different orders of the data",
        "use one sampler seed and epoch number on all ranks, and sort file lists",
    )


def _by_step(group: Group) -> Finding:
    share = group.step_share
    if share is None:
        return inconclusive(
            CHECK,
            "No sample lists were seen, so overlap cannot be counted.",
            "samples with a leading batch axis, or record_samples(ids) in the loop",
            ranks=group.ranks,
        )
    excess = 1.0 - share.fraction
    facts = {
        "measured": excess,
        "limit": LIMIT,
        "unit": "share of reads that another replica repeats at the same step, chance taken off",
        "levels": levels_of(group),
        "ranks": group.ranks,
    }
    # all the same at every step is DDP101's finding, not a share that overlaps
    identical = share.overlap >= 0.95 * (1 - 1 / len(group.replicas)) * share.total
    if identical:
        return finding(
            CHECK,
            Outcome.NOT_APPLICABLE,
            "The replicas read the same batches, so there are no shares: that is DDP101's question.",
            levels=levels_of(group),
        )
    if excess > LIMIT:
        if not all(bool(stream.whole_S.all()) for stream in group.streams):
            return inconclusive(
                CHECK, "Only windows of the samples were hashed.", "samples of which every byte can be hashed", **facts
            )
        cause, fix = _cause(group)
        return finding(
            CHECK,
            Outcome.FAIL,
            f"{ranks_text(group.ranks).capitalize()} repeat {percent(excess)} of each other's samples at the same "
            f"step, over {count(share.num_steps, 'step')}; chance explains {share.chance:.0f} of {share.overlap}.",
            cause=cause,
            fix=fix,
            location=group.location,
            **facts,
        )
    return finding(
        CHECK,
        Outcome.PASS,
        f"At equal steps {ranks_text(group.ranks)} share no more samples than chance explains "
        f"({share.overlap} of {share.total}, limit {SIGNIFICANT_Z:.0f} standard errors).",
        **facts,
    )


def _judge(group: Group) -> Finding:
    short = not_comparable(CHECK, group)
    if short is None:
        short = short_of_data(CHECK, group) if group.with_replacement else short_of_epochs(CHECK, group)
    if short is not None:
        return short
    if group.with_replacement:
        if any(part.complete and part.samples is None for parts in group.epoch_parts for part in parts):
            return inconclusive(
                CHECK,
                "Not judged: the sample lists of the finished epochs are not whole.",
                "an epoch of which every batch has its sample list",
                ranks=group.ranks,
                levels=levels_of(group),
            )
        return _by_step(group)
    worst: tuple[float, EpochSet, int, int, int] | None = None
    for item in group.epochs:
        further, union, total = _overlap(item)
        share = further / max(total, 1)
        if worst is None or share > worst[0]:
            worst = share, item, further, union, total
    assert worst is not None
    share, item, further, union, total = worst
    facts = {
        "measured": share,
        "limit": LIMIT,
        "unit": "share of reads that another replica repeats in the same epoch, padding taken off",
        "levels": levels_of(group),
        "ranks": group.ranks,
    }
    if full_check.is_full(item):
        return finding(
            CHECK,
            Outcome.NOT_APPLICABLE,
            "Every replica reads the whole data set, so there are no shares: that is DDP101's or DDP103's question.",
            levels=levels_of(group),
        )
    length = item.length
    unread = (length - union) if length is not None else None
    short_of_set = length is None or union < (1 - UNREAD) * length or total > (1 + UNREAD) * length
    if share > LIMIT and short_of_set:
        if not group.whole_agree(item.samples):
            return inconclusive(
                CHECK, "Only windows of the samples were hashed.", "samples of which every byte can be hashed", **facts
            )
        cause, fix = _cause(group)
        rest = f"; {unread} of {length} samples are read by nobody" if unread and length else ""
        return finding(
            CHECK,
            Outcome.FAIL,
            f"In epoch {item.number} {ranks_text(group.ranks)} repeat {further} of each other's {total} reads "
            f"({percent(share)}){rest}.",
            cause=cause,
            fix=fix,
            location=group.location,
            steps=(item.step,) if item.step is not None else (),
            **facts,
        )
    return finding(
        CHECK,
        Outcome.PASS,
        f"In {count(len(group.epochs), 'finished epoch')} at most {further} of {total} reads are repeats "
        f"beyond padding.",
        **facts,
    )


def run(view: View) -> Finding:
    """Count samples that two replicas read in one finished epoch, padding aside."""
    return over_groups(CHECK, view, _judge)
