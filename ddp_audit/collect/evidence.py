"""Evidence on disk: ``evidence/meta.json`` beside one ``.npy`` file per table.

The tables are read memory-mapped, so that judging a long job does not load it whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from ddp_audit.records import (
    BATCH,
    EVIDENCE_VERSION,
    FORWARD,
    LIST,
    STEP,
    CommandInfo,
    Evidence,
    JournalInfo,
)

FOLDER = "evidence"
META = "meta.json"
TABLES: Mapping[str, np.dtype[Any]] = {
    "batches": BATCH,
    "batches_key": np.dtype("<u4"),
    "forwards": FORWARD,
    "forwards_key": np.dtype("<u4"),
    "steps": STEP,
    "steps_key": np.dtype("<u4"),
    "lists": LIST,
    "list_values": np.dtype("<u8"),
}

Record = TypeVar("Record")


class EvidenceError(ValueError):
    """A folder cannot be read as evidence. One line: what, where, what to do."""


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _value(hint: Any, raw: Any) -> Any:
    """``raw`` from JSON as the type that ``hint`` names; tuples and records are rebuilt."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if raw is None:
            return None
        return _value(next(part for part in get_args(hint) if part is not type(None)), raw)
    if origin is tuple:
        parts = get_args(hint)
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_value(parts[0], item) for item in raw)
        return tuple(_value(part, item) for part, item in zip(parts, raw, strict=True))
    if is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, raw)
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(hint, type) and not (isinstance(raw, hint) and (hint is bool or not isinstance(raw, bool))):
        raise TypeError(f"{raw!r} is no {hint.__name__}")
    return raw


def decode(cls: type[Record], raw: Any) -> Record:
    """The record of class ``cls`` that ``raw`` (a JSON object) holds; unknown keys are left out.

    Raises:
        TypeError, ValueError: a field is missing or of another type.
    """
    if not isinstance(raw, Mapping):
        raise TypeError(f"{cls.__name__}: a JSON object is needed")
    hints: dict[str, Any] = _hints(cast(Any, cls))
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: _value(hints[key], value) for key, value in raw.items() if key in known})


def read_json(path: Path) -> Any:
    """The JSON value in ``path``.

    Raises:
        EvidenceError: the file cannot be read, or is cut.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise EvidenceError(f"{path} cannot be read ({error.strerror}); check its rights") from error
    except ValueError as error:
        raise EvidenceError(f"{path} is cut or damaged JSON; copy the folder again or run the job again") from error


def check_version(version: str, where: Path) -> None:
    """Refuse evidence that is newer than this tool.

    Raises:
        EvidenceError: names the version that is needed.
    """
    try:
        found = tuple(int(part) for part in version.split("."))
    except ValueError as error:
        raise EvidenceError(f"{where}: '{version}' is no evidence version; the folder is damaged") from error
    if found > tuple(int(part) for part in EVIDENCE_VERSION.split(".")):
        raise EvidenceError(
            f"{where} holds evidence of version {version}, this ddp-audit reads up to {EVIDENCE_VERSION}; "
            f"install a ddp-audit that reads evidence {version}"
        )


def _meta(evidence: Evidence) -> dict[str, Any]:
    return {
        "version": evidence.version,
        "command": asdict(evidence.command),
        "ranks_expected": evidence.ranks_expected,
        "journals": [asdict(journal) for journal in evidence.journals],
        "notes": list(evidence.notes),
        "running": evidence.running,
    }


def digest(evidence: Evidence) -> str:
    """SHA-256 over all that ``evidence`` holds, its own ``sha256`` aside; hex."""
    total = hashlib.sha256(json.dumps(_meta(evidence), sort_keys=True, separators=(",", ":")).encode())
    for name in TABLES:
        table: npt.NDArray[Any] = np.ascontiguousarray(getattr(evidence, name))
        total.update(f"{name} {table.shape}\n".encode())
        total.update(table.tobytes())
    return total.hexdigest()


def seal(evidence: Evidence) -> Evidence:
    """``evidence`` with its digest filled in."""
    return replace(evidence, sha256=digest(evidence))


def save(evidence: Evidence, folder: Path) -> Path:
    """Write ``folder/evidence/``; an older one there is replaced as a whole.

    Raises:
        OSError: the folder cannot be written.
    """
    target = folder / FOLDER
    fresh = folder / f".{FOLDER}.{os.getpid()}.new"
    stale = folder / f".{FOLDER}.{os.getpid()}.old"
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    try:
        for name in TABLES:
            np.save(fresh / f"{name}.npy", np.ascontiguousarray(getattr(evidence, name)), allow_pickle=False)
        meta = {**_meta(evidence), "sha256": evidence.sha256 or digest(evidence)}
        (fresh / META).write_text(json.dumps(meta, sort_keys=True, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            target.rename(stale)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(stale, ignore_errors=True)
    return target


def find(folder: Path) -> Path | None:
    """The stored evidence in or at ``folder``; ``None`` when there is none."""
    for candidate in (folder, folder / FOLDER):
        if (candidate / META).is_file():
            return candidate
    return None


def _table(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path} is missing or damaged; copy the folder again or run the job again") from error
    if array.dtype != dtype:
        raise EvidenceError(f"{path} holds other columns than evidence {EVIDENCE_VERSION}; run the job again")
    return array


def load(folder: Path) -> Evidence:
    """Read what ``save`` wrote; ``folder`` is the output folder or its ``evidence/``.

    Raises:
        EvidenceError: no evidence there, cut or damaged, or of a newer version.
    """
    place = find(folder)
    if place is None:
        raise EvidenceError(f"{folder} holds no evidence; name the output folder of 'ddp-audit probe'")
    meta = read_json(place / META)
    if not isinstance(meta, dict):
        raise EvidenceError(f"{place / META} is no JSON object; copy the folder again or run the job again")
    check_version(str(meta.get("version")), place)
    try:
        evidence = Evidence(
            version=str(meta["version"]),
            command=decode(CommandInfo, meta["command"]),
            ranks_expected=meta["ranks_expected"],
            journals=tuple(decode(JournalInfo, journal) for journal in meta["journals"]),
            notes=tuple(str(note) for note in meta["notes"]),
            running=bool(meta["running"]),
            sha256=str(meta["sha256"]),
            **{name: _table(place / f"{name}.npy", dtype) for name, dtype in TABLES.items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError(
            f"{place / META} lacks a field or holds a wrong one ({error}); run the job again"
        ) from error
    if digest(evidence) != evidence.sha256:
        raise EvidenceError(f"{place} does not match its own checksum; copy the folder again or run the job again")
    return evidence
