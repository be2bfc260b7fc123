"""The report in a real browser: nothing asked for, nothing complained of, readable for everyone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from render import audits

from ddp_audit.render import html

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE_HEADER = "sandbox allow-same-origin; default-src 'none'; img-src 'self'; style-src 'self'"
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SCHEMES = ["light", "dark"]
NAMES = ["failing", "inconclusive", "passing", "uneven", "large", "nothing"]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(browser_path: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)  # in a fresh profile
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    paths = {}
    for name in NAMES:
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(html.render(audits.GALLERY[name]()), encoding="utf-8")
    return paths


@pytest.fixture
def view(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """Open a report; the page has ``asked`` (addresses) and ``said`` (console and errors)."""
    contexts = []

    def start(name: str, *, fragment: str = "", url: str | None = None, **options: Any) -> Any:
        options.setdefault("viewport", {"width": 1100, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto((url or files[name].as_uri()) + fragment)
        return page

    yield start
    for context in contexts:
        context.close()


@contextmanager
def served(body: bytes, header: str) -> Iterator[str]:
    """``body`` from a server that sends ``header`` as its policy."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/report.html" else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Security-Policy", header)
            self.end_headers()
            if self.path == "/report.html":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        host, port = server.server_address[:2]
        yield f"http://{host}:{port}/report.html"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_asks_for_nothing_and_says_nothing(view: Open, files: dict[str, Path], name: str, scheme: str) -> None:
    page = view(name, color_scheme=scheme)
    page.wait_for_timeout(100)
    assert page.asked == [files[name].as_uri()]
    assert page.said == []


def test_reads_without_script(view: Open) -> None:
    page = view("failing", java_script_enabled=False)
    for text in ("2 GPUs do the work of 1.0", "Do this first", "DDP101", "sampler.set_epoch(epoch)", "Explained by"):
        assert page.get_by_text(text).first.is_visible()
    assert not page.get_by_role("button", name="Copy").first.is_visible()
    assert page.locator("svg.plot").count() == 3


def test_reads_on_a_server_that_forbids_style_script_and_images(view: Open, files: dict[str, Path]) -> None:
    with served(files["failing"].read_bytes(), HOSTILE_HEADER) as url:
        page = view("failing", url=url)
        for text in ("2 GPUs do the work of 1.0", "DDP101", "Every batch was read by more than one rank"):
            assert page.get_by_text(text).first.is_visible()
        page.get_by_text("The same as a table").first.click()
        assert page.get_by_role("cell", name="rank 1").first.is_visible()
        # Presentation attributes are no style: bars keep their colour where every style is forbidden.
        fills = page.eval_on_selector_all("svg.plot path", "all => all.map(path => getComputedStyle(path).fill)")
        assert "rgb(0, 114, 178)" in fills
        assert page.evaluate("getComputedStyle(document.body).maxWidth") == "none"


@pytest.mark.parametrize(
    ("name", "scheme"),
    # the largest page once only: axe needs seconds for it, and its colours are those of the others
    [(name, scheme) for name in NAMES for scheme in SCHEMES if (name, scheme) != ("large", "dark")],
)
def test_axe_finds_nothing(view: Open, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright")
    page = view(name, color_scheme=scheme, bypass_csp=True)
    # Folded parts are judged too.
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    result = axe.Axe().run(page, options={"runOnly": AXE_TAGS})
    found = [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in result["violations"]]
    assert found == []
    assert any(p["id"] == "color-contrast" for p in result["passes"]), "contrast was judged"


@pytest.mark.parametrize("name", NAMES)
def test_320_pixels_scroll_only_downwards(view: Open, name: str) -> None:
    page = view(name, viewport={"width": 320, "height": 700})
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_deep_link_opens_what_is_folded(view: Open) -> None:
    page = view("failing", fragment="#DDP202")
    assert page.locator("#DDP202").is_visible()
    assert page.locator("#DDP202").evaluate("row => row.getBoundingClientRect().top < innerHeight")
    page.evaluate("location.hash = '#DDP203'")
    page.wait_for_function("document.getElementById('DDP203').checkVisibility()")


def test_deep_link_without_script(view: Open) -> None:
    assert view("failing", fragment="#DDP202", java_script_enabled=False).locator("#DDP202").is_visible()


def test_copy_button_gives_the_fix(view: Open) -> None:
    page = view("failing", permissions=["clipboard-read", "clipboard-write"])
    button = page.get_by_role("button", name="Copy DDP106-fix")
    button.click()
    page.wait_for_function("document.querySelector('[data-copy=DDP106-fix]').textContent !== 'Copy'")
    if button.text_content() == "Copied":
        taken = page.evaluate("navigator.clipboard.readText()")
    else:
        taken = page.evaluate("getSelection().toString()")
    assert taken.strip() == "for epoch in range(num_epochs):\n    sampler.set_epoch(epoch)"


def test_keyboard_reaches_everything(view: Open) -> None:
    page = view("failing")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "(e => [e.tagName, e.textContent.trim().slice(0, 40), e.getAttribute('aria-label') || '',"
                " e.matches(':focus-visible')])(document.activeElement)"
            )
        )
    assert seen[0][1].startswith("Skip to")
    tags = {tag for tag, *_ in seen}
    assert {"A", "BUTTON", "SUMMARY", "PRE", "DIV"} <= tags
    assert all(visible for tag, _, _, visible in seen if tag != "BODY")
    page.get_by_text("Passed (8)").focus()
    page.keyboard.press("Enter")
    assert page.locator("#DDP202").is_visible()


def test_print_unfolds_everything_on_white(view: Open) -> None:
    page = view("failing", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    folded = page.locator("#DDP202")
    assert folded.evaluate("row => row.checkVisibility({contentVisibilityAuto: true})")
    assert folded.evaluate("row => row.getBoundingClientRect().height") > 10
    assert page.pdf().startswith(b"%PDF")


def test_glyph_and_word_stand_beside_every_color(view: Open) -> None:
    for name in NAMES:
        marks = view(name).eval_on_selector_all(".mark", "all => all.map(mark => mark.textContent)")
        assert marks
        for mark in marks:
            assert re.fullmatch(r"[✖▲✔?–!]\s*[a-z ]{4,}", mark), mark


def test_target_is_outlined(view: Open) -> None:
    page = view("failing", fragment="#DDP106")
    assert page.locator("#DDP106").evaluate("card => getComputedStyle(card).boxShadow") != "none"


def test_user_text_makes_no_element_and_no_request(browser: Any, view: Open, tmp_path: Path) -> None:
    attack = "</script></style><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    path = tmp_path / "hostile.html"
    path.write_text(html.render(audits.hostile(attack)), encoding="utf-8")
    page = view("", url=path.as_uri(), bypass_csp=True)  # the escaping must hold without the policy's help
    page.wait_for_timeout(100)
    assert page.asked == [path.as_uri()]
    assert page.said == []
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.title().startswith("FAIL")
