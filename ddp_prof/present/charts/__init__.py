"""Charts, and what they share: background, font, margins, axes, and a title with a subtitle at the left edge.

Charts are drawn in the light theme; a page in the dark theme replaces their colours.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from numpy.typing import NDArray

from ddp_prof.present import theme
from ddp_prof.present.text import plain_name, to_plain_text

Chart = dict[str, Any]
"""``data`` and ``layout`` for plotly.js; long columns are numpy arrays, see :func:`pack_array`."""

LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
"""A legend in a line above the chart."""

PAPER: dict[str, Any] = {
    "paper_bgcolor": theme.LIGHT.paper, "plot_bgcolor": theme.LIGHT.paper,
    "font": {"family": theme.FONT, "size": theme.FONT_SIZE, "color": theme.LIGHT.text},
}  # fmt: skip

EDGE = 24
"""Pixels to the left of titles."""

_LABEL, _LABEL_LINES = 22, 2
"""Characters per line of a run's label, and lines."""

UNSEEN = {"width": 0.02, "color": "rgba(0,0,0,0)"}
"""An invisible outline: without one, Plotly widens each box to a pixel, and short boxes would hide long ones."""

STILL: dict[str, Any] = {
    "dragmode": False, "hovermode": "closest",
    "hoverlabel": {"align": "left", "font": {"family": theme.FONT, "size": 13}},
}  # fmt: skip
"""Layout of a chart without zoom."""


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    font = {"color": theme.LIGHT.quiet, "size": theme.FONT_SIZE}
    return {
        "gridcolor": theme.LIGHT.line, "zeroline": False, "tickfont": {"color": theme.LIGHT.quiet},
        **({"title": {"text": title, "font": font, "standoff": 8}} if title else {}),
        **more,
    }  # fmt: skip


def rows_axis(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": list(labels),
        "range": [len(labels) - 0.5, -0.5], "showgrid": False, "zeroline": False, "fixedrange": True, **more,
    }  # fmt: skip


def run_label(label: str) -> str:
    """Return the label of a row, wrapped to fit the left margin and cut after ``_LABEL_LINES`` lines."""
    words = re.sub(r"(?<=[_\-./])(?=.)", " ", plain_name(label))
    lines = wrap(words, _LABEL, max_lines=_LABEL_LINES, placeholder=" …")
    whole = [re.sub(r"(?<=[_\-./]) ", "", line) for line in lines]
    return "<br>".join(f"<b>{to_plain_text(line)}</b>  " for line in whole)


def make_chart(
    traces: Iterable[dict[str, Any]], *, title: str, subtitle: str, height: int,
    t: int, b: int, l: int, r: int, size: int = 20, pad: int = 20, **layout: Any,  # noqa: E741 - as Plotly calls them
) -> Chart:  # fmt: skip
    """Return a chart. ``height`` (without margins), margins, ``pad`` above the title, and font ``size`` are pixels.

    Names in title and subtitle must be escaped.
    """
    frame = {"height": t + height + b, "margin": {"t": t, "b": b, "l": l, "r": r}}
    layout = {**PAPER, **frame, "title": chart_title(title, subtitle, size, pad), **layout}
    return {"data": list(traces), "layout": layout}


def chart_title(title: str, subtitle: str, size: int = 20, pad: int = 20) -> dict[str, Any]:
    """Return title and subtitle at the left edge of a chart; arguments as in :func:`make_chart`."""
    return {
        "text": f"<b>{title}</b>", "font": {"size": size},
        "subtitle": {"text": subtitle, "font": {"size": 13, "color": theme.LIGHT.quiet}},
        "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
        "pad": {"l": EDGE, "t": pad},
    }  # fmt: skip


def pack_array(column: NDArray[Any]) -> dict[str, str]:
    """Encode a column for JSON in base64: 11 characters a number, while its digits would be about 20."""
    if not column.ndim or column.dtype.str[1:] in ("i8", "u8"):
        raise TypeError(f"{column!r} is no column that plotly.js reads")
    return {
        "dtype": column.dtype.str[1:],
        "shape": ",".join(map(str, column.shape)),
        "bdata": base64.b64encode(column.tobytes()).decode(),
    }
