"""What the study's figures share: the layout, and the line that names the testbed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.report.words import testbed_title
from ddp_prof.manifest import Caveat
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import LEGEND, chart_frame
from ddp_prof.present.text import shown_name

if TYPE_CHECKING:
    from ddp_prof.benchmark.report.testbeds import TestbedResults
    from ddp_prof.present.theme import Palette

TOP, LINE = 110, 20


def subtitle(results: TestbedResults, palette: Palette) -> str:
    """The testbed; a CPU, and a GPU that ranks shared, are emphasized."""
    text = shown_name(testbed_title(results.testbed, results.environment))
    if results.testbed.device is None:
        return text
    said = "; ".join(caveat for summary in results.summaries for caveat in summary.caveats)
    caveats = [caveat for caveat in Caveat if caveat.value in said]
    notice = theme.place_notice([results.testbed.device], caveats, palette)
    return text.replace(f"device: {results.testbed.device}", notice, 1)


def layout(
    results: TestbedResults, palette: Palette, title: str, height: int, *, note: str = "", **margins: int
) -> dict[str, Any]:
    """The layout of a figure of a testbed, without axes; a note becomes a second line below the title."""
    line = f"<br>{shown_name(note)}" if note else ""
    return {
        **chart_frame(
            palette,
            title=shown_name(title),
            subtitle=subtitle(results, palette) + line,
            height=height, **{"t": TOP + (LINE if note else 0), "b": 70, "l": 170, "r": 90, **margins},
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
