"""The waterfall as rows and notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.analyze.variants.waterfall import PARTS
from ddp_prof.present.text import percent

if TYPE_CHECKING:
    from ddp_prof.analyze.variants.contention import Contention
    from ddp_prof.analyze.variants.waterfall import Budget, Change, Waterfall
    from ddp_prof.present.columns import Row


def waterfall_rows(waterfall: Waterfall) -> list[Row]:
    """The first run's mean step by parts; then, run by run, what changed, and the step that this leads to."""
    if not waterfall.budgets:
        return []
    rows = [_row(waterfall.budgets[0].label, waterfall.budgets[0], waterfall.budgets[0].step_ns)]
    for budget, change in zip(waterfall.budgets[1:], waterfall.changes, strict=True):
        rows.append(_row(f"{change.before} -> {change.after}", change, budget.step_ns))
    return rows


def readable_rows(waterfall: Waterfall) -> list[Row]:
    """The same rows, in which a change that its spread cannot tell from none is a spread and no change."""
    rows = waterfall_rows(waterfall)
    for row, change in zip(rows[1:], waterfall.changes, strict=True):
        for part in (*PARTS, "step"):
            if change.is_beyond_spread(part) is False:
                key = "sum_ms" if part == "step" else f"{part}_ms"
                width = change.half_width_ns[part]
                row[key] = f"within ±{width / 1e6:.2f}" if width else row[key]
    return rows


def waterfall_notes(waterfall: Waterfall) -> list[str]:
    """How to read the table, and what it does not know."""
    notes = [
        "mean step, ms: the first row is divided into its parts, each other one is the change, which they sum to",
        "within ±: the steps of both runs scatter too much to tell a change (95 % intervals); CSV and JSON sum",
    ]
    notes += [f"{label}: left out, its trace tells no steps" for label in waterfall.left_out]
    notes += [f"{label}: left out, it ran on another device than the first run" for label in waterfall.other_device]
    notes += [
        f"{budget.label}: the ranks could not be compared, so waiting is part of transfer and tail"
        for budget in waterfall.budgets
        if not budget.knows_wait
    ]
    reasons: dict[str, list[str]] = {}
    for budget in waterfall.budgets:
        reasons.setdefault(_contention_note(budget.contention), []).append(budget.label)
    return notes + [f"contention, {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]


def _contention_note(found: Contention) -> str:
    if found.slowdown is None:
        return found.reason or "not known"
    return (
        f"beside communication kernels take {found.slowdown:.2f} times as long (95 % interval "
        f"{found.slowdown_low:.2f} to {found.slowdown_high:.2f}), by {found.kernels} kernels in "
        f"{percent(found.share)} of the time beside it"
    )


def _row(name: str, parts: Budget | Change, step_ns: int) -> Row:
    return {
        "from -> to": name,
        **{f"{part}_ms": None if (time := getattr(parts, f"{part}_ns")) is None else time / 1e6 for part in PARTS},
        "sum_ms": parts.step_ns / 1e6,
        "step_ms": step_ns / 1e6,
    }
