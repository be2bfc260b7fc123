"""Optimizer steps: rounds, learning rate, parameters before the first, gradients as they are used.

Through torch's global step hooks, which no optimizer refers to. With a closure the backward runs
inside ``step``, so gradients are read after it.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ddp_audit.hooks import device, digest, gradient, group, wrappers
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.state import PROBE, Step, after_fork
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import MeshInfo, ParametersInfo

_hook = hook("optimizer")
_parameters = hook("parameters")
MAX_GRADS = 64
MAX_SAMPLED = 4096


class _Local(threading.local):
    stack: list[int] | None = None  # ids of the optimizers that are stepping in this thread


_local = _Local()


@dataclass(slots=True, eq=False)
class View:
    """Words of one parameter, valid while it is alive at the same address."""

    parameter: Any  # weak reference
    pointer: int
    numel: int
    words: Any


@dataclass(slots=True, eq=False)
class Known:
    """One optimizer."""

    number: int
    started: bool = False
    num_parameters: int = -1
    chosen: list[Any] = field(default_factory=list)  # weak references to parameters
    views: list[View] = field(default_factory=list)
    buffer: Any = None
    on_device: list[Any] = field(default_factory=list)  # weak references
    start_ns: int = 0
    due: bool = False  # whether the dear signals are taken at the step under way
    grads: int = 0
    grad_list: bytes = b""
    late: Any = None


KNOWN: WeakIdMap[Known] = WeakIdMap()
_next = [0]
_device_told = [False]


def _forget() -> None:
    KNOWN.clear()
    _next[0] = 0
    _device_told[0] = False
    _local.__dict__.clear()


after_fork(_forget)


def all_parameters(optimizer: Any) -> list[Any]:
    """Parameters of all groups, in order."""
    return [p for g in optimizer.param_groups for p in g["params"]]


def local_part(parameter: Any, sharded: set[int]) -> Any:
    """The plain tensor of a replicated parameter; ``None`` when ranks hold different shards of it."""
    if id(parameter) in sharded and not hasattr(parameter, "_local_tensor"):
        return None
    if hasattr(parameter, "_local_tensor"):
        if all(type(p).__name__ == "Replicate" for p in parameter._spec.placements):
            return parameter._local_tensor
        return None
    parts = digest.dense_parts(parameter)
    return parameter if parts is not None and len(parts) == 1 else None


def _data_dims(meshes: list[Any]) -> set[str]:
    return {str(name) for mesh in meshes for name in (mesh.mesh_dim_names or ())}


def _model_axes(parameters: list[Any]) -> tuple[MeshInfo | None, tuple[int, ...]]:
    """The mesh of placements that no data wrapper explains, and its dims that split a parameter."""
    meshes: list[Any] = []
    for module, wrapper in wrappers.WRAPPERS.items():
        if wrapper.kind == "fsdp2":
            meshes.extend(wrappers.fsdp_meshes(module))
    data = _data_dims(meshes)
    unnamed = any(mesh.mesh_dim_names is None for mesh in meshes)
    for parameter in parameters:
        if not hasattr(parameter, "_local_tensor"):
            continue
        spec = parameter._spec
        names = spec.mesh.mesh_dim_names
        dims = []
        for dim, placement in enumerate(spec.placements):
            if type(placement).__name__ == "Replicate":
                continue
            if (names is None and (meshes or unnamed)) or (names is not None and str(names[dim]) in data):
                continue
            dims.append(dim)
        if dims:
            return wrappers.mesh_info(spec.mesh), tuple(dims)
    return None, ()


def _first_step(optimizer: Any, known: Known) -> None:
    """What the optimizer holds, before it changes anything."""
    wrappers.settle()
    parameters = all_parameters(optimizer)
    held, sharded = wrappers.held_parameters()
    parts = [(p, local_part(p, sharded)) for p in parameters]
    replicated = [part for _, part in parts if part is not None]
    if not _device_told[0] and parameters:
        _device_told[0] = True
        local = getattr(parameters[0], "_local_tensor", parameters[0])
        device.found(local.device)
    values: int | None = None
    if replicated and all(part.device.type == "cpu" for part in replicated):
        values = digest.whole_digest(replicated)
    mesh, dims = _model_axes(parameters)
    info = ParametersInfo(
        optimizer=known.number,
        class_name=type(optimizer).__name__,
        num_parameters=len(parameters),
        layout_digest=digest.layout_digest([getattr(p, "_local_tensor", p) for p in parameters]),
        values_digest=values,
        num_replicated=len(replicated),
        num_dtensors=sum(hasattr(p, "_local_tensor") for p in parameters),
        model_mesh=mesh,
        model_dims=dims,
        num_unwrapped=sum(bool(p.requires_grad) and id(p) not in held for p in parameters),
    )
    on_device = [part for part in replicated if part.device.type == "cuda"]
    if values is None and on_device and len(on_device) == len(replicated):
        from ddp_audit.hooks import device_digest

        arrived = device_digest.send_values(on_device, budget=None)
        if arrived is not None:
            device_digest.when_arrived(arrived, lambda sums: _tell(info, digest.combine(sums)))
            return
    _tell(info, values)


def _tell(info: ParametersInfo, values: int | None) -> None:
    PROBE.event("parameters", {**asdict(info), "values_digest": values})


def _spread(items: list[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the items, evenly spread, with first and last."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _prepare(optimizer: Any, known: Known) -> None:
    """Choose parameters and build views; again when parameters were added or moved."""
    parameters = all_parameters(optimizer)
    _, sharded = wrappers.held_parameters()
    replicated = [(p, part) for p in parameters if (part := local_part(p, sharded)) is not None]
    known.num_parameters = len(parameters)
    known.chosen = [weakref.ref(p) for p, _ in _spread([r for r in replicated if r[0].requires_grad], MAX_GRADS)]
    known.views, known.on_device, size = [], [], 0
    for parameter, part in _spread(replicated, MAX_SAMPLED):
        if part.device.type != "cpu":
            known.on_device.append(weakref.ref(parameter))
            continue
        if not part.numel() or not part.is_contiguous():
            continue
        words = digest.tensor_words(part, 1)[0]
        stride = max(1, -(-len(words) // digest.PARAMETER_WORDS))
        # Read from the end, so that the last word is always in.
        view = words[::-1][::stride]
        known.views.append(View(weakref.ref(parameter), part.data_ptr(), part.numel(), view))
        size += len(view)
    known.buffer = np.zeros(size, dtype=np.uint64)


def _sampled(optimizer: Any, known: Known) -> int:
    """Digest of parameter samples as they are now; 0 = none."""
    for attempt in range(2):
        at, moved = 0, False
        for view in known.views:
            parameter = view.parameter()
            if parameter is None:
                moved = True
                break
            part = getattr(parameter, "_local_tensor", parameter)
            if part.data_ptr() != view.pointer or part.numel() != view.numel:
                moved = True
                break
            end = at + len(view.words)
            known.buffer[at:end] = view.words
            at = end
        if not moved:
            return digest.bytes_digest(known.buffer) if at else 0
        if attempt == 0:
            _prepare(optimizer, known)
    return 0


def _gradients(known: Known) -> None:
    """Digests of the chosen parameters' gradients as they are now."""
    values: list[int] = []
    on_device: list[tuple[int, Any]] = []
    for reference in known.chosen:
        parameter = reference()
        found = parameter.grad if parameter is not None else None
        if found is None:
            values.append(0)
            continue
        part = getattr(found, "_local_tensor", found)
        if part.device.type != "cpu":
            on_device.append((len(values), part))
            values.append(0)
            continue
        parts = digest.dense_parts(part)
        if parts is not None and len(parts) == 1:
            values.append(digest.sampled_digest(parts[0], digest.GRADIENT_WORDS))
        else:
            values.append(digest.value_digest(part)[0])
    if on_device:
        from ddp_audit.hooks import device_digest

        known.late = device_digest.send_values([g for _, g in on_device], budget=digest.GRADIENT_WORDS)
        places = [place for place, _ in on_device]
        if known.late is not None:
            arrived = known.late

            def late(last: bool) -> list[int] | None:
                sums = arrived(last)
                if sums is None:
                    return None
                for place, value in zip(places, sums, strict=True):
                    values[place] = value
                return values

            known.late = late
        return
    if any(values):
        known.grads = digest.combine(values)
        known.grad_list = np.array(values, dtype=np.uint64).tobytes()


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    stack = _local.stack
    if stack is None:
        stack = _local.stack = []
    if stack and id(optimizer) in stack and not _is_nested(optimizer):
        stack.clear()  # its last step ended in an exception
    stack.append(id(optimizer))
    if len(stack) > 1:
        return  # a step inside another: ZeRO, SAM, or a subclass whose ``step`` calls its parent's
    known = KNOWN.get(optimizer)
    if known is None:
        known = Known(number=_next[0])
        _next[0] += 1
        KNOWN.set(optimizer, known)
    number = PROBE.open_round(known.number)
    if not known.started:
        known.started = True
        first_step(optimizer, known)
    known.due = PROBE.due(number)
    if known.due:
        known.grads, known.grad_list, known.late = 0, b"", None
        if known.num_parameters != sum(len(g["params"]) for g in optimizer.param_groups):
            prepare(optimizer, known)
        if not has_closure(args, kwargs):
            gradients(known)
    known.start_ns = time.perf_counter_ns()


def _is_nested(optimizer: Any) -> bool:
    """Whether a step of this optimizer is running already: torch hooks ``step`` of each class in the chain."""
    frame, steps = sys._getframe(1), 0
    while frame is not None and steps < 2:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back  # type: ignore[assignment]
    return steps >= 2


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether ``step`` was given a closure. ``args`` holds the optimizer first."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def learning_rate(optimizer: Any) -> float:
    """Of the first group; NaN when it lies on a device."""
    value: Any = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(value, (int, float)):
        return float(value)
    if digest.is_tensor(value) and value.device.type == "cpu" and value.numel() == 1:
        return float(value.detach().reshape(-1).tolist()[0])
    return float("nan")


def _after(optimizer: Any, args: Any, kwargs: Any) -> bool:
    end = time.perf_counter_ns()
    stack = _local.stack
    if not stack:
        return False
    stack.pop()
    if stack:
        return False
    known = KNOWN.get(optimizer)
    if known is None:
        return False
    step = Step(optimizer=known.number, learning_rate=learning_rate(optimizer))
    step.optimizer_us = min(max(0, end - known.start_ns) // 1000, 0xFFFF_FFFF)
    if known.due:
        if has_closure(args, kwargs):
            gradients(known)
        step.params = sampled(optimizer, known) or 0
        PROBE.local_grad = gradient.take()
        _device_parameters(known, step)
        step.grads, step.grad_list = known.grads, known.grad_list
    PROBE.step(step)
    return True


def _device_parameters(known: Known, step: Step) -> None:
    """Sampled parameters and gradients that come back from a device later."""
    arrived_params = None
    if known.on_device:
        from ddp_audit.hooks import device_digest

        alive = [p for reference in known.on_device if (p := reference()) is not None]
        parts = [getattr(p, "_local_tensor", p) for p in alive]
        arrived_params = device_digest.send_values(parts, budget=digest.PARAMETER_WORDS)
    arrived_grads = known.late
    if arrived_params is None and arrived_grads is None:
        return

    def late(last: bool) -> bool:
        nonlocal arrived_params, arrived_grads
        if arrived_params is not None:
            sums = arrived_params(last)
            if sums is not None:
                step.params = digest.combine([step.params, *sums])
                arrived_params = None
        if arrived_grads is not None:
            values = arrived_grads(last)
            if values is not None:
                step.grads = digest.combine(values)
                step.grad_list = np.array(values, dtype=np.uint64).tobytes()
                arrived_grads = None
        return arrived_params is None and arrived_grads is None

    step.late = late


first_step = _parameters.protect(_first_step)
prepare = _parameters.protect(_prepare)
sampled = _parameters.protect(_sampled)
gradients = _parameters.protect(_gradients)
before = _hook.protect(_before)
after = _hook.protect(_after)
should_stop = hook("channel").protect(PROBE.should_stop)


def _final() -> None:
    """Every byte of the replicated parameters of all optimizers, while they are alive."""
    _, sharded = wrappers.held_parameters()
    found: list[tuple[int, list[Any]]] = []
    for optimizer, known in KNOWN.items():
        if known.started:
            found.append(
                (known.number, [x for p in all_parameters(optimizer) if (x := local_part(p, sharded)) is not None])
            )
    tensors = [t for _, part in sorted(found, key=lambda item: item[0]) for t in part]
    if tensors and all(t.device.type == "cpu" for t in tensors):
        PROBE.final_params = digest.whole_digest(tensors)


final = _parameters.protect(_final)


def install(module: Any) -> None:
    """Register the global hooks of ``torch.optim.optimizer``."""
    pre = getattr(module, "register_optimizer_step_pre_hook", None)
    post = getattr(module, "register_optimizer_step_post_hook", None)
    if pre is None or post is None:
        _hook.unavailable("global optimizer step hooks")
        return

    @unseen
    def step_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            before(optimizer, args, kwargs)

    @unseen
    def step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not after(optimizer, args, kwargs):
            return
        if PROBE.channel is not None and should_stop():
            raise SystemExit(0)

    pre(step_begins)
    post(step_ended)
    group.before_destroy.extend((final, wrappers.times))
    PROBE.at_exit.extend((final, wrappers.times))
