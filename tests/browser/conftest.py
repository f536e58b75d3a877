"""A real headless Chromium without network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from ddp_prof.present.charts.static_images import find_browser
from ddp_prof.present.html.page import write_shared_plotly
from ddp_prof.present.html.timeline_page import write_timeline_page
from ddp_prof.present.timeline.model import Timeline
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.nsys_factory import write_capture

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    # Compiled beside its loading, a script is compiled again at each visit. The other one Playwright disables itself.
    "--disable-features=ScriptStreaming,PaintHolding",
]


@dataclass
class Visit:
    """A page opened from disk, and what happened meanwhile."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        """Open a page of figures."""
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".figure .point path", state="attached")

    def open_timeline(self, path: Path, hash_: str = "#step=all") -> None:
        """Open a page of a timeline, by default on all steps and not on the typical one."""
        self.page.goto(path.as_uri() + hash_)
        self.wait_for_timeline()

    def wait_for_timeline(self) -> None:
        self.page.wait_for_selector("body[data-ready]", state="attached")

    def ask(self, expression: str, argument: Any = None) -> Any:
        """Evaluate JavaScript in which ``page`` is the timeline; what it promises is awaited."""
        return self.page.evaluate(f"(argument) => {{ const page = window.ddpProf; return {expression}; }}", argument)

    def lanes(self) -> tuple[float, float]:
        """Where the lanes begin, left and top."""
        left, top = self.ask("""(() => { const box = page.element.getBoundingClientRect();
            const { l, t } = page.element._fullLayout._size; return [box.left + l, box.top + t]; })()""")
        return left, top

    def show(self, start_ns: float, end_ns: float) -> None:
        self.ask("page.show(...argument)", [start_ns, end_ns])

    def count(self, selector: str) -> int:
        return int(self.page.evaluate("(selector) => document.querySelectorAll(selector).length", selector))

    def text(self) -> str:
        """All text of the page, in order; what is drawn, too."""
        return str(self.page.evaluate("document.body.textContent"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(find_browser()), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tab(chromium: Any) -> Any:
    """The page of most visits, one after the other: Chromium keeps the scripts that it compiled for the last one."""
    return chromium.new_page()


@pytest.fixture
def tmp_path(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a test, at one address for all: compiled scripts are kept by the address of their page."""
    address = tmp_path_factory.getbasetemp() / "here"
    address.unlink(missing_ok=True)
    address.symlink_to(tmp_path)
    return address


@pytest.fixture(params=["light"])
def visit(tab: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    with visit_in(tab, request.param) as visit:
        yield visit


@contextmanager
def visit_in(tab: Any, palette: str = "light") -> Iterator[Visit]:
    """A visit that begins and ends on an empty page, of the usual size and palette."""
    tab.set_viewport_size({"width": 1400, "height": 800})
    tab.emulate_media(color_scheme=palette)
    visit = Visit(tab)
    heard = {
        "console": lambda message: visit.complaints.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: visit.complaints.append(str(error)),
        "dialog": lambda dialog: (visit.complaints.append("a dialog"), dialog.dismiss()),
        "request": lambda request: visit.requests.append(request.url),
    }
    for event, listener in heard.items():
        tab.on(event, listener)
    try:
        yield visit
    finally:
        for event, listener in heard.items():
            tab.remove_listener(event, listener)
        tab.goto("about:blank")


@contextmanager
def new_visit(chromium: Any) -> Iterator[Visit]:
    """A visit beside others, in a browser that knows nothing of them."""
    page = chromium.new_page()
    with visit_in(page) as visit:
        yield visit
    page.close()


@contextmanager
def prepared_visit(tab: Any, script: str) -> Iterator[Visit]:
    """A visit to pages of which each finds that this script has run before its own."""
    protocol = tab.context.new_cdp_session(tab)
    protocol.send("Page.enable")
    added = protocol.send("Page.addScriptToEvaluateOnNewDocument", {"source": f"{{ {script} }}"})
    try:
        with visit_in(tab) as visit:
            yield visit
    finally:
        protocol.send("Page.removeScriptToEvaluateOnNewDocument", added)
        protocol.detach()


def write_timeline(model: Timeline, path: Path) -> Path:
    """A timeline as reports have it, beside plotly.js: of its own address this is compiled once, but as part of a page
    once for each address of the page, fragment included."""
    write_shared_plotly(path.parent)
    write_timeline_page(model, path, shared_plotly=True)
    return path


@pytest.fixture
def report_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a report of files, of one run, into a folder, without pictures, which are tested elsewhere."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))

    def write_report(*files: Path) -> Path:
        assert run("report", *files, "--one-run", "-o", tmp_path / "pages").exit_code == 0
        return tmp_path / "pages"

    return write_report


@pytest.fixture
def two_ranks(tmp_path: Path, report_of: Callable[..., Path]) -> Path:
    """The report of a run called x, of two files."""
    return report_of(*(write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)))
