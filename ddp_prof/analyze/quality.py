"""What a capture lacks: why overlap is not known, how much belongs to no step, and which warnings to show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddp_prof.analyze.core.attribution import GLOO
from ddp_prof.analyze.core.rank_events import ONLY_BESIDE, ONLY_INCOMPLETE, ONLY_WARMUP, RankEvents
from ddp_prof.analyze.core.recording import CLOCKS, are_launched_earlier, find_lost_launches
from ddp_prof.analyze.core.steps import find_steps
from ddp_prof.analyze.intervals import union
from ddp_prof.communication import BARRIER, operation_of
from ddp_prof.manifest import RANKS_PER_GPU, Caveat, caveats_of
from ddp_prof.range_names import PROCESS, parse_range
from ddp_prof.table import is_in
from ddp_prof.trace import UNKNOWN, Category, Kind, Trace, distinct, distinct_rows, select

NOTHING = "no GPU activities, and no ddp_prof ranges that tell what the CPU did"

GRAPHS = "CUDA graphs were recorded whole, so what they compute and communicate is not in this trace"

UNMARKED_WAITS = "no range 'synchronize' tells when the host waits, so what it computed meanwhile is not known"

NO_BACKWARD = "no backward pass was recorded (torch.profiler leaves out one that runs in a thread of its own)"

UNNAMED_BACKWARD = "no range names a backward pass, so what one computed is not known (see --backward-range)"

NO_COMMUNICATION = "nothing in this trace is known to communicate"

EMPTY = "this capture is empty"

NO_NCCL_KERNEL = "no NCCL kernel was recorded, although ranges name collectives"

UNTIMED_CALLS = "collectives were called in this trace, and nothing tells when they ran"

ONLY_MPI = "only calls of MPI communicate in this trace, and what they move is not measured"

NO_DURATIONS = "the collectives in this trace take no time, so how long they took is not known"

NOT_TIMED = frozenset((NO_NCCL_KERNEL, NO_DURATIONS, UNTIMED_CALLS))
"""Reasons that mean that the trace does not tell what a step communicates, nor what fills it besides compute."""

_WAITED_FOR = "torch.profiler records until when the host waited for them, not when they ran"

ONLY_MESSAGES = f"only sends and receives of gloo communicate in this trace, and {_WAITED_FOR}"

NOTHING_LEFT = (ONLY_WARMUP, ONLY_INCOMPLETE, ONLY_BESIDE)
"""Reasons why no step of a rank is measured although it has steps."""

MIXED_CLOCKS = f"{CLOCKS}, nor what its host's communication ran beside"

LOST = "the launches of this process have no activities: the profiler lost them"

INCOMPLETE_COMMUNICATES = "only steps that were not recorded completely communicate in this trace"

LOST_MAY_COMMUNICATE = "nothing that communicates was recorded, but work of the steps that were left out was lost"

WARMUP_COMMUNICATES = "only warm-up steps communicate in this trace, and they are left out (record more steps)"

MOST_UNNAMED = 0.01
"""Largest fraction of kernels without a name, by number or by time, with which figures are still reported."""


def why_unknown(rank: RankEvents) -> str | None:
    """Return why the rank has no overlap ratio; ``None`` if it has one."""
    if not rank.why_left_out and _communicates_with_nobody(rank):
        return NO_COMMUNICATION
    if (reason := why_unknown_work(rank)) or rank.union_of(Category.COMMUNICATION).length_ns:
        return reason
    if np.any(rank.events.category == Category.COMMUNICATION):
        return NO_DURATIONS
    if rank.including_warmup.union_of(Category.COMMUNICATION).length_ns:
        return INCOMPLETE_COMMUNICATES if rank.incomplete_steps else WARMUP_COMMUNICATES
    if rank.device is not None and named_collectives(rank.trace):
        return NO_NCCL_KERNEL
    if called_collectives(rank.trace):
        return UNTIMED_CALLS
    if _calls_mpi(rank):
        return ONLY_MPI
    # Steps that accumulate gradients lose nothing, and those that reduce them may have lost just that.
    return LOST_MAY_COMMUNICATE if rank.incomplete_steps and rank.recording.lost else NO_COMMUNICATION


def named_collectives(trace: Trace, process: int | None = None) -> list[str]:
    """Return the names of ranges that NCCL, or torch for it, opens around a collective's call: ``nccl:all_reduce``.

    These are the ranges of one process or, by default, of all processes.
    """
    spans = trace.spans
    used = set(distinct(spans.name_id if process is None else spans.name_id[spans.process == process]))
    return [name for at, name in enumerate(trace.names) if at in used and _NCCL_RANGE.match(name)]


def called_collectives(trace: Trace) -> list[str]:
    """Return the names of torch's operators that call collectives other than barriers, such as ``c10d::allreduce_``."""
    names = (trace.names[name_id] for name_id in distinct(trace.collective_calls.name_id) if name_id != UNKNOWN)
    return [name for name in names if operation_of(name) not in (None, BARRIER)]


_NCCL_RANGE = re.compile(
    r"nccl:_?(all|reduce|broadcast|gather|scatter|coalesced|send|recv)|nccl(All|Reduce|Broadcast|Send|Recv)", re.I
)


def _calls_mpi(rank: RankEvents) -> bool:
    """Return whether a range of the process is a call of MPI that communicates, such as ``MPI_Send``.

    ``nsys --trace=mpi`` records such ranges.
    """
    names = [number for number, name in enumerate(rank.trace.names) if _MPI_CALL.match(name)]
    return bool(np.isin(rank.trace.spans.name_id[rank.trace.spans.process == rank.process], names).any())


_MPI_CALL = re.compile(
    r"MPI_I?([bsr]?send|m?recv|all|reduce|bcast|gather|scatter|put|get_acc|r?accumulate|neighbor)", re.I
)


def _count_messages(trace: Trace) -> int:
    """Return the number of sends and receives of gloo, which are not collectives."""
    names = [index for index, name in enumerate(trace.names) if name.startswith((f"{GLOO}send", f"{GLOO}recv"))]
    return int(np.isin(trace.spans.name_id, names).sum())


def why_unknown_work(rank: RankEvents) -> str | None:
    """Return why the rank's compute and communication are not known; ``None`` if they are, even if there is none."""
    if (share := rank.trace.unresolved_names.share) > MOST_UNNAMED:
        return f"{share:.0%} of the kernels have no name, so it is not known which of them communicate"
    if rank.why_left_out:
        return rank.why_left_out
    if rank.is_lost:
        return LOST
    if _has_only_messages(rank):
        return ONLY_MESSAGES
    if not len(rank.events):
        return NOTHING
    if hides_graphs(rank):
        return GRAPHS
    if rank.mixes_clocks:
        return MIXED_CLOCKS
    if rank.hides_waits:
        return UNMARKED_WAITS
    if rank.hides_backward:
        return NO_BACKWARD if len(rank.trace.operators) else UNNAMED_BACKWARD
    return None


def _has_only_messages(rank: RankEvents) -> bool:
    """Return whether the rank communicates only by sends and receives of gloo, which are not measured."""
    is_silent = not np.any(rank.including_warmup.events.category == Category.COMMUNICATION)
    return is_silent and _count_messages(rank.trace) > 0


def _communicates_with_nobody(rank: RankEvents) -> bool:
    """Return whether the rank certainly did not communicate.

    That is certain if nothing in the trace communicates and the job has one rank or, on a CPU, torch.profiler recorded
    operators and none of them is a collective.
    """
    trace, is_silent = rank.trace, not np.any(rank.including_warmup.events.category == Category.COMMUNICATION)
    by_operators = rank.device is None and len(trace.operators) > len(trace.collective_calls) == 0
    by_operators = by_operators and not any(name.startswith((GLOO, "nccl:")) for name in trace.names)
    return is_silent and (trace.world_size == 1 or (by_operators and not rank.hides_backward))


def merge_reasons(reasons: Collection[str | None]) -> str | None:
    """Return one reason for several ranks, from the reasons of the ranks (``None`` if the figures of a rank are known).

    It is :data:`GRAPHS` if a rank has this reason, else ``None`` if the figures of some rank are known, else the first
    reason, other than :data:`NOTHING` if possible.
    """
    if GRAPHS in reasons or None in reasons:
        return GRAPHS if GRAPHS in reasons else None
    return max((reason for reason in reasons if reason), default=None, key=lambda reason: reason != NOTHING)


def reason_of_run(ranks: Sequence[tuple[str | None, bool]]) -> str | None:
    """Return why the figures of a run are not known, or not all of them; ``None`` if they are known.

    ``ranks`` holds for each rank the reason why its figures are not known (``None`` if they are), and whether it
    communicates. The figures of all ranks that communicate must be known, and those of at least one rank.
    """
    reasons = [reason for reason, _ in ranks]
    doubtful = [reason for reason, communicates in ranks if reason and communicates]
    if not doubtful and None in reasons:
        return None
    return merge_reasons(doubtful or reasons) if ranks else EMPTY


def why_no_steps(reasons: Iterable[str | None], otherwise: str) -> str:
    """Return why no rank has a measured step: a reason of the ranks that says so, or ``otherwise`` if there is none.

    ``otherwise`` is used where the trace marks no steps.
    """
    return next((reason for reason in reasons if reason in NOTHING_LEFT), otherwise)


def hides_work(rank: RankEvents) -> bool:
    """Return whether the rank has activities of unknown content: CUDA graphs recorded whole, or unnamed kernels."""
    return bool(is_in(rank.events.category, (Category.OTHER, Category.UNKNOWN)).any())


def hides_graphs(rank: RankEvents) -> bool:
    """Return whether the rank ran CUDA graphs that were recorded as a whole: what they computed is then not known."""
    return bool(np.any(rank.events.category == Category.OTHER))


def has_no_usable_events(rank: RankEvents) -> bool:
    """Return whether nothing can be measured of the rank: it has no events, or they do not tell what it did."""
    is_unnamed = rank.trace.unresolved_names.share > MOST_UNNAMED
    is_blind = rank.hides_backward or rank.mixes_clocks or _has_only_messages(rank)
    return not len(rank.events) or is_unnamed or is_blind


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


OVERHEAD_LIMIT = 0.01
"""The profiler's own work is reported if it takes a larger fraction of the measured time."""

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
        earlier: Number of these whose correlation number is lower than those of all recorded calls.
        calls: Number of calls.
        launches: By process, the number of calls that launched something.
        lost: By process, the number of these calls that have no activity and lie in no step; also those in steps if no
            activity of the process was recorded.
        ambiguous: Number of activities whose correlation number several calls have.
        repeated: Number of collectives that are in the trace more than once, with the same stream and times.
        busy_ns, collectives: Time of compute, and number of collectives, by process, device and stream.
        compute_ns: By name, the summed time of the kernels that count as compute.
        kernels_ns: Summed time of all kernels.
    """

    about_trace: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    windows: tuple[Window, ...] = ()
    overhead_warnings: tuple[str, ...] = ()
    activities: int = 0
    graphs: int = 0
    orphans: int = 0
    unnumbered: int = 0
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
        return (
            *(caveat.value for caveat in caveats),
            *self.about_trace,
            *(
                f"processes {', '.join(map(str, sorted(processes)))} use a device {device} at one time: unless each "
                "sees another GPU by that number (CUDA_VISIBLE_DEVICES), they share one, and bandwidth and overlap are "
                "not representative"
                for (_, device), processes in sharing.items()
            ),
            *_warn_about_launches(self),
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
            lines.append(warning if len(others) + 1 == len(by_file) else f"{name}: {warning}{rest}")
    return tuple(lines)


def changes_reading(note: str) -> bool:
    """Return whether a note changes how figures are to be read.

    It does if it says that something was recorded wrongly, that figures are uncertain, or that they stand only for some
    of the steps or ranks. It does not if it says what a program did, or what was chosen or inferred. Notes are
    recognized by the texts of this package, as some notes come from files and other processes.
    """
    return _CHANGES_READING.search(note) is not None


_RECORDED_WRONGLY = (
    "profiler lost|process did is in no figure|have no activity|no launch was recorded|recorded only in part|"
    "clocks of host and device disagree|impossible end|may have run beside|still open when the recording|"
    "duplicate (collective|event)|have no start|takes no time, which|no time was recorded|ending after later ones|"
    "no end, or one before|is taken for a rank|itself reports|figures per step leave it out|"
    "disagree on the number of ranks|are not in this trace"
)
_UNCERTAIN = (  # by a tenth of the time or more
    r"at work in \d\d.*times are uncertain|looks like a collective's|not representative|"
    "parts of a step are what ran within"
)
_OF_A_PART = (
    "read as runs of their own|ranks differ: |steps differ: |no overlap figure: |"
    "figures per step are those of other ranks|^left out: "
)
_CHANGES_READING = re.compile(f"{_RECORDED_WRONGLY}|{_UNCERTAIN}|{_OF_A_PART}")


def warn_world_sizes(sizes: Iterable[int | None]) -> tuple[str, ...]:
    """Return a warning if the traces of a run have different numbers of ranks in the job; else nothing."""
    known = sorted({size for size in sizes if size})
    numbers = ", ".join(map(str, known))
    warning = f"the traces disagree on the number of ranks in the job ({numbers}): they may be of different jobs"
    return (warning,) if len(known) > 1 else ()


def gather_diagnostics(trace: Trace, ranks: Sequence[RankEvents]) -> Diagnostics:
    """Return the counts of what makes the figures of a trace doubtful, from which warnings and caveats are made."""
    activities = trace.activities
    # The summed duration of the kernels that count as compute, by name.
    duration = np.where(activities.kind == Kind.KERNEL, activities.end_ns - activities.start_ns, 0)
    computing = activities.category == Category.COMPUTE
    total = np.bincount(activities.name_id[computing], weights=duration[computing], minlength=len(trace.names))
    busy_ns, collectives = Counter[tuple[int, int | None, int]](), Counter[tuple[int, int | None, int]]()
    for rank in ranks:
        events = rank.events
        kernels = rank.is_kernel & (events.lane != UNKNOWN)
        busy, collective = kernels & (events.category == Category.COMPUTE), kernels & rank.is_collective
        for lane in distinct(events.lane[kernels]):
            key, rows = (rank.process, rank.device, lane), np.flatnonzero(busy & (events.lane == lane))
            busy_ns[key] += int((events.end_ns[rows] - events.start_ns[rows]).sum())
            collectives[key] += int((collective & (events.lane == lane)).sum())
    # Collectives with equal start, end, stream, device and process follow each other in `order`, and are repeated.
    communication = select(activities, activities.category == Category.COMMUNICATION)
    launches, lost = _count_launches(trace, ranks)
    columns = [getattr(communication, name) for name in ("start_ns", "end_ns", "lane", "device", "process")]
    order = np.lexsort(columns)
    return Diagnostics(
        about_trace=(*trace.warnings, *_warn_about_steps(trace, ranks)),
        caveats=_declared_caveats(trace),
        windows=_kernel_windows(trace),
        overhead_warnings=tuple(_warn_about_overhead(trace, ranks)),
        activities=len(activities),
        graphs=int((activities.kind == Kind.GRAPH).sum()),
        orphans=int((trace.launching_calls == UNKNOWN).sum()),
        unnumbered=int((activities.correlation == UNKNOWN).sum()),
        earlier=int(are_launched_earlier(trace).sum()),
        calls=len(trace.calls),
        launches=launches,
        lost=lost,
        ambiguous=int(trace.has_ambiguous_launch.sum()),
        repeated=int(np.all([np.diff(column[order]) == 0 for column in columns], axis=0).sum()),
        busy_ns=busy_ns,
        collectives=collectives,
        compute_ns=Counter({trace.names[name]: int(total[name]) for name in np.flatnonzero(total).tolist()}),
        kernels_ns=int(duration.sum()),
    )


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
    activities = trace.activities
    rows = np.flatnonzero(activities.kind == Kind.KERNEL)
    process, device, start, end = (
        getattr(activities, name)[rows] for name in ("process", "device", "start_ns", "end_ns")
    )
    first, which = distinct_rows(process, device)
    owners = zip(process[first].tolist(), device[first].tolist(), strict=True)
    return tuple(
        (*owner, trace.gpu_ids.get(owner), int(start[which == row].min()), int(end[which == row].max()))
        for row, owner in enumerate(owners)
    )


def _find_sharing(windows: Sequence[Window]) -> dict[tuple[bool, int], set[int]]:
    """Return the processes whose kernels run on one GPU at the same time, by GPU.

    The key is a pair: whether the machine's number of the GPU is known, and this number or else CUDA's number. CUDA
    numbers the GPUs that a process sees, so two processes may use the same number for different GPUs.
    """
    by_gpu: dict[tuple[bool, int], dict[int, tuple[int, int]]] = {}
    for process, device, gpu, start, end in windows:
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
        yield note if len(names) == len(processes) else f"{', '.join(names)}: {note}"
    if left_out := max((rank.warmup_steps for rank in ranks), default=0):
        yield f"{left_out} warm-up step{'s' if left_out > 1 else ''} left out"
    if any(rank.backward == "inferred" for rank in ranks):
        yield "backward is inferred from what autograd's threads launched: no range names it (see --backward-range)"
    if any(rank.blocking.coverage.source == "call_order" for rank in ranks):
        yield "what streams waited for is inferred from the order of calls: not all records of events were recorded"
    first, _ = distinct_rows(trace.activities.process, trace.activities.device)
    owners = {(rank.process, rank.device) for rank in ranks}
    for process, device in zip(
        trace.activities.process[first].tolist(), trace.activities.device[first].tolist(), strict=True
    ):
        if (process, device) not in owners:
            yield f"device {device} of process {process} only copies: it is no rank, and left out"
    yield from _warn_about_silent_processes(trace, ranks)
    communicates = any(rank.device is None and rank.union_of(Category.COMMUNICATION).length_ns for rank in ranks)
    if communicates and (messages := _count_messages(trace)):
        yield f"sends and receives of gloo left out: {messages:,}; {_WAITED_FOR}"


def _warn_about_silent_processes(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line for each process that trains by its ranges, and of which neither a launch nor work was recorded.

    Other processes without work may have ranges, too, for example those that load data.
    """
    is_launch = np.zeros(len(trace.calls), np.bool_) if trace.is_launch is None else trace.is_launch
    known = {rank.process for rank in ranks} | set(distinct(trace.calls.process[is_launch]))
    for process in trace.processes if len(trace.activities) else ():
        if process in known:
            continue
        named = named_collectives(trace, process)
        if named or len(find_steps(trace, process)[0]):
            what = f"calls collectives, by ranges such as '{named[0]}'" if named else "has ranges of steps"
            yield (
                f"process {process} {what}, but neither its launches nor its work on a device were recorded: what this "
                "process did is in no figure"
            )


def _warn_about_launches(counted: Diagnostics) -> Iterator[str]:
    """Yield a line for each reason why activities are missing, or cannot be assigned to steps and phases."""
    if counted.graphs:
        yield (
            f"CUDA graphs were recorded whole, {counted.graphs} launches: the kernels in them, collectives included, "
            "are not in this trace; record with --cuda-graph-trace=node"
        )
    if counted.calls and not counted.activities:
        yield (
            f"{counted.calls:,} API calls of a device are in this trace, but no kernels or copies: if the calls "
            "launched any, the profiler lost them, and its messages may tell why"
        )
    for process, launches in sorted(counted.launches.items()) if counted.activities else ():
        if (lost := counted.lost[process]) == launches > 0:
            yield (
                f"process {process} launched {launches:,} kernels or graphs, and none of them was recorded: the "
                "profiler lost them, and what this process did is in no figure"
            )
        elif lost > MOST_LOST_LAUNCHES * launches:
            yield (
                f"{lost:,} of {launches:,} launches of process {process} lie in no step and have no activity, which "
                "the profiler lost: figures are of what was recorded"
            )
    if counted.activities and not counted.calls:
        yield (
            "no CUDA API calls: nothing can be attributed to steps or phases; record with nsys' --trace=cuda,nvtx, or "
            "with ProfilerActivity.CPU, too"
        )
    elif counted.unnumbered:
        yield (
            f"{counted.unnumbered:,} of {counted.activities:,} activities carry no correlation number, by which the "
            "call that launched them is found: they belong to no step or phase"
        )
    if counted.calls and counted.earlier:
        yield (
            f"{counted.earlier:,} of {counted.activities:,} activities were launched before the recording began, and "
            "belong to no step or phase"
        )
    if counted.calls and (without := counted.orphans - counted.unnumbered - counted.earlier):
        yield (
            f"{without:,} of {counted.activities:,} activities have no launching call and belong to no step or phase: "
            "their calls were not recorded, or have been removed"
        )
    if counted.ambiguous:
        yield (
            f"{counted.ambiguous:,} of {counted.activities:,} activities have several calls with their correlation "
            "number before them, and are taken to be launched by the last: their steps and phases may be wrong"
        )
    if counted.repeated:
        plural = "s" if counted.repeated > 1 else ""
        yield f"{counted.repeated:,} duplicate collective{plural}: counted twice, timed once"


def _warn_about_overhead(trace: Trace, ranks: Sequence[RankEvents]) -> Iterator[str]:
    """Yield a line if the profiler's own work took much of the time of the steps."""
    measured = union(trace.overhead.start_ns[:0], trace.overhead.end_ns[:0])
    for rank in ranks:
        measured |= union(rank.steps.start_ns, rank.steps.end_ns)
    share = (union(trace.overhead.start_ns, trace.overhead.end_ns) & measured).length_ns / max(1, measured.length_ns)
    if share > OVERHEAD_LIMIT:
        yield f"the profiler itself was at work in {share:.1%} of the measured time: times are uncertain by as much"


def _warn_about_compute(counted: Diagnostics) -> Iterator[str]:
    """Yield a line for each device with collectives on the compute stream, and for each suspicious name of compute."""
    owners = {(process, device) for process, device, _ in counted.busy_ns}
    for process, device in sorted(owners, key=lambda owner: (owner[0], owner[1] or 0)):
        busiest = counted.busiest_stream(process, device)
        if count := counted.collectives[process, device, busiest]:
            yield (
                f"process {process}, device {device}: {count:,} collective{'' if count == 1 else 's'} ran on the "
                f"compute stream ({busiest}): only kernels of other streams can overlap with them"
            )
    for name, ns in sorted(counted.compute_ns.items(), key=lambda item: (-item[1], item[0])):
        if ns > SUSPECT_LIMIT * counted.kernels_ns and _TELLING.search(name) and not _FUSED.match(name):
            yield (
                f"'{name[:80]}' counts as compute, but its name looks like a collective's: if it is one, say so with "
                "--comm-pattern"
            )
