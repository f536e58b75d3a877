"""What the figures of a results database share: the layout, and the line that says where was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.present import style
from ddp_prof.present.results_words import place_title
from ddp_prof.present.timeline_words import shown_name

if TYPE_CHECKING:
    from ddp_prof.analyze.places import PlaceResults
    from ddp_prof.present.style import Look

TOP = 110


def subtitle(place: PlaceResults, look: Look) -> str:
    """Where and on what; a CPU, and a GPU that ranks shared, stand out."""
    text = shown_name(place_title(place.place, place.environment))
    if place.place.device is None:
        return text
    caveats = [caveat for each in place.summaries for caveat in each.caveats]
    notice = style.place_notice([place.place.device], caveats, look)
    return text.replace(f"device: {place.place.device}", notice, 1)


def layout(place: PlaceResults, look: Look, title: str, height: int, **margins: int) -> dict[str, Any]:
    """The layout of a figure of a place, without axes."""
    return {
        "template": "none", "height": height, "dragmode": False, "hovermode": "closest",
        "margin": {"t": TOP, "b": 70, "l": 170, "r": 90, **margins},
        "paper_bgcolor": look.paper, "plot_bgcolor": look.paper,
        "font": {"family": style.FONT, "size": style.FONT_SIZE, "color": look.text},
        "title": {
            "text": f"<b>{shown_name(title)}</b>", "font": {"size": 20},
            "subtitle": {"text": subtitle(place, look), "font": {"size": 13, "color": look.quiet}},
            "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
            "pad": {"l": 24, "t": 20},
        },
        "hoverlabel": {"align": "left", "font": {"family": style.FONT, "size": 13}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
    }  # fmt: skip


def axis(look: Look, title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {
        "gridcolor": look.line, "zeroline": False, "tickfont": {"color": look.quiet}, "fixedrange": True,
        "title": {"text": title, "font": {"color": look.quiet, "size": style.FONT_SIZE}, "standoff": 8},
        **more,
    }  # fmt: skip
