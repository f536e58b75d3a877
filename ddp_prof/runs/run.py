"""Runs: the one way from files to figures, for programs, notebooks and the command line.

::

    import ddp_prof as dp

    (run,) = dp.load_runs(["traces/overlap.sqlite"])
    run.overlap().to_frame()      # a row a rank
    run.collectives().to_frame()  # a row a collective
    run.timeline().show()         # a plotly figure

A run is made of one file, or of one file a rank. Files are read when a figure is asked for, one after the other, and
what is measured of each is kept; the events themselves are kept only where ``LoadOptions.keep_events`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_prof.errors import TraceError
from ddp_prof.manifest import SUFFIX, label_of, load_manifest, manifest_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ddp_prof.analyze.collectives.results import RunCollectives
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RunSkew
    from ddp_prof.analyze.core.rank_events import RankEvents
    from ddp_prof.analyze.core.steps import RangePatterns
    from ddp_prof.analyze.kernels.device_use import DeviceUse, RankUse
    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.analyze.quality.inventory import TraceInventory
    from ddp_prof.analyze.root_cause import RootCause
    from ddp_prof.analyze.variants.contention import KernelSamples
    from ddp_prof.analyze.variants.waterfall import Waterfall
    from ddp_prof.manifest import Manifest
    from ddp_prof.present.timeline.model import Source
    from ddp_prof.trace import Trace


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How files are read.

    Attributes:
        step_range: Regular expression for ranges that are steps; a first group is the step's number.
        backward_range: Regular expression for ranges that hold the backward pass.
        comm_patterns: Regular expressions for kernels that communicate, beside those that are known.
        with_launches: Read more of launches: kernels' shapes, by which contention tells them apart, names and ends of
            calls, which timelines show.
        one_run: All files are ranks of one run, whatever their names.
        separate: Each file is a run of its own, whatever their names.
        keep_events: Keep the events of all files in memory; else a file is read again for each new question.
    """

    step_range: str | None = None
    backward_range: str | None = None
    comm_patterns: tuple[str, ...] = ()
    with_launches: bool = False
    one_run: bool = False
    separate: bool = False
    keep_events: bool = False

    @property
    def patterns(self) -> RangePatterns:
        """How the ranges of steps and of backward are named."""
        from ddp_prof.analyze.core.steps import RangePatterns

        return RangePatterns(self.step_range, self.backward_range)


class TraceEvents(NamedTuple):
    """One file: what was recorded, and what each of its ranks did."""

    trace: Trace
    ranks: tuple[RankEvents, ...]


@dataclass(eq=False)
class Run:
    """One run, of one file or of one file a rank.

    Attributes:
        files: Its traces.
        options: How they are read.
        notes: Why these files are one run, where that was not said.
    """

    files: tuple[Path, ...]
    options: LoadOptions = field(default_factory=LoadOptions)
    notes: tuple[str, ...] = ()
    _events: list[TraceEvents] = field(default_factory=list, repr=False)
    _measured: dict[str, list[Any]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What its files are called, without their endings."""
        return manifest_path(self.files[0]).name.removesuffix(SUFFIX)

    @cached_property
    def manifest(self) -> Manifest | None:
        """How it was made, where a ``run.json`` beside the files says it."""
        manifests = (load_manifest(manifest_path(file)) for file in self.files)
        return next((manifest for manifest in manifests if manifest), None)

    @property
    def label(self) -> str:
        """What tables and figures call it: ``bucketed 10 MB``."""
        return label_of(self.files[0], self.manifest)

    def events(self) -> Iterator[TraceEvents]:
        """The events of each file, one file after the other.

        Raises:
            TraceError: A file cannot be read.
        """
        if self._events:
            yield from self._events
            return
        kept = []
        for file in self.files:
            part = _load(file, self.options)
            if self.options.keep_events:
                kept.append(part)
            yield part
        self._events = kept

    def overlap(self) -> TraceOverlap:
        """How much communication compute hides, by rank and step."""
        from ddp_prof.analyze.overlap.overlap import merge_ranks

        merged = merge_ranks(self._measure("overlap"))
        self._refuse_repeated_ranks((rank.file, rank.rank) for rank in merged.ranks)
        return replace(merged, warnings=(*self.notes, *merged.warnings))

    def inventory(self) -> list[TraceInventory]:
        """What each file holds, and what is missing for which question."""
        return self._measure("inventory")

    def analysis(self) -> RunAnalysis:
        """The collectives of all ranks, compared."""
        if "analysis" not in self._measured:
            from ddp_prof.analyze.collectives.run_analysis import merge_analyses

            merged = merge_analyses(self._measure("collectives"))
            self._refuse_repeated_ranks((rank.clock.name, rank.rank) for rank in merged.ranks)
            warnings = (*self.notes, *merged.trace_warnings)
            self._measured["analysis"] = [replace(merged, trace_warnings=warnings)]
        analysis: RunAnalysis = self._measured["analysis"][0]
        return analysis

    def collectives(self) -> RunCollectives:
        """When each collective ran on each rank, what of it is exposed, and why."""
        from ddp_prof.analyze.collectives.results import measure_collectives

        return measure_collectives(self.analysis())

    def root_cause(self) -> RootCause | None:
        """The main reason why communication is exposed; ``None`` where none is."""
        from ddp_prof.analyze.root_cause import find_root_cause

        return find_root_cause(self.collectives().collectives, self.manifest)

    def skew(self) -> RunSkew:
        """Which rank arrives last at the collectives, how often, by how much, and what that costs."""
        from ddp_prof.analyze.collectives.straggler import measure_skew

        return measure_skew(self.analysis())

    def kernels(self) -> list[KernelSamples]:
        """The compute kernels of each rank's steps, by which contention is measured."""
        return [samples for of_file in self._measure("kernels") for samples in of_file]

    def device_use(self) -> DeviceUse:
        """Which kernels took the time, what hid communication, and why devices were idle."""
        from ddp_prof.analyze.kernels.device_use import measure_device_use

        return measure_device_use([rank for of_file in self._measure("device use") for rank in of_file])

    def waterfall(self) -> Waterfall:
        """The mean step of this run by parts; of several runs see :func:`compare_steps`."""
        return compare_steps([self])

    def timeline(self, steps: Collection[int] | None = None) -> go.Figure:
        """What ran when, as a plotly figure of a few steps.

        Args:
            steps: Numbers of the steps to show; by default two from the middle.
        """
        from ddp_prof.present.timeline.build import MAX_BOXES, build_timeline, steady_steps
        from ddp_prof.present.timeline.figure import draw_timeline

        sources = timeline_sources([self])
        shown = steps or steady_steps([rank for source in sources for rank in source.ranks])
        return draw_timeline(build_timeline(sources, steps=shown, max_boxes=MAX_BOXES))

    def prepare(self, *measures: str) -> None:
        """Measure several of ``_MEASURES`` in one reading of the files."""
        missing = [measure for measure in measures if measure not in self._measured]
        if not missing:
            return
        results: dict[str, list[Any]] = {measure: [] for measure in missing}
        for part in self.events():
            for measure in missing:
                results[measure].append(_MEASURES[measure](part, self.options))
        self._measured |= results

    def _refuse_repeated_ranks(self, ranks: Iterable[tuple[str, int | None]]) -> None:
        """Two files of one rank would count it twice."""
        found: dict[int, str] = {}
        for file, rank in ranks:
            if rank is not None and found.setdefault(rank, file) != file:
                raise TraceError(
                    self.files[0].with_name(file),
                    f"rank {rank} of this run is in {found[rank]}, too",
                    "give one file of each rank, or --separate",
                )

    def _measure(self, measure: str) -> list[Any]:
        self.prepare(measure)
        return self._measured[measure]


def compare_steps(runs: Sequence[Run]) -> Waterfall:
    """From one variant to the next: which part of a step each removed, and what it added.

    Contention is measured against the other runs that do the same work, too.
    """
    from ddp_prof.analyze.variants.waterfall import measure_waterfall

    for run in runs:
        run.prepare("collectives", "kernels")
    return measure_waterfall([(run.analysis(), run.kernels()) for run in runs])


def timeline_sources(runs: Iterable[Run]) -> list[Source]:
    """Each file as a panel of a timeline; of several with one title the rank is part of it."""
    from collections import Counter

    from ddp_prof.analyze.collectives.run_analysis import merge_analyses

    found = []
    for run in runs:
        kept = replace(run, options=replace(run.options, keep_events=True))  # a panel holds them anyway
        parts = list(kept.events())
        analysis = merge_analyses(kept._measure("collectives"))
        found += [timeline_source(label_of(part.trace.path, part.trace.manifest), part, analysis) for part in parts]
    times = Counter(source.title for source in found)
    return [source._replace(title=_title(source)) if times[source.title] > 1 else source for source in found]


def timeline_source(title: str, part: TraceEvents, analysis: RunAnalysis) -> Source:
    """A file as a panel of a timeline.

    Args:
        title: What the panel is called.
        part: The file.
        analysis: The collectives of the run that it belongs to.
    """
    from ddp_prof.analyze.overlap.overlap import measure_rank
    from ddp_prof.analyze.quality.diagnostics import find_caveats
    from ddp_prof.present.timeline.model import Explained, Source

    trace, ranks = part
    explained = {
        (rank.clock, rank.process, rank.device): Explained(rank.timings, exposure, bool((wait_ns >= 0).any()))
        for rank, exposure, wait_ns in zip(analysis.ranks, analysis.exposures, analysis.waits_ns, strict=True)
    }
    return Source(
        title=title,
        trace=trace,
        ranks=ranks,
        overlaps=[measure_rank(rank) for rank in ranks],
        explained=[explained[trace.path, rank.process, rank.device] for rank in ranks],
        caveats=tuple(caveat.value for caveat in find_caveats(trace)),
    )


def _title(source: Source) -> str:
    rank = next((rank.rank for rank in source.ranks if rank.rank is not None), None)
    return f"{source.title} ({source.trace.path.name})" if rank is None else f"{source.title}, rank {rank}"


def _load(file: Path, options: LoadOptions) -> TraceEvents:
    from ddp_prof.analyze.core.rank_events import find_rank_events
    from ddp_prof.ingest.load import load_trace

    trace = load_trace(file, extra_patterns=options.comm_patterns, with_launches=options.with_launches)
    return TraceEvents(trace, find_rank_events(trace, options.patterns))


def _measure_overlap(part: TraceEvents, _options: LoadOptions) -> TraceOverlap:
    from ddp_prof.analyze.overlap.overlap import measure_overlap

    return measure_overlap(part.trace, part.ranks)


def _measure_collectives(part: TraceEvents, _options: LoadOptions) -> RunAnalysis:
    from ddp_prof.analyze.collectives.run_analysis import analyze_trace

    return analyze_trace(part.trace, part.ranks)


def _measure_kernels(part: TraceEvents, _options: LoadOptions) -> list[KernelSamples]:
    from ddp_prof.analyze.variants.contention import sample_kernels

    return [sample_kernels(rank) for rank in part.ranks]


def _measure_device_use(part: TraceEvents, _options: LoadOptions) -> list[RankUse]:
    from ddp_prof.analyze.kernels.device_use import use_of_rank

    return [use_of_rank(rank) for rank in part.ranks]


def _measure_inventory(part: TraceEvents, options: LoadOptions) -> TraceInventory:
    from ddp_prof.analyze.quality.inventory import take_inventory

    return take_inventory(part.trace, options.patterns)


_MEASURES: Mapping[str, Callable[[TraceEvents, LoadOptions], Any]] = {
    "overlap": _measure_overlap,
    "collectives": _measure_collectives,
    "kernels": _measure_kernels,
    "device use": _measure_device_use,
    "inventory": _measure_inventory,
}
"""What is kept of a file that was read."""
