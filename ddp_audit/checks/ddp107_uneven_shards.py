"""DDP107: replicas get different numbers of batches."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_audit.checks.common import (
    dataset_word,
    finding,
    inconclusive,
    no_loader,
    not_applicable,
    over_groups,
    ranks_text,
)
from ddp_audit.checks.streams import Epoch, Group, View, epoch_of
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, Severity

LIMIT = 1  # batches; a difference of one is an uneven tail that trainers handle

CHECK = CheckInfo(
    id="DDP107",
    kind="uneven-shards",
    severity=Severity.WARNING,
    title="Replicas get equally many batches",
    failure_title="Replicas get different numbers of batches",
    why=(
        "Ranks that run out early make the others hang, idle, or stop too: data are lost, or some samples weigh more "
        "than others."
    ),
    explanation=(
        "Batches per replica and epoch are compared. The check fails when they differ by more than one. It is an "
        "error when the longer shares are cut to the shortest, so that data are skipped in each epoch, or when a rank "
        "hung waiting for one that had run out; it is a warning when every rank reads its own share to the end (Join, "
        "or a loop that handles it). Dispatching loaders, of which only rank 0 reads, are not judged by that rank's "
        "reads."
    ),
    needs="a training loader on every replica and a finished epoch",
    fix="split rows and not files, pad or drop to equal counts, or set a fixed number of steps with a repeating stream",
    broken="""files = all_files[rank::world_size]  # files differ in length
loader = DataLoader(Rows(files))""",
    fixed="""rows = Rows(all_files)
loader = DataLoader(rows, sampler=DistributedSampler(rows))""",
)


@dataclass(slots=True)
class _Row:
    """One epoch of one loader over all replicas."""

    number: int
    parts: list[Epoch]
    totals: list[int]  # batches the loader holds
    read: list[int]  # batches the loop got
    cut: bool  # some replica stopped before its loader's end


def _total(epoch: Epoch) -> int | None:
    """Batches the loader holds; from its own length where the loop left early."""
    if epoch.iteration.finished or epoch.complete:
        return epoch.num_batches
    return epoch.loader.length if epoch.loader is not None else None


def _rows(group: Group) -> list[_Row]:
    parts = [[epoch_of(r, number, Level.L2, with_samples=False) for number in r.training] for r in group.readers]
    rows: list[_Row] = []
    for slot in sorted({epoch.slot for mine in parts for epoch in mine}):
        mine = [[epoch for epoch in replica if epoch.slot == slot] for replica in parts]
        for number in range(min(len(replica) for replica in mine)):
            row = [replica[number] for replica in mine]
            totals = [_total(epoch) for epoch in row]
            ends = [epoch.num_batches for epoch in row if epoch.complete]
            # a stream of unknown length that was left early holds at least what was read of it
            known = [e.num_batches if total is None else total for e, total in zip(row, totals, strict=True)]
            if None in totals and (
                not ends or any(k <= max(ends) for k, t in zip(known, totals, strict=True) if t is None)
            ):
                continue
            rows.append(_Row(number, row, known, [e.num_batches for e in row], not all(e.complete for e in row)))
    return rows


def _judge(group: Group) -> Finding:
    if group.unknown is not None:
        return inconclusive(CHECK, "Which ranks are replicas is unknown.", group.unknown)
    reading = [reader for reader in group.readers if reader.training]
    if not reading:
        return no_loader(CHECK, group.view)
    if len(reading) < len(group.readers):
        return not_applicable(CHECK, "Only some ranks read; the others get their batches from them.")
    rows = _rows(group)
    # a loop cut by a step limit says nothing; one cut to the shortest leaves that one complete
    judged = [row for row in rows if any(epoch.complete for epoch in row.parts)]
    if not judged:
        return inconclusive(
            CHECK,
            "Not judged: no replica finished an epoch.",
            "a finished epoch on one replica at least",
            ranks=group.ranks,
        )
    worst = max(judged, key=lambda row: max(row.totals) - min(row.totals))
    most, least = max(worst.totals), min(worst.totals)
    gap = most - least
    facts = {
        "measured": float(gap),
        "limit": float(LIMIT),
        "unit": "batches per epoch between the largest and the smallest share",
        "ranks": group.ranks,
    }
    longest = group.replicas[worst.totals.index(most)][0]
    shortest = group.replicas[worst.totals.index(least)][0]
    waiting = [
        reader.info.rank
        for reader, epoch in zip(group.readers, worst.parts, strict=True)
        if not epoch.complete and not reader.info.ended and epoch.num_batches > least
    ]
    hung = bool(waiting) and gap > 0 and not group.view.evidence.running
    if gap <= LIMIT and not hung:
        return finding(
            CHECK,
            Outcome.PASS,
            f"{ranks_text(group.ranks).capitalize()} get {most if most == least else f'{least} or {most}'} batches "
            "per epoch.",
            **facts,
        )
    data = dataset_word(group.loader)
    counts = f"rank {longest} holds {most} batches per epoch and rank {shortest} {least}"
    cut = [
        (reader.info.rank, total - read)
        for reader, total, read in zip(group.readers, worst.totals, worst.read, strict=True)
        if total - read > LIMIT
    ]
    epochs_cut = sum(1 for row in judged if row.cut)
    if hung:
        severity, end = Severity.ERROR, f"; {ranks_text(waiting)} never ended, waiting for rank {shortest}"
    elif cut:
        rank, lost = max(cut, key=lambda item: item[1])
        severity = Severity.ERROR
        end = (
            f"; all stop with the shortest, so rank {rank} skips {lost} batches in {epochs_cut} of {len(judged)} epochs"
        )
    else:
        severity, end = Severity.WARNING, "; every rank reads to its own end"
    return finding(
        CHECK,
        Outcome.FAIL,
        f"{counts[0].upper()}{counts[1:]}{end}.",
        severity=severity,
        cause=f"{data} gives the ranks shares of different length, for instance whole files",
        fix=f"split {data} by rows and not by files, or give every rank the same number of steps",
        steps=(worst.parts[0].first_step,) if worst.parts[0].first_step is not None else (),
        location=group.location,
        **facts,
    )


def run(view: View) -> Finding:
    """Compare batches per epoch between replicas."""
    return over_groups(CHECK, view, _judge)
