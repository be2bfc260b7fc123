"""A hook that is off makes its checks inconclusive, never a pass and never an alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evidence_builder import Rank, evidence, sharded

from ddp_audit.judge import judge
from ddp_audit.records import Evidence, HookState, Outcome, Verdict


def with_hook_off(found: Evidence, hook: str) -> Evidence:
    """The same evidence, from a job in which ``hook`` had switched itself off."""
    state = HookState(hook=hook, reason="AttributeError", num_errors=3)
    return replace(found, journals=tuple(replace(info, hook_states=(state,)) for info in found.journals))


@pytest.mark.parametrize("hook", ["dataloader", "backward"])
def test_loaders_unseen(tmp_path: Path, hook: str) -> None:
    ranks = [Rank(steps=20) for _ in range(2)]
    audit = judge(with_hook_off(evidence(tmp_path, ranks), hook), created=0.0)
    found = {item.id: item for item in audit.checks}
    for name in ("DDP101", "DDP105", "DDP106", "DDP107"):
        assert found[name].outcome is Outcome.INCONCLUSIVE, name
        assert hook in found[name].message + (found[name].why_inconclusive or "")
    assert audit.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("hook", "check", "fields"),
    [
        ("group", "DDP201", {"group": False}),
        ("wrappers", "DDP202", {}),
        ("gradient", "DDP202", {"no_grads": True}),
        ("gradient", "DDP206", {"no_grads": True, "initial": 1}),
        ("parameters", "DDP207", {"params": lambda _: 0}),
    ],
)
def test_sync_unseen(tmp_path: Path, hook: str, check: str, fields: dict[str, object]) -> None:
    fields = dict(fields)
    no_grads = fields.pop("no_grads", False)
    ranks = []
    for rank, spec in enumerate(sharded()):
        given = dict(fields)
        if "initial" in given:
            given["initial"] = rank
        grads = (lambda _: 0) if no_grads else (lambda step, r=rank: 10_000 * (r + 1) + step)
        ranks.append(replace(spec, **{"wrapper": None, "grads": grads, "params": grads, **given}))
    audit = judge(with_hook_off(evidence(tmp_path, ranks), hook), created=0.0)
    found = next(item for item in audit.checks if item.id == check)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert hook in (found.why_inconclusive or "")
