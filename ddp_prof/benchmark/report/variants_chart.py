"""Step time and communication's share by variant, a block of bars for each batch size and context length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.report.figure import TOP, layout
from ddp_prof.benchmark.report.rows import half_ms, share_percent, status_text, value_ms
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import axis, rows_axis
from ddp_prof.present.text import shown_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddp_prof.benchmark.report.testbeds import TestbedResults
    from ddp_prof.benchmark.settings import SettingSummary

_ROW, _BOTTOM = 26, 60


def draw_variants(results: TestbedResults) -> go.Figure:
    """A bar a setting: communication by the host timer after the rest of the step."""
    import plotly.graph_objects as go

    rows = chart_rows(results)
    settings = [(row, summary) for row, summary in enumerate(rows) if not isinstance(summary, str)]
    drawn = [(row, summary) for row, summary in settings if summary.timing.step_ns]
    figure_layout = layout(results, _headline(results), TOP + _BOTTOM + _ROW * max(1, len(rows)), b=_BOTTOM, r=150)
    figure_layout |= {
        "barmode": "stack",
        "xaxis": axis("step time (ms); bars: 95 % interval", rangemode="tozero", fixedrange=True),
        "yaxis": rows_axis([_tick(row) for row in rows]),
        "annotations": [_label(row, summary) for row, summary in settings],
    }  # fmt: skip
    return go.Figure([_rest(drawn), _communication(drawn)], figure_layout)


def chart_rows(results: TestbedResults) -> list[str | SettingSummary]:
    """The rows from top to bottom: the title of each block, and its settings."""
    rows: list[str | SettingSummary] = []
    workload = None
    for summary in results.summaries:
        if summary.setting.workload != workload:
            workload = summary.setting.workload
            rows.append(f"batch {workload[0]} x {workload[1]} tokens")
        rows.append(summary)
    return rows


def _tick(row: str | SettingSummary) -> str:
    return f"<b>{shown_name(row)}</b>  " if isinstance(row, str) else f"{shown_name(row.setting.label)}  "


def _communication_ms(summary: SettingSummary) -> float:
    return value_ms(summary.timing.communication_ns) or 0.0


def _rest(drawn: list[tuple[int, SettingSummary]]) -> dict[str, Any]:
    lengths = [(value_ms(summary.timing.step_ns) or 0.0) - _communication_ms(summary) for _, summary in drawn]
    return {
        "type": "bar", "orientation": "h", "name": "rest of the step", "width": 0.7, "hoverinfo": "skip",
        "x": lengths, "y": [row for row, _ in drawn], "marker": {"color": theme.LIGHT.colors[theme.COMPUTE_ONLY]},
    }  # fmt: skip


def _communication(drawn: list[tuple[int, SettingSummary]]) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "width": 0.7,
        "name": "communication by the host timer (without synchronizing)",
        "x": [_communication_ms(summary) for _, summary in drawn], "y": [row for row, _ in drawn],
        "marker": {"color": theme.LIGHT.colors[theme.COMMUNICATION]},
        "error_x": {
            "type": "data", "array": [half_ms(summary.timing.step_ns) or 0.0 for _, summary in drawn],
            "color": theme.LIGHT.notice, "thickness": 1.5, "width": 4,
        },
        "hovertext": [_hover(summary) for _, summary in drawn], "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _hover(summary: SettingSummary) -> str:
    step, half = value_ms(summary.timing.step_ns) or 0.0, half_ms(summary.timing.step_ns)
    spread = "" if half is None else f" ± {half:.2f}"
    return (
        f"<b>{shown_name(summary.setting.label)}</b><br>step {step:.2f}{spread} ms, of that "
        f"{_communication_ms(summary):.2f} ms communication, {summary.runs} runs"
    )


def _label(row: int, summary: SettingSummary) -> dict[str, Any]:
    """Communication's share at the right margin; in place of a bar, why there is none."""
    position = {"yref": "y", "y": row, "showarrow": False, "xanchor": "left"}
    share = share_percent(summary.timing)
    if share is None:
        text = status_text(summary).replace("_", " ")
        return {**position, "xref": "paper", "x": 0, "text": text, "font": {"color": theme.LIGHT.notice}}
    return {**position, "xref": "paper", "x": 1, "xshift": 12, "text": f"<b>{share:.0f} %</b> communication"}


def _headline(results: TestbedResults) -> str:
    shares = [(share, summary) for summary in results.summaries if (share := share_percent(summary.timing)) is not None]
    if not shares:
        return "No setting was measured"
    least, most = (pick(shares, key=lambda share: share[0]) for pick in (min, max))
    return (
        f"Communication takes {most[0]:.0f} % ({most[1].setting.label}) to {least[0]:.0f} % "
        f"({least[1].setting.label}) of the step, by the host timer"
    )
