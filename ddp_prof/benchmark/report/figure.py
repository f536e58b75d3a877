"""What the figures of a results database share: the layout, and the line that says where was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.report.words import place_title
from ddp_prof.present.charts import theme
from ddp_prof.present.charts.frame import LEGEND, chart_frame
from ddp_prof.present.timeline.text import shown_name

if TYPE_CHECKING:
    from ddp_prof.benchmark.places import PlaceResults
    from ddp_prof.present.charts.theme import Palette

TOP = 110


def subtitle(place: PlaceResults, palette: Palette) -> str:
    """Where and on what; a CPU, and a GPU that ranks shared, stand out."""
    text = shown_name(place_title(place.place, place.environment))
    if place.place.device is None:
        return text
    caveats = [caveat for summary in place.summaries for caveat in summary.caveats]
    notice = theme.place_notice([place.place.device], caveats, palette)
    return text.replace(f"device: {place.place.device}", notice, 1)


def layout(place: PlaceResults, palette: Palette, title: str, height: int, **margins: int) -> dict[str, Any]:
    """The layout of a figure of a place, without axes."""
    return {
        **chart_frame(
            palette,
            title=shown_name(title),
            subtitle=subtitle(place, palette),
            height=height, **{"t": TOP, "b": 70, "l": 170, "r": 90, **margins},
        ),
        "dragmode": False, "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"family": theme.FONT, "size": 13}},
        "legend": LEGEND,
    }  # fmt: skip


def axis(palette: Palette, title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {
        "gridcolor": palette.line, "zeroline": False, "tickfont": {"color": palette.quiet}, "fixedrange": True,
        "title": {"text": title, "font": {"color": palette.quiet, "size": theme.FONT_SIZE}, "standoff": 8},
        **more,
    }  # fmt: skip
