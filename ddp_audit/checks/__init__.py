"""All checks, in order of their ids. A check is a module with ``CHECK`` and ``run(view)``.

A new one goes into ``ALL_CHECKS`` and needs nothing else.
"""

from __future__ import annotations

from typing import Protocol

from ddp_audit.checks import (
    ddp101_identical_data_across_ranks,
    ddp102_overlapping_shards,
    ddp103_full_dataset_per_rank,
    ddp104_double_sharding,
    ddp105_duplicates_across_workers,
    ddp106_set_epoch_missing,
    ddp107_uneven_shards,
    ddp108_dropped_data,
    ddp201_no_process_group,
    ddp202_gradients_not_synced,
    ddp203_ddp_forward_bypassed,
    ddp206_initial_weights_differ,
    ddp207_params_diverge,
)
from ddp_audit.checks.streams import View
from ddp_audit.records import CheckInfo, Finding


class Check(Protocol):
    """One judgement: its description, and a pure function over the judged attempt."""

    CHECK: CheckInfo

    def run(self, view: View) -> Finding:
        """Judge; never writes, prints or talks to other ranks."""


ALL_CHECKS: tuple[Check, ...] = (
    ddp101_identical_data_across_ranks,
    ddp102_overlapping_shards,
    ddp103_full_dataset_per_rank,
    ddp104_double_sharding,
    ddp105_duplicates_across_workers,
    ddp106_set_epoch_missing,
    ddp107_uneven_shards,
    ddp108_dropped_data,
    ddp201_no_process_group,
    ddp202_gradients_not_synced,
    ddp203_ddp_forward_bypassed,
    ddp206_initial_weights_differ,
    ddp207_params_diverge,
)
"""Literal on purpose: what is audited can be read here."""

ALL_INFOS: tuple[CheckInfo, ...] = tuple(check.CHECK for check in ALL_CHECKS)
"""Their descriptions, for lists and docs."""
