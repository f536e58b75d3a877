"""Draws the skew of a run: how late each rank is in each step, and what that costs the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.straggler import RunSkew
from ddp_prof.present import theme
from ddp_prof.present.charts import Chart, axis, make_chart
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.text import shown_name, to_plain_text

MOST_COLUMNS = 600
"""With more steps, a column stands for several steps and shows their largest lags and cost."""

_ROW, _COST, _HIGHEST = 34, 130, 900
_MOST_LABELS = 60
_MOST_GAPPED = 120


def draw_skew(run: RunAnalysis, skew: RunSkew, nodes: Mapping[str, str | None] | None = None) -> Chart:
    """Draw one row per rank and one column per step (the stronger the colour, the later it arrived), and costs.

    A capture without steps has one column, with the worst lags and the sum of costs.

    Args:
        run: The run.
        skew: Its skew.
        nodes: The machines of ranks by their names, if known; ranks of one machine lie together.
    """
    places = [(nodes or {}).get(rank.name) or "" for rank in skew.ranks]
    order = sorted(range(len(places)), key=places.__getitem__)
    names = [shown_name(" · ".join(filter(None, (places[row], skew.ranks[row].name)))) for row in order]
    if skew.steps:
        lags, costs = [step.lags_ns for step in skew.steps], [step.cost_ns for step in skew.steps]
        columns, unit = [run.step_names[step.step].removeprefix("step ") for step in skew.steps], "step "
    else:
        known = [rank.cost_ns for rank in skew.ranks if rank.cost_ns is not None]
        lags, costs = [tuple(rank.worst_lag_ns for rank in skew.ranks)], [sum(known) if known else None]
        columns, unit = ["the whole capture"], ""
    width = -(-len(columns) // MOST_COLUMNS)
    firsts = list(range(0, len(columns), width))
    columns = columns[::width]
    # None becomes NaN, which fmax ignores where another figure is known.
    lags_ms = np.fmax.reduceat(np.array(lags, float), firsts)[:, order].T / 1e6
    costs_ms = np.fmax.reduceat(np.array(costs, float), firsts) / 1e6
    heat = min(_HIGHEST, _ROW * max(2, len(names)))
    inner = heat + _COST
    shown = range(0, len(names), 1 + len(names) // _MOST_LABELS)
    plain = axis()
    notice = theme.device_notice([run.device], run.caveats)
    several = f"  ·  a column is up to {width} steps and shows the largest figure" if width > 1 else ""
    lag_map: dict[str, Any] = {
        "type": "heatmap", "x": columns, "y": list(range(len(names))), "z": lags_ms,
        # Gaps between cells, unless they would hide small ones.
        "xgap": int(len(columns) < _MOST_GAPPED), "ygap": 2 * int(len(names) < _MOST_GAPPED),
        "zmin": 0,  # so that a rank that is early has the colour of one that is on time
        # From transparent, which fits a light and a dark page.
        "colorscale": [[0, "rgba(128,128,128,0.12)"], [1, theme.LIGHT.text]],
        "colorbar": {"title": {"text": "lag, ms"}, "thickness": 12, "y": 1, "yanchor": "top", "len": 0.6},
        "hoverongaps": False,
        "customdata": [[name] * len(columns) for name in names],
        "hovertemplate": (
            f"<b>%{{customdata}}</b>, {unit}%{{x}}<br>%{{z:.3f}} ms after the others' median<extra></extra>"
        ),
    }  # fmt: skip
    cost_bars = {
        "type": "bar", "x": columns, "y": costs_ms, "yaxis": "y2", "showlegend": False,
        "marker": {"color": theme.LIGHT.colors[PEER_WAIT]},
        "hovertemplate": f"{unit}%{{x}}: others wait %{{y:.3f}} ms for the last rank, exposed<extra></extra>",
    }  # fmt: skip
    return make_chart(
        [lag_map, cost_bars],
        title=to_plain_text(skew_headline(skew).claim),
        subtitle=(
            f"{notice}  ·  {shown_name(run.label)}  ·  lag of each rank; others' exposed wait for the last{several}"
        ),
        height=inner, t=120, b=60, l=110, r=90,
        xaxis={**plain, "type": "category", "showgrid": False, "title": {"text": unit.strip()}, "anchor": "y2"},
        yaxis={
            **plain, "domain": [1 - heat / inner, 1], "showgrid": False, "autorange": "reversed",
            "automargin": True, "tickmode": "array", "tickvals": list(shown),
            "ticktext": [f"<b>{names[row]}</b>  " for row in shown],
        },
        yaxis2={**plain, "domain": [0, (_COST - 30) / inner], "title": {"text": "ms"}, "rangemode": "tozero"},
    )  # fmt: skip
