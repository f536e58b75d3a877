"""Draws the collectives of a step below the compute that could hide them, and the skew of a run's ranks."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import product
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT, WHYS
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.collectives.step_view import CollectiveView, RankStepView
from ddp_prof.columns import capitalized, milliseconds, size
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, UNSEEN, Chart, axis, make_chart
from ddp_prof.present.headlines import Headline
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.text import collective_name, shown_name, to_plain_text

MOST_ROWS = 60
"""About the most collectives of a figure; of more collectives, it shows those that are exposed longest."""

LINE = 150
"""Characters per line of the subtitle."""


class _Row(NamedTuple):
    """A row of the figure of a step.

    Attributes:
        y: Position of the row, from 0 at the top.
        label: Text beside the row.
        rank: The rank whose row it is.
        line: The collective that the row shows; ``None`` for the row with the compute of the rank.
    """

    y: int
    label: str
    rank: RankStepView
    line: CollectiveView | None


def draw_step_collectives(
    run: RunAnalysis,
    step: int,
    ranks: Sequence[RankStepView],
    headline: Headline,
) -> Chart:
    """Draw one panel per rank: compute on top, below it one row per collective in the order of launch.

    The layout's ``meta`` holds the rank and the index of each row's collective, for the script of the page.

    Args:
        run: The run.
        step: Key of the step.
        ranks: The collectives and the compute of each rank in the step.
        headline: Its claim is the title, its detail a part of the subtitle.
    """
    rows = _rows(ranks)
    notice = theme.device_notice([run.device], run.caveats)
    where = run.step_names[step] if run.has_steps else "the whole capture, in which no whole step is marked"
    # The subtitle says if collectives are left out.
    there, shown = sum(len(rank.collectives) for rank in ranks), sum(row.line is not None for row in rows)
    if shown < there:
        where += f" (the {shown} of {there} collectives that are exposed longest)"
    lines = wrap(capitalized(headline.detail), LINE)
    detail = "".join(f"<br>{to_plain_text(line)}" for line in lines)
    return make_chart(
        [*_bars(rows), *_markers(rows), _numbers(rows)],
        title=to_plain_text(headline.claim),
        subtitle=f"{notice}  ·  {shown_name(run.label)}, {where}  ·  numbers: exposed{detail}",
        height=20 * max(4, len(rows)), t=170, b=60, l=190, r=70,
        barmode="overlay",
        meta=[row.line and (row.rank.name, row.line.index) for row in rows],
        legend={**LEGEND, "traceorder": "normal"},
        xaxis=axis() | {"title": {"text": "ms since the first collective was ready or launched"}},
        yaxis={
            "tickmode": "array", "tickvals": [row.y for row in rows], "ticktext": [f"{row.label}  " for row in rows],
            "range": [len(rows) - 0.4, -0.6], "showgrid": False, "zeroline": False,
        },
    )  # fmt: skip


def _rows(ranks: Sequence[RankStepView]) -> list[_Row]:
    """Return the rows: for each rank its compute, then its collectives.

    If there are more than about ``MOST_ROWS`` collectives, each rank has only those that are exposed longest.
    """
    each_rank = max(1, MOST_ROWS // max(1, len(ranks)))
    found: list[_Row] = []
    for rank in ranks:
        found.append(_Row(len(found), f"<b>{shown_name(rank.name)}</b>  compute", rank, None))
        longest = sorted(rank.collectives, key=_exposed_ns, reverse=True)[:each_rank]
        shown = {line.index for line in longest}
        for line in rank.collectives:
            if line.index in shown:
                name = collective_name(line.index, line.bucket)
                label = name if line.bytes is None else f"{name}, {size(line.bytes)}"
                found.append(_Row(len(found), label, rank, line))
    return found


def _exposed_ns(line: CollectiveView) -> int:
    """Return for how long a collective is exposed; 0 if that is not known."""
    return sum(stretch.end_ns - stretch.start_ns for stretch in line.exposed or ())


def _bars(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """Return the bars of compute and of collectives: one Plotly trace per colour, which has one entry in the legend."""
    # Key: the kind that gives the colour, and whether it is hatched. Value: row, start, end and text of each bar.
    stretches: dict[tuple[str, bool], list[tuple[int, int, int, str]]] = {}
    for row in rows:
        if row.line is None:
            stretches.setdefault((theme.COMPUTE, False), []).extend(
                (row.y, *item, "compute") for item in row.rank.compute
            )
            continue
        for kind, start, end in _covered_stretches(row.line, row.rank.compute):
            stretches.setdefault((kind, False), []).append((row.y, start, end, row.label))
        for bare in row.line.exposed or ():
            key = (bare.why, bare.is_wait and bare.why != PEER_WAIT)
            stretches.setdefault(key, []).append((row.y, bare.start_ns, bare.end_ns, f"{row.label}, {bare.when}"))
    kinds = (*_TITLES, *WHYS)
    return [_bar(*kind, stretches[kind]) for kind in product(kinds, (False, True)) if kind in stretches]


def _covered_stretches(line: CollectiveView, compute: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """Divide the time of a collective, without the exposed time that is counted with it, into kinds.

    Args:
        line: The collective.
        compute: Starts and ends of the rank's compute, sorted and disjoint.

    Returns:
        Kind, start and end of each stretch. Kinds are: overlapped by compute; exposed, but counted with another
        collective; or plain communication, if it is not known what is exposed.
    """
    if line.exposed is None:
        return [(theme.COMMUNICATION, line.start_ns, line.end_ns)]
    own = [(stretch.start_ns, stretch.end_ns, "") for stretch in line.exposed]
    # Only the compute that may overlap the collective; its intervals are sorted and disjoint.
    near = compute[max(0, bisect(compute, (line.start_ns,)) - 1) : bisect(compute, (line.end_ns,))]
    # What lies between compute and own exposed time is counted with another collective. Own exposed time is cut out:
    # its kind is empty here.
    found, cursor = [], line.start_ns
    for start, end, kind in sorted([*own, *((start, end, theme.OVERLAPPED) for start, end in near)]):
        low, high = max(cursor, start), min(end, line.end_ns)
        if low < high:
            found += [(theme.ELSEWHERE, cursor, low), (kind, low, high)]
            cursor = high
    found.append((theme.ELSEWHERE, cursor, line.end_ns))
    return [(kind, start, end) for kind, start, end in found if kind and start < end]


def _bar(kind: str, is_wait: bool, stretches: Sequence[tuple[int, int, int, str]]) -> dict[str, Any]:
    """Return the bars of one colour as a Plotly trace.

    Args:
        kind: A reason why time is exposed, or a key of ``_TITLES``.
        is_wait: Whether a peer had not arrived, which is hatched.
        stretches: Row, start and end in ns, and text of each bar.
    """
    title = f"exposed: {kind.replace('_', ' ')}" if kind in WHYS else _TITLES[kind]
    title += ", waiting for a peer" if is_wait else ""
    hatch = "/" if is_wait else ""
    pattern = {"shape": hatch, "fillmode": "overlay", "fgcolor": theme.LIGHT.paper, "fgopacity": 0.7, "size": 6}
    return {
        "type": "bar", "orientation": "h", "name": title, "width": 0.66,
        "marker": {"color": theme.LIGHT.colors[kind], "pattern": pattern, "line": UNSEEN},
        "y": [y for y, *_ in stretches], "base": [start / 1e6 for _, start, _, _ in stretches],
        "x": [(end - start) / 1e6 for _, start, end, _ in stretches],
        "hovertext": [
            f"<b>{name}</b><br>{title}: {milliseconds(end - start)}" for _, start, end, name in stretches
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


_TITLES = {
    theme.COMPUTE: "compute",
    theme.COMMUNICATION: "communication",
    theme.OVERLAPPED: "overlapped",
    theme.ELSEWHERE: "exposed, counted with another collective",
}
"""Names of the bars that are not exposed time of their own collective, in the order of the legend."""


def _markers(rows: Sequence[_Row]) -> list[dict[str, Any]]:
    """Return marks for when each collective was ready and launched, with a line from there to its start.

    The rows of compute have marks where a pass of backward ends.
    """
    lines = [(row.y, row.line) for row in rows if row.line is not None]
    x: list[float | None] = []
    y: list[float | None] = []
    for height, line in lines:
        # A line from the first known time to the start.
        known = [time for time in (line.ready_ns, line.launch_ns) if time is not None]
        if known:
            x += [min(known) / 1e6, line.start_ns / 1e6, None]  # None: the next line is not joined to this one
            y += [height, height, None]
    quiet, text = {"color": theme.LIGHT.quiet, "width": 1}, theme.LIGHT.text
    marks = [{"type": "scatter", "mode": "lines", "x": x, "y": y, "line": quiet, "showlegend": False}]
    tick = {"symbol": "line-ns", "size": 16, "color": text, "line": {"width": 2, "color": text}}
    kinds = (
        ("ready", "ready at", [(height, line.ready_ns) for height, line in lines],
         {"symbol": "circle", "size": 7, "color": text}),
        ("launch", "launch at", [(height, line.launch_ns) for height, line in lines],
         {"symbol": "triangle-right", "size": 7, "color": text}),
        ("end of backward's compute", "backward's compute ends at",
         [(row.y, end) for row in rows if row.line is None for end in row.rank.backward_ends_ns], tick),
    )  # fmt: skip
    for name, words, times, marker in kinds:
        found = [(height, time) for height, time in times if time is not None]
        marks.append(
            {
                "type": "scatter", "mode": "markers", "name": name,
                "x": [time / 1e6 for _, time in found], "y": [height for height, _ in found], "marker": marker,
                "hovertemplate": f"{words} %{{x:.3f}} ms<extra></extra>",
            }
        )  # fmt: skip
    return marks


def _numbers(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the exposed time of each collective as a number beside its end.

    Most exposed parts are too thin to hold the number.
    """
    exposed = [(row.y, row.line.end_ns, _exposed_ns(row.line)) for row in rows if row.line and row.line.exposed]
    return {
        "type": "scatter", "mode": "text", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False,
        "x": [end / 1e6 for _, end, _ in exposed], "y": [y for y, _, _ in exposed],
        "text": [f" {milliseconds(ns)}" for _, _, ns in exposed], "textposition": "middle right",
        "textfont": {"color": theme.LIGHT.colors[theme.EXPOSED], "size": theme.FONT_SIZE - 1},
    }  # fmt: skip


MOST_COLUMNS = 600
"""With more steps, a column stands for several steps and shows their largest lags and cost."""

_ROW, _COST, _HIGHEST = 34, 130, 900
"""Pixels: the height of a rank's row, the height of the bars of cost, and the greatest height of all rows."""
_MOST_LABELS = 60
_MOST_GAPPED = 120
"""Most rows with a label, and most rows or columns with gaps between them."""


def draw_skew(run: RunAnalysis, skew: RunSkew, nodes: Mapping[str, str | None] | None = None) -> Chart:
    """Draw the skew of a run: a heat map of lags, and below it bars of what waiting for the last rank cost.

    The heat map has one row per rank and one column per step; the later a rank arrived at a step's collectives, the
    stronger its colour. A bar is the exposed time in which the other ranks waited for the last one. A capture without
    steps has one column, with the worst lag of each rank and the sum of all costs.

    Args:
        run: The run.
        skew: Its skew.
        nodes: The machine of each rank, by the rank's name; ranks of the same machine get adjacent rows.
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
    # Steps per column, rounded up.
    width = -(-len(columns) // MOST_COLUMNS)
    firsts = list(range(0, len(columns), width))
    columns = columns[::width]
    # None becomes NaN, which fmax ignores where another figure is known.
    lags_ms = np.fmax.reduceat(np.array(lags, float), firsts)[:, order].T / 1e6
    costs_ms = np.fmax.reduceat(np.array(costs, float), firsts) / 1e6
    heat = min(_HIGHEST, _ROW * max(2, len(names)))
    inner = heat + _COST
    # Rows with a label.
    shown = range(0, len(names), 1 + len(names) // _MOST_LABELS)
    plain = axis()
    notice = theme.device_notice([run.device], run.caveats)
    several = f"  ·  a column is up to {width} steps and shows the largest figure" if width > 1 else ""
    lag_map: dict[str, Any] = {
        "type": "heatmap", "x": columns, "y": list(range(len(names))), "z": lags_ms,
        # Gaps between cells, unless they would hide small ones.
        "xgap": int(len(columns) < _MOST_GAPPED), "ygap": 2 * int(len(names) < _MOST_GAPPED),
        # So that a rank that is early has the colour of one that is on time. Plotly takes both ends, or none.
        "zmin": 0, "zmax": max(np.max(lags_ms, initial=0, where=lags_ms > 0), 1e-6),
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
            f"{notice}  ·  {shown_name(run.label)}  ·  above: lag of each rank; below: how long the others wait for "
            f"the last one, exposed{several}"
        ),
        height=inner, t=120, b=60, l=110, r=90,
        xaxis={**plain, "type": "category", "showgrid": False, "title": {"text": unit.strip()}, "anchor": "y2"},
        yaxis={
            **plain, "domain": [1 - heat / inner, 1], "showgrid": False, "autorange": "reversed",
            "automargin": True, "tickmode": "array", "tickvals": list(shown),
            "ticktext": [f"<b>{names[row]}</b>  " for row in shown],
        },
        yaxis2={**plain, "domain": [0, (_COST - 30) / inner], "title": {"text": "wait, ms"}, "rangemode": "tozero"},
    )  # fmt: skip
