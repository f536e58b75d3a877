"""What all charts have in common: paper, font, margins, and a title with a line below it, flush with the left edge.

Charts are drawn in the light palette; a page in the dark one repaints them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from ddp_prof.present import theme
from ddp_prof.present.text import plain_name, to_plain_text

LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
"""A legend in a line above the chart."""

EDGE = 24
"""Pixels to the left of titles."""

_LABEL, _LABEL_LINES = 22, 2
"""Characters of a line of a run's label, and lines."""

UNSEEN = {"width": 0.02, "color": "rgba(0,0,0,0)"}
"""An outline of boxes: without any, Plotly widens each to a pixel, and thousands of short ones hide the long ones."""

STILL: dict[str, Any] = {
    "dragmode": False, "hovermode": "closest",
    "hoverlabel": {"align": "left", "font": {"family": theme.FONT, "size": 13}},
}  # fmt: skip
"""Of a chart that is looked at as a whole: no zoom."""


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis, with a quiet title."""
    font = {"color": theme.LIGHT.quiet, "size": theme.FONT_SIZE}
    return {
        "gridcolor": theme.LIGHT.line, "zeroline": False, "tickfont": {"color": theme.LIGHT.quiet},
        **({"title": {"text": title, "font": font, "standoff": 8}} if title else {}),
        **more,
    }  # fmt: skip


def rows_axis(labels: Sequence[str], **more: Any) -> dict[str, Any]:
    """The axis of a chart with a row for each label, from top to bottom."""
    return {
        "tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": list(labels),
        "range": [len(labels) - 0.5, -0.5], "showgrid": False, "zeroline": False, "fixedrange": True, **more,
    }  # fmt: skip


def run_label(label: str) -> str:
    """What a row at the left is called: in lines that fit its margin, of which the last may be cut."""
    words = re.sub(r"(?<=[_\-./])(?=.)", " ", plain_name(label))
    lines = wrap(words, _LABEL, max_lines=_LABEL_LINES, placeholder=" …")
    whole = [re.sub(r"(?<=[_\-./]) ", "", line) for line in lines]
    return "<br>".join(f"<b>{to_plain_text(line)}</b>  " for line in whole)


def chart_frame(
    *, title: str, subtitle: str, height: int, size: int = 20, pad: int = 20, **margins: int
) -> dict[str, Any]:
    """Plotly's layout of a chart, without axes and legend.

    Names in title and subtitle are already escaped; ``size`` is of the title's letters. ``height``, ``pad`` above the
    title and the margins round the plot (``t``, ``b``, ``l``, ``r``) are pixels.
    """
    return {
        "template": "none", "height": height, "margin": margins,
        "paper_bgcolor": theme.LIGHT.paper, "plot_bgcolor": theme.LIGHT.paper,
        "font": {"family": theme.FONT, "size": theme.FONT_SIZE, "color": theme.LIGHT.text},
        "title": chart_title(title, subtitle, size, pad),
    }  # fmt: skip


def chart_title(title: str, subtitle: str, size: int = 20, pad: int = 20) -> dict[str, Any]:
    """The two lines above a chart, flush with the left edge; arguments as of :func:`chart_frame`."""
    return {
        "text": f"<b>{title}</b>", "font": {"size": size},
        "subtitle": {"text": subtitle, "font": {"size": 13, "color": theme.LIGHT.quiet}},
        "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
        "pad": {"l": EDGE, "t": pad},
    }  # fmt: skip
