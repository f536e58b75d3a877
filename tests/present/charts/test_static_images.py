from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from ddp_prof.present.charts import static_images
from ddp_prof.present.charts.static_images import SCALE, WIDTH, PictureError, Pictures, find_browser, write_pictures
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.figure import draw_timeline
from tests.conftest import ROOT
from tests.measuring import source_of
from tests.present.runs import cpu_run
from tests.waiting import has_ended, wait_until


def figure():
    return draw_timeline(build_timeline([source_of("overlap", cpu_run())]))


@pytest.mark.browser
def test_pictures_have_the_size_of_the_figure_and_show_its_text(tmp_path: Path) -> None:
    drawn, png, svg = figure(), tmp_path / "new" / "a.png", tmp_path / "a.svg"
    write_pictures([(drawn, png), (drawn, svg)])
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (WIDTH * SCALE, drawn["layout"]["height"] * SCALE)
    text = svg.read_text(encoding="utf-8")
    assert all(part in text for part in ("device: cpu", "rank 0", "where time goes", "synchronize"))
    assert "all steps" not in text  # a menu cannot be opened on paper


@pytest.mark.browser
def test_an_interrupted_program_leaves_neither_a_browser_nor_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started, folder = tmp_path / "started", tmp_path / "pictures"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho $$ > {started}\nexec {find_browser()} "$@"\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    with suppress(KeyboardInterrupt), Pictures() as pictures:
        pictures.draw(figure(), folder / "a.png")
        while not (started.exists() and started.read_text().endswith("\n")):
            sleep(0.01)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert list(folder.iterdir()) == []
    assert capfd.readouterr().err == ""


@pytest.mark.nightly  # it waits for two seconds of a browser; each picture is drawn beside that page
@pytest.mark.browser
def test_the_page_that_a_browser_opens_by_itself_is_not_taken_for_that_of_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be loaded while that of plotly is asked for."""

    async def slowly(tab: Any, name: str, **params: Any) -> Any:
        if name == "Page.navigate":
            await asyncio.sleep(2)
        return await command(tab, name, **params)

    command = static_images._command
    monkeypatch.setattr(static_images, "_command", slowly)
    write_pictures([(figure(), tmp_path / "a.svg")])
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("is_isolated", [True, False])
def test_a_browser_is_shown_files_where_it_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_isolated: bool
) -> None:
    """One that snap installed sees a /tmp of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pages = []

    class Browser:
        async def open(self) -> None:
            pass

        def is_isolated(self) -> bool:
            return is_isolated

        def get_tab(self) -> Browser:
            return self

        async def send_command(self, name: str, params: dict[str, str]) -> dict[str, Any]:
            if name == "Page.navigate":
                page = Path(url2pathname(urlsplit(params["url"]).path))
                pages.append((page.parent.parent == tmp_path, sum(one.stat().st_size for one in page.parent.iterdir())))
            return {"result": {"result": {"objectId": "window"}}}

    with ThreadPoolExecutor(1) as thread:  # a loop of Playwright's may run in this one
        thread.submit(asyncio.run, static_images._open_plotly(Browser())).result()
    [(is_at_home, size)] = pages
    assert is_at_home == is_isolated
    assert size > 2**20  # plotly.js among them
    assert list(tmp_path.iterdir()) == []


@pytest.mark.browser
def test_what_plotly_refuses_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"could not be drawn with .*: Error: Export format is not") as raised:
        write_pictures([(figure(), tmp_path / "a.svg"), (figure(), tmp_path / "a.odd")])
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_without_chromium_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(static_images.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(PictureError, match="apt-get install chromium") as raised:
        write_pictures([(figure(), tmp_path / "a.png")])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "a.png").exists()


def test_without_choreographer_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", sys.executable)
    monkeypatch.setitem(sys.modules, "choreographer", None)
    with pytest.raises(PictureError) as raised:
        write_pictures([(figure(), tmp_path / "a.png")])
    assert str(raised.value) == "pictures need choreographer, which is not installed: pip install 'choreographer>=1.3'"
    assert list(tmp_path.iterdir()) == []


def test_browser_path_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "missing"))
    assert find_browser() is None
    (tmp_path / "chosen").touch(mode=0o755)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "chosen"))
    assert find_browser() == tmp_path / "chosen"


def test_a_browser_beside_python_is_found_though_it_is_not_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set-up puts one into the environment; people start programs of it by their path."""
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(static_images.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "chromium-headless-shell").touch(mode=0o755)
    assert find_browser() == tmp_path / "chromium-headless-shell"


@pytest.mark.slow
def test_a_browser_that_fails_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(broken))
    with pytest.raises(PictureError, match=r"could not be drawn with .*/broken: [^(]") as raised:
        write_pictures([(figure(), tmp_path / "a.png")])
    assert "\n" not in str(raised.value)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A browser that never answers, nor ends when it is asked to; and where it notes its process."""
    browser, started = tmp_path / "silent", tmp_path / "started"
    browser.write_text(f"#!/bin/sh\ntrap '' TERM\necho $$ > {started}\nexec sleep 1000\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    monkeypatch.setattr(static_images, "SECONDS_TO_END", 1)
    return started


@pytest.mark.slow
def test_a_browser_that_never_answers_is_given_up_and_ended(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    monkeypatch.setattr(static_images, "SECONDS_TO_DRAW", 3)
    with pytest.raises(PictureError, match=r"could not be drawn with .*/silent: it gave no answer for 3 s$"):
        write_pictures([(figure(), folder / "a.png")])
    wait_until(lambda: has_ended(silent))
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_program_does_not_leave_a_browser_that_never_answers(silent: Path, tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), Pictures() as pictures:
        pictures.draw(figure(), tmp_path / "pictures" / "a.png")
        wait_until(lambda: silent.exists() and silent.read_text().endswith("\n"))
        raise KeyboardInterrupt
    wait_until(lambda: has_ended(silent))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (asyncio.CancelledError(), "it ended before all was drawn"),
        (asyncio.TimeoutError(), "it gave no answer for 90 s"),
        (RuntimeError("gone", "advice"), "gone"),
        (OSError(), "OSError"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_however_a_browser_breaks_off_it_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str
) -> None:
    async def break_off(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("BROWSER_PATH", sys.executable)
    monkeypatch.setattr("choreographer.Browser.open", break_off)
    with pytest.raises(PictureError, match=f"could not be drawn with .*: {reason}$"):
        write_pictures([(figure(), tmp_path / "a.png")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_browser_that_speaks_another_language_is_one_clear_error_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Choreographer logs a traceback of what it cannot read, and goes on."""
    browser = tmp_path / "browser"
    browser.write_text("#!/bin/bash\nprintf 'no JSON\\0' >&4\nexec sleep 1\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    with pytest.raises(PictureError, match="could not be drawn with"):
        write_pictures([(figure(), tmp_path / "a.png")])
    assert caplog.records == []


@pytest.mark.nightly  # a whole program; in every gate tests/present/html/test_report.py has a browser that fails
@pytest.mark.slow
def test_what_a_failed_browser_leaves_running_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {tmp_path}/left\nexit 1\n")
    broken.chmod(0o755)
    report = [
        sys.executable,
        "-c",
        "from ddp_prof.cli import main; main()",
        "report",
        ROOT / "traces/overlap.sqlite",
        "-o",
        tmp_path,
    ]
    try:
        ended = subprocess.run(report, env={**os.environ, "BROWSER_PATH": str(broken)}, capture_output=True, text=True)
    finally:
        for process in (tmp_path / "left").read_text().split():
            os.kill(int(process), signal.SIGKILL)
    assert ended.returncode == 0
    assert "pictures could not be drawn" in ended.stderr
