"""Evidence -> Audit: runs the checks, puts cause before consequence, computes effective GPUs.

Pure: reads no file and prints nothing. A check that raises costs its own answer only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ddp_audit import __version__
from ddp_audit.checks import ALL_CHECKS, Check
from ddp_audit.checks.common import count, ranks_text
from ddp_audit.checks.streams import MIN_STEPS, Epoch, EpochSet, Group, RankView, View, epoch_of
from ddp_audit.collect.duplicates import coverage, distinct
from ddp_audit.records import (
    Audit,
    CheckInfo,
    DataGroup,
    Evidence,
    Finding,
    HookState,
    Level,
    Outcome,
    Overhead,
    Provenance,
    RankSummary,
    Series,
    Severity,
    Verdict,
)

CAUSES = {
    "DDP102": ("DDP101", "DDP104"),
    "DDP103": ("DDP101",),
    "DDP106": ("DDP101",),
    "DDP101": ("DDP201",),
    "DDP108": ("DDP107", "DDP104"),
    "DDP202": ("DDP201",),
    "DDP206": ("DDP201", "DDP202", "DDP203"),
    "DDP207": ("DDP201", "DDP202", "DDP203", "DDP206"),
}
"""Consequence -> what may explain it, the strongest first."""

WHOLE_STEPS = 32  # law 3: up to there the probe takes everything at every step
HEALTHY = 0.97  # of the world size; below it the headline says what is lost
MAX_HEAT_RANKS, MAX_HEAT_BINS, MAX_OVERLAP_RANKS = 64, 200, 16


# --------------------------------------------------------------------------- checks


def _run(check: Check, view: View) -> Finding:
    info: CheckInfo = check.CHECK
    try:
        result = check.run(view)
    except Exception as error:  # a bug in one check must not cost the audit
        return Finding(
            id=info.id,
            kind=info.kind,
            outcome=Outcome.ERROR,
            severity=info.severity,
            title=info.title,
            why=info.why,
            needs=info.needs,
            message=f"The check itself failed: {type(error).__name__}: {error}",
            why_inconclusive="report this as a bug of ddp-audit, with the evidence folder",
        )
    title = info.failure_title if result.outcome is Outcome.FAIL else info.title
    return replace(result, title=result.title or title, why=result.why or info.why, needs=result.needs or info.needs)


def _with_causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """A consequence keeps its outcome and names the failed check that explains it."""
    failed = {item.id for item in findings if item.outcome is Outcome.FAIL}
    result = []
    for item in findings:
        cause = next((name for name in CAUSES.get(item.id, ()) if name in failed), None)
        if item.outcome is Outcome.FAIL and item.caused_by is None and cause is not None:
            item = replace(item, caused_by=cause)
        result.append(item)
    return tuple(result)


# --------------------------------------------------------------------------- the measure


def _data_group(group: Group) -> DataGroup:
    level, why = group.level
    share = group.step_share
    epoch = group.epoch_fraction if level is not None else None
    step = share.fraction if level is not None and share is not None else None
    if len(group.replicas) == 1:
        step, epoch, why = 1.0, None, None
    elif level is not None and step is None and epoch is None:
        why = "batches could be compared as a whole only; samples have no leading axis or their lists are missing"
        step = _whole_batches(group)
        if step is not None:
            why = None
    if level in (Level.L2, Level.L3) and len(group.replicas) > 1 and group.alike(level):
        # constant data look as if every rank read the same; only indices tell equal samples apart
        fewest = min(len(distinct(stream.order_S)) for stream in group.streams)
        if fewest < MIN_STEPS:
            step = epoch = None
            why = (
                f"samples cannot be told apart: a rank read only {count(fewest, 'distinct batch', 'distinct batches')}"
            )
    return DataGroup(
        replicas=group.replicas,
        distinct_fraction_step=step,
        distinct_fraction_epoch=epoch,
        level=level,
        why_unknown=why,
    )


def _whole_batches(group: Group) -> float | None:
    """Without samples a batch is one sample: distinct batches per step over batches read."""
    steps = group.common_steps
    if not len(steps):
        return None
    orders = np.stack([s.order_S[np.searchsorted(s.steps, steps)] for s in group.streams])
    found = sum(len(distinct(column)) for column in orders.T)
    return found / orders.size


def _smaller(group: DataGroup) -> float | None:
    known = [v for v in (group.distinct_fraction_step, group.distinct_fraction_epoch) if v is not None]
    return min(known) if known else None


def _replica_word(view: View, num_replicas: int, world: int) -> str:
    """``(4 replicas x 2 tensor-parallel)``; empty where each rank is a replica."""
    if num_replicas == world or not view.layout.model_word or world % max(num_replicas, 1):
        return ""
    return f" ({count(num_replicas, 'replica')} x {world // num_replicas} {view.layout.model_word})"


def _gpus(value: float, world: int) -> str:
    """``8`` where nothing is lost, else one digit: ``1.0``."""
    return str(world) if value >= HEALTHY * world else f"{value:.1f}"


# --------------------------------------------------------------------------- core questions


MIN_UNEXPLAINED = 0.9  # healthy jobs measure at least 0.97; the gap leaves room for chance in short jobs


def _zero_reason(evidence: Evidence) -> str:
    """Why no rank was seen, as half a sentence."""
    reason = evidence.command.zero_reason or "nothing wrote a journal"
    return reason.removeprefix("No rank was seen: ").rstrip(".")


def _core(view: View, findings: Sequence[Finding], groups: Sequence[DataGroup]) -> tuple[str, ...]:
    """Core questions without an answer, one sentence each."""
    open_questions: list[str] = []
    evidence = view.evidence
    if not view.ranks:
        return ("Did every expected rank report? None did.",)  # the headline says why
    if view.ranks_missing:
        open_questions.append(
            f"Did every expected rank report? {ranks_text(view.ranks_missing).capitalize()} of {view.world_size} "
            "left no journal."
        )
    by_id = {item.id: item for item in findings}
    failed = {item.id for item in findings if item.outcome is Outcome.FAIL}
    if (view.world_size or len(view.ranks)) > 1:
        data = by_id.get("DDP101")
        if data is not None and data.outcome in (Outcome.INCONCLUSIVE, Outcome.ERROR):
            why = f" It takes {data.why_inconclusive}." if data.why_inconclusive else ""
            open_questions.append(f"Do replicas read different samples? {data.message}{why}")
        if not failed & {"DDP201", "DDP202", "DDP203", "DDP206", "DDP207"}:
            why_not = _gradients_unanswered(view)
            if why_not is not None:
                open_questions.append(f"Are gradients shared? Not answered: {why_not}.")
    measured = [f for g in groups for f in (g.distinct_fraction_step, g.distinct_fraction_epoch) if f is not None]
    explained = {item.id for item in findings if item.outcome is Outcome.FAIL and item.id < "DDP200"}
    asked = any(question.startswith("Do replicas") for question in open_questions)
    if measured and min(measured) < MIN_UNEXPLAINED and not explained and not failed & {"DDP201"} and not asked:
        # A low measure that no check explains must never stand beside a pass.
        open_questions.append(
            f"Do replicas read different samples? {min(measured):.0%} of what they read was distinct, and no check "
            "explains the rest."
        )
    for name in evidence.command.require:
        item = by_id.get(name) or next((f for f in findings if f.kind == name), None)
        if item is None:
            open_questions.append(f"{name} was required and is no check of this version.")
        elif item.outcome in (Outcome.INCONCLUSIVE, Outcome.ERROR):
            open_questions.append(f"{item.id} was required: {item.why_inconclusive or item.message}.")
    return tuple(open_questions)


def _gradients_unanswered(view: View) -> str | None:
    """Why it is not known whether gradients are shared; ``None`` when it is."""
    if view.layout.unknown is not None:
        return view.layout.unknown
    reasons: list[str] = []
    for group in view.groups:
        ranks = tuple(replica[0] for replica in group.replicas)
        if len(ranks) < 2:
            continue
        views = [view.ranks[rank] for rank in ranks]
        if not any(len(item.steps) for item in views):
            reasons.append("no optimizer step was seen")
            continue
        if all(_synced_forwards(item) for item in views):
            continue
        if any(
            bool(view.sync.gradients(ranks, optimizer).equal_S.any())
            for optimizer in view.sync.optimizers(ranks)
            if len(view.sync.gradients(ranks, optimizer).steps)
        ):
            continue
        reasons.append(
            f"{ranks_text(ranks)} have no forward of a data-parallel wrapper and no gradient digests that agree"
        )
    return reasons[0] if reasons else None


def _synced_forwards(view: RankView) -> bool:
    """A wrapper's forward with reduction on came before some step."""
    return any(w.kind != "data_parallel" for w in view.info.wrappers) and bool(
        (view.steps["num_sync_forwards"] > 0).any()
    )


# --------------------------------------------------------------------------- tables and plots


def _summaries(view: View) -> tuple[RankSummary, ...]:
    level_of = {rank: group.level[0] for group in view.groups for rank in group.ranks}
    implicit = _implicit(view)
    found = []
    for rank, rank_view in view.ranks.items():
        level = level_of.get(rank) or Level.L1
        stream = rank_view.stream(level)
        epochs = [epoch_of(rank_view, n, Level.L2, with_samples=False) for n in rank_view.training]
        done = [epoch for epoch in epochs if epoch.complete] or implicit.get(rank, [])
        loader = epochs[0].loader if epochs else None
        found.append(
            RankSummary(
                rank=rank,
                host=rank_view.info.host,
                device=rank_view.info.device,
                num_steps=len(rank_view.steps_taken),
                num_epochs=len(done),
                shard_length=done[0].num_samples or None if done else None,
                num_samples=int(stream.num_S.sum()),
                num_distinct=len(distinct(stream.samples)) if len(stream.samples) else None,
                loader_length=loader.length if loader is not None else None,
                data_share=_data_share(rank_view),
                ended=rank_view.info.ended,
            )
        )
    return tuple(found)


def _implicit(view: View) -> dict[int, list[Epoch]]:
    """Epochs that were found in the stream itself (hand-written loops), by rank."""
    found: dict[int, list[Epoch]] = {}
    for group in view.groups:
        for item in group.epochs:
            for replica, part in zip(group.replicas, item.parts, strict=True):
                for rank in replica if part.loader is None else ():
                    found.setdefault(rank, []).append(part)
    return found


def _elapsed_us(steps: npt.NDArray[np.void]) -> float | None:
    """Time from the first to the last step; ``None`` with fewer than two."""
    if len(steps) < 2:
        return None
    elapsed = float(steps["time"].max() - steps["time"].min()) * 1e6
    return elapsed if elapsed > 0 else None


def _after_first(steps: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Steps whose whole duration lies inside ``_elapsed_us``."""
    kept: npt.NDArray[np.void] = steps[steps["time"] > steps["time"].min()] if len(steps) else steps
    return kept


def _steady(steps: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Rows of STEP that show what the probe costs in the long run.

    The first step holds the start-up. In the first 32 everything is taken on purpose: where there
    are more than twice as many they are left out whole.
    """
    numbers = np.unique(steps["step"])
    skipped = WHOLE_STEPS if len(numbers) > 2 * WHOLE_STEPS else 1
    if len(numbers) <= skipped:
        return steps[:0]
    kept: npt.NDArray[np.void] = steps[steps["step"] >= numbers[skipped]]
    return kept


def _data_share(view: RankView) -> float | None:
    elapsed = _elapsed_us(view.steps)
    if elapsed is None:
        return None
    return min(1.0, float(_after_first(view.steps)["data_us"].sum()) / elapsed)


def _overhead(view: View) -> Overhead:
    means, shares, sizes = [], [], []
    for rank_view in view.ranks.values():
        steps = rank_view.steps
        steady = _steady(steps)
        if len(steady):
            means.append(float(steady["probe_us"].sum()) / len(np.unique(steady["step"])))
        elapsed = _elapsed_us(steady)
        if elapsed is not None:
            shares.append(float(_after_first(steady)["probe_us"].sum()) / elapsed)
        words = sum(int(lengths.sum()) for _, _, lengths in rank_view.lists.by_kind.values())
        sizes.append(rank_view.batches.nbytes + rank_view.forwards.nbytes + steps.nbytes + 8 * words)
    return Overhead(
        mean_us_per_step=max(means, default=None),
        share_of_step=max(shares, default=None),
        journal_bytes=max(sizes, default=0),
    )


def _chosen_ranks(ranks: Sequence[int], limit: int) -> list[int]:
    """At most ``limit`` ranks, evenly spread."""
    if len(ranks) <= limit:
        return list(ranks)
    return [ranks[k * len(ranks) // limit] for k in range(limit)]


def _heat(view: View) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """Rank by bin of steps: the first rank of its group that read the same batch, most of the time."""
    streams = {
        replica[0]: stream
        for group in view.groups
        for replica, stream in zip(group.replicas, group.streams, strict=False)
    }
    group_of = {replica[0]: k for k, group in enumerate(view.groups) for replica in group.replicas}
    ranks = _chosen_ranks(sorted(streams), MAX_HEAT_RANKS)
    steps = np.unique(np.concatenate([streams[rank].steps for rank in ranks])) if ranks else np.empty(0, np.int64)
    if not len(steps):
        return (), (), ()
    edges = np.unique(np.linspace(0, len(steps), min(MAX_HEAT_BINS, len(steps)) + 1).astype(np.int64))
    owner = np.full((len(ranks), len(steps)), -1, dtype=np.int64)
    orders = np.zeros((len(ranks), len(steps)), dtype=np.uint64)
    there = np.zeros((len(ranks), len(steps)), dtype=np.bool_)
    for row, rank in enumerate(ranks):
        at = np.searchsorted(steps, streams[rank].steps)
        orders[row, at] = streams[rank].order_S
        there[row, at] = True
        owner[row, at] = rank
        for other in range(row - 1, -1, -1):
            if group_of[ranks[other]] == group_of[rank]:
                same = there[row] & there[other] & (orders[row] == orders[other])
                owner[row, same] = ranks[other]
    cells = []
    for owners in owner:
        line = []
        for begin, end in pairwise(edges):
            seen = owners[begin:end][owners[begin:end] >= 0]
            names, counts = np.unique(seen, return_counts=True)
            line.append(int(names[counts.argmax()]) if len(names) else -1)
        cells.append(tuple(line))
    starts = tuple(int(steps[begin]) + view.base_step for begin in edges[:-1])
    return tuple(cells), tuple(ranks), starts


def _window(group: Group) -> list[npt.NDArray[np.uint64]]:
    """Samples per replica in the judged window: the first finished epoch, else all common steps."""
    if group.epochs and not group.with_replacement:
        return group.epochs[0].samples
    steps = group.common_steps
    return [s.samples[np.isin(s.steps, steps)[s.window]] if len(s.samples) else s.samples for s in group.streams]


def _overlap(group: Group | None) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Share of samples in common, rank by rank; the worst where there are many."""
    if group is None or not group.streams:
        return (), ()
    samples = _window(group)
    if not all(len(part) for part in samples):
        orders = [s.order_S[np.isin(s.steps, group.common_steps)] for s in group.streams]
        samples = orders if all(len(order) for order in orders) else []
    if not samples:
        return (), ()
    counts = coverage(samples)
    smaller = np.minimum(counts.num_distinct_R[:, None], counts.num_distinct_R[None, :])
    share = counts.shared_RR / np.maximum(smaller, 1)
    others = share - np.eye(len(share))
    worst = np.argsort(-others.max(axis=1), kind="stable")[:MAX_OVERLAP_RANKS]
    chosen = np.sort(worst)
    table = tuple(tuple(round(float(value), 6) for value in share[a][chosen]) for a in chosen)
    return table, tuple(group.replicas[a][0] for a in chosen)


def _series(view: View, summaries: Sequence[RankSummary]) -> Series:
    heat, heat_ranks, heat_steps = _heat(view)
    group = min(
        view.data_groups,
        key=lambda item: item.step_share.fraction if item.step_share is not None and item.level[0] else 2.0,
        default=None,
    )
    overlap, overlap_ranks = _overlap(group)
    by_epoch = bool(summaries) and all(item.shard_length is not None for item in summaries)
    shown = _chosen_ranks([item.rank for item in summaries], MAX_HEAT_RANKS)
    length = None
    epochs: list[EpochSet] = []
    if group is not None:
        loader = group.loader
        length = loader.dataset_length if loader is not None else None
        epochs = [item for item in group.epochs if not group.with_replacement]
    shards = tuple(
        (item.shard_length or 0) if by_epoch else item.num_samples for item in summaries if item.rank in shown
    )
    return Series(
        heat=heat,
        heat_ranks=heat_ranks,
        heat_steps=heat_steps,
        overlap=overlap,
        overlap_ranks=overlap_ranks,
        shards=shards if any(shards) else (),  # nothing known is no bar of height 0
        shard_ranks=tuple(item.rank for item in summaries if item.rank in shown),
        shard_label="samples in the first finished epoch" if by_epoch else "samples in all steps",
        dataset_length=length,
        epoch_coverage=tuple(
            (item.counts.num_union, item.length if item.length is not None else -1) for item in epochs[:MAX_HEAT_BINS]
        ),
    )


def _not_ended(view: View) -> tuple[str, ...]:
    """A note on ranks that left no end record though the job is over: killed, or ended by os._exit."""
    if view.evidence.running:
        return ()
    ranks = tuple(rank for rank, item in view.ranks.items() if not item.info.ended)
    return (f"{ranks_text(ranks)} did not end normally",) if ranks else ()


def _capped(evidence: Evidence) -> tuple[str, ...]:
    """A note on journals that reached the disk cap: which sample lists and steps are there."""
    capped = [info for info in evidence.journals if info.capped]
    if not capped:
        return ()
    info = capped[0]
    mine = evidence.batches[evidence.batches_key[:, 1] == info.journal]
    with_lists = np.isin(mine["serial"], evidence.lists["serial"][evidence.lists["journal"] == info.journal])
    seen = np.unique(mine["iteration"])
    kept = [str(number) for number in seen if with_lists[mine["iteration"] == number].all()]
    steps = evidence.steps["step"][evidence.steps_key[:, 1] == info.journal]
    last = f", steps up to {int(steps.max())}" if len(steps) else ""
    newest = max((i.iteration for i in info.iterations), default=0)
    return (
        f"the disk cap was reached on {ranks_text(tuple(sorted({one.rank for one in capped})))}; rank {info.rank} kept "
        f"sample lists of iterations {', '.join(kept) or 'none'} of 0 to {newest}"
        f"{last}, and digests of whole iterations",
    )


def _provenance(view: View, created: float) -> Provenance:
    evidence = view.evidence
    infos = [item.info for item in view.ranks.values()]

    def one(values: Sequence[str]) -> str:
        return ", ".join(sorted({value for value in values if value}))

    states: dict[tuple[str, str], HookState] = {}
    for info in evidence.journals:
        for state in info.hook_states:
            key = (state.hook, state.reason)
            known = states.get(key)
            if known is None or known.num_errors < state.num_errors:
                states[key] = state
    return Provenance(
        created=created,
        start=min((info.start for info in evidence.journals), default=evidence.command.start or None),
        run_id=evidence.command.run_id,
        torch=one([info.torch for info in infos]),
        backend=one([group.backend for info in infos for group in info.groups]),
        python=one([info.python for info in infos]),
        launcher=one([info.launcher or "" for info in infos]),
        hosts=tuple(sorted({info.host for info in infos}, key=lambda name: (len(name), name))),
        hash_name=one([info.hash_name for info in infos]),
        evidence_sha256=evidence.sha256,
        evidence_version=evidence.version,
        command="ddp-audit report DIR --format html -o report.html",
        notes=(*_not_ended(view), *_capped(evidence), *evidence.notes),
        hook_states=tuple(states[key] for key in sorted(states)),
    )


# --------------------------------------------------------------------------- verdict


def _verdict(findings: Sequence[Finding], core: Sequence[str]) -> Verdict:
    failed = [item for item in findings if item.outcome is Outcome.FAIL and item.suppressed is None]
    if any(item.severity is Severity.ERROR for item in failed):
        return Verdict.FAIL
    if any(item.severity is Severity.WARNING for item in failed):
        return Verdict.WARN
    return Verdict.INCONCLUSIVE if core else Verdict.PASS


def _lead(findings: Sequence[Finding]) -> Finding | None:
    """The finding to name first: an error before a warning, a cause before its consequence."""
    weight = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    failed = [item for item in findings if item.outcome is Outcome.FAIL and item.severity is not Severity.NOTE]
    return min(failed, key=lambda item: (item.caused_by is not None, weight[item.severity], item.id), default=None)


def _headline(view: View, findings: Sequence[Finding], effective: float | None, why: str | None) -> str:
    world = view.world_size or len(view.ranks)
    if not view.ranks:
        return f"No rank was seen: {_zero_reason(view.evidence)}"
    if view.ranks_missing:
        return (
            f"{len(view.ranks)} of {count(world, 'rank')} reported; {ranks_text(view.ranks_missing)} "
            f"{'is' if len(view.ranks_missing) == 1 else 'are'} missing"
        )
    num = sum(len(group.replicas) for group in view.groups)
    who = f"{count(world, 'GPU')}{_replica_word(view, num, world)}"
    if world == 1:
        return "1 GPU: one rank, so there is nothing to share"
    verb = "does" if world == 1 else "do"
    if effective is None:
        base = f"{who}: how much of their work is distinct is unknown"
    else:
        base = f"{who} {verb} the work of {_gpus(effective, world)}"
    lead = _lead(findings)
    if lead is None:
        return base
    if effective is not None and effective < HEALTHY * world and lead.id.startswith("DDP1"):
        return base
    told = lead.title or lead.kind
    if lead.id in ("DDP201", "DDP202", "DDP203", "DDP206") and effective is not None and effective >= HEALTHY * world:
        return f"{who} train apart: {told[0].lower()}{told[1:]}"
    if effective is not None and effective >= HEALTHY * world:
        return f"{who}: {told[0].lower()}{told[1:]}"  # "the work of 2" would sound like praise
    return f"{base}: {told[0].lower()}{told[1:]}"


def judge(evidence: Evidence, checks: Sequence[Check] = ALL_CHECKS, *, created: float | None = None) -> Audit:
    """Judge one job.

    Args:
        evidence: from ``merge`` or ``load``.
        checks: which to run; a user's own are added as ``(*ALL_CHECKS, mine)``.
        created: time of this judgement, seconds since the epoch; now when ``None``.

    Returns:
        The audit, complete; a check that raised has outcome ``error``.
    """
    view = View(evidence)
    findings = _with_causes([_run(check, view) for check in checks])
    groups = tuple(_data_group(group) for group in view.groups)
    core = _core(view, findings, groups)
    world = view.world_size or len(view.ranks)
    fractions = [value for value in map(_smaller, groups) if value is not None]
    why: str | None = None
    if not view.ranks:
        why = "no rank was seen"
    elif view.ranks_missing:
        why = f"{ranks_text(view.ranks_missing)} did not report"
    elif any(_smaller(group) is None for group in groups):
        why = next(g.why_unknown for g in groups if _smaller(g) is None) or "samples cannot be told apart"
    fraction = min(fractions) if fractions and why is None else None
    effective = world * fraction if fraction is not None else None
    worst = min((g for g in groups if _smaller(g) is not None), key=lambda g: _smaller(g) or 0.0, default=None)
    first = next((group for group in view.groups if group.loader is not None), None)
    reader = next((r for r in (first.readers if first is not None else ()) if r.training), None)
    numbers = dict.fromkeys(reader.iterations[n].loader for n in reader.training) if reader is not None else {}
    summaries = _summaries(view)
    return Audit(
        tool_version=__version__,
        verdict=_verdict(findings, core),
        headline=_headline(view, findings, effective, why),
        world_size=view.world_size,
        ranks_seen=len(view.ranks),
        ranks_missing=view.ranks_missing,
        replicas=sum(len(group.replicas) for group in groups) if groups else None,
        num_steps=view.num_common_steps,
        effective_gpus=effective,
        effective_gpus_measured=None,
        effective_gpus_why=why,
        distinct_fraction=fraction,
        distinct_fraction_step=worst.distinct_fraction_step if worst is not None else None,
        distinct_fraction_epoch=worst.distinct_fraction_epoch if worst is not None else None,
        core_unanswered=core,
        checks=findings,
        attempts=view.attempts,
        groups=groups,
        ranks=summaries,
        loaders=tuple(reader.loaders[n] for n in numbers if n in reader.loaders) if reader is not None else (),
        samplers=first.samplers if first is not None else (),
        series=_series(view, summaries),
        overhead=_overhead(view),
        provenance=_provenance(view, time.time() if created is None else created),
        running=evidence.running,
    )
