"""Data-parallel wrappers: which ranks share gradients, over which parameters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ddp_audit.hooks import digest
from ddp_audit.hooks.guard import hook, unseen
from ddp_audit.hooks.places import user_location
from ddp_audit.hooks.state import PROBE, after_fork
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import Location, MeshInfo, WrapperInfo

_hook = hook("wrappers")
_fsdp = hook("fsdp")


@dataclass(slots=True, eq=False)
class Wrapper:
    """One wrapped module. FSDP units inside another share its number."""

    number: int
    kind: str
    location: Location | None = None
    announced: bool = False
    sharded: bool = False
    info: WrapperInfo | None = None


WRAPPERS: WeakIdMap[Wrapper] = WeakIdMap()
_next = [0]
UNSETTLED: list[None] = []
"""Not empty while fully sharded modules wait to be announced."""


def _forget() -> None:
    WRAPPERS.clear()
    _next[0] = 0


after_fork(_forget)


def submodules(module: Any) -> Iterator[Any]:
    """The module and all below it, by their dictionaries: no method of the user's runs."""
    stack, seen = [module], set()
    while stack:
        one = stack.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        stack.extend(reversed(list(vars(one).get("_modules", {}).values())))


def parameters_of(module: Any) -> list[Any]:
    """Parameters of the module, each once, in order of registration."""
    found: dict[int, Any] = {}
    for one in submodules(module):
        for parameter in vars(one).get("_parameters", {}).values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def num_buffers(module: Any) -> int:
    """Number of buffers of the module."""
    return sum(b is not None for one in submodules(module) for b in vars(one).get("_buffers", {}).values())


def mesh_info(mesh: Any) -> MeshInfo | None:
    """A device mesh as plain numbers."""
    if mesh is None:
        return None
    ranks = mesh.mesh
    names = mesh.mesh_dim_names
    return MeshInfo(
        shape=tuple(int(n) for n in ranks.shape),
        dim_names=tuple(str(n) for n in names) if names else None,
        ranks=tuple(int(r) for r in ranks.reshape(-1).tolist()),
    )


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group; empty when there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ()
    if group is None:
        return tuple(range(dist.get_world_size()))
    return tuple(int(r) for r in dist.get_process_group_ranks(group))


def is_plain(tensor: Any) -> bool:
    """Whether it is a dense tensor on the CPU with memory of its own."""
    return (
        not hasattr(tensor, "_local_tensor") and tensor.device.type == "cpu" and digest.dense_parts(tensor) is not None
    )


def _announce(module: Any, wrapper: Wrapper, inner: Any, ranks: tuple[int, ...], mesh: Any, **flags: Any) -> None:
    parameters = parameters_of(inner)
    sampled = None
    if not wrapper.sharded and parameters and all(is_plain(p) for p in parameters):
        sampled = digest.combine([digest.sampled_digest(p, digest.PARAMETER_WORDS) for p in parameters])
    wrapper.announced = True
    PROBE.wrapper_seen = True
    PROBE.prove("wrapper")
    if len(ranks) > 1:
        PROBE.reads_apart_from(ranks)
    wrapper.info = WrapperInfo(
        wrapper=wrapper.number,
        kind=wrapper.kind,
        module_class=flags.pop("module_class", None) or type(inner).__name__,
        group_ranks=ranks,
        mesh=mesh_info(mesh),
        num_parameters=len(parameters),
        num_trainable=sum(bool(p.requires_grad) for p in parameters),
        num_buffers=num_buffers(inner),
        find_unused_parameters=flags.get("find_unused_parameters"),
        broadcast_buffers=flags.get("broadcast_buffers"),
        location=wrapper.location,
        params_digest=sampled,
    )
    PROBE.event("wrapper", asdict(wrapper.info))


DDP_TIMES = {  # our field: DDP's, in nanoseconds
    "forward_us": "avg_forward_compute_time",
    "backward_us": "avg_backward_compute_time",
    "communication_us": "avg_backward_comm_time",
    "overlap_us": "avg_backward_compute_comm_overlap_time",
}


def _times() -> None:
    """Tell what DDP logged of its own times, once the job is over. Reading the log copies numbers, no more."""
    for module, wrapper in WRAPPERS.items():
        if wrapper.kind != "ddp" or wrapper.info is None:
            continue
        log = module._get_ddp_logging_data()
        times = {ours: int(log[theirs]) // 1000 for ours, theirs in DDP_TIMES.items() if log.get(theirs)}
        if times:
            PROBE.event("wrapper", {**asdict(wrapper.info), **times})
        wrapper.info = None  # once: at the end of the group, else at that of the process


def _new(module: Any, kind: str) -> Wrapper:
    wrapper = Wrapper(number=_next[0], kind=kind, location=user_location(2))
    _next[0] += 1
    WRAPPERS.set(module, wrapper)
    return wrapper


def _ddp(module: Any) -> None:
    own = vars(module)
    wrapper = _new(module, "ddp")
    _announce(
        module,
        wrapper,
        own["_modules"]["module"],
        group_ranks(own.get("process_group")),
        own.get("_device_mesh", own.get("device_mesh")),
        find_unused_parameters=own.get("find_unused_parameters"),
        broadcast_buffers=own.get("forward_sync_buffers", own.get("broadcast_buffers")),
    )
    from ddp_audit.hooks import gradient

    gradient.watch(module, wrapper.number)


def _data_parallel(module: Any) -> None:
    wrapper = _new(module, "data_parallel")
    _announce(module, wrapper, vars(module)["_modules"]["module"], (PROBE.rank,), None)


_depth = [0]


def _fsdp1(module: Any) -> None:
    """Units of an auto-wrap policy are built inside the outermost; only that one is a wrapper."""
    own = vars(module)
    wrapper = _new(module, "fsdp1")
    strategy = getattr(own.get("sharding_strategy"), "name", "")
    wrapper.sharded = strategy != "NO_SHARD"
    ranks = group_ranks(own.get("process_group"))
    inter = own.get("_inter_node_pg")
    mesh = own.get("_device_mesh")
    if mesh is not None:
        ranks = tuple(sorted(int(r) for r in mesh.mesh.reshape(-1).tolist()))
    elif inter is not None:
        ranks = group_ranks(None)
    _announce(
        module, wrapper, module, ranks, mesh, module_class=type(own["_modules"].get("_fsdp_wrapped_module")).__name__
    )


def fsdp_meshes(module: Any) -> list[Any]:
    """Meshes over which a module was fully sharded (FSDP2); private fields, so it may find none."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [group] if group is not None else []
    return [group.mesh_info.mesh for group in groups if getattr(group, "mesh_info", None) is not None]


def _fsdp2(result: Any, mesh: Any) -> None:
    """Noted now, announced before the first forward or step: only then it shows which is the root."""
    for module in result if isinstance(result, (list, tuple)) else [result]:
        if WRAPPERS.get(module) is None:
            wrapper = Wrapper(number=-1, kind="fsdp2", location=user_location(2), sharded=True)
            WRAPPERS.set(module, wrapper)
            UNSETTLED.append(None)
    PROBE.wrapper_seen = True
    PROBE.prove("wrapper")


def _settle() -> None:
    """Announce the roots among the fully sharded modules that are not announced yet."""
    waiting = [(m, w) for m, w in WRAPPERS.items() if w.kind == "fsdp2" and not w.announced]
    UNSETTLED.clear()
    if not waiting:
        return
    inside: set[int] = set()
    for module, _ in waiting:
        inside |= {id(one) for one in submodules(module) if one is not module}
    for module, wrapper in waiting:
        wrapper.announced = True
        if id(module) in inside:
            continue
        wrapper.number = _next[0]
        _next[0] += 1
        units = [module] + [m for m, _ in waiting if m is not module and any(m is s for s in submodules(module))]
        meshes = [mesh for unit in units for mesh in fsdp_meshes(unit)]
        mesh = meshes[0] if meshes else None
        ranks = tuple(int(r) for r in mesh.mesh.reshape(-1).tolist()) if mesh is not None else group_ranks(None)
        name = next((k.__name__ for k in type(module).__mro__[1:] if k.__name__ != "FSDPModule"), type(module).__name__)
        _announce(module, wrapper, module, ranks, mesh, module_class=name)
        for unit, other in waiting:
            if any(unit is one for one in units):
                other.number = wrapper.number


settle = _fsdp.protect(_settle)
times = _hook.protect(_times)
ddp = _hook.protect(_ddp)
data_parallel = _hook.protect(_data_parallel)
fsdp1 = _fsdp.protect(_fsdp1)
fsdp2 = _fsdp.protect(_fsdp2)


def held_parameters() -> tuple[set[int], set[int]]:
    """Identities of the parameters that any wrapper holds, and of those that are shards."""
    all_ids: set[int] = set()
    sharded: set[int] = set()
    for module, wrapper in WRAPPERS.items():
        ids = {id(p) for p in parameters_of(module)}
        all_ids |= ids
        if wrapper.sharded:
            sharded |= ids
    return all_ids, sharded


def _after_init(kind: Any, after: Any) -> None:
    original = kind.__init__

    @unseen
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self)

    kind.__init__ = init


def install_ddp(module: Any) -> None:
    """Patch ``DistributedDataParallel.__init__``."""
    _after_init(module.DistributedDataParallel, ddp)


def install_data_parallel(module: Any) -> None:
    """Patch ``DataParallel.__init__``."""
    _after_init(module.DataParallel, data_parallel)


def install_fsdp1(module: Any) -> None:
    """Patch ``FullyShardedDataParallel.__init__``."""
    kind = module.FullyShardedDataParallel
    original = kind.__init__

    @unseen
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _depth[0] += 1
        try:
            original(self, *args, **kwargs)
        finally:
            _depth[0] -= 1
        if _depth[0] == 0:
            fsdp1(self)

    kind.__init__ = init


def install_fsdp2(module: Any) -> None:
    """Patch ``fully_shard`` where it is defined, before it is re-exported."""
    original = getattr(module, "fully_shard", None)
    if original is None:
        _fsdp.unavailable("fully_shard")
        return

    @unseen
    @functools.wraps(original)  # copies the ``.state`` function along
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        fsdp2(result, kwargs.get("mesh"))
        return result

    module.fully_shard = fully_shard
