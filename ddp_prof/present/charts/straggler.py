"""The skew of a run: a heat map of lags by rank and step, and below it the cost of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.straggler import RunSkew, StepSkew
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import axis, chart_frame
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.text import shown_name, to_plain_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

_TOP, _ROW, _COST, _BOTTOM, _LEFT = 120, 34, 130, 60, 110


def draw_skew(run: RunAnalysis, skew: RunSkew) -> go.Figure:
    """One row per rank and one column per step; the redder, the later the rank arrived."""
    import plotly.graph_objects as go

    columns = [run.step_names[step.step].removeprefix("step ") for step in skew.steps] or ["the whole capture"]
    return go.Figure([_lag_heat_map(skew, columns), _cost_bars(skew, columns)], _layout(run, skew))


def _steps(skew: RunSkew) -> Sequence[StepSkew]:
    """The columns: a capture without steps has one, with the worst lags and all costs."""
    whole = StepSkew(0, tuple(rank.worst_lag_ns for rank in skew.ranks), None, sum(rank.cost_ns for rank in skew.ranks))
    return skew.steps if skew.steps else [whole]


def _lag_heat_map(skew: RunSkew, columns: Sequence[str]) -> dict[str, Any]:
    names, steps = [shown_name(rank.name) for rank in skew.ranks], _steps(skew)
    lags = [
        [None if (lag := step.lags_ns[row]) is None else max(0, lag) / 1e6 for step in steps]
        for row in range(len(skew.ranks))
    ]
    return {
        "type": "heatmap", "x": columns, "y": list(range(len(names))), "z": lags, "xgap": 1, "ygap": 2,
        "zmin": 0,
        # From clear, so that it is right on a light page and on a dark one.
        "colorscale": [[0, "rgba(128,128,128,0.12)"], [1, theme.LIGHT.text]],
        "colorbar": {"title": {"text": "lag, ms"}, "thickness": 12, "y": 1, "yanchor": "top", "len": 0.6},
        "customdata": [
            [(name, None if (lag := step.lags_ns[row]) is None else lag / 1e6) for step in steps]
            for row, name in enumerate(names)
        ],
        "hovertemplate": (
            f"<b>%{{customdata[0]}}</b>, {_unit(skew)}%{{x}}<br>%{{customdata[1]:.3f}} ms after the others' median"
            "<extra></extra>"
        ),
    }  # fmt: skip


def _cost_bars(skew: RunSkew, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "bar", "x": columns, "y": [step.cost_ns / 1e6 for step in _steps(skew)], "yaxis": "y2",
        "name": "exposed wait of others", "showlegend": False, "marker": {"color": theme.LIGHT.colors[PEER_WAIT]},
        "hovertemplate": f"{_unit(skew)}%{{x}}: %{{y:.3f}} ms others wait for the last rank, exposed<extra></extra>",
    }  # fmt: skip


def _unit(skew: RunSkew) -> str:
    return "step " if skew.steps else ""


def _layout(run: RunAnalysis, skew: RunSkew) -> dict[str, Any]:
    heat = _ROW * max(2, len(skew.ranks))
    inner = heat + _COST
    plain = axis()
    notice = theme.device_notice([run.device], run.caveats)
    return {
        **chart_frame(
            title=to_plain_text(skew_headline(skew).claim),
            subtitle=f"{notice}  ·  {shown_name(run.label)}  ·  lag of each rank; others' exposed wait for the last",
            height=_TOP + inner + _BOTTOM, t=_TOP, b=_BOTTOM, l=_LEFT, r=90,
        ),
        "xaxis": {**plain, "type": "category", "showgrid": False, "title": {"text": _unit(skew)}, "anchor": "y2"},
        "yaxis": {
            **plain, "domain": [1 - heat / inner, 1], "showgrid": False, "autorange": "reversed",
            "tickmode": "array", "tickvals": list(range(len(skew.ranks))),
            "ticktext": [f"<b>{shown_name(rank.name)}</b>  " for rank in skew.ranks],
        },
        "yaxis2": {**plain, "domain": [0, (_COST - 30) / inner], "title": {"text": "ms"}, "rangemode": "tozero"},
    }  # fmt: skip
