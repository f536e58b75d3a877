from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import ddp_prof
from ddp_prof.analyze.collectives.exposed_time import WHYS
from ddp_prof.present import theme
from ddp_prof.range_names import PHASES
from tests.javascript import Node

# Machado, Oliveira, Fernandes 2009, severity 1.0, for linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
# In hundredths of OKLab, where 2 is about the least difference that is seen.
LEAST, LEAST_SIDE_BY_SIDE = 6, 10
APART = (theme.MAYBE_BLOCKING,)
DRAWN = [
    category
    for category in theme.CATEGORIES
    if category not in (*APART, theme.STEP, theme.GRAPH, theme.UNNAMED, theme.COMPUTE, theme.CALL, theme.RANGE)
]


def oklab(color: str, sight: str) -> np.ndarray:
    """A colour as it is seen, in coordinates whose distances are those of perception."""
    seen = np.clip(np.array(SIGHT[sight]) @ _linear(color), 0, 1)
    return 100 * np.array(LAB) @ np.cbrt(np.array(LMS) @ seen)


def _linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_categories_are_told_apart(palette: theme.Palette, sight: str) -> None:
    for one, other in combinations(DRAWN, 2):
        side_by_side = {one, other} <= set(theme.STRIP) or {one, other} <= set(PHASES)
        distance = np.linalg.norm(oklab(palette.colors[one], sight) - oklab(palette.colors[other], sight))
        assert distance >= (LEAST_SIDE_BY_SIDE if side_by_side else LEAST), f"{one} and {other}: {distance:.1f}"


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_what_blocks_is_told_from_all_beside_it(palette: theme.Palette, sight: str) -> None:
    """The lane of what blocks lies above the strip, and holds nothing else than what may block."""
    beside = [palette.paper, *(palette.colors[part] for part in (theme.OVERLAPPED, theme.EXPOSED, theme.IDLE))]
    for one in (theme.BLOCKING, theme.MAYBE_BLOCKING):
        for other in beside if one == theme.BLOCKING else (*beside[1:], palette.colors[theme.BLOCKING]):
            assert np.linalg.norm(oklab(palette.colors[one], sight) - oklab(other, sight)) >= LEAST


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it: 1 is none, 21 is black on white."""
    low, high = sorted(float(_linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_overlapped_and_exposed_differ_in_grey_and_can_be_read(palette: theme.Palette) -> None:
    overlapped, exposed = palette.colors[theme.OVERLAPPED], palette.colors[theme.EXPOSED]
    assert contrast(overlapped, exposed) >= 1.6
    for text in (overlapped, exposed, palette.colors[theme.BLOCKING], palette.text, palette.quiet, palette.notice):
        assert contrast(text, palette.paper) >= 4.5


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_on_each_box_can_be_read(palette: theme.Palette, node: Node) -> None:
    """Text on the optimizer, on CUDA graphs and, in the dark, on exposed time had a contrast of 3.7 to 4.0."""
    for name, color in palette.colors.items():
        assert contrast(color, node.ask("inkOn(argument)", color)) >= 4.5, name


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_what_is_counted_elsewhere_is_told_from_all_beside_it(palette: theme.Palette, sight: str) -> None:
    for beside in (theme.OVERLAPPED, theme.EXPOSED, theme.COMPUTE, *WHYS):
        colors = palette.colors[beside], palette.colors[theme.ELSEWHERE]
        assert np.linalg.norm(oklab(colors[0], sight) - oklab(colors[1], sight)) >= LEAST


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_reasons_are_told_apart_and_from_what_hides(palette: theme.Palette, sight: str) -> None:
    for one, other in combinations((*WHYS, theme.OVERLAPPED, theme.COMPUTE), 2):
        distance = np.linalg.norm(oklab(palette.colors[one], sight) - oklab(palette.colors[other], sight))
        assert distance >= LEAST, f"{one} and {other}: {distance:.1f}"


@pytest.mark.parametrize("sight", SIGHT)
def test_curves_are_told_apart(sight: str) -> None:
    for one, other in combinations(theme.SERIES, 2):
        assert np.linalg.norm(oklab(one, sight) - oklab(other, sight)) >= LEAST


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_one_colour_has_one_meaning(palette: theme.Palette) -> None:
    """Peer wait had the colour of exposed memory, queued that of the optimizer."""
    meanings: dict[str, set[str]] = {}
    for name, color in palette.colors.items():
        meanings.setdefault(color, set()).add(name)
    for color in (*palette.uncategorized.values(), *theme.SERIES):
        meanings.setdefault(color, set()).add("no category")
    shared = {frozenset(names) for names in meanings.values() if len(names) > 1}
    assert shared == {frozenset({theme.COMPUTE, theme.COMPUTE_ONLY}), frozenset({theme.EXPOSED, "transfer"})}


def test_colours_stand_in_the_theme_alone() -> None:
    """What is left are ink and paper."""
    package = Path(ddp_prof.__file__).parent
    found = {
        (path.name, color)
        for path in package.rglob("*")
        if path.suffix in {".py", ".js", ".css", ".html"} and path.name != "theme.py"
        for color in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text(encoding="utf-8"))
    }
    assert found == {("index.css", "#ffffff"), ("letters.js", "#000000"), ("letters.js", "#ffffff")}


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_stands_out_from_the_paper(palette: theme.Palette) -> None:
    for text in (palette.text, palette.quiet, palette.notice):
        assert abs(oklab(text, "full")[0] - oklab(palette.paper, "full")[0]) > 40


def test_compute_has_one_colour() -> None:
    assert theme.LIGHT.colors[theme.COMPUTE] == theme.LIGHT.colors[theme.COMPUTE_ONLY]


def test_each_light_colour_becomes_one_dark_colour() -> None:
    for name in ("paper", "text", "quiet", "line", "notice"):
        assert theme.recoloring()[getattr(theme.LIGHT, name)] == getattr(theme.DARK, name)
    for category in theme.CATEGORIES:
        light = theme.LIGHT.colors[category]
        assert theme.recoloring().get(light, light) == theme.DARK.colors[category]


def test_overlapped_does_not_glare_on_dark_paper() -> None:
    """Less colourful than the brightest cyan by a third, in hundredths of OKLab."""

    def colourfulness(color: str) -> float:
        return float(np.hypot(*oklab(color, "full")[1:]))

    assert colourfulness(theme.DARK.colors[theme.OVERLAPPED]) <= colourfulness("#00ffff") * 2 / 3
