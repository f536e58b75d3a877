"""Figures as PNG and SVG files, through kaleido and an installed Chromium, without network."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ddp_prof.atomic_file import atomic_write
from ddp_prof.errors import DdpProfError
from ddp_prof.present.charts import Chart, pack_array

WIDTH = 1400
SCALE = 2
SECONDS_TO_CLOSE = 10
"""Seconds that an interrupted program waits for its browser."""
_BROWSER_ERRORS = (RuntimeError, OSError, TimeoutError, asyncio.TimeoutError, asyncio.CancelledError)
"""Errors that kaleido raises if a browser fails; the last one if it closes while it starts."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")


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
        self._browser = find_browser() if find_spec("kaleido") else None
        self._files = ExitStack()
        self._orders: SimpleQueue[dict[str, Any] | InterruptedError | None] = SimpleQueue()
        self._outcome: Future[Sequence[Exception]] = Future()
        # Threads that it starts are daemons, too: kaleido has one that reads what the browser says, and that waits as
        # long as anything lives that the browser started. The program would not end before.
        self._thread = Thread(target=self._work, daemon=True)

    def __enter__(self) -> Pictures:
        if self._browser:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread.is_alive():  # interrupted: the browser still writes into its folder, which is removed then
            self._orders.put(InterruptedError())
            self._thread.join(SECONDS_TO_CLOSE)
        self._files.__exit__(InterruptedError, InterruptedError(), None)

    def draw(self, chart: Chart, path: Path) -> None:
        """Have a chart drawn as ``.png`` or ``.svg``, as the name ends."""
        if self._browser:
            self._orders.put(_render_request(chart, path, self._files.enter_context(atomic_write(path))))

    def finish(self) -> None:
        """Wait until all are drawn, and write them.

        Raises:
            PictureError: kaleido or Chromium is not installed, or the browser failed.
        """
        if not find_spec("kaleido"):
            raise PictureError("pictures need kaleido, which is not installed: pip install 'ddp-prof[pictures]'")
        if self._browser is None:
            missing = "pictures need Chromium, and none was found: apt-get install chromium, or set BROWSER_PATH to one"
            raise PictureError(missing)
        self._orders.put(None)
        failed: Sequence[BaseException]
        try:
            failed = self._outcome.result()
        except _BROWSER_ERRORS as error:
            failed = [error]
        if failed:
            # In a line: choreographer's errors bring their advice as further arguments.
            lines = str(failed[0].args[0] if failed[0].args else failed[0]).splitlines()
            reason = next(iter(lines), type(failed[0]).__name__)
            raise PictureError(f"pictures could not be drawn with {self._browser}: {reason}") from failed[0]
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

    async def _draw_all(self) -> Sequence[Exception]:
        import kaleido

        logging.getLogger("choreographer").setLevel(logging.CRITICAL)  # what goes wrong is raised, too
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        # MathJax would be fetched from the network.
        options = {"path": str(self._browser), "mathjax": False}
        failed: Sequence[Exception] = await kaleido.write_fig_from_object(self._ordered(), kopts=options)
        return failed

    async def _ordered(self) -> AsyncIterator[dict[str, Any]]:
        while (order := await asyncio.to_thread(self._orders.get)) is not None:
            if isinstance(order, InterruptedError):
                raise order
            yield order


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
    return {"fig": still, "path": partial, "opts": {"format": path.suffix.removeprefix(".") or None, **size}}
