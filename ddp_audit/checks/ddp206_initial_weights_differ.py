"""DDP206: gradients are shared, but the ranks started from different parameters."""

from __future__ import annotations

from ddp_audit.checks.common import (
    count,
    finding,
    inconclusive,
    not_applicable,
    over_groups,
    ranks_text,
    settled_by,
)
from ddp_audit.checks.streams import Group, View
from ddp_audit.records import CheckInfo, Finding, Outcome, Severity

CHECK = CheckInfo(
    id="DDP206",
    kind="initial-weights-differ",
    severity=Severity.ERROR,
    title="All replicas start from the same parameters",
    failure_title="Replicas start from different parameters",
    why="Equal updates on different starting points never meet: N models are trained with mixed gradients.",
    explanation=(
        "Every byte of the replicated parameters is hashed before the first optimizer step, that is after any "
        "broadcast of a wrapper. The check fails when the hashes differ between replicas while the gradients at the "
        "steps are equal, so that they are shared. Sharded parameters (FSDP, DTensor) are not compared; gradients "
        "that differ as well are DDP202's or DDP203's question."
    ),
    needs="the parameters before the first step, and gradient digests at common steps",
    fix="for p in model.parameters(): torch.distributed.broadcast(p.data, src=0)",
    broken="""torch.manual_seed(seed + rank)
model = Net()  # averaged by hand later, never broadcast""",
    fixed="""model = Net()
for p in model.parameters():
    torch.distributed.broadcast(p.data, src=0)""",
)


def _judge(group: Group) -> Finding:
    view = group.view
    ranks = tuple(replica[0] for replica in group.replicas)
    if group.unknown is not None:
        return inconclusive(CHECK, "Which ranks are replicas is unknown.", group.unknown, ranks=ranks)
    if not any(len(view.ranks[rank].steps) for rank in ranks):
        return not_applicable(CHECK, "No optimizer step was taken.")
    compared: list[int] = []
    different: list[int] = []
    for optimizer in view.sync.optimizers(ranks):
        infos = [next((p for p in view.ranks[r].info.parameters if p.optimizer == optimizer), None) for r in ranks]
        known = [p for p in infos if p is not None and p.values_digest is not None and p.num_replicated > 0]
        if len(known) < len(ranks) or len({p.layout_digest for p in known}) > 1:
            continue
        if any(p.num_dtensors for p in known) and any(p.num_replicated < p.num_parameters for p in known):
            continue  # what is sharded differs by design
        compared.append(optimizer)
        if len({p.values_digest for p in known}) > 1:
            different.append(optimizer)
    if not compared:
        sharded = any(w.kind.startswith("fsdp") for rank in ranks for w in view.ranks[rank].info.wrappers)
        if sharded:
            return not_applicable(CHECK, "All parameters are sharded: replicas of them do not exist.")
        return inconclusive(
            CHECK,
            "The parameters before the first step were not hashed.",
            settled_by(view, "parameters of equal shape, hashed at the first step", "parameters", "optimizer"),
            ranks=ranks,
        )
    if not different:
        return finding(
            CHECK,
            Outcome.PASS,
            f"{ranks_text(ranks).capitalize()} start from the same parameters.",
            ranks=ranks,
            measured=0.0,
            limit=0.0,
            unit="optimizers whose parameters differ before the first step",
        )
    facts = {
        "ranks": ranks,
        "measured": float(len(different)),
        "limit": 0.0,
        "unit": "optimizers whose parameters differ before the first step",
    }
    equal = total = 0
    for optimizer in different:
        gradients = view.sync.gradients(ranks, optimizer)
        equal += int(gradients.equal_S.sum())
        total += len(gradients.steps)
    if not total:
        return inconclusive(
            CHECK,
            f"The parameters of {ranks_text(ranks)} differ before the first step.",
            settled_by(view, "gradient digests, which tell whether gradients are shared", "optimizer", "gradient"),
            **facts,
        )
    if equal < total / 2:
        return not_applicable(
            CHECK, "The gradients differ too, so nothing is shared: that is DDP202's, DDP203's or DDP204's question."
        )
    by_hand = not any(view.ranks[rank].info.wrappers for rank in ranks)
    return finding(
        CHECK,
        Outcome.FAIL,
        f"{ranks_text(ranks).capitalize()} hold different parameters before the first step, while their gradients are "
        f"equal at {equal} of {count(total, 'step')}.",
        cause="gradients are averaged by hand and the parameters were never broadcast"
        if by_hand
        else "the parameters were set on each rank by itself after the wrapper's broadcast",
        fix="broadcast the parameters from rank 0 after they are made or loaded: "
        "torch.distributed.broadcast(p.data, src=0)"
        if by_hand
        else "load or initialise the model before it is wrapped",
        steps=(view.base_step,),
        location=next((w.location for w in view.ranks[ranks[0]].info.wrappers), None),
        **facts,
    )


def run(view: View) -> Finding:
    """Compare the replicated parameters before the first step."""
    return over_groups(CHECK, view, _judge)
