"""Draws a timeline as a picture: one Plotly bar a box, one trace a category, on a numeric axis of milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddp_prof.present import theme
from ddp_prof.present.charts.frame import UNSEEN, chart_title
from ddp_prof.present.text import milliseconds, to_plain_text
from ddp_prof.present.timeline.captions import box_label, explanation, headline
from ddp_prof.present.timeline.layout import Layout, Row, compute_layout, figure_layout
from ddp_prof.present.timeline.model import STRIP, Boxes, Lane, Timeline
from ddp_prof.trace import concatenate, select

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from numpy.typing import NDArray


def draw_timeline(model: Timeline) -> go.Figure:
    """The picture of a timeline of a few steps; its width is set where it is written."""
    import plotly.graph_objects as go

    layout = compute_layout(model)
    return go.Figure(
        [go.Bar(bars) for bars in _bars(model, layout)],
        {
            **figure_layout(model, layout),
            "title": chart_title(to_plain_text(headline(model)), _subtitle(model)),
            "barmode": "overlay",
            "bargap": 0.01,  # none at all, and Plotly rounds boxes to whole pixels
            "uniformtext": {"mode": "hide", "minsize": theme.FONT_SIZE - 1},
        },
    )


def _subtitle(model: Timeline) -> str:
    colors = theme.LIGHT.colors
    return "".join(
        to_plain_text(words) if category is None else f'<b><span style="color:{colors[category]}">{words}</span></b>'
        for words, category in explanation(model)
    )


def shown_in_legend(category: str, categories: Collection[str]) -> bool:
    """Compute has one colour, so one entry: that of the strip."""
    plain = (theme.STEP, theme.CALL, theme.RANGE)  # their lanes say what they are
    return category not in plain and not (category == theme.COMPUTE and theme.COMPUTE_ONLY in categories)


def _bars(model: Timeline, layout: Layout) -> Iterator[dict[str, Any]]:
    """The properties of one ``go.Bar`` a category."""
    least_ns = _shortest_with_text(model)
    rows = [row for blocks in layout.blocks for block in blocks for row in block.rows]
    used = sorted({code for row in rows for code in np.unique(row.lane.boxes.category).tolist()})
    categories = [theme.CATEGORIES[code] for code in used]
    for code, category in zip(used, categories, strict=True):
        parts = [_part(row, code, least_ns, model) for row in rows]
        boxes = concatenate(*(part.boxes for part in parts))
        yield {
            "orientation": "h",
            "name": theme.LEGEND[category],
            "legendgroup": theme.LIGHT.colors[category],
            "showlegend": shown_in_legend(category, categories),
            "base": boxes.start_ns / 1e6,
            "x": (boxes.end_ns - boxes.start_ns) / 1e6,
            "y": np.concatenate([part.y for part in parts]).astype(np.float32),
            "width": np.concatenate([part.height for part in parts]).astype(np.float32),
            "text": _pack_texts([text for part in parts for text in part.texts]),
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": {
                "color": theme.LIGHT.colors[category],
                "line": {"width": 1, "color": theme.LIGHT.paper} if category == theme.STEP else UNSEEN,
            },
        }


def _shortest_with_text(model: Timeline) -> int:
    """Boxes below a fiftieth of the shortest step hardly ever have room for text, and each text costs time."""
    spans = [step.end_ns - step.start_ns for panel in model.panels for step in panel.steps]
    return min(spans, default=model.end_ns - model.start_ns) // 50


def _pack_texts(texts: list[str]) -> list[str] | str:
    """A list without any text is one empty text."""
    return texts if any(texts) else ""


class _Part(NamedTuple):
    """The boxes of one category in one lane, with all that is drawn of them."""

    boxes: Boxes
    y: NDArray[np.floating[Any]]
    height: NDArray[np.floating[Any]]
    texts: list[str]


def _part(row: Row, code: int, least_ns: int, model: Timeline) -> _Part:
    boxes = select(row.lane.boxes, row.lane.boxes.category == code)
    # The text of a box that the edge cuts would be cut, too.
    is_whole = (boxes.start_ns >= model.start_ns) & (boxes.end_ns <= model.end_ns)
    texts = [""] * len(boxes)
    for item in np.flatnonzero(is_whole & (boxes.end_ns - boxes.start_ns >= least_ns)).tolist():
        texts[item] = _text(row.lane, theme.CATEGORIES[code], boxes, item, model.end_ns - model.start_ns)
    return _Part(
        boxes=boxes,
        y=row.top + (boxes.level + 0.5) * row.level,
        height=np.full(len(boxes), row.box_height),
        texts=texts,
    )


def _text(lane: Lane, category: str, boxes: Boxes, row: int, shown_ns: int) -> str:
    """What is written in a box; one with a fair share of all the time shown has room for more words."""
    duration_ns, name_id = int(boxes.end_ns[row] - boxes.start_ns[row]), int(boxes.name_id[row])
    if category == theme.STEP and duration_ns >= shown_ns // 4:
        return lane.names[name_id]
    label = box_label(lane, category, name_id, int(boxes.bucket[row]))
    return f"{label}<br>{milliseconds(duration_ns)}" if lane.kind == STRIP else label
