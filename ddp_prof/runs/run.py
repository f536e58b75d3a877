"""A run, from its files to its figures: for programs, notebooks and the command line.

::

    import ddp_prof as dp

    (run,) = dp.load_runs("traces/overlap.sqlite")
    run.overlap().to_frame()      # a row per rank
    run.collectives().to_frame()  # a row per collective
    run.timeline().show()         # a plotly figure

A run consists of one file, or of one file per rank. Files are read when a figure is asked for, one after the other, and
the measures of each file are kept. If a single file is read, its events are kept, too: the next figure does not need
another reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_prof.errors import InterruptedReadingError, TraceError, printable
from ddp_prof.manifest import (
    SUFFIX,
    Caveat,
    Manifest,
    distinct_names,
    label_of,
    label_of_ranks,
    load_manifest,
    manifest_path,
)
from ddp_prof.notes import Doubt
from ddp_prof.runs.report import (
    OF_EACH_KERNEL,
    LoadOptions,
    TraceEvents,
    find_kept,
    load_events,
    measure_events,
    measure_report,
)
from ddp_prof.runs.workers import WantedReport, Workers, measure_files
from ddp_prof.variants import VARIANTS

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ddp_prof.analyze.collectives.results import RunCollectives
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.skew import RunSkew
    from ddp_prof.analyze.cost import RunCost
    from ddp_prof.analyze.critical.critical_path import RankWork, RunCritical
    from ddp_prof.analyze.doctor import Diagnosis
    from ddp_prof.analyze.inventory import TraceInventory
    from ddp_prof.analyze.kernels.contention import Contention
    from ddp_prof.analyze.kernels.device_use import DeviceUse
    from ddp_prof.analyze.kernels.kernel_times import KernelRuns
    from ddp_prof.analyze.overlap import TraceOverlap
    from ddp_prof.analyze.root_cause import RootCause, RunExplanation
    from ddp_prof.analyze.variants.waterfall import PartChange, Waterfall
    from ddp_prof.analyze.what_if.prediction import RunPrediction
    from ddp_prof.analyze.what_if.questions import Question
    from ddp_prof.present.tables.compare import WhatChanged
    from ddp_prof.present.timeline.model import Source
    from ddp_prof.runs.kept import KeptResults

DOCTOR = ("overlap", "collectives", "facts", "critical")
"""The measures that the doctor needs."""
SUMMARY = (*DOCTOR, "kernels")
"""The measures that a summary needs, with the cost of communication."""
_MADE_OF = {"diagnosis": DOCTOR, "contention": ("kernels",)}
"""For each result that is made from measures of all files of a run, these measures.

For a run of one file, the cache keeps such a result as it keeps measures: the measures are much larger, and following
the critical paths takes longer than reading them.
"""
SUMMARY_RESULTS = ("overlap", "collectives", *_MADE_OF)
"""The results that a summary shows; those that the cache does not hold are made from :data:`SUMMARY`."""
MOST_FILES_OF_KERNELS = 8
"""Largest number of files per run in which single kernels are measured: hundreds would fill the memory."""

Communication = Counter[tuple[str | None, int, int]]
"""How many collectives a rank has, by communicator, key of the step and operation; see :data:`Identity`."""
Identity = tuple[int | None, int | None, Communication, tuple[int, int] | None]
"""Of a rank: its number; the number of ranks of its job; how many collectives it has; from when to when they ran.

Numbers are ``None`` if the trace does not say them. Collectives are counted by the name of their communicator,
``None`` if it has none; by the key of their step, ``UNKNOWN`` outside of all steps; and by operation, an index into
``communication.OPERATIONS``. Times are UTC in nanoseconds,
``None`` if they are not known.
"""


@dataclass(eq=False, repr=False)
class Run:
    """One run, of one file or of one file per rank.

    Attributes:
        files: Its files.
        options: How they are read.
        notes: Why these files count as one run, if no ``run.json`` says so; which files could not be read.
        workers: The processes that read the files.
        measured: For each file, the results of its measures so far, by the names in ``report.MEASURES``.
        made: The results that were made from measures of all files so far, by the names in ``_MADE_OF``.
        folder: What stands before its label, if another run has the same: the name of its folder, or of its first file
            if that other run, of the same variant, is in the same folder; else empty.
        file_name: Name of its first file, and how many others there are, if runs of one folder share a label; else
            empty.
        place: Position of its first file in the run that it may become a part of, while runs are loaded; else 0.
    """

    files: tuple[Path, ...]
    options: LoadOptions = field(default_factory=LoadOptions)
    notes: tuple[str, ...] = ()
    workers: Workers = field(default_factory=Workers)
    measured: dict[Path, dict[str, Any]] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    file_name: str = ""
    place: int = 0
    _analysis: RunAnalysis | None = None
    _explanation: RunExplanation | None = None
    _cost: RunCost | None = None
    _kept: TraceEvents | None = None

    def __repr__(self) -> str:
        files = str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files, the first {self.files[0]}"
        return printable(f"<Run {self.label}: {files}>")

    def _repr_html_(self) -> str:
        """Show the files and, if the run was measured, its headline and ranks. Reads no file."""
        from html import escape

        from ddp_prof.analyze.variants.comparison import compare_variants
        from ddp_prof.present.headlines import gain_headline

        if not all("overlap" in self.measured.get(file, {}) for file in self.files):
            return f"<p>{escape(repr(self))}</p>"
        (summary,) = compare_variants([self.overlap()])
        sentences = [repr(self), gain_headline(summary)]
        return "".join(f"<p>{escape(each)}</p>" for each in sentences) + self.overlap()._repr_html_()

    @property
    def name(self) -> str:
        """The name of the first file without its ending; for files with a common ``run.json``, the name of that."""
        return manifest_path(self.files[0]).name.removesuffix(SUFFIX)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The settings of the run from the ``run.json`` beside its files; ``None`` without one."""
        manifests = (load_manifest(manifest_path(file)) for file in self.files)
        return next((manifest for manifest in manifests if manifest), None)

    @property
    def label(self) -> str:
        """The name of the run in tables and figures, such as ``bucketed 10 MB``."""
        label = self.file_name or label_of_ranks([label_of(file, self.manifest) for file in self.files])
        return f"{self.folder}/{label}" if self.folder else label

    def events(self) -> Iterator[TraceEvents]:
        """Yield the events of each file, one file after the other.

        Raises:
            TraceError: A file cannot be read.
        """
        if self._kept:
            yield self._kept
        else:
            yield from (load_events(file, self.options) for file in self.files)

    def overlap(self) -> TraceOverlap:
        """Return how much communication overlaps with compute, for each rank and step."""
        from ddp_prof.analyze.overlap import merge_ranks

        results = self._measure("overlap")
        merged = merge_ranks(results)
        self._refuse_repeated_ranks((result.trace, rank.rank) for result in results for rank in result.ranks)
        return replace(merged, label=self.label, warnings=(*self._all_notes, *merged.warnings))

    @property
    def _all_notes(self) -> tuple[str, ...]:
        """The notes, and one if kernels were measured, but not in all files."""
        has_kernels = any(OF_EACH_KERNEL & results.keys() for results in self.measured.values())
        if not has_kernels or len(self.files) <= MOST_FILES_OF_KERNELS:
            return self.notes
        return (*self.notes, f"kernels and contention are measured in {MOST_FILES_OF_KERNELS} of its traces only")

    def inventory(self) -> list[TraceInventory]:
        """Return what each file holds, and which questions it cannot answer for what is missing in it."""
        return self._measure("inventory")

    def identities(self) -> list[Identity]:
        """Return for each rank who it is, and what and when it communicates."""
        return [identity for of_file in self._measure("identity") for identity in of_file]

    def analysis(self) -> RunAnalysis:
        """Return the collectives of all ranks, compared with each other."""
        from ddp_prof.analyze.collectives.run_analysis import merge_analyses

        if self._analysis is None:
            merged = merge_analyses(self._measure("collectives"))
            self._refuse_repeated_ranks((rank.clock, rank.rank) for rank in merged.ranks)
            warnings = (*self._all_notes, *merged.trace_warnings)
            self._analysis = replace(merged, label=self.label, trace_warnings=warnings)
        return self._analysis

    def explanation(self) -> RunExplanation:
        """Return why communication is exposed: its collectives, the skew of the ranks, and the main reason."""
        from ddp_prof.analyze.root_cause import explain_run

        if self._explanation is None:
            self._explanation = explain_run(self.analysis())
        return self._explanation

    def collectives(self) -> RunCollectives:
        """Return when each collective ran on each rank, how much of it is exposed, and why."""
        return self.explanation().collectives

    def root_cause(self) -> RootCause | None:
        """Return the main reason why communication is exposed; ``None`` if no communication is."""
        return self.explanation().root_cause

    def critical(self) -> RunCritical:
        """Return the critical path of each step over all ranks, divided into parts."""
        from ddp_prof.analyze.critical.critical_path import measure_critical_paths

        return measure_critical_paths(self.analysis(), self._work())

    def _work(self) -> list[RankWork]:
        """Return what critical paths are followed through: the operations of each rank, in the order of the ranks."""
        from ddp_prof.analyze.critical.critical_path import in_order_of_ranks

        self.prepare("collectives", "critical")
        work = [(file, of_rank) for file in self.files for of_rank in self.measured[file]["critical"]]
        return in_order_of_ranks(self.analysis(), work)

    def doctor(self) -> Diagnosis:
        """Return what in the set-up of the job prevents overlap of communication, or costs time in another way."""
        diagnosis: Diagnosis = self._make("diagnosis", self._diagnose)
        return diagnosis

    def _diagnose(self) -> Diagnosis:
        """Apply the rules of the doctor to the results of all other analyses."""
        from ddp_prof.analyze.critical.critical_path import measure_critical_paths
        from ddp_prof.analyze.critical.what_if import WhatIf
        from ddp_prof.analyze.doctor import diagnose_run
        from ddp_prof.analyze.doctor.evidence import RunEvidence
        from ddp_prof.analyze.step_cost import find_slowed

        self.prepare(*DOCTOR)
        analysis, work, files = self.analysis(), self._work(), len(self.files)
        facts = {
            (file, of_rank.process, of_rank.device): of_rank
            for file in self.files
            for of_rank in self.measured[file]["facts"]
        }
        return diagnose_run(
            RunEvidence(
                analysis=analysis,
                collectives=self.collectives(),
                overlap=self.overlap(),
                critical=measure_critical_paths(analysis, work, with_gains=False),  # no rule needs gains
                skew=self.skew(),
                facts=tuple(facts[rank.clock, rank.process, rank.device] for rank in analysis.ranks),
                contention=self.contention,
                cause=self.root_cause(),
                what_if=WhatIf(analysis, work, lambda: find_slowed(self.contention(), analysis.device)),
                compared_files=(MOST_FILES_OF_KERNELS, files) if files > MOST_FILES_OF_KERNELS else None,
            )
        )

    def skew(self) -> RunSkew:
        """Return which rank arrives last at the collectives, how often, by how much, and what that costs."""
        return self.explanation().skew

    def kernels(self) -> list[KernelRuns]:
        """Return the executions of kernels; if the run has many files, those in the first few."""
        return self._measure_sampled("kernels")

    def cost(self) -> RunCost:
        """Return what communication costs each step (waits and slower compute), and the most that could be gained."""
        from ddp_prof.analyze.cost import measure_run_cost

        if self._cost is None:
            self._cost = measure_run_cost(self.overlap(), self.contention)
        return self._cost

    def contention(self) -> Contention:
        """Return how much slower kernels are beside communication."""
        from ddp_prof.analyze.kernels.contention import measure_contention

        contention: Contention = self._make("contention", lambda: measure_contention(self.kernels()))
        return contention

    @property
    def has_contention(self) -> bool:
        """Whether the contention is known without reading a file."""
        return "contention" in self.made or any("kernels" in measured for measured in self.measured.values())

    def _make(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a result of ``_MADE_OF``; if it is not there yet, make it with ``make`` and keep it in the cache."""
        self.find_made((name,))
        if name not in self.made:
            self.made[name] = make()
            if kept := self.kept_results():
                kept.keep({name: self.made[name]})
        return self.made[name]

    def find_made(self, names: Iterable[str]) -> None:
        """Take the named results of ``_MADE_OF`` from the cache, if an earlier command made them; skip other names."""
        wanted = [name for name in _MADE_OF if name in names and name not in self.made]
        if wanted and (kept := self.kept_results()):
            results = {name: kept.find(name) for name in wanted}
            self.made |= {name: result for name, result in results.items() if result is not None}

    def kept_results(self) -> KeptResults | None:
        """Return access to the results of the run in the cache; ``None`` for several files, and if it keeps nothing."""
        return find_kept(self.files[0], self.options) if len(self.files) == 1 else None

    def what_if(
        self,
        questions: Sequence[Question] = (),
        parameters: Sequence[int] | None = None,
        calibration: Run | None = None,
    ) -> RunPrediction:
        """Predict by how much other buckets, gradient views or a faster network would change a step.

        Args:
            questions: The changes to predict; by default the usual ones.
            parameters: Bytes of each trained parameter, in the order of ``model.parameters()``, if known.
            calibration: Another run of the same job, which overlaps more or less of its communication.

        Returns:
            The predictions, or the reason why nothing can be predicted.
        """
        from ddp_prof.analyze.step_cost import find_slowed
        from ddp_prof.analyze.what_if.captured import Captured
        from ddp_prof.analyze.what_if.prediction import predict_run
        from ddp_prof.analyze.what_if.questions import USUAL

        def captured(run: Run) -> Captured:
            """Return what a prediction needs to know of a run."""
            run.prepare("overlap", "structure")
            made = run.manifest
            return Captured(
                tuple(run._measure_sampled("structure")),
                parameters=tuple(one.nbytes for one in made.parameters if one.requires_grad) if made else (),
                holds_at_most=made is not None and made.variant in VARIANTS and made.variant != "torch",
                shares_gpu=Caveat.SHARED_GPU in run.overlap().caveats,
                is_alone=Caveat.ONE_RANK in run.overlap().caveats,
            )

        this_run = captured(self)
        return predict_run(
            this_run,
            tuple(questions) or USUAL,
            lambda: find_slowed(self.contention(), self.overlap().device),
            parameters,
            captured(calibration) if calibration else None,
        )

    def device_use(self) -> DeviceUse:
        """Return which kernels took the time, which overlapped with communication, and why devices were idle."""
        from ddp_prof.analyze.kernels.device_use import DeviceUse
        from ddp_prof.analyze.kernels.kernel_times import measure_kernels
        from ddp_prof.analyze.result_bases import rank_order

        self.prepare("kernels", "device use")
        ranks = sorted(self._measure_sampled("device use"), key=lambda rank: rank_order(rank.rank))
        return DeviceUse(tuple(ranks), measure_kernels(self.kernels()))

    def waterfall(self) -> Waterfall:
        """Return the mean step of this run divided into parts; for several runs see :func:`compare_steps`."""
        return compare_steps([self])

    def timeline(self, steps: Collection[int] | None = None) -> go.Figure:
        """Return a plotly figure that shows what ran when in a few steps.

        Args:
            steps: Numbers of the steps to show; by default the typical step and the step after it.
        """
        import plotly.graph_objects as go

        from ddp_prof.present.timeline.build import build_excerpt
        from ddp_prof.present.timeline.figure import draw_timeline

        chart = draw_timeline(build_excerpt(timeline_sources([self]), steps))
        return go.Figure(chart).update_layout(template="none")

    def prepare(self, *measures: str) -> None:
        """Measure several of ``report.MEASURES`` in one reading of the files."""
        prepare_runs([self], *measures)

    def _refuse_repeated_ranks(self, ranks: Iterable[tuple[Path, int | None]]) -> None:
        """Raise TraceError if two files are of one rank, which would count twice."""
        file_of_rank: dict[int, Path] = {}
        for file, rank in ranks:
            if rank is not None and (other := file_of_rank.setdefault(rank, file)) != file:
                reason = f"rank {rank} of this run is in {distinct_names([file, other])[other]}, too"
                raise TraceError(file, reason, "give one file of each rank, or --separate")

    def missing(self, measures: Sequence[str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
        """Yield each file that must be read for ``measures``, and the names of the measures that it lacks.

        Kernels are measured in the first :data:`MOST_FILES_OF_KERNELS` files only.
        """
        measures = self._measures_for(measures)
        for index, file in enumerate(self.files, self.place):
            wanted = tuple(name for name in measures if name not in OF_EACH_KERNEL or index < MOST_FILES_OF_KERNELS)
            if missing := tuple(name for name in wanted if name not in self.measured.get(file, {})):
                yield file, missing

    def _measures_for(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of the measures that are needed for results.

        ``names`` are measures, or results of ``_MADE_OF``. Such a result stands for the measures that it is made from
        or, if it is there already, for none.
        """
        made_of = [_MADE_OF.get(name, (name,)) for name in names if name not in self.made]
        return list(dict.fromkeys(chain.from_iterable(made_of)))

    def keep(self, events: TraceEvents) -> None:
        """Keep the events of the run's only report in memory."""
        self._kept = events

    def take(self, file: Path, results: dict[str, Any]) -> None:
        """Take the results of measures of a file; those that can be results of the run are results of its only file."""
        self.made |= {name: results.pop(name) for name in _MADE_OF if name in results}
        self.measured.setdefault(file, {}).update(results)

    def measure_without_reading(self, measures: Sequence[str]) -> None:
        """Compute those of the measures that the events in memory allow, without reading a file."""
        if self._kept:
            measures = self._measures_for(measures)
            if self._kept.trace.shape_id is None:
                measures = [measure for measure in measures if measure not in OF_EACH_KERNEL]
            for file, missing in list(self.missing(measures)):
                self.take(file, measure_events(self._kept, self.options, missing))

    def measure_loaded(self, events: TraceEvents, measure: str) -> Any:
        """Return the result of a measure for a file whose events are in memory, from the cache if it is there."""
        file = events.trace.path
        measured = self.measured.setdefault(file, {})
        if measure not in measured:
            measured |= measure_report(file, self.options, (measure,), events=events)
        return measured[measure]

    def drop_events(self) -> None:
        """Free memory: drop events, which are read again on demand."""
        self._kept = None

    def release_events(self) -> None:
        """Free memory: drop events and the figures of kernels, which are read again on demand."""
        self.drop_events()
        for of_file in self.measured.values():
            for measure in OF_EACH_KERNEL & of_file.keys():
                del of_file[measure]

    def _measure_sampled(self, measure: str) -> list[Any]:
        """Return the results of a measure of single ranks for the ranks in those files in which it is measured."""
        self.prepare(measure)
        return [of_rank for file in self.files for of_rank in self.measured[file].get(measure, ())]

    def _measure(self, measure: str) -> list[Any]:
        """Return the result of a measure for each file."""
        self.prepare(measure)
        return [self.measured[file][measure] for file in self.files]


def prepare_runs(runs: Sequence[Run], *measures: str) -> list[Run]:
    """Compute several measures for all runs with the workers of the first run; each file is read once.

    Args:
        runs: The runs. Files that cannot be read are taken out of them, if ``workers.leave_out`` is set.
        measures: Names in ``report.MEASURES``, or of results that are made from measures. Such a result stands for
            these measures, unless the cache holds the result.

    Returns:
        The runs of which at least one file could be read.

    Raises:
        TraceError: No file can be read, or a file cannot be read and ``workers.leave_out`` is not set.
    """
    # First without reading files: from the cache, and from events in memory.
    for run in runs:
        run.find_made(measures)
        run.measure_without_reading(measures)
    wanted = [(run, *missing) for run in runs for missing in run.missing(measures)]
    if not wanted:
        return list(runs)
    workers = runs[0].workers
    if len(wanted) == 1 and len(wanted[0][0].files) == 1:  # a single file: the run keeps its events
        ((run, file, names),) = wanted
        workers = replace(workers, keep=run.keep)
        if "contention" in measures and "kernels" in names:  # compared while more is measured of the file
            wanted = [(run, file, (*names, "contention"))]
    broken, unread = _read_files(wanted, workers)
    if workers.leave_out is None:
        return list(runs)
    # What could not be read is told once, in the order of files, and left out of the runs.
    errors = [(broken[run, file], {run}) for run, file in sorted(broken, key=lambda key: key[1])]
    if unread:
        interruption = InterruptedReadingError(min(file for _, file in unread), len(unread), len(wanted))
        errors.append((interruption, {run for run, _ in unread}))
    for error, _ in errors:
        workers.leave_out(error)
    for run in runs:
        run.files = tuple(file for file in run.files if (run, file) not in unread | broken.keys())
        run.notes = (*run.notes, *(Doubt(f"left out: {error}") for error, of_runs in errors if run in of_runs))
    return [run for run in runs if run.files]


def _read_files(
    wanted: Sequence[tuple[Run, Path, tuple[str, ...]]], workers: Workers
) -> tuple[dict[tuple[Run, Path], TraceError], set[tuple[Run, Path]]]:
    """Measure files, and give each result to its run.

    Args:
        wanted: The run, the file, and what to measure of it.
        workers: The processes that read.

    Returns:
        The errors of the files that cannot be read, and the files that Ctrl-C kept from being read, each with its run:
        two runs may have a file in common. Without ``workers.leave_out``, or if no file was read, both are raised.
    """
    broken: dict[tuple[Run, Path], TraceError] = {}
    unread = {(run, file) for run, file, _ in wanted}
    reports = [WantedReport(file, run.options, names) for run, file, names in wanted]
    try:
        with closing(measure_files(reports, workers)) as outcomes:
            for index, outcome in outcomes:
                run, file, _ = wanted[index]
                unread.discard((run, file))
                if not isinstance(outcome, TraceError):
                    run.take(file, outcome)
                elif workers.leave_out is None:
                    raise outcome
                else:
                    broken[run, file] = outcome
    except KeyboardInterrupt as stop:
        # For a signal other than Ctrl-C it has the signal's number as an argument, and ends the program.
        if stop.args or workers.leave_out is None or len(unread) + len(broken) == len(wanted):
            raise
    if len(broken) == len(wanted):
        raise min(broken.items(), key=lambda item: item[0][1])[1]
    return broken, unread


def compare_steps(runs: Sequence[Run]) -> Waterfall:
    """Compare each variant with the next one: by how much each part of a step changed.

    The contention of a run is estimated from all runs with the same work.
    """
    from ddp_prof.analyze.variants.waterfall import measure_waterfall

    prepare_runs(runs, "collectives", "kernels")
    return measure_waterfall([(run.analysis(), run.kernels()) for run in runs])


def timeline_sources(runs: Iterable[Run]) -> list[Source]:
    """Return each file of the runs as a panel of a timeline.

    If several panels had the same title, their titles also name the rank (or the file, if the rank is not known). A run
    of one file keeps its events.
    """
    from ddp_prof.analyze.collectives.results import measure_collectives
    from ddp_prof.analyze.collectives.run_analysis import merge_analyses

    sources: list[Source] = []
    for at, run in enumerate(runs):
        # The collectives of the run, and a panel for each of its files.
        parts = list(run.events())
        if len(parts) == 1:
            run.keep(parts[0])
        analysis = run._analysis or merge_analyses([run.measure_loaded(part, "collectives") for part in parts])
        typical, panels = measure_collectives(analysis).typical_step, []
        for part in parts:
            label = (len(parts) == 1 and run.file_name) or label_of(part.trace.path, part.trace.manifest)
            title = "/".join(filter(None, (run.folder, label)))
            panels.append(timeline_source(title, part, analysis, run)._replace(run=at, typical_step=typical))
        if len(panels) > 1:
            from ddp_prof.analyze.root_cause import explain_run

            explained = explain_run(analysis)
            text = _tell_of_all_files(run, parts, [one.overlap for one in panels], explained)
            panels = [source._replace(told_of_run=text) for source in _late_first(panels, explained.skew)]
        sources += panels
    titles, names = Counter(source.title for source in sources), distinct_names(source.trace.path for source in sources)
    for at, source in enumerate(sources):
        if titles[source.title] > 1:
            rank = next((rank.rank for rank in source.ranks if rank.rank is not None), None)
            more = f" ({names[source.trace.path]})" if rank is None else f", rank {rank}"
            sources[at] = source._replace(title=source.title + more)
    return sources


def _late_first(sources: list[Source], skew: RunSkew) -> list[Source]:
    """Return the panels of a run with that of the rank that arrives last first, and with a caveat that says so."""
    from ddp_prof.present.skew_headlines import late_text

    name = skew.latest.name if skew.latest else None
    at = next((at for at, one in enumerate(sources) if any(rank.rank == name for rank in one.explained)), None)
    if at is None or len(sources) == 1:
        return sources
    marked = sources[at]._replace(caveats=(late_text(skew), *sources[at].caveats))
    return [marked, *sources[:at], *sources[at + 1 :]]


def _tell_of_all_files(
    run: Run, parts: Sequence[TraceEvents], results: Sequence[TraceOverlap], explained: RunExplanation
) -> str:
    """Return a text on how much a run of several files would gain if all communication were overlapped.

    It also says why communication is exposed. If the devices are idle for longer than that gain, the text begins with
    the idle time, and why they are idle, and leaves the cause out.

    Args:
        run: The run.
        parts: The events of its files.
        results: The overlap in each file, with steps identified as in the timeline.
        explained: Why its communication is exposed.
    """
    from ddp_prof.analyze.overlap import merge_ranks
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.cause_headlines import cause_headline
    from ddp_prof.present.headlines import gain_headline
    from ddp_prof.present.tables.summary import idle_text

    def diagnose() -> Diagnosis:
        for part in parts:  # while its events are in memory
            for measure in DOCTOR:
                run.measure_loaded(part, measure)
        return run.doctor()

    label, result = run.label, merge_ranks(results)
    (summary,) = compare_variants([replace(result, label=label)])
    if idle := idle_text(summary, result, diagnose):
        return f"{label}: {idle} {gain_headline(summary)}"
    collectives = explained.collectives
    cause = cause_headline(explained.root_cause, collectives.why_no_cause, collectives.blocking)
    return f"{label}: {gain_headline(summary)}" + ("" if summary.reason else f" Cause: {cause}")


def timeline_source(title: str, part: TraceEvents, analysis: RunAnalysis, run: Run | None = None) -> Source:
    """Return a file as a panel of a timeline.

    Args:
        title: The title of the panel.
        part: The events of the file.
        analysis: The collectives of all ranks of the run.
        run: The run, whose measures are used; ``None`` to measure the events.
    """
    from ddp_prof.analyze.collectives.exposed_time import Exposure
    from ddp_prof.analyze.collectives.timing import consumer_activities
    from ddp_prof.analyze.cost import contention_of, measure_cost
    from ddp_prof.analyze.doctor import Diagnosis
    from ddp_prof.analyze.kernels.contention import measure_contention
    from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs
    from ddp_prof.analyze.overlap import measure_overlap
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.headlines import gain_headline
    from ddp_prof.present.tables.summary import idle_text
    from ddp_prof.present.timeline.model import RankExposure, Source
    from ddp_prof.trace import UNKNOWN

    collectives_of = {
        (rank.clock, rank.process, rank.device): (rank, exposure, transfer_ns)
        for rank, exposure, transfer_ns in zip(analysis.ranks, analysis.exposures, analysis.transfers_ns, strict=True)
    }
    trace, ranks, explained = part.trace, [], []
    for one in part.ranks:
        rank, exposure, transfer_ns = collectives_of[trace.path, one.process, one.device]
        if rank.reason:  # exposure is not known: it is set to 0, as pages do not show parts of 0
            exposure = Exposure(*(0 * getattr(exposure, item.name) for item in fields(exposure)))
        events = one.rekey_steps(rank.step_keys)
        ranks.append(events)
        knows_wait = bool((transfer_ns != UNKNOWN).any())
        needed_by = consumer_activities(events)
        explained.append(
            RankExposure(rank.name, rank.timings, exposure, transfer_ns, knows_wait, needed_by, rank.consumers)
        )
    # The measures of a run identify steps as in the file alone. Where the analysis identifies them in another way
    # (``rekey_steps``), the events must be measured again.
    if run and all(events is rekeyed for events, rekeyed in zip(part.ranks, ranks, strict=True)):
        result, contention = run.measure_loaded(part, "overlap"), run.contention
    else:
        result = measure_overlap(trace, ranks, part.diagnostics)
        contention = lambda: measure_contention(list(map(find_kernel_runs, ranks)))  # noqa: E731
    (summary,) = compare_variants([result])
    # The timeline of several files shows no cost of each.
    has_cost = analysis.files == 1 and trace.shape_id is not None
    cost = measure_cost(summary, contention_of(summary, contention)) if has_cost else None
    # Of a run of several files, the doctor's findings are told of all of them.
    idle = idle_text(summary, result, run.doctor if run and analysis.files == 1 else lambda: Diagnosis((), ()))
    is_comparable = analysis.files > 1 and analysis.alignment.residual_p95_ns is not None
    clocks = analysis.alignment.clocks if is_comparable else ()
    return Source(
        title=title,
        trace=trace,
        ranks=ranks,
        overlap=result,
        gain=" ".join(filter(None, (idle, gain_headline(summary, cost)))),
        explained=explained,
        caveats=tuple(caveat.value for caveat in result.caveats),
        clock=next((clock for clock in clocks if clock.clock == trace.path), None),
    )


def are_one_variant(runs: Sequence[Run]) -> bool:
    """Return whether all runs have the same variant and bucket size, or none of them has a ``run.json``."""
    kinds = {(run.manifest.variant, run.manifest.bucket_size_mb) if run.manifest else None for run in runs}
    return len(kinds) == 1


def what_changed(
    before: Run, after: Run, *, names: Sequence[str], others: Sequence[Run] = (), are_one_job: bool = True
) -> WhatChanged:
    """Return what changed between two runs of one variant.

    Args:
        before: The first run.
        after: The other one.
        names: What they are called in texts.
        others: See :func:`changes_between`.
        are_one_job: Whether both are runs of one job; between others, no common factor of all kernels is looked for.
    """
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.analyze.variants.same_factor import find_same_factor
    from ddp_prof.present.tables.compare import WhatChanged, beside_text, late_ranks_text

    parts = changes_between(before, after, others)
    factor = find_same_factor(before.kernels(), after.kernels()) if are_one_job else None
    late = late_ranks_text(parts, [before.skew(), after.skew()], names) if parts else ""
    beside = beside_text(parts, *compare_variants([before.overlap(), after.overlap()]))
    return WhatChanged(parts, factor, late, beside)


def changes_between(before: Run, after: Run, others: Sequence[Run] = ()) -> tuple[PartChange, ...]:
    """Return how each part of the step changed between two runs of one variant, and which collective caused that.

    Contention is estimated with the kernels of ``others``, too, so that the result is the same as when all runs are
    compared.
    """
    from ddp_prof.analyze.variants.waterfall import compare_before_after

    runs = [before, after, *(run for run in others if run not in (before, after))]
    prepare_runs(runs, "collectives", "kernels")
    first, second, *reference = [(run.analysis(), run.kernels()) for run in runs]
    return compare_before_after(first, second, reference)
