"""Makes the table of predicted changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ddp_prof.analyze.cost import RunCost
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.what_if.prediction import (
    GAIN,
    MODEL_ERROR,
    MODEL_ERROR_FROM,
    SIGMAS,
    Prediction,
    RunPrediction,
)
from ddp_prof.analyze.what_if.questions import VIEWS, WAITS
from ddp_prof.columns import Row, capitalized, count_noun, milliseconds, percent, signed, size
from ddp_prof.present.columns import ms
from ddp_prof.present.headlines import cost_text
from ddp_prof.present.table import TableView, run_document
from ddp_prof.present.text import join_lines, source_name
from ddp_prof.variants import BYTES_PER_MB

_HOW_TO_READ = (
    "a change is that between two simulations, of the new step and of today's; a gain is negative, and low to high is "
    "its 90 % interval"
)

VIEWS_SAVE_COPIES = (
    f"{VIEWS} saves the copies out of buckets, which the bounds of schedule and network do not contain: it may gain "
    "more than these"
)
ONE_RANK_READ = (
    "one rank is known: what its collectives wait for other ranks counts as their transfer, so where it waits, a "
    "faster link gains less (the captures of all ranks tell it)"
)


def what_if_view(run: TraceOverlap, cost: RunCost, found: RunPrediction) -> TableView:
    """Return the table of predicted changes, a row per question.

    Args:
        run: The overlap of the run.
        cost: What communication costs it.
        found: The predictions.
    """
    bounds = cost_text(cost.cost, cost.bounds)
    title = [f"{source_name(run.trace, run.files)} · device: {run.device}"]
    title += [capitalized(bounds)] if bounds else []
    title.append(_headline(found))
    rows: list[Row] = [_row(run.label, found, one) for one in found.predictions]
    document = run_document(
        run,
        cost=asdict(cost.cost),
        bounds=asdict(cost.bounds),
        reason=found.reason,
        rank=found.rank,
        steps=found.steps,
        measured_ns=found.measured_ns,
        simulated_ns=found.simulated_ns,
        kappa=found.kappa,
        kappa_of_step=found.kappa,
        model_error={"share_of_step": MODEL_ERROR, "from": MODEL_ERROR_FROM},
        shared_steps=found.shared_steps,
        link=found.link and asdict(found.link),
        sizes={"source": found.sizes_from, "bucket_bytes": list(found.bucket_bytes), "doubts": list(found.doubts)},
        predictions=[asdict(one) for one in found.predictions],
        left_out=list(found.notes),
        warnings=list(run.warnings),
    )
    notes = [*_how_to_read(found, cost.cost.kappa), *_reasons(rows), *found.doubts, *found.notes, *run.warnings]
    shown = [{key: cell for key, cell in row.items() if key != "why"} for row in rows]
    return TableView(join_lines(title), rows, notes, document, shown, keys=_KEYS)


def _how_to_read(found: RunPrediction, of_kernels: float | None) -> Iterator[str]:
    """Yield how to read the table: the interval, the model's own error, and what compute beside communication takes.

    Args:
        found: The predictions.
        of_kernels: How many times as long kernels take beside communication, by those that could be compared; ``None``
            if not known.
    """
    if found.measured_ns is None or not found.predictions:
        return
    yield _HOW_TO_READ
    model = milliseconds(round(SIGMAS * MODEL_ERROR * found.measured_ns))
    share = f"{SIGMAS} x {100 * MODEL_ERROR:.2f} % of a step"
    yield f"{model} of each half of an interval are the model's own error, {share}: {MODEL_ERROR_FROM}"
    if found.kappa is not None and of_kernels is not None:
        yield (
            f"beside a collective the simulated compute takes {found.kappa:.2f} times as long, which is kappa of the "
            f"step, over all time beside communication; {of_kernels:.2f} is that of the kernels that could be compared"
        )
    if any(VIEWS in one.change and one.change_ns is not None for one in found.predictions):
        yield VIEWS_SAVE_COPIES
    if found.shared_steps is None:
        yield ONE_RANK_READ
    elif any(one.change == WAITS for one in found.predictions):
        yield f"what collectives take without waits is known from {count_noun(found.shared_steps, 'step')} of all ranks"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return why some changes are not predicted, for below the table, with the changes that have the same reason.

    A column of sentences would push the numbers out of sight.
    """
    reasons = dict.fromkeys(str(row["why"]) for row in rows if row["why"])
    named = {why: ", ".join(str(row["what_if"]) for row in rows if row["why"] == why) for why in reasons}
    return [f"{changes}: {why}" for why, changes in named.items()]


def _row(label: str, found: RunPrediction, one: Prediction) -> Row:
    """Return the row of one predicted change."""
    whole = None if found.measured_ns is None or one.change_ns is None else found.measured_ns + one.change_ns
    largest = None if one.largest_bytes is None else one.largest_bytes / BYTES_PER_MB
    why = one.reason if one.beyond_ns is None else f"{one.reason} (extrapolated: {signed(one.beyond_ns)})"
    times = map(ms, (one.change_ns, one.low_ns, one.high_ns, whole))
    return dict(zip(_KEYS, (label, one.change, one.calls, largest, *times, one.verdict, why), strict=True))


_KEYS = (
    *("run", "what_if", "buckets", "largest_MiB", "change_ms", "change_low_ms", "change_high_ms", "whole_step_ms"),
    *("verdict", "why"),
)


def _headline(found: RunPrediction) -> str:
    """Return which change gains most, or why nothing is predicted; then what the predictions are based on."""
    if found.reason:
        return f"Nothing is predicted: {found.reason}."
    assert found.link is not None
    assert found.measured_ns is not None
    assert found.simulated_ns is not None
    gains = [one for one in found.predictions if one.verdict == GAIN and one.change_ns is not None]
    best = min(gains, key=lambda one: one.change_ns or 0, default=None)
    answer = "None of these changes is known to gain anything."
    if best is not None:
        # A gain is a negative change, so its least is the high end of the change.
        least, most = (milliseconds(-(end or 0)) for end in (best.high_ns, best.low_ns))
        answer = f"'{best.change}' gains most: {milliseconds(-(best.change_ns or 0))} per step ({least} to {most})."
    units = count_noun(found.gradients, "gradient") if found.gradients else "whole buckets only"
    off = percent((found.simulated_ns - found.measured_ns) / found.measured_ns)
    per_mib = milliseconds(found.link.times.ns_per_byte * BYTES_PER_MB)
    link, who = found.link.times, "one rank" if found.rank is None else f"rank {found.rank}"
    return (
        f"{answer} Based on {count_noun(found.steps, 'step')} of {who}: {size(sum(found.bucket_bytes))} in "
        f"{count_noun(len(found.bucket_bytes), 'bucket')} ({units}; by {found.sizes_from}); a collective takes "
        f"{milliseconds(round(link.overhead_ns))} plus {per_mib} per MiB; today's step, simulated, is "
        f"off by {off}."
    )
