"""What all checks share: how a finding is put together and how ranks are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_audit.checks.streams import MIN_STEPS, Group, View
from ddp_audit.records import CheckInfo, Finding, Level, LoaderInfo, Outcome, SamplerInfo

_WEIGHT = {
    Outcome.FAIL: 0,
    Outcome.ERROR: 1,
    Outcome.INCONCLUSIVE: 2,
    Outcome.PASS: 3,
    Outcome.NOT_APPLICABLE: 4,
}
LOADER_HOOKS = ("dataloader", "stateful_dataloader", "nodes", "backward", "digest")
"""Hooks without which training batches are not seen."""

MAX_NAMED_STEPS = 16  # steps listed in a finding; the message says how many there are


def finding(check: CheckInfo, outcome: Outcome, message: str, **fields: Any) -> Finding:
    """A finding of ``check``; severity is the check's own unless given, ``fix`` only on a failure."""
    fields.setdefault("severity", check.severity)
    if outcome is Outcome.FAIL:
        fields.setdefault("fix", check.fix)
    return Finding(id=check.id, kind=check.kind, outcome=outcome, message=message, **fields)


def not_applicable(check: CheckInfo, message: str) -> Finding:
    """The job holds nothing this check speaks of."""
    return finding(check, Outcome.NOT_APPLICABLE, message)


def inconclusive(check: CheckInfo, message: str, why: str, **fields: Any) -> Finding:
    """The evidence is short; ``why`` says what would settle it."""
    return finding(check, Outcome.INCONCLUSIVE, message, why_inconclusive=why, **fields)


def no_loader(check: CheckInfo, view: View) -> Finding:
    """No training loader was seen: there is none, or the hook that sees it is off."""
    off = view.hook_off(*LOADER_HOOKS)
    if off is not None:
        return inconclusive(check, "Whether there is a training loader could not be seen.", f"a run in which no {off}")
    return not_applicable(check, "No training loader was seen.")


def settled_by(view: View, evidence: str, *hooks: str) -> str:
    """What would settle the question: the ``evidence``, or a run in which its hook is on."""
    off = view.hook_off(*hooks)
    return evidence if off is None else f"{evidence} (no {off})"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 and 3``, ``ranks 0-7``, ``ranks 0-3, 6``."""
    items = sorted(set(ranks))
    if not items:
        return "no rank"
    if len(items) == 1:
        return f"rank {items[0]}"
    if len(items) == 2:
        return f"ranks {items[0]} and {items[1]}"
    runs: list[list[int]] = []
    for item in items:
        if runs and item == runs[-1][-1] + 1:
            runs[-1].append(item)
        else:
            runs.append([item])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return "ranks " + ", ".join(parts)


def percent(share: float) -> str:
    """``100 %``, ``12.5 %``: no digit that says nothing."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value - round(value)) < 0.05 else f"{value:.1f} %"


def count(number: int, word: str, plural: str | None = None) -> str:
    """``1 epoch``, ``3 epochs``."""
    return f"{number} {word if number == 1 else plural or word + 's'}"


def named_steps(view: View, steps: npt.NDArray[Any]) -> tuple[int, ...]:
    """The first steps, as the ranks counted them."""
    return tuple(int(step) + view.base_step for step in np.asarray(steps)[:MAX_NAMED_STEPS])


def over_groups(check: CheckInfo, view: View, judge: Callable[[Group], Finding]) -> Finding:
    """Judge each data group by itself; the worst outcome speaks, and says in how many it was so."""
    if not view.ranks:
        return inconclusive(check, "No rank was seen.", "a journal of at least two ranks")
    if view.world_size is not None and view.world_size > 1 and len(view.ranks) < 2:
        return inconclusive(
            check,
            f"Only {ranks_text(view.ranks)} of {view.world_size} reported.",
            f"the journals of {ranks_text(view.ranks_missing)}",
        )
    if not view.data_groups:
        return not_applicable(check, "The job holds one replica: there is nothing to compare.")
    found = [judge(group) for group in view.data_groups]
    worst = min(found, key=lambda item: _WEIGHT[item.outcome])
    alike = [item for item in found if item.outcome is worst.outcome]
    if worst.outcome is Outcome.FAIL and len(alike) > 1:
        ranks = tuple(sorted({rank for item in alike for rank in item.ranks}))
        message = f"{worst.message} The same holds in {len(alike)} of {len(found)} data groups."
        return replace(worst, ranks=ranks, message=message)
    return worst


def not_comparable(check: CheckInfo, group: Group) -> Finding | None:
    """The finding where samples cannot be compared at all; ``None`` when they can."""
    level, why = group.level
    if level is None:
        settle = (
            "the axes of the mesh, for instance --mesh dp=2,tp=2"
            if "--mesh" in (why or "")
            else "sample indices, batch contents or model inputs of every replica; record_samples(ids) gives them"
        )
        off = group.view.hook_off(*LOADER_HOOKS, "forward")
        return inconclusive(
            check,
            f"The samples of {ranks_text(group.ranks)} cannot be compared: {off or why or 'none were seen'}.",
            settle,
            ranks=group.ranks,
        )
    return None


def short_of_data(check: CheckInfo, group: Group) -> Finding | None:
    """The finding where too few steps can be compared; ``None`` when enough can."""
    short = not_comparable(check, group)
    if short is not None:
        return short
    level = group.level[0]
    steps = group.common_steps
    if len(steps) < MIN_STEPS:
        return inconclusive(
            check,
            f"{ranks_text(group.ranks).capitalize()} have {count(len(steps), 'step')} with samples in common, "
            f"{MIN_STEPS} are needed.",
            f"a run of at least {MIN_STEPS} optimizer steps",
            ranks=group.ranks,
            measured=float(len(steps)),
            limit=float(MIN_STEPS),
            unit="steps",
            levels=(level,) if level is not None else (),
        )
    return None


def short_of_epochs(check: CheckInfo, group: Group, needed: int = 1) -> Finding | None:
    """The finding where no epoch can be judged; ``None`` when enough can.

    A finished epoch is judged by its samples, however few steps it has.
    """
    short = not_comparable(check, group)
    if short is not None:
        return short
    level = group.level[0]
    levels = (level,) if level is not None else ()
    if len(group.epochs) >= needed and not group.with_replacement:
        fewest = min(len(samples) for item in group.epochs for samples in item.samples)
        if fewest >= MIN_STEPS:
            return None
        return inconclusive(
            check,
            f"Not judged: a replica reads {count(fewest, 'sample')} per epoch.",
            f"epochs of at least {MIN_STEPS} samples per replica",
            ranks=group.ranks,
            measured=float(fewest),
            limit=float(MIN_STEPS),
            unit="samples",
            levels=levels,
        )
    if group.epochs and group.with_replacement:
        return finding(
            check,
            Outcome.NOT_APPLICABLE,
            "Samples are drawn with replacement: an epoch says nothing about shares.",
            levels=levels,
        )
    if any(part.complete for parts in group.epoch_parts for part in parts):
        why = "an epoch that every replica finishes, with its sample lists"
    elif not any(group.epoch_parts):
        why = "a loader with an end; the job draws samples without one"
        return finding(check, Outcome.NOT_APPLICABLE, "The job has no epochs: nothing to judge.", levels=levels)
    else:
        why = "a finished epoch; the run ended inside the first one"
    if needed > 1 and group.epochs:
        why = f"{needed} finished epochs; {count(len(group.epochs), 'epoch')} was seen"
    return inconclusive(
        check,
        f"Not judged: {len(group.epochs)} of {count(needed, 'finished epoch')} were seen.",
        why,
        ranks=group.ranks,
        measured=float(len(group.epochs)),
        limit=float(needed),
        unit="epochs",
        levels=levels,
    )


def loader_word(loader: LoaderInfo | None) -> str:
    """The user's own name of the loader's class."""
    return loader.class_names[0] if loader is not None and loader.class_names else "the loader"


def dataset_word(loader: LoaderInfo | None) -> str:
    """The user's own name of the data set's class."""
    return loader.dataset_class or "the data set" if loader is not None else "the data set"


def leaf_sampler(samplers: Sequence[SamplerInfo]) -> SamplerInfo | None:
    """The innermost sampler: the one that decides the order; batch samplers wrap it."""
    return samplers[-1] if samplers else None


def levels_of(group: Group) -> tuple[Level, ...]:
    """The chosen level first, then others that carry samples at the same steps."""
    level = group.level[0]
    if level is None:
        return ()
    return (level,)
