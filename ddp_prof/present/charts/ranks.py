"""Draws the ranks of a run: which rank is late in which step and the cost; for many ranks a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.straggler import RunSkew, StepSkew
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.present import theme
from ddp_prof.present.charts import Chart, axis, make_chart
from ddp_prof.present.columns import ms
from ddp_prof.present.headlines import skew_headline
from ddp_prof.present.text import shown_name, to_plain_text

_ROW, _COST = 34, 130


def draw_skew(run: RunAnalysis, skew: RunSkew) -> Chart:
    """Draw one row per rank and one column per step (the stronger the colour, the later it arrived), and costs."""
    columns = [run.step_names[step.step].removeprefix("step ") for step in skew.steps] or ["the whole capture"]
    heat = _ROW * max(2, len(skew.ranks))
    inner = heat + _COST
    plain = axis()
    notice = theme.device_notice([run.device], run.caveats)
    return make_chart(
        [_lag_heat_map(skew, columns), _cost_bars(skew, columns)],
        title=to_plain_text(skew_headline(skew).claim),
        subtitle=f"{notice}  ·  {shown_name(run.label)}  ·  lag of each rank; others' exposed wait for the last",
        height=inner, t=120, b=60, l=110, r=90,
        xaxis={**plain, "type": "category", "showgrid": False, "title": {"text": _unit(skew)}, "anchor": "y2"},
        yaxis={
            **plain, "domain": [1 - heat / inner, 1], "showgrid": False, "autorange": "reversed",
            "tickmode": "array", "tickvals": list(range(len(skew.ranks))),
            "ticktext": [f"<b>{shown_name(rank.name)}</b>  " for rank in skew.ranks],
        },
        yaxis2={**plain, "domain": [0, (_COST - 30) / inner], "title": {"text": "ms"}, "rangemode": "tozero"},
    )  # fmt: skip


def _steps_or_whole(skew: RunSkew) -> Sequence[StepSkew]:
    """Return the columns; a capture without steps has one, with the worst lags and the sum of costs."""
    known = [rank.cost_ns for rank in skew.ranks if rank.cost_ns is not None]
    whole = StepSkew(0, tuple(rank.worst_lag_ns for rank in skew.ranks), None, sum(known) if known else None)
    return skew.steps if skew.steps else [whole]


def _lag_heat_map(skew: RunSkew, columns: Sequence[str]) -> dict[str, Any]:
    names, steps = [shown_name(rank.name) for rank in skew.ranks], _steps_or_whole(skew)
    lags = [
        [None if (lag := step.lags_ns[row]) is None else max(0, lag) / 1e6 for step in steps]
        for row in range(len(skew.ranks))
    ]
    return {
        "type": "heatmap", "x": columns, "y": list(range(len(names))), "z": lags, "xgap": 1, "ygap": 2,
        "zmin": 0,
        # From transparent, which fits a light and a dark page.
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
        "type": "bar", "x": columns, "y": [ms(step.cost_ns) for step in _steps_or_whole(skew)], "yaxis": "y2",
        "name": "exposed wait of others", "showlegend": False, "marker": {"color": theme.LIGHT.colors[PEER_WAIT]},
        "hovertemplate": f"{_unit(skew)}%{{x}}: %{{y:.3f}} ms others wait for the last rank, exposed<extra></extra>",
    }  # fmt: skip


def _unit(skew: RunSkew) -> str:
    return "step " if skew.steps else ""


LEAST_RANKS = 9
"""From this number of ranks on, a report shows the heat map in place of the skew."""
MOST_COLUMNS = 600
"""With more steps, a column stands for several steps and shows their largest figure."""

_GAP, _MAP = 46, 300
_MOST_LABELS = 24

Figures = Sequence[Mapping[Any, int | None]]
"""For each rank, nanoseconds by the key of the step."""


def draw_heat_map(result: TraceOverlap, skew: RunSkew) -> Chart:
    """Draw exposed time, exposed wait and step length of each rank in each step; ranks are sorted by node."""
    ranks = sorted(result.ranks, key=lambda rank: rank.node or "")
    columns = _columns(sorted({step.step_key for rank in ranks for step in rank.steps if step.step_key is not None}))
    panels = _panels(ranks, skew)
    names = [f"{rank.node} · {rank.name}" if rank.node else rank.name for rank in ranks]
    called = {key: name for rank in ranks for key, name in rank.step_names.items()}
    steps = [called[key].removeprefix("step ") for key in columns]
    maps = []
    for index, (title, color, figures) in enumerate(panels):
        values = np.array([[_largest_ms(of_rank, keys) for keys in columns.values()] for of_rank in figures], float)
        maps.append(_map(index, title, color, values, names, steps))
    width = max((len(keys) for keys in columns.values()), default=1)
    each = f"a column is up to {width} steps and shows the largest figure" if width > 1 else "a column is a step"
    notice = theme.device_notice([result.device], result.caveats)
    shown = list(range(0, len(names), -(-len(names) // _MOST_LABELS) or 1))
    plain = axis(showgrid=False)
    rows: dict[str, Any] = {
        f"yaxis{'' if index == 0 else index + 1}": {
            **plain, "domain": _domain(index), "autorange": "reversed", "tickmode": "array", "tickvals": shown,
            "ticktext": [shown_name(names[row]) + "  " for row in shown],
        }
        for index in range(len(panels))
    }  # fmt: skip
    return make_chart(
        maps,
        title=f"{len(names)} ranks, {sum(map(len, columns.values())):,} steps",
        subtitle=f"{notice}  ·  {shown_name(result.label)}  ·  a row is a rank, {each}",
        height=3 * _MAP + 2 * _GAP, t=110, b=50, l=150, r=90,
        xaxis={**plain, "type": "category", "title": {"text": "step"}, "anchor": "y3", "nticks": 20},
        annotations=[
            {
                "text": f"<b>{title}</b>", "xref": "paper", "x": 0, "xanchor": "left", "yref": "paper",
                "y": _domain(index)[1], "yanchor": "bottom", "showarrow": False, "font": {"color": theme.LIGHT.text},
            }
            for index, (title, _, _) in enumerate(panels)
        ],
        **rows,
    )  # fmt: skip


def _columns(keys: Sequence[int]) -> dict[int, list[int]]:
    """Return the steps of each column, by the first of them."""
    width = -(-len(keys) // MOST_COLUMNS) if keys else 1
    return {keys[at]: list(keys[at : at + width]) for at in range(0, len(keys), width)}


def _panels(ranks: Sequence[RankOverlap], skew: RunSkew) -> tuple[tuple[str, str, Figures], ...]:
    """Return title, colour of the largest figure, and figures of each map."""
    waits: dict[Any, dict[int, int | None]] = {_identity(rank): {} for rank in skew.ranks}
    for step in skew.steps:
        for rank, wait in zip(skew.ranks, step.waits_ns, strict=True):
            waits[_identity(rank)][step.step] = wait
    exposed = [{step.step_key: step.exposed_ns for step in rank.steps} for rank in ranks]
    times = [{step.step_key: step.length.ns for step in rank.steps} for rank in ranks]
    waited = [waits.get(_identity(rank), {}) for rank in ranks]
    return (
        ("exposed communication", theme.LIGHT.colors[theme.EXPOSED], exposed),
        ("exposed while waiting for a peer", theme.LIGHT.colors[PEER_WAIT], waited),
        ("length of the step", theme.LIGHT.text, times),
    )


def _identity(rank: Any) -> tuple[Any, ...]:
    return rank.rank, rank.process, rank.device, rank.qualifier


def _largest_ms(of_rank: Mapping[Any, int | None], keys: Sequence[int]) -> float:
    """Return the largest figure of some steps in ms; NaN if none is known."""
    return max((value / 1e6 for key in keys if (value := of_rank.get(key)) is not None), default=math.nan)


def _map(
    index: int, title: str, color: str, values: NDArray[np.float64], names: Sequence[str], steps: Sequence[str]
) -> dict[str, Any]:
    number = "" if index == 0 else str(index + 1)
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    is_length = index == 2  # lengths of steps differ little, so their scale does not begin at 0
    return {
        "type": "heatmap", "x": steps, "y": list(range(len(names))), "z": values,
        "xaxis": "x", "yaxis": f"y{number}", "zmin": low if is_length else 0, "zmax": high,
        "colorscale": [[0, "rgba(128,128,128,0.12)"], [1, color]],
        "colorbar": {"title": {"text": "ms"}, "thickness": 10, "y": _domain(index)[1], "yanchor": "top", "len": 0.28},
        "hoverongaps": False,
        "customdata": [[shown_name(name)] * len(steps) for name in names],
        "hovertemplate": f"<b>%{{customdata}}</b>, step %{{x}}: %{{z:.3f}} ms {title}<extra></extra>",
    }  # fmt: skip


def _domain(index: int) -> tuple[float, float]:
    """Return the vertical interval of a map; the first map is on top."""
    inner = 3 * _MAP + 2 * _GAP
    top = 1 - index * (_MAP + _GAP) / inner
    return max(0.0, top - _MAP / inner), top
