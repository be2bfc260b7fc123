"""Which ranks hold one copy of the model, and which copies share gradients.

Axes are known by use: what a data-parallel wrapper was given is a data axis, what DTensor
placements shard is a model axis. ``--mesh`` overrules both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ddp_audit.records import JournalInfo, MeshInfo

DATA_AXES = ("dp", "data", "fsdp", "replicate", "shard", "hsdp", "ddp")
"""Beginnings of axis names that carry data; every other axis of ``--mesh`` holds parts of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Data groups of an attempt.

    Attributes:
        groups: per data group its replicas, each the ranks that hold one copy, ascending.
        model_word: what the ranks inside a replica are, for the headline; empty when one each.
        unknown: why the layout cannot be told; the data checks are inconclusive then.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    model_word: str = ""
    unknown: str | None = None


def _is_data(axis: str) -> bool:
    return axis.startswith(DATA_AXES)


def _lines(mesh: np.ndarray, dims: Iterable[int]) -> list[list[int]]:
    """Ranks of ``mesh`` that differ only along ``dims``."""
    dims = sorted(set(dims))
    rest = [d for d in range(mesh.ndim) if d not in dims]
    size = prod(mesh.shape[d] for d in dims)
    lines: list[list[int]] = mesh.transpose(*rest, *dims).reshape(-1, size).tolist()
    return lines


class _Sets:
    """Union-find over ranks."""

    def __init__(self, items: Iterable[int]) -> None:
        self.parent = {item: item for item in items}

    def root(self, item: int) -> int:
        while self.parent[item] != item:
            item = self.parent[item]
        return item

    def join(self, items: Iterable[int]) -> None:
        known = [item for item in items if item in self.parent]
        for item in known[1:]:
            a, b = self.root(known[0]), self.root(item)
            self.parent[max(a, b)] = min(a, b)

    def classes(self) -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for item in sorted(self.parent):
            found.setdefault(self.root(item), []).append(item)
        return [tuple(items) for _, items in sorted(found.items())]


def _array(mesh: MeshInfo) -> np.ndarray | None:
    if prod(mesh.shape) != len(mesh.ranks):
        return None
    return np.array(mesh.ranks).reshape(mesh.shape)


def _named(ranks: Iterable[int], axes: tuple[tuple[str, int], ...], world: int | None) -> Layout:
    members = sorted(ranks)
    shape = tuple(size for _, size in axes)
    if prod(shape) != (world or len(members)):
        product = " x ".join(f"{name}={size}" for name, size in axes)
        return Layout(
            groups=((tuple((rank,) for rank in members),) if members else ()),
            unknown=f"--mesh {product} holds {prod(shape)} ranks, the job has {world or len(members)}; correct --mesh",
        )
    mesh = np.arange(prod(shape)).reshape(shape)
    model = [d for d, (name, _) in enumerate(axes) if not _is_data(name)]
    sets = _Sets(members)
    for line in _lines(mesh, model):
        sets.join(line)
    names = {name for d, (name, size) in enumerate(axes) if d in model and size > 1}
    word = "tensor-parallel" if names == {"tp"} else ("model-parallel" if names else "")
    return Layout(groups=(tuple(sets.classes()),), model_word=word)


def find_layout(journals: Mapping[int, JournalInfo], axes: tuple[tuple[str, int], ...], world: int | None) -> Layout:
    """The layout of an attempt.

    Args:
        journals: per rank.
        axes: of ``--mesh``, outermost first; empty = found by use.
        world: ranks expected.
    """
    if axes:
        return _named(journals, axes, world)
    copies, links = _Sets(journals), _Sets(journals)
    word = ""
    has_wrapper = False
    for info in journals.values():
        for parameters in info.parameters:
            mesh = _array(parameters.model_mesh) if parameters.model_mesh is not None else None
            if mesh is None or parameters.model_mesh is None or not parameters.model_dims:
                continue
            for line in _lines(mesh, parameters.model_dims):
                if info.rank in line:
                    copies.join(line)
                    links.join(line)
            names = parameters.model_mesh.dim_names
            used = {names[d] for d in parameters.model_dims} if names is not None else {"tp"}
            word = "tensor-parallel" if used <= {"tp", "tensor", "tensor_parallel", "mp"} else "model-parallel"
        for wrapper in info.wrappers:
            if wrapper.kind == "data_parallel":
                continue
            has_wrapper = True
            links.join(wrapper.group_ranks)
    if not has_wrapper:
        # nothing says which ranks share gradients: all copies are meant to, until proven otherwise
        links.join(sorted(journals))
    groups: list[tuple[tuple[int, ...], ...]] = []
    replicas = copies.classes()
    for members in links.classes():
        groups.append(tuple(replica for replica in replicas if replica[0] in members))
    if has_wrapper and all(len(group) == 1 for group in groups) and len(groups) > 1:
        # wrappers over single ranks (a group of one by mistake, or a wrapper without a group)
        groups = [tuple(replicas)]
    return Layout(groups=tuple(groups), model_word=word, unknown=_unknown(journals, groups))


def _unknown(journals: Mapping[int, JournalInfo], groups: list[tuple[tuple[int, ...], ...]]) -> str | None:
    """Copies of one model have parameters of the same shapes; else this is model-parallel by hand."""
    for group in groups:
        shapes: dict[int, set[int]] = {}
        for replica in group:
            for parameters in journals[replica[0]].parameters:
                if parameters.num_dtensors == 0:
                    shapes.setdefault(parameters.optimizer, set()).add(parameters.layout_digest)
        if any(len(found) > 1 for found in shapes.values()):
            if any(w.kind.startswith("fsdp") for replica in group for w in journals[replica[0]].wrappers):
                continue  # flattened shards may differ in size from rank to rank
            return (
                "the ranks hold parameters of different shapes, so which of them are replicas is unknown; "
                "name the axes, for instance --mesh dp=2,tp=2"
            )
    return None
