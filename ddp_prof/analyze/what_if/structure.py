"""What a prediction needs to know of a rank: its steps, their collectives of gradients, copies, and single gradients.

::

    thread       [gradient 1][into bucket][gradient 2][into bucket] L        L: launches the collective
    compute       ##########  c            #########   c          | 1122233 rest
    collective                                         NNNNNNNN

    ##: computes a gradient    c: copies it into a bucket    |: backward has ended
    1122233: copies gradients 1, 2 and 3 out of the buckets    NN: the collective

Torch's DDP multiplies each gradient by 1 / ranks as it copies it into its bucket: the end of that kernel is when the
gradient is ready, and its grid says how large it is. After backward it copies each gradient out of its bucket again,
bucket by bucket: these copies say the exact sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ddp_prof.analyze.collectives.gradients import SHARDING, are_votes, carry_gradients
from ddp_prof.analyze.collectives.timing import CollectiveTimings, find_timings
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, first_by_step
from ddp_prof.analyze.core.clocks import CLOCKS
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import LOST_CALLS
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.statistics import LEAST_STEPS
from ddp_prof.analyze.why_unknown import why_unknown
from ddp_prof.table import NO_TIME, UNKNOWN, Brief, Ints, begins_run, distinct, select
from ddp_prof.trace import Category, Kind

_INTO_BUCKET = re.compile(r"[AB]UnaryFunctor<(\w+(?:::\w+)?).*(?:Mul|Div)Functor")
"""The names of torch's kernels that multiply a tensor by a number, or divide it; group 1 is the type of its numbers."""
_NUMBER_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}
_OLDER_TORCH, _RECENT_TORCH = "at::detail::Array<", "std::array<char*"
"""In the names of torch's kernels before 2.6, whose threads compute four numbers each; since then: four or eight."""
_OLD_NCCL = "ncclKernel_"
"""Begins the names of NCCL's kernels up to 2.18, which came with torch before 2.2."""
_GRID = re.compile(r"grid (\d+)x1x1 block (\d+)x1x1")
"""The shape of a kernel with a one-dimensional grid; groups 1 and 2 are its number of blocks and threads per block."""
_PER_THREAD = 4
"""How many numbers a thread of a kernel with :data:`_OLDER_TORCH` in its name computes."""

MOST_STEPS = 60
"""The most steps that are used: this number of evenly spread steps is enough for an interval."""
ALIKE = 0.75
"""At least this fraction of the steps must have the same collectives, and kernels; the other steps are left out."""

NO_STEPS = "no whole step is marked in it: name a range that each step has with --step-range, or mark steps"
NO_GRADIENTS = "no collective of this capture is known to reduce gradients: capture a step of training with backward"
OF_OTHERS = (
    "none of its collectives seems to reduce gradients, though its steps have a backward: only the reductions of data "
    "parallelism are predicted, so capture a step in which gradients are synchronized"
)
NO_CALLS = (
    "which steps launched its collectives is not known: record calls, too, by nsys with --trace=cuda,nvtx or by "
    "torch.profiler with ProfilerActivity.CPU"
)
NO_LAUNCHES = (
    "which steps launched its collectives is not known, as nothing tells which of the recorded calls launched them"
)
SEVERAL_PASSES = (
    "its steps have several synchronized passes of backward: if it accumulates gradients, capture it without, or under "
    "no_sync()"
)
FEW = "it has fewer than {least} whole steps with collectives of gradients: record more steps"
DIFFER = "its steps differ in their kernels: only {same} of {steps} have the same ones: record steps of one kind"
CALLS_DIFFER = (
    "its steps differ in their collectives of gradients: only {same} of {steps} have {calls}: record more steps"
)
NO_BACKWARD = "when backward ends is not known: mark it with a range, and name that with --backward-range"


OTHER_CLOCK = f"{CLOCKS}, which decides when gradients are ready: record it again"
SHARDED = (
    "its gradients are reduced to shards, as by FSDP or ZeRO, whose all-gathers no bucket of gradients explains: only "
    "steps that all-reduce them are predicted, so capture the job with DistributedDataParallel"
)
SEVERAL_GROUPS = (
    "its gradients are reduced in {groups} process groups, which share no bucket and perhaps no link: capture it with "
    "data parallelism alone"
)
IN_BACKWARD = (
    "compute of its backward waits for collectives of gradients, as where an optimizer steps in backward, or a hook "
    "waits for what it reduces or converts it, so their schedule alone does not decide when backward ends: capture it "
    "without that"
)
_HALF = re.compile(r"_(?:b?f16|half|_*nv_bfloat16)(?![a-zA-Z0-9])")
_WHOLE = re.compile(r"_(?:f32|float|f64|double)(?![a-zA-Z0-9])")
"""The types in the names of NCCL's kernels: numbers of two bytes (``_HALF``), of four or eight (``_WHOLE``)."""


@dataclass(frozen=True)
class Copied(Brief):
    """The copies of gradients into buckets, or out of them, in order: the gradients of bucket 0 first.

    Attributes:
        bytes: The size of each gradient, or, by the grid of the kernel, an upper bound; shape (gradients).
        bucket: The position in the step of the collective of each gradient; shape (gradients).
        ends_ns, launch_ns: When each copy ended, and when it was launched; shape (steps, gradients).
        took_ns, beside_ns: How long each copy took, and how long of that a collective ran; shape (steps, gradients).
        knows_bytes: Whether ``bytes`` are known: the grids of a recent torch do not tell them.
    """

    bytes: Ints
    bucket: Ints
    ends_ns: Ints
    launch_ns: Ints
    took_ns: Ints
    beside_ns: Ints
    knows_bytes: bool = True


@dataclass(frozen=True)
class RankStructure(Brief):
    """The chosen steps of a rank and their collectives of gradients.

    Times are nanoseconds on the clock of the trace. Their shape is (steps), or (steps, collectives) for ``launch_ns``,
    ``ready_ns``, ``start_ns`` and ``end_ns``.

    Attributes:
        reason: Why nothing can be predicted from the rank; then all but ``rank`` and ``is_of_job`` is empty.
        on_host: Whether compute runs on the CPU.
        is_gloo: Whether collectives have no activity on a device, which means that gloo runs them on the host.
        keys: A number for each step, by which the ranks know it; see ``RankEvents.step_keys``.
        begins_ns, ends_ns: The begin and the end of each step.
        backward_begin_ns: When the first compute of backward began.
        backward_end_ns: When the last compute of backward ended.
        resumes_ns: When backward, collectives and copies out of buckets have ended: the rest of the step begins.
        launch_ns, ready_ns, start_ns, end_ns: When each collective was launched, when its last gradient was ready, and
            when it began and ended.
        bytes: The bytes of each collective, ``UNKNOWN`` where the capture does not say it; shape (collectives).
        sizes_from: Where ``bytes`` are from: ``ranges``, ``torch.profiler`` or ``NCCL``; ``None`` if they are unknown.
        beside_ns: How long, from the begin of the step to a time, compute ran beside these collectives. The keys name
            the time: ``start``, ``ready``, ``backward_begin``, ``backward_end``, and ``into`` for the ends of copies
            into buckets.
        into, out: Copies into buckets, and out of them; ``None`` where they cannot be told from other kernels.
        at_once: How many of these collectives ran at the same time at most, in the usual step.
        are_half: Whether the names of their kernels say that they reduce numbers of two bytes.
        is_recent_torch: Whether torch is so recent that a bucket size that is given holds for the first bucket, too, by
            the names of kernels; ``None`` if these do not tell.
        is_of_job: Whether ``reason`` holds for the whole job and not for this rank alone.
    """

    reason: str | None
    rank: int | None = None
    world_size: int | None = None
    on_host: bool = False
    is_gloo: bool = False
    keys: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    begins_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    ends_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    backward_begin_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    backward_end_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    resumes_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    launch_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    ready_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    start_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    end_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    bytes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes_from: str | None = None
    beside_ns: dict[str, Ints] = field(default_factory=dict)
    into: Copied | None = None
    out: Copied | None = None
    at_once: int = 1
    are_half: bool = False
    is_recent_torch: bool | None = None
    is_of_job: bool = False

    @property
    def took_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def calls(self) -> int:
        return int(self.start_ns.shape[1])


def find_structure(rank: RankEvents) -> RankStructure:
    """Return what a prediction needs to know of a rank; it has a ``reason`` if its steps cannot be predicted."""
    return replace(_find_structure(rank), rank=rank.rank)


def _find_structure(rank: RankEvents) -> RankStructure:
    """Return the structure without the rank's number, or with nothing but the reason why there is none."""
    if reason := why_unknown(rank):
        return RankStructure(reason)
    found = find_timings(rank)
    timings = select(found.timings, carry_gradients(found) & (found.timings.step != UNKNOWN))
    if (refused := _refuse(rank, timings)) is not None:
        return refused
    steps = _usual_steps(rank, timings)
    if isinstance(steps, str):
        return RankStructure(steps)
    begins_ns, length_ns = rank.step_times.start_ns[steps], rank.step_times.length_ns[steps]

    # The chosen steps have equally many collectives, so each column becomes a table of steps x collectives.
    chosen = select(timings, np.isin(timings.step, steps))
    shape = len(steps), len(chosen) // len(steps)
    columns = {
        name: getattr(chosen, name).reshape(shape)
        for name in ("launch_ns", "ready_ns", "start_ns", "end_ns", "bytes", "bucket", "backward_end_ns")
    }
    if _ends_with_vote(rank, columns):
        columns = {name: column[:, :-1] for name, column in columns.items()}
    backward_end_ns = columns["backward_end_ns"].max(axis=1)
    if np.any(backward_end_ns == NO_TIME):
        return RankStructure(NO_BACKWARD)
    # The bytes of a collective count only if they are the same in all steps.
    sizes = columns["bytes"][0]
    sizes = np.where(np.all(columns["bytes"] == sizes, axis=0), sizes, UNKNOWN)
    is_ours = bool(np.any(columns["bucket"] != UNKNOWN))
    profiler = "NCCL" if rank.trace.source.startswith("nsys") else "torch.profiler"
    communication = union(chosen.start_ns, chosen.end_ns)
    copies = _Copies(rank, steps, columns["launch_ns"], communication)
    into, out = copies.into(), copies.out()
    resumes_ns = np.maximum(columns["end_ns"].max(axis=1), backward_end_ns)
    if out is not None:
        resumes_ns = np.maximum(resumes_ns, out.ends_ns.max(axis=1))
    backward_begin_ns = _begin_backward(rank)[steps]
    until_ns = {
        "start": columns["start_ns"],
        "ready": np.where(columns["ready_ns"] == NO_TIME, columns["start_ns"], columns["ready_ns"]),
        "backward_begin": backward_begin_ns,
        "backward_end": backward_end_ns,
        **({"into": into.ends_ns} if into is not None else {}),
    }
    slowable = rank.union_of(Category.COMPUTE) & communication
    return RankStructure(
        reason=None,
        world_size=rank.trace.world_size,
        on_host=rank.device is None,
        is_gloo=bool(np.any(rank.operations.activity == UNKNOWN)),
        keys=rank.step_keys[steps],
        begins_ns=begins_ns,
        ends_ns=begins_ns + length_ns,
        backward_begin_ns=backward_begin_ns,
        backward_end_ns=backward_end_ns,
        resumes_ns=resumes_ns,
        launch_ns=columns["launch_ns"],
        ready_ns=columns["ready_ns"],
        start_ns=columns["start_ns"],
        end_ns=columns["end_ns"],
        bytes=sizes,
        sizes_from=None if UNKNOWN in sizes else "ranges" if is_ours else profiler,
        beside_ns={name: _covered_since(begins_ns, until, slowable) for name, until in until_ns.items()},
        into=into,
        out=out,
        at_once=_most_at_once(columns["start_ns"], columns["end_ns"]),
        are_half=_are_half(rank),
        is_recent_torch=_is_recent_torch(rank.trace.names),
    )


def _refuse(rank: RankEvents, timings: CollectiveTimings) -> RankStructure | None:
    """Return nothing but the reason why nothing is predicted of steps with these collectives; ``None`` without one."""
    if not rank.has_steps:
        return RankStructure(NO_STEPS)
    if not len(timings):
        communicates = rank.events.category == Category.COMMUNICATION
        is_called = rank.events.launch_ns[communicates] != NO_TIME
        if communicates.any() and not is_called.any():
            launches = rank.trace.is_launch
            return RankStructure(NO_CALLS if launches is None or not launches.any() else NO_LAUNCHES)
        if rank.recording.lacks_calls:
            return RankStructure(LOST_CALLS)
        return RankStructure(OF_OTHERS if is_called.any() and rank.is_backward.any() else NO_GRADIENTS)
    if rank.clocks_disagree:
        return RankStructure(OTHER_CLOCK)
    reduces = begins_run(timings.step, timings.backward_end_ns)  # the first reduction of each pass that has one
    if int(np.count_nonzero(reduces)) > len(distinct(timings.step)):
        return RankStructure(SEVERAL_PASSES)
    if np.isin(timings.operation, SHARDING).any():
        return RankStructure(SHARDED, is_of_job=True)
    groups = len({*distinct(timings.group)} - {UNKNOWN})
    if groups > 1:
        return RankStructure(SEVERAL_GROUPS.format(groups=groups), is_of_job=True)
    # Copies out of buckets also wait for collectives, but are no compute.
    waiting = distinct(timings.step[timings.needed_by_backward == 1])
    is_usual = 2 * len(waiting) >= len(distinct(timings.step))
    return RankStructure(IN_BACKWARD, is_of_job=True) if is_usual else None


def _ends_with_vote(rank: RankEvents, columns: Mapping[str, Ints]) -> bool:
    """Return whether the last collective of each step is the vote on unused parameters, which is no bucket.

    Its size tells it, or that it alone has no range of a bucket. Where no sizes are known, it is the shortest
    collective, and backward computes nothing between the last bucket's launch and its own.

    Args:
        rank: The rank.
        columns: What is known of the collectives of each step, by name; shape (steps, collectives).
    """
    sizes, launch_ns, has_range = columns["bytes"], columns["launch_ns"], columns["bucket"] != UNKNOWN
    if sizes.shape[1] < 2:
        return False
    if np.all(sizes[:, -1] != UNKNOWN):
        return bool(are_votes(sizes[:, -1], sizes[:, :-1].min(axis=1)).all())
    if has_range.any():
        return bool(has_range[:, :-1].all() and not has_range[:, -1].any())
    took_ns = (columns["end_ns"] - columns["start_ns"]).mean(axis=0)
    computes_ns = np.sort(rank.events.launch_ns[rank.is_backward])
    before, after = np.searchsorted(computes_ns, launch_ns[:, -2:]).T  # how much compute is launched before each
    return bool(took_ns[-1] < took_ns[:-1].min() and np.all(before == after))


def _begin_backward(rank: RankEvents) -> Ints:
    """Return when the first compute of backward began in each step; ``NEVER`` where it has none."""
    events, rows = rank.events, rank.is_backward
    return first_by_step(events.start_ns[rows], events.step[rows], len(rank.steps))


def _covered_since(begins_ns: Ints, until_ns: Ints, covered: Intervals) -> Ints:
    """Return how long something runs from the begin of each step to each time, in the shape of the times.

    Args:
        begins_ns: When each step begins; shape (steps).
        until_ns: The times; shape (steps), or (steps, collectives). Before the step's begin it is 0.
        covered: When it runs.
    """
    since_ns = begins_ns if until_ns.ndim == 1 else np.repeat(begins_ns, until_ns.shape[1])
    flat = np.maximum(until_ns.ravel(), since_ns)
    return covered.covered_ns(since_ns, flat).reshape(until_ns.shape)


def _usual_steps(rank: RankEvents, timings: CollectiveTimings) -> Ints | str:
    """Return the complete steps that have the usual collectives and kernels, as indices into the rank's steps.

    At most ``MOST_STEPS`` are returned, evenly spread. If too few steps are alike, a text says so instead.
    """
    steps, times = np.array(distinct(timings.step), np.int64), rank.step_times
    is_whole = (times.start_ns[steps] != NO_TIME) & (times.length_ns[steps] > 0)
    if int(is_whole.sum()) < LEAST_STEPS:
        return FEW.format(least=LEAST_STEPS)
    # Warm-up steps were left out before. First the steps with the most common number of collectives are kept, then,
    # among these, the steps with the most common kernels.
    count = np.bincount(timings.step, minlength=len(rank.steps))[steps]
    calls = Counter(count[is_whole].tolist()).most_common(1)[0][0]
    has_calls = is_whole & (count == calls)
    if has_calls.sum() < max(LEAST_STEPS, ALIKE * is_whole.sum()):
        return CALLS_DIFFER.format(same=int(has_calls.sum()), steps=int(is_whole.sum()), calls=calls)
    kinds = _kernels_of(rank)
    of_step = [kinds.get(step) for step in steps.tolist()]
    usual = Counter(kind for kind, has in zip(of_step, has_calls.tolist(), strict=True) if has).most_common(1)[0][0]
    is_usual = has_calls & np.array([kind == usual for kind in of_step], np.bool_)
    if is_usual.sum() < max(LEAST_STEPS, ALIKE * has_calls.sum()):
        return DIFFER.format(same=int(is_usual.sum()), steps=int(has_calls.sum()))
    usual = steps[is_usual]
    chosen: Ints = usual[spread_evenly(rank.step_keys[usual])]
    return chosen


def spread_evenly(keys: Ints) -> Ints:
    """Return the positions in ``keys`` of at most ``MOST_STEPS`` steps, evenly spread and ascending.

    The steps with the smallest hash of their key are chosen. Fractional parts of multiples of the golden ratio are
    evenly spread (Knuth, 6.4), and depend on the step's key alone. So ranks with the same steps choose the same steps,
    and a step that one rank lacks hardly changes what it chooses.
    """
    # The low 32 bits of the product are the fractional part times 2^32.
    spread = (keys.astype(np.uint64) * np.uint64(_GOLDEN)) & np.uint64(0xFFFF_FFFF)
    found: Ints = np.sort(np.argsort(spread, kind="stable")[:MOST_STEPS])
    return found


_GOLDEN = 2_654_435_769
"""2^32 times the fractional part of the golden ratio."""


def _are_half(rank: RankEvents) -> bool:
    """Return whether, by the names of kernels, some collectives reduce two-byte numbers and none larger ones."""
    activity = np.unique(rank.operations.activity)
    names = [rank.trace.names[one] for one in distinct(rank.trace.activities.name_id[activity[activity != UNKNOWN]])]
    return any(map(_HALF.search, names)) and not any(map(_WHOLE.search, names))


def _is_recent_torch(names: Sequence[str]) -> bool | None:
    """Return :attr:`RankStructure.is_recent_torch`: true for torch 2.6 and later, false before 2.2.

    The change (https://github.com/pytorch/pytorch/pull/121640, of 2024) came in between, where names do not tell it.
    """
    if any(_RECENT_TORCH in name for name in names):
        return True
    return False if any(name.startswith(_OLD_NCCL) for name in names) else None


def _kernels_of(rank: RankEvents) -> dict[int, int]:
    """Return for each step a hash of the names of its kernels, in order of launch.

    Only kernels that the main thread or a thread of autograd launches count, if there are any. On a CPU, where there
    are no kernels, all steps have the same number.
    """
    events = rank.events
    if rank.device is None:
        return dict.fromkeys(range(len(rank.steps)), 0)
    rows = np.flatnonzero((events.step != UNKNOWN) & rank.is_kernel)
    trains = np.isin(events.launcher[rows], [*rank.training_threads])
    rows = rows[trains] if trains.any() else rows
    rows = rows[np.lexsort((events.launch_ns[rows], events.step[rows]))]
    names = rank.trace.activities.name_id[events.activity[rows]]
    bounds = np.searchsorted(events.step[rows], np.arange(len(rank.steps) + 1))  # where the kernels of each step begin
    return {
        step: hash(names[low:high].tobytes())
        for step, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    }


def _most_at_once(start_ns: Ints, end_ns: Ints) -> int:
    """Return the largest number of collectives that ran at the same time in a step; the median over the steps.

    Starts and ends have shape (steps, collectives).
    """
    # +1 at each start and -1 at each end, in order of time: the running sum is how many run.
    times = np.concatenate([start_ns, end_ns], axis=1)
    change = np.concatenate([np.ones_like(start_ns), -np.ones_like(end_ns)], axis=1)
    order = np.argsort(2 * times + (change > 0), axis=1, kind="stable")  # at one time, ends come first
    running = np.cumsum(np.take_along_axis(change, order, axis=1), axis=1).max(axis=1)
    return int(np.median(running))


class _Copies:
    """Finds the copies of gradients into buckets and out of them, in the steps of a rank on a GPU.

    Attributes:
        rank: The rank.
        steps: Indices of the chosen steps.
        launch_ns: When each collective of these steps was launched; shape (steps, collectives).
        communication: When collectives of gradients ran.
        rows: The events of these steps that a thread of autograd launched, by step and launch.
        activity: The activity of each of ``rows``.
        by_step: For each step, the first position in ``rows`` and that after the last one; shape (2, steps).
    """

    def __init__(self, rank: RankEvents, steps: Ints, launch_ns: Ints, communication: Intervals) -> None:
        self.rank, self.steps, self.launch_ns = rank, steps, launch_ns
        self.communication = communication
        events, threads = rank.events, rank.gradient_threads
        rows = np.flatnonzero(np.isin(events.launcher, [*threads]) & (events.activity != UNKNOWN))
        rows = rows[np.isin(events.step[rows], steps) & (events.launch_ns[rows] != NO_TIME)]
        self.rows = rows[np.lexsort((events.launch_ns[rows], events.step[rows]))]
        self.activity = events.activity[self.rows]
        self.by_step = np.searchsorted(events.step[self.rows], np.stack([steps, steps + 1]))

    def into(self) -> Copied | None:
        """Return the copies into buckets: kernels that multiply a gradient by a number, one for each gradient.

        ``None`` if the trace has no grids of kernels, or steps have no or unequally many such kernels.
        """
        trace = self.rank.trace
        if trace.shape_id is None or not len(self.rows):
            return None
        name_id, shape_id = trace.activities.name_id[self.activity], trace.shape_id[self.activity]
        scales = {one for one in distinct(name_id) if _INTO_BUCKET.search(trace.names[one])}
        # How many numbers a kernel computes at most, for each shape of its grid.
        counts = {}
        for one in set(distinct(shape_id)) - {UNKNOWN}:
            if grid := _GRID.fullmatch(trace.names[one]):
                counts[one] = int(grid[1]) * int(grid[2]) * _PER_THREAD
        is_one = np.isin(name_id, [*scales]) & np.isin(shape_id, [*counts])
        is_one &= self.rank.events.phase[self.rows] == BACKWARD_PHASE
        chosen = self._chosen(is_one)
        if chosen is None:
            return None
        # All chosen steps have the same kernels, so the first step tells the sizes.
        names = [trace.names[one] for one in name_id[chosen[0]].tolist()]
        numbers = np.array([counts[one] for one in shape_id[chosen[0]].tolist()], np.int64)
        types = [found[1] for name in names if (found := _INTO_BUCKET.search(name))]
        sizes = np.array([_NUMBER_BYTES.get(one, 0) for one in types], np.int64)
        knows_bytes = bool(sizes.all()) and all(_OLDER_TORCH in name for name in names)
        return replace(self._copied(chosen, numbers * sizes), knows_bytes=knows_bytes)

    def out(self) -> Copied | None:
        """Return the copies out of buckets: those that threads of autograd launch after the step's last collective.

        ``None`` if there are none, or the steps do not have the same copies.
        """
        activities = self.rank.trace.activities
        is_copy = (activities.kind[self.activity] == Kind.COPY) & (activities.bytes[self.activity] > 0)
        events = self.rank.events
        last = np.full(len(self.rank.steps), NO_TIME)  # when the last collective of each step was launched
        last[self.steps] = self.launch_ns.max(axis=1)
        is_copy &= events.launch_ns[self.rows] > last[events.step[self.rows]]
        chosen = self._chosen(is_copy)
        if chosen is None:
            return None
        sizes = activities.bytes[self.activity[chosen]]
        if np.any(sizes != sizes[0]):
            return None
        return self._copied(chosen, sizes[0])

    def _chosen(self, mask: np.ndarray) -> Ints | None:
        """Return the positions in ``rows`` where ``mask`` holds, one line per step: shape (steps, copies).

        ``None`` if there are none, or the steps have unequally many.
        """
        found = [low + np.flatnonzero(mask[low:high]) for low, high in self.by_step.T.tolist()]
        counts = {len(one) for one in found}
        return np.stack(found) if len(counts) == 1 and counts != {0} else None

    def _copied(self, chosen: Ints, sizes: Ints) -> Copied:
        """Return these copies with their times: positions in ``rows`` of shape (steps, copies), and bytes of each."""
        events = self.rank.events
        rows = self.rows[chosen]
        launch_ns, ends_ns = events.launch_ns[rows], events.end_ns[rows]
        took_ns = ends_ns - events.start_ns[rows]
        beside_ns = self.communication.covered_ns(events.start_ns[rows].ravel(), ends_ns.ravel())
        # A copy into a bucket is launched before the bucket's collective: its bucket is that of the next collective.
        # (For a copy out of a bucket, which is launched after them all, the bucket has no meaning and is not used.)
        bucket = np.array(
            [np.searchsorted(own, at) for own, at in zip(self.launch_ns, launch_ns, strict=True)], np.int64
        )
        return Copied(
            bytes=sizes,
            bucket=bucket[0],
            ends_ns=ends_ns,
            launch_ns=launch_ns,
            took_ns=took_ns,
            beside_ns=beside_ns.reshape(took_ns.shape),
        )
