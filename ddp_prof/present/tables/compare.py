"""Makes the tables that compare runs: a row per run, the waterfall, and the changes between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.cost import RunCost
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.statistics import EACH_ALONE
from ddp_prof.analyze.variants.comparison import EXPLAINED_BY, TURNS, VariantSummary
from ddp_prof.analyze.variants.same_factor import SameFactor
from ddp_prof.analyze.variants.waterfall import (
    DURATION,
    LAUNCH,
    PARTS,
    QUEUEING,
    TRANSFER,
    WAIT,
    Budget,
    Change,
    CollectiveChange,
    PartChange,
    Parts,
    Waterfall,
)
from ddp_prof.columns import Row, capitalized, count_noun, document_of, milliseconds, percent, signed, table_row
from ddp_prof.present.columns import ms
from ddp_prof.present.comparison_headlines import other_job_texts
from ddp_prof.present.headlines import cost_text
from ddp_prof.present.recorders import how_recorded
from ddp_prof.present.run_notes import notes_of_runs
from ddp_prof.present.table import SCHEMA, TableView
from ddp_prof.present.text import collective_name
from ddp_prof.variants import BUCKETED, is_baseline, variant_and_size

HOW_TO_READ = (
    "times are medians over the steps of all ranks; those of communication over the steps that communicate; "
    "spread: interquartile range of the steps; overlap: share of all communication"
)


_FEW_RUNS = 3
"""Most runs whose cost is told in notes; of more runs, only the columns tell it."""


@dataclass(frozen=True)
class WhatChanged:
    """What changed between two runs of one variant.

    Attributes:
        parts: The parts of the step; empty if that is not known, and for other runs.
        factor: The factor by which all kernels of the second run take longer, if there is one.
        late: Which ranks are late in one of them; see :func:`late_ranks_text`.
        beside: How much compute runs beside communication in both, if that may explain it; see :func:`beside_text`.
    """

    parts: Sequence[PartChange] = ()
    factor: SameFactor | None = None
    late: str = ""
    beside: str = ""

    @property
    def causes(self) -> list[str]:
        """What explains several of the parts, or compute, a text for each."""
        return list(filter(None, [same_factor_text(self.factor) if self.factor else "", self.late, self.beside]))


def compare_view(
    results: Sequence[TraceOverlap],
    summaries: Sequence[VariantSummary],
    waterfall: Waterfall,
    changed: WhatChanged,
    costs: Sequence[RunCost],
) -> TableView:
    """Return the table that compares runs, a row per run; its document also has the waterfall and the changes.

    Args:
        results: The overlap of each run.
        summaries: Its figures, with its speed-up.
        waterfall: How the mean step changes from run to run.
        changed: What changed between two runs of one variant.
        costs: What communication costs each run.
    """
    warnings = notes_of_runs(results)
    notes = [how_to_read(summaries), how_recorded(results), *speedup_notes(summaries)]
    sizes = {run.label: variant_and_size(run.label) for run in summaries if run.collectives == 1}
    if whole := [label for label, (name, size) in sizes.items() if name == BUCKETED and size is not None]:
        notes.append(f"{whole[0]}: one bucket holds all gradients, so that any larger size gives the same")
    if len(summaries) <= _FEW_RUNS:  # for more runs, only the columns tell it
        notes += [f"cost, {', '.join(labels)}: {text}" for text, labels in _cost_texts(summaries, costs).items()]
    notes += warnings
    document = {
        "schema": SCHEMA,
        "variants": [
            {**document_of(summary), "cost": asdict(cost.cost), "bounds": asdict(cost.bounds)}
            for summary, cost in zip(summaries, costs, strict=True)
        ],
        "warnings": warnings,
        "waterfall": asdict(waterfall),
        "changes": [document_of(change) for change in changed.parts],
        "same_factor": asdict(changed.factor) if changed.factor else None,
        "late_ranks": changed.late or None,
    }
    return TableView("", compare_rows(summaries, costs), notes, document)


def speedup_notes(summaries: Sequence[VariantSummary]) -> list[str]:
    """Return why runs have no speed-up, or none that the measurements support."""
    notes = []
    base = next((summary for summary in summaries if is_baseline(summary.label)), None)
    other = [summary.label for summary in summaries if base and summary.device != base.device]
    if base and other:
        notes.append(f"no speedup of {', '.join(other)}: {base.label} ran on another device")
    of_other_jobs = [one for one in summaries if one.other_job and one.label not in other]
    if base:
        notes += [f"no speedup of {one.label}: {base.label} is another job, {one.other_job}" for one in of_other_jobs]
    else:
        notes += other_job_texts(summaries)
    for cause in dict.fromkeys(filter(None, (summary.confounded_by for summary in summaries))):
        names = ", ".join(summary.label for summary in summaries if summary.confounded_by == cause)
        notes.append(f"no speedup of {names}: most of the difference is {EXPLAINED_BY[cause]}")
    if unclear := [summary.label for summary in summaries if summary.supported is False and summary.speedup]:
        notes.append(f"speedup not supported, its interval contains 1: {', '.join(unclear)}")
    if alone := [one.label for one in summaries if one is not base and one.speedup and one.supported is None]:
        notes.append(f"speedup without an interval, as there are too few steps: {', '.join(alone)}")
    in_turns = [run for run in summaries if not run.other_job and base and base.speedup_from == TURNS]
    if missing := [run.label for run in in_turns if run.speedup is None]:
        notes.append(f"no speedup of {', '.join(missing)}: not among what was trained in turns")
    return notes


def _cost_texts(summaries: Sequence[VariantSummary], costs: Sequence[RunCost]) -> dict[str, list[str]]:
    """Return what communication slows and what could be gained at most, for each run where that is known.

    The keys are these texts, the values the labels of the runs to which a text applies.
    """
    labels: dict[str, list[str]] = {}
    for summary, cost in zip(summaries, costs, strict=True):
        if not summary.reason and (text := cost_text(cost.cost, cost.bounds)):
            labels.setdefault(text.removesuffix("."), []).append(summary.label)
    return labels


def how_to_read(summaries: Iterable[VariantSummary]) -> str:
    """Explain the columns; the speed-up only if there is a baseline, and then also how it was measured."""
    known = [summary for summary in summaries if summary.speedup is not None]
    if not known:
        return HOW_TO_READ
    baseline = next(run.label for run in known if is_baseline(run.label))
    if known[0].speedup_from != TURNS:
        return f"{HOW_TO_READ}; speedup: over {baseline}, of captures that were made one after another; {EACH_ALONE}"
    rounds = count_noun(max(len(summary.turns_ns) for summary in known), "round")
    return (
        f"{HOW_TO_READ}; speedup: over {baseline}, of training in turns without a profiler, ±: half of the 95 % "
        f"interval over {rounds}, each with new ranks; {EACH_ALONE}; all other columns are of the captures"
    )


def compare_rows(summaries: Sequence[VariantSummary], costs: Sequence[RunCost]) -> list[Row]:
    """Return a row for each run; what communication slows is taken from its cost."""
    pairs = zip(summaries, costs, strict=True)
    return [table_row(replace(summary, slowed_ns=cost.cost.contention_ns)) for summary, cost in pairs]


def waterfall_rows(waterfall: Waterfall) -> list[Row]:
    """Return the parts of the first run's mean step, then a row for each change from one run to the next, in ms."""
    # The last column is the whole step of the run that the row leads to.
    parts: list[Budget | Change] = [*waterfall.budgets[:1], *waterfall.changes]
    return [
        {
            "from -> to": part.label if isinstance(part, Budget) else f"{part.before} -> {part.after}",
            **table_row(part, Parts),
            "step_ms": ms(budget.step_ns),
        }
        for part, budget in zip(parts, waterfall.budgets, strict=True)
    ]


def readable_rows(waterfall: Waterfall) -> list[Row]:
    """Return the rows for people: a change that is not significant is shown as the interval within which it lies."""
    rows = waterfall_rows(waterfall)
    for row, change in zip(rows[1:], waterfall.changes, strict=True):
        for part, width_ns in _parts_within(change).items():
            row["sum_ms" if part == "step" else f"{part}_ms"] = f"within ±{width_ns / 1e6:.2f}"
    return rows


def _parts_within(change: Change) -> dict[str, int]:
    """Return the parts of the step whose change is not significant, and half of the interval within which it lies."""
    widths_ns = {part: change.half_width_ns.get(part) for part in (*PARTS, "step")}
    return {part: ns for part, ns in widths_ns.items() if ns and change.is_beyond_spread(part) is False}


def waterfall_notes(waterfall: Waterfall, summaries: Sequence[VariantSummary] = ()) -> list[str]:
    """Return how to read the waterfall, which runs are of other jobs or left out, and what is not known."""
    notes = ["mean step, ms: the first row has the parts of the step"] if waterfall.budgets else []
    if waterfall.changes:
        notes = [f"{notes[0]}, each other row their changes and that of the step"]
    if any(map(_parts_within, waterfall.changes)):
        notes.append(
            "within ±: the steps of both runs vary too much to show a change (95 %, all parts together); see the CSV"
        )
    notes += other_job_texts(summaries)
    notes += [f"{label}: left out, {reason}" for label, reason in _left_out(waterfall)]
    notes += [
        f"{budget.label}: the ranks could not be compared, so waiting is part of transfer and tail"
        for budget in waterfall.budgets
        if not budget.knows_wait
    ]
    notes += [
        f"{budget.label}: when backward ends is not known, so its tail is part of transfer"
        for budget in waterfall.budgets
        if not budget.knows_tail
    ]
    reasons: dict[str, list[str]] = {}
    for budget in waterfall.budgets:
        reasons.setdefault(_contention_note(budget.contention), []).append(budget.label)
    return notes + [f"contention, {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]


def _left_out(waterfall: Waterfall) -> list[tuple[str, str]]:
    """Return the label of each run that is left out of the waterfall, and the reason."""
    reasons = {
        "it has no step that can be measured": waterfall.left_out,
        "the lengths of its steps are not known": waterfall.untimed,
        "not all work in its steps is known": waterfall.unknown,
        "it ran on another device than the first run": waterfall.other_device,
    }
    return [(label, reason) for reason, labels in reasons.items() for label in labels]


def unchanged_notes(waterfall: Waterfall) -> list[str]:
    """Return why it is not told what changed between two runs of one variant."""
    return [f"what changed is not told of {label}: {reason}" for label, reason in _left_out(waterfall)]


def _contention_note(found: Contention) -> str:
    """Say how much communication slows the kernels beside it, or why that is not known."""
    if found.slowdown is None:
        return found.reason or "not known"
    interval = ""
    if found.slowdown_low is not None and found.slowdown_high is not None:
        interval = f"95 % interval {found.slowdown_low:.2f} to {found.slowdown_high:.2f}; "
    return (
        f"kernels beside communication take {found.slowdown:.2f} times as long ({interval}measured on {found.kernels} "
        f"kernels, which take {percent(found.share)} of the time beside it)"
    )


HOW_TO_READ_CHANGES = (
    "before and after: mean step of both runs by parts, while other tables hold medians; ±: half of the change's 95 % "
    "interval, those of step and parts hold together; a smaller change is within the spread; launches are measured "
    "from the end of backward's compute"
)


def change_rows(changes: Sequence[PartChange]) -> list[Row]:
    """Return a row for each part of the step that may have changed between two runs of one variant."""
    knows_spread = any(change.half_width_ns is not None for change in changes)
    return [
        {
            **table_row(change),
            "significant": _significance(change, knows_spread=knows_spread),
            "cause": collective_change_text(change.cause) if change.cause else None,
        }
        for change in changes
    ]


def change_texts(changes: Sequence[PartChange]) -> list[str]:
    """Return a text for each change beyond the spread: ``tail +4.00 ms: bucket 3 launches 4.00 ms later``.

    What is less than a hundredth of the largest change is left to the table.
    """
    beyond = [(one, one.change_ns) for one in changes if one.change_ns is not None and one.is_beyond_spread]
    largest_ns = max((abs(by_ns) for _, by_ns in beyond), default=0)
    return [
        f"{one.part} {signed(by_ns)}" + (f": {collective_change_text(one.cause)}" if one.cause else "")
        for one, by_ns in beyond
        if 100 * abs(by_ns) >= largest_ns
    ]


def same_factor_text(found: SameFactor) -> str:
    """Say by which factor all kernels became longer, or shorter, and what may have made them so."""
    what, clocks, slowed = ("slower", "lower", "more") if found.factor > 1 else ("faster", "higher", "less")
    why = (
        f": the device is {what}, as at {clocks} clocks, or equal launches do {slowed} work"
        if found.knows_shapes
        else ""
    )
    if why and not found.is_of_device:
        why += f", or communication slows them {slowed}, beside which they run"
    where = " where no communication runs beside them" if found.differs_beside else ""
    return (
        f"the {found.kernels} kernels that take {percent(found.share)} of compute all take {found.factor:.2f} times as "
        f"long as before ({found.low:.2f} to {found.high:.2f}){where}, and run as often{why}"
    )


def late_ranks_text(changes: Sequence[PartChange], skews: Sequence[RunSkew], names: Sequence[str]) -> str:
    """Say which ranks are late in one of two runs, if that explains at least half of the change of the step; or empty.

    What queues behind the waits for them is a longer tail, of which no collective is the cause. ``skews`` and ``names``
    are those of both runs.
    """
    change_ns = next((one.change_ns for one in changes if one.part == "step" and one.is_beyond_spread), None)
    before, after = skews
    knows_both = all(map(_knows_late_ranks, skews))
    cost_before_ns, cost_ns = map(_cost_of_late_ranks, skews)
    if not change_ns or 2 * (cost_ns - cost_before_ns) / change_ns < 1:
        return ""
    if knows_both and before.names_of(before.late_ranks) == after.names_of(after.late_ranks):
        costs = (
            f"{milliseconds(round(cost_ns))} of the mean step in {names[1]}, {milliseconds(round(cost_before_ns))} in "
        )
        return f"{_arrive_last(after)} in both runs, which costs up to {costs}{names[0]} (ddp-prof skew)"
    who, ns, where = (after, cost_ns, names[1]) if change_ns > 0 else (before, cost_before_ns, names[0])
    return (
        f"{_arrive_last(who)} in {where}, whose mean step would be up to {milliseconds(round(ns))} shorter without "
        f"that{who.or_more} (ddp-prof skew)"
    )


def beside_text(changes: Sequence[PartChange], before: VariantSummary, after: VariantSummary) -> str:
    """Say how much compute of two runs on a CPU ran beside communication, if that may explain its change; or empty.

    It may if it changed the same way, and by at least half as much. A CPU has no kernels that tell contention.
    """
    change_ns = next((one.change_ns for one in changes if one.part == "compute" and one.is_beyond_spread), None)
    if not change_ns or {before.device, after.device} != {"cpu"}:
        return ""
    if before.overlapped_ns is None or after.overlapped_ns is None:
        return ""
    if 2 * (after.overlapped_ns - before.overlapped_ns) / change_ns < 1:
        return ""
    return (
        "compute: on a CPU communication may take cores from the compute beside it; of a median step, "
        f"{milliseconds(round(before.overlapped_ns))} of compute ran beside communication before, "
        f"{milliseconds(round(after.overlapped_ns))} after"
    )


def _knows_late_ranks(skew: RunSkew) -> bool:
    """Return whether ranks of a run are late without a doubt, and it is known what that costs."""
    return bool(skew.late_ranks and skew.costs_ns) and not (skew.reason or skew.doubt)


def _cost_of_late_ranks(skew: RunSkew) -> float:
    """Return what the ranks that are late cost the mean step, in ns; 0 if there are none, or that is not known."""
    costs_ns = skew.costs_ns if _knows_late_ranks(skew) else None
    return sum(costs_ns) / len(costs_ns) if costs_ns else 0


def _arrive_last(skew: RunSkew) -> str:
    """Return a sentence's beginning: that the late ranks of a run arrive last."""
    names, ending = skew.names_of(skew.late_ranks), "s" if len(skew.late_ranks) == 1 else ""
    return f"{capitalized(names)} arrive{ending} last"


def changed_text(changes: Sequence[PartChange]) -> str:
    """Return all changes beyond the spread as one text; if there are none, whether that is known.

    Where the step itself did not change clearly, that comes first: its parts alone read as if it had.
    """
    changed = [change for change in changes if change.change_ns] or changes
    is_unknown = all(change.is_beyond_spread is None for change in changed)
    nothing = "what changed is not known" if is_unknown else "nothing changed beyond the spread"
    if not is_unknown and all(change.half_width_ns is None for change in changes):
        nothing = "no part of it changed; too few steps for a spread"
    texts, step = change_texts(changes), next((change for change in changes if change.part == "step"), None)
    if step and step.is_beyond_spread is False and step.half_width_ns:
        parts = [change for change in changed if change is not step]
        if parts and all(change.is_beyond_spread is None for change in parts):
            nothing = "the step did not change beyond the spread; what its parts did is not known"
        if texts:
            texts.insert(0, f"step within ±{milliseconds(round(step.half_width_ns))}")
    return "; ".join(texts) or nothing


def collective_change_text(change: CollectiveChange) -> str:
    """Say what a collective does differently: ``bucket 3 launches 4.00 ms later``."""
    which, (verb, more, less) = collective_name(change.index, change.bucket), _MOVES[change.moved]
    return f"{which} {verb} {milliseconds(abs(change.by_ns))} {more if change.by_ns > 0 else less}"


_MOVES = {
    LAUNCH: ("launches", "later", "earlier"),
    QUEUEING: ("starts", "later after its launch", "sooner after its launch"),
    WAIT: ("waits for a peer", "longer", "shorter"),
    TRANSFER: ("transfers", "longer", "shorter"),
    DURATION: ("takes", "longer", "shorter"),
}
"""For each change of a collective: the verb, and the words for more and for less time."""


def _significance(change: PartChange, *, knows_spread: bool) -> str:
    """Return whether a part became longer or shorter, or why neither is said.

    There are too few steps if not even the step's spread is known (``knows_spread``).
    """
    if change.change_ns is None:
        return "not known"
    if change.is_beyond_spread is None:
        return "not known" if knows_spread else "too few steps"
    if not change.is_beyond_spread:
        return "no change" if change.half_width_ns is None else "within the spread"
    return "longer" if change.change_ns > 0 else "shorter"
