"""Figures as PNG and SVG files, through kaleido and an installed Chromium, without network."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_prof.errors import DdpProfError
from ddp_prof.whole_file import written_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import plotly.graph_objects as go

Result = TypeVar("Result")

WIDTH = 1400
SCALE = 2
SECONDS_TO_CLOSE = 10
"""So long an interrupted program waits for its browser."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")


class PictureError(DdpProfError):
    """Pictures cannot be drawn here; whoever shows the same in another way may go on without."""


def find_browser() -> Path | None:
    """The Chromium to draw with: ``$BROWSER_PATH``, else one on ``PATH``; ``None`` where there is none."""
    if (chosen := os.environ.get("BROWSER_PATH")) is not None:
        return Path(chosen) if os.access(chosen, os.X_OK) else None
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    return Path(found) if found else None


def write_pictures(pictures: Iterable[tuple[go.Figure, Path]]) -> None:
    """Write figures as ``.png`` or ``.svg``, as the names end, with one start of the browser for all.

    Raises:
        PictureError: No Chromium is installed, and nothing was written; or the browser failed.
    """
    browser = find_browser()
    if browser is None:
        missing = "pictures need Chromium, and none was found: apt-get install chromium, or set BROWSER_PATH to one"
        raise PictureError(missing)
    import kaleido

    logging.getLogger("choreographer").setLevel(logging.ERROR)  # what goes wrong is raised, too
    # MathJax would be fetched from the network.
    options = {"path": str(browser), "mathjax": False}
    with ExitStack() as files:
        orders = [_order(figure, path, files.enter_context(written_whole(path))) for figure, path in pictures]
        try:
            failed = _in_daemon_thread(lambda: kaleido.write_fig_from_object_sync(orders, kopts=options))
        except (RuntimeError, OSError, TimeoutError) as error:
            raise _failure(browser, error) from error
        if failed:
            raise _failure(browser, failed[0]) from failed[0]


def try_pictures(pictures: Iterable[tuple[go.Figure, Path]]) -> list[str]:
    """Write pictures beside pages that show the same; returns why there are none, if there are none."""
    try:
        write_pictures(pictures)
    except PictureError as error:
        return [str(error)]
    return []


def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """What the work gives, or raises.

    Threads that it starts are daemons, too: kaleido has one that reads what the browser says, and that waits as long as
    anything lives that the browser started. The program would not end before.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again below
            outcome.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:  # interrupted: the browser still writes into its folder, which is removed when the program ends
        thread.join(SECONDS_TO_CLOSE)


def _failure(browser: Path, error: BaseException) -> PictureError:
    """In a line: choreographer's errors bring their advice as further arguments."""
    reason = next(iter(str(error.args[0] if error.args else error).splitlines()), type(error).__name__)
    return PictureError(f"pictures could not be drawn with {browser}: {reason}")


def _order(figure: go.Figure, path: Path, partial: Path) -> dict[str, Any]:
    still = figure.to_dict()
    still["layout"] = {**still["layout"], "width": WIDTH, "updatemenus": []}  # a menu cannot be opened on paper
    scale = SCALE if path.suffix == ".png" else 1
    size = {"width": WIDTH, "height": still["layout"]["height"], "scale": scale}
    return {"fig": still, "path": partial, "opts": {"format": path.suffix.removeprefix(".") or None, **size}}
