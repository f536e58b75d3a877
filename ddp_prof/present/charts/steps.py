"""The steps of each run one by one: how much of their communication hides, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.present import theme
from ddp_prof.present.charts.comparison import subtitle
from ddp_prof.present.charts.frame import STILL, axis, chart_frame, rows_axis, run_label
from ddp_prof.present.text import percent, shown_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

_TOP, _BOTTOM, _LEFT, _RIGHT = 92, 60, 170, 90
_BAND, _ROW = 66, 50
_HALF = 0.36
"""Half the height of a run's band; 1 is the distance between runs."""


def draw_overlap_by_step(results: Sequence[TraceOverlap]) -> go.Figure:
    """One band per run from 0 to 100 %, in the order given: a dot per step of each rank, a line for the ranks' mean."""
    import plotly.graph_objects as go

    bands = [trace for row, result in enumerate(results) for trace in _overlap_traces(row, result)]
    steps = [step for result in results for rank in result.ranks for step in rank.marked_steps]
    come_again = any(step.step not in (None, step.step_key) for step in steps)
    layout = _layout(results, "Overlap of each step", "step, counted from the first" if come_again else "step", _BAND)
    layout["xaxis"] |= {"tickformat": "d", "showgrid": False}
    layout["shapes"] = [_limit(row + side * _HALF) for row in range(len(results)) for side in (-1, 1)]
    layout["annotations"] = [
        _limit_label(row + side * _HALF, text)
        for row in range(len(results))
        for side, text in ((-1, "100 %"), (1, "0 %"))
    ]
    return go.Figure(bands, layout)


def draw_step_times(results: Sequence[TraceOverlap]) -> go.Figure:
    """One row per run, in the order given: how long each step of each rank took, with quartiles and median."""
    import plotly.graph_objects as go

    title = "length of a step, ms: each step of each rank, with quartiles and median"
    layout = _layout(results, "How long steps take", title, _ROW)
    layout["xaxis"] |= {"rangemode": "tozero"}
    return go.Figure([_box(row, result) for row, result in enumerate(results)], layout)


def overlap_by_step(rank: RankOverlap) -> list[tuple[int, float]]:
    """Key of each step that communicates, and the share overlapped, 0 to 1."""
    return [(step.step_key or 0, step.overlap_ratio or 0.0) for step in rank.communicating_steps]


def step_times_ms(result: TraceOverlap) -> list[float]:
    """Milliseconds of each step of each rank; a capture without steps has none."""
    return [ns / 1e6 for rank in result.ranks for ns in rank.lengths_ns]


def _share_to_y(row: int, share: float) -> float:
    return row + _HALF * (1 - 2 * share)


def _overlap_traces(row: int, result: TraceOverlap) -> list[dict[str, Any]]:
    """A run's overlap of each step: points of all ranks, and their mean as a line."""
    known = [pair for rank in result.ranks for pair in overlap_by_step(rank)]
    names = {key: called for rank in result.ranks for key, called in rank.step_names.items()}
    steps = sorted({step for step, _ in known})
    means = [float(np.mean([share for number, share in known if number == step])) for step in steps]
    name, color = shown_name(result.label), theme.LIGHT.colors[theme.OVERLAPPED]
    return [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
            "x": steps, "y": [_share_to_y(row, share) for share in means], "line": {"color": color, "width": 2},
        },
        {
            "type": "scatter", "mode": "markers", "showlegend": False,
            "x": [step for step, _ in known], "y": [_share_to_y(row, share) for _, share in known],
            "hovertext": [f"<b>{name}</b>, {names[step]}: {percent(share)} overlapped" for step, share in known],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": color, "size": 7, "opacity": 0.5},
        },
    ]  # fmt: skip


def _box(row: int, result: TraceOverlap) -> dict[str, Any]:
    return {
        "type": "box", "orientation": "h", "x": step_times_ms(result), "y0": row, "name": shown_name(result.label),
        "width": 0.5, "boxpoints": "all", "jitter": 0.6, "pointpos": 0, "whiskerwidth": 0.4, "showlegend": False,
        "hoveron": "points", "hovertemplate": "%{x:.2f} ms<extra></extra>", "fillcolor": "rgba(0,0,0,0)",
        "line": {"color": theme.LIGHT.text, "width": 1.6},
        "marker": {"color": theme.LIGHT.quiet, "size": 6, "opacity": 0.7},
    }  # fmt: skip


def _limit(y: float) -> dict[str, Any]:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "layer": "below",
        "line": {"color": theme.LIGHT.line, "width": 1},
    }  # fmt: skip


def _limit_label(y: float, text: str) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 1, "xanchor": "left", "xshift": 6, "y": y, "showarrow": False,
        "text": text, "font": {"size": 11, "color": theme.LIGHT.quiet},
    }  # fmt: skip


def _layout(results: Sequence[TraceOverlap], title: str, measure: str, row: int) -> dict[str, Any]:
    """One row per run, from top to bottom."""
    return {
        **chart_frame(
            title=title,
            subtitle=subtitle(results),
            height=_TOP + _BOTTOM + row * max(1, len(results)), size=18, pad=16, t=_TOP, b=_BOTTOM, l=_LEFT, r=_RIGHT,
        ),
        **STILL,
        "xaxis": axis(measure, fixedrange=True),
        "yaxis": rows_axis([run_label(result.label) for result in results], tickfont={"size": 13}),
    }  # fmt: skip
