"""The waterfall: a bar for each run's step, and between two of them what each part took away or added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT
from ddp_prof.analyze.variants.waterfall import PARTS, Waterfall
from ddp_prof.present import theme
from ddp_prof.present.charts.frame import axis, chart_frame
from ddp_prof.present.text import percent, shown_name

if TYPE_CHECKING:
    import plotly.graph_objects as go

_HEIGHT, _TOP, _BOTTOM = 520, 120, 110
_COLORS = {
    name: theme.LIGHT.colors[category]
    for name, category in (
        ("step", theme.STEP),
        ("compute", theme.COMPUTE),
        ("transfer", theme.EXPOSED),
        ("tail", theme.EXPOSED),
        ("wait", PEER_WAIT),
    )
}
"""Of the bars that stand for a category; others are grey."""
_LEAST_SHOWN = 0.005
"""Share of the longest step below which a part has no bar of its own; those go into the last one, *small parts*."""


def draw_waterfall(waterfall: Waterfall) -> go.Figure:
    """Runs from left to right, and between them what each part took away or added, in the part's colour."""
    import plotly.graph_objects as go

    return go.Figure(_bars(waterfall), _layout(waterfall))


class Bar(NamedTuple):
    """A bar of the waterfall, in ms.

    Attributes:
        run: Label of the run whose step it is; empty for a change.
        name: What it is called.
        within: For a change that the spread of both runs cannot tell from none, that spread.
    """

    run: str
    name: str
    start: float
    length: float
    within: float | None = None


def waterfall_steps(waterfall: Waterfall) -> list[Bar]:
    """The bars from left to right; those of a change lead exactly from one run's bar to the next one's."""
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
            within = change.half_width_ns[part] / 1e6 if change.is_beyond_spread(part) is False else None
            found.append(Bar("", part, level / 1e6, length / 1e6, within))
            level += length
        if other:
            found.append(Bar("", "small parts", level / 1e6, other / 1e6))
    return found


def _bars(waterfall: Waterfall) -> list[dict[str, Any]]:
    steps = waterfall_steps(waterfall)
    patterns = ["/" if bar.within else "" for bar in steps]
    marker = {
        "color": [_COLORS.get(bar.name, theme.LIGHT.quiet) for bar in steps],
        "pattern": {"shape": patterns, "fillmode": "replace", "solidity": 0.35},
    }
    return [
        {
            "type": "bar", "x": list(range(len(steps))), "base": [bar.start for bar in steps],
            "y": [bar.length for bar in steps], "width": 0.75, "showlegend": False,
            "text": [f"{bar.length:.3g}" if bar.run else f"{bar.length:+.3g}" for bar in steps],
            "textposition": "outside", "cliponaxis": False,
            "hovertext": [_hover(bar) for bar in steps],
            "hovertemplate": "%{hovertext}<extra></extra>", "marker": marker,
        }
    ]  # fmt: skip


def _hover(bar: Bar) -> str:
    spread = f"<br>no clear change: within ±{bar.within:.3f} ms (95 %)" if bar.within else ""
    return f"<b>{shown_name(bar.run or bar.name)}</b><br>{bar.length:+.3f} ms{spread}"


def _layout(waterfall: Waterfall) -> dict[str, Any]:
    steps = waterfall_steps(waterfall)
    fixed = axis(fixedrange=True)
    notice = theme.device_notice((budget.device for budget in waterfall.budgets), waterfall.caveats)
    return {
        **chart_frame(
            title=_headline(waterfall),
            subtitle=f"{notice}  ·  mean step (means of parts sum to it), and what each variant took away or added"
            + ("; hatched: within the spread of both runs" if any(bar.within for bar in steps) else ""),
            height=_HEIGHT, t=_TOP, b=_BOTTOM, l=70, r=40,
        ),
        "dragmode": False,
        "xaxis": {
            **fixed, "showgrid": False, "tickangle": -45, "tickmode": "array", "tickvals": list(range(len(steps))),
            "ticktext": [f"<b>{shown_name(bar.run)}</b>" if bar.run else bar.name for bar in steps],
        },
        "yaxis": {**fixed, "title": {"text": "ms"}, "rangemode": "tozero"},
    }  # fmt: skip


def _headline(waterfall: Waterfall) -> str:
    if not waterfall.budgets:
        return "No run marks its steps"
    first = waterfall.budgets[0]
    best = min(waterfall.budgets, key=lambda budget: budget.step_ns)
    if best is first:
        return f"No run is faster than {shown_name(first.label)}"
    share = percent(1 - best.step_ns / first.step_ns)
    return f"{shown_name(best.label)} takes {share} off the mean step of {shown_name(first.label)}"
