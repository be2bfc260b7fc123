"""DDP202: a group exists, yet nothing reduces gradients."""

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
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, Severity

MIN_STEPS = 3  # digests of gradients are taken on a schedule; three different steps are no accident
MAX_EQUAL = 0.1  # share of single gradients that may be equal: zero gradients of unused parameters are
AVERAGING = ("LocalSGD", "DiLoCo", "Averag")  # parts of optimizer names that share parameters, not gradients

CHECK = CheckInfo(
    id="DDP202",
    kind="gradients-not-synced",
    severity=Severity.ERROR,
    title="Gradients are shared between replicas",
    failure_title="Gradients are not shared",
    why="Each rank trains a model of its own on its share of the data; the one that is saved saw 1/N of it.",
    explanation=(
        "No data-parallel wrapper was built, and the gradients that the optimizer used differ between ranks at every "
        "step where they were hashed, on practically all parameters; the parameters differ too and never meet again. "
        "Gradients that a job averages by hand are equal at the step and pass. Other ways to share (local SGD, "
        "parameter averaging, Horovod, DeepSpeed) are inconclusive."
    ),
    needs="gradient and parameter digests at 3 common steps",
    fix="model = DistributedDataParallel(model)",
    broken="""torch.distributed.init_process_group("nccl")
model = Net().to(device)  # gradients stay on this rank""",
    fixed="""torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(Net().to(device))""",
)


def _judge(group: Group) -> Finding:
    view = group.view
    ranks = tuple(replica[0] for replica in group.replicas)
    infos = [view.ranks[rank].info for rank in ranks]
    if not all(info.groups for info in infos):
        return not_applicable(CHECK, "There is no process group: that is DDP201's question.")
    if any(w.kind != "data_parallel" for info in infos for w in info.wrappers):
        return not_applicable(CHECK, "A data-parallel wrapper was built: DDP203 asks whether it is used.")
    if not any(len(view.ranks[rank].steps) for rank in ranks):
        return not_applicable(CHECK, "No optimizer step was taken.")
    if group.unknown is not None:
        return inconclusive(CHECK, "Which ranks are replicas is unknown.", group.unknown, ranks=ranks)
    unseen = view.hook_off("wrappers", "fsdp")
    if unseen is not None and not any(info.wrappers for info in infos):
        return inconclusive(
            CHECK, "Whether a wrapper was built could not be seen.", f"a run in which no {unseen}", ranks=ranks
        )
    others = sorted({name for info in infos for name in info.other_frameworks})
    optimizers = view.sync.optimizers(ranks)
    found: list[tuple[int, int, int]] = []  # differing steps, steps, optimizer
    for optimizer in optimizers:
        gradients = view.sync.gradients(ranks, optimizer)
        if not len(gradients.steps):
            continue
        equal_S = gradients.equal_S
        found.append((int((~equal_S).sum()), len(equal_S), optimizer))
    if not found or max(steps for _, steps, _ in found) < MIN_STEPS:
        return inconclusive(
            CHECK,
            "Gradients were not hashed at enough common steps.",
            settled_by(view, f"gradient digests at {MIN_STEPS} common steps", "optimizer", "gradient"),
            ranks=ranks,
        )
    differing, num_steps, optimizer = max(found)
    facts = {
        "ranks": ranks,
        "measured": differing / num_steps,
        "limit": 1.0,
        "unit": "share of steps with different gradients",
    }
    if any(same < steps for same, steps, _ in found):
        return finding(
            CHECK,
            Outcome.PASS,
            f"Gradients are equal on {ranks_text(ranks)} at {num_steps - differing} of {num_steps} steps.",
            **facts,
        )
    gradients = view.sync.gradients(ranks, optimizer)
    equal_share = view.sync.equal_share(ranks, optimizer, gradients.steps)
    parameters = view.sync.parameters(ranks, optimizer)
    met = bool(len(parameters.steps)) and bool(parameters.equal_S.any())
    final = {info.final_params for info in infos}
    met |= None not in final and len(final) == 1
    names = {p.class_name for info in infos for p in info.parameters}
    averaging = [name for name in names if any(part in name for part in AVERAGING)]
    if others or averaging or met or (equal_share is not None and equal_share > MAX_EQUAL):
        if others or averaging:
            why = f"a look at {(others or averaging)[0]}, which shares in a way of its own"
        elif met:
            why = "the parameters meet again, so something else shares them"
        else:
            why = f"{equal_share:.0%} of the single gradients are equal, so some of them are shared"
        return inconclusive(CHECK, f"Gradients differ at {differing} of {num_steps} steps.", why, **facts)
    if not len(parameters.steps):
        return inconclusive(
            CHECK,
            f"Gradients differ at {differing} of {num_steps} steps.",
            "parameter digests at common steps",
            **facts,
        )
    model = next((w.module_class for info in infos for w in info.wrappers), "the model")
    wrapped_alone = any(w.kind == "data_parallel" for info in infos for w in info.wrappers)
    cause = (
        f"{model} is wrapped in DataParallel, which shares between the devices of one process only"
        if wrapped_alone
        else "no DistributedDataParallel or fully_shard was built, and nothing averages the gradients"
    )
    return finding(
        CHECK,
        Outcome.FAIL,
        f"Gradients differ between {ranks_text(ranks)} at {differing} of {num_steps} steps, and so do the parameters.",
        cause=cause,
        fix="wrap the model in DistributedDataParallel(model) or fully_shard(model), or average the gradients by hand",
        steps=named_steps(view, gradients.steps[~gradients.equal_S]),
        levels=(Level.L4,) if _local(view, ranks) else (),
        **facts,
    )


def _local(view: View, ranks: tuple[int, ...]) -> bool:
    return any(bool(np.any(view.ranks[rank].steps["local_grad"] != 0)) for rank in ranks)


def run(view: View) -> Finding:
    """Compare the gradients that the optimizers of all replicas used, where no wrapper exists."""
    return over_groups(CHECK, view, _judge)
