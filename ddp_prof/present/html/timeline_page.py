"""The page of a timeline: all boxes of all steps, of which a script draws what the window shows."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.present import theme
from ddp_prof.present.html.page import json_in_page, markup, write_page
from ddp_prof.present.text import plain_name
from ddp_prof.present.timeline.captions import explanation, headline
from ddp_prof.present.timeline.encoding import overview, pack_boxes
from ddp_prof.present.timeline.figure import shown_in_legend
from ddp_prof.present.timeline.layout import MARGIN, PAGE, figure_layout, lay_out
from ddp_prof.present.timeline.model import HOST, STRIP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddp_prof.present.html.page import Navigation
    from ddp_prof.present.timeline.encoding import PackedBoxes
    from ddp_prof.present.timeline.layout import Layout
    from ddp_prof.present.timeline.model import Timeline

BOXES_READ_AT_ONCE = 100_000
"""A page with more shows an overview first."""

_ASSETS = files("ddp_prof.present.timeline") / "assets"
_SCRIPTS = (
    *(f"data/{name}" for name in ("columns", "tracks", "merge", "search")),
    *(f"view/{name}" for name in ("ticks", "paint", "inspect", "details", "timeline", "controls", "address", "start")),
)


def write_timeline_page(
    model: Timeline, path: Path, *, navigation: Navigation | None = None, shared_plotly: bool = False
) -> None:
    """Write the page of a timeline; see :func:`~ddp_prof.present.html.page.write_page`."""
    layout = lay_out(model, PAGE)
    placed = [row for blocks in layout.blocks for block in blocks for row in block.rows]
    packed = pack_boxes([row.lane for row in placed])
    values = {
        "headline": headline(model),
        "explanation": explanation(model),
        "data": json_in_page(_page_data(model, layout, packed)),
        "payload": markup(packed.payload),
    }
    write_page(
        path,
        "timeline.html",
        values,
        title=headline(model),
        navigation=navigation,
        css=_asset("view/timeline.css") + _colors(),
        # All in one scope of its own.
        script="\n".join(["(() => {", '"use strict";', *(_asset(f"{name}.js") for name in _SCRIPTS), "})();"]),
        shared_plotly=shared_plotly,
    )


def _colors() -> str:
    light, dark = (
        " ".join(f".{name} {{ color: {palette.colors[name]}; }}" for name in (theme.OVERLAPPED, theme.EXPOSED))
        for palette in (theme.LIGHT, theme.DARK)
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _page_data(model: Timeline, layout: Layout, packed: PackedBoxes) -> dict[str, Any]:
    lanes = (lane for panel in model.panels for rank in panel.ranks for lane in rank.lanes)
    codes = sorted({code for lane in lanes for code in np.unique(lane.boxes.category).tolist()})
    names = [theme.CATEGORIES[code] for code in codes]
    figure = figure_layout(model, layout, theme.LIGHT)
    figure["xaxis"] |= {"fixedrange": True}
    figure |= {"hovermode": False, "dragmode": False}
    return {
        "layout": figure,
        "notice": theme.LIGHT.notice,
        "margin": MARGIN,
        "start": model.start_ns,
        "end": model.end_ns,
        "categories": [
            {"code": code, "name": name, "legend": theme.LEGEND[name], "color": theme.LIGHT.colors[name],
             "in_legend": shown_in_legend(name, names)}
            for code, name in zip(codes, names, strict=True)
        ],
        "strip": [
            {"code": theme.CATEGORIES.index(name), "name": name, "label": theme.LABELS[name]}
            for name in (*theme.STRIP, theme.GRAPH, theme.UNNAMED)
        ],
        "panels": [{"title": plain_name(panel.title), "steps": panel.steps} for panel in model.panels],
        "ranks": [
            {"panel": at, "title": rank.title} for at, panel in enumerate(model.panels) for rank in panel.ranks
        ],
        "widths": packed.widths,
        "titles": packed.titles,
        "rows": list(_row_data(model, layout, packed)),
    }  # fmt: skip


def _row_data(model: Timeline, layout: Layout, packed: PackedBoxes) -> Iterator[dict[str, Any]]:
    blocks = (block for blocks in layout.blocks for block in blocks)
    placed = [(rank, row) for rank, block in enumerate(blocks) for row in block.rows]
    takes_long = model.boxes > BOXES_READ_AT_ONCE
    for lane, level, boxes in packed.rows:
        rank, row = placed[lane]
        top = row.top + level * row.level
        yield {
            "rank": rank,
            "lane": row.lane.title,
            "kind": row.lane.kind,
            "is_host": row.lane.kind == HOST,
            "is_strip": row.lane.kind == STRIP,
            "from_launch": row.lane.from_launch,
            "top": round(top, 2),
            "bottom": round(top + row.box_height, 2),
            "count": len(boxes),
            **({"overview": overview(boxes, model.start_ns, model.end_ns)} if takes_long else {}),
        }
