"""Makes figures/animation.png: five seconds of a timeline's page, with a click on a wait and then on its cause.

    python scripts/dev/make_animation.py traces/overlap.sqlite figures/animation.png

The page is opened in a headless Chromium; its screenshots are the frames of an animated PNG, which needs no library.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from ddp_prof.present.charts.static_images import find_browser
from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.runs import load_runs
from ddp_prof.runs.run import timeline_sources

SIZE = {"width": 1200, "height": 720}
POINTER = """([x, y]) => { const dot = document.createElement("div");
    dot.id = "dot"; document.body.append(dot);
    dot.style = `position: fixed; z-index: 9; left: ${x - 11}px; top: ${y - 11}px; width: 18px; height: 18px;
      border-radius: 11px; border: 2px solid black; background: white; opacity: 0.8; pointer-events: none`; }"""
WAIT = """() => { const page = window.ddpProf, { left, top } = page.element.getBoundingClientRect();
    const { l, t } = page.element._fullLayout._size, row = page.rows.find(({ kind }) => kind === "waiting");
    const [from, to] = page.view.on(row), [track] = row.tracks, at = track.startingFrom(from);
    const middle = (track.start[at] + Math.min(to, track.end[at])) / 2;
    return [left + l + (middle - from) / page.pixel, top + t + (row.top + row.bottom) / 2]; }"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = Path(folder) / "run.html"
        write_timeline_page(make_content(build_timeline(timeline_sources(load_runs([arguments.trace])))), path)
        browser = running.chromium.launch(executable_path=str(find_browser()), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]", state="attached")
        frames = [(page.screenshot(), seconds) for seconds in walk(page)]
        browser.close()
    arguments.output.write_bytes(animated(frames))


def walk(page: Any) -> Iterator[float]:
    """Show the typical step, click on a wait, show its collective; yield for how many seconds each is shown."""
    page.mouse.move(0, 0)
    yield 1.2
    wait = page.evaluate(WAIT)
    page.evaluate(POINTER, wait)
    yield 0.8
    page.mouse.click(*wait)
    settle(page)
    yield 1.2
    page.locator("#details dt:text-is('waits for') + dd button").click()
    page.evaluate("document.getElementById('dot').remove()")
    settle(page)
    yield 1.8


def settle(page: Any) -> None:
    """Wait until the page is drawn and shows no tooltip."""
    page.mouse.move(0, 0)
    page.evaluate("window.ddpProf.schedule()")
    page.wait_for_timeout(300)


def animated(frames: Sequence[tuple[bytes, float]]) -> bytes:
    """Return an animated PNG of pictures of one size, each with the seconds for which it is shown."""
    first = dict(chunks(frames[0][0]))[b"IHDR"]
    parts = [chunk(b"IHDR", first), chunk(b"acTL", struct.pack(">II", len(frames), 0))]
    number = 0
    for at, (picture, seconds) in enumerate(frames):
        control = struct.pack(
            ">IIIIIHHBB", number, *struct.unpack(">II", first[:8]), 0, 0, round(seconds * 1000), 1000, 0, 0
        )
        parts.append(chunk(b"fcTL", control))
        number += 1
        data = b"".join(content for name, content in chunks(picture) if name == b"IDAT")
        parts.append(chunk(b"IDAT", data) if at == 0 else chunk(b"fdAT", struct.pack(">I", number) + data))
        number += at > 0
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and contents of the chunks of a PNG."""
    at = 8
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        yield picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]
        at += 12 + length


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


if __name__ == "__main__":
    main()
