"""Read and measure one report: a file that nsys or a profiler wrote. Results are small, and events are not kept."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ddp_prof.bounded_file import free_memory
from ddp_prof.errors import naming_limits, printable
from ddp_prof.heap import return_free_memory
from ddp_prof.ingest import ReadOptions
from ddp_prof.threads import count_cores, in_thread, in_threads

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.timing import RankCollectives
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.quality import Diagnostics
    from ddp_prof.runs.kept import KeptResults
    from ddp_prof.trace import Trace


MEASURES = (
    "overlap", "collectives", "kernels", "contention", "device use", "critical", "facts", "inventory", "identity",
    "structure",
)  # fmt: skip
"""The names of what can be measured of a report; results are small beside its events."""
OF_EACH_KERNEL = frozenset({"kernels", "contention", "device use", "structure"})
"""The measures that look at each kernel and its launch shape; their results may have a row per kernel."""

LEAST_BESIDE, MOST_BESIDE = 1 << 18, 6 << 20
"""A report with so many events is measured by two threads. Fewer events are mostly Python's work, one thread at a time;
more would take too much memory at once."""


@dataclass(frozen=True, slots=True)
class LoadOptions(ReadOptions):
    """How files are read.

    Attributes:
        step_range: Regular expression for ranges that are steps; a first group is the step's number.
        backward_range: Regular expression for ranges that hold the backward pass.
        warmup_steps: Number of steps of each rank that are left out as warm-up: the first ones that would count.
        one_run: Whether all files are ranks of one run, whatever their names are.
        separate: Whether each file is a run of its own, whatever the names are.
        to_draw: Whether the compute near the collectives of a step is kept, too, which pictures of the step show.
    """

    step_range: str | None = None
    backward_range: str | None = None
    warmup_steps: int = 0
    one_run: bool = False
    separate: bool = False
    to_draw: bool = False


@dataclass(frozen=True, eq=False)
class TraceEvents:
    """The events of one file: the trace and its ranks. It can be unpacked as ``trace, ranks = events``."""

    trace: Trace
    ranks: tuple[RankEvents, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trace, self.ranks))

    @cached_property
    def diagnostics(self) -> Diagnostics:
        from ddp_prof.analyze.quality import gather_diagnostics

        return gather_diagnostics(self.trace, self.ranks)


def load_events(file: Path, options: LoadOptions) -> TraceEvents:
    """Read a report and find its ranks; warn if it may need more memory than is free."""
    from ddp_prof.analyze.core.trace_ranks import find_rank_events
    from ddp_prof.ingest.load import load_trace

    _warn_of_memory(file)
    with naming_limits(file):
        trace = load_trace(file, options)
        if len(trace.activities) > MOST_BESIDE:
            return_free_memory()  # reading leaves gaps that are too short for the columns of the analysis
        beside = _pays_to_share(len(trace.activities))  # nearly all measures need the dependencies
        ranks = find_rank_events(
            trace, options.step_range, options.backward_range, warmup_steps=options.warmup_steps, beside=beside
        )
        return TraceEvents(trace, ranks)


def measure_report(
    file: Path,
    options: LoadOptions,
    measures: tuple[str, ...],
    keep: Callable[[TraceEvents], None] = lambda _events: None,
    events: TraceEvents | None = None,
) -> dict[str, Any]:
    """Measure a report; it is not read if the cache holds all that is asked for, or if its events are passed.

    Args:
        file: The report.
        options: How it is read.
        measures: Names in :data:`MEASURES`.
        keep: Called with the events if the report is read.
        events: Its events if they are in memory already.

    Returns:
        The result of each measure by its name; without ``contention`` where :func:`measure_events` leaves that out.
    """
    kept = find_kept(file, options)
    results = {measure: result for measure in measures if kept and (result := kept.find(measure)) is not None}
    missing = tuple(measure for measure in measures if measure not in results)
    if "kernels" in results:  # whoever asks for the contention makes it from these
        missing = tuple(measure for measure in missing if measure != "contention")
    if missing:
        measured = (
            measure_events(events, options, missing) if events else _read_and_measure(file, options, missing, keep)
        )
        if kept:
            kept.keep(measured)
        results |= measured
    return {measure: results[measure] for measure in measures if measure in results}


def find_kept(file: Path, options: LoadOptions) -> KeptResults | None:
    """Return access to the results in the cache for a report and these options; ``None`` if the cache keeps nothing."""
    from ddp_prof.runs.kept import kept_results

    asked, *asked_of = (
        {name: getattr(options, name) for name in names} for names in (_DEPENDED_ON, *_ALSO_DEPENDED_ON.values())
    )
    return kept_results(file, options, asked, dict(zip(_ALSO_DEPENDED_ON, asked_of, strict=True)), (PAGE, PICTURE))


PAGE, PICTURE = "timeline", "timeline picture"
"""Results that are drawn: what the page of a timeline shows, and the picture of a part of it."""
_DEPENDED_ON = ("comm_patterns", "step_range", "backward_range", "warmup_steps")
"""The options that a result depends on. ``with_launches`` is none: what it reads only serves to measure kernels, and to
draw them."""
_ALSO_DEPENDED_ON = {
    "collectives": ("to_draw",),
    "diagnosis": ("to_draw",),
    PAGE: ("with_launches",),
    PICTURE: ("with_launches",),
}
"""For some results, further options that they depend on."""


def _read_and_measure(
    file: Path, options: LoadOptions, measures: tuple[str, ...], keep: Callable[[TraceEvents], None]
) -> dict[str, Any]:
    """Read a report, pass its events to ``keep``, and measure them."""
    # Kernels can only be measured with their launches, so these are read if kernels are asked for.
    options = replace(options, with_launches=options.with_launches or bool(OF_EACH_KERNEL & {*measures}))
    with naming_limits(file):
        events = load_events(file, options)
        keep(events)
        return measure_events(events, options, measures)


def measure_events(part: TraceEvents, options: LoadOptions, measures: tuple[str, ...]) -> dict[str, Any]:
    """Compute the given :data:`MEASURES`; those of single ranks are lists, an element per rank.

    ``contention`` is only measured where kernels have a thread of their own, as it takes much memory. Elsewhere, who
    asks for it makes it from the kernels, when the events are not needed any more.
    """
    trace, ranks, results = part.trace, part.ranks, dict[str, Any]()
    steps = kernels = facts = None
    if _pays_to_share(sum(len(rank.events) for rank in ranks)):
        # A second thread finds what filled the steps, which the overlap needs in the end, and then compares kernels:
        # about half of the work.
        filled = partial(_fill_steps, ranks if "overlap" in measures else ())
        steps, kernels = in_threads(filled, partial(_measure_kernels, ranks, measures), most=1)
    for measure in measures:
        if measure in ("kernels", "contention"):
            continue
        if measure == "facts" and steps:  # beside what the doctor needs next; what both rest on was found before
            facts = in_thread(_measure_ranks, measure, ranks)
        elif measure in _OF_A_RANK:
            results[measure] = _measure_ranks(measure, ranks)
        elif measure == "overlap":
            from ddp_prof.analyze.overlap import measure_overlap

            diagnostics = part.diagnostics  # among them, what streams waited for
            if steps:
                steps.result()
            results[measure] = measure_overlap(trace, ranks, diagnostics)
        elif measure == "inventory":
            from ddp_prof.analyze.inventory import take_inventory

            results[measure] = take_inventory(trace, options.step_range, options.backward_range, ranks)
        else:  # "collectives" or "identity", which is taken from them
            from ddp_prof.analyze.collectives.run_analysis import analyze_trace

            analysis = results.get("collectives") or analyze_trace(
                trace, ranks, to_draw=options.to_draw, diagnostics=part.diagnostics
            )
            results[measure] = {"collectives": analysis, "identity": _identities(analysis)}[measure]
    if facts:
        results["facts"] = facts.result()
    return results | (kernels.result() if kernels else _measure_kernels(ranks, {*measures} - {"contention"}))


def _pays_to_share(events: int) -> bool:
    """Return whether a report with so many events is measured faster by two threads."""
    return LEAST_BESIDE <= events <= MOST_BESIDE and count_cores() > 1


def _measure_ranks(measure: str, ranks: Sequence[RankEvents]) -> list[Any]:
    """Return a measure of each rank."""
    return list(map(resolve_name(f"ddp_prof.analyze.{_OF_A_RANK[measure]}"), ranks))


def _fill_steps(ranks: Sequence[RankEvents]) -> None:
    """Find what filled the steps of ranks, which keep it."""
    for rank in ranks:
        for name in ("breakdown", "passes", "step_times"):
            getattr(rank, name)


def _measure_kernels(ranks: Sequence[RankEvents], measures: Collection[str]) -> dict[str, Any]:
    """Return the kernels of each rank and their contention, as far as ``measures`` asks for them."""
    if "kernels" not in measures:
        return {}
    from ddp_prof.analyze.kernels.contention import measure_contention
    from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs

    kernels = list(map(find_kernel_runs, ranks))
    return {"kernels": kernels, **({"contention": measure_contention(kernels)} if "contention" in measures else {})}


_OF_A_RANK = {
    "device use": "kernels.device_use:measure_rank_use",
    "critical": "critical.critical_path:find_rank_work",
    "facts": "doctor.rank_facts:measure_facts",
    "structure": "what_if.structure:find_structure",
}
"""The functions of ``ddp_prof.analyze`` that measure a rank; each is imported on first use."""


def _identities(analysis: RunAnalysis) -> list[tuple[Any, ...]]:
    """Return for each rank who it is, and what and when it communicates, as :meth:`.Run.identities` describes it."""

    def of_rank(rank: RankCollectives) -> tuple[Any, ...]:
        timings, epoch_ns = rank.timings, rank.epoch_ns
        names = [*rank.groups, None]  # index -1 (no name) takes the last element
        groups = [names[group] for group in timings.group.tolist()]
        counts = Counter(zip(groups, rank.keys.tolist(), timings.operation.tolist(), strict=True))
        times_ns = None
        if epoch_ns is not None and len(timings):
            times_ns = epoch_ns + int(timings.start_ns.min()), epoch_ns + int(timings.end_ns.max())
        return rank.rank, rank.world_size, counts, times_ns

    return [of_rank(rank) for rank in analysis.ranks]


_LOG = logging.getLogger(__name__)

BYTES_PER_ROW = 250
"""Memory that a row of a large export takes at most while it is read and measured."""


def _warn_of_memory(file: Path) -> None:
    """Log that a large export needs more memory than is free, and what helps."""
    from ddp_prof.ingest.nsys_export import count_rows

    rows, free = count_rows(file), free_memory()
    needed = rows * BYTES_PER_ROW
    if free is not None and free < needed:
        note = (
            f"note: {file}: its {rows:,} rows take up to {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are "
            "free: leave steps out with scripts/trim_capture.py, or take a larger machine"
        )
        _LOG.warning("%s", printable(note))
