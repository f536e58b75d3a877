"""One report, read and measured: small results, without the events.

A capture that is larger than the memory is measured part by part, with the same integers as for the whole.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ddp_prof.bounded_file import free_memory
from ddp_prof.errors import naming_limits, printable
from ddp_prof.ingest import ReadOptions
from ddp_prof.range_names import COLLECTIVES, PROCESS, STEP

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.core.rank_events import CaptureFacts, RankEvents
    from ddp_prof.analyze.parts import PartResult
    from ddp_prof.analyze.quality import Diagnostics
    from ddp_prof.ingest.split_export import Part
    from ddp_prof.trace import Ints, Trace


MEASURES = (
    "overlap", "collectives", "kernels", "device use", "critical", "facts", "inventory", "identity", "structure",
)  # fmt: skip
"""What can be measured of a report; results are small beside its events."""
ALL_AT_ONCE = "this needs all events at once"
OF_EACH_KERNEL = frozenset({"kernels", "device use", "structure"})
"""What is measured of each kernel, with its launch shape: it may have rows for all of them."""


@dataclass(frozen=True, slots=True)
class LoadOptions(ReadOptions):
    """How files are read.

    Attributes:
        step_range: Regular expression for ranges that are steps; a first group is the step's number.
        backward_range: Regular expression for ranges that hold the backward pass.
        one_run: All files are ranks of one run, whatever their names.
        separate: Each file is a run of its own, whatever their names.
        part_rows: Read exports in parts of about this many rows; by default only large ones.
        to_draw: Keep also the compute near a step's collectives, which pictures of the step show.
    """

    step_range: str | None = None
    backward_range: str | None = None
    one_run: bool = False
    separate: bool = False
    to_draw: bool = False
    part_rows: int | None = None


@dataclass(frozen=True, eq=False)
class TraceEvents:
    """The events of one file: the trace and its ranks. Unpacks as a pair."""

    trace: Trace
    ranks: tuple[RankEvents, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trace, self.ranks))

    @cached_property
    def diagnostics(self) -> Diagnostics:
        from ddp_prof.analyze.quality import gather_diagnostics

        return gather_diagnostics(self.trace, self.ranks)


def load_events(file: Path, options: LoadOptions, why: str = ALL_AT_ONCE) -> TraceEvents:
    """Read a report as a whole. For a large one, log a warning with ``why``, the reason why it is not read in parts."""
    from ddp_prof.analyze.core.rank_events import find_rank_events
    from ddp_prof.ingest.load import load_trace
    from ddp_prof.ingest.nsys_export import count_rows

    if rows := count_rows(file, options.part_rows):
        _warn_reading_whole(file, rows, options, why)
    with naming_limits(file):
        trace = load_trace(file, options)
        return TraceEvents(trace, find_rank_events(trace, options.step_range, options.backward_range))


def measure_report(
    file: Path,
    options: LoadOptions,
    measures: tuple[str, ...],
    keep: Callable[[TraceEvents], None] = lambda _events: None,
) -> dict[str, Any]:
    """Measure a report, in parts if it is large and that is possible; else pass the events that were read to ``keep``.

    It is not read if the cache holds all that is asked for.
    """
    from ddp_prof.ingest.nsys_export import count_rows
    from ddp_prof.runs.kept import kept_results

    in_parts = SPLITTABLE | {"identity"} >= set(measures) and count_rows(file, options.part_rows) > 0
    asked = {name: getattr(options, name) for name in _DEPENDED_ON}
    kept = kept_results(file, options, {**asked, "in_parts": in_parts})
    found = {measure: result for measure in measures if kept and (result := kept.find(measure)) is not None}
    missing = tuple(measure for measure in measures if measure not in found)
    if missing:
        measured = _read_and_measure(file, options, missing, in_parts, keep)
        if kept:
            kept.keep(measured)
        found |= measured
    return {measure: found[measure] for measure in measures}


_DEPENDED_ON = ("comm_patterns", "step_range", "backward_range", "to_draw", "part_rows")
"""The options that a result depends on; with launches more is read, and measured are kernels alone by it."""


def _read_and_measure(
    file: Path,
    options: LoadOptions,
    measures: tuple[str, ...],
    in_parts: bool,
    keep: Callable[[TraceEvents], None],
) -> dict[str, Any]:
    why = ALL_AT_ONCE
    if in_parts:
        from ddp_prof.ingest.split_export import CannotSplitError

        try:
            found = measure_in_parts(file, replace(options, with_launches="kernels" in measures))
            found["identity"] = _identities(found["collectives"])
            return {measure: found[measure] for measure in measures}
        except CannotSplitError as error:
            why = f"{error}, so it cannot be cut into parts"
    options = replace(options, with_launches=options.with_launches or bool(OF_EACH_KERNEL & {*measures}))
    with naming_limits(file):
        events = load_events(file, options, why)
        keep(events)
        return measure_events(events, options, measures)


def measure_events(part: TraceEvents, options: LoadOptions, measures: tuple[str, ...]) -> dict[str, Any]:
    """Compute the given :data:`MEASURES`; those of ranks are lists."""
    trace, ranks, found = part.trace, part.ranks, dict[str, Any]()
    for measure in measures:
        if measure in _OF_A_RANK:
            found[measure] = list(map(resolve_name(f"ddp_prof.analyze.{_OF_A_RANK[measure]}"), ranks))
        elif measure == "overlap":
            from ddp_prof.analyze.overlap import measure_overlap

            found[measure] = measure_overlap(trace, ranks, part.diagnostics)
        elif measure == "inventory":
            from ddp_prof.analyze.inventory import take_inventory

            found[measure] = take_inventory(trace, options.step_range, options.backward_range, ranks)
        else:
            from ddp_prof.analyze.collectives.run_analysis import analyze_trace

            analysis = found.get("collectives") or analyze_trace(
                trace, ranks, to_draw=options.to_draw, diagnostics=part.diagnostics
            )
            found[measure] = {"collectives": analysis, "identity": _identities(analysis)}[measure]
    return found


_OF_A_RANK = {
    "kernels": "kernels.kernel_times:find_kernel_runs",
    "device use": "kernels.device_use:measure_rank_use",
    "critical": "critical.critical_path:find_rank_work",
    "facts": "doctor.evidence:measure_facts",
    "structure": "what_if.structure:find_structure",
}
"""The functions of ``ddp_prof.analyze`` that measure a rank; each is imported on first use."""


def _identities(analysis: RunAnalysis) -> list[tuple[Any, ...]]:
    """Return for each rank its number, the job's number of ranks, and its number of collectives by operation."""
    return [
        (rank.rank, rank.world_size, tuple(sorted(Counter(rank.timings.operation.tolist()).items())))
        for rank in analysis.ranks
    ]


_LOG = logging.getLogger(__name__)

BYTES_PER_ROW, BYTES_PER_ROW_TO_DRAW = 250, 450
"""Bytes of memory per row of a capture read as a whole: for ``collectives``, and for ``timeline``, which take most."""
SPLITTABLE = frozenset({"overlap", "collectives", "kernels"})
"""What can be measured in parts."""


def measure_in_parts(file: Path, options: LoadOptions) -> dict[str, Any]:
    """Measure :data:`SPLITTABLE` of an export that is read in parts; kernels only with ``with_launches``.

    Raises CannotSplitError if it cannot be cut, TraceError if there is no room for its parts.
    """
    from ddp_prof.analyze.parts import MOST_KERNELS, merge_facts, merge_kernels, merge_parts
    from ddp_prof.ingest.split_export import PART_ROWS, SplitExport
    from ddp_prof.ingest.sqlite_columns import open_sqlite

    with open_sqlite(file) as export, tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        structure, steps = _structure_filter(options), partial(_find_steps, options.step_range)
        part_rows = options.part_rows or PART_ROWS
        split = SplitExport(export, Path(folder), options, structure, steps, part_rows)
        measured: list[PartResult] = []
        kernels = 0
        for _, part in split.parts():
            one = _measure_part(part, options)
            measured.append(one if kernels < MOST_KERNELS else replace(one, kernels=()))
            kernels += sum(len(runs.kernel) for runs in measured[-1].kernels)
        while True:  # until no part was measured with assumptions that others contradict; once as a rule
            known = merge_facts(measured)
            again = [number for number, one in enumerate(measured) if one.assumed != known]
            if not again:
                break
            for number, part in split.parts(again):
                one = _measure_part(part, options, known)
                measured[number] = one if measured[number].kernels else replace(one, kernels=())
    overlap, collectives = merge_parts(measured)
    return {"overlap": overlap, "collectives": collectives, "kernels": merge_kernels(measured)}


def _warn_reading_whole(file: Path, rows: int, options: LoadOptions, why: str) -> None:
    """Log that a large export is read as a whole and why, the memory needed, and advice if it is too much."""
    needed, free = rows * (BYTES_PER_ROW_TO_DRAW if options.with_launches else BYTES_PER_ROW), free_memory()
    note = f"note: {file}: read as a whole, {rows:,} rows in up to {needed / 1e9:.1f} GB of memory: {why}"
    if free is not None and free < needed:
        note += (
            f"; {free / 1e9:.1f} GB are free: leave steps out with scripts/trim_capture.py, or take a larger machine"
        )
    _LOG.warning("%s", printable(note))


def _structure_filter(options: LoadOptions) -> Callable[[str], bool]:
    from ddp_prof.analyze.core.steps import KNOWN_NAMES

    ours = tuple(f"{name}|" for name in (PROCESS, STEP, *COLLECTIVES))
    usual = re.compile("|".join(f"(?:{known.pattern})" for known in KNOWN_NAMES), re.I)
    own = [re.compile(pattern) for pattern in (options.step_range,) if pattern]
    own += [re.compile(pattern, re.I) for pattern in (options.backward_range,) if pattern]
    return lambda name: name.startswith(ours) or any(pattern.search(name) for pattern in (usual, *own))


def _find_steps(step_range: str | None, trace: Trace) -> tuple[Ints, Ints]:
    """Return the start of each step, and the end of the next step: until then, its launches matter."""
    import numpy as np

    from ddp_prof.analyze.core.steps import find_steps

    found = [find_steps(trace, process, step_range)[0] for process in trace.processes]
    nothing = np.empty(0, np.int64)
    starts = np.concatenate([nothing, *(steps.start_ns for steps in found)])
    # Where the host runs ahead a step lasts until the next one's first work on the device.
    return starts, np.concatenate([nothing, *(np.append(steps.end_ns[1:], steps.end_ns[-1:]) for steps in found)])


def _measure_part(part: Part, options: LoadOptions, known: CaptureFacts | None = None) -> PartResult:
    """Measure a part; refuse kernels without names, ranks without steps or devices."""
    from ddp_prof.analyze.core.rank_events import find_rank_events
    from ddp_prof.analyze.intervals import union_of_one
    from ddp_prof.analyze.parts import measure_part
    from ddp_prof.ingest.split_export import CannotSplitError
    from ddp_prof.trace import UNKNOWN

    ranks = find_rank_events(part.trace, options.step_range, options.backward_range, known)
    if part.trace.unresolved_names.kernels:
        raise CannotSplitError("it has kernels without a name")
    if any(not rank.has_steps or rank.why_left_out or rank.device is None for rank in ranks):
        raise CannotSplitError("a rank of it has no steps")
    if any(rank.recording.is_damaged for rank in ranks) or len(part.trace.overlong):
        raise CannotSplitError("it lacks activities, or holds impossible times")
    if any((rank.events.activity == UNKNOWN).any() for rank in ranks):
        raise CannotSplitError("its hosts communicate for GPUs")
    span = union_of_one(part.start_ns, part.end_ns)
    return measure_part(part.trace, ranks, span, known, to_draw=options.to_draw)
