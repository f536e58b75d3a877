"""What the study's figures share: the layout, and the line that names the testbed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.report.words import testbed_title
from ddp_prof.manifest import Caveat
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import LEGEND, STILL, chart_frame
from ddp_prof.present.text import shown_name

if TYPE_CHECKING:
    from ddp_prof.benchmark.report.testbeds import TestbedResults

TOP, LINE = 110, 20


def subtitle(results: TestbedResults) -> str:
    """The testbed; a CPU, and a GPU that ranks shared, are emphasized."""
    text = shown_name(testbed_title(results.testbed, results.environment))
    if results.testbed.device is None:
        return text
    said = "; ".join(caveat for summary in results.summaries for caveat in summary.caveats)
    caveats = [caveat for caveat in Caveat if caveat.value in said]
    notice = theme.place_notice([results.testbed.device], caveats)
    return text.replace(f"device: {results.testbed.device}", notice, 1)


def layout(results: TestbedResults, title: str, height: int, *, note: str = "", **margins: int) -> dict[str, Any]:
    """The layout of a figure of a testbed, without axes; a note becomes a second line below the title."""
    line = f"<br>{shown_name(note)}" if note else ""
    return {
        **chart_frame(
            title=shown_name(title),
            subtitle=subtitle(results) + line,
            height=height, **{"t": TOP + (LINE if note else 0), "b": 70, "l": 170, "r": 90, **margins},
        ),
        **STILL, "legend": LEGEND,
    }  # fmt: skip
