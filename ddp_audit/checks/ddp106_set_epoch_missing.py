"""DDP106: a loader that is meant to shuffle yields the same order in every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ddp_audit.checks.common import (
    count,
    finding,
    inconclusive,
    loader_word,
    no_loader,
    not_applicable,
    ranks_text,
)
from ddp_audit.checks.streams import Epoch, RankView, View, epoch_of
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, SamplerInfo, Severity

MIN_SAMPLES = 8  # 8! = 40320 orders: an equal one is no chance

CHECK = CheckInfo(
    id="DDP106",
    kind="set-epoch-missing",
    severity=Severity.WARNING,
    title="A shuffling loader yields a new order in each epoch",
    failure_title="The order of the data never changes",
    why="Without a new order per epoch the model sees the same batches in the same order again: shuffling is off.",
    explanation=(
        "The order of each finished epoch is hashed and compared with that of the next one, per rank, where the "
        "sampler chain says that it shuffles (shuffle=True, or a random sampler). The check fails when most "
        "consecutive epochs of at least 8 samples are equal. An order that is fixed on purpose (shuffle=False, "
        "curriculum, time series), a single epoch and epochs cut short are not judged."
    ),
    needs="two finished epochs of one loader; L1, or L2 at every batch",
    fix="call sampler.set_epoch(epoch) before each epoch's iterator is made",
    broken="""for epoch in range(num_epochs):
    for batch in loader:  # DistributedSampler keeps epoch 0
        train_step(batch)""",
    fixed="""for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        train_step(batch)""",
)


def _shuffles(samplers: Sequence[SamplerInfo]) -> SamplerInfo | None:
    """The object of the chain that is known to shuffle."""
    for sampler in samplers:
        if sampler.shuffle is True or (sampler.shuffle is None and "Random" in sampler.class_name):
            return sampler
    return None


def _epochs(view: RankView) -> dict[int, list[Epoch]]:
    """Finished epochs of loaders that shuffle, per slot."""
    found: dict[int, list[Epoch]] = {}
    for number in view.training:
        if _shuffles(view.iterations[number].samplers) is None:
            continue
        epoch = epoch_of(view, number, Level.L1, with_samples=False)
        if epoch.order is None:
            epoch = epoch_of(view, number, Level.L2, with_samples=False)
        if epoch.complete and epoch.num_samples >= MIN_SAMPLES:
            found.setdefault(epoch.slot, []).append(epoch)
    return found


def _order(epoch: Epoch) -> int | None:
    if epoch.order is not None and epoch.whole:
        return epoch.order
    return epoch.iteration.index_digest


def run(view: View) -> Finding:
    """Compare the order of consecutive finished epochs on each rank."""
    if not any(rank_view.training for rank_view in view.ranks.values()):
        return no_loader(CHECK, view)
    shuffling = {
        rank: _shuffles(rank_view.iterations[number].samplers)
        for rank, rank_view in view.ranks.items()
        for number in rank_view.training[:1]
    }
    if not any(
        _shuffles(rank_view.iterations[number].samplers) is not None
        for rank_view in view.ranks.values()
        for number in rank_view.training
    ):
        return not_applicable(CHECK, "No loader is known to shuffle.")
    repeats: dict[int, tuple[int, int, Epoch]] = {}
    compared = 0
    most = 0
    for rank, rank_view in view.ranks.items():
        for epochs in _epochs(rank_view).values():
            most = max(most, len(epochs))
            pairs = [
                (_order(a), _order(b), b)
                for a, b in pairwise(epochs)
                if _order(a) is not None and _order(b) is not None
            ]
            compared += len(pairs)
            equal = [b for one, other, b in pairs if one == other]
            if equal and 2 * len(equal) > len(pairs) and (rank not in repeats or len(equal) > repeats[rank][0]):
                repeats[rank] = len(equal), len(pairs), equal[0]
    if not compared:
        why = (
            "the order of every batch of two epochs"
            if most >= 2
            else f"two finished epochs of at least {MIN_SAMPLES} samples; {count(most, 'finished epoch')} was seen"
        )
        return inconclusive(CHECK, "Not judged: orders of two finished epochs are needed.", why, unit="epochs")
    if not repeats:
        return finding(
            CHECK,
            Outcome.PASS,
            f"The order changed in {compared} of {compared} comparisons of consecutive epochs."
            if compared
            else "The order changes.",
            ranks=tuple(view.ranks),
            measured=0.0,
            limit=0.5,
            unit="share of consecutive epochs in the same order",
            levels=(Level.L1,),
        )
    rank, (num_equal, num_pairs, epoch) = max(repeats.items(), key=lambda item: item[1][0])
    sampler = _shuffles(epoch.iteration.samplers) or shuffling[rank]
    name = sampler.class_name if sampler is not None else "the sampler"
    calls = sum(e.iteration.num_set_epoch_calls for es in _epochs(view.ranks[rank]).values() for e in es)
    if sampler is not None and sampler.set_epoch and not calls:
        cause = f"{name} shuffles by its epoch number, and set_epoch is never called (it stays at {sampler.epoch or 0})"
        fix = f"call set_epoch(epoch) on {name} before each epoch"
    elif sampler is not None and sampler.set_epoch:
        cause = f"set_epoch is called, but {name} is at the same epoch number when the iterator is made"
        fix = f"call set_epoch(epoch) on the {name} that {loader_word(epoch.loader)} iterates, before its iterator"
    else:
        cause = f"{name} is seeded anew with the same seed before each epoch"
        fix = f"make the generator of {name} once, or mix the epoch number into its seed"
    return finding(
        CHECK,
        Outcome.FAIL,
        f"{ranks_text(repeats).capitalize()} read the same order in {num_equal + 1} consecutive epochs of "
        f"{num_pairs + 1}, though {name} shuffles.",
        cause=cause,
        fix=fix,
        ranks=tuple(sorted(repeats)),
        measured=num_equal / num_pairs,
        limit=0.5,
        unit="share of consecutive epochs in the same order",
        levels=(Level.L1 if epoch_of(view.ranks[rank], epoch.iteration.iteration, Level.L1).order else Level.L2,),
        location=epoch.loader.location if epoch.loader is not None else None,
        steps=(epoch.first_step,) if epoch.first_step is not None else (),
    )
