"""What a prediction needs of a rank: its steps, the collectives of gradients in them, copies, and single gradients.

::

    thread       [gradient 1][into bucket][gradient 2][into bucket] L        L: launches the collective
    compute       ##########  c            #########   c          | 1122233 rest
    collective                                         NNNNNNNN             1122233: copies out of the buckets

Torch's DDP multiplies each gradient by 1 / ranks as it copies it into its bucket: the end of that kernel is when the
gradient is ready, and its grid says how large it is. After backward it copies each gradient out of its bucket again,
bucket by bucket: these copies say the exact sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from ddp_prof.analyze.collectives.timing import CollectiveTimings, carry_gradients, find_timings
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import CLOCKS
from ddp_prof.analyze.intervals import Intervals, union
from ddp_prof.analyze.quality import why_unknown
from ddp_prof.communication import OPERATIONS, REDUCE_SCATTER
from ddp_prof.range_names import parse_ranges
from ddp_prof.table import NO_TIME, UNKNOWN, Brief, Ints, distinct, select
from ddp_prof.trace import Category, Kind

_INTO_BUCKET = re.compile(r"[AB]UnaryFunctor<(\w+(?:::\w+)?).*(?:Mul|Div)Functor")
"""Torch's kernels that multiply a tensor by a number, or divide it; the first group is the type of its numbers."""
_NUMBER_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}
_OLDER_TORCH = "at::detail::Array<"
"""In the names of kernels of a torch whose threads compute four numbers each; later ones compute four or eight."""
_GRID = re.compile(r"grid (\d+)x1x1 block (\d+)x1x1")
_PER_THREAD = 4
"""Numbers that a thread of such a kernel computes."""

MOST_STEPS = 60
"""Steps that are looked at: so many, evenly spread, are enough for an interval."""
LEAST_STEPS = 3
ALIKE = 0.75
"""At least this share of steps must have the same kernels; the others are left out."""

NO_STEPS = "no steps are marked in it: name a range that each step has with --step-range, or mark steps"
NO_GRADIENTS = "no collective of this capture is known to reduce gradients: capture a step of training with backward"
SEVERAL_PASSES = (
    "its steps have several synchronized passes of backward: capture it without accumulation, or under no_sync()"
)
FEW = "it has fewer than {least} whole steps with collectives of gradients: record more steps"
DIFFER = "its steps differ in their kernels: only {same} of {steps} have the same ones: record steps of one kind"
CALLS_DIFFER = (
    "its steps differ in their collectives of gradients: only {same} of {steps} have {calls}: record more steps"
)
NO_BACKWARD = "when backward ends is not known: mark it with a range, and name that with --backward-range"


OTHER_CLOCK = f"{CLOCKS}, which decides when gradients are ready: record it again"
SHARDED = (
    "its gradients are reduce-scattered, as by FSDP or ZeRO, whose all-gathers no bucket of gradients explains: only "
    "steps that all-reduce them are predicted, so capture the job with DistributedDataParallel"
)
SEVERAL_GROUPS = (
    "its gradients are reduced in {groups} process groups, which share no bucket and perhaps no link: capture it with "
    "data parallelism alone"
)
_HALF = re.compile(r"_(?:b?f16|half|_*nv_bfloat16)(?![a-zA-Z0-9])")
_WHOLE = re.compile(r"_(?:f32|float|f64|double)(?![a-zA-Z0-9])")
"""In the names of NCCL's kernels that reduce numbers of two bytes, and of four or eight."""


@dataclass(frozen=True)
class Copied(Brief):
    """Gradients that were seen being copied, in order: those of bucket 0 first.

    Attributes:
        bytes: Of each gradient; by a grid, that is at most what it is.
        bucket: The position of its collective in the step.
        ends_ns: When each copy ended; ``launch_ns``: when it was launched; shape (steps, gradients).
        took_ns, beside_ns: How long each took, and how much of that beside collectives.
        knows_bytes: Whether ``bytes`` are known; by the grids of a recent torch they are not.
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
    """The chosen steps of a rank; times are those of the trace, shapes (steps,) and (steps, collectives).

    Attributes:
        reason: Why nothing of the rank can be predicted; all else but its number is then empty.
        is_of_job: Whether that is so for the whole job.
        on_host: Whether its compute is on the CPU.
        keys: See ``RankEvents.step_keys``.
        bytes: Of each collective, where the capture says it; ``UNKNOWN`` where not.
        params: Number of gradients of each, by our ranges; ``UNKNOWN`` where not.
        sizes_from: Where ``bytes`` are from: ``ranges``, ``torch.profiler`` or ``NCCL``; ``None`` if they are unknown.
        beside_ns: Of the compute before each time: how much of it ran beside these collectives; of ``start_ns``,
            ``ready_ns``, ``backward_end_ns`` and of the copies into buckets.
        into, out: Copies into buckets, and out of them; ``None`` where there are none that can be told apart.
        resumes_ns: When collectives and copies have ended, so that the rest of the step begins.
        at_once: The most of these collectives that ran at the same time.
        are_half: Whether the names of their kernels say that they reduce numbers of two bytes.
    """

    reason: str | None
    rank: int | None = None
    world_size: int | None = None
    on_host: bool = False
    is_gloo: bool = False
    keys: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    begins_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    ends_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    backward_end_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    resumes_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    launch_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    ready_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    start_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    end_ns: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    bytes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    params: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes_from: str | None = None
    beside_ns: dict[str, Ints] = field(default_factory=dict)
    into: Copied | None = None
    out: Copied | None = None
    at_once: int = 1
    are_half: bool = False
    is_of_job: bool = False

    @property
    def took_ns(self) -> Ints:
        return self.end_ns - self.start_ns

    @property
    def calls(self) -> int:
        return int(self.start_ns.shape[1])


def find_structure(rank: RankEvents) -> RankStructure:
    """What a prediction needs of a rank; with a reason if its steps cannot be predicted."""
    return replace(_find_structure(rank), rank=rank.rank)


def _find_structure(rank: RankEvents) -> RankStructure:
    if reason := why_unknown(rank):
        return RankStructure(reason)
    found = find_timings(rank)
    timings = select(found.timings, carry_gradients(found) & (found.timings.step != UNKNOWN))
    if not rank.has_steps:
        return RankStructure(NO_STEPS)
    if not len(timings):
        return RankStructure(NO_GRADIENTS)
    if rank.clocks_disagree:
        return RankStructure(OTHER_CLOCK)
    if rank.passes.any_several:
        return RankStructure(SEVERAL_PASSES)
    if np.any(timings.operation == OPERATIONS.index(REDUCE_SCATTER)):
        return RankStructure(SHARDED, is_of_job=True)
    groups = len({*distinct(timings.group)} - {UNKNOWN})
    if groups > 1:
        return RankStructure(SEVERAL_GROUPS.format(groups=groups), is_of_job=True)
    steps = _usual_steps(rank, timings)
    if isinstance(steps, str):
        return RankStructure(steps)
    begins_ns, length_ns = rank.step_times.start_ns[steps], rank.step_times.length_ns[steps]

    chosen = select(timings, np.isin(timings.step, steps))
    shape = len(steps), len(chosen) // len(steps)
    columns = {
        name: getattr(chosen, name).reshape(shape)
        for name in ("launch_ns", "ready_ns", "start_ns", "end_ns", "bytes", "bucket", "backward_end_ns")
    }
    backward_end_ns = columns["backward_end_ns"].max(axis=1)
    if np.any(backward_end_ns == NO_TIME):
        return RankStructure(NO_BACKWARD)
    sizes = columns["bytes"][0]
    sizes = np.where(np.all(columns["bytes"] == sizes, axis=0), sizes, UNKNOWN)
    is_ours = bool(np.any(columns["bucket"] != UNKNOWN))
    profiler = "NCCL" if rank.trace.source.startswith("nsys") else "torch.profiler"
    communication = union(chosen.start_ns, chosen.end_ns)
    slowable = rank.union_of(Category.COMPUTE) & communication
    last_ns = columns["end_ns"].max(axis=1)

    def beside(until_ns: Ints) -> Ints:
        since_ns = begins_ns if until_ns.ndim == 1 else np.repeat(begins_ns, until_ns.shape[1])
        flat = np.maximum(until_ns.ravel(), since_ns)
        return slowable.covered_ns(since_ns, flat).reshape(until_ns.shape)

    copies = _Copies(rank, steps, columns["launch_ns"], communication)
    into, out = copies.into(), copies.out()
    resumes_ns = np.maximum(last_ns, backward_end_ns)
    beside_ns = {
        "start": beside(columns["start_ns"]),
        "ready": beside(np.where(columns["ready_ns"] == NO_TIME, columns["start_ns"], columns["ready_ns"])),
        "backward_end": beside(backward_end_ns),
    }
    if into is not None:
        beside_ns["into"] = beside(into.ends_ns)
    if out is not None:
        resumes_ns = np.maximum(resumes_ns, out.ends_ns.max(axis=1))
    return RankStructure(
        reason=None,
        world_size=rank.trace.world_size,
        on_host=rank.device is None,
        is_gloo=bool(np.any(rank.operations.activity == UNKNOWN)),
        keys=rank.step_keys[steps],
        begins_ns=begins_ns,
        ends_ns=begins_ns + length_ns,
        backward_end_ns=backward_end_ns,
        resumes_ns=resumes_ns,
        launch_ns=columns["launch_ns"],
        ready_ns=columns["ready_ns"],
        start_ns=columns["start_ns"],
        end_ns=columns["end_ns"],
        bytes=sizes,
        params=_count_parameters(rank, steps[0], shape[1]),
        sizes_from=None if UNKNOWN in sizes else "ranges" if is_ours else profiler,
        beside_ns=beside_ns,
        into=into,
        out=out,
        at_once=_most_at_once(columns["start_ns"], columns["end_ns"]),
        are_half=_are_half(rank),
    )


def _usual_steps(rank: RankEvents, timings: CollectiveTimings) -> Ints | str:
    """Of the whole steps those with the usual collectives and kernels, at most ``MOST_STEPS``; a text says why none."""
    steps, times = np.array(distinct(timings.step), np.int64), rank.step_times
    is_whole = (times.start_ns[steps] != NO_TIME) & (times.length_ns[steps] > 0)
    if int(is_whole.sum()) < LEAST_STEPS:
        return FEW.format(least=LEAST_STEPS)
    # A warm-up step is not among them; of the others those with the usual collectives and kernels count.
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
    """The positions of at most ``MOST_STEPS`` steps, evenly spread; ranks with the same steps choose the same ones.

    Multiples of the golden section, without their whole part, are evenly spread (Knuth, 6.4), and which are small hangs
    on a step's own key alone: a step more or less of one rank moves no other one.
    """
    spread = (keys.astype(np.uint64) * np.uint64(_GOLDEN)) & np.uint64(0xFFFF_FFFF)
    found: Ints = np.sort(np.argsort(spread, kind="stable")[:MOST_STEPS])
    return found


_GOLDEN = 2_654_435_769
"""2^32 times the golden section, without its whole part."""


def _are_half(rank: RankEvents) -> bool:
    activity = np.unique(rank.operations.activity)
    names = [rank.trace.names[one] for one in distinct(rank.trace.activities.name_id[activity[activity != UNKNOWN]])]
    return any(map(_HALF.search, names)) and not any(map(_WHOLE.search, names))


def _kernels_of(rank: RankEvents) -> dict[int, int]:
    """For each step, a number that stands for its kernels on threads that train: their names, in order of launch."""
    events = rank.events
    if rank.device is None:
        return dict.fromkeys(range(len(rank.steps)), 0)
    rows = np.flatnonzero((events.step != UNKNOWN) & rank.is_kernel)
    trains = np.isin(events.launcher[rows], [rank.main_thread, *rank.gradient_threads])
    rows = rows[trains] if trains.any() else rows
    rows = rows[np.lexsort((events.launch_ns[rows], events.step[rows]))]
    names = rank.trace.activities.name_id[events.activity[rows]]
    bounds = np.searchsorted(events.step[rows], np.arange(len(rank.steps) + 1))
    return {
        step: hash(names[low:high].tobytes())
        for step, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    }


def _count_parameters(rank: RankEvents, step: int, calls: int) -> Ints:
    """The number of gradients in each of the first step's collectives, where our ranges say it."""
    ranges, found = rank.collective_ranges, np.full(calls, UNKNOWN, np.int64)
    at_ns = ranges.launch_or_start_ns
    begins_ns, ends_ns = rank.steps.start_ns[step], rank.steps.end_ns[step]
    rows = np.flatnonzero((ranges.bucket != UNKNOWN) & (at_ns >= begins_ns) & (at_ns < ends_ns))
    names = parse_ranges(rank.trace.names, *{name.partition("|")[0] for name in rank.trace.names if "params=" in name})
    for row in rows.tolist():
        known = names.get(int(ranges.name_id[row]))
        bucket, params = int(ranges.bucket[row]), known.number("params") if known else None
        if params is not None and bucket < calls:
            found[bucket] = params
    return found


def _most_at_once(start_ns: Ints, end_ns: Ints) -> int:
    """How many collectives of a step ran at once at most, in the usual step."""
    times = np.concatenate([start_ns, end_ns], axis=1)
    change = np.concatenate([np.ones_like(start_ns), -np.ones_like(end_ns)], axis=1)
    order = np.argsort(2 * times + (change > 0), axis=1, kind="stable")  # at one time, ends come first
    running = np.cumsum(np.take_along_axis(change, order, axis=1), axis=1).max(axis=1)
    return int(np.median(running))


class _Copies:
    """The copies of gradients into buckets and out of them, in the steps of a rank on a GPU."""

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
        """The kernels that multiply a gradient as they copy it into a bucket, one for each gradient."""
        trace = self.rank.trace
        if trace.shape_id is None or not len(self.rows):
            return None
        name_id, shape_id = trace.activities.name_id[self.activity], trace.shape_id[self.activity]
        scales = {one for one in distinct(name_id) if _INTO_BUCKET.search(trace.names[one])}
        counts = {}
        for one in set(distinct(shape_id)) - {UNKNOWN}:
            if grid := _GRID.fullmatch(trace.names[one]):
                counts[one] = int(grid[1]) * int(grid[2]) * _PER_THREAD
        is_one = np.isin(name_id, [*scales]) & np.isin(shape_id, [*counts])
        is_one &= self.rank.events.phase[self.rows] == BACKWARD_PHASE
        chosen = self._chosen(is_one)
        if chosen is None:
            return None
        names = [trace.names[one] for one in name_id[chosen[0]].tolist()]
        numbers = np.array([counts[one] for one in shape_id[chosen[0]].tolist()], np.int64)
        types = [found[1] for name in names if (found := _INTO_BUCKET.search(name))]
        sizes = np.array([_NUMBER_BYTES.get(one, 0) for one in types], np.int64)
        knows_bytes = bool(sizes.all()) and all(_OLDER_TORCH in name for name in names)
        return replace(self._copied(chosen, numbers * sizes), knows_bytes=knows_bytes)

    def out(self) -> Copied | None:
        """The copies that the thread of the last collective launches after it, one for each gradient."""
        activities = self.rank.trace.activities
        is_copy = (activities.kind[self.activity] == Kind.COPY) & (activities.bytes[self.activity] > 0)
        events = self.rank.events
        last = np.full(len(self.rank.steps), NO_TIME)
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
        """Their positions, a row per step; ``None`` unless each step has as many."""
        found = [low + np.flatnonzero(mask[low:high]) for low, high in self.by_step.T.tolist()]
        counts = {len(one) for one in found}
        return np.stack(found) if len(counts) == 1 and counts != {0} else None

    def _copied(self, chosen: Ints, sizes: Ints) -> Copied:
        events = self.rank.events
        rows = self.rows[chosen]
        launch_ns, ends_ns = events.launch_ns[rows], events.end_ns[rows]
        took_ns = ends_ns - events.start_ns[rows]
        beside_ns = self.communication.covered_ns(events.start_ns[rows].ravel(), ends_ns.ravel())
        # A copy into a bucket is launched before the bucket's collective.
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
