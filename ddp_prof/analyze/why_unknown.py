"""Why figures are not known: of the overlap, work and steps of a rank, and of a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, OPTIMIZER_PHASE, SYNCHRONIZE_PHASE, find_operations
from ddp_prof.analyze.core.clocks import CLOCKS, UNITS
from ddp_prof.analyze.core.rank_events import ONLY_BESIDE, ONLY_INCOMPLETE, ONLY_WARMUP, RankEvents
from ddp_prof.analyze.core.recording import are_launched_earlier
from ddp_prof.analyze.intervals import union
from ddp_prof.columns import percent
from ddp_prof.communication import BARRIER, DEVICE_BARRIER, GLOO, NCCL_RANGE, OPERATIONS, REDUCTIONS, operation_of
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import NO_TIME, Mask, is_in, parts_of, take_or_unknown
from ddp_prof.trace import UNKNOWN, Category, Kind, SyncKind, Trace, distinct

NOTHING = "no GPU activities, and no ddp_prof ranges that tell what a CPU did instead"

GRAPHS = "CUDA graphs were recorded whole, so what they compute and communicate is not in this trace"

UNMARKED_WAITS = "no range 'synchronize' tells when the host waits, so what it computed meanwhile is not known"

NO_BACKWARD = "no backward pass was recorded (torch.profiler leaves out one that runs in a thread of its own)"

UNNAMED_BACKWARD = "no range names a backward pass, so what one computed is not known (see --backward-range)"

NO_COMMUNICATION = "nothing in this trace is known to communicate"

EMPTY = "this trace holds no rank"

NO_NCCL_KERNEL = "no NCCL kernel was recorded, although ranges name collectives"

UNTIMED_CALLS = "collectives were called in this trace, and nothing tells when they ran"

ONLY_MPI = "only calls of MPI communicate in this trace, and what they move is not measured"

NO_DURATIONS = "the collectives in this trace take no time, so how long they took is not known"

NO_COMPUTE_DURATIONS = "kernels that compute take no time in this trace, so what they hide is not known"

NO_COMPUTE = "no kernel that computes was recorded, although ranges name forward or backward"

COPIES_LOST = "copies carry out collectives in this trace, by the calls in their ranges, and no copy was recorded"

NO_COLLECTIVE = "no collective was recorded, although ranges tell that the host waits for gradients to be reduced"

ONLY_BARRIERS = "only barriers between devices communicate in this trace, and when data moved is not known"

NO_BEGIN = "when collectives of the host began is not known, as copies to it, or what launched them, were not recorded"

NOT_TIMED = frozenset(
    (NO_NCCL_KERNEL, NO_DURATIONS, UNTIMED_CALLS, COPIES_LOST, ONLY_BARRIERS, NO_BEGIN, NO_COLLECTIVE)
)
"""Reasons that mean that the trace does not tell what a step communicates, nor what fills it besides compute."""

WAITED_FOR = "torch.profiler records until when the host waited for them, not when they ran"

ONLY_MESSAGES = f"only sends and receives of gloo communicate in this trace, and {WAITED_FOR}"

NOTHING_LEFT = (ONLY_WARMUP, ONLY_INCOMPLETE, ONLY_BESIDE)
"""Reasons why no step of a rank is measured although it has steps."""

MIXED_CLOCKS = f"{CLOCKS}, nor what its host's communication ran beside"

LOST = "the launches of this process have no activities: the profiler lost them"

INCOMPLETE_COMMUNICATES = "only steps that were not recorded completely communicate in this trace"

LOST_MAY_COMMUNICATE = "nothing that communicates was recorded, but work of the steps that were left out was lost"

WARMUP_COMMUNICATES = "only warm-up steps communicate in this trace, and they are left out (record more steps)"

LOST_LAUNCHES = "which calls launched communication in steps is not known"

MOST_LOST = 0.2
"""Largest fraction of a rank's communication without a recorded launch; if it is larger, steps get no figures."""

MOST_IN_NO_PHASE = 0.05
"""Largest fraction of the steps of a host in no phase that counts as idle, if no range names forward or optimizer."""

MOST_UNNAMED = 0.01
"""Largest fraction of kernels without a name, by number or by time, with which figures are still reported."""


def why_unknown(rank: RankEvents) -> str | None:
    """Return why the rank has no overlap ratio; ``None`` if it has one."""
    if not rank.why_left_out and _communicates_with_nobody(rank):
        return NO_COMMUNICATION
    if reason := why_unknown_work(rank) or _why_unknown_times(rank):
        return reason
    if rank.union_of(Category.COMMUNICATION).length_ns:
        return None
    return NO_DURATIONS if np.any(rank.events.category == Category.COMMUNICATION) else _why_silent(rank)


def _why_unknown_times(rank: RankEvents) -> str | None:
    """Return why it is not known when the rank's collectives ran, or for how long; ``None`` if it is."""
    if _lacks_copies_of_collectives(rank):
        return COPIES_LOST
    if lacks_durations(rank, Category.COMMUNICATION):
        return NO_DURATIONS
    if _has_only_barriers(rank):
        return ONLY_BARRIERS
    return NO_BEGIN if _hides_begin(rank) else None


def _why_silent(rank: RankEvents) -> str:
    """Return why nothing that communicates was recorded of the rank's steps: it was lost, or there was nothing."""
    if rank.including_warmup.union_of(Category.COMMUNICATION).length_ns:
        return WARMUP_COMMUNICATES if rank.beside is None else INCOMPLETE_COMMUNICATES
    # What ranges and operators of the process call may be what its other devices communicate.
    if not _communicates_elsewhere(rank):
        if rank.device is not None and named_collectives(rank.trace, rank.process):
            return NO_NCCL_KERNEL
        if called_collectives(rank.trace):
            return UNTIMED_CALLS
        if _calls_mpi(rank):
            return ONLY_MPI
        if rank.device is None and SYNCHRONIZE_PHASE in rank.phases.kind:
            return NO_COLLECTIVE
    # Steps that accumulate gradients lose nothing, and those that reduce them may have lost just that. In a step that
    # counts, and in which another device communicates, this one would do so, too, if it did at all.
    may_have_lost = rank.incomplete_steps and rank.recording.loses_work and not _communicates_beside(rank)
    return LOST_MAY_COMMUNICATE if may_have_lost else NO_COMMUNICATION


def _lacks_copies_of_collectives(rank: RankEvents) -> bool:
    """Return whether copies carry out collectives of the rank, and its process has no recorded copy.

    Then a range of a collective that copies alone can do holds calls for copies, and no launch of a kernel.
    """
    if not rank.lacks_all_copies:
        return False
    trace, spans, calls = rank.trace, rank.trace.spans, rank.trace.synchronizations
    may_copy = [
        number
        for number, name in enumerate(trace.names)
        if NCCL_RANGE.match(name) and operation_of(name) not in (*REDUCTIONS, BARRIER)
    ]
    is_range = is_in(spans.name_id, may_copy) & (spans.process == rank.process)
    copies = (calls.kind == SyncKind.COPY) & (calls.process == rank.process)
    launching = distinct(trace.launching_calls[trace.launching_calls != UNKNOWN])
    for thread in distinct(spans.lane[is_range]):
        own = is_range & (spans.lane == thread)
        is_own = (trace.calls.process[launching] == rank.process) & (trace.calls.lane[launching] == thread)
        copied, launched = (
            np.searchsorted(np.sort(at_ns), spans.end_ns[own]) - np.searchsorted(np.sort(at_ns), spans.start_ns[own])
            for at_ns in (calls.start_ns[copies & (calls.thread == thread)], trace.calls.start_ns[launching][is_own])
        )
        if np.any((copied > 0) & (launched == 0)):
            return True
    return False


def _has_only_barriers(rank: RankEvents) -> bool:
    """Return whether all communication of the rank is barriers of symmetric memory: what they guard was not recorded.

    Those are copies between devices that were lost, or kernels that read the memory of others while they compute.
    """
    activity = rank.operations.activity
    names = take_or_unknown(rank.trace.activities.name_id, activity)
    is_barrier = find_operations(rank.trace, names) == OPERATIONS.index(DEVICE_BARRIER)
    return bool(len(activity) and is_barrier.all())


def _hides_begin(rank: RankEvents) -> bool:
    """Return whether the host communicates for a device, and copies to it, with which that begins, are not all known.

    Copies that were launched before the recording began are none of these.
    """
    events, activities = rank.events, rank.trace.activities
    on_host = (events.category == Category.COMMUNICATION) & (events.activity == UNKNOWN)
    if rank.device is None or not on_host.any():
        return False
    copies = (activities.kind == Kind.COPY) & (activities.process == rank.process)
    unknown = copies & (rank.trace.launching_calls == UNKNOWN)
    return rank.lacks_copies or bool(np.any(unknown & ~are_launched_earlier(rank.trace)))


def _communicates_elsewhere(rank: RankEvents) -> bool:
    """Return whether other devices of the rank's process communicate, as in a pipeline within a process."""
    return bool(_communication_of_others(rank).any())


def _communicates_beside(rank: RankEvents) -> bool:
    """Return whether another device of the rank's process communicates in a step that counts."""
    launching = rank.trace.launching_calls[_communication_of_others(rank)]
    at = rank.steps.index_at(rank.trace.calls.start_ns[launching[launching != UNKNOWN]])
    return bool(np.any(at != UNKNOWN))


def _communication_of_others(rank: RankEvents) -> Mask:
    """Return which activities are communication of other devices of the rank's process."""
    activities = rank.trace.activities
    of_others = (activities.process == rank.process) & (activities.device != rank.device)
    found: Mask = of_others & (activities.category == Category.COMMUNICATION)
    return found


def named_collectives(trace: Trace, process: int | None = None) -> list[str]:
    """Return the names of ranges that NCCL, or torch for it, opens around a collective's call: ``nccl:all_reduce``.

    These are the ranges of one process or, by default, of all processes.
    """
    spans = trace.spans
    used = set(distinct(spans.name_id if process is None else spans.name_id[spans.process == process]))
    return [name for at, name in enumerate(trace.names) if at in used and NCCL_RANGE.match(name)]


def called_collectives(trace: Trace) -> list[str]:
    """Return the names of torch's operators that call collectives other than barriers, such as ``c10d::allreduce_``."""
    names = (trace.names[name_id] for name_id in distinct(trace.collective_calls.name_id) if name_id != UNKNOWN)
    return [name for name in names if operation_of(name) not in (None, BARRIER)]


def _calls_mpi(rank: RankEvents) -> bool:
    """Return whether a range of the process is a call of MPI that communicates, such as ``MPI_Send``.

    ``nsys --trace=mpi`` records such ranges.
    """
    names = [number for number, name in enumerate(rank.trace.names) if _MPI_CALL.match(name)]
    return bool(is_in(rank.trace.spans.name_id[rank.trace.spans.process == rank.process], names).any())


_MPI_CALL = re.compile(
    r"MPI_I?([bsr]?send|m?recv|all|reduce|bcast|gather|scatter|put|get_acc|r?accumulate|neighbor)", re.I
)


def count_messages(trace: Trace) -> int:
    """Return the number of sends and receives of gloo, which are not collectives."""
    names = [index for index, name in enumerate(trace.names) if name.startswith((f"{GLOO}send", f"{GLOO}recv"))]
    return int(is_in(trace.spans.name_id, names).sum())


def why_unknown_work(rank: RankEvents) -> str | None:
    """Return why the rank's compute and communication are not known; ``None`` if they are, even if there is none."""
    if lacks_names(rank):
        share = rank.trace.unresolved_names.share
        return f"{percent(share)} of the kernels have no name, so it is not known which of them communicate"
    if rank.why_left_out:
        return rank.why_left_out
    if rank.is_lost:
        return LOST
    if rank.units_differ:
        return UNITS
    if _has_only_messages(rank):
        return ONLY_MESSAGES
    if not len(rank.events):
        return NOTHING
    if hides_graphs(rank):
        return GRAPHS
    if lacks_durations_of_compute(rank):
        return NO_COMPUTE_DURATIONS
    if _lacks_compute(rank):
        return NO_COMPUTE
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
    return is_silent and count_messages(rank.trace) > 0


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
    communicates. The figures of all ranks that communicate must be known, and those of at least one rank. A rank of
    which no step is left is in no figure, whether anything outside of its steps communicates or not.
    """
    reasons = [reason for reason, _ in ranks]
    doubtful = [reason for reason, communicates in ranks if reason and communicates and reason not in NOTHING_LEFT]
    if not doubtful and None in reasons:
        return None
    return merge_reasons(doubtful or reasons) if ranks else EMPTY


def why_no_steps(reasons: Iterable[str | None], otherwise: str) -> str:
    """Return why no rank has a measured step: a reason of the ranks that says so, or ``otherwise`` if there is none.

    ``otherwise`` is used where the trace marks no steps.
    """
    return next((reason for reason in reasons if reason in NOTHING_LEFT), otherwise)


def hides_work(rank: RankEvents) -> bool:
    """Return whether content or durations of work are not known, or those of kernels or phases without a name."""
    return hides_compute(rank) or bool(np.any(rank.events.category == Category.UNKNOWN)) or lacks_phases(rank)


def lacks_phases(rank: RankEvents) -> bool:
    """Return whether a host trains, phases alone tell when it computes, and none of them is forward or optimizer.

    Where its phases leave hardly any time of its steps, there was none.
    """
    phases, steps = rank.phases, rank.steps
    is_by_phases = rank.device is None and not len(rank.trace.operators) and BACKWARD_PHASE in phases.kind
    if not is_by_phases or np.isin((PHASES.index(FORWARD), OPTIMIZER_PHASE), phases.kind).all():
        return False
    within = union(steps.start_ns, steps.end_ns)
    return (within - union(phases.start_ns, phases.end_ns)).length_ns > MOST_IN_NO_PHASE * within.length_ns


def hides_compute(rank: RankEvents) -> bool:
    """Return whether it is not known when the rank computed.

    Graphs were recorded whole, or kernels take no time, or none was recorded, as where a trace was cut down to NCCL's.
    """
    return hides_graphs(rank) or lacks_durations_of_compute(rank) or _lacks_compute(rank)


def _lacks_compute(rank: RankEvents) -> bool:
    """Return whether the device of a rank that trains communicates, and no work of its process is known to compute."""
    trains = np.isin((PHASES.index(FORWARD), BACKWARD_PHASE), rank.phases.kind).any()
    if rank.device is None or not trains or not np.any(rank.events.category == Category.COMMUNICATION):
        return False
    activities, may_compute = rank.trace.activities, (Category.COMPUTE, Category.OTHER, Category.UNKNOWN)
    return not any(
        np.any(is_in(activities.category[part], may_compute) & (activities.process[part] == rank.process))
        for part in parts_of(len(activities))
    )


def hides_graphs(rank: RankEvents) -> bool:
    """Return whether the rank ran CUDA graphs that were recorded as a whole: what they computed is then not known."""
    return bool(np.any(rank.events.category == Category.OTHER))


def lacks_durations_of_compute(rank: RankEvents) -> bool:
    """Return whether most kernels by which the rank computes take no time: the profiler does not tell how long."""
    return lacks_durations(rank, Category.COMPUTE)


def lacks_times_of_communication(rank: RankEvents, reason: str | None, comm_ns: int) -> bool:
    """Return whether it is not known when the rank's collectives ran, in warm-up steps, too.

    ``reason`` is why its overlap is not known, ``None`` if it is; ``comm_ns`` is the length of its communication.
    """
    takes_no_time = comm_ns == 0 and np.any(rank.events.category == Category.COMMUNICATION) and not hides_graphs(rank)
    return bool(reason == NO_BEGIN or lacks_durations(rank, Category.COMMUNICATION) or takes_no_time)


def lacks_durations(rank: RankEvents, category: Category) -> bool:
    """Return whether most kernels of a category take no time."""
    events = rank.events
    takes_none = events.end_ns == events.start_ns
    if not takes_none.any():  # as usual, and quicker to find
        return False
    chosen = rank.is_kernel & (events.category == category)
    return bool(2 * np.sum(chosen & takes_none) > np.sum(chosen))


def loses_launches(rank: RankEvents) -> bool:
    """Return whether so much communication without a recorded launch ran during steps that steps get no figures.

    If nothing is known to belong to a step, all that ran since the first one began counts as during steps: a host that
    ran ahead launched it before.
    """
    events, begin_ns, end_ns = rank.events, rank.steps.start_ns, rank.steps.end_ns
    if len(begin_ns) and np.all(events.step == UNKNOWN):
        begin_ns, end_ns = begin_ns[:1], events.end_ns.max(initial=int(end_ns[-1]), keepdims=True)
    is_lost = (events.category == Category.COMMUNICATION) & (events.step == UNKNOWN) & (events.launch_ns == NO_TIME)
    is_lost &= take_or_unknown(rank.trace.launching_calls, events.activity) == UNKNOWN
    lost = union(events.start_ns[is_lost], events.end_ns[is_lost]) & union(begin_ns, end_ns)
    return lost.length_ns > MOST_LOST * rank.union_of(Category.COMMUNICATION).length_ns


def has_no_usable_events(rank: RankEvents) -> bool:
    """Return whether nothing can be measured of the rank: it has no events, or they do not tell what it did."""
    is_blind = rank.hides_backward or rank.mixes_clocks or rank.units_differ or _has_only_messages(rank)
    return not len(rank.events) or lacks_names(rank) or is_blind


def lacks_names(rank: RankEvents) -> bool:
    """Return whether so many kernels of its trace have no name that no times of compute or communication are told."""
    return rank.trace.unresolved_names.share > MOST_UNNAMED
