"""Charts, and what they have in common: background, font, margins, axes, and a title with a subtitle at the left edge.

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
"""``data`` and ``layout`` for plotly.js; long columns are numpy arrays, which :func:`pack_array` encodes."""

LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
"""A legend in a line above the chart."""

PAPER: dict[str, Any] = {
    "paper_bgcolor": theme.LIGHT.paper, "plot_bgcolor": theme.LIGHT.paper,
    "font": {"family": theme.FONT, "size": theme.FONT_SIZE, "color": theme.LIGHT.text},
}  # fmt: skip
"""Background and font of all charts."""

EDGE = 24
"""Pixels between the left edge of a chart and its title."""

_LABEL, _LABEL_LINES = 22, 2
"""Most characters per line of a run's label, and most lines."""

UNSEEN = {"width": 0.02, "color": "rgba(0,0,0,0)"}
"""An invisible outline: without one, Plotly widens each box to a pixel, and short boxes would hide long ones."""

STILL: dict[str, Any] = {
    "dragmode": False, "hovermode": "closest",
    "hoverlabel": {"align": "left", "font": {"family": theme.FONT, "size": 13}},
}  # fmt: skip
"""Part of the layout of a chart without zoom."""


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return the layout of an axis in quiet colours; ``more`` are further settings of Plotly."""
    font = {"color": theme.LIGHT.quiet, "size": theme.FONT_SIZE}
    return {
        "gridcolor": theme.LIGHT.line, "zeroline": False, "tickfont": {"color": theme.LIGHT.quiet},
        **({"title": {"text": title, "font": font, "standoff": 8}} if title else {}),
        **more,
    }  # fmt: skip


def rows_axis(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the layout of a vertical axis with one labelled row per element, the first on top.

    ``more`` are further settings of Plotly.
    """
    return {
        "tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": list(labels),
        "range": [len(labels) - 0.5, -0.5], "showgrid": False, "zeroline": False, "fixedrange": True, **more,
    }  # fmt: skip


def run_label(label: str) -> str:
    """Return the label of a run's row, wrapped to fit the left margin and cut after ``_LABEL_LINES`` lines.

    Lines may break after each ``_``, ``-``, ``.`` and ``/``.
    """
    # Spaces where lines may break; those that remain within a line are removed again.
    words = re.sub(r"(?<=[_\-./])(?=.)", " ", plain_name(label))
    lines = wrap(words, _LABEL, max_lines=_LABEL_LINES, placeholder=" …")
    whole = [re.sub(r"(?<=[_\-./]) ", "", line) for line in lines]
    return "<br>".join(f"<b>{to_plain_text(line)}</b>  " for line in whole)


def make_chart(
    traces: Iterable[dict[str, Any]], *, title: str, subtitle: str, height: int,
    t: int, b: int, l: int, r: int, size: int = 20, pad: int = 20, **layout: Any,  # noqa: E741 - as Plotly calls them
) -> Chart:  # fmt: skip
    """Return a chart with a title, a subtitle, and the font and colours of all charts.

    ``height`` (that of the chart without margins), the margins ``t``, ``b``, ``l`` and ``r`` (top, bottom, left,
    right), ``pad`` above the title, and the title's font ``size`` are pixels. Names in title and subtitle must be
    escaped. ``layout`` is further layout for plotly.js.
    """
    frame = {"height": t + height + b, "margin": {"t": t, "b": b, "l": l, "r": r}}
    layout = {**PAPER, **frame, "title": chart_title(title, subtitle, size, pad), **layout}
    return {"data": list(traces), "layout": layout}


def chart_title(title: str, subtitle: str, size: int = 20, pad: int = 20) -> dict[str, Any]:
    """Return the layout of a title and a subtitle at the left edge of a chart; arguments as in :func:`make_chart`."""
    return {
        "text": f"<b>{title}</b>", "font": {"size": size},
        "subtitle": {"text": subtitle, "font": {"size": 13, "color": theme.LIGHT.quiet}},
        "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
        "pad": {"l": EDGE, "t": pad},
    }  # fmt: skip


def pack_array(column: NDArray[Any]) -> dict[str, str]:
    """Encode a column for JSON in base64: this takes 11 characters per number, its digits would take about 20.

    Raises:
        TypeError: It is no column, or has integers of 64 bits, which plotly.js cannot read.
    """
    if not column.ndim or column.dtype.str[1:] in ("i8", "u8"):
        raise TypeError(f"{column!r} is no column that plotly.js reads")
    return {
        "dtype": column.dtype.str[1:],
        "shape": ",".join(map(str, column.shape)),
        "bdata": base64.b64encode(column.tobytes()).decode(),
    }
