"""Who is late when: a heat map of ranks and steps, and below it what each step pays for it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from ddp_prof.present import theme
from ddp_prof.present.charts.frame import chart_frame
from ddp_prof.present.headlines import rank_name, skew_headline

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RunSkew
    from ddp_prof.present.theme import Palette

_TOP, _ROW, _COST, _BOTTOM, _LEFT = 120, 34, 130, 60, 110


def draw_skew(run: RunAnalysis, skew: RunSkew, palette: Palette = theme.LIGHT) -> go.Figure:
    """A row a rank and a column a step; the redder, the later the rank arrived."""
    import plotly.graph_objects as go

    figure = go.Figure([_heat(skew, palette), _cost(skew, palette)])
    figure.update_layout(_layout(run, skew, palette))
    return figure


def _heat(skew: RunSkew, palette: Palette) -> dict[str, Any]:
    names = [rank_name(rank) for rank in skew.ranks]
    lags = [
        [None if (lag := step.lags_ns[row]) is None else max(0, lag) / 1e6 for step in skew.steps]
        for row in range(len(skew.ranks))
    ]
    return {
        "type": "heatmap", "x": _columns(skew), "y": list(range(len(names))), "z": lags, "xgap": 1, "ygap": 2,
        "zmin": 0,
        # From clear to red, so that it is right on a light page and on a dark one.
        "colorscale": [[0, "rgba(128,128,128,0.12)"], [1, palette.colors[theme.EXPOSED]]],
        "colorbar": {"title": {"text": "lag, ms"}, "thickness": 12, "y": 1, "yanchor": "top", "len": 0.6},
        "customdata": [[name] * len(skew.steps) for name in names],
        "hovertemplate": "<b>%{customdata}</b>, step %{x}<br>%{z:.3f} ms after the others' median<extra></extra>",
    }  # fmt: skip


def _cost(skew: RunSkew, palette: Palette) -> dict[str, Any]:
    return {
        "type": "bar", "x": _columns(skew), "y": [step.cost_ns / 1e6 for step in skew.steps], "yaxis": "y2",
        "name": "exposed wait", "showlegend": False, "marker": {"color": palette.colors[theme.EXPOSED]},
        "hovertemplate": "step %{x}: %{y:.3f} ms exposed wait<extra></extra>",
    }  # fmt: skip


def _columns(skew: RunSkew) -> list[str]:
    return [str(step.step) for step in skew.steps]


def _layout(run: RunAnalysis, skew: RunSkew, palette: Palette) -> dict[str, Any]:
    heat = _ROW * max(2, len(skew.ranks))
    inner = heat + _COST
    axis = {"gridcolor": palette.line, "zeroline": False, "tickfont": {"color": palette.quiet}}
    notice = theme.place_notice([run.device], run.caveats, palette)
    return {
        **chart_frame(
            palette,
            title=html.escape(skew_headline(skew).claim),
            subtitle=f"{notice}  ·  {html.escape(run.label)}  ·  above the lag of each rank, below the exposed wait",
            height=_TOP + inner + _BOTTOM, t=_TOP, b=_BOTTOM, l=_LEFT, r=90,
        ),
        "xaxis": {**axis, "type": "category", "showgrid": False, "title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {
            **axis, "domain": [1 - heat / inner, 1], "showgrid": False, "autorange": "reversed",
            "tickmode": "array", "tickvals": list(range(len(skew.ranks))),
            "ticktext": [f"<b>{rank_name(rank)}</b>  " for rank in skew.ranks],
        },
        "yaxis2": {**axis, "domain": [0, (_COST - 30) / inner], "title": {"text": "ms"}, "rangemode": "tozero"},
    }  # fmt: skip
