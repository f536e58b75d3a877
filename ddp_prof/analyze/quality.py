"""What makes a capture doubtful: how much of it belongs to no step, and which warnings to show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddp_prof.analyze.core.attribution import gloo_names
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import are_launched_earlier, find_lost_launches, name_steps
from ddp_prof.analyze.core.steps import find_steps
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.why_unknown import WAITED_FOR, count_messages, lacks_phases, named_collectives
from ddp_prof.columns import by_number, count_noun, milliseconds, percent
from ddp_prof.manifest import RANKS_PER_GPU, Caveat, caveats_of
from ddp_prof.notes import Doubt, prefixed
from ddp_prof.range_names import PROCESS, parse_range
from ddp_prof.table import NEVER, Ints, Mask, is_in, parts_of
from ddp_prof.trace import UNKNOWN, Activities, Category, Kind, Trace, distinct, distinct_rows, select


@dataclass(frozen=True, slots=True)
class Attribution:
    """How many events of all ranks were assigned to steps.

    Attributes:
        events, attributed_events: Number of all events, and of the events in steps.
        time_ns, attributed_time_ns: Sums of their durations.
        method: How backward was found: ``ranges``, ``inferred`` (from autograd's threads) or ``none``.
    """

    events: int
    attributed_events: int
    time_ns: int
    attributed_time_ns: int
    method: str

    @property
    def activities(self) -> float | None:
        """Fraction of the events that were assigned to steps, 0 to 1; ``None`` without events."""
        return self.attributed_events / self.events if self.events else None

    @property
    def device_time(self) -> float | None:
        """Fraction of the events' summed duration that was assigned to steps, 0 to 1; ``None`` without any."""
        return self.attributed_time_ns / self.time_ns if self.time_ns else None


def measure_attribution(ranks: Sequence[RankEvents]) -> Attribution:
    """Return how much of the work of all ranks belongs to a step, and how backward was found."""
    found = []
    for rank in ranks:
        given = (rank.events.step != UNKNOWN) & rank.has_steps
        duration = rank.events.end_ns - rank.events.start_ns
        times = int(duration.sum()), int(duration[given].sum())
        found.append(Attribution(len(rank.events), int(given.sum()), *times, rank.backward))
    return merge_attributions(found)


def merge_attributions(parts: Sequence[Attribution]) -> Attribution:
    """Return the sums of several ranks or files, with the weakest of their methods.

    That is ``inferred`` if one of them has it, else ``ranges`` if one has it, else ``none``.
    """
    return Attribution(
        events=sum(part.events for part in parts),
        attributed_events=sum(part.attributed_events for part in parts),
        time_ns=sum(part.time_ns for part in parts),
        attributed_time_ns=sum(part.attributed_time_ns for part in parts),
        method=next((name for name in ("inferred", "ranges") if name in {part.method for part in parts}), "none"),
    )


OVERHEAD_LIMIT, MUCH_OVERHEAD = 0.01, 0.1
"""The profiler's own work is reported if it takes a larger fraction of the measured time than the first one.

From the second one on, it changes how figures are to be read.
"""

MOST_LOST_LAUNCHES = 0.01
"""Launches without an activity are reported if they are a larger fraction of a process's launches.

A few activities may end after the recording, and are then not recorded.
"""

SUSPECT_LIMIT = 0.01
"""A compute kernel that is named like a collective is reported if it takes a larger fraction of all kernels' time."""

MOST_ALIKE = 4
"""Largest number of files whose warnings are all shown if they differ only in numbers."""

_NUMBERS = re.compile(r"\d[\d.,]*")
_TELLING = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|nvshmem|ccl|multimem", re.I)
_FUSED = re.compile("triton_[a-z]+_fused_")
"""Matches names of torch.compile's kernels. They contain what the kernel fuses, or prepares, but it only computes."""


Window = tuple[int, int, int | None, int, int]
"""When a process computed on a device: process, device, the machine's number of the device if known, start and end."""


@dataclass(frozen=True)
class Diagnostics:
    """The counts from which warnings are made.

    Attributes:
        about_trace: Warnings of the trace, and about its steps.
        caveats: Why the run is not representative, as its manifest or its ranges tell.
        windows: Time from the first to the last kernel of each process and device.
        overhead_warnings: Warnings about the profiler's own work.
        activities: Number of activities.
        graphs: Number of CUDA graphs that were recorded as a whole.
        orphans: Number of activities without a launching call.
        unnumbered: Number of these that have no correlation number.
        placed: Number of those without a call whose step the numbers of other calls tell.
        earlier: Number of these whose correlation number is lower than those of all recorded calls.
        calls: Number of calls.
        launches: By process, the number of calls that launched something.
        lost: By process, the number of these calls that have no activity and lie in no step; also those in steps if no
            activity of the process was recorded.
        ambiguous: Number of activities whose correlation number several calls have.
        repeated: Number of collectives that are in the trace more than once, with the same stream and times, or
            with the same launch, name and times on another stream.
        busy_ns, collectives: Time of compute, and number of collectives, by process, device and stream.
        compute_ns: By name, the summed time of the kernels that count as compute.
        kernels_ns: Summed time of all kernels.
        silent: Number of processes that train by their ranges, and of which neither a launch nor work was recorded.
    """

    about_trace: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    windows: tuple[Window, ...] = ()
    overhead_warnings: tuple[str, ...] = ()
    activities: int = 0
    graphs: int = 0
    orphans: int = 0
    unnumbered: int = 0
    placed: int = 0
    earlier: int = 0
    calls: int = 0
    launches: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    ambiguous: int = 0
    repeated: int = 0
    busy_ns: Counter[tuple[int, int | None, int]] = field(default_factory=Counter)
    collectives: Counter[tuple[int, int | None, int]] = field(default_factory=Counter)
    compute_ns: Counter[str] = field(default_factory=Counter)
    kernels_ns: int = 0
    silent: int = 0

    @property
    def unrecorded(self) -> int:
        """How many processes seem to train though nothing of their work was recorded."""
        return self.silent + sum(self.lost[process] == launches > 0 for process, launches in self.launches.items())

    def busiest_stream(self, process: int, device: int | None) -> int:
        """Return the stream of a device with most compute time, ``UNKNOWN`` if there is none."""
        busy_ns = {lane: ns for (*owner, lane), ns in self.busy_ns.items() if owner == [process, device] and ns}
        return max(sorted(busy_ns), key=busy_ns.__getitem__, default=UNKNOWN)

    @property
    def all_caveats(self) -> tuple[Caveat, ...]:
        """Why the run is not representative; also that ranks share a GPU, if their kernels tell that."""
        is_shared = any(is_known for is_known, _ in _find_sharing(self.windows))
        is_new = is_shared and Caveat.SHARED_GPU not in self.caveats
        return (Caveat.SHARED_GPU, *self.caveats) if is_new else self.caveats

    def warnings(self) -> tuple[str, ...]:
        """Return a line for each reason why figures may be wrong, uncertain or not representative."""
        caveats = self.all_caveats
        sharing = {} if Caveat.SHARED_GPU in caveats else _find_sharing(self.windows)
        repeated = f"{count_noun(self.repeated, 'duplicate collective')}: counted twice, timed once"
        return (
            *(Doubt(caveat.value) if caveat is Caveat.SHARED_GPU else caveat.value for caveat in caveats),
            *self.about_trace,
            *(
                Doubt(
                    f"processes {', '.join(map(str, sorted(processes)))} use a device {device} at one time: unless "
                    "each sees another GPU by that number (CUDA_VISIBLE_DEVICES), they share one, and bandwidth and "
                    "overlap are not representative"
                )
                for (_, device), processes in sharing.items()
            ),
            *_warn_about_lost_activities(self),
            *_warn_about_attribution(self),
            *((Doubt(repeated),) if self.repeated else ()),
            *self.overhead_warnings,
            *_warn_about_compute(self),
        )


def diagnose(trace: Trace, ranks: Sequence[RankEvents]) -> tuple[str, ...]:
    """Return the warnings about a trace, a line each."""
    return gather_diagnostics(trace, ranks).warnings()


def merge_file_warnings(by_file: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """Return the warnings of a run from the warnings of its files, which are pairs of a file's name and its warnings.

    A warning that all files have is shown once. Any other warning names the first file that has it, and how many others
    have it. Of more than :data:`MOST_ALIKE` warnings that differ only in numbers, only the first is shown.
    """
    # By warning: the files that have it. Then group the warnings that differ only in numbers.
    files: dict[str, list[str]] = {}
    for file, warnings in by_file:
        for warning in dict.fromkeys(warnings):
            files.setdefault(warning, []).append(file)
    groups: dict[str, list[str]] = {}
    for warning, of_warning in files.items():
        groups.setdefault(warning if len(of_warning) == len(by_file) else _NUMBERS.sub("", warning), []).append(warning)
    lines = []
    for similar in groups.values():
        shown, left_out = (similar, 0) if len(similar) <= MOST_ALIKE else (similar[:1], len(similar) - 1)
        for warning in shown:
            first, *others = files[warning]
            name = f"{first} and {len(others)} more" if others else first
            rest = f" ({left_out} more like it, with other numbers)" if left_out else ""
            is_of_all = len(others) + 1 == len(by_file)
            lines.append(warning if is_of_all else prefixed(f"{name}: ", type(warning)(f"{warning}{rest}")))
    return tuple(lines)


def warn_world_sizes(sizes: Iterable[int | None]) -> tuple[str, ...]:
    """Return a warning if the traces of a run have different numbers of ranks in the job; else nothing."""
    known = sorted({size for size in sizes if size})
    numbers = ", ".join(map(str, known))
    warning = f"the traces disagree on the number of ranks in the job ({numbers}): they may be of different jobs"
    return (Doubt(warning),) if len(known) > 1 else ()


def warn_silent_steps(counts: Mapping[str, Mapping[int, int]]) -> Iterator[str]:
    """Yield a warning for each rank that has no collective in a step in which all others have some.

    A step that accumulates gradients has none on any rank. A rank that has none in most steps communicates with others
    than these, so there is no warning.

    Args:
        counts: For each rank, by its name, the number of its collectives by the key of the step.
    """
    communicating = Counter(key for of_rank in counts.values() for key, number in of_rank.items() if number)
    for name, own in counts.items():
        silent = [key for key, number in own.items() if not number and 0 < communicating[key] == len(counts) - 1]
        if 0 < 2 * len(silent) < len(own):
            steps = name_steps([f"step {key}" for key in own], np.isin([*own], silent))
            yield Doubt(
                f"{name}: no collective was recorded in {steps}, in which all other ranks have some: the profiler may "
                "have lost them"
            )


def _count_repeated(communication: Activities) -> int:
    """Return how many collectives are there again at one time: on the same stream, or of the same launch on another."""
    at_once = ("start_ns", "end_ns", "device", "process")
    columns = [getattr(communication, name) for name in (*at_once, "lane")]
    on_stream = _equal_neighbours(columns, np.lexsort(columns))
    numbered = select(communication, communication.correlation != UNKNOWN)
    columns = [getattr(numbered, name) for name in (*at_once, "correlation", "name_id")]
    order = np.lexsort([numbered.lane, *columns])
    of_launch = _equal_neighbours(columns, order) & (np.diff(numbered.lane[order]) != 0)
    return int(on_stream.sum() + of_launch.sum())


def _equal_neighbours(columns: Sequence[Ints], order: Ints) -> Mask:
    """Return for each row of ``order`` but the last whether the next one is equal to it in all columns."""
    found: Mask = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    return found


def gather_diagnostics(trace: Trace, ranks: Sequence[RankEvents]) -> Diagnostics:
    """Return the counts of what makes the figures of a trace doubtful, from which warnings and caveats are made."""
    activities = trace.activities
    # Parts of columns, since these may be long: the duration of kernels that count as compute, by name, and of all.
    total, kernels_ns = np.zeros(len(trace.names), np.int64), 0
    for part in parts_of(len(activities)):
        duration = activities.end_ns[part] - activities.start_ns[part]
        duration[activities.kind[part] != Kind.KERNEL] = 0
        kernels_ns += int(duration.sum())
        computing = activities.category[part] == Category.COMPUTE
        np.add.at(total, activities.name_id[part][computing], duration[computing])
    busy_ns, collectives = Counter[tuple[int, int | None, int]](), Counter[tuple[int, int | None, int]]()
    for rank in ranks:
        for lane, (busy_of_lane_ns, number) in sorted(_sum_lanes(rank).items()):
            key = (rank.process, rank.device, lane)
            busy_ns[key] += busy_of_lane_ns
            collectives[key] += number
    communication = select(activities, activities.category == Category.COMMUNICATION)
    launches, lost = _count_launches(trace, ranks)
    lacking = [rank.process for rank in ranks if rank.recording.lacks_calls]  # the first calls may be among the lost
    return Diagnostics(
        about_trace=(*trace.warnings, *_warn_about_steps(trace, ranks)),
        caveats=_declared_caveats(trace),
        windows=_kernel_windows(trace),
        overhead_warnings=tuple(_warn_about_overhead(trace, ranks)),
        activities=len(activities),
        graphs=int((activities.kind == Kind.GRAPH).sum()),
        orphans=int((trace.launching_calls == UNKNOWN).sum()),
        unnumbered=int((activities.correlation == UNKNOWN).sum()),
        placed=sum(rank.including_warmup.number_of_placed for rank in ranks),
        earlier=int((are_launched_earlier(trace) & ~is_in(activities.process, lacking)).sum()),
        calls=len(trace.calls),
        launches=launches,
        lost=lost,
        ambiguous=int(trace.has_ambiguous_launch.sum()),
        repeated=_count_repeated(communication),
        busy_ns=busy_ns,
        collectives=collectives,
        compute_ns=Counter({trace.names[name]: int(total[name]) for name in np.flatnonzero(total).tolist()}),
        kernels_ns=kernels_ns,
        silent=sum(1 for _ in _silent_processes(trace, ranks)),
    )


def _sum_lanes(rank: RankEvents) -> dict[int, tuple[int, int]]:
    """Return for each stream with kernels how long kernels compute there (ns), and its number of collectives."""
    events, found = rank.events, dict[int, tuple[int, int]]()
    for part in parts_of(len(events)):
        lane, kernels = events.lane[part], rank.is_kernel[part] & (events.lane[part] != UNKNOWN)
        duration = np.where(events.category[part] == Category.COMPUTE, events.end_ns[part] - events.start_ns[part], 0)
        for one in distinct(lane[kernels]):
            mine, (busy_ns, collectives) = kernels & (lane == one), found.get(one, (0, 0))
            found[one] = busy_ns + int(duration[mine].sum()), collectives + int(rank.is_collective[part][mine].sum())
    return found


def _count_launches(trace: Trace, ranks: Sequence[RankEvents]) -> tuple[Counter[int], Counter[int]]:
    """Return by process the number of calls that launched something, and how many of these were lost.

    A launch in a step does not count as lost, because the step is then left out, and a note says so.
    """
    launches, lost = Counter[int](), Counter[int]()
    working = set(distinct(trace.activities.process))
    steps = {rank.process: rank.including_warmup for rank in ranks if rank.has_steps}
    recordings = {rank.process: rank.recording for rank in ranks}
    for process in distinct(trace.calls.process):
        if process in recordings:
            launches[process], at = recordings[process].launches, recordings[process].lost_ns
        else:
            without, is_launch = find_lost_launches(trace, process)
            launches[process], at = int(is_launch.sum()), trace.calls.start_ns[without]
        counts = np.ones(len(at), np.bool_)
        if process in steps and process in working:
            counts = steps[process].steps.index_at(at) == UNKNOWN
        lost[process] = int(counts.sum())
    return launches, lost


def _declared_caveats(trace: Trace) -> tuple[Caveat, ...]:
    """Return why the run is not representative, as its manifest or the ranges around its processes tell."""
    caveats = caveats_of(trace.manifest) if trace.manifest else ()
    processes = (parse_range(name) for name in trace.names if name.startswith(f"{PROCESS}|"))
    is_shared = any((process.number(RANKS_PER_GPU) or 1) > 1 for process in processes)
    return (Caveat.SHARED_GPU, *caveats) if is_shared and Caveat.SHARED_GPU not in caveats else caveats


def _kernel_windows(trace: Trace) -> tuple[Window, ...]:
    """Return when each process computed on each device: from its first to its last kernel."""
    activities, found = trace.activities, dict[tuple[int, int], tuple[int, int]]()
    for part in parts_of(len(activities)):
        rows = part.start + np.flatnonzero(activities.kind[part] == Kind.KERNEL)
        process, device, start, end = (
            getattr(activities, name)[rows] for name in ("process", "device", "start_ns", "end_ns")
        )
        first, which = distinct_rows(process, device)
        for row, owner in enumerate(zip(process[first].tolist(), device[first].tolist(), strict=True)):
            low, high = found.get(owner, (NEVER, -NEVER))
            mine = which == row
            found[owner] = min(low, int(start[mine].min())), max(high, int(end[mine].max()))
    return tuple((*owner, trace.gpu_ids.get(owner), *window) for owner, window in sorted(found.items()))


def _find_sharing(windows: Sequence[Window]) -> dict[tuple[bool, int], set[int]]:
    """Return the processes whose kernels run on one GPU at the same time, by GPU.

    The key is a pair: whether the machine's number of the GPU is known, and this number or else CUDA's number. CUDA
    numbers the GPUs that a process sees, so two processes may use the same number for different GPUs.
    """
    by_gpu: dict[tuple[bool, int], dict[int, tuple[int, int]]] = {}
    for process, device, gpu, start, end in windows:
        if gpu is None and device == UNKNOWN:
            continue
        of_gpu = by_gpu.setdefault((gpu is not None, device if gpu is None else gpu), {})
        first, last = of_gpu.get(process, (start, end))
        of_gpu[process] = min(first, start), max(last, end)
    shared: dict[tuple[bool, int], set[int]] = {}
    for key, of_gpu in by_gpu.items():
        for process, (start, end) in of_gpu.items():
            if any(start < last and first < end for who, (first, last) in of_gpu.items() if who != process):
                shared.setdefault(key, set()).add(process)
    return shared


def _warn_about_steps(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line for each fact about how steps, phases and communication were found, and what was left out."""
    about: dict[str, list[str]] = {}  # for each note, the processes that it is about
    processes = {rank.process: f"process {rank.process}" for rank in ranks}
    processes |= {process: f"rank {rank}" for process, rank in trace.ranks.items() if process in processes}
    for process, name in processes.items():
        for note in dict.fromkeys(note for rank in ranks if rank.process == process for note in rank.step_notes):
            about.setdefault(note, []).append(name)
    for note, names in about.items():
        yield note if len(names) == len(processes) else prefixed(f"{', '.join(names)}: ", note)
    if left_out := max((rank.warmup_steps for rank in ranks), default=0):
        yield f"{count_noun(left_out, 'warm-up step')} left out"
    if any(rank.backward == "inferred" for rank in ranks):
        yield "backward is inferred from what autograd's threads launched: no range names it (see --backward-range)"
    if any(map(lacks_phases, ranks)):
        yield "forward or optimizer has no range: when the host computed there is not known, nor when it was idle"
    if any(rank.blocking.coverage.source == "call_order" for rank in ranks):
        yield "what streams waited for is inferred from the order of calls: not all records of events were recorded"
    first, _ = distinct_rows(trace.activities.process, trace.activities.device)
    owners = {(rank.process, rank.device) for rank in ranks}
    for process, device in zip(
        trace.activities.process[first].tolist(), trace.activities.device[first].tolist(), strict=True
    ):
        if (process, device) not in owners:
            where = f"device {device}" if device != UNKNOWN else "a device without a number"
            yield f"{where} of process {process} only copies: it is no rank, and left out"
    yield from _warn_about_silent_processes(trace, ranks)
    communicates = any(rank.device is None and rank.union_of(Category.COMMUNICATION).length_ns for rank in ranks)
    if communicates and (messages := count_messages(trace)):
        yield f"sends and receives of gloo left out: {messages:,}; {WAITED_FOR}"
    yield from _warn_about_gloo(trace, ranks)


_NAMED_OF_GLOO = 3
"""Largest number of kinds of events of gloo that a note names."""


def _warn_about_gloo(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line for each process whose host communicates by gloo in steps, beside devices that communicate.

    It tells how long no device of the process worked meanwhile, because that may be what gloo costs: figures are of
    what the devices communicate. Below :data:`OVERHEAD_LIMIT` of the steps' time nothing is said.
    """
    spans, activities = trace.spans, trace.activities
    names = gloo_names(trace)
    for rank in {rank.process: rank for rank in ranks if rank.device is not None and names}.values():
        rows = np.flatnonzero(is_in(spans.name_id, names) & (spans.process == rank.process))
        steps = union(rank.steps.start_ns, rank.steps.end_ns)
        if len(rank.steps):
            rows = rows[steps.covered_ns(spans.start_ns[rows], spans.end_ns[rows]) > 0]
        own = select(activities, activities.process == rank.process)
        during = union(spans.start_ns[rows], spans.end_ns[rows])
        whole_ns = steps.length_ns or trace.duration_ns
        if during.length_ns <= OVERHEAD_LIMIT * whole_ns or not np.any(own.category == Category.COMMUNICATION):
            continue
        idle_ns = (during - union(own.start_ns, own.end_ns)).length_ns
        called = ", ".join(f"'{trace.names[name_id]}'" for name_id in distinct(spans.name_id[rows])[:_NAMED_OF_GLOO])
        count = f"{len(rows):,} events such as {called} last" if len(rows) > 1 else f"{called} lasts"
        yield Doubt(
            f"gloo on the host is in no figure, as devices communicate, too: {count} {milliseconds(during.length_ns)} "
            f"in all, for {milliseconds(idle_ns)} of which no device of the process worked"
        )


def _warn_about_silent_processes(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line for each process that trains by its ranges, and of which neither a launch nor work was recorded."""
    for process, named in _silent_processes(trace, ranks):
        what = f"calls collectives, by ranges such as '{named[0]}'" if named else "has ranges of steps"
        yield Doubt(
            f"process {process} {what}, but neither its launches nor its work on a device were recorded: what this "
            "process did is in no figure"
        )


def _silent_processes(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield each process that trains by its ranges but has neither launch nor work, and its names of collectives.

    Other processes without work may have ranges, too, for example those that load data.
    """
    is_launch = np.zeros(len(trace.calls), np.bool_) if trace.is_launch is None else trace.is_launch
    known = {rank.process for rank in ranks} | set(distinct(trace.calls.process[is_launch]))
    for process in trace.processes if len(trace.activities) else ():
        if process in known:
            continue
        named = named_collectives(trace, process)
        if named or len(find_steps(trace, process).steps):
            yield process, named


def _warn_about_lost_activities(counted: Diagnostics) -> Iterator[str]:
    """Yield a line for each reason why activities are missing."""
    if counted.graphs:
        them = by_number(
            counted.graphs, "1 launch: the kernels in it", f"{counted.graphs:,} launches: the kernels in them"
        )
        yield Doubt(
            f"CUDA graphs were recorded whole, {them}, collectives included, are not in this trace; record with "
            "--cuda-graph-trace=node"
        )
    if counted.calls and not counted.activities:
        calls = by_number(counted.calls, "1 API call of a device is", f"{counted.calls:,} API calls of a device are")
        yield Doubt(
            f"{calls} in this trace, but no kernels or copies: if any were launched, the profiler lost them, and its "
            "messages may tell why"
        )
    for process, launches in sorted(counted.launches.items()) if counted.activities else ():
        if (lost := counted.lost[process]) == launches > 0:
            work = by_number(
                lost,
                "1 kernel or graph, and it was not recorded: the profiler lost it",
                f"{lost:,} kernels or graphs, and none of them was recorded: the profiler lost them",
            )
            yield Doubt(f"process {process} launched {work}, and what this process did is in no figure")
        elif lost > MOST_LOST_LAUNCHES * launches:
            yield Doubt(
                f"{lost:,} of {launches:,} launches of process {process} "
                f"{by_number(lost, 'lies in no whole step and has', 'lie in no whole step and have')} no activity, "
                "which the profiler lost: figures are of what was recorded"
            )


def _warn_about_attribution(counted: Diagnostics) -> Iterator[str]:
    """Yield a line for each reason why activities belong to no step or phase, or may belong to a wrong one."""
    if counted.activities and not counted.calls:
        yield (
            "no CUDA API calls: nothing can be attributed to steps or phases; record with nsys' --trace=cuda,nvtx, or "
            "with ProfilerActivity.CPU, too"
        )
    elif counted.unnumbered:
        yield (
            f"{counted.unnumbered:,} of {counted.activities:,} activities "
            + by_number(
                counted.unnumbered,
                "carries no correlation number, by which the call that launched it is found: it belongs",
                "carry no correlation number, by which the call that launched them is found: they belong",
            )
            + " to no step or phase"
        )
    if counted.calls and counted.earlier:
        yield (
            f"{counted.earlier:,} of {counted.activities:,} activities "
            + by_number(
                counted.earlier,
                "was launched before the recording began, and belongs",
                "were launched before the recording began, and belong",
            )
            + " to no step or phase"
        )
    without = counted.orphans - counted.unnumbered - counted.earlier if counted.calls else 0
    if without > counted.placed:
        rest = without - counted.placed
        yield (
            f"{rest:,} of {counted.activities:,} activities "
            + by_number(
                rest,
                "has no launching call and belongs to no step or phase: its call was not recorded, or has been removed",
                "have no launching call and belong to no step or phase: their calls were not recorded, or have been "
                "removed",
            )
        )
    if counted.placed:
        yield (
            f"{counted.placed:,} of {counted.activities:,} activities "
            + by_number(
                counted.placed,
                "has no launching call: the numbers of the calls before and behind tell its step",
                "have no launching call: the numbers of the calls before and behind tell their steps",
            )
        )
    if counted.ambiguous:
        yield Doubt(
            f"{counted.ambiguous:,} of {counted.activities:,} activities "
            + by_number(
                counted.ambiguous,
                "has several calls with its correlation number before it, and is taken to be launched by the last: its "
                "step and phase may be wrong",
                "have several calls with their correlation number before them, and are taken to be launched by the "
                "last: their steps and phases may be wrong",
            )
        )


def _warn_about_overhead(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line if the profiler's own work took much of the time of the steps."""
    measured = union(trace.overhead.start_ns[:0], trace.overhead.end_ns[:0])
    for rank in ranks:
        measured |= union(rank.steps.start_ns, rank.steps.end_ns)
    share = (union(trace.overhead.start_ns, trace.overhead.end_ns) & measured).length_ns / max(1, measured.length_ns)
    if share > OVERHEAD_LIMIT:
        shown, kind = percent(share), Doubt if share >= MUCH_OVERHEAD else str
        yield kind(f"the profiler itself was at work in {shown} of the measured time: times are uncertain by as much")


def _warn_about_compute(counted: Diagnostics) -> Iterator[str]:
    """Yield a line for each device with collectives on the compute stream, and for each suspicious name of compute."""
    owners = {(process, device) for process, device, _ in counted.busy_ns}
    for process, device in sorted(owners, key=lambda owner: (owner[0], owner[1] or 0)):
        busiest = counted.busiest_stream(process, device)
        if count := counted.collectives[process, device, busiest]:
            yield (
                f"process {process}, device {device}: {count_noun(count, 'collective')} ran on the "
                f"compute stream ({busiest}): only kernels of other streams can overlap with them"
            )
    for name, ns in sorted(counted.compute_ns.items(), key=lambda item: (-item[1], item[0])):
        if ns > SUSPECT_LIMIT * counted.kernels_ns and _TELLING.search(name) and not _FUSED.match(name):
            yield Doubt(
                f"'{name[:80]}' counts as compute, but its name looks like a collective's: if it is one, say so with "
                "--comm-pattern"
            )
