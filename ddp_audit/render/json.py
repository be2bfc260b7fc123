"""``audit.json``: the audit for machines, and back. The schema is ``schemas/audit-1.0.json``."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from enum import Enum
from typing import Any

from ddp_audit.records import SCHEMA_VERSION, Audit, Location
from ddp_audit.render import words

TOOL = "ddp-audit"


class UnreadableAuditError(ValueError):
    """The text is no ``audit.json`` that this version can read; the message says why and what to do."""


def render(audit: Audit) -> str:
    """The audit as JSON, keys sorted, numbers unrounded, with a final line feed.

    NaN and infinities become null, enums their values. Holds indices, sizes, times and class names
    only: absolute paths are cut to their last part (law 4).
    """
    value = _value(audit)
    value["schema_version"] = SCHEMA_VERSION
    value["tool"] = {"name": TOOL, "version": value.pop("tool_version")}
    value["provenance"]["command"] = words.public_command(audit.provenance.command)
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def load(text: str) -> Audit:
    """Read what ``render`` wrote, also of an older 1.x version; unknown keys of it are left out.

    Raises:
        UnreadableAuditError: no JSON, another schema version, or a field is missing.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UnreadableAuditError(f"this is not JSON: {error}") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not isinstance(version, str):
        raise UnreadableAuditError("this JSON has no schema_version; expected an audit.json of ddp-audit")
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise UnreadableAuditError(
            f"audit.json has schema version {version}, this ddp-audit reads {SCHEMA_VERSION}; use a newer ddp-audit"
        )
    try:
        value["tool_version"] = value["tool"]["version"]
        audit = _record(Audit, value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableAuditError(f"audit.json is not whole: {error}") from error
    assert isinstance(audit, Audit)
    return audit


def _value(item: Any) -> Any:
    if isinstance(item, Location):
        return {"file": words.public_path(item.file), "line": item.line}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: _value(getattr(item, f.name)) for f in dataclasses.fields(item)}
    if isinstance(item, (tuple, list)):
        return [_value(part) for part in item]
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, bool) or item is None:
        return item
    if isinstance(item, str):
        return words.plain(item)
    if isinstance(item, int):
        return int(item)
    number = float(item)  # also numpy's scalars
    return number if math.isfinite(number) else None


def _record(cls: type, value: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {}
    for field in dataclasses.fields(cls):
        if field.name in value:
            known[field.name] = _field(hints[field.name], value[field.name])
    return cls(**known)


def _field(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return None if value is None else _field(inner, value)
    if origin is tuple:
        parts = typing.get_args(hint)
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_field(parts[0], item) for item in value)
        if len(parts) != len(value):
            raise ValueError(f"expected {len(parts)} values, found {len(value)}")
        return tuple(_field(part, item) for part, item in zip(parts, value, strict=True))
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return _record(hint, value)
        if issubclass(hint, Enum):
            return hint(value)
        if hint is float:
            if value is None:
                return math.nan
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"expected a number, found {type(value).__name__}")
            return value  # an int stays one, so that writing it again gives the same bytes
        if not isinstance(value, hint):
            raise TypeError(f"expected {hint.__name__}, found {type(value).__name__}")
    return value
