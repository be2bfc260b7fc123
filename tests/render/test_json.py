"""audit.json and its schema."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from importlib import resources
from typing import Any

import pytest
from render import audits

from ddp_audit import records
from ddp_audit.records import Audit
from ddp_audit.render import json as render_json

jsonschema = pytest.importorskip("jsonschema")

SCHEMA: dict[str, Any] = json.loads(
    resources.files("ddp_audit").joinpath("schemas/audit-1.0.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


@pytest.mark.parametrize("name", audits.GALLERY)
def test_valid_sorted_and_read_back(name: str, validator: Any) -> None:
    text = render_json.render(audits.GALLERY[name]())
    value = json.loads(text)
    validator.validate(value)
    assert text == json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert render_json.render(render_json.load(text)) == text


def test_schema_names_exactly_the_fields_of_the_records() -> None:
    for name, definition in SCHEMA["$defs"].items():
        if name == "Tool":
            continue
        names = {f.name for f in fields(getattr(records, name))}
        assert set(definition["properties"]) == names, name
        assert set(definition["required"]) == names, name
    top = {f.name for f in fields(Audit)} - {"tool_version"} | {"schema_version", "tool"}
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == top


def test_contract_of_the_first_version() -> None:
    """Keys that other tools read; 1.x only adds."""
    value = json.loads(render_json.render(audits.failing()))
    assert value["schema_version"] == "1.0"
    assert value["tool"] == {"name": "ddp-audit", "version": "0.1.0"}
    assert {
        "schema_version", "tool", "verdict", "headline", "world_size", "ranks_seen", "replicas", "effective_gpus",
        "effective_gpus_measured", "distinct_fraction", "distinct_fraction_step", "distinct_fraction_epoch",
        "attempts", "groups", "series", "checks", "overhead", "provenance",
    } <= set(value)  # fmt: skip
    check = next(c for c in value["checks"] if c["id"] == "DDP101")
    assert {
        "id", "kind", "outcome", "severity", "message", "cause", "caused_by", "ranks", "steps", "measured", "limit",
        "unit", "levels", "location", "fix", "why_inconclusive", "suppressed",
    } <= set(check)  # fmt: skip
    assert check["location"] == {"file": "train.py", "line": 41}
    assert check["levels"] == ["L1", "L3"]
    assert value["provenance"]["evidence_sha256"] == "ab" * 32


def test_nan_becomes_null(validator: Any) -> None:
    base = audits.passing()
    series = replace(base.series, overlap=((1.0, math.nan), (math.nan, 1.0)))
    value = json.loads(render_json.render(replace(base, series=series)))
    validator.validate(value)
    assert value["series"]["overlap"] == [[1.0, None], [None, 1.0]]


def test_no_path_names_a_user() -> None:
    base = audits.hostile("/srv/alice/train.py")
    base = replace(base, headline="h", checks=base.checks[1:], core_unanswered=(), ranks=(), series=records.Series())
    place = records.Location(file="C:\\Users\\alice\\train.py", line=3)
    base = replace(
        base,
        loaders=(replace(base.loaders[0], class_names=("DataLoader",), dataset_class="D", location=place),),
        samplers=(),
        provenance=replace(audits.passing().provenance, command="ddp-audit report /srv/alice/out -o ~/r.html"),
    )
    value = json.loads(render_json.render(base))
    assert "alice" not in json.dumps(value)
    assert value["provenance"]["command"] == "ddp-audit report out -o r.html"
    assert value["loaders"][0]["location"]["file"] == "train.py"


def test_newer_minor_version_is_read() -> None:
    value = json.loads(render_json.render(audits.failing()))
    value |= {"schema_version": "1.7", "new_key": 1}
    value["checks"][0]["new_key"] = 1
    assert render_json.load(json.dumps(value)).headline == audits.failing().headline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", "no schema_version"),
        ("{}", "no schema_version"),
        ('{"schema_version": "2.0"}', "schema version 2.0, this ddp-audit reads 1.0"),
        ('{"schema_version": "1.0"}', "not whole"),
        ('{"schema_version": "1.0", "tool": {"version": 3}}', "not whole"),
    ],
)
def test_unreadable(text: str, message: str) -> None:
    with pytest.raises(render_json.UnreadableAuditError, match=re.escape(message)):
        render_json.load(text)
