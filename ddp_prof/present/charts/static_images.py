"""Writes figures as PNG and SVG files with choreographer and an installed Chromium, offline."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
import signal
import sysconfig
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_prof.atomic_file import atomic_write
from ddp_prof.errors import DdpProfError
from ddp_prof.present.charts import Chart, pack_array

if TYPE_CHECKING:
    from choreographer import Browser, Tab

WIDTH = 1400
SCALE = 2
"""Width of a picture in the page's pixels; and the number of pixels of a PNG file for each of these."""
SECONDS_TO_CLOSE = 10
"""Seconds that an interrupted program waits for its browser."""
SECONDS_TO_END = 5
"""Seconds after which a browser that does not close is killed."""
SECONDS_TO_DRAW = 90
"""Time limit for each picture, and for the start of the browser."""
_BROWSER_ERRORS = (
    RuntimeError,
    OSError,
    TimeoutError,
    asyncio.TimeoutError,
    asyncio.CancelledError,
    asyncio.InvalidStateError,
)
"""Errors that choreographer raises if a browser fails; the last two if it closes while it starts."""
_BROWSERS = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome",
)  # fmt: skip
"""Names of programs that can draw, in the order in which they are looked for; the first, Chromium without
windows, starts in a third of the processor time."""
_Answer = TypeVar("_Answer")


class PictureError(DdpProfError):
    """Pictures cannot be drawn here."""


def find_browser() -> Path | None:
    """Return the Chromium to draw with: ``$BROWSER_PATH``, or else a browser on ``PATH`` or beside Python.

    ``None`` if there is none.
    """
    if (chosen := os.environ.get("BROWSER_PATH")) is not None:
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    # The set-up puts one there that it has fetched, and programs of an environment that is not active are not on PATH.
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    found = next((path for name in _BROWSERS if (path := shutil.which(name, path=folders))), None)
    return Path(found) if found else None


class Pictures:
    """Figures that a browser draws in the background; use it as a context manager.

    :meth:`draw` orders a picture, :meth:`finish` waits for all of them. Either all files are written, or none.
    """

    def __init__(self) -> None:
        """Find the browser; it starts, in a thread, when the context is entered."""
        self._browser = find_browser() if find_spec("choreographer") else None
        self._files = ExitStack()
        self._orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._stop: Callable[[], object] = lambda: None
        self._outcome: Future[None] = Future()
        # A daemon, so that threads that it starts are daemons, too: one of choreographer's reads the browser's output
        # as long as any process lives that the browser started, and would keep the program from ending.
        self._thread = Thread(target=self._work, daemon=True)

    def __enter__(self) -> Pictures:
        if self._browser:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """End the thread with its browser, if it still runs; delete the pictures that :meth:`finish` did not write."""
        if self._thread.is_alive():  # interrupted: wait, because the browser still writes into its temporary folder
            with suppress(RuntimeError):  # the event loop has closed meanwhile
                self._stop()
            self._orders.put(None)
            self._thread.join(SECONDS_TO_CLOSE)
        # As after an error, which lets atomic_write delete its partial files. After finish there are none.
        self._files.__exit__(InterruptedError, InterruptedError(), None)

    def draw(self, chart: Chart, path: Path) -> None:
        """Order a picture of a chart and return at once; a thread draws it, and :meth:`finish` writes the file.

        Without a browser nothing happens; :meth:`finish` then raises the error.

        Args:
            chart: The chart.
            path: A file that ends in ``.png`` or ``.svg``.
        """
        if self._browser is None:
            return
        still = json.loads(json.dumps(chart, default=pack_array))
        still["layout"]["width"] = WIDTH
        size = {"width": WIDTH, "height": still["layout"]["height"], "scale": SCALE if path.suffix == ".png" else 1}
        options = {"format": path.suffix.removeprefix("."), "imageDataOnly": True, **size}
        partial_file = self._files.enter_context(atomic_write(path))
        self._orders.put({"figure": still, "path": partial_file, "options": options})

    def finish(self) -> None:
        """Wait until all pictures are drawn, and write their files.

        Raises:
            PictureError: There is no browser, or it failed; then no file is written.
        """
        if not find_spec("choreographer"):
            raise PictureError("pictures need choreographer, which is not installed: pip install 'choreographer>=1.3'")
        if self._browser is None:
            missing = "pictures need Chromium, and none was found: apt-get install chromium, or set BROWSER_PATH to one"
            raise PictureError(missing)
        # None ends the thread after the last picture.
        self._orders.put(None)
        try:
            self._outcome.result()
        except _BROWSER_ERRORS as error:
            if isinstance(error, asyncio.CancelledError):
                reason = "it ended before all was drawn"
            elif isinstance(error, (TimeoutError, asyncio.TimeoutError)):
                reason = f"it gave no answer for {SECONDS_TO_DRAW} s"
            elif isinstance(error, OSError) and error.strerror:  # its first argument is a number
                reason = error.strerror
            else:  # only the first line: choreographer's errors have advice as further arguments
                reason = str(error.args[0] if error.args else error).partition("\n")[0] or type(error).__name__
            raise PictureError(f"pictures could not be drawn with {self._browser}: {reason}") from error
        self._files.close()

    def try_finish(self) -> list[str]:
        """Call :meth:`finish`; return an empty list, or an error as a list with one line.

        It is for pictures that a page can do without.
        """
        try:
            self.finish()
        except PictureError as error:
            return [f"{error} (pictures are left out)"]
        return []

    def _work(self) -> None:
        """Draw all pictures; the body of the thread."""
        try:
            self._outcome.set_result(asyncio.run(self._draw_all()))
        except BaseException as error:  # raised again by finish
            self._outcome.set_exception(error)

    async def _draw_all(self) -> None:
        """Start the browser, draw the ordered pictures until the order is ``None``, and end the browser."""
        # Lets another thread cancel this task.
        if task := asyncio.current_task():
            self._stop = partial(task.get_loop().call_soon_threadsafe, task.cancel)
        import choreographer

        logging.getLogger("choreographer").setLevel(logging.CRITICAL)  # it raises its errors, too
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        browser = choreographer.Browser(path=self._browser)
        try:
            tab, window = await _in_time(_open_plotly(browser))
            while (order := await asyncio.to_thread(self._orders.get)) is not None:
                await _in_time(_draw(tab, window, **order))
        finally:
            # Kill a browser that does not close in time, with the processes that it started.
            closing = asyncio.create_task(browser.close())
            if not (await asyncio.wait([closing], timeout=SECONDS_TO_END))[0]:
                if browser.subprocess.poll() is None:
                    os.killpg(browser.subprocess.pid, signal.SIGKILL)  # choreographer kills only the first process
                closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing


async def _in_time(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Await work and return its result.

    Raises:
        TimeoutError: It took longer than ``SECONDS_TO_DRAW``; raised in time even if the work ignores its cancellation.
    """
    task = asyncio.create_task(work)
    if not (await asyncio.wait([task], timeout=SECONDS_TO_DRAW))[0]:
        task.cancel()
        raise TimeoutError
    return await task


# Kaleido would do this, but slowly: it enables the engine's events (Runtime.enable), with which parsing plotly.js takes
# a second longer, and it loads plotly.js again for each picture.
async def _open_plotly(browser: Browser) -> tuple[Tab, str]:
    """Start the browser and load plotly.js in a page.

    Returns:
        The page (a tab of the browser), and the id of its global object, which has ``Plotly``.
    """
    import plotly

    await browser.open()
    tab = browser.get_tab() or await browser.create_tab()
    library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    # A browser that snap installed has its own /tmp and sees no hidden files.
    with TemporaryDirectory(dir=Path.home() if browser.is_isolated() else None) as folder:
        page = Path(folder) / "index.html"
        page.write_text('<meta charset="utf-8"><script src="plotly.js"></script>', encoding="utf-8")
        shutil.copyfile(library, page.with_name("plotly.js"))
        await _command(tab, "Page.navigate", url=page.as_uri())
        # Not the load event of the tab: it may belong to the page that the browser itself opened.
        loaded = "document.readyState == 'complete' ? window : new Promise(end => onload = () => end(window))"
        found: dict[str, str] = await _command(tab, "Runtime.evaluate", expression=loaded, awaitPromise=True)
    return tab, found["objectId"]


async def _draw(tab: Tab, window: str, *, figure: Chart, options: dict[str, Any], path: Path) -> None:
    """Draw a figure with plotly.js and write it to a file.

    Args:
        tab: The page with plotly.js.
        window: Id of its global object.
        figure: The figure.
        options: Options of ``Plotly.toImage``.
        path: The file.
    """
    arguments = {"arguments": [{"value": figure}, {"value": options}], "awaitPromise": True, "returnByValue": True}
    function = "(figure, options) => Plotly.toImage(figure, options)"
    answer = await _command(tab, "Runtime.callFunctionOn", functionDeclaration=function, objectId=window, **arguments)
    image: str = answer["value"]
    path.write_bytes(image.encode() if options["format"] == "svg" else base64.b64decode(image))


async def _command(tab: Tab, name: str, **params: Any) -> Any:
    """Send a command of Chromium's DevTools protocol and return the browser's answer.

    Raises:
        RuntimeError: The answer is an error.
    """
    answer = await tab.send_command(name, params)
    result = answer.get("result", {})
    if failed := answer.get("error") or result.get("exceptionDetails"):
        raise RuntimeError(str(failed.get("exception", {}).get("description") or failed))
    return result.get("result")


def write_pictures(pictures: Iterable[tuple[Chart, Path]]) -> None:
    """Draw some figures and write them as PNG or SVG files, as their names end.

    Raises:
        PictureError: They cannot be drawn here; then no file is written.
    """
    with Pictures() as drawing:
        for chart, path in pictures:
            drawing.draw(chart, path)
        drawing.finish()
