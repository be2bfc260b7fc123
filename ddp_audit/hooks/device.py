"""The device of this rank, and its identity. CUDA is asked only after the job's own first use of it."""

from __future__ import annotations

import sys
from typing import Any

from ddp_audit.hooks.guard import hook
from ddp_audit.hooks.state import PROBE

_hook = hook("device")


def cuda_in_use() -> bool:
    """Whether the job itself has initialised CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(cuda is not None and cuda.is_initialized())


def _found(device: Any) -> None:
    kind, index = str(device.type), device.index
    uuid = None
    if kind == "cuda" and cuda_in_use():
        index = sys.modules["torch"].cuda.current_device() if index is None else index
        properties = sys.modules["torch"].cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "")) or None
    name = kind if index is None or kind == "cpu" else f"{kind}:{index}"
    PROBE.event("device", {"device": name, "device_uuid": uuid})


found = _hook.protect(_found)
