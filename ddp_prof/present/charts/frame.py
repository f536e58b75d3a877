"""What all charts have in common: paper, font, margins, and a title with a line below it, flush with the left edge."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ddp_prof.present import theme
from ddp_prof.present.text import as_text, plain_name

if TYPE_CHECKING:
    from ddp_prof.present.theme import Palette

LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
"""A legend in a line above the chart."""

_LABEL, _LABEL_LINES = 22, 2
"""Characters of a line of a run's label, and lines."""

UNSEEN = {"width": 0.02, "color": "rgba(0,0,0,0)"}
"""An outline of boxes: without any, Plotly widens each to a pixel, and thousands of short ones hide the long ones."""


def run_label(label: str) -> str:
    """What a row at the left is called: in lines that fit its margin, of which the last may be cut."""
    words = re.sub(r"(?<=[_\-./])(?=.)", " ", plain_name(label))
    lines = wrap(words, _LABEL, max_lines=_LABEL_LINES, placeholder=" …")
    whole = [re.sub(r"(?<=[_\-./]) ", "", line) for line in lines]
    return "<br>".join(f"<b>{as_text(line)}</b>  " for line in whole)


def chart_frame(
    palette: Palette, *, title: str, subtitle: str, height: int, size: int = 20, pad: int = 20, **margins: int
) -> dict[str, Any]:
    """Plotly's layout of a chart, without axes and legend.

    Args:
        palette: Its colours.
        title: What it says; names in it already escaped, as in ``subtitle``.
        subtitle: Where and on what was measured, and how to read it.
        height: Pixels of all of it.
        size: Of the title's letters.
        pad: Pixels above the title.
        margins: Pixels round the plot: ``t``, ``b``, ``l``, ``r``.
    """
    return {
        "template": "none", "height": height, "margin": margins,
        "paper_bgcolor": palette.paper, "plot_bgcolor": palette.paper,
        "font": {"family": theme.FONT, "size": theme.FONT_SIZE, "color": palette.text},
        "title": {
            "text": f"<b>{title}</b>", "font": {"size": size},
            "subtitle": {"text": subtitle, "font": {"size": 13, "color": palette.quiet}},
            "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
            "pad": {"l": 24, "t": pad},
        },
    }  # fmt: skip
