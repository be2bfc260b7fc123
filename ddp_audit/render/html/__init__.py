"""The report for people: one self-contained page that asks for nothing."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_audit.records import Audit


def render(audit: Audit) -> str:
    """The audit as one HTML page.

    It makes no request, and runs under the strict policy that it states itself. It says all with
    style and script switched off. The bytes depend on nothing but the audit and the versions of
    matplotlib and ddp-audit; without matplotlib it holds tables in place of plots.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    from ddp_audit.render.html.page import build

    environment = Environment(
        loader=FunctionLoader(lambda name: _asset(f"templates/{name}")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _asset("style.css"), _asset("script.js")
    text = environment.get_template("report.html.j2").render(
        page=build(audit),
        policy=policy(style, script),
        # Our own files; they hold no "</" by test.
        style=Markup(style),
        script=Markup(script),
    )
    return text.lstrip("\n") + "\n"


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy: only this style sheet and this script, by hash, and images inside the page."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _asset(name: str) -> str:
    return resources.files("ddp_audit.render.html").joinpath(*name.split("/")).read_text(encoding="utf-8")
