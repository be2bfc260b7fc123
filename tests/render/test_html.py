"""The page, without a browser: policy, safe text, same bytes, the same outcomes as the other formats."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render import audits

from ddp_audit.records import Audit, Outcome, Verdict
from ddp_audit.render import html, text
from ddp_audit.render import json as render_json
from ddp_audit.render.html import page as pages
from ddp_audit.render.html import plots

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def shape(self) -> list[tuple[str, list[str]]]:
        return [(tag, sorted(attributes)) for tag, attributes in self.tags]


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    return {name: html.render(make()) for name, make in audits.GALLERY.items()}


@pytest.mark.parametrize("name", audits.GALLERY)
def test_nothing_is_asked_for_and_ids_are_unique(name: str, rendered: dict[str, str]) -> None:
    reader = Reader(rendered[name])
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in reader.tags:
        assert "style" not in attributes, f"<{tag}> has an inline style, which the policy blocks"
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("src", "href", "xlink:href", "action", "data", "poster"):
            target = attributes.get(key)
            assert target is None or target.startswith(("#", "data:image/png;base64,")), (tag, target)
        assert tag not in ("iframe", "object", "embed", "form", "link", "base", "noscript")
    assert "url(http" not in rendered[name]
    assert "@import" not in rendered[name]


@pytest.mark.parametrize("name", audits.GALLERY)
def test_links_inside_the_page_lead_somewhere(name: str, rendered: dict[str, str]) -> None:
    reader = Reader(rendered[name])
    ids = {attributes.get("id") for _, attributes in reader.tags}
    for _, attributes in reader.tags:
        target = attributes.get("href") or ""
        if target.startswith("#"):
            assert target[1:] in ids
        for reference in re.findall(r"url\(#([^)]+)\)", " ".join(value or "" for value in attributes.values())):
            assert reference in ids


def test_policy_matches_what_is_in_the_page(rendered: dict[str, str]) -> None:
    page = rendered["failing"]
    style = page.split("<style>")[1].split("</style>")[0]
    script = page.split("<script>")[1].split("</script>")[0]
    policy = html.policy(style, script)
    stated = next(a["content"] for t, a in Reader(page).tags if t == "meta" and "http-equiv" in a)
    assert stated == policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_title_and_heading_start_with_the_verdict(rendered: dict[str, str]) -> None:
    for name, word in (("failing", "FAIL"), ("inconclusive", "INCONCLUSIVE"), ("passing", "PASS"), ("uneven", "WARN")):
        assert f"<title>{word}: " in rendered[name]
        assert re.search(rf"<h1>.{{0,120}}{word.lower()}", rendered[name])


@pytest.mark.parametrize("name", audits.GALLERY)
def test_same_bytes_apart_from_the_time(name: str, rendered: dict[str, str]) -> None:
    audit = audits.GALLERY[name]()
    assert html.render(audit) == rendered[name]
    later = replace(audit, provenance=replace(audit.provenance, created=audit.provenance.created + 86_400))
    old, new = rendered[name].splitlines(), html.render(later).splitlines()
    assert [a for a, b in zip(old, new, strict=True) if a != b and "page made" not in a] == []


@pytest.mark.parametrize("name", audits.GALLERY)
def test_all_formats_agree(name: str, rendered: dict[str, str]) -> None:
    audit = audits.GALLERY[name]()
    outcomes = {c["id"]: c["outcome"] for c in json.loads(render_json.render(audit))["checks"]}
    words = {"error": "fail", "warning": "fail", "note": "fail", "passed": "pass", "check crashed": "error"}
    shown = pages.outcomes(pages.build(audit))
    assert {i: words.get(word, word).replace(" ", "_") for i, word in shown.items()} == outcomes
    on_page = Reader(rendered[name]).words
    on_terminal = text.render(audit, color=False)
    for finding in audit.checks:
        assert finding.id in on_page
        if finding.outcome is Outcome.FAIL:
            assert finding.id in on_terminal
    assert audit.headline in on_page
    assert audit.headline in " ".join(on_terminal.split())


def test_consequences_stand_under_their_cause(rendered: dict[str, str]) -> None:
    page = rendered["failing"]
    card = page[page.index('<article class="card fail" id="DDP101"') :]
    assert 'id="DDP103"' in card[: card.index("</article>")]
    assert '<article class="card warn" id="DDP103"' not in page


def test_every_finding_survives_odd_causes() -> None:
    base = audits.failing()
    for cause in ("DDP103", "DDP106", "DDP999"):
        checks = tuple(
            replace(f, caused_by=cause) if f.id == "DDP101" else replace(f, caused_by="DDP101") if f.id == cause else f
            for f in base.checks
        )
        audit = replace(base, checks=checks)
        out = text.render(audit, color=False)
        for name in ("DDP101", "DDP103", "DDP106"):
            assert len(re.findall(rf"[✖▲] {name}", out)) == 1
        Reader(html.render(audit))


ATTACKS = ["</script><img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "{{ 7*7 }}", "</style><base href=//x>"]


@given(st.one_of(st.sampled_from(ATTACKS), st.text(max_size=40)))
@settings(max_examples=12, deadline=None)
def test_user_text_makes_no_element(value: str) -> None:
    value = f"x{value}"
    reader = Reader(html.render(audits.hostile(value)))
    calm = Reader(html.render(audits.hostile("xword")))
    # A snippet gets a frame and a button, a sentence none: compare what neither touches.
    quiet = {"p", "pre", "code", "button", "div"}
    assert [t for t in reader.shape if t[0] not in quiet] == [t for t in calm.shape if t[0] not in quiet]
    assert not {"img", "base", "iframe"} & {tag for tag, _ in reader.tags}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_shown_as_text(attack: str) -> None:
    page = html.render(audits.hostile(attack))
    assert attack not in page or "<" not in attack
    assert " ".join(attack.split()) in Reader(page).words


@pytest.mark.parametrize(("name", "most"), [("large", 1_000_000), ("failing", 300_000), ("eight", 300_000)])
def test_size(name: str, most: int, rendered: dict[str, str]) -> None:
    page = html.render(audits.passing(8)) if name == "eight" else rendered[name]
    assert len(page.encode()) < most


@pytest.mark.parametrize("problem", [ImportError("no matplotlib"), RuntimeError("broken font cache")])
def test_without_matplotlib_tables_stand_alone(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise problem
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    page = html.render(audits.failing())
    assert "<svg class=" not in page
    assert "No plots: matplotlib" in Reader(page).words
    assert "Share of samples that two ranks have in common" in page
    assert "<details open><summary>The same as a table" in page


def test_hook_states_and_notes_are_named(rendered: dict[str, str]) -> None:
    words = Reader(rendered["inconclusive"]).words
    for part in ("gradients", "AttributeError", "journal of rank 1 is cut", "no journal"):
        assert part in words


def test_running_job_says_so() -> None:
    assert "still running" in Reader(html.render(replace(audits.passing(), running=True))).words


def test_inconclusive_is_never_green(rendered: dict[str, str]) -> None:
    assert '<header class="band inconclusive">' in rendered["inconclusive"]
    assert not re.search(r'class="mark pass"><span[^>]*>[^<]*</span> inconclusive', rendered["inconclusive"])


def test_assets_cannot_end_their_own_element() -> None:
    for name in ("style.css", "script.js"):
        assert "</" not in html._asset(name)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_of_every_pair_of_colors() -> None:
    css = html._asset("style.css")
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in blocks[:2])
    for scheme in (light, dark):
        for ink in ("ink", "muted", "link", "fail", "warn", "pass", "open"):
            for ground in ("page", "card", "soft", f"{ink}-soft"):
                if ground not in scheme:
                    continue
                a, b = sorted((_luminance(scheme[ink]), _luminance(scheme[ground])), reverse=True)
                assert (a + 0.05) / (b + 0.05) >= 4.5, (ink, ground)
        for ground in ("fail-soft", "warn-soft", "pass-soft", "open-soft"):
            for ink in ("ink", "muted", "link"):
                a, b = sorted((_luminance(scheme[ink]), _luminance(scheme[ground])), reverse=True)
                assert (a + 0.05) / (b + 0.05) >= 4.5, (ink, ground)


def test_plots_hold_no_style_and_ignore_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    plain = plots.shard_bars((10, 10, 7), (0, 1, 2), 9.0, "mean 9")
    matplotlib.rcParams["font.size"] = 30
    try:
        assert plots.shard_bars((10, 10, 7), (0, 1, 2), 9.0, "mean 9") == plain
        assert matplotlib.rcParams["font.size"] == 30, "settings of the caller are left as they were"
    finally:
        matplotlib.rcdefaults()
    root = ElementTree.fromstring(plain)
    assert not [e for e in root.iter() if "style" in e.attrib or e.tag.endswith(("}style", "}metadata"))]
    assert ">10</" in plain  # text stays text
    assert ">mean 9</" in plain


@pytest.mark.parametrize(
    "change",
    [
        {"heat": ((0,), (0, 1)), "heat_ranks": (0, 1)},
        {"heat": ((),), "heat_ranks": (0,)},
        {"heat": ((-1, -1), (-1, -1)), "heat_ranks": (0, 1), "heat_steps": (0, 5)},
        {"heat": ((0, 0),), "heat_ranks": (0,), "heat_steps": ()},
        {"shards": (0, 0), "shard_ranks": (0, 1)},
        {"shards": (1, 2, 3), "shard_ranks": (0, 1)},
        {"overlap": ((float("nan"),) * 2,) * 2, "overlap_ranks": (0, 1)},
        {"overlap": ((1.0,),), "overlap_ranks": (0, 1)},
        {"dataset_length": 0},
        {"dataset_length": None},
    ],
)
def test_odd_series_never_break_the_page(change: dict[str, Any]) -> None:
    base = audits.failing()
    Reader(html.render(replace(base, series=replace(base.series, **change))))


def test_unknown_everywhere() -> None:
    base = audits.nothing()
    source = replace(
        base.provenance, created=float("nan"), torch="", backend="", python="", launcher="", command="", run_id=""
    )
    audit = replace(base, headline="", checks=(), core_unanswered=(), effective_gpus_why=None, provenance=source)
    for verdict in Verdict:
        changed: Audit = replace(audit, verdict=verdict)
        Reader(html.render(changed))
        text.render(changed, color=False)
        render_json.render(changed)


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys; import ddp_audit.render.html; "
        "print(sorted({'matplotlib', 'torch', 'jinja2', 'numpy.testing'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
