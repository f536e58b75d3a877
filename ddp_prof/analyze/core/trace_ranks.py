"""Finds the ranks of a trace: processes and their devices, with their events, steps and phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from ddp_prof.analyze.core.attribution import (
    BACKWARD_PHASE,
    SYNCHRONIZE_PHASE,
    Events,
    are_gloo_events,
    begin_with_copies,
    device_events,
    find_collective_ranges,
    host_communication,
    host_events,
)
from ddp_prof.analyze.core.counted_steps import without_uncounted_steps
from ddp_prof.analyze.core.edges import Dependencies, find_dependencies
from ddp_prof.analyze.core.lost_calls import LEAST_ALIKE
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.recording import find_recording
from ddp_prof.analyze.core.steps import Steps, describe_ranges, find_phases, find_steps
from ddp_prof.analyze.intervals import union
from ddp_prof.communication import GLOO
from ddp_prof.errors import TraceError
from ddp_prof.range_names import COLLECTIVES, PHASES, PROCESS, parse_ranges
from ddp_prof.threads import in_thread
from ddp_prof.trace import (
    NO_TIME,
    UNKNOWN,
    Category,
    Mask,
    Trace,
    concatenate,
    distinct,
    distinct_rows,
    empty,
    select,
    take_or_unknown,
)
from ddp_prof.variants import VARIANTS

UNMARKED = "communication is the ranges of collectives: those without a range, such as barriers, are in no figure"


def _find_launches(trace: Trace) -> frozenset[tuple[int, ...]]:
    """Return the combinations of process, device, category and launching thread (or ``UNKNOWN``) of all activities."""
    activities, thread = trace.activities, take_or_unknown(trace.calls.lane, trace.launching_calls)
    columns = (activities.process, activities.device, activities.category, thread)
    first, _ = distinct_rows(*columns)
    return frozenset(zip(*(column[first].tolist() for column in columns), strict=True))


def find_rank_events(
    trace: Trace,
    step_range: str | None = None,
    backward_range: str | None = None,
    *,
    warmup_steps: int = 0,
    beside: bool = False,
) -> tuple[RankEvents, ...]:
    """Return the ranks of a trace, ordered by rank, process and device, without warm-up and incomplete steps.

    Args:
        trace: The trace.
        step_range: The user's regular expression for the names of steps; ``None`` for the usual names.
        backward_range: The same for the names of backward.
        warmup_steps: Number of steps of each rank that are warm-up because the user says so: the first ones that would
            count.
        beside: Whether a second thread finds the dependencies of the trace meanwhile; else they are found when they are
            first asked for.

    Raises:
        TraceError: One of the two expressions matches no range, or ``warmup_steps`` are all steps.
    """
    launches = _find_launches(trace)
    on_devices = {process for process, *_ in launches}
    # The devices that compute or communicate; a process may use others only for copies.
    working = {(process, device) for process, device, category, _ in launches if category != Category.MEMORY}
    found: list[RankEvents] = []
    # All ranks share the dependencies.
    dependencies = in_thread(find_dependencies, trace).result if beside else cache(partial(find_dependencies, trace))
    for process in sorted({*trace.processes, *on_devices}):
        builder = _Builder(trace, process, step_range, backward_range, launches, dependencies)
        if process in on_devices:
            ranks = builder.device_ranks()
            # A device that only copies is no rank if other devices compute, for example that of a data loader.
            at_work = [rank for rank in ranks if (process, rank.device) in working]
            found += at_work if at_work or (working and process not in trace.ranks) else ranks
        elif process in trace.ranks or not (on_devices or trace.ranks):
            found.append(builder.host_rank())
    for option, pattern, is_found in (
        ("--step-range", step_range, any(rank.has_steps or rank.ranges_left_out for rank in found)),
        ("--backward-range", backward_range, any(BACKWARD_PHASE in rank.phases.kind for rank in found)),
    ):
        if pattern is not None and not is_found:
            reason = f"no range matches {option} '{pattern}'"
            raise TraceError(trace.path, reason, f"the ranges there are: {describe_ranges(trace)}")
    found.sort(key=lambda rank: (rank.rank is None, rank.rank or 0, rank.process, rank.device or 0))
    counted = tuple(without_uncounted_steps(rank, warmup_steps) for rank in found)
    if warmup_steps and not any(len(rank.steps) for rank in counted):
        most = max((len(without_uncounted_steps(rank).steps) for rank in found), default=0)
        if most:
            raise TraceError(trace.path, f"--warmup-steps {warmup_steps} leaves out all {most} steps", "give fewer")
    return counted


class _Builder:
    """Makes the ranks of one process.

    ``launches`` is what :func:`_find_launches` returns; the other arguments are those of :func:`find_rank_events`.
    """

    def __init__(
        self,
        trace: Trace,
        process: int,
        step_range: str | None,
        backward_range: str | None,
        launches: frozenset[tuple[int, ...]],
        dependencies: Callable[[], Dependencies],
    ) -> None:
        """Find the steps, phases and ranges of the process, and what was recorded of it."""
        self.trace, self.process = trace, process
        self.launches = [launch for owner, *launch in launches if owner == process]
        found = find_steps(trace, process, step_range)
        self.steps, self.step_notes, self.ranges_left_out, self.unfinished = found
        self.phases = find_phases(trace, process, backward_range)
        self.ranges = find_collective_ranges(trace, process, self.phases)
        self.dependencies = dependencies
        self._leave_out_unfinished_step()
        self.recording = find_recording(trace, process, self.steps, self.phases)
        self.is_gloo = are_gloo_events(trace, self.ranges)
        if len(self.steps) and not self.is_gloo.all():
            # Beside ranges of ddp_prof, gloo's own events count only in steps, and only if one lies in a measured step:
            # a barrier in warm-up does not count.
            step = self.steps.index_at(self.ranges.launch_or_start_ns)
            is_measured = np.append(~self.steps.warmup, False)[step]  # the additional last element is for UNKNOWN
            counts = ~self.is_gloo | ((step != UNKNOWN) & np.any(self.is_gloo & is_measured))
            self.ranges, self.is_gloo = select(self.ranges, counts), self.is_gloo[counts]

    def _leave_out_unfinished_step(self) -> None:
        """Drop the last step, with a note, if the program or the recording seems to have ended in it.

        That is so if it has no phase and all other steps have one, or if it lacks a phase that all other steps have, at
        least :data:`LEAST_ALIKE` of them. This happens in loops in which a step begins as soon as the one before ends,
        as with torch.profiler. The range of an optimizer often reaches into the next step, since the hook that counts
        steps runs within it. Therefore a phase belongs to the last step only if they share half of the shorter one. Of
        a phase that begins in it and ends with the recording, as where such a hook stops the profiler, the end says
        nothing: it belongs to it.
        """
        steps, phases, spans = self.steps, self.phases, self.trace.spans
        if len(steps) < 2:
            return
        start_ns, end_ns = steps.start_ns[-1], steps.end_ns[-1]
        within_ns = np.minimum(phases.end_ns, end_ns) - np.maximum(phases.start_ns, start_ns)
        shorter_ns = np.minimum(phases.end_ns - phases.start_ns, end_ns - start_ns)
        begins_in_last = (phases.start_ns >= start_ns) & (phases.start_ns < end_ns)
        is_of_last = ((within_ns > 0) | begins_in_last) & (2 * within_ns >= shorter_ns)  # it may take no time at all
        open_end_ns = spans.end_ns[(spans.process == self.process) & (spans.is_open == 1)]
        is_of_last |= begins_in_last & np.isin(phases.end_ns, open_end_ns)
        kinds = distinct(phases.kind) if len(steps) > LEAST_ALIKE else []
        for name, rows in (
            ("phase", np.ones(len(phases), np.bool_)),
            *((PHASES[kind], phases.kind == kind) for kind in kinds),
        ):
            others = steps.index_at(phases.start_ns[rows])
            if not is_of_last[rows].any() and np.isin(np.arange(len(steps) - 1), others).all():
                what = f"it has no {name}" + ("" if name == "phase" else ", as all other steps have")
                self.step_notes += (f"{steps.names[-1]} left out: {what}, so the program seems to have ended in it",)
                self.steps = select(steps, np.arange(len(steps) - 1))
                self.unfinished |= union(steps.start_ns[-1:], steps.end_ns[-1:])
                return

    def device_ranks(self) -> list[RankEvents]:
        """Return one rank for each device of the process, with its warm-up and incomplete steps."""
        # The threads that launch communication, and those that launch compute.
        communicating, computing = (
            frozenset(thread for _, category, thread in self.launches if category == one and thread != UNKNOWN)
            for one in (Category.COMMUNICATION, Category.COMPUTE)
        )
        self.step_notes += self.recording.notes(self.steps.names)
        events, backward = device_events(self.trace, self.process, self.steps, self.phases, communicating, computing)
        if self.recording.clocks_disagree:
            events = replace(events, launch_ns=np.full(len(events), NO_TIME))
        if self.recording.lacks_calls:
            events, backward = replace(events, phase=np.full(len(events), UNKNOWN)), "none"
        device_of = self.trace.activities.device[events.activity]
        result = []
        for device in sorted({device for device, *_ in self.launches}):
            own = select(events, device_of == device)
            if not np.any(own.category == Category.COMMUNICATION) and "nccl" not in self._declared("backend"):
                # gloo with CUDA tensors: the host communicates
                self.ranges, without_copy = begin_with_copies(self.trace, self.ranges, self.phases)
                own = concatenate(own, host_communication(self.ranges, self.steps, self.phases))
                if len(self.ranges):
                    self.step_notes += (self._describe_copies(without_copy),)
            result.append(self._rank(device, own, backward))
        return result

    def host_rank(self) -> RankEvents:
        """Return the rank of a CPU run, with its warm-up steps.

        If no ranges of ddp_prof separate waiting from computing, compute is the time of torch's operators.
        """
        operators, backward = self.trace.operators, "ranges" if BACKWARD_PHASE in self.phases.kind else "none"
        is_ours = bool(self._declared("backend") or parse_ranges(self.trace.names, *COLLECTIVES))
        # If there are fewer operators than collectives, operators were not recorded completely.
        # A variant marks its waits by itself; only where the trainer is marked, too, do ranges tell when it computed.
        marks_waits = np.isin((SYNCHRONIZE_PHASE, BACKWARD_PHASE), self.phases.kind).all() and not self.is_gloo.any()
        if self.process in self.trace.on_devices:  # of which nothing was recorded
            events = empty(Events)
        elif 0 < len(self.ranges) <= len(operators) and not (is_ours and marks_waits):
            events = host_events(self.ranges, self.steps, self.phases, operators)
            if backward == "none" and operators.is_backward.any():
                backward = "inferred"
            communication = self._describe_gloo() or "the ranges of collectives"
            self.step_notes += (f"communication is {communication}; compute is torch's operators",)
        elif is_ours and not self.recording.lost:
            events = host_events(self.ranges, self.steps, self.phases)
            if communication := self._describe_gloo():
                self.step_notes += (f"communication is {communication}",)
            # Nsys records no events of gloo, and only our variants mark each of their collectives.
            elif len(self.ranges) and not len(operators) and not self._declared("variant") & VARIANTS.keys():
                self.step_notes += (UNMARKED,)
        else:
            events = empty(Events)
        return self._rank(None, events, backward)

    def _describe_copies(self, without_copy: int) -> str:
        """Return a note on when gloo's communication of tensors on a GPU begins.

        ``without_copy`` is the number of collectives that do not begin with a copy.
        """
        communication = self._describe_gloo() or "the ranges of collectives"
        if not without_copy:
            return f"communication is {communication}; each collective begins with its copy from the GPU to the host"
        return (
            f"communication is {communication}; its times may include waiting for the GPU: no copy to the host was "
            f"recorded for {without_copy:,} of {len(self.ranges):,} collectives"
        )

    def _describe_gloo(self) -> str:
        """Return words for gloo's own events as the source of communication; empty if there are none."""
        if not self.is_gloo.any():
            return ""
        is_by_caller = np.isin(self.trace.spans.lane[self.ranges.span[self.is_gloo]], self.phases.lane).any()
        begin = "is called" if is_by_caller else "is taken up by a thread of gloo"
        ours = "" if self.is_gloo.all() else "the ranges of collectives, and beside them "
        return f"{ours}the '{GLOO}' events, each from when it {begin}"

    def _declared(self, field: str) -> set[str]:
        """Return the values of a field in the names of the ranges by which ddp_prof describes this process.

        A range without the field has an empty text.
        """
        ids = np.unique(self.trace.spans.name_id[self.trace.spans.process == self.process]).tolist()
        names = [self.trace.names[name_id] for name_id in ids]
        return {range_.text(field) or "" for range_ in parse_ranges(names, PROCESS).values()}

    def _rank(self, device: int | None, events: Events, backward: str) -> RankEvents:
        """Return a rank of the process with these events; without steps, one step contains all of them."""
        steps, has_steps = self.steps, bool(len(self.steps))
        if not has_steps and len(events):
            start_ns, end_ns = events.start_ns.min(keepdims=True), events.end_ns.max(keepdims=True)
            steps = Steps(np.array([UNKNOWN]), start_ns, end_ns, np.zeros(1, np.bool_))
            events = replace(events, step=np.zeros(len(events), np.int64))
        is_followed = _are_followed(steps)
        if has_steps:
            is_followed &= ~self.recording.precedes_other_work
        return RankEvents(
            trace=self.trace,
            process=self.process,
            device=device,
            rank=self.trace.ranks.get(self.process),
            events=events,
            steps=steps,
            is_followed=is_followed,
            phases=self.phases,
            collective_ranges=self.ranges,
            has_steps=has_steps,
            warmup_steps=0,
            backward=backward,
            step_notes=self.step_notes,
            ranges_left_out=self.ranges_left_out,
            recording=self.recording,
            dependencies=self.dependencies,
            unfinished=self.unfinished,
        )


def _are_followed(steps: Steps) -> Mask:
    """Return for each step whether the next one followed it in the program.

    It did not if its number is further away than usual: steps between them are missing in the trace, as where the
    profiler paused.
    """
    number = steps.number
    by = np.diff(number)
    is_later = (number[1:] != UNKNOWN) & (number[:-1] != UNKNOWN) & (by > 0)
    is_far = is_later & (by > np.median(by[is_later], keepdims=True)) if is_later.any() else is_later
    return np.append(~is_far, False)[: len(steps)]
