"""Draws the four figures of a testbed.

They show step times by variant, step times by bucket size, predicted and measured tails by bucket size, and bandwidth
by message size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from ddp_prof.benchmark.bucket_model import CURVE_MB, BucketModel, compare_expectations, error_text, mismatch_text
from ddp_prof.benchmark.findings import TestbedResults, bucket_sizes
from ddp_prof.benchmark.settings import SettingSummary, half_ms, status_text, value_ms
from ddp_prof.columns import capitalized, count_noun, digits, milliseconds, percent, size
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart, rows_axis
from ddp_prof.present.text import MAX_NAME, shown_name
from ddp_prof.variants import BYTES_PER_MB

_TOP, _ROW, _BOTTOM, _HEIGHT = 110, 26, 60, 560  # pixels: above the plot, of a row of bars, below the plot, of a figure
_ASIDE = 1.025  # factor between the x values of curves, so that their error bars do not cover each other


def draw_figures(results: TestbedResults) -> dict[str, tuple[str, Chart]]:
    """Draw the figures that the measurements allow; return (title, figure) by the name of the figure's file."""
    figures = {"variants": ("Step time and communication by variant", draw_variants(results))}
    if len(bucket_sizes(results.summaries)) > 1:
        figures["buckets"] = ("Step time by bucket size", draw_buckets(results))
        if isinstance(results.model, BucketModel):
            figures["model"] = ("Communication left by the model of bucketing", draw_model(results, results.model))
    if results.messages:
        figures["bandwidth"] = ("Bandwidth by message size", draw_bandwidth(results))
    return figures


def draw_variants(results: TestbedResults) -> Chart:
    """Return a figure with one bar per setting, grouped by workload.

    A bar is the step time: first the rest of the step, then the communication by the host timer.
    """
    # The rows from top to bottom: titles of workloads (texts) and settings.
    rows: list[str | SettingSummary] = []
    for summary in results.summaries:
        if (title := f"{summary.setting.work_text} tokens") not in rows:
            rows.append(title)
        rows.append(summary)
    # The settings with a step time have bars.
    settings = [(row, summary) for row, summary in enumerate(rows) if not isinstance(summary, str)]
    drawn = [summary for _, summary in settings if summary.step_ns]
    steps = [value_ms(summary.step_ns) or 0.0 for summary in drawn]
    waits = [value_ms(summary.communication_ns) or 0.0 for summary in drawn]
    bar = {"type": "bar", "orientation": "h", "width": 0.7, "y": [row for row, one in settings if one.step_ns]}
    # The figure's title names the largest and the smallest share of communication.
    shares = [(share, summary) for summary in drawn if (share := summary.communication_share) is not None]
    title = "No setting was measured"
    if shares:
        (most, first), (least, last) = (pick(shares, key=lambda share: share[0]) for pick in (max, min))
        title = (
            f"Communication takes {most * 100:.0f} % ({first.setting.label}) to {least * 100:.0f} % "
            f"({last.setting.label}) of the step, by the host timer"
        )
    traces = [
        {
            **bar, "name": "rest of the step", "hoverinfo": "skip",
            "x": [step - wait for step, wait in zip(steps, waits, strict=True)],
            "marker": {"color": theme.LIGHT.colors[theme.COMPUTE_ONLY]},
        },
        {
            **bar, "name": "communication by the host timer (without synchronizing)", "x": waits,
            "marker": {"color": theme.LIGHT.colors[theme.COMMUNICATION]},
            "error_x": _error(drawn, theme.LIGHT.notice),
            "hovertext": [
                f"<b>{shown_name(summary.setting.label)}</b><br>step {step:.2f} ms, of that {wait:.2f} ms "
                f"communication, {count_noun(summary.runs, 'run')}"
                for summary, step, wait in zip(drawn, steps, waits, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
        },
    ]  # fmt: skip
    ticks = [f"<b>{row}</b>  " if isinstance(row, str) else f"{shown_name(row.setting.label)}  " for row in rows]
    return _figure(
        results, title, traces, height=_TOP + _BOTTOM + _ROW * max(1, len(rows)), l=170, r=150,
        barmode="stack",
        xaxis=axis("step time (ms); bars: 95 % interval", rangemode="tozero", fixedrange=True),
        yaxis=rows_axis(ticks),
        annotations=[_row_label(row, summary) for row, summary in settings],
    )  # fmt: skip


def _row_label(row: int, summary: SettingSummary) -> dict[str, Any]:
    """Return the label of a row, at the right the share of communication, or in place of a bar why there is none."""
    position = {"yref": "y", "y": row, "showarrow": False, "xanchor": "left", "xref": "paper"}
    if not summary.step_ns:
        text = status_text(summary).replace("_", " ")
        return {**position, "x": 0, "text": text, "font": {"color": theme.LIGHT.notice}}
    share = summary.communication_share
    text = "communication not timed" if share is None else f"<b>{share * 100:.0f} %</b> communication"
    return {**position, "x": 1, "xshift": 12, "text": text}


def draw_buckets(results: TestbedResults) -> Chart:
    """Return a figure of step time over bucket size, one curve per workload.

    A dashed line is the step time of the fastest other variant of the same workload.
    """
    traces = []
    for color, aside, buckets in _curves(results):
        # The curve of a workload, with error bars.
        sizes = [summary.setting.swept_mb or 0.0 for summary in buckets]
        workload = buckets[0].setting.workload
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": f"bucketed, {buckets[0].setting.work_text}",
                "x": [mb * aside for mb in sizes], "y": [value_ms(summary.step_ns) for summary in buckets],
                "error_y": _error(buckets, color), "customdata": sizes,
                "line": {"color": color, "width": 2.5}, "marker": {"color": color, "size": 9},
                "hovertemplate": "%{customdata:g} MiB: %{y:.2f} ms<extra></extra>",
            }
        )  # fmt: skip
        # The dashed line, from left of the smallest to right of the largest bucket size.
        same_work = [one for one in results.summaries if one.setting.workload == workload and one.step_ns]
        if without_buckets := [one for one in same_work if one.setting.swept_mb is None]:
            best = min(without_buckets, key=lambda one: value_ms(one.step_ns) or math.inf)
            name = f"fastest other, {best.setting.work_text}: {shown_name(best.setting.label)}"
            ends, step_ms = [min(sizes) / 1.3, max(sizes) * 1.3], value_ms(best.step_ns)
            traces.append(_line(name, ends, [step_ms, step_ms], color=color, width=1.3, dash="dash"))
    notes = [
        observation.text
        for observation in results.observations
        if observation.name.startswith("model_") and observation.text
    ]
    return _figure(
        results, "Step time by bucket size", traces, " ".join(notes),
        xaxis=_size_axis(results), yaxis=axis("step time (ms); bars: 95 % interval", fixedrange=True),
        legend={"x": 1.02, "y": 1}, r=330,
    )  # fmt: skip


def draw_model(results: TestbedResults, model: BucketModel) -> Chart:
    """Return a figure of the communication after backward over bucket size, one color per workload.

    A line is the prediction. Dots are measured: the tail in captures, or the host timer if not all sizes have captures.
    """
    # Points of the lines: the measured bucket sizes, and sizes between and a little beyond them.
    sizes = bucket_sizes(results.summaries)
    drawn = sorted({*sizes, *(mb for mb in CURVE_MB if min(sizes) / 2 <= mb <= max(sizes) * 2)})
    traces = []
    for color, aside, buckets in _curves(results):
        workload, work = buckets[0].setting.workload, buckets[0].setting.work_text
        expected_ms = [model.expected_ns(mb, workload) / 1e6 for mb in drawn]
        traces.append(_line(f"expected, {work}", drawn, expected_ms, color=color, width=2))
        # The dots: tails of captures, or the host timer.
        tails = [summary.trace.tail_ns if summary.trace else None for summary in buckets]
        is_traced = all(tail is not None for tail in tails)
        timers = [value_ms(summary.communication_ns) for summary in buckets]
        expected = [model.expected_ns(summary.setting.swept_mb or 0.0, workload) / 1e6 for summary in buckets]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "marker": {"color": color, "size": 10},
                "name": f"{'tail by trace' if is_traced else 'host timer'}, {work}",
                "x": [(summary.setting.swept_mb or 0.0) * aside for summary in buckets],
                "y": [(tail or 0.0) / 1e6 for tail in tails] if is_traced else timers,
                "customdata": expected, "hovertemplate": "%{y:.2f} ms, expected %{customdata:.2f}<extra></extra>",
            }
        )  # fmt: skip
    expectations, verdict = compare_expectations(model, results.summaries), ""
    title = f"The model expects the least communication after backward with buckets of {digits(model.best_mb, 2)} MiB"
    if expectations:
        title = f"Tail by bucket size: what was expected is off by {error_text(expectations)}"
        verdict = mismatch_text(model, expectations)
    return _figure(
        results, title, traces, verdict,
        xaxis=_size_axis(results),
        yaxis=axis("communication after backward (ms)", rangemode="tozero", fixedrange=True),
        legend={"x": 1.02, "y": 1}, r=270,
    )  # fmt: skip


def draw_bandwidth(results: TestbedResults) -> Chart:
    """Return a figure of bandwidth (bytes over time of an all-reduce) by message size.

    A dot is the median of one message size; the fitted model is a line.
    """
    # Bandwidths in bytes per nanosecond, which is GB/s; the shortest time of the interval gives the highest one.
    messages, model = results.messages, results.model
    rates = [message.bytes / message.median_ns for message in messages]
    highest = [message.bytes / (message.low_ns or message.median_ns) for message in messages]
    lowest = [message.bytes / (message.high_ns or message.median_ns) for message in messages]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers",
            "name": "measured by the host: median of each size; bars: 95 % interval",
            "x": [message.bytes for message in messages], "y": rates,
            "error_y": {
                "type": "data", "symmetric": False, "thickness": 1.2, "width": 5,
                "array": [high - rate for high, rate in zip(highest, rates, strict=True)],
                "arrayminus": [rate - low for low, rate in zip(lowest, rates, strict=True)],
            },
            "hovertext": [
                f"<b>{size(one.bytes)}</b><br>{milliseconds(round(one.median_ns))}, "
                f"{count_noun(one.calls, 'call')} in {count_noun(one.runs, 'run')}"
                for one in messages
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": theme.SERIES[0], "size": 11},
        }
    ]  # fmt: skip
    # The line of the fitted model.
    title = "What an all-reduce costs by its size"
    if not isinstance(model, str):
        link = model.link
        title = capitalized(link.text)
        sizes = np.geomspace(messages[0].bytes, messages[-1].bytes, 200).tolist()
        name = f"fitted s / (o + s / w); median error {percent(link.relative_error)}"
        fitted = [number / link.time_ns(number) for number in sizes]
        traces.append(_line(name, sizes, fitted, color=theme.LIGHT.quiet, width=2))
    # Labels with units, as all other sizes have them; the default's would be powers of ten of bytes.
    first, last = (math.floor(math.log(number / 2**10, 8)) for number in (messages[0].bytes, messages[-1].bytes))
    ticks = [2**10 * 8**power for power in range(first, last + 2)]
    return _figure(
        results, title, traces,
        xaxis=axis(
            "message size (log scale)", type="log", fixedrange=True, tickmode="array", tickvals=ticks,
            ticktext=[size(round(tick)) for tick in ticks],
        ),
        yaxis=axis("algbw = bytes / time (GB/s, log scale)", type="log", dtick=1, fixedrange=True),
    )  # fmt: skip


def testbed_subtitle(results: TestbedResults) -> str:
    """Return the title of the testbed for Plotly; a CPU, or a GPU that ranks shared, is emphasized in it."""
    notice = theme.device_notice([results.testbed.device or "n/a"], results.caveats)
    return " · ".join([shown_name(results.work), notice, *map(shown_name, results.place)])


def _curves(results: TestbedResults) -> Iterator[tuple[str, float, list[SettingSummary]]]:
    """Yield the bucketed settings of each workload, with a colour and a small horizontal shift."""
    by_workload: dict[tuple[int, int], list[SettingSummary]] = {}
    for summary in results.summaries:
        if summary.step_ns and summary.setting.swept_mb is not None:
            by_workload.setdefault(summary.setting.workload, []).append(summary)
    for index, buckets in enumerate(by_workload.values()):
        yield theme.SERIES[index % len(theme.SERIES)], _ASIDE ** (index - (len(by_workload) - 1) / 2), buckets


def _line(name: str, x: Sequence[float], y: Sequence[float | None], **style: object) -> dict[str, Any]:
    """Return Plotly's trace of a line without hover text; ``style`` is Plotly's ``line``."""
    return {"type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip", "x": x, "y": y, "line": style}


def _size_axis(results: TestbedResults) -> dict[str, Any]:
    """Return the x axis of bucket sizes, with a tick at each measured size."""
    sizes, gradients = bucket_sizes(results.summaries), results.summaries[0].first.gradient_bytes
    ticks = [f"{mb:g} and more<br>(one bucket)" if mb * BYTES_PER_MB >= gradients else f"{mb:g}" for mb in sizes]
    return axis(
        "bucket size (MiB, log scale)", type="log", fixedrange=True, tickmode="array", tickvals=sizes, ticktext=ticks
    )


def _error(summaries: Sequence[SettingSummary], color: str) -> dict[str, Any]:
    """Return Plotly's error bars: how far the interval of each step time reaches from it, in milliseconds."""
    halves = [half_ms(summary.step_ns) or 0.0 for summary in summaries]
    return {"type": "data", "array": halves, "color": color, "thickness": 1.3, "width": 4}


def _figure(
    results: TestbedResults, title: str, traces: Sequence[dict[str, Any]], note: str = "", *, height: int = _HEIGHT,
    l: int = 90, r: int = 60, **layout: Any,  # noqa: E741  # as Plotly calls the margins
) -> Chart:  # fmt: skip
    """Return a figure whose subtitle names the testbed; a CPU, or a GPU that ranks shared, is emphasized there.

    Args:
        results: The results of the testbed.
        title: Title of the figure.
        traces: What is drawn, as Plotly's traces.
        note: Further sentences of the subtitle, each on a line of its own.
        height: Height of the whole figure, in pixels.
        l: Margin at the left, in pixels.
        r: Margin at the right.
        layout: Further parts of Plotly's layout.
    """
    subtitle = testbed_subtitle(results)
    lines = [line for sentence in note.replace(". ", ".\n").splitlines() for line in wrap(sentence, MAX_NAME)]
    subtitle += "".join(f"<br>{shown_name(line)}" for line in lines)
    top, bottom = _TOP + 20 * len(lines), _BOTTOM + 10
    return make_chart(
        traces, title=shown_name(title), subtitle=subtitle, height=height - top - bottom, t=top, b=bottom, l=l, r=r,
        **{**STILL, "legend": LEGEND, **layout},
    )  # fmt: skip
