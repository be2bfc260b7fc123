"""Options of a probe, and how they travel to the ranks.

The command line makes one ``Settings``; it reaches every process of the job as JSON in the
variable ``_DDP_AUDIT_SETTINGS``. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

VARIABLE = "_DDP_AUDIT_SETTINGS"
"""Set in the environment of a probed job; its absence means: do nothing."""

OFF = "DDP_AUDIT"
"""``DDP_AUDIT=0`` turns every probe into a plain exec."""

JOURNAL_FOLDER = "journal"


class SettingsError(ValueError):
    """An option has a value that cannot be used; the text says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        out: absolute folder of this job's evidence and reports on this node.
        run_id: equal for all ranks that can agree without talking; hex.
        form: ``supervise`` or ``rank``.
        steps: end the job after this many optimizer steps; ``None`` = never.
        every: take the dear signals at steps divisible by this (>= 1).
        collector: auto, store, gloo, nccl or none.
        mesh: named axes, outermost first, sizes >= 1; empty = found by use.
        abort_on: ``error`` ends the job when an error is proven; ``None`` = never.
        deadline: seconds that any wait of ours may take in all.
        live: post digests and warn while the job runs.
        cap_bytes: disk per rank (law 5).
        python: interpreter that has ddp-audit installed, for child processes.
    """

    out: str
    run_id: str
    form: str
    steps: int | None = None
    every: int = 1
    collector: str = "auto"
    mesh: tuple[tuple[str, int], ...] = ()
    abort_on: str | None = None
    deadline: float = 10.0
    live: bool = True
    cap_bytes: int = 256 << 20
    python: str = ""

    @property
    def journal_folder(self) -> Path:
        """Where this node's ranks write."""
        return Path(self.out) / JOURNAL_FOLDER

    def to_json(self) -> str:
        """One line for the environment."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Inverse of ``to_json``; unknown keys of a newer version are left out.

        Raises:
            SettingsError: no JSON object, or a field is missing.
        """
        try:
            raw = json.loads(text)
            known = {f.name for f in fields(cls)}
            values = {k: v for k, v in raw.items() if k in known}
            values["mesh"] = tuple((str(name), int(size)) for name, size in values.get("mesh", ()))
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"{VARIABLE} cannot be read: {error}") from error


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """The settings of the probe this process runs under, or ``None``: not probed, or switched off."""
    text = environ.get(VARIABLE)
    if not text or environ.get(OFF) == "0":
        return None
    try:
        return Settings.from_json(text)
    except SettingsError:
        return None


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """``pp=2,dp=4,tp=2`` -> (("pp", 2), ("dp", 4), ("tp", 2)).

    Raises:
        SettingsError: a part is no NAME=SIZE with a size of at least 1, or a name comes twice.
    """
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdigit() or int(size) < 1:
            raise SettingsError(f"--mesh: '{part.strip()}' is not NAME=SIZE, for instance dp=4")
        if name in dict(axes):
            raise SettingsError(f"--mesh: axis '{name}' is named twice")
        axes.append((name, int(size)))
    return tuple(axes)
