"""Digests of CUDA tensors without ever waiting for the device. Written, never run on a GPU.

A few small kernels on the current stream reduce each tensor to int64 sums with the very weights of
``digest.py``; the sums are copied into a pinned slot of a ring, and an event says when they are
there. The event is queried at later steps, never synchronised. Nothing is launched or allocated
while a graph is captured. ``row_sums`` is plain torch arithmetic, so tests run it on CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ddp_audit.hooks import digest
from ddp_audit.hooks.state import PROBE, after_fork

SLOTS = 32  # requests in flight; a step makes at most about four
SLOT_WORDS = 16384  # int64 per request; a larger one is not taken
CHUNK_WORDS = 1 << 20

Arrived = Callable[[bool], list[int] | None]


def _torch() -> Any:
    return sys.modules["torch"]


def _usable(tensor: Any) -> bool:
    """Whether kernels may be launched for it now."""
    if tensor.device.type == "cpu":
        return True  # tests
    if tensor.device.type != "cuda":
        return False
    cuda = _torch().cuda
    return bool(cuda.is_initialized()) and not cuda.is_current_stream_capturing()


_weights: dict[tuple[Any, ...], Any] = {}


def _on_device(values: digest.U64, key: tuple[Any, ...], device: Any) -> Any:
    """Weights as int64 on the device, cached; they are copied from pageable memory once per shape."""
    full = (*key, str(device))
    if full not in _weights:
        if len(_weights) > 256:
            _weights.clear()
        host = _torch().tensor(values.view(np.int64).tolist(), dtype=_torch().int64)
        if device.type == "cuda":
            host = host.pin_memory()
        _weights[full] = host.to(device, non_blocking=True), host  # the host copy outlives the transfer
    return _weights[full][0]


def words(tensor: Any, num_rows: int) -> Any:
    """The tensor as int64 words, shape (num_rows, words); the values of ``digest.tensor_words``."""
    torch = _torch()
    found = tensor.detach().contiguous()
    if found.is_complex():
        found = torch.view_as_real(found)
    row_bytes = found.numel() * found.element_size() // num_rows
    width = digest.word_size(row_bytes)
    flat = found.reshape(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    if width == 8:
        return flat.view(torch.int64).reshape(num_rows, -1)
    if width == 4:
        return (flat.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF).reshape(num_rows, -1)
    return flat.view(torch.uint8).to(torch.int64).reshape(num_rows, -1)


def row_sums(tensor: Any, num_rows: int, spec: digest.Window) -> Any | None:
    """``digest.row_sums`` on the tensor's device, int64, shape (rows,); ``None`` during capture."""
    torch = _torch()
    if not _usable(tensor):
        return None
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        found = words(tensor, num_rows)
        key = (found.shape[1], spec.stride, spec.tail)
        weights = _on_device(spec.weights, key, tensor.device)
        sums = (found[:, :: spec.stride] * weights).sum(1)
        if spec.tail:
            tail = _on_device(spec.tail_weights, (*key, "tail"), tensor.device)
            sums = sums + (found[:, found.shape[1] - spec.tail :] * tail).sum(1)
    return sums


def whole_sum(tensor: Any) -> Any:
    """Sum over every word, int64, shape (1,), in chunks so that little memory is needed."""
    torch = _torch()
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        found = words(tensor, 1)[0]
        size = min(CHUNK_WORDS, found.numel())
        columns = digest.odd_weights(np.arange(size, dtype=np.uint64))
        weights = _on_device(columns, (size, "whole"), tensor.device)
        total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        for number, start in enumerate(range(0, found.numel(), size)):
            part = found[start : start + size]
            factor = digest.leaf_factor(number)
            total += (part * weights[: part.numel()]).sum() * (factor - (1 << 64) if factor >> 63 else factor)
    return total


class _Ring:
    """Pinned slots and their events."""

    def __init__(self) -> None:
        torch = _torch()
        self.host = torch.empty((SLOTS, SLOT_WORDS), dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(SLOTS)]
        self.busy = [False] * SLOTS

    def send(self, values: Any) -> Arrived | None:
        """Start the copy of int64 values; ``None`` when all slots are taken or it is too long."""
        count = values.numel()
        if count > SLOT_WORDS or all(self.busy):
            return None
        slot = self.busy.index(False)
        self.busy[slot] = True
        self.host[slot, :count].copy_(values, non_blocking=True)
        self.events[slot].record()
        kept = [values]  # alive until the copy is over

        def arrived(last: bool) -> list[int] | None:
            if not self.events[slot].query():
                return None
            kept.clear()
            found = [int(v) & digest.MASK for v in self.host[slot, :count].tolist()]
            self.busy[slot] = False
            return found

        return arrived


_ring: list[_Ring] = []


def _send(values: Any) -> Arrived | None:
    if values.device.type == "cpu":
        found = [int(v) & digest.MASK for v in values.tolist()]
        return lambda last: found
    if not _ring:
        _ring.append(_Ring())
    return _ring[0].send(values)


def send_values(tensors: list[Any], budget: int | None) -> Arrived | None:
    """Digests of tensors, one each: about ``budget`` words, or all when ``None``.

    Returns:
        A function that gives the digests once they are there, else ``None``; or ``None``: not taken.
    """
    torch = _torch()
    if not tensors or not all(_usable(t) for t in tensors) or len({t.device for t in tensors}) != 1:
        return None
    sums: list[Any] = []
    for tensor in tensors:
        if not tensor.numel():
            sums.append(torch.zeros(1, dtype=torch.int64, device=tensor.device))
        elif budget is None:
            sums.append(whole_sum(tensor))
        else:
            num_bytes = tensor.numel() * tensor.element_size()
            found = row_sums(
                tensor, 1, digest.window(1, num_bytes // digest.word_size(num_bytes), num_bytes, budget, 0)
            )
            if found is None:
                return None
            sums.append(found)
    arrived = _send(torch.cat(sums))
    if arrived is None:
        return None

    def values(last: bool) -> list[int] | None:
        found = arrived(last)
        return None if found is None else [digest.mix(v) or 1 for v in found]

    return values


def send_batch(found: digest.BatchDigest) -> Callable[[bool], tuple[digest.U64 | None, int] | None] | None:
    """Finish a batch digest whose sums lie on a device.

    Returns:
        A function that gives (sample digests, content) once they are there; or ``None``: not taken.
    """
    torch = _torch()
    parts = found.device
    if parts is None or found.samples is None:
        return None
    vectors: list[Any] = []
    rows = found.num_samples if parts.rows else 0
    devices = {t.device for t, _ in parts.rows} | {t.device for t in parts.singles}
    if len(devices) != 1:
        return None
    if parts.rows:
        total = None
        for sums, factor in parts.rows:
            scaled = sums * (factor - (1 << 64) if factor >> 63 else factor)
            total = scaled if total is None else total + scaled
        vectors.append(total)
    vectors.extend(parts.singles)
    arrived = _send(torch.cat(vectors))
    if arrived is None:
        return None
    host_sums, num_samples = found.samples, found.num_samples

    def values(last: bool) -> tuple[digest.U64 | None, int] | None:
        words_ = arrived(last)
        if words_ is None:
            return None
        sums = host_sums
        if rows:
            sums = host_sums + np.array(words_[:rows], dtype=np.uint64)
        return digest.finish(num_samples, sums, digest.fold_rests(parts.rests, words_[rows:]))

    return values


def when_arrived(arrived: Arrived, then: Callable[[list[int]], None]) -> None:
    """Call ``then`` at a later step, or at the end, once the values are there."""
    PROBE.waiting.append((arrived, then))


after_fork(_ring.clear)
after_fork(_weights.clear)
