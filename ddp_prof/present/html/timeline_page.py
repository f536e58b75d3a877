"""The page of a timeline: it holds all boxes, and a script draws those in the interval that is on the screen."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ddp_prof.analyze.collectives.collective import FASTEST_LINK_BYTES_PER_S
from ddp_prof.analyze.core.blocking import HELD_BY
from ddp_prof.heap import return_free_memory
from ddp_prof.present import theme
from ddp_prof.present.headlines import step_lengths
from ddp_prof.present.html.page import asset, escape_json, json_text, trusted_markup, write_page
from ddp_prof.present.text import plain_name
from ddp_prof.present.timeline import encoding, figure
from ddp_prof.present.timeline.encoding import Packed, PackedBoxes, PlacedLane, Titles
from ddp_prof.present.timeline.lanes import unknown_parts
from ddp_prof.present.timeline.model import STRIP, Panel, RankLanes, Timeline
from ddp_prof.range_names import PHASES
from ddp_prof.trace import distinct, select

BOXES_READ_AT_ONCE = 100_000
"""A page with more boxes first draws only the boxes of the interval on which it opens, unless these are more, too."""

MOST_PANELS = 4
"""Most files whose lanes are all shown at first; with more, each rank is one bar until the reader clears the filter."""
_STRIP_TITLE = "where time goes"


@dataclass(frozen=True)
class TimelineContent:
    """What the page of a timeline shows of its traces, as it is written into the page; the cache can keep it.

    Attributes:
        title: Plain text of the page's title.
        name: Title of the first panel.
        headline, explanation: See :mod:`~ddp_prof.present.timeline.figure`.
        data: JSON that :func:`_page_data` describes.
        boxes: All packed boxes by their names in the page, compressed.
        opening: The packed boxes that are drawn first, compressed; empty if all are drawn at once.
    """

    title: str
    name: str
    headline: str
    explanation: tuple[tuple[str, str | None], ...]
    data: str
    boxes: Mapping[str, bytes]
    opening: bytes


def make_content(model: Timeline) -> TimelineContent:
    """Return what the page of a timeline shows."""
    ranks = [rank for panel in model.panels for rank in panel.ranks]
    of_rank = [(at, lane) for at, rank in enumerate(ranks) for lane in rank.lanes]
    # Ranks and lanes are numbered over all panels.
    placed = [PlacedLane(rank, place, lane) for place, (rank, lane) in enumerate(of_rank)]
    titles = Titles()
    with ThreadPoolExecutor() as pool:  # compresses packed boxes while the next ones are packed
        of_shown = encoding.pack_boxes([each for each in placed if not each.lane.is_folded], titles)
        shown, boxes = of_shown.boxes, {"boxes": pool.submit(of_shown.compressed)}
        del of_shown  # the thread alone keeps its bytes, as long as it compresses
        return_free_memory()  # packing leaves gaps that are too short for the columns of the folded lanes
        explained = [rank.explained for rank in ranks]
        of_folded = encoding.pack_folded([each for each in placed if each.lane.is_folded], shown, explained, titles)
        folded, boxes["folded"] = of_folded.boxes, pool.submit(of_folded.compressed)
        opening = _opening(model, placed, titles)
        data = json_text(_page_data(model, placed, shown, folded, opening and opening.boxes, titles))
    return TimelineContent(
        title=figure.headline(model),
        name=model.panels[0].title,
        headline=figure.page_headline(model),
        explanation=figure.explanation(model),
        data=data,
        boxes={name: compressed.result() for name, compressed in boxes.items()},
        opening=opening.compressed() if opening else b"",
    )


def write_timeline_page(
    content: TimelineContent, path: Path, *, navigation: Sequence[Mapping[str, str]] = (), shared_plotly: bool = False
) -> None:
    """Write the page of a timeline.

    Args:
        content: What it shows.
        path: The page.
        navigation: See :func:`~ddp_prof.present.html.page.write_page`.
        shared_plotly: Whether plotly.js is a file beside the page.
    """
    values = {
        "headline": content.headline,
        "explanation": content.explanation,
        "data": escape_json(content.data),  # it may come from a file of the cache, which anybody may have written
        "payloads": {name: _in_base64(compressed) for name, compressed in content.boxes.items()},
        "opening": _in_base64(content.opening),
    }
    write_page(
        path,
        "timeline.html",
        values,
        title=content.title,
        navigation=navigation,
        css=asset("view/timeline.css", "timeline") + asset("lanes/lanes.css", "timeline") + _colors(),
        scripts=["timeline/assets/view/start.js"],
        shared_plotly=shared_plotly,
        late_plotly=True,
    )


def _in_base64(data: bytes) -> Markup:
    return trusted_markup(base64.b64encode(data).decode())


def _opening(model: Timeline, placed: Sequence[PlacedLane], titles: Titles) -> Packed | None:
    """Return the boxes of the interval on which the page opens, packed.

    The page draws these first. ``None`` if that is not worth it: the page has few boxes, or this interval has too many.
    """
    windows = model.opening_ns
    if windows is None or model.boxes <= BOXES_READ_AT_ONCE:
        return None
    # The interval of each rank's panel.
    panels = [window for window, panel in zip(windows, model.panels, strict=True) for _ in panel.ranks]
    lanes = []
    for each in placed:
        if not each.lane.is_folded:
            boxes, (start_ns, end_ns) = each.lane.boxes, panels[each.rank]
            seen = np.flatnonzero((boxes.end_ns >= start_ns) & (boxes.start_ns <= end_ns))
            lanes.append(each.with_boxes(select(boxes, seen)))
    if sum(len(each.lane.boxes) for each in lanes) > BOXES_READ_AT_ONCE:
        return None
    return encoding.pack_boxes(lanes, titles)


def _colors() -> str:
    """Return the style that colours text by category, for both themes."""
    light, dark = (
        " ".join(
            f".{name} {{ color: {palette.colors[name]}; }}"
            for name in (theme.OVERLAPPED, theme.EXPOSED, theme.BLOCKING)
        )
        for palette in (theme.LIGHT, theme.DARK)
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


def _page_data(
    model: Timeline,
    placed: Sequence[PlacedLane],
    shown: PackedBoxes,
    folded: PackedBoxes,
    opening: PackedBoxes | None,
    titles: Titles,
) -> dict[str, Any]:
    """Return everything that the script of the page needs beside the packed boxes; it becomes JSON.

    Args:
        model: The timeline.
        placed: All lanes.
        shown: The boxes of the lanes that are not folded.
        folded: The boxes of the folded lanes, with what the page shows of a selected box.
        opening: The boxes that are drawn first; ``None`` for none.
        titles: The texts of all boxes.
    """
    codes = sorted({code for each in placed for code in distinct(each.lane.boxes.category)})
    names = [theme.CATEGORIES[code] for code in codes]
    # Nothing would be left of ranks of which it is not known where time goes.
    is_filtered = len(model.panels) > MOST_PANELS and any(each.lane.kind == STRIP for each in placed)
    layout = figure.base_layout(model)
    # The script zooms and shows texts itself, not Plotly.
    layout["xaxis"] |= {"fixedrange": True}
    layout["yaxis"] |= {"showticklabels": False}
    layout |= {"hovermode": False, "dragmode": False}
    return {
        "layout": layout,
        "notice": theme.LIGHT.notice,
        "margin": figure.MARGIN,
        "start": model.start_ns,
        "end": model.end_ns,
        "home": model.home_ns,
        "typical": model.typical_step,
        "categories": [
            {"code": code, "name": name, "legend": theme.LEGEND[name], "color": theme.LIGHT.colors[name],
             "in_legend": figure.shown_in_legend(name, names)}
            for code, name in zip(codes, names, strict=True)
        ],
        "strip": [
            {"code": theme.CATEGORIES.index(name), "name": name, "label": theme.LABELS[name]}
            for name in (*theme.STRIP, theme.GRAPH, theme.UNNAMED)
        ],
        "phases": PHASES,
        "panels": [_panel_data(panel) for panel in model.panels],
        "ranks": [_rank_data(at, rank) for at, panel in enumerate(model.panels) for rank in panel.ranks],
        "lanes": [_lane_data(each) for each in placed],
        "rows": _row_data(shown),
        "foldedRows": _row_data(folded),
        "opening": opening and {
            "rows": [(row.placed.place, row.level, len(row.boxes)) for row in opening.rows],
            "tables": opening.tables,
        },
        "tables": shown.tables,
        "foldedTables": folded.tables,
        "titles": list(titles.titles),
        "shapes": list(titles.shapes),
        "consumers": [plain_name(name, encoding.LONGEST_TITLE) for name in titles.consumers],
        "heldBy": HELD_BY,
        "parts": figure.EXPOSED_PARTS,
        "filter": _STRIP_TITLE if is_filtered else "",
        "fastest": FASTEST_LINK_BYTES_PER_S,
    }  # fmt: skip


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "title": plain_name(panel.title),
        "device": panel.device,
        "facts": [*map(plain_name, panel.facts)],
        "steps": panel.steps,
        "stepNames": panel.step_names,
        "stepLengths": step_lengths(rank.overlap for rank in panel.ranks),
    }


def _rank_data(panel: int, rank: RankLanes) -> dict[str, Any]:
    """Return what the page tells of a rank; ``panel`` is the index of its panel."""
    return {
        "panel": panel,
        "title": rank.title,
        "name": rank.explained.rank,
        "share": rank.overlap.overlap_ratio,
        "infersBackward": rank.backward == "inferred",
        "knowsWait": rank.explained.knows_wait,
        "whyUnknown": rank.why_unknown,
        "knowsBlocking": rank.knows_blocking,
        "unknown": sorted(unknown_parts(rank.overlap)),
    }


def _lane_data(placed: PlacedLane) -> dict[str, Any]:
    return {
        "rank": placed.rank,
        "title": plain_name(placed.lane.title),
        "kind": placed.lane.kind,
        "folded": placed.lane.is_folded,
        "from_launch": placed.lane.from_launch,
        "levels": placed.lane.levels,
    }


def _row_data(packed: PackedBoxes) -> list[dict[str, int]]:
    return [{"lane": row.placed.place, "level": row.level, "count": len(row.boxes)} for row in packed.rows]
