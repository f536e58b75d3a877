"""A real headless Chromium without network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error, sync_playwright

from ddp_prof.present.charts.static_images import find_browser
from ddp_prof.present.html.page import write_shared_plotly
from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.model import Timeline
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.javascript import NODE
from tests.nsys_factory import write_capture
from tests.waiting import wait_until

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
    # A page lives for seconds: optimizing its scripts and collecting its garbage in parallel cost more than they save.
    "--js-flags=--min-semi-space-size=64 --max-semi-space-size=64 --single-threaded-gc --no-maglev --no-turbofan",
]


Place = str | tuple[float, float]
"""A selector of one element, or pixels from the left and from the top of what is seen of the page."""


AT_REST = Path(__file__).with_name("at_rest.js")

LEFT_BEHIND = """(document.activeElement.blur(), document.querySelector("dialog[open]")?.close(),
  page.past.length = 0, history.replaceState(null, "", "#"))"""
"""Takes from a timeline what a visit leaves behind, and its address would not tell."""

_shown: dict[Any, Path] = {}
"""The file that was opened last, by tab."""


@dataclass
class Visit:
    """A page opened from disk, and what happened meanwhile.

    The only way to act on a page and to read it: both wait until the page is at rest (``at_rest.js``). No method has a
    limit of time, which is pytest-timeout's, and none waits for an element: at rest it is there or not.
    """

    _page: Any
    is_held: bool = False
    """Whether the page is not to be read to its end yet."""
    requests: list[str] = field(default_factory=list)
    _complaints: list[str] = field(default_factory=list)
    _has_acted: bool = True

    # Coming and going.

    def open(self, path: Path) -> None:
        """Open a page of figures."""
        self.go(path.as_uri())
        assert self.count(".figure .point path")

    def open_timeline(self, path: Path, hash_: str = "#step=all") -> None:
        """Open a page of a timeline, by default on all steps and not on the typical one.

        If the last test left it open, it only follows the address, which says all that a reader may have changed.
        """
        if _shown.get(self._page) == path.resolve() and self._page.url.partition("#")[0] == path.as_uri() and hash_:
            self.ask(LEFT_BEHIND)
        self.go(path.as_uri() + hash_)

    def open_first_view(self, address: str) -> None:
        """Open a page whose script holds its columns back, until it has drawn what it can without them."""
        self.is_held = True
        self.go(address)
        # Playwright's wait_for_function asks again from within the page, whose policy forbids to evaluate texts.
        is_drawn = "() => performance.getEntriesByName('first view').length > 0 && 'Plotly' in window"
        wait_until(lambda: self._page.evaluate(is_drawn))

    def open_anew(self, address: str) -> None:
        """Open a page as if nothing had been seen before, also where only the fragment of the address is another."""
        self.go("about:blank")
        self.go(address)

    def go(self, address: str) -> None:
        file = Path(url2pathname(urlsplit(address).path)).resolve()
        is_other = _shown.get(self._page) != file
        if is_other and self._page.url.partition("#")[0] == address.partition("#")[0]:  # else a place on it
            self._page.goto("about:blank")
        _shown[self._page] = file
        self._do(lambda: self._page.goto(address))

    def reload(self) -> None:
        self._do(self._page.reload)

    def back(self) -> None:
        self._do(self._page.go_back)

    # Acting.

    def click(self, place: Place) -> None:
        if isinstance(place, str):
            self._do(self._one(place).click)
        else:
            self._do(lambda: self._page.mouse.click(*place))

    def double_click(self, x: float, y: float) -> None:
        self._do(lambda: self._page.mouse.dblclick(x, y))

    def hover(self, place: Place) -> None:
        if isinstance(place, str):
            self._do(self._one(place).hover)
        else:
            self._do(lambda: self._page.mouse.move(*place))

    def wheel(self, y: float) -> None:
        """Turn the wheel where the pointer is."""
        self._do(lambda: self._page.mouse.wheel(0, y))

    def drag(self, start: tuple[float, float], stop: tuple[float, float], *, with_shift: bool = False) -> None:
        """Press at one place, move in a few steps, and let go at another one."""
        self.hover(start)
        if with_shift:
            self._do(lambda: self._page.keyboard.down("Shift"))
        self._do(self._page.mouse.down)
        self._do(lambda: self._page.mouse.move(*stop, steps=4))
        self._do(self._page.mouse.up)
        if with_shift:
            self._do(lambda: self._page.keyboard.up("Shift"))

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, where the focus is."""
        for key in keys:
            self._do(partial(self._page.keyboard.press, key))

    def type(self, text: str) -> None:
        self._do(lambda: self._page.keyboard.type(text))

    def fill(self, selector: str, text: str) -> None:
        self._do(lambda: self._one(selector).fill(text))

    def select(self, selector: str, value: str) -> None:
        self._do(lambda: self._one(selector).select_option(value))

    def focus(self, selector: str) -> None:
        self._do(self._one(selector).focus)

    def blur(self, selector: str) -> None:
        self._do(self._one(selector).blur)

    def resize(self, width: int, height: int) -> None:
        self._do(lambda: self._page.set_viewport_size({"width": width, "height": height}))

    def prefer(self, scheme: str) -> None:
        """Choose light or dark."""
        self._do(lambda: self._page.emulate_media(color_scheme=scheme))

    def put_on_paper(self) -> None:
        """Show the page as its print."""
        self.ask("dispatchEvent(new Event('beforeprint'))")
        self._do(lambda: self._page.emulate_media(media="print"))

    def leave_paper(self) -> None:
        self._do(lambda: self._page.emulate_media(media="screen"))

    def show(self, start_ns: float, end_ns: float) -> None:
        """Show a window of the axis of a timeline."""
        self.ask("page.show(...argument)", [start_ns, end_ns])

    def release(self) -> None:
        """Read a page that was held to its end."""
        self.ask("window.release()")
        self.is_held, self._has_acted = False, True

    # Reading.

    def ask(self, expression: str, argument: Any = None) -> Any:
        """Evaluate JavaScript in which ``page`` is the timeline; what it promises is awaited."""
        self._rest()
        return self._page.evaluate(f"(argument) => {{ const page = window.ddpProf; return {expression}; }}", argument)

    def each(self, selector: str, function: str, argument: Any = None) -> list[Any]:
        """What a JavaScript function says of each element."""
        self._rest()
        return list(
            self._page.locator(selector).evaluate_all(
                f"(found, argument) => found.map((each) => ({function})(each, argument))", argument
            )
        )

    def count(self, selector: str) -> int:
        return len(self.each(selector, "() => 0"))

    def texts(self, selector: str) -> list[str]:
        """All text of each element, in order; what is drawn or hidden, too."""
        return self.each(selector, "(each) => each.textContent")

    def text(self, selector: str = "body") -> str:
        (text,) = self.texts(selector)
        return str(text)

    def seen_text(self, selector: str) -> str:
        """The text of an element as it is seen, in lines."""
        (text,) = self.each(selector, "(each) => each.innerText")
        return str(text)

    def value(self, selector: str) -> str:
        (value,) = self.each(selector, "(each) => each.value")
        return str(value)

    def attribute(self, selector: str, name: str) -> str | None:
        (value,) = self.each(selector, "(each, name) => each.getAttribute(name)", name)
        return value if value is None else str(value)

    def is_seen(self, selector: str) -> bool:
        self._rest()
        return bool(self._page.locator(selector).is_visible())

    def boxes(self, selector: str) -> list[dict[str, float]]:
        """Where elements are, in pixels of the page."""
        return self.each(selector, "(each) => each.getBoundingClientRect().toJSON()")

    def lanes(self) -> tuple[float, float]:
        """Where the lanes begin, left and top."""
        left, top = self.ask("""(() => { const box = page.element.getBoundingClientRect();
            const { l, t } = page.element._fullLayout._size; return [box.left + l, box.top + t]; })()""")
        return left, top

    @property
    def url(self) -> str:
        return str(self.ask("location.href"))

    def is_at(self, pattern: str) -> bool:
        """Whether the address of the page is one with wildcards."""
        return fnmatchcase(self.url, pattern)

    @property
    def title(self) -> str:
        return str(self.ask("document.title"))

    @property
    def complaints(self) -> list[str]:
        """What the page said to the console, its errors, and its dialogs."""
        self._rest()
        return self._complaints

    def violations(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """What axe-core finds."""
        self._rest()
        axe = Axe("" if self.ask("'axe' in window") else AXE_SCRIPT)
        return list(axe.run(self._page, options=options).response["violations"])

    @contextmanager
    def clipboard(self) -> Iterator[None]:
        """Let the page write and read the clipboard."""
        self._page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        try:
            yield
        finally:
            self._page.context.clear_permissions()

    # How both wait.

    def _do(self, act: Callable[[], Any]) -> None:
        self._rest()
        self._has_acted = True
        act()

    def _one(self, selector: str) -> Any:
        self._rest()
        found = self._page.locator(selector)
        assert found.count() == 1, f"{found.count()} elements are {selector}"
        return found

    def _rest(self) -> None:
        """Wait until the page is at rest; where a link was followed, the page to which it leads."""
        while not self._is_at_rest():
            pass
        self._has_acted = False

    def _is_at_rest(self) -> bool:
        """Wait, and tell whether the page is still the same."""
        try:
            self._page.evaluate(
                "([hasActed, isWhole]) => window.atRest?.(hasActed, isWhole)", [self._has_acted, not self.is_held]
            )
        except Error as error:
            if "Execution context was destroyed" in error.message:
                return False
            raise
        return True


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    # The node that comes with Playwright needs libatomic, which a small Debian lacks.
    os.environ.setdefault("PLAYWRIGHT_NODEJS_PATH", str(NODE))
    with sync_playwright() as running:
        browser = _launch(running)
        yield browser
        browser.close()


def _launch(running: Any) -> Any:
    """Start Chromium; again if it ends at its start, as it sometimes does where many start at once."""
    for _ in range(2):
        with suppress(Error):
            return running.chromium.launch(executable_path=str(find_browser()), args=ARGUMENTS, timeout=0)
    return running.chromium.launch(executable_path=str(find_browser()), args=ARGUMENTS, timeout=0)


def _new_page(chromium: Any) -> Any:
    page = chromium.new_page()
    page.set_default_timeout(0)
    page.add_init_script(path=AT_REST)
    return page


@pytest.fixture(scope="session")
def tab(chromium: Any) -> Any:
    """The page of most visits, one after the other: Chromium keeps the scripts that it compiled for the last one."""
    return _new_page(chromium)


@pytest.fixture
def tmp_path(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a test, at one address for all."""
    return at_one_address(tmp_path, tmp_path_factory)


def at_one_address(folder: Path, factory: pytest.TempPathFactory) -> Path:
    """A folder as tests open its pages: compiled scripts, plotly.js among them, are kept by their address."""
    address = factory.getbasetemp() / "here"
    address.unlink(missing_ok=True)
    address.symlink_to(folder)
    return address


Write = Callable[[Path], object]
"""Writes pages into a folder."""

Once = Callable[[Write], Path]

_written: dict[Write, Path] = {}


@pytest.fixture
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """The folder of pages that several tests open, written by the first of them; not for a test with ``tmp_path``."""

    def folder_of(write: Write) -> Path:
        if write not in _written:
            folder = tmp_path_factory.mktemp("once")
            write(folder)
            _written[write] = folder
        return at_one_address(_written[write], tmp_path_factory)

    return folder_of


@pytest.fixture(params=["light"])
def visit(tab: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    with visit_in(tab, request.param) as visit:
        yield visit


@contextmanager
def visit_in(tab: Any, palette: str = "light") -> Iterator[Visit]:
    """A visit that begins with the usual size and palette."""
    tab.set_viewport_size({"width": 1400, "height": 800})
    tab.emulate_media(color_scheme=palette, media="screen")
    visit = Visit(tab)
    heard = {
        "console": lambda message: visit._complaints.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: visit._complaints.append(str(error)),
        "dialog": lambda dialog: (visit._complaints.append("a dialog"), dialog.dismiss()),
        "request": lambda request: visit.requests.append(request.url),
    }
    for event, listener in heard.items():
        tab.on(event, listener)
    try:
        yield visit
    finally:
        for event, listener in heard.items():
            tab.remove_listener(event, listener)


@contextmanager
def new_visit(chromium: Any) -> Iterator[Visit]:
    """A visit beside others, in a browser that knows nothing of them."""
    page = _new_page(chromium)
    with visit_in(page) as visit:
        yield visit
    page.close()


@contextmanager
def prepared_visit(tab: Any, script: str) -> Iterator[Visit]:
    """A visit to pages of which each finds that this script has run before its own."""
    protocol = tab.context.new_cdp_session(tab)
    protocol.send("Page.enable")
    tab.goto("about:blank")
    added = protocol.send("Page.addScriptToEvaluateOnNewDocument", {"source": f"{{ {script} }}"})
    try:
        with visit_in(tab) as visit:
            yield visit
    finally:
        protocol.send("Page.removeScriptToEvaluateOnNewDocument", added)
        protocol.detach()
        tab.goto("about:blank")


def write_timeline(model: Timeline, path: Path) -> Path:
    """A timeline as reports have it, beside plotly.js: of its own address this is compiled once, but as part of a page
    once for each address of the page, fragment included."""
    write_shared_plotly(path.parent)
    write_timeline_page(make_content(model), path, shared_plotly=True)
    return path


def write_report_of(folder: Path, *files: Path) -> None:
    """The report of files, of one run, without pictures, which are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", str(folder / "none"))
        assert run("report", *files, "--one-run", "-o", folder).exit_code == 0


def write_two_ranks(folder: Path) -> None:
    write_report_of(folder, *(write_capture(folder / f"x.rank{at}.sqlite", rank_capture(at)) for at in (0, 1)))


@pytest.fixture
def two_ranks(once: Once) -> Path:
    """The report of a run called x, of two files that lie beside it."""
    return once(write_two_ranks)
