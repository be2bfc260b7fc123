"""Backward calls: what was delivered before one is training data."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from ddp_audit.hooks import gradient
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE

_hook = hook("backward")
_local = threading.local()


def _ended(spent_ns: int) -> None:
    PROBE.backward(spent_ns)


ended = _hook.protect(_ended)


def install(module: Any) -> None:
    """Patch ``torch.autograd.backward``; ``Tensor.backward`` looks it up there."""
    original = getattr(module, "backward", None)
    if original is None:
        _hook.unavailable("torch.autograd.backward")
        return

    @unseen
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "inside", False):  # re-entrant checkpointing
            return original(*args, **kwargs)
        if PROBE.due_next:
            gradient.begins()
        _local.inside = True
        start = time.perf_counter_ns()
        try:
            result = original(*args, **kwargs)
        finally:
            _local.inside = False
        ended(time.perf_counter_ns() - start)
        return result

    module.backward = backward
