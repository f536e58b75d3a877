"""Draws charts that compare runs: parts of a step, overlap and length of each step, and the waterfall."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.variants.comparison import TURNS, VariantSummary
from ddp_prof.analyze.variants.waterfall import PARTS, Waterfall
from ddp_prof.columns import listed, percent
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart, rows_axis, run_label
from ddp_prof.present.comparison_headlines import hidden_shares_text, other_job_texts
from ddp_prof.present.headlines import communicating_steps_text
from ddp_prof.present.text import plain_name, shown_name, three_digits, to_plain_text

_THIN = 0.04
"""Fraction of the chart's width below which a bar cannot hold its number."""
_BAR_PX = 28
"""Fewest pixels from a bar of the waterfall to the next one: its slanted labels of one line do not touch each other."""
_TICK = 40
"""Most characters of the name of a run below its bar of the waterfall."""


def draw_comparison(results: Sequence[TraceOverlap], summaries: Sequence[VariantSummary]) -> Chart:
    """Draw one row per run: on the left the parts of the typical step, on the right the overlap of each step.

    Args:
        results: The overlap of each run.
        summaries: The figures of each run, in the same order.
    """
    longest = max((sum(parts_ms(summary).values()) for summary in summaries), default=0)
    some = " that communicates" if any(map(communicating_steps_text, summaries)) else ""
    # The overlap of all communication as a number, to the right of each row.
    totals = [
        {
            "xref": "paper", "x": 1, "xanchor": "left", "xshift": 14, "yref": "y", "y": row, "showarrow": False,
            "text": f"<b>{percent(summary.overlap_ratio)}</b>", "font": {"size": 16},
        }
        for row, summary in enumerate(summaries)
    ]  # fmt: skip
    return make_chart(
        [*_step_part_bars(summaries), *_step_dots(results), _totals(summaries)],
        title=to_plain_text(hidden_shares_text([(plain_name(run.label), run.overlap_ratio) for run in summaries])),
        subtitle=subtitle(results),
        height=46 * max(1, len(results)), t=150, b=64, l=170, r=90,
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": theme.FONT_SIZE - 1},
        **STILL,
        legend={**LEGEND, "traceorder": "normal"},
        xaxis=axis(
            f"parts of the typical step{some}, ms",
            domain=[0, 0.58], range=[0, longest * 1.02 or 1], fixedrange=True, visible=bool(longest),
        ),
        xaxis2=axis(
            "communication overlapped by compute",
            domain=[0.66 if longest else 0, 1], range=[-4, 104], anchor="y", ticksuffix=" %", fixedrange=True,
        ),
        yaxis=rows_axis([run_label(result.label) for result in results], tickfont={"size": 13}),
        annotations=[*totals, *_thin_labels([parts_ms(summary) for summary in summaries], longest)],
    )  # fmt: skip


def parts_ms(summary: VariantSummary) -> dict[str, float]:
    """Return the length in ms of each part of the typical step, which sum to its length; empty if not known."""
    return {part: ns / 1e6 for part in theme.STRIP if (ns := summary.parts_ns[part]) is not None}


def _step_part_bars(summaries: Sequence[VariantSummary]) -> list[dict[str, Any]]:
    """Return the stacked bars of the left half: a Plotly trace for each part of a step that a run has."""
    parts = [parts_ms(summary) for summary in summaries]
    return [
        {
            "type": "bar", "orientation": "h", "name": theme.LEGEND[part], "width": 0.62,
            "x": lengths, "y": list(range(len(summaries))),
            "text": [three_digits(length) if length else "" for length in lengths],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
            "hovertext": [
                f"<b>{shown_name(summary.label)}: {theme.LEGEND[part]}</b><br>{length:.3f} ms per step"
                for summary, length in zip(summaries, lengths, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": theme.LIGHT.colors[part], "line": {"width": 0.8, "color": theme.LIGHT.paper}},
        }
        for part in theme.STRIP
        if any(lengths := [item.get(part, 0.0) for item in parts])
    ]  # fmt: skip


def _step_dots(results: Sequence[TraceOverlap]) -> list[dict[str, Any]]:
    """Return the dots of the right half: for each run a Plotly trace with one dot per step of each rank.

    Dots are spread in height, so that equal ones can be told apart: by multiples of the golden ratio modulo 1, which
    spread any number of dots evenly.
    """
    dots = []
    for row, result in enumerate(results):
        known = [
            (rank, names[step.step_key], step)
            for rank, names in ((rank, rank.step_names) for rank in result.ranks if not rank.reason)
            for step in rank.communicating_steps
        ]
        shares = [100 * (step.overlap_ratio or 0) for _, _, step in known]
        dots.append(
            {
                "type": "scatter", "mode": "markers", "xaxis": "x2", "showlegend": row == 0, "legendgroup": "dots",
                "name": "overlap of one step of one rank",
                "x": shares, "y": [row + 0.44 * ((index * 0.618034) % 1 - 0.5) for index in range(len(shares))],
                "hovertext": [
                    f"<b>{shown_name(result.label)}</b><br>{name}, {shown_name(rank.name)}<br>"
                    f"{share:.1f} % of {(step.comm_ns or 0) / 1e6:.3f} ms communication overlapped"
                    for (rank, name, step), share in zip(known, shares, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {"color": theme.LIGHT.colors[theme.OVERLAPPED], "size": 7, "opacity": 0.45},
            }
        )  # fmt: skip
    return dots


def _totals(summaries: Sequence[VariantSummary]) -> dict[str, Any]:
    """Return a vertical mark for each run at the overlap of all its communication."""
    ratios = enumerate(summary.overlap_ratio for summary in summaries)
    shares = [(row, 100 * ratio) for row, ratio in ratios if ratio is not None]
    return {
        "type": "scatter", "mode": "markers", "xaxis": "x2", "name": "overlap of all communication",
        "x": [share for _, share in shares], "y": [row for row, _ in shares],
        "hovertemplate": "%{x:.1f} % of all communication overlapped<extra></extra>",
        "marker": {
            "symbol": "line-ns", "size": 22, "line": {"width": 3, "color": theme.LIGHT.text}, "color": theme.LIGHT.text,
        },
    }  # fmt: skip


def _thin_labels(rows: Sequence[Mapping[str, float]], longest: float) -> Iterator[dict[str, Any]]:
    """Yield, as annotations, a number above each exposed part that is too thin to hold it.

    Args:
        rows: The parts of a step of each run, in ms; see :func:`parts_ms`.
        longest: Length in ms that fills the chart's width.
    """
    for row, parts in enumerate(rows):
        exposed = parts.get(theme.EXPOSED, 0)
        if 0 < exposed < _THIN * longest:
            yield {
                "xref": "x", "x": parts[theme.COMPUTE_ONLY] + parts[theme.OVERLAPPED] + exposed / 2, "yref": "y",
                "y": row, "yshift": 19, "showarrow": False, "text": three_digits(exposed),
                "font": {"size": theme.FONT_SIZE - 1, "color": theme.LIGHT.colors[theme.EXPOSED]},
            }  # fmt: skip


def subtitle(results: Sequence[TraceOverlap]) -> str:
    """Return a subtitle with the device and the number of ranks of the runs."""
    caveats = {caveat for result in results for caveat in result.caveats}
    text = theme.device_notice((result.device for result in results), caveats)
    ranks = sorted({len(result.ranks) for result in results})
    return f"{text}  ·  {listed(list(map(str, ranks)), 'or')} {'rank' if ranks == [1] else 'ranks'}"


_HALF = 0.36
"""Half of the height of a run's band; the distance between runs is 1."""


def draw_overlap_by_step(results: Sequence[TraceOverlap]) -> Chart:
    """Draw one band per run from 0 to 100 %: a dot per step of each rank, a line for the mean over ranks."""
    steps = [step for result in results for rank in result.ranks for step in rank.marked_steps]
    # Where numbers of steps repeat, keys are positions.
    repeated = any(step.step not in (None, step.step_key) for step in steps)
    title = "step, counted from the first" if repeated else "step"
    most_ticks = min(10, len({step.step_key for step in steps}))
    # Height and text of the lines at 100 % and 0 % of each band.
    limits = [(row + side * _HALF, text) for row in range(len(results)) for side, text in ((-1, "100 %"), (1, "0 %"))]
    return _steps_chart(
        [trace for row, result in enumerate(results) for trace in _overlap_traces(row, result)],
        results,
        "Overlap of each step",
        axis(title, fixedrange=True, tickformat="d", nticks=most_ticks, showgrid=False),
        row_height=66,
        shapes=[
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "layer": "below",
                "line": {"color": theme.LIGHT.line, "width": 1},
            }
            for y, _ in limits
        ],
        annotations=[
            {
                "xref": "paper", "x": 1, "xanchor": "left", "xshift": 6, "y": y, "showarrow": False,
                "text": text, "font": {"size": 11, "color": theme.LIGHT.quiet},
            }
            for y, text in limits
        ],
    )  # fmt: skip


def draw_step_times(results: Sequence[TraceOverlap]) -> Chart:
    """Draw one row per run: the length of each step of each rank, with quartiles and median."""
    measure = "length of a step, ms: each step of each rank, with quartiles and median"
    boxes = [
        {
            "type": "box", "orientation": "h", "y0": row, "name": shown_name(result.label),
            "x": [ns / 1e6 for rank in result.ranks for ns in rank.lengths_ns],
            "width": 0.5, "boxpoints": "all", "jitter": 0.6, "pointpos": 0, "whiskerwidth": 0.4, "showlegend": False,
            "hovertext": [
                f"<b>{shown_name(result.label)}</b><br>{names[step.step_key]}, {shown_name(rank.name)}"
                for rank, names in ((rank, rank.step_names) for rank in result.ranks) for step in rank.timed_steps
            ],
            "hoveron": "points", "hovertemplate": "%{hovertext}: %{x:.2f} ms<extra></extra>",
            "fillcolor": "rgba(0,0,0,0)",
            "line": {"color": theme.LIGHT.text, "width": 1.6},
            "marker": {"color": theme.LIGHT.quiet, "size": 6, "opacity": 0.7},
        }
        for row, result in enumerate(results)
    ]  # fmt: skip
    times = axis(measure, fixedrange=True, rangemode="tozero")
    return _steps_chart(boxes, results, "How long steps take", times, row_height=50)


def _steps_chart(
    traces: Sequence[dict[str, Any]],
    results: Sequence[TraceOverlap],
    title: str,
    xaxis: dict[str, Any],
    row_height: int,
    **layout: Any,
) -> Chart:
    """Return a chart with one row per run.

    Args:
        traces: The ``data`` of plotly.js.
        results: The runs.
        title: Its title.
        xaxis: Its horizontal axis.
        row_height: Pixels per run.
        layout: Further layout for plotly.js.
    """
    return make_chart(
        traces, title=title, subtitle=subtitle(results), height=row_height * max(1, len(results)), size=18, pad=16,
        t=92, b=60, l=170, r=90, **STILL, xaxis=xaxis,
        yaxis=rows_axis([run_label(result.label) for result in results], tickfont={"size": 13}), **layout,
    )  # fmt: skip


def _overlap_traces(row: int, result: TraceOverlap) -> list[dict[str, Any]]:
    """Return the Plotly traces of one run's band: a line for the mean over ranks, and a point per step of each rank."""
    known = [
        (step.step_key or 0, step.overlap_ratio or 0.0)
        for rank in result.ranks
        if not rank.reason
        for step in rank.communicating_steps
    ]
    # Distinct steps, and for each point which of them it is.
    steps, which = np.unique([step for step, _ in known], return_inverse=True)
    # For each distinct step, the sum of its shares over their number.
    means = np.bincount(which, [share for _, share in known]) / np.bincount(which)
    names = {key: called for rank in result.ranks for key, called in rank.step_names.items()}
    name, color = shown_name(result.label), theme.LIGHT.colors[theme.OVERLAPPED]
    return [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
            "x": steps.tolist(), "y": (row + _HALF * (1 - 2 * means)).tolist(), "line": {"color": color, "width": 2},
        },
        {
            "type": "scatter", "mode": "markers", "showlegend": False,
            "x": [step for step, _ in known], "y": [row + _HALF * (1 - 2 * share) for _, share in known],
            "hovertext": [f"<b>{name}</b>, {names[step]}: {percent(share)} overlapped" for step, share in known],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": color, "size": 7, "opacity": 0.5},
        },
    ]  # fmt: skip


_COLORS = {
    "step": theme.LIGHT.colors[theme.STEP],
    "compute": theme.LIGHT.colors[theme.COMPUTE],
    "transfer": theme.LIGHT.colors[theme.EXPOSED],
    "tail": theme.LIGHT.colors[theme.EXPOSED],
    "wait": theme.LIGHT.colors[PEER_WAIT],
}
"""Colours of bars by the part that they stand for; other parts are grey."""
_LEAST_SHOWN = 0.005
"""Fraction of the longest step below which a part has no bar of its own; the bar *small parts* sums such parts."""


def draw_waterfall(waterfall: Waterfall, summaries: Sequence[VariantSummary] = ()) -> Chart:
    """Draw the mean steps of runs from left to right, and between two runs the change of each part.

    Args:
        waterfall: The runs and their differences.
        summaries: The runs with their speed-ups, for the title; without them the title compares mean steps.
    """
    steps = waterfall_steps(waterfall)
    fixed = axis(fixedrange=True)
    notice = theme.device_notice((budget.device for budget in waterfall.budgets), waterfall.caveats)
    return make_chart(
        [_waterfall_bars(steps)],
        title=_waterfall_headline(waterfall, summaries),
        subtitle=f"{notice}  ·  mean step (means of parts sum to it), and what each variant took away or added"
        + ("; hatched: within the spread of both runs" if any(bar.within for bar in steps) else "")
        + "".join(f"; {to_plain_text(text)}" for text in other_job_texts(summaries)),
        height=290, t=120, b=130, l=70, r=40,
        dragmode=False,
        meta={"narrowest": 110 + _BAR_PX * len(steps)},
        xaxis={
            **fixed, "showgrid": False, "tickangle": -45, "tickmode": "array", "tickvals": list(range(len(steps))),
            "ticktext": [
                f"<b>{to_plain_text(plain_name(bar.run, _TICK))}</b>" if bar.run else bar.name for bar in steps
            ],
            "automargin": True,
        },
        yaxis={**fixed, "title": {"text": "ms"}, "rangemode": "tozero"},
    )  # fmt: skip


class Bar(NamedTuple):
    """A bar of the waterfall; it stands for the step of a run, or for the change of a part of it between two runs.

    Attributes:
        run: Label of the run; empty for a change.
        name: Name of the part, or ``step``.
        start: Where the bar starts, in ms.
        length: Its length in ms, negative for a part that became shorter.
        within: If the change is not significant, half of its 95 % interval in ms; else ``None``.
    """

    run: str
    name: str
    start: float
    length: float
    within: float | None = None


def waterfall_steps(waterfall: Waterfall) -> list[Bar]:
    """Return the bars from left to right; the changes between two runs sum exactly to the difference of their steps."""
    found: list[Bar] = []
    least = _LEAST_SHOWN * max((budget.step_ns for budget in waterfall.budgets), default=0)
    for index, budget in enumerate(waterfall.budgets):
        found.append(Bar(budget.label, "step", 0.0, budget.step_ns / 1e6))
        if index == len(waterfall.changes):
            break
        change, level, other = waterfall.changes[index], budget.step_ns, 0
        for part in PARTS:
            length = getattr(change, f"{part}_ns") or 0
            if abs(length) < least:
                other += length
                continue
            half_width = change.half_width_ns.get(part)
            within = half_width / 1e6 if half_width and change.is_beyond_spread(part) is False else None
            found.append(Bar("", part, level / 1e6, length / 1e6, within))
            level += length
        if other:
            found.append(Bar("", "small parts", level / 1e6, other / 1e6))
    return found


def _waterfall_bars(steps: Sequence[Bar]) -> dict[str, Any]:
    """Return the bars as a Plotly trace; changes that are not significant are hatched."""
    patterns = ["/" if bar.within else "" for bar in steps]
    # A bar is as wide as four or five characters, and Plotly writes a longer text in smaller letters: small parts have
    # no digits below a thousandth of the longest step, or 0.1 ms.
    longest = max((abs(bar.length) for bar in steps), default=0) or 1
    decimals = max(1, 3 - math.floor(math.log10(longest)))
    return {
        "type": "bar", "x": list(range(len(steps))), "base": [bar.start for bar in steps],
        "y": [bar.length for bar in steps], "width": 0.75, "showlegend": False,
        "text": [three_digits(round(bar.length, decimals), "" if bar.run else "+") for bar in steps],
        "textposition": "outside", "cliponaxis": False,
        "hovertext": [
            f"<b>{shown_name(bar.run or bar.name)}</b><br>{bar.length:{'' if bar.run else '+'}.3f} ms"
            + (f"<br>no clear change: within ±{bar.within:.3f} ms (95 %)" if bar.within else "")
            for bar in steps
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {
            "color": [_COLORS.get(bar.name, theme.LIGHT.quiet) for bar in steps],
            "pattern": {"shape": patterns, "fillmode": "replace", "solidity": 0.35},
        },
    }  # fmt: skip


def _waterfall_headline(waterfall: Waterfall, summaries: Sequence[VariantSummary]) -> str:
    """Return the title: by how much the fastest run's step is shorter than that of the first run.

    It says so only as far as the measured speed-ups support it. Without speed-ups, two runs are compared by a
    significant change of their mean steps.
    """
    if not waterfall.budgets:
        return "No run marks its steps"
    labels = [shown_name(budget.label) for budget in waterfall.budgets]
    drawn = {budget.label for budget in waterfall.budgets}
    known = [run for run in summaries if run.label in drawn and run.speedup]
    if known and known[0].label == waterfall.budgets[0].label:
        faster = [run for run in known if run.supported and (run.speedup or 0) > 1]
        if not faster:
            return f"No run is clearly faster than {labels[0]}"
        best = max(faster, key=lambda run: run.speedup or 0)
        # Where it is not said otherwise, a step is that of the bars, a mean.
        which, how = ("", ", measured in turns") if best.speedup_from == TURNS else ("median ", "")
        share, step = percent(1 - 1 / (best.speedup or 1)), f"the {which}step of {labels[0]}{how}"
        if any(run.is_as_fast_as(best) for run in known if run is not best):
            return f"Up to {share} off {step}"  # several runs are as fast, as far as can be told
        return f"{shown_name(best.label)} takes {share} off {step}"
    if len(waterfall.changes) == 1 and (change := waterfall.changes[0]).is_beyond_spread("step"):
        share = percent(abs(change.step_ns) / waterfall.budgets[0].step_ns)
        takes = f"takes {share} off" if change.step_ns < 0 else f"adds {share} to"
        return f"{labels[1]} {takes} the mean step of {labels[0]}"
    return f"Where the mean step differs from {labels[0]} to {labels[-1]}" if waterfall.changes else labels[0]
