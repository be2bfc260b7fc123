"""L3: the inputs of the wrapped model's forward, before it runs.

``__call__`` of the wrapper classes, never a module hook: ``torch.compile`` traces hooks away. The
outermost wrapper counts: DDP around a compiled module, a compiled DDP, and ``ddp.compile()`` all
pass one of these classes eagerly. Under dynamo's own tracing the recorder is folded away.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

import torch

from ddp_audit.hooks import digest, guard, wrappers
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE, Forward
from ddp_audit.hooks.wrappers import WRAPPERS
from ddp_audit.records import ForwardFlag, ListKind

_hook = hook("forward")
_compile = hook("compile")
_local = threading.local()
GRAD, SYNC, HAS_DIGESTS = int(ForwardFlag.GRAD), int(ForwardFlag.SYNC), int(ForwardFlag.HAS_DIGESTS)
WINDOWED, WHOLE, OPAQUE = int(ForwardFlag.WINDOWED), int(ForwardFlag.WHOLE), int(ForwardFlag.OPAQUE)
RESIZED = int(ForwardFlag.RESIZED)


def _synced(module: Any) -> bool:
    """Whether the wrapper will reduce gradients in the backward of this forward."""
    own = vars(module)
    if "require_backward_grad_sync" in own:
        return bool(own["require_backward_grad_sync"])
    if "_sync_gradients" in own:  # FSDP1
        return bool(own["_sync_gradients"])
    get_state = getattr(type(module), "_get_fsdp_state", None)
    if get_state is not None:
        groups = getattr(get_state(module), "_fsdp_param_groups", None) or []
        return all(getattr(group, "reduce_grads", True) for group in groups)
    return True


def _enter(module: Any, args: Any, kwargs: Any) -> Forward | None:
    if getattr(_local, "inside", False):
        return None
    if wrappers.UNSETTLED:
        wrappers.settle()
    known = WRAPPERS.get(module)
    grad = torch.is_grad_enabled()
    forward = Forward(
        serial=PROBE.next_serial(),
        wrapper=max(0, known.number) if known is not None else 0,
        flags=(GRAD if grad else 0) | (SYNC if _synced(module) else 0),
        num_samples=0,
    )
    pending = PROBE.pending
    # As the only data level it is taken at every step.
    if grad and (not pending or PROBE.due_next):
        hint = pending[-1].num_samples if pending else None
        inputs = (args, kwargs) if kwargs else args
        _content(forward, inputs, hint)
        delivered = {size for batch in pending for size in batch.sizes}
        if delivered:
            sizes = digest.row_sizes(inputs, forward.num_samples)
            if sizes and delivered.isdisjoint(sizes):
                forward.flags |= RESIZED
    PROBE.add_forward(forward)
    _local.inside = True
    return forward


def _content(forward: Forward, inputs: Any, hint: int | None) -> None:
    from ddp_audit.hooks import device_digest

    found = digest.batch_digest(inputs, hint or None, device_sums=device_digest.row_sums)
    forward.num_samples = found.num_samples
    if found.opaque:
        forward.flags |= OPAQUE
    forward.flags |= WINDOWED if found.windowed else WHOLE
    if found.device is not None:
        arrived = device_digest.send_batch(found)
        if arrived is None:
            forward.flags &= ~(WINDOWED | WHOLE)
            return

        def late(last: bool) -> bool:
            values = arrived(last)
            if values is None:
                return False
            samples, forward.content = values
            if samples is not None:
                forward.flags |= HAS_DIGESTS
                forward.lists.append((ListKind.INPUT, samples.tobytes()))
            forward.late = None
            return True

        forward.late = late
        return
    forward.content = found.content
    if found.samples is not None:
        forward.flags |= HAS_DIGESTS
        forward.lists.append((ListKind.INPUT, found.samples.tobytes()))


enter = _hook.protect(_enter)


def _patched(call: Any, like: Any) -> Any:
    """A ``__call__`` that records. ``call(self)`` finds the real one when it is called."""

    @unseen
    @functools.wraps(like)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        forward = enter(self, args, kwargs)
        if forward is None:
            return call(self, *args, **kwargs)
        start = time.perf_counter_ns()
        try:
            return call(self, *args, **kwargs)
        finally:
            _local.inside = False
            spent_ns = time.perf_counter_ns() - start
            forward.forward_us = min(spent_ns // 1000, 0xFFFF_FFFF)
            PROBE.forward_ns += spent_ns

    return recorded


@unseen
def _plain_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Looked up now: torch.fx replaces Module.__call__ for a while.
    return torch.nn.Module.__call__(self, *args, **kwargs)


def _module_class() -> Any:
    # While torch imports itself ``torch.nn`` is no attribute of it yet.
    return sys.modules["torch.nn.modules.module"].Module


def _install_plain(kind: Any) -> None:
    if "__call__" in vars(kind):
        _hook.unavailable(f"{kind.__name__}.__call__")
        return
    kind.__call__ = _patched(_plain_call, _module_class().__call__)


def install_ddp(module: Any) -> None:
    """Patch ``DistributedDataParallel.__call__``."""
    _install_plain(module.DistributedDataParallel)


def install_data_parallel(module: Any) -> None:
    """Patch ``DataParallel.__call__``."""
    _install_plain(module.DataParallel)


def install_fsdp1(module: Any) -> None:
    """Patch ``FullyShardedDataParallel.__call__``."""
    _install_plain(module.FullyShardedDataParallel)


def install_fsdp2(module: Any) -> None:
    """Patch ``FSDPModule.__call__``, a mixin before the user's class."""
    kind = getattr(module, "FSDPModule", None)
    if kind is None or "__call__" in vars(kind):
        hook("fsdp").unavailable("FSDPModule.__call__")
        return

    @unseen
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(kind, self).__call__(*args, **kwargs)

    kind.__call__ = _patched(call, _module_class().__call__)


def install_compile(module: Any) -> None:
    """Patch ``OptimizedModule.__call__`` of ``torch._dynamo.eval_frame``: a compiled wrapper."""
    guard.dynamo_imported()
    kind: Any = getattr(module, "OptimizedModule", None)
    original: Any = vars(kind).get("__call__") if kind is not None else None
    if original is None:
        _compile.unavailable("OptimizedModule.__call__")
        return

    @unseen
    @functools.wraps(original)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        forward = enter_compiled(self, args, kwargs)
        if forward is None:
            return original(self, *args, **kwargs)
        start = time.perf_counter_ns()
        try:
            return original(self, *args, **kwargs)
        finally:
            _local.inside = False
            spent_ns = time.perf_counter_ns() - start
            forward.forward_us = min(spent_ns // 1000, 0xFFFF_FFFF)
            PROBE.forward_ns += spent_ns

    kind.__call__ = recorded


def _enter_compiled(module: Any, args: Any, kwargs: Any) -> Forward | None:
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    if inner is None or WRAPPERS.get(inner) is None:
        return None
    return enter(inner, args, kwargs)


enter_compiled = _compile.protect(_enter_compiled)
