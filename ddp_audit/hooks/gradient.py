"""L4: the local gradient of one or two weight matrices, before any reduction.

For DDP a post-accumulate hook, which fires before DDP's own; copies and pickles of the parameter
come out as without it. Where the gradient already holds a reduced part of an earlier backward
(no ``zero_grad``) it is no local one and is not taken. For FSDP2 the argument of the reduce-scatter.
A communication hook is never installed: only one may exist and it changes rounding.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_audit.hooks import digest
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE, after_fork

_hook = hook("gradient")
_fsdp = hook("gradient_fsdp")
MAX_WATCHED = 8  # over all wrappers
MAX_ELEMENTS = 1 << 26


@dataclass(slots=True, eq=False)
class Watched:
    """One weight whose local gradient is taken."""

    slot: int
    parameter: Any  # weak reference
    wrapper: Any  # weak reference
    clean: bool = False  # what it held before this backward was local
    unsynced: bool = False  # the last backward was not reduced


_watched: list[Watched] = []
_values: dict[int, int] = {}


def _forget() -> None:
    _watched.clear()
    _values.clear()


after_fork(_forget)


def _watch(module: Any, number: int) -> None:
    from ddp_audit.hooks.wrappers import parameters_of

    found = [p for p in parameters_of(module) if p.requires_grad and p.is_leaf and p.numel() <= MAX_ELEMENTS]
    # A bias under a sum loss has a constant gradient; weight matrices tell batches apart.
    matrices = [p for p in found if p.dim() >= 2] or found
    for parameter in [matrices[0], matrices[-1]] if len(matrices) > 1 else matrices:
        if len(_watched) >= MAX_WATCHED:
            return
        watched = Watched(slot=len(_watched), parameter=weakref.ref(parameter), wrapper=weakref.ref(module))
        parameter.register_post_accumulate_grad_hook(_make_hook(watched))
        _watched.append(watched)


def _make_hook(watched: Watched) -> Any:
    @unseen
    def fired(parameter: Any) -> None:
        if PROBE.due_next:
            took(watched, parameter)

    return fired


def _local(gradient: Any) -> bool:
    """Whether it is dense on the CPU."""
    parts = digest.dense_parts(gradient)
    return parts is not None and len(parts) == 1 and parts[0] is gradient and gradient.device.type == "cpu"


def _took(watched: Watched, parameter: Any) -> None:
    wrapper = watched.wrapper()
    if wrapper is not None:
        watched.unsynced = not vars(wrapper).get("require_backward_grad_sync", True)
    gradient = parameter.grad
    if not watched.clean or gradient is None or not _local(gradient):
        _values.pop(watched.slot, None)
        return
    _values[watched.slot] = digest.sampled_digest(gradient, digest.GRADIENT_WORDS)


def _begins() -> None:
    """A backward begins: is what the gradients hold now local?"""
    for watched in _watched:
        parameter = watched.parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None:
            watched.clean = True
        elif not (watched.clean and watched.unsynced):
            watched.clean = _local(gradient) and not np.any(digest.tensor_words(gradient, 1)[:, :4096])
        watched.unsynced = False


def take() -> int:
    """Digest of the local gradients of this step, 0 = none; and forget them."""
    for watched in _watched:
        watched.clean = watched.unsynced = False  # steps go by unwatched until the next look
    if not _values:
        return 0
    value = digest.combine([_values[slot] for slot in sorted(_values)])
    _values.clear()
    return value


watch = _hook.protect(_watch)
took = _hook.protect(_took)
begins = _hook.protect(_begins)
FSDP_SLOT = 1000


def _reduces(gradients: Any) -> None:
    if not PROBE.due_next or not isinstance(gradients, list):
        return
    calls = sum(slot >= FSDP_SLOT for slot in _values)
    if calls >= 2:
        return
    dense = [g for g in gradients if g is not None and g.dim() >= 2 and _local(g)]
    if dense:
        _values[FSDP_SLOT + calls] = digest.sampled_digest(dense[0], digest.GRADIENT_WORDS)


reduces = _fsdp.protect(_reduces)


def install_fsdp2(module: Any) -> None:
    """Patch ``foreach_reduce`` in the namespace of ``_fsdp_param_group``."""
    original = getattr(module, "foreach_reduce", None)
    if original is None:
        _fsdp.unavailable("FSDP2 foreach_reduce")
        return

    @unseen
    @functools.wraps(original)
    def foreach_reduce(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        reduces(gradients)
        return original(parameters, gradients, *args, **kwargs)

    module.foreach_reduce = foreach_reduce
