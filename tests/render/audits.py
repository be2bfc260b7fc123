"""Audits for the renderers' tests, from one compact factory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ddp_audit.records import (
    Attempt,
    Audit,
    DataGroup,
    Finding,
    HookState,
    Level,
    LoaderInfo,
    Location,
    Outcome,
    Overhead,
    Provenance,
    RankSummary,
    SamplerInfo,
    Series,
    Severity,
    Verdict,
)

KINDS = {
    "DDP101": "identical-data-across-ranks",
    "DDP102": "overlapping-shards",
    "DDP103": "full-dataset-per-rank",
    "DDP104": "double-sharding",
    "DDP105": "duplicates-across-workers",
    "DDP106": "set-epoch-missing",
    "DDP107": "uneven-shards",
    "DDP108": "dropped-data",
    "DDP201": "no-process-group",
    "DDP202": "gradients-not-synced",
    "DDP203": "ddp-forward-bypassed",
    "DDP206": "initial-weights-differ",
    "DDP207": "params-diverge",
}
TITLES = {
    "DDP101": "Each replica reads its own batches",
    "DDP102": "Shards of different replicas hold different samples",
    "DDP103": "Each replica reads a part of the data set",
    "DDP104": "The data set is sharded once",
    "DDP105": "Workers of one rank read different samples",
    "DDP106": "Each epoch has an order of its own",
    "DDP107": "All ranks read the same number of batches",
    "DDP108": "All samples are used",
    "DDP201": "The ranks have a process group",
    "DDP202": "Gradients are shared between ranks",
    "DDP203": "The forward goes through the wrapper",
    "DDP206": "All ranks start from the same weights",
    "DDP207": "Parameters stay equal on all ranks",
}


def finding(id: str, outcome: Outcome = Outcome.PASS, message: str = "", **fields: Any) -> Finding:
    """One finding with plausible words."""
    values: dict[str, Any] = {
        "severity": Severity.WARNING if id in ("DDP103", "DDP106") else Severity.ERROR,
        "message": message or f"{TITLES[id][0].lower()}{TITLES[id][1:]}",
        "title": TITLES[id],
        "needs": "sample indices (L1) or content digests (L2) of at least 8 common steps",
        **fields,
    }
    return Finding(id=id, kind=KINDS[id], outcome=outcome, **values)


def audit(
    verdict: Verdict,
    headline: str,
    special: tuple[Finding, ...] = (),
    *,
    ranks: int = 2,
    seen: int | None = None,
    steps: int = 300,
    effective: float | None = None,
    heat: tuple[tuple[int, ...], ...] | None = None,
    overlap: float = 0.0,
    **fields: Any,
) -> Audit:
    """An audit with ``special`` findings; all other checks passed (203 is not applicable)."""
    seen = ranks if seen is None else seen
    by_id = {f.id: f for f in special}
    checks = tuple(
        by_id.get(id)
        or (
            finding(id, Outcome.NOT_APPLICABLE, "the job has no wrapped model whose forward could be bypassed")
            if id == "DDP203"
            else finding(id)
        )
        for id in KINDS
    )
    fraction = None if effective is None else effective / ranks
    num_bins = 100 if steps < 1000 else 200
    shown = min(ranks, 16)
    shard = 9600 // max(1, round(ranks / (1 if effective is None else max(1.0, ranks / effective))))
    values: dict[str, Any] = {
        "tool_version": "0.1.0",
        "verdict": verdict,
        "headline": headline,
        "world_size": ranks,
        "ranks_seen": seen,
        "ranks_missing": tuple(range(seen, ranks)),
        "replicas": seen,
        "num_steps": steps,
        "effective_gpus": effective,
        "effective_gpus_measured": None,
        "effective_gpus_why": None if effective is not None else "ranks 2 and 3 did not report",
        "distinct_fraction": fraction,
        "distinct_fraction_step": fraction,
        "distinct_fraction_epoch": fraction,
        "core_unanswered": (),
        "checks": checks,
        "attempts": (Attempt(restart=0, generation=0, ranks=tuple(range(seen)), num_common_steps=steps, judged=True),),
        "groups": (
            DataGroup(
                replicas=tuple((rank,) for rank in range(seen)),
                distinct_fraction_step=fraction,
                distinct_fraction_epoch=fraction,
                level=Level.L1,
            ),
        ),
        "ranks": tuple(
            RankSummary(
                rank=rank,
                host=f"host{rank // 8}",
                device=f"cuda:{rank % 8}",
                num_steps=steps,
                num_epochs=1,
                shard_length=shard,
                num_samples=shard,
                num_distinct=shard,
                loader_length=steps,
                data_share=0.031 + 0.001 * rank,
                ended=True,
            )
            for rank in range(seen)
        ),
        "loaders": (
            LoaderInfo(
                loader=0,
                family="dataloader",
                class_names=("DataLoader",),
                location=Location(file="train.py", line=41),
                site_ordinal=0,
                before_group=False,
                dataset_class="TokenDataset",
                dataset_length=9600,
                dataset_digest=0x1234,
                dataset_iterable=False,
                length=steps,
                batch_size=32,
                drop_last=False,
                num_workers=4,
                persistent_workers=True,
                in_order=True,
            ),
        ),
        "samplers": (
            SamplerInfo(class_name="BatchSampler", batch_size=32, drop_last=False),
            SamplerInfo(class_name="RandomSampler", replacement=False, num_samples=9600, seeded=True),
        ),
        "series": Series(
            heat=heat if heat is not None else tuple((rank,) * num_bins for rank in range(seen)),
            heat_ranks=tuple(range(seen)),
            heat_steps=tuple(range(0, steps, max(1, steps // num_bins)))[:num_bins],
            overlap=tuple(tuple(1.0 if a == b else overlap for b in range(shown)) for a in range(shown)),
            overlap_ranks=tuple(range(shown)),
            shards=(shard,) * seen,
            shard_ranks=tuple(range(seen)),
            shard_label="samples consumed in the first epoch",
            dataset_length=9600,
            epoch_coverage=((9600, 9600),),
        ),
        "overhead": Overhead(mean_us_per_step=41.3, share_of_step=0.0042, journal_bytes=1_234_567),
        "provenance": Provenance(
            created=1_790_000_000.0,
            start=1_789_999_000.0,
            run_id="5f2c9a10",
            torch="2.13.0",
            backend="nccl",
            python="3.12.4",
            launcher="torchrun",
            hosts=tuple(f"host{i}" for i in range(max(1, math.ceil(ranks / 8)))),
            hash_name="xxh3_64",
            evidence_sha256="ab" * 32,
            evidence_version="1.0",
            command="ddp-audit report ddp-audit-out/latest --format html -o report.html",
        ),
        **fields,
    }
    return Audit(**values)


def failing() -> Audit:
    """Two ranks that read the same batches; the wrapper cannot help; 103 follows."""
    return audit(
        Verdict.FAIL,
        "2 GPUs do the work of 1.0: ranks 0 and 1 read the same samples",
        (
            finding(
                "DDP101",
                Outcome.FAIL,
                "ranks 0 and 1 read the same batch at 300 of 300 common steps",
                title="Replicas read the same batches",
                cause="the sampler is RandomSampler, seeded alike on both ranks; nothing splits the data set",
                ranks=(0, 1),
                steps=tuple(range(300)),
                measured=1.0,
                limit=0.01,
                unit="share of steps with the same batch",
                levels=(Level.L1, Level.L3),
                location=Location(file="train.py", line=41),
                fix="sampler = DistributedSampler(dataset, shuffle=True)\n"
                "loader = DataLoader(dataset, batch_size=32, sampler=sampler)",
                why="N GPUs that read the same batch do the work of one GPU, N times over.",
            ),
            finding(
                "DDP103",
                Outcome.FAIL,
                "each of 2 replicas read all 9600 samples in the epoch",
                title="Each replica reads the whole data set",
                caused_by="DDP101",
                ranks=(0, 1),
                measured=1.0,
                limit=0.95,
                unit="share",
                levels=(Level.L1,),
                why="An epoch takes N times as many steps as it should.",
                fix="split the data set with DistributedSampler",
            ),
            finding(
                "DDP106",
                Outcome.FAIL,
                "epochs 0 to 2 had the same order on all ranks",
                title="Every epoch repeats the order of the first",
                ranks=(0, 1),
                measured=3,
                limit=1,
                unit="epochs",
                levels=(Level.L1,),
                location=Location(file="train.py", line=58),
                fix="for epoch in range(num_epochs):\n    sampler.set_epoch(epoch)",
                why="The model sees the batches in one fixed order, which costs accuracy.",
            ),
            finding(
                "DDP108",
                Outcome.INCONCLUSIVE,
                "Not judged: 1 of 2 finished epochs was seen.",
                why_inconclusive="a run of at least 2 epochs",
            ),
        ),
        effective=1.0,
        heat=((0,) * 100, (0,) * 100),
        overlap=1.0,
    )


def uneven() -> Audit:
    """A warning alone."""
    base = audit(
        Verdict.WARN,
        "4 GPUs do the work of 4.0, but rank 3 stops 38 batches early",
        (
            finding(
                "DDP107",
                Outcome.FAIL,
                "rank 3 read 262 batches in the epoch, the others 300",
                severity=Severity.WARNING,
                title="Ranks read different numbers of batches",
                ranks=(3,),
                measured=38,
                limit=1,
                unit="batches",
                levels=(Level.L1,),
                fix="drop_last=True in the sampler of every rank",
                why="The others wait for a rank that has finished, or lose its steps.",
            ),
        ),
        ranks=4,
        effective=4.0,
    )
    return replace(base, series=replace(base.series, shards=(2400, 2400, 2400, 2096)))


def inconclusive() -> Audit:
    """Two of four ranks left no journal."""
    why = "the journals of ranks 2 and 3"
    return audit(
        Verdict.INCONCLUSIVE,
        "2 of 4 ranks reported: whether 4 GPUs do the work of 4 cannot be told",
        tuple(
            finding(id, Outcome.INCONCLUSIVE, "Only ranks 0 and 1 of 4 reported.", why_inconclusive=why)
            for id in ("DDP101", "DDP102", "DDP103", "DDP104", "DDP107")
        )
        + (
            finding(
                "DDP202",
                Outcome.INCONCLUSIVE,
                "No gradient was seen: the hook gradients was off.",
                why_inconclusive="gradients of 8 common steps",
            ),
        ),
        ranks=4,
        seen=2,
        core_unanswered=(
            "Did every expected rank report? No: ranks 2 and 3 of 4 left no journal.",
            "Do replicas read different samples? Only ranks 0 and 1 were seen.",
        ),
        provenance=replace(
            audit(Verdict.PASS, "").provenance,
            notes=("journal of rank 1 is cut in the middle of a record",),
            hook_states=(HookState(hook="gradients", reason="AttributeError", num_errors=3),),
        ),
    )


def passing(ranks: int = 2) -> Audit:
    """A healthy job."""
    return audit(Verdict.PASS, f"{ranks} GPUs do the work of {ranks}.0", ranks=ranks, effective=float(ranks))


def large() -> Audit:
    """64 ranks x 1000 steps: groups of 8 read the same batches, the second half of the steps is mixed."""
    heat = tuple(
        tuple((rank // 8) * 8 if step < 100 or (rank + step) % 3 else rank for step in range(200)) for rank in range(64)
    )
    base = audit(
        Verdict.FAIL,
        "64 GPUs do the work of 8.0: groups of 8 ranks read the same samples",
        (
            finding(
                "DDP101",
                Outcome.FAIL,
                "56 of 64 ranks read the batches of another rank at 1000 of 1000 common steps",
                ranks=tuple(range(64)),
                steps=tuple(range(0, 1000, 7)),
                measured=0.875,
                limit=0.01,
                unit="share",
                levels=(Level.L2,),
                fix="pass the rank of the process, not of the node, to the sampler",
                why="N GPUs that read the same batch do the work of one GPU, N times over.",
            ),
        ),
        ranks=64,
        steps=1000,
        effective=8.0,
        heat=heat,
    )
    overlap = tuple(
        tuple(1.0 if a // 8 == b // 8 else (math.nan if (a + b) % 5 == 0 else 0.013) for b in range(16))
        for a in range(16)
    )
    return replace(base, series=replace(base.series, overlap=overlap))


def nothing() -> Audit:
    """No rank was seen at all."""
    base = audit(Verdict.INCONCLUSIVE, "No rank was seen: torch was never imported", ranks=2, seen=0, steps=0)
    why = "a journal of at least two ranks"
    return replace(
        base,
        world_size=None,
        ranks_missing=(),
        replicas=None,
        checks=tuple(finding(id, Outcome.INCONCLUSIVE, "No rank was seen.", why_inconclusive=why) for id in KINDS),
        attempts=(),
        groups=(),
        loaders=(),
        samplers=(),
        series=Series(),
        effective_gpus_why="no rank was seen",
        core_unanswered=("Did every expected rank report? None did.",),
        overhead=Overhead(mean_us_per_step=None, share_of_step=None, journal_bytes=0),
        provenance=replace(base.provenance, start=None, hosts=(), notes=("torch was never imported",)),
    )


def hostile(text: str) -> Audit:
    """A failing audit with ``text`` at every place that can hold words of the user."""
    base = failing()
    place = Location(file=text, line=1)
    first = replace(
        base.checks[0],
        message=f"{base.checks[0].message} {text}",
        cause=text,
        fix=text,
        title=text,
        why=text,
        unit=text,
        location=place,
    )
    return replace(
        base,
        headline=f"{base.headline} {text}",
        core_unanswered=(text,),
        checks=(first, *base.checks[1:]),
        ranks=tuple(replace(rank, device=text, host=text) for rank in base.ranks),
        loaders=(replace(base.loaders[0], class_names=(text,), dataset_class=text, location=place),),
        samplers=(replace(base.samplers[0], class_name=text),),
        series=replace(base.series, shard_label=text),
        provenance=replace(
            base.provenance,
            torch=text,
            launcher=text,
            backend=text,
            command=f"ddp-audit report {text}",
            notes=(text,),
            hook_states=(HookState(hook=text, reason=text, num_errors=1),),
        ),
    )


GALLERY = {
    "failing": failing,
    "uneven": uneven,
    "inconclusive": inconclusive,
    "passing": passing,
    "large": large,
    "nothing": nothing,
}
