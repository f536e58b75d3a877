"""Draws a timeline as a picture, a Plotly bar per box; makes the texts of pictures and pages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import BLOCKING_CALL, PEER_WAIT, TAIL, UNKNOWN_WHEN, WHENS, WHYS
from ddp_prof.columns import milliseconds, percent
from ddp_prof.present import theme
from ddp_prof.present.cause_headlines import WHEN, WHY
from ddp_prof.present.charts import EDGE, LEGEND, PAPER, UNSEEN, Chart, chart_title
from ddp_prof.present.charts.static_images import WIDTH
from ddp_prof.present.comparison_headlines import hidden_shares_text
from ddp_prof.present.text import MAX_NAME, plain_name, shown_name, to_plain_text
from ddp_prof.present.timeline.lanes import CODE
from ddp_prof.present.timeline.model import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    STRIP,
    WAITING,
    Boxes,
    Lane,
    Panel,
    RankLanes,
    Timeline,
    overlap_ratio_of,
)
from ddp_prof.range_names import parse_range
from ddp_prof.trace import UNKNOWN, concatenate, select


def draw_timeline(model: Timeline) -> Chart:
    """Return the picture of a timeline of a few steps, without a width: the function that writes the file sets it."""
    (rows, annotations, shapes, height), colors = _arrange(model), theme.LIGHT.colors
    subtitle = "".join(
        to_plain_text(words) if category is None else f'<b><span style="color:{colors[category]}">{words}</span></b>'
        for words, category in explanation(model)
    )
    layout, bars = base_layout(model), list(_bars(model, rows))
    legend_rows = -(-sum(bar["showlegend"] for bar in bars) // LEGEND_COLUMNS)
    top = TOP + LEGEND_ROW * max(0, legend_rows - 2)
    layout["legend"] |= {"entrywidthmode": "fraction", "entrywidth": 1 / LEGEND_COLUMNS}
    # The vertical axis counts pixels from the top; each lane has its title at its middle.
    layout["yaxis"] |= {
        "range": [height, 0],
        "tickmode": "array",
        "tickvals": [row.top + row.height / 2 for row in rows],
        "ticktext": [f"{row.lane.title}  " for row in rows],
    }
    layout |= {
        "title": chart_title(to_plain_text(headline(model)), subtitle),
        "height": round(height + top + BOTTOM),
        "margin": {"t": top, "b": BOTTOM, "l": LEFT, "r": RIGHT},
        "annotations": annotations,
        "shapes": shapes,
        "barmode": "overlay",
        "bargap": 0.01,  # with 0, Plotly rounds boxes to whole pixels
        "uniformtext": {"mode": "hide", "minsize": theme.FONT_SIZE - 1},
    }
    return {"data": bars, "layout": layout}


def shown_in_legend(category: str, categories: Collection[str]) -> bool:
    """Whether a category has an entry in the legend.

    ``compute`` has none beside ``compute only``, which looks the same.

    Args:
        category: The category.
        categories: All categories in the picture.
    """
    plain = (theme.STEP, theme.CALL, theme.RANGE)  # the titles of their lanes are enough
    return category not in plain and not (category == theme.COMPUTE and theme.COMPUTE_ONLY in categories)


def _bars(model: Timeline, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield one Plotly trace of horizontal bars for each category: a bar per box, with its text where there is room."""
    # Boxes shorter than a fiftieth of the shortest step hardly ever have room for text, and each text costs time.
    spans = [step.end_ns - step.start_ns for panel in model.panels for step in panel.steps]
    least_ns = min(spans, default=model.end_ns - model.start_ns) // 50
    used = sorted({code for row in rows for code in np.unique(row.lane.boxes.category).tolist()})
    categories = [theme.CATEGORIES[code] for code in used]
    for code, category in zip(used, categories, strict=True):
        # The boxes of this category, lane by lane.
        parts = [(row, select(row.lane.boxes, row.lane.boxes.category == code)) for row in rows]
        boxes = concatenate(*(own for _, own in parts))
        texts = [text for row, own in parts for text in _texts(row.lane, category, own, least_ns, model)]
        heights = [np.full(len(own), row.box_height) for row, own in parts]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": theme.LEGEND[category],
            "legendgroup": theme.LIGHT.colors[category],
            "showlegend": shown_in_legend(category, categories),
            "base": boxes.start_ns / 1e6,
            "x": (boxes.end_ns - boxes.start_ns) / 1e6,
            "y": np.concatenate([row.top + (own.level + 0.5) * row.level for row, own in parts]).astype(np.float32),
            "width": np.concatenate(heights).astype(np.float32),
            "text": texts if any(texts) else "",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": {
                "color": theme.LIGHT.colors[category],
                "line": {"width": 1, "color": theme.LIGHT.paper} if category == theme.STEP else UNSEEN,
            },
        }


def _texts(lane: Lane, category: str, boxes: Boxes, least_ns: int, model: Timeline) -> list[str]:
    """Return the text of each box of a category in a lane; empty where there is no room.

    Args:
        lane: The lane.
        category: The category of the boxes.
        boxes: The boxes.
        least_ns: Shorter boxes have no text.
        model: The timeline; boxes that reach beyond its interval have no text, because the picture cuts them.
    """
    length_ns = boxes.end_ns - boxes.start_ns
    is_whole = (boxes.start_ns >= model.start_ns) & (boxes.end_ns <= model.end_ns)
    texts = [""] * len(boxes)
    for row in np.flatnonzero(is_whole & (length_ns >= least_ns)).tolist():
        duration_ns, name_id = int(length_ns[row]), int(boxes.name_id[row])
        # The box of a step that fills a quarter of the picture has room for the step's overlap, too.
        if category == theme.STEP and duration_ns >= (model.end_ns - model.start_ns) // 4:
            texts[row] = lane.names[name_id]
            continue
        label = box_label(lane, category, name_id, int(boxes.bucket[row]))
        texts[row] = f"{label}<br>{milliseconds(duration_ns)}" if lane.kind == STRIP else label
    return texts


LEFT, RIGHT, BOTTOM = 300, 28, 62
"""Pixels to the left of the lanes, to the right, and below."""

MARGIN = 0.005
"""Part of the interval's length that is added to the axis on either side."""

TOP, PANEL_HEADER, PANEL_GAP, RANK_GAP, LANE_GAP = 124, 40, 26, 22, 5
"""Pixels: above the lanes, with a legend of two rows; for the title of a panel; and between panels, ranks and lanes."""

HEADER_LINE, TITLE_LETTER, FACT_LETTER = 18, 10, 6
"""Pixels in the title of a panel: a line, and the mean width of a letter of its first words and of the others."""

LEGEND_COLUMNS, LEGEND_ROW = 5, 19
"""Entries in a row of the legend, and its height in pixels."""

ROWS = {HOST: 22, COMPUTE: 24, STRIP: 40}
OTHER_ROW = 22
"""Height of a row in pixels: ``ROWS`` by kind of lane, ``OTHER_ROW`` for all other kinds."""

LOWEST_ROW, TALLEST_STACK = 5, 84
"""In pixels. A lane with many rows is at most ``TALLEST_STACK`` high, but no row is lower than ``LOWEST_ROW``."""

LOWEST_RANK = 72
"""Least height of a rank in pixels: the room for its title and figures."""


class Row(NamedTuple):
    """Where a lane is drawn: its top, and the height of each of its levels (the rows of its boxes), in pixels."""

    lane: Lane
    top: float
    level: float

    @property
    def height(self) -> float:
        return self.level * self.lane.levels

    @property
    def box_height(self) -> float:
        """Height of a box in pixels; it leaves a gap to the next level."""
        return self.level - (0 if self.lane.levels == 1 else min(1, self.level / 10))


def _arrange(model: Timeline) -> tuple[list[Row], list[dict[str, Any]], list[dict[str, Any]], float]:
    """Place ranks below each other.

    Returns:
        The position of each lane; the texts of panels and ranks, as Plotly annotations; the lines between panels and
        ranks, as Plotly shapes; and the height of everything in pixels.
    """
    rows: list[Row] = []
    headers: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    above_panels, between_ranks = [], []
    top = 0.0
    for panel in model.panels:
        if headers:
            top += PANEL_GAP
            above_panels += [top] if panel.ranks else []
        header, lines_of_header = _panel_header(panel, top + 16)
        headers.append(header)
        top += PANEL_HEADER + HEADER_LINE * (lines_of_header - 1)
        for number, rank in enumerate(panel.ranks):
            start = top
            between_ranks += [start - RANK_GAP / 2] if number else []
            # The lanes of a rank, one below the other.
            for lane in (lane for lane in rank.lanes if not lane.is_folded):
                rows.append(Row(lane, top, _level_height(lane)))
                top += rows[-1].height + LANE_GAP
            top = max(top - LANE_GAP, start + LOWEST_RANK)
            titles += _rank_title(rank, (start + top) / 2)
            top += RANK_GAP
    # Lines above panels and between ranks.
    thin = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "layer": "below"}
    lines = [
        {**thin, "y0": y, "y1": y, "line": {"width": width, "color": color}}
        for ys, width, color in ((above_panels, 1.5, theme.LIGHT.quiet), (between_ranks, 1, theme.LIGHT.line))
        for y in ys
    ]
    return rows, [*headers, *titles], lines, top


def _level_height(lane: Lane) -> float:
    """Return the height of a level of a lane in pixels; a high stack has lower ones."""
    height: float = ROWS.get(lane.kind, OTHER_ROW)
    if lane.kind in (HOST, STRIP) or lane.levels <= 1:
        return height
    return max(LOWEST_ROW, min(height, TALLEST_STACK / lane.levels))


def base_layout(model: Timeline) -> dict[str, Any]:
    """Return the part of Plotly's layout that a picture and a page have in common."""
    start, end = model.start_ns / 1e6, model.end_ns / 1e6
    margin = (end - start) * MARGIN
    return {
        **PAPER,
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


def _panel_header(panel: Panel, y: float) -> tuple[dict[str, Any], int]:
    """Return the text above a panel, as a Plotly annotation, and its number of lines: title, device and facts."""
    lines: list[str] = []
    room = WIDTH - 2 * EDGE
    taken = TITLE_LETTER * len(plain_name(panel.title))
    for fact in (theme.device_notice([panel.device], ()), *map(shown_name, panel.facts)):
        length = FACT_LETTER * len(re.sub("<.*?>", "", f"  ·  {fact}"))  # without the tags of a coloured text
        if lines and taken + length <= room:
            lines[-1] += f"  ·  {fact}"
            taken += length
        else:
            lines.append(fact)
            taken = length if len(lines) > 1 else taken + length
    text = f'<b><span style="font-size:16px">{shown_name(panel.title)}</span></b>    {"<br>".join(lines)}'
    place = _left_aligned_text(y + HEADER_LINE * (len(lines) - 1) / 2)  # the middle of the text
    return {**place, "text": text, "font": {"size": 13}, "bgcolor": theme.LIGHT.paper}, len(lines)


def _left_aligned_text(y: float) -> dict[str, Any]:
    """Return the position of an annotation at the left edge of the picture, at a height in pixels."""
    return {
        "x": 0, "xref": "paper", "xanchor": "left", "xshift": EDGE - LEFT, "yref": "y", "y": y,
        "showarrow": False, "align": "left", "borderpad": 0,
    }  # fmt: skip


def _rank_title(rank: RankLanes, y: float) -> Iterator[dict[str, Any]]:
    """Yield three lines of text beside a rank: its name, its overlap in percent, and what that percentage is."""
    ratio, quiet = rank.overlap.overlap_ratio, {"size": theme.FONT_SIZE, "color": theme.LIGHT.quiet}
    share, below = ("n/a", "no overlap figure") if ratio is None else (percent(ratio), "overlapped")
    yield {**_left_aligned_text(y - 24), "text": f"<b>{rank.title}</b>", "font": {"size": 13}}
    yield {**_left_aligned_text(y), "text": f"<b>{share}</b>", "font": {"size": 24}}
    yield {**_left_aligned_text(y + 22), "text": below, "font": quiet}


_WHEN = WHEN | {TAIL: "in the tail", UNKNOWN_WHEN: "in no known phase"}
_WHY = WHY | {BLOCKING_CALL: "the program waits for it", PEER_WAIT: "a peer had not arrived"}
EXPOSED_PARTS = tuple((_WHEN[when], _WHY[why]) for when in WHENS for why in WHYS)
"""Words for when and why communication is exposed, in the order of ``Exposure.pairs_ns``."""


def headline(model: Timeline) -> str:
    """Return a sentence on how much of its communication each run hides, or all panels together if they are one run."""
    if _is_one_run_of_several_files(model) and (ratio := overlap_ratio_of(model.panels)) is not None:
        return f"{percent(ratio)} of communication hides behind compute"
    return hidden_shares_text([(plain_name(panel.title), panel.overlap_ratio) for panel in model.panels])


def _is_one_run_of_several_files(model: Timeline) -> bool:
    """Whether all panels are files of one run."""
    first, *others = model.panels
    return bool(first.told_of_run) and all(panel.run == first.run for panel in others)


def page_headline(model: Timeline) -> str:
    """Return the headline of a page.

    If all panels are of one run, it says what hiding all communication would gain, where that is known. Otherwise it
    says how much of its communication each panel hides.
    """
    if _is_one_run_of_several_files(model):
        return model.panels[0].told_of_run
    if len(model.panels) > 1 or not model.panels[0].gain:
        return headline(model)
    return f"{plain_name(model.panels[0].title)}: {model.panels[0].gain}"


def axis_title(model: Timeline) -> str:
    """Return the title of the time axis, which says what time 0 is."""
    marks = [panel.step_names[panel.steps[0].key] for panel in model.panels if panel.steps]
    if not marks:
        return "time since the first compute, communication or copy"
    return f"time since the start of {marks[0]}" if len(set(marks)) == 1 else "time since the first step shown"


def box_title(lane: Lane, category: str, name_id: int, bucket: int, longest: int = MAX_NAME) -> str:
    """Return the full name of a box: of its event, its category, or its bucket's collective.

    Args:
        lane: The lane of the box.
        category: The category of the box.
        name_id: Index into the names of the lane, ``UNKNOWN`` for none.
        bucket: The bucket that the box communicates, ``UNKNOWN`` for none.
        longest: Number of characters to which the event's name is cut.
    """
    name = plain_name(lane.names[name_id], longest) if name_id != UNKNOWN else theme.LEGEND[category]
    if bucket == UNKNOWN:
        return name
    if lane.from_launch:  # the range of the host has no other name; a kernel has its own
        return f"{parse_range(lane.names[name_id]).name.replace('_', '-')} of bucket {bucket}"
    return f"collective of bucket {bucket}: {name}"


def box_label(lane: Lane, category: str, name_id: int, bucket: int) -> str:
    """Return the short text in a box; empty if such boxes are usually too narrow. Arguments as in :func:`box_title`."""
    if category == theme.STEP:
        return lane.names[name_id].partition(":")[0]
    if lane.kind == COMMUNICATION:
        return f"bucket {bucket}" if bucket != UNKNOWN else ""
    # Kernels are many and narrow; phases, and compute on a CPU, are few and wide.
    if lane.kind == HOST and name_id != UNKNOWN:
        return f"{theme.LABELS[category]} (inferred)"
    wide = lane.kind in (STRIP, WAITING) or (lane.kind in (HOST, COMPUTE) and name_id == UNKNOWN)
    return theme.LABELS[category] if wide else ""


def explanation(model: Timeline) -> tuple[tuple[str, str | None], ...]:
    """Return a sentence that explains the colours of communication.

    It is divided into pieces of plain text; a piece that names a category has the category beside it, whose colour it
    gets, all others have ``None``. The sentence is empty if no overlap is known.
    """
    if all(panel.overlap_ratio is None for panel in model.panels):
        return ()
    lanes = [lane for panel in model.panels for rank in panel.ranks for lane in rank.lanes]
    waits = any(lane.kind == WAITING and np.any(lane.boxes.category == CODE[theme.BLOCKING]) for lane in lanes)
    blocking = ("; ", None), (theme.LEGEND[theme.BLOCKING], theme.BLOCKING), (": something stands still for it", None)
    return (
        (theme.LEGEND[theme.OVERLAPPED], theme.OVERLAPPED),
        (" runs while the rank computes, ", None),
        (theme.LEGEND[theme.EXPOSED], theme.EXPOSED),
        (" while it computes nothing", None),
        *(blocking if waits else ()),
    )
