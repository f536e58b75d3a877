"""Draws a timeline: one Plotly bar a box, one Plotly trace a category, on a numeric axis of milliseconds."""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp_prof.present import style
from ddp_prof.present.style import milliseconds, percent
from ddp_prof.present.timeline_model import COMMUNICATION, COMPUTE, HOST, STRIP
from ddp_prof.trace import UNKNOWN, concatenate, select

if TYPE_CHECKING:
    from collections.abc import Iterator

    import plotly.graph_objects as go
    from numpy.typing import NDArray

    from ddp_prof.present.style import Look
    from ddp_prof.present.timeline_model import Boxes, Lane, Panel, RankLanes, Timeline

MAX_NAME = 120
"""Longest name shown; kernels of templates have names of thousands of characters."""

_NOT_TEXT = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that show nothing themselves but may turn around or hide what follows."""

# Vertical measures in pixels; the axis of lanes counts pixels, too.
_TITLE, _BOTTOM, _LEFT, _RIGHT, _EDGE = 124, 62, 300, 28, 24
_PANEL_HEADER, _PANEL_GAP, _RANK_GAP, _LANE_GAP = 40, 26, 22, 5
_ROW = {HOST: 22, COMPUTE: 24, STRIP: 40}
_OTHER_ROW = 22
_LOWEST_ROW, _TALLEST_STACK, _LOWEST_RANK = 5, 84, 72
# Without any outline Plotly widens each box to a pixel: thousands of short ones would then hide the long ones.
_UNSEEN = {"width": 0.02, "color": "rgba(0,0,0,0)"}


class _Row(NamedTuple):
    """Where a lane is drawn: its top and the height of each of its levels, in pixels."""

    lane: Lane
    top: float
    level: float

    @property
    def height(self) -> float:
        return self.level * self.lane.levels


@dataclass(frozen=True)
class _Block:
    """Where a rank is drawn."""

    rank: RankLanes
    rows: tuple[_Row, ...]
    top: float
    bottom: float


@dataclass(frozen=True)
class _Layout:
    """Where everything is drawn.

    Attributes:
        headers: Top of each panel.
        blocks: The ranks of each panel.
        height: Of all lanes.
    """

    headers: tuple[float, ...]
    blocks: tuple[tuple[_Block, ...], ...]
    height: float


def draw_timeline(model: Timeline, look: Look = style.LIGHT) -> go.Figure:
    """The figure of a timeline; its width is that of the page."""
    import plotly.graph_objects as go

    layout = _lay_out(model)
    figure = go.Figure(data=[go.Bar(bars) for bars in _bars(model, layout, look)])
    figure.update_layout(_figure_layout(model, layout, look))
    return figure


def shown_name(name: str) -> str:
    """A name as text for Plotly, which reads a subset of HTML: nothing in it is markup, and it ends in time."""
    plain = "".join(" " if unicodedata.category(each) in _NOT_TEXT else each for each in name[: 4 * MAX_NAME])
    plain = " ".join(plain.split())
    short = plain if len(plain) <= MAX_NAME else plain[: MAX_NAME - 1] + "…"
    # A page in the dark look replaces colours in texts; what only looks like one is written otherwise.
    return html.escape(short, quote=False).replace("#", "&#35;")


def headline(model: Timeline) -> str:
    """What the figure shows, in a sentence."""
    titles = [shown_name(panel.title) for panel in model.panels]
    if all(panel.overlap_ratio is None for panel in model.panels):
        return f"{', '.join(titles)}: no communication was recorded"
    shares = [percent(panel.overlap_ratio) for panel in model.panels]
    first, *others = zip(titles, shares, strict=True)
    rest = "".join(f", {title} {share}" for title, share in others)
    return f"{first[0]} hides {first[1]}{rest} of {'their' if others else 'its'} communication behind compute"


def _lay_out(model: Timeline) -> _Layout:
    top = 0.0
    headers: list[float] = []
    panels: list[tuple[_Block, ...]] = []
    for panel in model.panels:
        top += _PANEL_GAP if headers else 0
        headers.append(top)
        top += _PANEL_HEADER
        blocks = []
        for rank in panel.ranks:
            rows, start = [], top
            for lane in rank.lanes:
                rows.append(_Row(lane, top, _level_height(lane)))
                top += rows[-1].height + _LANE_GAP
            top = max(top - _LANE_GAP, start + _LOWEST_RANK)
            blocks.append(_Block(rank, tuple(rows), start, top))
            top += _RANK_GAP
        panels.append(tuple(blocks))
    return _Layout(tuple(headers), tuple(panels), top)


def _level_height(lane: Lane) -> float:
    """Full rows while there are few, lower ones in a high stack."""
    full = _ROW.get(lane.kind, _OTHER_ROW)
    if lane.kind in (HOST, STRIP) or lane.levels == 1:
        return full
    return max(_LOWEST_ROW, min(full, _TALLEST_STACK / lane.levels))


def _bars(model: Timeline, layout: _Layout, look: Look) -> Iterator[dict[str, Any]]:
    """The properties of one ``go.Bar`` a category."""
    least_ns = _shortest_with_text(model)
    rows = [row for blocks in layout.blocks for block in blocks for row in block.rows]
    used = sorted({code for row in rows for code in np.unique(row.lane.boxes.category).tolist()})
    categories = [style.CATEGORIES[code] for code in used]
    for code, category in zip(used, categories, strict=True):
        parts = [_part(row, code, least_ns, model.end_ns - model.start_ns) for row in rows]
        boxes = concatenate(*(part.boxes for part in parts))
        yield {
            "orientation": "h",
            "name": style.LEGEND[category],
            "legendgroup": look.colors[category],
            # Compute has one colour, so one entry: that of the strip.
            "showlegend": category != style.STEP
            and not (category == style.COMPUTE and style.COMPUTE_ONLY in categories),
            "base": boxes.start_ns / 1e6,
            "x": (boxes.end_ns - boxes.start_ns) / 1e6,
            "y": np.concatenate([part.y for part in parts]).astype(np.float32),
            "width": np.concatenate([part.height for part in parts]).astype(np.float32),
            "text": _packed([text for part in parts for text in part.texts]),
            "hovertext": [text for part in parts for text in part.hovers],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": {
                "color": look.colors[category],
                "line": {"width": 1, "color": look.paper} if category == style.STEP else _UNSEEN,
            },
        }


def _shortest_with_text(model: Timeline) -> int:
    """Boxes below a fiftieth of the shortest step hardly ever have room for text, and each text costs time."""
    spans = [step.end_ns - step.start_ns for panel in model.panels for step in panel.steps]
    return min(spans, default=model.end_ns - model.start_ns) // 50


def _packed(texts: list[str]) -> list[str] | str:
    """A list without any text is one empty text."""
    return texts if any(texts) else ""


class _Part(NamedTuple):
    """The boxes of one category in one lane, with all that is drawn of them."""

    boxes: Boxes
    y: NDArray[np.floating[Any]]
    height: NDArray[np.floating[Any]]
    texts: list[str]
    hovers: list[str]


def _part(row: _Row, code: int, least_ns: int, shown_ns: int) -> _Part:
    boxes = select(row.lane.boxes, row.lane.boxes.category == code)
    category = style.CATEGORIES[code]
    duration_ns = boxes.end_ns - boxes.start_ns
    columns = (boxes.start_ns, duration_ns, boxes.name_id, boxes.step, boxes.bucket, boxes.bytes)
    known = [
        _Box(shown_ns, row.lane, category, *each) for each in zip(*(column.tolist() for column in columns), strict=True)
    ]
    gap = 0 if row.lane.levels == 1 else min(1, row.level / 10)
    return _Part(
        boxes=boxes,
        y=row.top + (boxes.level + 0.5) * row.level,
        height=np.full(len(boxes), row.level - gap),
        texts=[each.text() if each.duration_ns >= least_ns else "" for each in known],
        hovers=[each.hover() for each in known],
    )


class _Box(NamedTuple):
    """One box, to be put into words.

    Attributes:
        shown_ns: How much time the whole figure shows; a box with a fair share of it has room for more words.
    """

    shown_ns: int
    lane: Lane
    category: str
    start_ns: int
    duration_ns: int
    name_id: int
    step: int
    bucket: int
    bytes: int

    def text(self) -> str:
        """What is written in the box where there is room."""
        label = style.LABELS[self.category]
        if self.category == style.STEP:
            return self.lane.names[self.name_id] if self.duration_ns >= self.shown_ns // 4 else f"step {self.step}"
        if self.lane.kind == STRIP:
            return f"{label}<br>{milliseconds(self.duration_ns)}"
        if self.lane.kind == COMMUNICATION:
            return f"bucket {self.bucket}" if self.bucket != UNKNOWN else ""
        # Kernels are many and narrow; phases and what a CPU computes in them are few and wide.
        return label if self.lane.kind in (HOST, COMPUTE) and self.name_id == UNKNOWN else ""

    def hover(self) -> str:
        """What is written beside the pointer."""
        in_step = f", step {self.step}" if self.step != UNKNOWN and self.category != style.STEP else ""
        lines = [
            f"<b>{self._title()}</b>",
            f"{milliseconds(self.duration_ns)} from {milliseconds(self.start_ns)}{in_step}",
        ]
        if self.bytes != UNKNOWN:
            lines.append(_traffic(self.bytes, self.duration_ns, " from launch to completion" * self.lane.from_launch))
        return "<br>".join(lines)

    def _title(self) -> str:
        if self.bucket != UNKNOWN:
            return f"all-reduce of bucket {self.bucket}"
        if self.name_id != UNKNOWN:
            return _shown_name(self.lane.names[self.name_id])
        return style.LEGEND[self.category]


def _traffic(size: int, duration_ns: int, over: str) -> str:
    """Bytes, and how fast they went; bytes a nanosecond are GB a second."""
    text = f"{size / 2**20:.3g} MB" if size >= 2**20 / 100 else f"{size:,} bytes"
    return f"{text}, {size / duration_ns:.3g} GB/s{over}" if duration_ns else text


_shown_name = lru_cache(maxsize=4096)(shown_name)


def _figure_layout(model: Timeline, layout: _Layout, look: Look) -> dict[str, Any]:
    start, end = model.start_ns / 1e6, model.end_ns / 1e6
    margin = (end - start) * 0.005
    return {
        "template": "none",
        "height": round(layout.height + _TITLE + _BOTTOM),
        "margin": {"t": _TITLE, "b": _BOTTOM, "l": _LEFT, "r": _RIGHT},
        "paper_bgcolor": look.paper,
        "plot_bgcolor": look.paper,
        "font": {"family": style.FONT, "size": style.FONT_SIZE, "color": look.text},
        "title": {
            "text": f"<b>{headline(model)}</b>",
            "subtitle": {"text": _explanation(model, look), "font": {"size": 13, "color": look.quiet}},
            "font": {"size": 20, "color": look.text},
            "x": 0, "xref": "container", "xanchor": "left",
            "y": 1, "yref": "container", "yanchor": "top", "pad": {"l": _EDGE, "t": 20},
        },
        "barmode": "overlay",
        "bargap": 0.01,  # none at all, and Plotly rounds boxes to whole pixels
        "uniformtext": {"mode": "hide", "minsize": style.FONT_SIZE - 1},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"family": style.FONT, "size": 13}},
        "dragmode": "pan",
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal",
            "font": {"size": style.FONT_SIZE}, "itemsizing": "constant",
        },
        "xaxis": {
            "range": [start - margin, end + margin],
            "title": {"text": _axis_title(model), "font": {"color": look.quiet, "size": 12}, "standoff": 8},
            "ticksuffix": " ms", "gridcolor": look.line, "gridwidth": 1, "zeroline": False,
            "tickfont": {"color": look.quiet}, "layer": "below traces",
        },
        "yaxis": {
            "range": [layout.height, 0], "fixedrange": True, "showgrid": False, "zeroline": False,
            **_lane_titles(layout), "tickfont": {"color": look.quiet}, "ticks": "",
        },
        "annotations": [*_panel_headers(model, layout, look), *_rank_titles(layout, look)],
        "shapes": _separators(layout, look),
        "updatemenus": _step_menu(model, start, end, margin, look),
    }  # fmt: skip


def _explanation(model: Timeline, look: Look) -> str:
    if all(panel.overlap_ratio is None for panel in model.panels):
        return ""
    hidden, bare = (
        f'<b><span style="color:{look.colors[category]}">{style.LEGEND[category]}</span></b>'
        for category in (style.OVERLAPPED, style.EXPOSED)
    )
    return f"{hidden} runs while the rank computes; during {bare} it computes nothing, and the step lasts longer"


def _axis_title(model: Timeline) -> str:
    marks = [panel.steps[0].number for panel in model.panels if panel.steps]
    if not marks:
        return "time since the start of the capture"
    return f"time since the start of step {marks[0]}" if len(set(marks)) == 1 else "time since the first step shown"


def _lane_titles(layout: _Layout) -> dict[str, Any]:
    rows = [row for blocks in layout.blocks for block in blocks for row in block.rows]
    return {
        "tickmode": "array",
        "tickvals": [row.top + row.height / 2 for row in rows],
        "ticktext": [f"{row.lane.title}  " for row in rows],
    }


def _panel_headers(model: Timeline, layout: _Layout, look: Look) -> list[dict[str, Any]]:
    return [
        {**_at_left(top + 16), "text": _panel_header(panel, look), "font": {"size": 13}, "bgcolor": look.paper}
        for panel, top in zip(model.panels, layout.headers, strict=True)
    ]


def _at_left(y: float) -> dict[str, Any]:
    """Text at the left edge of the figure, at a height among the lanes."""
    return {
        "x": 0, "xref": "paper", "xanchor": "left", "xshift": _EDGE - _LEFT, "yref": "y", "y": y,
        "showarrow": False, "align": "left", "borderpad": 0,
    }  # fmt: skip


def _panel_header(panel: Panel, look: Look) -> str:
    device = f"device: {panel.device}"
    device = f'<b><span style="color:{look.notice}">{device}</span></b>' if panel.device == "cpu" else device
    facts = "  ·  ".join([device, *map(shown_name, panel.facts)])
    return f'<b><span style="font-size:16px">{shown_name(panel.title)}</span></b>    {facts}'


def _rank_titles(layout: _Layout, look: Look) -> Iterator[dict[str, Any]]:
    """Name, share and what it is a share of, in three lines of different size."""
    for block in (block for blocks in layout.blocks for block in blocks):
        ratio, middle = block.rank.overlap.overlap_ratio, (block.top + block.bottom) / 2
        yield {**_at_left(middle - 24), "text": f"<b>{block.rank.title}</b>", "font": {"size": 13}}
        share, below = ("n/a", "no overlap figure") if ratio is None else (percent(ratio), "overlapped")
        yield {**_at_left(middle), "text": f"<b>{share}</b>", "font": {"size": 24}}
        yield {**_at_left(middle + 22), "text": below, "font": {"size": style.FONT_SIZE, "color": look.quiet}}


def _separators(layout: _Layout, look: Look) -> list[dict[str, Any]]:
    """Thin lines: one above each panel but the first, one between ranks."""
    thin = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "layer": "below"}
    tops = [blocks[0].top - _PANEL_HEADER for blocks in layout.blocks[1:] if blocks]
    between = [block.top - _RANK_GAP / 2 for blocks in layout.blocks for block in blocks[1:]]
    return [
        {**thin, "y0": y, "y1": y, "line": {"width": width, "color": color}}
        for ys, width, color in ((tops, 1.5, look.quiet), (between, 1, look.line))
        for y in ys
    ]


def _step_menu(model: Timeline, start: float, end: float, margin: float, look: Look) -> list[dict[str, Any]]:
    """A menu that zooms to a step; absent where there is one step or none."""
    steps = max((panel.steps for panel in model.panels), key=len, default=())
    if len(steps) < 2:
        return []
    whole = {"label": "all steps", "method": "relayout", "args": [{"xaxis.range": [start - margin, end + margin]}]}
    return [
        {
            "type": "dropdown", "direction": "down", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom",
            "bgcolor": look.paper, "bordercolor": look.line, "font": {"size": style.FONT_SIZE}, "showactive": True,
            "pad": {"b": 30},
            "buttons": [whole, *(_step_button(step.number, model) for step in steps)],
        }
    ]  # fmt: skip


def _step_button(number: int, model: Timeline) -> dict[str, Any]:
    marks = [step for panel in model.panels for step in panel.steps if step.number == number]
    start, end = min(mark.start_ns for mark in marks) / 1e6, max(mark.end_ns for mark in marks) / 1e6
    margin = (end - start) * 0.02
    return {
        "label": f"step {number}",
        "method": "relayout",
        "args": [{"xaxis.range": [start - margin, end + margin]}],
    }
