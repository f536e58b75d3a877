"""Draws the lengths of step and tail against the size of buckets, with the tail that a model expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp_prof.columns import milliseconds
from ddp_prof.present import theme
from ddp_prof.present.charts import LEGEND, STILL, Chart, axis, make_chart
from ddp_prof.variants import BYTES_PER_MB


class SizePoint(NamedTuple):
    """What was measured with buckets of one size; times in milliseconds, ``None`` if not known.

    Attributes:
        mb: Size of the buckets in MiB.
        step_ms, tail_ms: Length of the step, and of its tail.
        expected_ms: The tail that a model expects.
        step_half_ms: How far the 95 % interval of the step reaches from it.
    """

    mb: float
    step_ms: float | None
    tail_ms: float | None
    expected_ms: float | None = None
    step_half_ms: float | None = None


def draw_sizes(points: Sequence[SizePoint], gradient_bytes: int | None, subtitle: str) -> Chart:
    """Draw a line for the step, one for the measured tail, and a dashed one for the expected tail.

    Args:
        points: The measurements, one for each bucket size.
        gradient_bytes: Size of all gradients, if known: buckets that can hold them all are marked as ``one bucket``.
        subtitle: Text below the title, in which names must be escaped.
    """
    points = sorted(points)
    sizes = [point.mb for point in points]
    lines = (
        ("step", [point.step_ms for point in points], theme.SERIES[0], "solid"),
        ("tail, measured", [point.tail_ms for point in points], theme.SERIES[1], "solid"),
        ("tail, expected", [point.expected_ms for point in points], theme.LIGHT.quiet, "dash"),
    )
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": sizes, "y": values,
            "line": {"color": color, "width": 2.5, "dash": dash}, "marker": {"color": color, "size": 9},
            "hovertemplate": f"{name}, %{{x:g}} MiB: %{{y:.2f}} ms<extra></extra>",
        }
        for name, values, color, dash in lines
        if any(value is not None for value in values)
    ]  # fmt: skip
    # The interval of the step, as error bars of the first line.
    halves = [point.step_half_ms for point in points]
    if traces and any(halves):
        error = {"type": "data", "array": [half or 0 for half in halves], "thickness": 1.3, "width": 4}
        traces[0]["error_y"] = {**error, "color": theme.SERIES[0]}
    ticks = [
        f"{mb:g}<br>(one bucket)" if gradient_bytes and mb * BYTES_PER_MB >= gradient_bytes else f"{mb:g}"
        for mb in sizes
    ]
    return make_chart(
        traces, title=_title(points), subtitle=subtitle, height=180, t=110, b=70, l=60, r=20, **STILL, legend=LEGEND,
        xaxis=axis(
            "bucket size (MiB, log scale)", type="log", fixedrange=True, tickmode="array", tickvals=sizes,
            ticktext=ticks,
        ),
        yaxis=axis("ms", rangemode="tozero", fixedrange=True),
    )  # fmt: skip


def _title(points: Sequence[SizePoint]) -> str:
    """Return the title: the shortest and the longest tail, with the bucket sizes that have them."""
    known = [(point.tail_ms, point.mb) for point in points if point.tail_ms is not None]
    if not known:
        return "Step by bucket size"
    (least, small), (most, large) = min(known), max(known)
    shortest, longest = (milliseconds(round(1e6 * ms)) for ms in (least, most))
    return f"By bucket size: the tail is {shortest} ({small:g} MiB) to {longest} ({large:g} MiB)"
