"""DDP207: replicated parameters differ between ranks after common steps."""

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
    id="DDP207",
    kind="params-diverge",
    severity=Severity.WARNING,
    title="Replicas hold the same parameters",
    failure_title="Replicas hold different parameters",
    why="Replicas that have drifted apart are different models; the checkpoint holds one of them.",
    explanation=(
        "Digests of the replicated parameters are compared after common optimizer steps. This is a symptom: where "
        "another check explains it, it is shown under that one. Steps are compared by number only as long as numbers "
        "mean the same update: with uneven shards (Join) only the first epoch's common steps count, and parameters "
        "that are equal at the end pass. Sharded parameters are not compared."
    ),
    needs="parameter digests after common steps",
    fix="find the first step at which they part, and make what decides it common to all ranks",
    broken="""if loss.item() > threshold:  # each rank decides by its own loss
    optimizer.zero_grad()""",
    fixed="""torch.distributed.all_reduce(loss_value)
if loss_value > threshold * world_size:
    optimizer.zero_grad()""",
)


def _judge(group: Group) -> Finding:
    view = group.view
    ranks = tuple(replica[0] for replica in group.replicas)
    if group.unknown is not None:
        return inconclusive(CHECK, "Which ranks are replicas is unknown.", group.unknown, ranks=ranks)
    infos = [view.ranks[rank].info for rank in ranks]
    if not any(len(view.ranks[rank].steps) for rank in ranks):
        return not_applicable(CHECK, "No optimizer step was taken.")
    sharded = any(w.kind.startswith("fsdp") for info in infos for w in info.wrappers)
    compared = apart = 0
    first: int | None = None
    for optimizer in view.sync.optimizers(ranks):
        held = [next((p for p in info.parameters if p.optimizer == optimizer), None) for info in infos]
        known = [p for p in held if p is not None]
        if any(p.num_dtensors for p in known) or len({p.layout_digest for p in known}) > 1 or sharded:
            sharded = True
            continue
        parameters = view.sync.parameters(ranks, optimizer)
        compared += len(parameters.steps)
        bad = parameters.steps[~parameters.equal_S]
        apart += len(bad)
        if len(bad) and (first is None or int(bad[0]) < first):
            first = int(bad[0])
    facts = {
        "ranks": ranks,
        "measured": apart / compared if compared else None,
        "limit": 0.0,
        "unit": "share of compared steps with different parameters",
    }
    final = {info.final_params for info in infos}
    if compared and not apart:
        return finding(
            CHECK,
            Outcome.PASS,
            f"Parameters are equal on {ranks_text(ranks)} after all {count(compared, 'step')} that were compared.",
            **facts,
        )
    if not compared:
        if sharded:
            return not_applicable(CHECK, "All parameters are sharded: replicas of them do not exist.")
        return inconclusive(
            CHECK,
            "Parameters were not hashed at common steps.",
            settled_by(view, "parameter digests after common steps", "parameters", "optimizer"),
            **facts,
        )
    if None not in final and len(final) == 1:
        return finding(
            CHECK, Outcome.PASS, f"Parameters of {ranks_text(ranks)} are equal, byte for byte, at the end.", **facts
        )
    assert first is not None
    return finding(
        CHECK,
        Outcome.FAIL,
        f"Parameters differ between {ranks_text(ranks)} after {apart} of {count(compared, 'compared step')}, first "
        f"after step {first + view.base_step}.",
        cause="something that changes the parameters is not common to all ranks",
        fix=f"look at what happens at step {first + view.base_step} on one rank only: a skipped step, a learning rate, "
        "a clipped gradient, a part without wrapper",
        steps=(first + view.base_step,),
        **facts,
    )


def run(view: View) -> Finding:
    """Compare the replicated parameters after common steps."""
    return over_groups(CHECK, view, _judge)
