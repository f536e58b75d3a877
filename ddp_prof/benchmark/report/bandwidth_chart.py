"""Bandwidth of an all-reduce by the size of its message, with the model that was fitted to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.benchmark.alpha_beta import Unknown
from ddp_prof.benchmark.report.chart_layout import layout
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import axis
from ddp_prof.present.text import milliseconds, percent, size

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddp_prof.benchmark.report.testbeds import TestbedResults

_HEIGHT = 560
_POINTS = 200
_MINOR = {"minor": {"ticks": "inside", "ticklen": 4, "showgrid": False}}
_TICK_STEP = 8
"""Ratio of neighbouring ticks of the message size: 1 KB, 8 KB, 64 KB, 512 KB, 4 MB."""


def draw_bandwidth(results: TestbedResults) -> go.Figure:
    """Bytes over time: a dot a message size, the fitted model as a line."""
    import plotly.graph_objects as go

    figure_layout = layout(results, _headline(results), _HEIGHT, l=90, r=60)
    figure_layout |= {
        "xaxis": axis("message size (log scale)", type="log", fixedrange=True, **_size_ticks(results)),
        "yaxis": axis("algbw = bytes / time (GB/s, log scale)", type="log", dtick=1, fixedrange=True, **_MINOR),
    }
    return go.Figure([_measured(results), *_fitted(results)], figure_layout)


def _size_ticks(results: TestbedResults) -> dict[str, Any]:
    """Labels with units, as all other sizes have them; the default's would be powers of ten of bytes."""
    sizes = [message.bytes for message in results.messages]
    first, last = (math.floor(math.log(size / 2**10, _TICK_STEP)) for size in (min(sizes), max(sizes)))
    ticks = [2**10 * _TICK_STEP**power for power in range(first, last + 2)]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [size(round(tick)) for tick in ticks]}


def _measured(results: TestbedResults) -> dict[str, Any]:
    messages = results.messages
    return {
        "type": "scatter", "mode": "markers", "name": "measured by the host: median of each size; bars: its spread",
        "x": [message.bytes for message in messages], "y": [message.bytes / message.time_ns for message in messages],
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1.2, "width": 5,
            "array": [message.bytes / message.low_ns - message.bytes / message.time_ns for message in messages],
            "arrayminus": [message.bytes / message.time_ns - message.bytes / message.high_ns for message in messages],
        },
        "hovertext": [
            f"<b>{size(message.bytes)}</b><br>{milliseconds(round(message.time_ns))}, "
            f"{message.calls} calls in {message.runs} runs"
            for message in messages
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"color": theme.LIGHT.colors["backward"], "size": 11},
    }  # fmt: skip


def _fitted(results: TestbedResults) -> list[dict[str, Any]]:
    if isinstance(results.model, Unknown):
        return []
    link = results.model.link
    sizes = np.geomspace(results.messages[0].bytes, results.messages[-1].bytes, _POINTS)
    return [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip",
            "name": f"fitted s / (o + s / w); median error {percent(link.relative_error)}",
            "x": sizes.tolist(), "y": [size / link.time_ns(size) for size in sizes.tolist()],
            "line": {"color": theme.LIGHT.colors[theme.OVERLAPPED], "width": 2},
        }
    ]  # fmt: skip


def _headline(results: TestbedResults) -> str:
    if isinstance(results.model, Unknown):
        return "What an all-reduce costs by its size"
    link = results.model.link
    overhead = milliseconds(round(link.overhead_ns))
    return f"An all-reduce takes {overhead} a call plus its bytes at {link.bytes_per_ns:.3g} GB/s"
