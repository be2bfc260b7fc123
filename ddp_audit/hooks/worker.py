"""A process that enters a loader's worker loop is no rank and stays silent for ever."""

from __future__ import annotations

import functools
from typing import Any

from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE

_hook = hook("worker")
entered = _hook.protect(PROBE.become_worker)


def install(module: Any) -> None:
    """Patch ``torch.utils.data._utils.worker`` or torchdata's copy of it."""
    original = getattr(module, "_worker_loop", None)
    if original is None:
        _hook.unavailable("the loader's worker loop")
        return

    @unseen
    @functools.wraps(original)
    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        entered()
        return original(*args, **kwargs)

    module._worker_loop = _worker_loop
