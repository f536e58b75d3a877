"""Where each lane of a timeline is drawn, and all that is drawn around them: axes, titles, separators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddp_prof.present import theme
from ddp_prof.present.charts.frame import EDGE, LEGEND
from ddp_prof.present.text import percent, shown_name
from ddp_prof.present.timeline.captions import axis_title
from ddp_prof.present.timeline.model import COMPUTE, HOST, STRIP, Lane, Panel, RankLanes, Timeline

LEFT, RIGHT, BOTTOM = 300, 28, 62
"""Pixels around the lanes."""

MARGIN = 0.005
"""Share of the time shown that is added on either side."""


TOP, PANEL_HEADER, PANEL_GAP, RANK_GAP, LANE_GAP = 124, 40, 26, 22, 5
"""Pixels above the lanes, of the title of a panel, and between panels, ranks and lanes."""

ROWS = {HOST: 22, COMPUTE: 24, STRIP: 40}
OTHER_ROW = 22
"""Height of a row by kind of lane, and of all other kinds."""

LOWEST_ROW, TALLEST_STACK = 5, 84
"""Rows of a high stack are not lower, and it is not higher, unless its rows would be too low."""

LOWEST_RANK = 72
"""Room for a rank's title and figures."""


class Row(NamedTuple):
    """Where a lane is drawn: its top and the height of each of its levels, in pixels."""

    lane: Lane
    top: float
    level: float

    @property
    def height(self) -> float:
        """Of all levels."""
        return self.level * self.lane.levels

    @property
    def box_height(self) -> float:
        """Of a box, which leaves a gap to the next level."""
        return self.level - (0 if self.lane.levels == 1 else min(1, self.level / 10))


@dataclass(frozen=True)
class Block:
    """Where a rank is drawn."""

    rank: RankLanes
    rows: tuple[Row, ...]
    top: float
    bottom: float


@dataclass(frozen=True)
class Layout:
    """Where everything is drawn.

    Attributes:
        headers: Top of each panel.
        blocks: The ranks of each panel.
        height: Of all lanes.
    """

    headers: tuple[float, ...]
    blocks: tuple[tuple[Block, ...], ...]
    height: float


def compute_layout(model: Timeline) -> Layout:
    """Ranks below each other, lanes within ranks."""
    top = 0.0
    headers: list[float] = []
    panels: list[tuple[Block, ...]] = []
    for panel in model.panels:
        top += PANEL_GAP if headers else 0
        headers.append(top)
        top += PANEL_HEADER
        blocks = []
        for rank in panel.ranks:
            rows, start = [], top
            for lane in (lane for lane in rank.lanes if not lane.is_folded):
                rows.append(Row(lane, top, _level_height(lane)))
                top += rows[-1].height + LANE_GAP
            top = max(top - LANE_GAP, start + LOWEST_RANK)
            blocks.append(Block(rank, tuple(rows), start, top))
            top += RANK_GAP
        panels.append(tuple(blocks))
    return Layout(tuple(headers), tuple(panels), top)


def _level_height(lane: Lane) -> float:
    """Full rows while there are few, lower ones in a high stack."""
    full = ROWS.get(lane.kind, OTHER_ROW)
    if lane.kind in (HOST, STRIP) or lane.levels == 1:
        return full
    return max(LOWEST_ROW, min(full, TALLEST_STACK / lane.levels))


def figure_layout(model: Timeline, layout: Layout) -> dict[str, Any]:
    """Plotly's layout of a picture: all but the boxes and the title."""
    base = base_layout(model)
    base["yaxis"] |= {"range": [layout.height, 0], **_lane_titles(layout)}
    return base | {
        "height": round(layout.height + TOP + BOTTOM),
        "margin": {"t": TOP, "b": BOTTOM, "l": LEFT, "r": RIGHT},
        "annotations": [*_panel_headers(model, layout), *_rank_titles(layout)],
        "shapes": _separators(layout),
    }


def base_layout(model: Timeline) -> dict[str, Any]:
    """What a picture and a page have in common."""
    start, end = model.start_ns / 1e6, model.end_ns / 1e6
    margin = (end - start) * MARGIN
    return {
        "template": "none",
        "paper_bgcolor": theme.LIGHT.paper,
        "plot_bgcolor": theme.LIGHT.paper,
        "font": {"family": theme.FONT, "size": theme.FONT_SIZE, "color": theme.LIGHT.text},
        "legend": {
            **LEGEND, "traceorder": "normal", "font": {"size": theme.FONT_SIZE}, "itemsizing": "constant",
        },
        "xaxis": {
            "range": [start - margin, end + margin],
            "title": {"text": axis_title(model), "font": {"color": theme.LIGHT.quiet, "size": 12}, "standoff": 8},
            "ticksuffix": " ms", "exponentformat": "none", "separatethousands": True,
            "gridcolor": theme.LIGHT.line, "gridwidth": 1, "zeroline": False,
            "tickfont": {"color": theme.LIGHT.quiet}, "layer": "below traces",
        },
        "yaxis": {
            "fixedrange": True, "showgrid": False, "zeroline": False,
            "tickfont": {"color": theme.LIGHT.quiet}, "ticks": "",
        },
    }  # fmt: skip


def _lane_titles(layout: Layout) -> dict[str, Any]:
    rows = [row for blocks in layout.blocks for block in blocks for row in block.rows]
    return {
        "tickmode": "array",
        "tickvals": [row.top + row.height / 2 for row in rows],
        "ticktext": [f"{row.lane.title}  " for row in rows],
    }


def _panel_headers(model: Timeline, layout: Layout) -> list[dict[str, Any]]:
    return [
        {
            **_left_aligned_text(top + 16),
            "text": _panel_header(panel),
            "font": {"size": 13},
            "bgcolor": theme.LIGHT.paper,
        }
        for panel, top in zip(model.panels, layout.headers, strict=True)
    ]


def _left_aligned_text(y: float) -> dict[str, Any]:
    """Text at the left edge of the figure, at a height among the lanes."""
    return {
        "x": 0, "xref": "paper", "xanchor": "left", "xshift": EDGE - LEFT, "yref": "y", "y": y,
        "showarrow": False, "align": "left", "borderpad": 0,
    }  # fmt: skip


def _panel_header(panel: Panel) -> str:
    device = f"device: {panel.device}"
    device = f'<b><span style="color:{theme.LIGHT.notice}">{device}</span></b>' if panel.device == "cpu" else device
    facts = "  ·  ".join([device, *map(shown_name, panel.facts)])
    return f'<b><span style="font-size:16px">{shown_name(panel.title)}</span></b>    {facts}'


def _rank_titles(layout: Layout) -> Iterator[dict[str, Any]]:
    """Name, share and what it is a share of, in three lines of different size."""
    for block in (block for blocks in layout.blocks for block in blocks):
        ratio, middle = block.rank.overlap.overlap_ratio, (block.top + block.bottom) / 2
        yield {**_left_aligned_text(middle - 24), "text": f"<b>{block.rank.title}</b>", "font": {"size": 13}}
        share, below = ("n/a", "no overlap figure") if ratio is None else (percent(ratio), "overlapped")
        yield {**_left_aligned_text(middle), "text": f"<b>{share}</b>", "font": {"size": 24}}
        yield {
            **_left_aligned_text(middle + 22),
            "text": below,
            "font": {"size": theme.FONT_SIZE, "color": theme.LIGHT.quiet},
        }


def _separators(layout: Layout) -> list[dict[str, Any]]:
    """Thin lines: one above each panel but the first, one between ranks."""
    thin = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "layer": "below"}
    tops = [blocks[0].top - PANEL_HEADER for blocks in layout.blocks[1:] if blocks]
    between = [block.top - RANK_GAP / 2 for blocks in layout.blocks for block in blocks[1:]]
    return [
        {**thin, "y0": y, "y1": y, "line": {"width": width, "color": color}}
        for ys, width, color in ((tops, 1.5, theme.LIGHT.quiet), (between, 1, theme.LIGHT.line))
        for y in ys
    ]
