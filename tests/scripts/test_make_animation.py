"""The animation of the README: frames of an animated PNG."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/dev"))

from make_animation import animated, chunk, chunks  # noqa: E402  # type: ignore[import-not-found, unused-ignore]


def picture(grey: int) -> bytes:
    """One pixel."""
    head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes([0, grey])))
        + chunk(b"IEND", b"")
    )


def test_each_picture_is_a_frame_that_is_seen_as_long_as_asked_for() -> None:
    parts = list(chunks(animated([(picture(10), 1.2), (picture(20), 0.8), (picture(30), 3)])))
    names = [name.decode() for name, _ in parts]
    assert names == ["IHDR", "acTL", "fcTL", "IDAT", "fcTL", "fdAT", "fcTL", "fdAT", "IEND"]
    assert [struct.unpack(">HH", content[20:24]) for name, content in parts if name == b"fcTL"] == [
        (1200, 1000), (800, 1000), (3000, 1000)
    ]  # fmt: skip
    numbers = [struct.unpack(">I", content[:4])[0] for name, content in parts if name in {b"fcTL", b"fdAT"}]
    assert numbers == [0, 1, 2, 3, 4]
    pixels = [
        zlib.decompress(content[4 * (name == b"fdAT") :])[1] for name, content in parts if name in {b"IDAT", b"fdAT"}
    ]
    assert pixels == [10, 20, 30]


def test_the_readme_s_is_five_seconds_and_not_large() -> None:
    made = (ROOT / "figures/animation.png").read_bytes()
    assert len(made) < 1_500_000
    delays = [struct.unpack(">HH", content[20:24]) for name, content in chunks(made) if name == b"fcTL"]
    assert sum(over / under for over, under in delays) == 5
