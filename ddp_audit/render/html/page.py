"""What the template shows: the audit in words, in order. All decisions are made here, none in the template."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from markupsafe import Markup

from ddp_audit.records import SCHEMA_VERSION, Audit, Finding, Level, LoaderInfo, Location, SamplerInfo, Verdict
from ddp_audit.render import words

_LEVELS = {
    Level.L1: "sample index (L1)",
    Level.L2: "content of the batches at the loader (L2)",
    Level.L3: "inputs of the wrapped model (L3)",
    Level.L4: "local gradients before reduction (L4)",
}
_FIGURES = {  # figures that show what a check speaks of, the most telling first
    "DDP101": ("heat", "overlap"),
    "DDP102": ("overlap", "shards"),
    "DDP103": ("shards", "overlap"),
    "DDP104": ("shards", "overlap"),
    "DDP107": ("shards",),
    "DDP108": ("shards",),
    "DDP201": ("heat",),
}
_MOST_OPEN_RANKS = 16  # a longer table is folded
_METER_CELLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; ``numeric`` names the columns set flush right."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot, its conclusion in words, and the same as a table. ``svg`` is ``None`` without matplotlib."""

    id: str
    title: str
    caption: str
    description: str
    key: tuple[tuple[str, str], ...]  # (css class, meaning)
    svg: Markup | None
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the check list, or a consequence inside a card."""

    id: str
    kind: str
    tone: str
    glyph: str
    word: str
    title: str
    message: str
    measured: str
    limit: str
    unit: str
    cause_id: str
    because: str
    place: str
    facts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A finding in full."""

    row: Row
    why: str
    fix: str
    fix_is_code: bool
    sure: tuple[str, ...]
    figures: tuple[Figure, ...]
    see: tuple[Figure, ...]  # figures that stand elsewhere on the page
    consequences: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestions:
    """Checks that lack the same thing."""

    reason: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One GPU of the meter; ``filled`` 0 to 1, positions in units of the drawing."""

    x: int
    y: int
    filled: int  # width of the filled part, 0 to 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Effective GPUs as a row of squares."""

    value: str
    of: str
    label: str
    cells: tuple[Cell, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole report."""

    title: str
    tone: str
    glyph: str
    verdict: str
    headline: str
    meter: Meter | None
    no_meter: str
    running: str
    facts: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    first: Card | None
    list: tuple[Row, ...]
    cards: tuple[Card, ...]
    open_questions: tuple[OpenQuestions, ...]
    passed: tuple[Row, ...]
    passed_open: bool
    not_applicable: tuple[Row, ...]
    suppressed: tuple[tuple[Row, str], ...]
    figures: tuple[Figure, ...]
    no_plots: str
    ranks: Table
    ranks_open: bool
    groups: Table
    attempts: Table
    loaders: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    samplers: tuple[tuple[str, str], ...]
    provenance: tuple[tuple[str, str], ...]
    command: str
    notes: tuple[str, ...]
    hooks: Table


def build(audit: Audit) -> Page:
    """The page of an audit. Draws the plots; without matplotlib their tables stand alone."""
    figures, no_plots = _figures(audit)
    left = {figure.id: figure for figure in figures}
    shown: dict[str, Figure] = {}
    cards: list[Card] = []
    for fault in words.faults(audit):
        wanted = dict.fromkeys(name for f in (fault.finding, *fault.consequences) for name in _FIGURES.get(f.id, ()))
        own = tuple(left.pop(name) for name in wanted if name in left)
        see = tuple(shown[name] for name in _FIGURES.get(fault.finding.id, ()) if name in shown)
        shown |= {figure.id: figure for figure in own}
        cards.append(_card(audit, fault.finding, fault.consequences, own, see))
    cards += [_card(audit, f, (), (), ()) for f in words.with_tone(audit, "crashed")]
    tone = words.VERDICT_TONES[audit.verdict]
    listed = [f for fault in words.faults(audit) for f in (fault.finding, *fault.consequences)]
    listed += words.with_tone(audit, "crashed", "inconclusive")
    first = next((card for card in cards if card.fix), None)
    return Page(
        title=words.one_line(f"{audit.verdict.value.upper()}: {audit.headline}"),
        tone=tone,
        glyph=words.GLYPHS[tone],
        verdict=audit.verdict.value,
        headline=words.one_line(audit.headline),
        meter=_meter(audit),
        no_meter="" if audit.effective_gpus is not None else words.one_line(audit.effective_gpus_why or ""),
        running="The job was still running when this page was made; it speaks of what had been seen by then."
        if audit.running
        else "",
        facts=_facts(audit),
        questions=tuple(words.one_line(text) for text in audit.core_unanswered),
        first=first,
        list=tuple(_row(f) for f in listed),
        cards=tuple(cards),
        open_questions=_open_questions(audit),
        passed=tuple(_row(f) for f in words.with_tone(audit, "pass")),
        passed_open=audit.verdict is Verdict.PASS,
        not_applicable=tuple(_row(f) for f in words.with_tone(audit, "not_applicable")),
        suppressed=tuple(
            (_row(f), words.one_line(f.suppressed)) for f in words.ordered(audit.checks) if f.suppressed is not None
        ),
        figures=tuple(left.values()),
        no_plots=no_plots,
        ranks=_ranks(audit),
        ranks_open=len(audit.ranks) + len(audit.ranks_missing) <= _MOST_OPEN_RANKS,
        groups=_groups(audit),
        attempts=_attempts(audit),
        loaders=tuple(_loader(loader) for loader in audit.loaders),
        samplers=tuple(_sampler(sampler) for sampler in audit.samplers),
        provenance=_provenance(audit),
        command=words.public_command(audit.provenance.command),
        notes=tuple(words.one_line(note) for note in audit.provenance.notes),
        hooks=Table(
            caption="Hooks that were off or failed",
            head=("hook", "reason", "errors"),
            rows=tuple(
                (words.one_line(h.hook), words.one_line(h.reason), words.number(h.num_errors))
                for h in audit.provenance.hook_states
            ),
            numeric=(2,),
        ),
    )


# --------------------------------------------------------------------------- head


def _facts(audit: Audit) -> tuple[tuple[str, str], ...]:
    level = next((group.level for group in audit.groups if group.level is not None), None)
    facts = [
        ("Ranks", words.ranks_stated(audit)),
        ("Steps", f"{words.number(audit.num_steps)} on all ranks{' seen' if audit.ranks_missing else ''}"),
    ]
    if level is not None:
        facts.append(("Data verdict rests on", _LEVELS[level]))
    facts.append(("Cost of the probe", words.cost(audit).removeprefix("probe ").removeprefix("cost ")))
    facts.append(("Checks", ", ".join(words.counts(audit))))
    return tuple((name, _together(text)) for name, text in facts)


def _together(text: str) -> str:
    """A number and what it counts stay on one line."""
    return re.sub(r"(?<=\d) (?=%|µs|ms|kB|MB|\d|\w)", "\N{NO-BREAK SPACE}", text)


def _meter(audit: Audit) -> Meter | None:
    value, world = audit.effective_gpus, audit.world_size
    if value is None or world is None or world < 1 or not math.isfinite(value):
        return None
    size, gap, per_row = 20, 6, 16
    # Beyond 64 GPUs a square stands for several.
    share = max(1, math.ceil(world / _METER_CELLS))
    num_cells = math.ceil(world / share)
    cells = tuple(
        Cell(
            x=(index % per_row) * (size + gap),
            y=(index // per_row) * (size + gap),
            filled=round(size * min(1.0, max(0.0, value / share - index))),
        )
        for index in range(num_cells)
    )
    return Meter(
        value=words.gpus(value),
        of=str(world),
        label=f"effective GPUs: {words.gpus(value)} of {world}",
        cells=cells,
        width=min(num_cells, per_row) * (size + gap) - gap,
        height=math.ceil(num_cells / per_row) * (size + gap) - gap,
    )


# --------------------------------------------------------------------------- findings


def _row(finding: Finding) -> Row:
    tone = words.tone(finding)
    return Row(
        id=finding.id,
        kind=finding.kind,
        tone=tone,
        glyph=words.GLYPHS.get(tone, words.GLYPHS["note"]),
        word=words.label(finding),
        title=words.one_line(finding.title or finding.kind.replace("-", " ")),
        message=_sentence(finding.message),
        measured=words.one_line(words.quantity(finding.measured, finding.unit)) if finding.measured is not None else "",
        limit=words.one_line(words.quantity(finding.limit, finding.unit)) if finding.limit is not None else "",
        unit=words.one_line(words.explained_unit(finding.unit)),
        cause_id=finding.caused_by or "",
        because=_sentence(finding.cause or (finding.why_inconclusive if tone == "crashed" else "") or ""),
        place=words.place(finding.location),
        # Findings name their first steps only, so "steps 0-15" would say too little.
        facts=", ".join(
            part
            for part in (
                words.ranks_of(finding.ranks),
                f"from step {min(finding.steps)}" if finding.steps else "",
            )
            if part
        ),
    )


def _card(
    audit: Audit,
    finding: Finding,
    consequences: Sequence[Finding],
    figures: tuple[Figure, ...],
    see: tuple[Figure, ...],
) -> Card:
    fix = words.plain(finding.fix or "").strip("\n")
    return Card(
        row=_row(finding),
        why=_sentence(finding.why or ""),
        fix=fix,
        fix_is_code=_is_code(fix),
        sure=_sure(audit, finding),
        figures=figures,
        see=see,
        consequences=tuple(_row(f) for f in consequences),
    )


def _is_code(fix: str) -> bool:
    """Whether a fix is a snippet to copy and no sentence."""
    if "\n" in fix:
        return True
    try:
        ast.parse(fix)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not fix.isidentifier()


def _sure(audit: Audit, finding: Finding) -> tuple[str, ...]:
    """Sample size, what it was seen on, and what would change the verdict."""
    ranks = words.ranks_of(finding.ranks) or words.ranks_stated(audit)
    seen = f"Judged on {words.count(audit.num_steps, 'step')} that all ranks took, on {ranks}"
    if finding.levels:
        seen += f", by {' and '.join(_LEVELS[level] for level in finding.levels)}"
    lines = [f"{seen}."]
    if finding.measured is not None and finding.limit is not None:
        measured, limit = (words.one_line(words.quantity(v, finding.unit)) for v in (finding.measured, finding.limit))
        unit = words.one_line(words.explained_unit(finding.unit))
        what = f" ({unit})" if unit else ""
        lines.append(f"Measured {measured} against a limit of {limit}{what}; the explanation gives the reason for it.")
    if finding.needs:
        lines.append(f"It needs {_lower(words.one_line(finding.needs)).rstrip('.')}.")
    return tuple(lines)


def _open_questions(audit: Audit) -> tuple[OpenQuestions, ...]:
    groups: dict[str, list[Row]] = {}
    for finding in words.with_tone(audit, "inconclusive"):
        groups.setdefault(_sentence(finding.why_inconclusive or finding.message), []).append(_row(finding))
    return tuple(OpenQuestions(reason=reason, rows=tuple(rows)) for reason, rows in groups.items())


def _sentence(text: str) -> str:
    text = words.one_line(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".") if text else ""


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


# --------------------------------------------------------------------------- figures


def _figures(audit: Audit) -> tuple[list[Figure], str]:
    """All figures that the series give, and why there are no plots (empty when there are)."""
    figures: list[Figure] = []
    problems: list[str] = []

    def drawn(draw: Callable[[], str]) -> Markup | None:
        try:
            # Markup is safe here: ElementTree wrote this SVG, so all text in it is escaped.
            return Markup(draw())
        except ImportError:
            problems.append("matplotlib is not installed; the tables hold the same")
        except Exception as error:
            problems.append(f"matplotlib could not draw ({type(error).__name__}); the tables hold the same")
        return None

    series = audit.series
    if series.heat and len(series.heat) == len(series.heat_ranks) and all(series.heat):
        figures.append(_heat(audit, drawn))
    num = len(series.overlap_ranks)
    if num >= 2 and len(series.overlap) == num and all(len(row) == num for row in series.overlap):
        figures.append(_overlap(audit, drawn))
    if series.shards and len(series.shards) == len(series.shard_ranks):
        figures.append(_shards(audit, drawn))
    return figures, problems[0] if problems else ""


def _heat(audit: Audit, drawn: Callable[[Callable[[], str]], Markup | None]) -> Figure:
    from ddp_audit.render.html import plots

    series = audit.series
    num_bins = min(len(row) for row in series.heat)
    heat = [row[:num_bins] for row in series.heat]
    columns = [Counter(row[i] for row in heat) for i in range(num_bins)]
    states = [
        [
            plots.NOTHING if cell < 0 else plots.SHARED if columns[i][cell] > 1 else plots.OWN
            for i, cell in enumerate(row)
        ]
        for row in heat
    ]
    first_step = series.heat_steps[0] if series.heat_steps else 0
    last_step = max(audit.num_steps, first_step + 1, *series.heat_steps[-1:], 1)
    partners = [
        Counter(
            series.heat_ranks[other]
            for i, state in enumerate(row_states)
            if state == plots.SHARED
            for other, cells in enumerate(heat)
            if other != row and cells[i] == heat[row][i]
        ).most_common(1)
        for row, row_states in enumerate(states)
    ]
    notes = [
        f"= rank {partner[0][0]}"
        if partner and row.count(plots.SHARED) * 2 > num_bins
        else "partly shared"
        if partner
        else "nothing seen"
        if all(state == plots.NOTHING for state in row)
        else "own batches"
        for row, partner in zip(states, partners, strict=True)
    ]
    seen = sum(state != plots.NOTHING for row in states for state in row)
    shared = sum(state == plots.SHARED for row in states for state in row)
    if len(heat) < 2:
        caption = "One rank was seen, so there is nothing to compare."
    elif shared == 0:
        caption = "No two ranks read the same batch at the same step."
    elif shared == seen:
        caption = "Every batch was read by more than one rank at the same step."
    else:
        caption = f"{_percent(shared / seen)} of the batches were read by more than one rank at the same step."
    rows = []
    for row, (rank, partner) in enumerate(zip(series.heat_ranks, partners, strict=True)):
        at = [i for i, state in enumerate(states[row]) if state == plots.SHARED]
        observed = num_bins - states[row].count(plots.NOTHING)
        rows.append(
            (
                str(rank),
                _percent(len(at) / observed) if observed else "nothing seen",
                f"rank {partner[0][0]}" if partner else "none",
                str(series.heat_steps[at[0]]) if at and at[0] < len(series.heat_steps) else "–",
            )
        )
    return Figure(
        id="heat",
        title="Which rank read what, step by step",
        caption=_together(caption),
        description=f"Map of {len(heat)} ranks by {words.count(audit.num_steps, 'step')}. {caption}",
        key=(("own", "its own batch"), ("shared", "the batch of another rank too"), ("none", "nothing seen")),
        svg=drawn(lambda: plots.heat_map(states, series.heat_ranks, last_step, first_step, notes)),
        table=Table(
            caption="Batches that a rank shared with another one at the same step",
            head=("rank", "shared", "most often with", "first at step"),
            rows=tuple(rows),
            numeric=(0, 1, 3),
        ),
    )


def _overlap(audit: Audit, drawn: Callable[[Callable[[], str]], Markup | None]) -> Figure:
    from ddp_audit.render.html import plots

    series = audit.series
    ranks = series.overlap_ranks
    pairs = [
        (series.overlap[i][j], ranks[i], ranks[j])
        for i in range(len(ranks))
        for j in range(i + 1, len(ranks))
        if math.isfinite(series.overlap[i][j])
    ]
    if not pairs:
        caption = "Which samples the ranks have in common is unknown."
    else:
        worst, a, b = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
        also = sum(share >= worst - 1e-9 for share, _, _ in pairs) - 1
        if worst == 0:
            caption = "No two ranks have samples in common."
        else:
            more = "" if not also else f", as have {also} other pairs" if also > 1 else ", as has one other pair"
            caption = f"Ranks {a} and {b} have {_percent(worst)} of their samples in common{more}."
    of_all = "" if audit.ranks_seen <= len(ranks) else f" The {len(ranks)} worst of {audit.ranks_seen} ranks are shown."
    cells = tuple(
        (
            str(rank),
            *(
                "–" if i == j else _percent(share) if math.isfinite(share) else "unknown"
                for j, share in enumerate(series.overlap[i])
            ),
        )
        for i, rank in enumerate(ranks)
    )
    return Figure(
        id="overlap",
        title="Samples in common",
        caption=_together(caption + of_all),
        description=f"Matrix of {len(ranks)} by {len(ranks)} ranks. {caption}",
        key=(),
        svg=drawn(lambda: plots.overlap_matrix(series.overlap, ranks)),
        table=Table(
            caption="Share of samples that two ranks have in common",
            head=("rank", *(str(rank) for rank in ranks)),
            rows=cells,
            numeric=tuple(range(len(ranks) + 1)),
        ),
    )


def _shards(audit: Audit, drawn: Callable[[Callable[[], str]], Markup | None]) -> Figure:
    from ddp_audit.render.html import plots

    series = audit.series
    counts = series.shards
    length, replicas = series.dataset_length, audit.replicas
    whole_epoch = any(rank.num_epochs for rank in audit.ranks)
    low, high = min(counts), max(counts)
    if low == high:
        caption = f"{'Each rank' if len(counts) > 1 else 'The rank'} read {words.count(low, 'sample')}"
    else:
        caption = f"Ranks read between {words.number(low)} and {words.count(high, 'sample')}"
    reference: float | None = sum(counts) / len(counts)
    name = f"mean {words.number(round(reference or 0))}"
    if whole_epoch and length and replicas and not audit.ranks_missing:
        reference = length / replicas
        name = f"fair share {words.number(math.ceil(reference))}"
        caption += f"; a fair share of {words.count(length, 'sample')} among {words.count(replicas, 'replica')} is "
        caption += words.number(math.ceil(reference))
    caption += "."
    label = words.one_line(series.shard_label) or "samples per rank"
    return Figure(
        id="shards",
        title=_sentence(label).rstrip("."),
        caption=_together(caption),
        description=f"Bars of {label} for {words.count(len(counts), 'rank')}. {caption}",
        key=(),
        svg=drawn(lambda: plots.shard_bars(counts, series.shard_ranks, reference, name)),
        table=Table(
            caption=_sentence(label).rstrip("."),
            head=("rank", "samples", "share of the mean"),
            rows=tuple(
                (
                    str(rank),
                    words.number(value),
                    _percent(value * len(counts) / sum(counts)) if sum(counts) else "unknown",
                )
                for rank, value in zip(series.shard_ranks, counts, strict=True)
            ),
            numeric=(0, 1, 2),
        ),
    )


def _percent(share: float) -> str:
    """Never 0 % for a little nor 100 % for nearly all: both would say something else."""
    if not math.isfinite(share):
        return "unknown"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{share * 100:.3g} %"


# --------------------------------------------------------------------------- appendix


def _ranks(audit: Audit) -> Table:
    rows = [
        (
            rank.rank,
            (
                str(rank.rank),
                words.one_line(rank.host),
                words.one_line(rank.device),
                words.number(rank.num_steps),
                words.number(rank.num_epochs),
                words.number(rank.num_samples),
                words.number(rank.num_distinct),
                words.number(rank.shard_length),
                words.number(rank.loader_length),
                _percent(rank.data_share) if rank.data_share is not None else "unknown",
                "yes" if rank.ended else "no",
            ),
        )
        for rank in audit.ranks
    ]
    known = {rank.rank for rank in audit.ranks}
    missing = (("–",) * 2) + ("no journal",) + ("–",) * 8
    rows += [(rank, (str(rank), *missing[1:])) for rank in audit.ranks_missing if rank not in known]
    return Table(
        caption="What each rank did",
        head=(
            "rank",
            "host",
            "device",
            "steps",
            "epochs",
            "samples",
            "distinct",
            "shard",
            "loader length",
            "waits for data",
            "ended",
        ),
        rows=tuple(row for _, row in sorted(rows)),
        numeric=(0, 3, 4, 5, 6, 7, 8, 9),
    )


def _groups(audit: Audit) -> Table:
    def fraction(value: float | None) -> str:
        return "unknown" if value is None else _percent(value)

    return Table(
        caption="Groups of replicas that share gradients",
        head=("group", "replicas (ranks)", "distinct by step", "distinct by epoch", "level"),
        rows=tuple(
            (
                str(number),
                _replicas(group.replicas),
                fraction(group.distinct_fraction_step),
                fraction(group.distinct_fraction_epoch),
                _LEVELS[group.level] if group.level else words.one_line(group.why_unknown or "unknown"),
            )
            for number, group in enumerate(audit.groups)
        ),
        numeric=(2, 3),
    )


def _replicas(replicas: Sequence[Sequence[int]]) -> str:
    if all(len(ranks) == 1 for ranks in replicas):
        return f"{len(replicas)} ({words.ranges([ranks[0] for ranks in replicas])})"
    shown = "; ".join(words.ranges(ranks) for ranks in replicas[:8])
    return f"{len(replicas)} ({shown}{'; …' if len(replicas) > 8 else ''})"


def _attempts(audit: Audit) -> Table:
    return Table(
        caption="Attempts: restarts, and process groups made anew",
        head=("restart", "group", "ranks", "common steps", "judged"),
        rows=tuple(
            (
                str(attempt.restart),
                str(attempt.generation),
                words.ranges(attempt.ranks) or "none",
                words.number(attempt.num_common_steps),
                "yes" if attempt.judged else "no",
            )
            for attempt in audit.attempts
        ),
        numeric=(0, 1, 3),
    )


def _loader(loader: LoaderInfo) -> tuple[str, tuple[tuple[str, str], ...]]:
    name = words.one_line(" < ".join(loader.class_names)) or "loader"
    left_out = {"class_names", "loader", "dataset_digest", "site_ordinal"}
    facts = [
        (f.name.removeprefix("num_").replace("_", " "), _plain_value(getattr(loader, f.name)))
        for f in fields(loader)
        if f.name not in left_out and getattr(loader, f.name) not in (None, ())
    ]
    return name, tuple(facts)


def _sampler(sampler: SamplerInfo) -> tuple[str, str]:
    facts = [
        f"{f.name}={_plain_value(getattr(sampler, f.name))}"
        for f in fields(sampler)
        if f.name not in ("class_name", "set_epoch") and getattr(sampler, f.name) is not None
    ]
    if sampler.set_epoch:
        facts.append("has set_epoch")
    return words.one_line(sampler.class_name), ", ".join(facts)


def _plain_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Location):
        return words.place(value)
    if isinstance(value, tuple):
        return words.one_line(", ".join(map(str, value)))
    return words.one_line(str(value))


def _provenance(audit: Audit) -> tuple[tuple[str, str], ...]:
    source = audit.provenance
    facts = [
        ("ddp-audit", audit.tool_version),
        ("schema", SCHEMA_VERSION),
        ("evidence format", source.evidence_version),
        ("evidence SHA-256", source.evidence_sha256),
        ("run", source.run_id),
        ("job started", _time(source.start)),
        ("page made", _time(source.created)),
        ("torch", source.torch),
        ("backend", source.backend),
        ("python", source.python),
        ("launcher", source.launcher),
        ("hosts", ", ".join(source.hosts)),
        ("hash", source.hash_name),
        ("journals", words.size(audit.overhead.journal_bytes)),
    ]
    return tuple((name, words.one_line(text) or "unknown") for name, text in facts)


def _time(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def outcomes(page: Page) -> dict[str, str]:
    """Id and word of every check on the page; for tests that compare formats."""
    rows = [*page.list, *page.passed, *page.not_applicable, *(row for row, _ in page.suppressed)]
    return {row.id: row.word for row in rows}


__all__ = ["Card", "Figure", "Page", "Row", "Table", "build", "outcomes"]
