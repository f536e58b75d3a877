"""Figures as PNG and SVG files, through choreographer and an installed Chromium, without network."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shutil
import signal
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
SECONDS_TO_CLOSE = 10
"""Seconds that an interrupted program waits for its browser."""
SECONDS_TO_END = 5
"""Seconds after which a browser that does not close is ended by force."""
SECONDS_TO_DRAW = 90
"""Seconds after which a picture is given up, or the browser's start."""
_BROWSER_ERRORS = (RuntimeError, OSError, TimeoutError, asyncio.TimeoutError, asyncio.CancelledError)
"""Errors that choreographer raises if a browser fails; the last one if it closes while it starts."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
_Answer = TypeVar("_Answer")


class PictureError(DdpProfError):
    """Pictures cannot be drawn here."""


def find_browser() -> Path | None:
    """The Chromium to draw with: ``$BROWSER_PATH``, else one on ``PATH``; ``None`` where there is none."""
    if (chosen := os.environ.get("BROWSER_PATH")) is not None:
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    return Path(found) if found else None


class Pictures:
    """Figures that a browser draws while the program goes on; all of them are written by :meth:`finish`, or none is."""

    def __init__(self) -> None:
        self._browser = find_browser() if find_spec("choreographer") else None
        self._files = ExitStack()
        self._orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._stop: Callable[[], object] = lambda: None
        self._outcome: Future[None] = Future()
        # Threads that it starts are daemons, too: one of choreographer's reads what the browser says, and waits as long
        # as anything lives that the browser started. The program would not end before.
        self._thread = Thread(target=self._work, daemon=True)

    def __enter__(self) -> Pictures:
        if self._browser:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread.is_alive():  # interrupted: the browser still writes into its folder, which is removed then
            with suppress(RuntimeError):  # it has ended just now
                self._stop()
            self._orders.put(None)
            self._thread.join(SECONDS_TO_CLOSE)
        self._files.__exit__(InterruptedError, InterruptedError(), None)

    def draw(self, chart: Chart, path: Path) -> None:
        """Have a chart drawn as ``.png`` or ``.svg``, as the name ends."""
        if self._browser:
            self._orders.put(_render_request(chart, path, self._files.enter_context(atomic_write(path))))

    def finish(self) -> None:
        """Wait until all are drawn, and write them.

        Raises:
            PictureError: choreographer or Chromium is not installed, or the browser failed.
        """
        if not find_spec("choreographer"):
            raise PictureError("pictures need choreographer, which is not installed: pip install 'ddp-prof[pictures]'")
        if self._browser is None:
            missing = "pictures need Chromium, and none was found: apt-get install chromium, or set BROWSER_PATH to one"
            raise PictureError(missing)
        self._orders.put(None)
        try:
            self._outcome.result()
        except _BROWSER_ERRORS as error:
            if isinstance(error, asyncio.CancelledError):
                reason = "it ended before all was drawn"
            elif isinstance(error, (TimeoutError, asyncio.TimeoutError)):
                reason = f"it gave no answer for {SECONDS_TO_DRAW} s"
            else:  # in a line: choreographer's errors bring their advice as further arguments
                reason = str(error.args[0] if error.args else error).partition("\n")[0] or type(error).__name__
            raise PictureError(f"pictures could not be drawn with {self._browser}: {reason}") from error
        self._files.close()

    def try_finish(self) -> list[str]:
        """The same for pictures beside pages that show the same; returns why there are none, if there are none."""
        try:
            self.finish()
        except PictureError as error:
            return [f"{error} (pictures are left out)"]
        return []

    def _work(self) -> None:
        try:
            self._outcome.set_result(asyncio.run(self._draw_all()))
        except BaseException as error:  # raised again by finish
            self._outcome.set_exception(error)

    async def _draw_all(self) -> None:
        if task := asyncio.current_task():
            self._stop = partial(task.get_loop().call_soon_threadsafe, task.cancel)
        import choreographer

        logging.getLogger("choreographer").setLevel(logging.CRITICAL)  # what goes wrong is raised, too
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        browser = choreographer.Browser(path=self._browser)
        try:
            tab, window = await _in_time(_open_plotly(browser))
            while (order := await asyncio.to_thread(self._orders.get)) is not None:
                await _in_time(_draw(tab, window, **order))
        finally:
            closing = asyncio.create_task(browser.close())
            if not (await asyncio.wait([closing], timeout=SECONDS_TO_END))[0]:
                if browser.subprocess.poll() is None:
                    os.killpg(browser.subprocess.pid, signal.SIGKILL)  # choreographer ends what started it, alone
                closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing


async def _in_time(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """What it returns; raises TimeoutError where that takes too long, whatever the work makes of being cancelled."""
    task = asyncio.create_task(work)
    if not (await asyncio.wait([task], timeout=SECONDS_TO_DRAW))[0]:
        task.cancel()
        raise TimeoutError
    return await task


# Not by kaleido, which is for this: it asks the browser for events of its engine (Runtime.enable), which then reads
# plotly.js a second longer, since it notes positions in the source; and kaleido has it read anew for each picture.
async def _open_plotly(browser: Browser) -> tuple[Tab, str]:
    """Start the browser and load plotly.js; returns the page and the id of its global object."""
    import plotly

    await browser.open()
    tab = browser.get_tab() or await browser.create_tab()
    library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    # A browser that snap installed sees a /tmp of its own, and no hidden files.
    with TemporaryDirectory(dir=Path.home() if browser.is_isolated() else None) as folder:
        page = Path(folder) / "index.html"
        page.write_text('<meta charset="utf-8"><script src="plotly.js"></script>', encoding="utf-8")
        shutil.copyfile(library, page.with_name("plotly.js"))
        await _command(tab, "Page.navigate", url=page.as_uri())
        # Not the event of the page being loaded, which may be that of the one that the browser opened by itself.
        loaded = "document.readyState == 'complete' ? window : new Promise(end => onload = () => end(window))"
        found: dict[str, str] = await _command(tab, "Runtime.evaluate", expression=loaded, awaitPromise=True)
    return tab, found["objectId"]


async def _draw(tab: Tab, window: str, *, figure: Chart, options: dict[str, Any], path: Path) -> None:
    asked = {"arguments": [{"value": figure}, {"value": options}], "awaitPromise": True, "returnByValue": True}
    function = "(figure, options) => Plotly.toImage(figure, options)"
    answer = await _command(tab, "Runtime.callFunctionOn", functionDeclaration=function, objectId=window, **asked)
    image: str = answer["value"]
    path.write_bytes(image.encode() if options["format"] == "svg" else base64.b64decode(image))


async def _command(tab: Tab, name: str, **params: Any) -> Any:
    """What the browser answers; raises RuntimeError where that is an error."""
    answer = await tab.send_command(name, params)
    result = answer.get("result", {})
    if failed := answer.get("error") or result.get("exceptionDetails"):
        raise RuntimeError(str(failed.get("exception", {}).get("description") or failed))
    return result.get("result")


def write_pictures(pictures: Iterable[tuple[Chart, Path]]) -> None:
    """Write charts with one start of the browser for all; raises what :meth:`Pictures.finish` does."""
    with Pictures() as drawing:
        for chart, path in pictures:
            drawing.draw(chart, path)
        drawing.finish()


def _render_request(chart: Chart, path: Path, partial: Path) -> dict[str, Any]:
    still = json.loads(json.dumps(chart, default=pack_array))
    still["layout"] |= {"width": WIDTH, "updatemenus": []}  # a menu cannot be opened on paper
    scale = SCALE if path.suffix == ".png" else 1
    size = {"width": WIDTH, "height": still["layout"]["height"], "scale": scale}
    options = {"format": path.suffix.removeprefix("."), "imageDataOnly": True, **size}
    return {"figure": still, "path": partial, "options": options}
