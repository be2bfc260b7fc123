"""DDP201: several processes were launched, none ever made a process group."""

from __future__ import annotations

from ddp_audit.checks.common import finding, inconclusive, not_applicable, ranks_text
from ddp_audit.checks.streams import View
from ddp_audit.records import CheckInfo, Finding, Outcome, Severity

CHECK = CheckInfo(
    id="DDP201",
    kind="no-process-group",
    severity=Severity.ERROR,
    title="The ranks form a process group",
    failure_title="No process group was ever made",
    why="N processes that never meet are N trainings of one GPU each: nothing is shared, and N results come out.",
    explanation=(
        "The launcher asked for several ranks, and processes took optimizer steps without ever calling "
        "init_process_group. Jobs that take no step (data preparation, inference) and jobs with another library in "
        "charge of communication (Horovod, DeepSpeed, mpi4py, JAX) are not judged."
    ),
    needs="the journals of the ranks, with at least one optimizer step",
    fix='torch.distributed.init_process_group("nccl"), then model = DistributedDataParallel(model)',
    broken="""model = Net().to(device)  # torchrun --nproc-per-node=2, and no group
train(model)""",
    fixed="""torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(Net().to(device))
train(model)""",
)


def run(view: View) -> Finding:
    """Look for a process group in the judged attempt of a job of several ranks."""
    journals = [rank_view.info for rank_view in view.ranks.values()]
    world = max(view.world_size or 0, len(journals))
    if world < 2:
        return not_applicable(CHECK, "The job has one rank.")
    if not journals:
        return inconclusive(CHECK, "No rank was seen.", "a journal of at least two ranks")
    with_group = [info for info in journals if info.groups]
    if with_group:
        size = max(group.world_size for info in with_group for group in info.groups)
        backend = with_group[0].groups[-1].backend
        return finding(
            CHECK,
            Outcome.PASS,
            f"A {backend} group of {size} ranks was made.",
            ranks=tuple(info.rank for info in with_group),
            measured=float(size),
            unit="ranks in the group",
        )
    ranks = tuple(rank for rank, rank_view in view.ranks.items() if len(rank_view.steps))
    if not ranks:
        return not_applicable(CHECK, "No optimizer step was taken.")
    others = sorted({name for info in journals for name in info.other_frameworks})
    if others:
        return inconclusive(
            CHECK,
            f"No torch process group, but {', '.join(others)} was imported.",
            f"a look at {others[0]}'s own group, which ddp-audit does not read",
            ranks=ranks,
        )
    off = view.hook_off("group")
    if off is not None:
        return inconclusive(
            CHECK, "Whether a group was made could not be seen.", f"a run in which no {off}", ranks=ranks
        )
    alone = f"{ranks_text(ranks).capitalize()} took optimizer steps and never made a process group"
    return finding(
        CHECK,
        Outcome.FAIL,
        f"{alone}; {world} ranks were launched.",
        cause="init_process_group is never called, so no wrapper can share gradients",
        ranks=ranks,
        measured=0.0,
        limit=float(world),
        unit="ranks in a group",
    )
