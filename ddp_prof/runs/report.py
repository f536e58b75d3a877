"""One report, read and measured: what a worker does, with small results and without the events.

Tasks and results travel as pickles, in which paths have the names that they have where they are read: a worker of
another folder or machine knows a file by its absolute path; its results name the file as the user did.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prof.errors import DdpProfError, TraceError

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.core.steps import RangePatterns
    from ddp_prof.analyze.critical.critical_path import RankChains
    from ddp_prof.analyze.doctor.evidence import RankFacts
    from ddp_prof.analyze.inventory import TraceInventory
    from ddp_prof.analyze.kernels.contention import KernelSamples, SlowdownLimit
    from ddp_prof.analyze.kernels.device_use import RankUse
    from ddp_prof.analyze.overlap import TraceOverlap
    from ddp_prof.trace import Trace


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, Path) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Mapping[str, Path]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def persistent_load(self, path: str) -> Path:
        return self._names.get(path) or Path(path)


def pickle_with_names(value: Any) -> bytes:
    """A task or a result as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpickle_with_names(data: bytes, names: Mapping[str, Path] | None = None) -> Any:
    """What :func:`pickle_with_names` made bytes of; some paths get other names."""
    return _Unpickler(data, names or {}).load()


ALL_AT_ONCE = "this needs all events at once"
FIRST_KERNELS = 1 << 16
"""Kernels whose launch shapes are read to limit a slowdown: some hundred steps."""
BY_SHAPE = frozenset({"kernels", "device use"})
"""What tells kernels apart by their launch shapes."""
OF_EACH_KERNEL = BY_SHAPE | {"slowdown"}
"""What is measured of each kernel: it may have rows for all of them."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How files are read.

    Attributes:
        step_range: Regular expression for ranges that are steps; a first group is the step's number.
        backward_range: Regular expression for ranges that hold the backward pass.
        comm_patterns: Regular expressions for kernels that communicate, beside those that are known.
        with_launches: Read more of launches: kernels' shapes, names and ends of calls, which timelines show. What is
            measured of each kernel is measured with shapes, whatever is said here.
        with_shapes: Else of how many kernels at least, the first ones of the file, shapes are read.
        one_run: All files are ranks of one run, whatever their names.
        separate: Each file is a run of its own, whatever their names.
        part_rows: Read exports in parts of about so many rows; by default only those that are large.
        to_draw: Keep the compute round a step's collectives, too, which pictures of the step show.
    """

    step_range: str | None = None
    backward_range: str | None = None
    comm_patterns: tuple[str, ...] = ()
    with_launches: bool = False
    with_shapes: int = 0
    one_run: bool = False
    separate: bool = False
    to_draw: bool = False
    part_rows: int | None = None

    @property
    def patterns(self) -> RangePatterns:
        """How the ranges of steps and of backward are named."""
        from ddp_prof.analyze.core.steps import RangePatterns

        return RangePatterns(self.step_range, self.backward_range)


@dataclass(frozen=True, eq=False)
class TraceEvents:
    """One file, also as a pair: what was recorded, and what each of its ranks did."""

    trace: Trace
    ranks: tuple[RankEvents, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trace, self.ranks))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """About the figures of the file."""
        from ddp_prof.analyze.quality import diagnose

        return diagnose(self.trace, self.ranks)


def own_version() -> str:
    """Of this package, as it is installed."""
    from importlib.metadata import version

    return version("ddp-prof")


@dataclass(frozen=True, slots=True)
class Task:
    """A report to be read, and what is to be measured of it.

    Attributes:
        path: The report, from the root, so that a worker elsewhere finds it.
        measures: Names in :data:`MEASURES`.
        version: Of the package that asks.
    """

    path: Path
    options: LoadOptions
    measures: tuple[str, ...]
    version: str = field(default_factory=own_version)


def load_events(file: Path, options: LoadOptions, why: str = ALL_AT_ONCE) -> TraceEvents:
    """Read a report as a whole.

    Args:
        file: The report.
        options: How it is read.
        why: Why not in parts, which is said of a large one.

    Raises:
        TraceError: It cannot be read.
    """
    from ddp_prof.analyze.core.rank_events import find_rank_events
    from ddp_prof.ingest.load import load_trace
    from ddp_prof.runs.parts import warn_reading_whole

    warn_reading_whole(file, why, asked=options.part_rows is not None, with_launches=options.with_launches)
    trace = load_trace(
        file,
        extra_patterns=options.comm_patterns,
        with_launches=options.with_launches,
        with_shapes=options.with_shapes,
    )
    return TraceEvents(trace, find_rank_events(trace, options.patterns))


def add_all_shapes(part: TraceEvents) -> TraceEvents:
    """The same with the launch shapes of all kernels, where only those of the first ones are known.

    Raises:
        TraceError: The file cannot be read again.
    """
    from ddp_prof.ingest.nsys_export import read_all_shapes

    if part.trace.shape_id is None or part.trace.knows_shapes:
        return part
    trace = read_all_shapes(part.trace)
    return TraceEvents(trace, tuple(rank.in_trace(trace) for rank in part.ranks))


def measure_events(part: TraceEvents, options: LoadOptions, measures: tuple[str, ...]) -> dict[str, Any]:
    """The result of each measure."""
    return {measure: MEASURES[measure](part, options) for measure in measures}


def measure_report(
    file: Path,
    options: LoadOptions,
    measures: tuple[str, ...],
    keep: Callable[[TraceEvents], None] = lambda _events: None,
) -> dict[str, Any]:
    """Read a report and measure it: a large one in parts, where that can be.

    Args:
        file: The report.
        options: How it is read.
        measures: Names in :data:`MEASURES`.
        keep: Is given the events of a report that was read as a whole.

    Raises:
        TraceError: It cannot be read.
    """
    from ddp_prof.ingest.split_export import CannotSplitError
    from ddp_prof.runs.parts import SPLITTABLE, measure_in_parts

    why = ALL_AT_ONCE
    if SPLITTABLE | {"identity"} >= set(measures):
        found = None
        try:
            found = measure_in_parts(
                file, options.patterns, options.comm_patterns, options.part_rows, to_draw=options.to_draw
            )
        except CannotSplitError as error:
            why = f"{error}, so it cannot be cut into parts"
        if found is not None:
            return {
                measure: _identities(found["collectives"]) if measure == "identity" else found[measure]
                for measure in measures
            }
    from ddp_prof.ingest.enrich import ALL_SHAPES

    if BY_SHAPE & {*measures}:
        options = replace(options, with_shapes=ALL_SHAPES)
    elif "slowdown" in measures:
        options = replace(options, with_shapes=FIRST_KERNELS)
    events = load_events(file, options, why)
    keep(events)
    return measure_events(events, options, measures)


def run_task(task: bytes) -> bytes:
    """Measure a report: takes a pickled :class:`Task`, returns pickled results by measure, or a ``TraceError``."""
    asked: Task = unpickle_with_names(task)
    return run_safely(asked.path, asked.version, lambda: measure_report(asked.path, asked.options, asked.measures))


def run_safely(path: Path, version: str, made: Callable[[], Any]) -> bytes:
    """Pickle what a worker computes from a report, or the ``TraceError`` that stopped it.

    Args:
        path: The report.
        version: Of the package that asks.
        made: Does the work.
    """
    if version != (own := own_version()):
        reason = f"a worker has ddp_prof {own}, and {version} asks it"
        return pickle_with_names(TraceError(path, reason, "install one version everywhere"))
    try:
        return pickle_with_names(made())
    except TraceError as error:
        return pickle_with_names(error)
    except (DdpProfError, OSError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        return pickle_with_names(TraceError(path, reason, "read it alone to see more"))


def _measure_overlap(part: TraceEvents, _options: LoadOptions) -> TraceOverlap:
    from ddp_prof.analyze.overlap import measure_overlap

    return measure_overlap(part.trace, part.ranks, part.warnings)


def _measure_collectives(part: TraceEvents, options: LoadOptions) -> RunAnalysis:
    from ddp_prof.analyze.collectives.run_analysis import analyze_trace

    return analyze_trace(part.trace, part.ranks, to_draw=options.to_draw, warnings=part.warnings)


def _measure_kernels(part: TraceEvents, _options: LoadOptions) -> list[KernelSamples]:
    from ddp_prof.analyze.kernels.contention import sample_kernels

    return [sample_kernels(rank) for rank in part.ranks]


def _measure_slowdown(part: TraceEvents, _options: LoadOptions) -> list[KernelSamples | SlowdownLimit]:
    from ddp_prof.analyze.kernels.contention import limit_slowdown, sample_kernels

    return [(sample_kernels if part.trace.knows_shapes else limit_slowdown)(rank) for rank in part.ranks]


def _measure_device_use(part: TraceEvents, _options: LoadOptions) -> list[RankUse]:
    from ddp_prof.analyze.kernels.device_use import measure_rank_use

    return [measure_rank_use(rank) for rank in part.ranks]


def _measure_critical(part: TraceEvents, _options: LoadOptions) -> list[RankChains]:
    from ddp_prof.analyze.critical.critical_path import measure_chains

    return [measure_chains(rank) for rank in part.ranks]


def _measure_facts(part: TraceEvents, _options: LoadOptions) -> list[RankFacts]:
    from ddp_prof.analyze.doctor.evidence import measure_facts

    return [measure_facts(rank) for rank in part.ranks]


def _measure_inventory(part: TraceEvents, options: LoadOptions) -> TraceInventory:
    from ddp_prof.analyze.inventory import take_inventory

    return take_inventory(part.trace, options.patterns)


def _measure_identity(part: TraceEvents, options: LoadOptions) -> list[tuple[Any, ...]]:
    return _identities(_measure_collectives(part, options))


def _identities(analysis: RunAnalysis) -> list[tuple[Any, ...]]:
    """For each rank: its number, the ranks of the job, and how many collectives of each operation it had."""
    return [
        (rank.rank, rank.world_size, tuple(sorted(Counter(rank.timings.operation.tolist()).items())))
        for rank in analysis.ranks
    ]


MEASURES: Mapping[str, Callable[[TraceEvents, LoadOptions], Any]] = {
    "overlap": _measure_overlap,
    "collectives": _measure_collectives,
    "kernels": _measure_kernels,
    "slowdown": _measure_slowdown,
    "device use": _measure_device_use,
    "critical": _measure_critical,
    "facts": _measure_facts,
    "inventory": _measure_inventory,
    "identity": _measure_identity,
}
"""What can be measured of a report; results are small beside its events."""
