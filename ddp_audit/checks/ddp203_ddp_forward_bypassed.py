"""DDP203: a wrapper exists, but the loss is computed around it."""

from __future__ import annotations

import numpy as np

from ddp_audit.checks.common import (
    finding,
    inconclusive,
    named_steps,
    not_applicable,
    over_groups,
    ranks_text,
    settled_by,
)
from ddp_audit.checks.streams import Group, View
from ddp_audit.records import CheckInfo, Finding, Outcome, Severity, WrapperInfo

CHECK = CheckInfo(
    id="DDP203",
    kind="ddp-forward-bypassed",
    severity=Severity.ERROR,
    title="The loss runs through the data-parallel wrapper",
    failure_title="The wrapper's forward is bypassed",
    why="DDP reduces gradients only after its own forward: called around it, every rank trains by itself.",
    explanation=(
        "A wrapper exists on all ranks, backward passes happen between two optimizer steps without any forward of the "
        "wrapper under grad, and the gradients that the optimizer used differ between ranks at those steps. Both are "
        "needed: inner calls for evaluation, generation or a frozen critic, and gradients averaged by hand, leave the "
        "gradients equal and pass."
    ),
    needs="a wrapper, and gradient digests at common steps",
    fix="call the wrapper: loss = criterion(ddp_model(inputs), targets)",
    broken="""model = DistributedDataParallel(net)
loss = model.module.loss(batch)  # the reducer is never armed
loss.backward()""",
    fixed="""model = DistributedDataParallel(net)
loss = model(batch)  # forward computes the loss
loss.backward()""",
)


def _judge(group: Group) -> Finding:
    view = group.view
    ranks = tuple(replica[0] for replica in group.replicas)
    wrappers: list[WrapperInfo] = []
    for rank in ranks:
        mine = [w for w in view.ranks[rank].info.wrappers if w.kind != "data_parallel"]
        if not mine:
            return not_applicable(CHECK, "Not every rank has a data-parallel wrapper.")
        wrappers += mine
    around: set[int] | None = None
    num_steps = 0
    for rank in ranks:
        rank_view = view.ranks[rank]
        rows = rank_view.steps
        bare = (rows["num_backwards"] > 0) & (rows["num_forwards"] == 0)
        num_steps = max(num_steps, int((rows["num_backwards"] > 0).sum()))
        here = {int(step) for step in rank_view.relative(rows["step"][bare])}
        around = here if around is None else around & here
    if not num_steps:
        return not_applicable(CHECK, "No backward pass was seen before a step.")
    facts = {
        "ranks": ranks,
        "measured": len(around or ()) / num_steps,
        "limit": 0.0,
        "unit": "share of steps without a forward of the wrapper",
    }
    if not around:
        return finding(CHECK, Outcome.PASS, f"The wrapper's forward runs before all {num_steps} steps.", **facts)
    steps = np.array(sorted(around), dtype=np.int64)
    seen = different = 0
    apart: list[int] = []
    for optimizer in view.sync.optimizers(ranks):
        gradients = view.sync.gradients(ranks, optimizer)
        chosen = np.isin(gradients.steps, steps)
        # a GAN's other optimizer may step in the same round, after a forward of its own wrapper
        chosen &= np.isin(gradients.steps, _bare_steps(view, ranks, optimizer))
        seen += int(chosen.sum())
        different += int((~gradients.equal_S[chosen]).sum())
        apart += [int(step) for step in gradients.steps[chosen & ~gradients.equal_S]]
    kind = "DistributedDataParallel" if wrappers[0].kind == "ddp" else "the fully sharded wrapper"
    model = wrappers[0].module_class
    if not seen:
        return inconclusive(
            CHECK,
            f"{len(steps)} of {num_steps} steps follow no forward of the wrapper.",
            settled_by(view, "gradient digests at those steps", "optimizer", "gradient"),
            **facts,
        )
    if not different:
        return finding(
            CHECK,
            Outcome.PASS,
            f"{len(steps)} of {num_steps} steps follow no forward of the wrapper, but gradients are equal at all "
            f"{seen} that were compared.",
            **facts,
        )
    return finding(
        CHECK,
        Outcome.FAIL,
        f"{len(steps)} of {num_steps} steps of {ranks_text(ranks)} follow no forward of {kind}, and gradients differ "
        f"at {different} of the {seen} that were compared.",
        cause=f"the loss is computed on the inner {model} (by .module, a kept handle or a method of its own)",
        fix=f"compute the loss inside the forward of {model} and call the wrapper, or average the gradients by hand",
        steps=named_steps(view, np.unique(np.array(apart, dtype=np.int64))),
        location=wrappers[0].location,
        **facts,
    )


def _bare_steps(view: View, ranks: tuple[int, ...], optimizer: int) -> np.ndarray:
    """Relative steps of this optimizer that no wrapped forward precedes, on all ranks."""
    common: np.ndarray | None = None
    for rank in ranks:
        rank_view = view.ranks[rank]
        rows = rank_view.steps[rank_view.steps["optimizer"] == optimizer]
        mine = rank_view.relative(rows["step"][(rows["num_backwards"] > 0) & (rows["num_forwards"] == 0)])
        common = mine if common is None else np.intersect1d(common, mine)
    return common if common is not None else np.empty(0, np.int64)


def run(view: View) -> Finding:
    """Find steps after backward passes that no forward of the wrapper preceded."""
    return over_groups(CHECK, view, _judge)
