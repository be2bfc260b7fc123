"""The default process group: when it was made, with what backend, when it was destroyed."""

from __future__ import annotations

import functools
import time
from typing import Any

from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE

_hook = hook("group")
before_destroy: list[Any] = []
"""Called before the default group goes: what must still be read while the job's objects live."""


def _made(module: Any) -> None:
    PROBE.generation_calls += 1
    PROBE.prove("group")
    PROBE.event(
        "group",
        {
            "generation": PROBE.generation_calls - 1,
            "backend": str(module.get_backend()),
            "world_size": int(module.get_world_size()),
            "rank": int(module.get_rank()),
            "time": time.time(),
        },
    )


def _count_collectives(module: Any) -> None:
    """Collectives of all groups so far, from their own counters; 0 under a wrapper, whose own are not told apart."""
    if PROBE.wrapper_seen or not module.is_initialized():
        return
    total = 0
    for group in list(module._world.pg_map):
        try:
            total += int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue  # a backend without a counter
    PROBE.num_other_collectives = max(PROBE.num_other_collectives, total)


def _destroys(module: Any, group: Any) -> None:
    if group is not None and group is not module.GroupMember.WORLD:
        return
    _count_collectives(module)
    for call in before_destroy:
        call()


def _destroyed(group: Any, existed: bool, module: Any) -> None:
    if existed and not module.is_initialized():
        PROBE.event("group_destroyed", {"generation": max(0, PROBE.generation_calls - 1), "time": time.time()})


made = _hook.protect(_made)
destroys = _hook.protect(_destroys)
destroyed = _hook.protect(_destroyed)


def install(module: Any) -> None:
    """Patch ``torch.distributed.distributed_c10d`` before ``torch.distributed`` re-exports it."""
    init = getattr(module, "init_process_group", None)
    destroy = getattr(module, "destroy_process_group", None)
    if init is None or destroy is None:
        _hook.unavailable("init_process_group")
        return

    @unseen
    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = init(*args, **kwargs)
        made(module)
        return result

    @unseen
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        existed = module.is_initialized()
        destroys(module, group)
        result = destroy(group, *args, **kwargs)
        destroyed(group, existed, module)
        return result

    module.init_process_group = init_process_group
    module.destroy_process_group = destroy_process_group
    PROBE.at_exit.append(_hook.protect(lambda: _count_collectives(module)))
