"""Makes the table of how much communication hides behind compute, by rank or step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import TYPE_CHECKING

from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.analyze.step_cost import PARTS, StepCost
from ddp_prof.analyze.why_unknown import LOST, NO_COMMUNICATION, NOTHING
from ddp_prof.columns import Row, count_noun, document_of, milliseconds, percent, table_columns, table_rows
from ddp_prof.errors import shown_path
from ddp_prof.notes import Doubt
from ddp_prof.present.columns import values_of
from ddp_prof.present.headlines import level_change_text, outliers_text
from ddp_prof.present.table import SCHEMA, Digest, Document, TableView
from ddp_prof.present.text import join_lines, source_name
from ddp_prof.trace import SOURCE_NAMES, UNKNOWN

if TYPE_CHECKING:
    from ddp_prof.analyze.cost import RankCost, RunCost

_LARGE_DIFFERENCE = 0.05
"""Least difference of exposed time, as a fraction of a step, with which ranks or steps count as different."""
MOST_STEPS = 200
"""Most rows of the table of steps on a page."""
DIGEST = Digest(
    "exposed_ms",
    tuple({one.table_key for kind in (RankOverlap, StepOverlap) for one in table_columns(kind) if one.adds_up}),
)
"""How the table is shortened for a terminal."""


def overlap_view(
    result: TraceOverlap,
    headline: str = "",
    cost: RunCost | None = None,
    *,
    by_step: bool,
    told: str | None = None,
) -> TableView:
    """Return the table of overlap, with a row for each rank, or for each step of each rank.

    Args:
        result: The overlap of the run.
        headline: The main finding; part of the title.
        cost: What communication costs, for the document; ``None`` if not measured.
        by_step: Whether rows are steps.
        told: The reason that the headline gives, if it gives one; no note repeats it.
    """
    notes = overlap_notes(result, told)
    if by_step:
        notes += _window_notes(result)
    if not by_step and any(len(rank.steps) > 1 for rank in result.ranks):
        notes.append("times of a rank are totals over its steps and what lies outside of them; for each step: --steps")
    if by_step and (twice_ns := sum(rank.overlapping_windows_ns for rank in result.ranks)):
        notes.append(
            f"windows of steps overlap: sums of them, and of their parts, count {milliseconds(twice_ns)} more than once"
        )
    title = join_lines(filter(None, (headline, _title(result))))
    rows = _rows(result, by_step=by_step)
    return TableView(title, rows, notes, lambda: _document(result, headline, cost), digest=DIGEST)


def _document(result: TraceOverlap, headline: str, cost: RunCost | None) -> Document:
    """Return the document for JSON, with every step; the arguments are those of :func:`overlap_view`."""
    return {
        "schema": SCHEMA,
        "trace": shown_path(result.trace),
        **values_of(result, "label", "source", "producer", "device"),
        "recorder": result.recorder,
        "attribution": values_of(result.attribution, "activities", "device_time", "method"),
        "ranks": [
            _rank_document(result, rank, cost.ranks[at] if cost else None) for at, rank in enumerate(result.ranks)
        ],
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
        "outliers": asdict(result.outliers) if result.outliers else None,
        "warnings": list(result.warnings),
        "headline": headline,
        "missing": result.missing and result.missing.text,
    }


def steps_view(result: TraceOverlap) -> TableView:
    """Return the table of the first ``MOST_STEPS`` rows by step, for a page."""
    left_out = sum(len(rank.steps) for rank in result.ranks) - MOST_STEPS
    more = [f"{count_noun(left_out, 'more row')}; all of them: ddp-prof overlap --steps"] if left_out > 0 else []
    return TableView("the steps", _rows(result, by_step=True, most=MOST_STEPS), [*_window_notes(result), *more], {})


def _rows(result: TraceOverlap, *, by_step: bool, most: int | None = None) -> list[Row]:
    """Return a row for each rank, or with ``by_step`` for each step of each rank; of many rows the first ``most``."""
    rows: list[Row] = []
    has_nodes = len({rank.node for rank in result.ranks}) > 1
    # The figures of all rows are made at once, since a column may be left out for all of them.
    shown = [(rank, of) for rank in result.ranks for of in (rank.steps if by_step else [rank])]
    for (rank, of), figures in zip(shown[:most], table_rows([of for _, of in shown], most), strict=True):
        identity: Row = {
            "run": f"{result.label} ({rank.qualifier})" if rank.qualifier else result.label,
            **({"node": rank.node} if has_nodes else {}),
            "rank": rank.rank,
            "process": rank.process,
            "device": "cpu" if _is_of_cpu(rank, result) else _number_of_device(rank),
        }
        of_step: Row = {"step": of.step} if isinstance(of, StepOverlap) else {}
        rows.append({**identity, **of_step, **figures, **_communication_not_recorded(rank, of)})
    return rows


def _is_of_cpu(rank: RankOverlap, result: TraceOverlap) -> bool:
    """Return whether a CPU computed; no if what a device did was lost, or, of a job on devices, not recorded."""
    return rank.device is None and rank.reason != LOST and (rank.reason != NOTHING or result.device == "cpu")


def _number_of_device(rank: RankOverlap) -> int | None:
    return None if rank.device == UNKNOWN else rank.device


def _window_notes(result: TraceOverlap) -> list[str]:
    """Return a note on the columns of windows, unless the window of each step is the step itself."""
    if all(step.window_ns == step.length.ns for rank in result.ranks for step in rank.marked_steps):
        return []
    note = (
        "window: from a step's first device work to its last; the times after it, up to idle, are its parts; "
        "step: how long the step took"
    )
    return [note]


def _rank_document(result: TraceOverlap, rank: RankOverlap, cost: RankCost | None) -> Document:
    """Return a rank with its steps for JSON; costs are ``None`` if not measured."""
    of_steps = cost.steps if cost else (None,) * len(rank.steps)
    steps = [
        {**document_of(step), "cost": of_step and _step_cost_document(of_step)}
        for step, of_step in zip(rank.steps, of_steps, strict=True)
    ]
    return {
        **document_of(rank, steps=steps),
        "device": _number_of_device(rank),
        "reason": _reason_of(result, rank),
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
    }


def _step_cost_document(cost: StepCost) -> Document:
    """Return the parts of a step for JSON.

    ``limits_ns`` has the lower and upper limit of each part that is estimated, or not known exactly.
    """
    limits: dict[str, tuple[int | None, int | None]] = {
        part: (getattr(cost, f"{part}_low_ns"), getattr(cost, f"{part}_high_ns")) for part in PARTS
    }
    return {
        **values_of(cost, *(f"{part}_ns" for part in PARTS), "standstill_by_ns"),
        "limits_ns": {part: ends for part, ends in limits.items() if None not in ends and ends[0] != ends[1]},
        "reasons": cost.reasons,
    }


def _title(result: TraceOverlap) -> str:
    """Return the title: files, profiler, device, and how much of the work could be assigned to a step."""
    parts = [source_name(result.trace, result.files), profiler_name(result), f"device: {result.device}"]
    attribution = result.attribution
    if attribution.device_time:
        kind = "device time" if result.device != "cpu" else "time"
        time, events = percent(attribution.device_time), percent(attribution.activities)
        parts.append(f"assigned to a step: {time} of {kind}, {events} of events")
    return " · ".join(parts)


def profiler_name(result: TraceOverlap) -> str:
    """Return the profiler; for nsys with the versions that recorded and that exported, where they are known.

    Files of one run may be of several profilers.
    """
    return " and ".join(dict.fromkeys(name_of_profiler(*of_file) for of_file in result.recorded_by))


def name_of_profiler(source: str, recorder: str | None, exporter: str | None) -> str:
    """Return the profiler that recorded a file; for nsys with the versions, as in :func:`profiler_name`."""
    return _name_in_short(source, recorder, exporter) or _who_wrote(recorder, exporter)


def find_profilers(results: Iterable[TraceOverlap]) -> set[str]:
    """Return the names of the profilers that recorded some runs, without their versions."""
    return {SOURCE_NAMES.get(source, source) for result in results for source, *_ in result.recorded_by}


def how_recorded(results: Sequence[TraceOverlap]) -> str:
    """Say which profilers recorded some runs, and which versions of nsys exported them, where these are others.

    Figures of one job differ between nsys and torch.profiler, so where both recorded, that is said.
    """
    files = dict.fromkeys(of_file for result in results for of_file in result.recorded_by)
    in_short = dict.fromkeys(name for of_file in files if (name := _name_in_short(*of_file)))
    at_length = dict.fromkeys(
        _who_wrote(*versions) for source, *versions in files if not _name_in_short(source, *versions)
    )
    said = ", ".join([*([f"recorded by {', '.join(in_short)}"] if in_short else []), *at_length])
    if len(find_profilers(results)) < 2:
        return said
    return f"{said}: what recording adds to a step, and on a CPU what counts as communication, differs between these"


def _name_in_short(source: str, recorder: str | None, exporter: str | None) -> str | None:
    """Return the profiler of a file, with its version if only one wrote it; ``None`` if more is known of nsys."""
    name = SOURCE_NAMES.get(source, source)
    if name != "nsys" or not (recorder or exporter):
        return name
    is_one = recorder and exporter and (recorder == exporter or exporter.startswith(f"{recorder}."))
    return f"nsys {exporter}" if is_one else None


def _who_wrote(recorder: str | None, exporter: str | None) -> str:
    """Say which versions of nsys recorded and exported a file, as far as they are known."""
    by = ((recorder, "recorded by"), (exporter, "exported by"))
    return ", ".join(f"{verb} nsys {version}" for version, verb in by if version)


def _reason_of(result: TraceOverlap, rank: RankOverlap) -> str | None:
    """Return why a rank has no overlap figure, in words that hold where others of its file communicate."""
    others = [one for one in result.ranks if one.file == rank.file and one.collectives]
    if rank.reason != NO_COMMUNICATION or not others:
        return rank.reason
    what = "device" if any(one.process == rank.process for one in others) else "process"
    return f"nothing of this {what} is known to communicate"


def overlap_notes(result: TraceOverlap, told: str | None = None) -> list[str]:
    """Return what is unknown or assumed, one line each, without the reason ``told``."""
    reasons = reason_notes(result, told)
    return [*missing_notes(result), *reasons, *blocking_notes(result), *step_notes(result)]


def missing_notes(result: TraceOverlap) -> list[str]:
    """Return what the traces lack altogether; empty if nothing is known to be missing."""
    return [Doubt(f"missing: {result.missing.text}")] if result.missing else []


def reason_notes(result: TraceOverlap, told: str | None = None) -> list[str]:
    """Return why ranks have no overlap figure, without the reason ``told``."""
    return [
        Doubt(f"{rank.name}: no overlap figure: {_reason_of(result, rank)}")
        for rank in result.ranks
        if rank.reason and rank.reason != told
    ]


def blocking_notes(result: TraceOverlap) -> list[str]:
    """Return why it is not known what stood still for communication, and what blocking does not cover."""
    unknown = {}
    for rank in result.ranks:
        if not rank.reason and rank.dependencies and rank.dependencies.reason:
            is_known = rank.blocking_ns is not None or any(step.blocking_ns is not None for step in rank.steps)
            unknown[rank.dependencies.reason] = " for some steps" if is_known else ""
    notes = [f"blocking is not known{which}: {reason}" for reason, which in unknown.items()]
    if hosts := sum(rank.dependencies.host_waits for rank in result.ranks if rank.dependencies):
        notes.append(f"blocking is that of streams; the host also waited for a collective {count_noun(hosts, 'time')}")
    return notes


def step_notes(result: TraceOverlap) -> list[str]:
    """Return how steps and ranks differ, how they were found, and the warnings of the traces."""
    outliers = [outliers_text(result.outliers)] if result.outliers else []
    levels = [Doubt(level_change_text(result.level_change))] if result.level_change else []
    differ = [Doubt(f"{difference}; {meaning}") for difference, meaning in differences(result)]
    return [*levels, *outliers, *differ, *result.step_notes, *result.warnings]


OVER_ALL_RANKS = "figures per step are medians over the steps of all ranks"
"""What it means for figures that ranks differ; a gate, which judges the worst rank, has none of these figures."""


def differences(result: TraceOverlap) -> Iterator[tuple[str, str]]:
    """Yield how ranks, or steps, differ so much that the median over steps represents few of them.

    Each comes as two texts: the difference in exposed time, and what it means for the figures.
    """
    exposed: dict[str, list[int]] = {}
    for rank in (rank for rank in result.ranks if not rank.reason):
        if known := [step.exposed_ns for step in rank.communicating_steps if step.exposed_ns is not None]:
            exposed[rank.name] = known
    typical = {name: round(median(values)) for name, values in exposed.items()}
    lengths_ns = [ns for rank in result.ranks for ns in rank.lengths_ns]
    if not typical or not lengths_ns:
        return
    least_ns = _LARGE_DIFFERENCE * median(lengths_ns)
    low, high = (choose(typical, key=typical.__getitem__) for choose in (min, max))
    if typical[high] - typical[low] > max(typical[low], least_ns):
        most, least = milliseconds(typical[high]), milliseconds(typical[low])
        difference = f"ranks differ: {high} exposes {most} per step, {low} {least}"
        yield difference, OVER_ALL_RANKS
    # A mean far above the median: a few steps expose much more than the others.
    mean = {name: round(fmean(values)) for name, values in exposed.items()}
    name = max(mean, key=lambda name: mean[name] - typical[name])
    is_said = result.outliers is not None and result.outliers.comm_ns is None
    if not is_said and mean[name] - typical[name] > max(typical[name], least_ns):
        in_mean, in_median = milliseconds(mean[name]), milliseconds(typical[name])
        difference = f"steps differ: {name} exposes {in_mean} in the mean step, {in_median} in the median one"
        yield difference, "hiding all of it may gain more than in a typical step"


def notes_of_runs(results: Sequence[TraceOverlap]) -> list[str]:
    """Return the notes of all runs, each once; a note that does not hold for all runs begins with their labels."""
    return each_once(_notes_with_labels(results), len(results))


def each_once(notes: Iterable[tuple[str, str]], runs: int) -> list[str]:
    """Return the notes of some runs, each once, from pairs of a note and the label of the run for which it holds.

    A note that does not hold for all ``runs`` begins with the labels of those for which it does.
    """
    of_note = _labels_by_note(notes).items()
    return [note if len(labels) == runs else f"{', '.join(labels)}: {note}" for note, labels in of_note]


def warnings_by_run(results: Sequence[TraceOverlap]) -> dict[str, list[str]]:
    """Return each note on what is unknown or assumed, with the labels of the runs to which it applies."""
    return _labels_by_note(_notes_with_labels(results))


def _notes_with_labels(results: Sequence[TraceOverlap]) -> list[tuple[str, str]]:
    return [(note, result.label) for result in results for note in overlap_notes(result)]


def _labels_by_note(notes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    by_note: dict[str, list[str]] = {}
    for note, label in notes:
        by_note.setdefault(note, []).append(label)
    return by_note


def _communication_not_recorded(rank: RankOverlap, of: RankOverlap | StepOverlap) -> Row:
    """Return the times of communication as unknown, if what communicated was not recorded; else an empty row.

    Without this, the table would show zeros.
    """
    if rank.reason not in (None, NO_COMMUNICATION) and not of.comm_ns:
        return {"comm_ms": None, "overlapped_ms": None, "exposed_ms": None}
    return {}
