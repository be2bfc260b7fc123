"""Install functions for modules that several hooks share."""

from __future__ import annotations

from typing import Any

from ddp_audit.hooks import forward, gradient, wrappers


def parallel_distributed(module: Any) -> None:
    """``torch.nn.parallel.distributed``."""
    wrappers.install_ddp(module)
    forward.install_ddp(module)


def data_parallel(module: Any) -> None:
    """``torch.nn.parallel.data_parallel``."""
    wrappers.install_data_parallel(module)
    forward.install_data_parallel(module)


def fsdp1(module: Any) -> None:
    """``torch.distributed.fsdp.fully_sharded_data_parallel``."""
    wrappers.install_fsdp1(module)
    forward.install_fsdp1(module)


def fsdp2(module: Any) -> None:
    """``torch.distributed.fsdp._fully_shard._fully_shard``."""
    wrappers.install_fsdp2(module)
    forward.install_fsdp2(module)


def fsdp2_groups(module: Any) -> None:
    """``torch.distributed.fsdp._fully_shard._fsdp_param_group``."""
    gradient.install_fsdp2(module)
