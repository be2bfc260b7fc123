"""Backward calls: what was delivered before one is training data."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from ddp_audit.hooks import gradient
from ddp_audit.hooks.guard import BrokenForTestError, Hook, hook, unseen
from ddp_audit.hooks.state import PROBE

_hook = hook("backward")
_local = threading.local()


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
        # What runs once per step and does next to nothing costs less in place than behind a guard.
        if not (_hook.off or Hook.silent):
            try:
                if _hook.broken:
                    raise BrokenForTestError
                PROBE.backward(time.perf_counter_ns() - start)
            except Exception as error:
                _hook.failed(error)
        return result

    module.backward = backward
