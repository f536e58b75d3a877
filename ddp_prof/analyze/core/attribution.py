"""The events of a rank, each with its step and phase: GPU and CPU captures are both measured in this form.

On a GPU an event is an activity; its step and phase are those in which it was launched, *on any thread*: autograd
launches the kernels of backward from threads of its own. On a CPU (gloo) there are no activities: communication is our
ranges around collectives, or gloo's own events as torch.profiler records them; compute is the phases without
``synchronize``, or torch's operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddp_prof.analyze.core.steps import Phases, Steps
from ddp_prof.analyze.core.unlaunched import find_unlaunched
from ddp_prof.analyze.intervals import Intervals, innermost, union
from ddp_prof.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GLOO,
    OPERATIONS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCTIONS,
    operation_of,
)
from ddp_prof.growing_column import in_parts
from ddp_prof.range_names import (
    BACKWARD,
    BUCKETS,
    COLLECTIVES,
    FORWARD,
    OPTIMIZER,
    PHASES,
    SYNCHRONIZE,
    Range,
    parse_range,
    parse_ranges,
)
from ddp_prof.table import fill, is_in, positions, row_numbers, rows_of, take_in_parts
from ddp_prof.trace import (
    AUTOGRAD,
    NEVER,
    NO_TIME,
    UNKNOWN,
    Category,
    Ints,
    Kind,
    Mask,
    Operators,
    Table,
    Trace,
    concatenate,
    distinct,
    select,
    take_or_unknown,
)


def find_operations(trace: Trace, name_ids: Ints) -> Ints:
    """Return the operation of each name as an index into :data:`OPERATIONS`; ``UNKNOWN`` if the name does not tell it.

    ``name_ids`` are indices into ``trace.names``, or ``UNKNOWN``.
    """
    code = {UNKNOWN: UNKNOWN}
    for name_id in set(distinct(name_ids)) - {UNKNOWN}:
        operation = operation_of(trace.names[name_id])
        code[name_id] = UNKNOWN if operation is None else OPERATIONS.index(operation)
    return np.array([code[name_id] for name_id in name_ids.tolist()], np.int64)


MAY_REDUCE = (UNKNOWN, *map(OPERATIONS.index, REDUCTIONS))
"""Operations that may add values up, as indices into :data:`OPERATIONS`.

An unknown one may do so: names of RCCL's kernels, and of NCCL's generic kernel, tell none.
"""


def bus_factor(operation: str | None, ranks: int | None) -> float | None:
    """Return the ratio of bus bandwidth to algorithm bandwidth as in nccl-tests; ``None`` if it is not known.

    ``ranks`` is the number of ranks that take part.
    """
    if ranks is None or ranks < 1:
        return None
    if operation == ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if operation in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        return (ranks - 1) / ranks
    return 1.0 if operation in (BROADCAST, REDUCE) else None


class Launched:
    """Base of tables of what the host launches; ``launch_ns`` is ``NO_TIME`` if the launch is not known."""

    start_ns: Ints
    launch_ns: Ints

    @property
    def launch_or_start_ns(self) -> Ints:
        """The launch of each row, or its start if the launch is not known."""
        return np.where(self.launch_ns == NO_TIME, self.start_ns, self.launch_ns)


@dataclass(frozen=True)
class CollectiveRanges(Table, Launched):
    """The host's ranges around collectives, one per row, from the launch to the completion as the host sees it.

    Attributes:
        span: Row of the trace's spans.
        launch_ns, start_ns: Both are the start of the range. Gloo's own events may start later than their launch, which
            is ``NO_TIME`` if it is not known.
        name_id: Index of the range's name in ``Trace.names``.
        operation: Index into :data:`OPERATIONS`.
        bucket: Number of DDP's bucket; ``UNKNOWN`` if not known or not a bucket.
        bytes: Size of the data; ``UNKNOWN`` if not known.
        named_by: Index in ``Trace.names`` of the name that tells the process group; ``UNKNOWN`` if none does.
        group_size: Number of ranks of the process group; ``UNKNOWN`` if not known.
    """

    span: Ints
    launch_ns: Ints
    start_ns: Ints
    end_ns: Ints
    name_id: Ints
    operation: Ints
    bucket: Ints
    bytes: Ints
    named_by: Ints
    group_size: Ints

    def launched_in(self, launch_ns: Ints) -> Ints:
        """Return the row of the innermost range that is open at each time; ``UNKNOWN`` if there is none."""
        return innermost(self.start_ns, self.end_ns, launch_ns)

    def ranges_of_activities(self, trace: Trace, chosen: Mask | Ints) -> Ints:
        """Return the row of the range in which each chosen activity was launched.

        ``UNKNOWN`` if the activity is not communication, or if no range was open at its launch.
        """
        row = self.launched_in(take_or_unknown(trace.calls.start_ns, trace.launching_calls[chosen], NO_TIME))
        return np.where(trace.activities.category[chosen] == Category.COMMUNICATION, row, UNKNOWN)


def find_collective_ranges(trace: Trace, process: int, phases: Phases) -> CollectiveRanges:
    """Return the ranges around the collectives of a process.

    These are the ranges that ddp_prof makes and, if no device of the process communicates, gloo's own events outside of
    ddp_prof's ranges.
    """
    names, mine, spans = parse_ranges(trace.names, *COLLECTIVES), trace.spans.process == process, trace.spans
    span = np.flatnonzero(mine & is_in(spans.name_id, names))
    marked, gloo = union(spans.start_ns[span], spans.end_ns[span]), span[:0]
    activities = trace.activities
    if not np.any((activities.process == process) & (activities.category == Category.COMMUNICATION)):
        operations = {index: operation_of(trace.names[index]) for index in gloo_names(trace)}
        of_gloo = {index: Range(operation, {}) for index, operation in operations.items() if operation is not None}
        gloo = np.flatnonzero(mine & is_in(spans.name_id, of_gloo))
        gloo = gloo[~marked.holds(spans.start_ns[gloo])]
        names, span = names | of_gloo, np.union1d(span, gloo)
    name_id = spans.name_id[span]

    def number(key: str) -> Ints:
        """Return the number in this field of each range's name; ``UNKNOWN`` if the name has no such field."""
        known = {index: parsed.number(key) for index, parsed in names.items()}
        values = [known[index] for index in name_id.tolist()]
        return np.array([UNKNOWN if value is None else value for value in values], np.int64)

    operation = [OPERATIONS.index(names[index].name) for index in name_id.tolist()]
    ranges = CollectiveRanges(
        span=span,
        launch_ns=spans.start_ns[span],
        start_ns=spans.start_ns[span],
        end_ns=spans.end_ns[span],
        name_id=name_id,
        operation=np.array(operation, np.int64),
        bucket=number("bucket"),
        bytes=np.where(np.isin(span, gloo), _recorded_bytes(trace, span), number("bytes")),
        named_by=np.where(
            np.isin(name_id, [index for index, name in names.items() if name.text("group")]), name_id, UNKNOWN
        ),
        group_size=number("ranks"),
    )
    # Events of gloo on threads without phases were recorded by gloo's own threads, which start collectives late.
    if len(gloo) and not np.isin(spans.lane[gloo], phases.lane).any():
        is_gloo, launch_ns = np.isin(span, gloo), ranges.launch_ns.copy()
        launch_ns[is_gloo] = _find_launches(trace, select(ranges, is_gloo), marked)
        ranges = replace(ranges, launch_ns=launch_ns)
    sizes = np.flatnonzero(mine & is_in(trace.spans.name_id, parse_ranges(trace.names, BUCKETS)))
    return _number_buckets(trace, sizes, phases, ranges) if len(sizes) else ranges


def _recorded_bytes(trace: Trace, span: Ints) -> Ints:
    """Return the size in bytes that the profiler recorded for each span; ``UNKNOWN`` if it recorded none.

    It records sizes only for gloo's own events. ``span`` are rows of the trace's spans.
    """
    recorded = select(trace.collective_metadata, trace.collective_metadata.activity == UNKNOWN)
    return take_or_unknown(recorded.bytes, positions(recorded.span, len(trace.spans))[span])


def _find_launches(trace: Trace, ranges: CollectiveRanges, marked: Intervals) -> Ints:
    """Return when each of gloo's collectives was launched: the start of the torch operator that called it.

    Gloo's threads start the collectives in the order of the operators. All results are ``NO_TIME`` if the operators and
    the collectives are not the same operations in the same order, for example because the recording began between an
    operator and its collective. Operators that start within ``marked``, the ranges of ddp_prof, do not count.
    """
    calls, launch_ns = trace.collective_calls, np.full(len(ranges), NO_TIME, np.int64)
    operation = find_operations(trace, calls.name_id)
    rows = np.argsort(calls.start_ns, kind="stable")
    rows = rows[(operation[rows] != UNKNOWN) & ~marked.holds(calls.start_ns[rows])]
    order = np.argsort(ranges.start_ns, kind="stable")
    is_same_order = np.array_equal(operation[rows], ranges.operation[order])
    if is_same_order and np.all(calls.start_ns[rows] <= ranges.start_ns[order]):
        launch_ns[order] = calls.start_ns[rows]
    return launch_ns


def begin_with_copies(trace: Trace, ranges: CollectiveRanges, phases: Phases) -> tuple[CollectiveRanges, int]:
    """Return the ranges with gloo's collectives of tensors on a GPU beginning when their data leaves the GPU.

    A host that runs ahead launches a collective long before the GPU has computed the gradient. Gloo then copies the
    data to the host. This copy is the first one that the launching thread launches between this collective and the
    thread's next one::

        range            [=================]      opened by the host at the launch, closed when gloo is done
        gradient on GPU  ....kkkk.........
        copy to host     ........c........
        communication            ##########       from the copy to the end of the range

    Returns:
        The ranges, and how many of them have no such copy; their start is not changed.
    """
    if not len(ranges):
        return ranges, 0
    activities, calls = trace.activities, trace.calls
    process = trace.spans.process[ranges.span[:1]]
    copies = np.flatnonzero(
        (activities.kind == Kind.COPY) & (activities.process == process) & (trace.launching_calls != UNKNOWN)
    )
    call = trace.launching_calls[copies]
    copies, call = (column[np.argsort(calls.start_ns[call], kind="stable")] for column in (copies, call))
    lane, is_gloo = trace.spans.lane[ranges.span], are_gloo_events(trace, ranges)
    # Whether gloo's own threads ran the collectives. Their launching thread is then not known, and copies that gloo's
    # threads launch do not count, as these copy results back to the GPU.
    taken_up = is_gloo & ~np.isin(lane[is_gloo], phases.lane).any()
    start_ns, found = ranges.start_ns.copy(), np.zeros(len(ranges), np.bool_)
    for thread in distinct(np.where(taken_up, UNKNOWN, lane)):  # UNKNOWN: all collectives on gloo's threads
        rows = np.flatnonzero(taken_up if thread == UNKNOWN else ~taken_up & (lane == thread))
        rows = rows[np.argsort(ranges.launch_or_start_ns[rows], kind="stable")]
        launched_ns = ranges.launch_or_start_ns[rows]
        by_thread = ~np.isin(calls.lane[call], lane[taken_up]) if thread == UNKNOWN else calls.lane[call] == thread
        copy_ns, copy = calls.start_ns[call[by_thread]], copies[by_thread]
        following = np.searchsorted(copy_ns, launched_ns)  # the first copy after each launch
        following = np.where(following < len(copy), following, UNKNOWN)
        # The copy counts if it was launched before the thread's next collective, and before this one ends.
        before_ns = np.minimum(np.append(launched_ns[1:], ranges.end_ns.max(initial=0)), ranges.end_ns[rows])
        has_copy = (following != UNKNOWN) & (take_or_unknown(copy_ns, following, NO_TIME) < before_ns)
        rows, begin_ns = rows[has_copy], activities.start_ns[copy[following[has_copy]]]
        start_ns[rows] = np.clip(begin_ns, launched_ns[has_copy], ranges.end_ns[rows])
        found[rows] = True
    return replace(ranges, start_ns=start_ns), int((~found).sum())


def are_gloo_events(trace: Trace, ranges: CollectiveRanges) -> Mask:
    """Return which of the ranges are gloo's own events, recorded by torch.profiler, and not ranges of ddp_prof."""
    return np.isin(ranges.name_id, gloo_names(trace))


def gloo_names(trace: Trace) -> list[int]:
    """Return the indices of the names of gloo's own events, which torch.profiler records."""
    return [index for index, name in enumerate(trace.names) if name.startswith(GLOO)]


@dataclass(frozen=True)
class _Buckets:
    """What a range tells of a model's buckets: their sizes in bytes, and what is reduced after them."""

    sizes: list[int]
    others: int
    other_bytes: int | None
    is_of_group: bool
    ranks: int


def _tell_buckets(name: str) -> _Buckets:
    """Return what the name of a range tells of buckets."""
    fields = parse_range(name)
    sizes = [int(text) for text in (fields.text("bytes") or "").split(",") if text.isdecimal() and len(text) < 19]
    others, ranks = fields.number("others") or 0, fields.number("ranks") or UNKNOWN
    return _Buckets(sizes, others, fields.number("other_bytes"), bool(fields.text("group")), ranks)


def _number_buckets(trace: Trace, size_spans: Ints, phases: Phases, ranges: CollectiveRanges) -> CollectiveRanges:
    """Return the ranges with the bucket number and size of DDP's all-reduces in each backward pass.

    The sizes come from the last range before the pass whose name lists the sizes of all buckets. DDP launches its
    buckets in order, and threads of gloo start them in that order. Of several models, as a generator and a
    discriminator, the one with as many buckets as the pass has all-reduces is meant. A pass stays unchanged if none
    has as many, or more than one.

    - ``size_spans``: Rows of the trace's spans whose names list the sizes.
    """
    bucket, size, named_by, group_size = (
        getattr(ranges, name).copy() for name in ("bucket", "bytes", "named_by", "group_size")
    )
    launch_ns = ranges.launch_or_start_ns
    reduces = np.flatnonzero(ranges.operation == OPERATIONS.index(ALL_REDUCE))
    reduces = reduces[np.lexsort((ranges.start_ns[reduces], launch_ns[reduces]))]
    # reduces[first:end] are the all-reduces launched in each pass; `following` is the pass after each list of sizes.
    passes = phases.union_of(BACKWARD_PHASE)
    first, end = (np.searchsorted(launch_ns[reduces], at) for at in (passes.start_ns, passes.end_ns))
    following = np.searchsorted(passes.start_ns, trace.spans.start_ns[size_spans])
    name_ids = trace.spans.name_id[size_spans]
    told = {name_id: _tell_buckets(trace.names[name_id]) for name_id in distinct(name_ids)}
    for number in range(len(passes)):
        latest = following[following <= number].max(initial=UNKNOWN)
        rows = reduces[first[number] : end[number]]
        latest_told = [(name_id, told[name_id]) for name_id in distinct(name_ids[following == latest])]
        fitting = [(name_id, one) for name_id, one in latest_told if len(one.sizes) + one.others == len(rows)]
        if len(fitting) != 1:  # else models with as many buckets, or equal ones of different groups
            continue
        ((name_id, one),) = fitting
        bucket[rows[: len(one.sizes)]], size[rows[: len(one.sizes)]] = np.arange(len(one.sizes)), one.sizes
        if one.other_bytes is not None:
            size[rows[len(one.sizes) :]] = one.other_bytes
        if one.is_of_group:
            named_by[rows], group_size[rows] = name_id, one.ranks
    return replace(ranges, bucket=bucket, bytes=size, named_by=named_by, group_size=group_size)


BACKWARD_PHASE, OPTIMIZER_PHASE = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)
SYNCHRONIZE_PHASE = PHASES.index(SYNCHRONIZE)


@dataclass(frozen=True)
class Events(Table, Launched):
    """Events of one rank. On a CPU, ``lane`` (the stream), ``activity`` and ``launcher`` are ``UNKNOWN``.

    Attributes:
        step: Index into the rank's steps, ``UNKNOWN`` outside of all steps.
        phase: Index into ``range_names.PHASES``, ``UNKNOWN`` outside of all phases.
        activity: Row of the trace's activities.
        launch_ns: When the host launched it, ``NO_TIME`` if not recorded.
        launcher: The thread that launched it.
    """

    start_ns: Ints
    end_ns: Ints
    lane: Ints
    category: Ints
    step: Ints
    phase: Ints
    activity: Ints
    launch_ns: Ints
    launcher: Ints

    def union_of(self, category: Category) -> Intervals:
        """Return when any event of this category ran."""
        rows = np.flatnonzero(self.category == category)
        return union(self.start_ns[rows], self.end_ns[rows])


def device_events(
    trace: Trace, process: int, steps: Steps, phases: Phases, launchers: frozenset[int], computing: frozenset[int]
) -> tuple[Events, str]:
    """Return all events of a process's devices, and how backward was found: ``ranges``, ``inferred`` or ``none``.

    If no range marks backward, the operations that autograd's threads launched are backward's, except inside an
    optimizer's range on the same thread, which runs in a gradient hook. An optimizer's range on another thread may
    contain all of backward, as in ``optimizer.step(closure)``, and is ignored.

    - ``launchers``: The threads that launch collectives.
    - ``computing``: The threads that launch compute.
    """
    mine = trace.activities.process == process
    own = rows_of(mine)
    activities, call = select(trace.activities, mine), trace.launching_calls[own]
    launch_ns = take_in_parts(trace.calls.start_ns, call, NO_TIME)
    launcher = take_in_parts(trace.calls.lane, call)
    # The phase whose range was open at the launch, on any thread; if no range marks backward, by the launching thread.
    step, phase, backward = steps.index_at(launch_ns), phases.kind_at(launch_ns), "ranges"
    if len(unlaunched := find_unlaunched(trace, process)):
        rows = unlaunched.activity if isinstance(own, slice) else np.searchsorted(own, unlaunched.activity)
        step, phase, launcher = step.copy(), phase.copy(), launcher.copy()
        step[rows], launcher[rows] = unlaunched.steps_of(steps), unlaunched.caller
        phase[rows] = take_or_unknown(phases.kind, unlaunched.phases_of(phases))
    if BACKWARD_PHASE not in phases.kind:
        autograd = _autograd_threads(trace, process, steps, launchers, computing)
        by_autograd = is_in(launcher, autograd)
        in_hook = select(phases, np.isin(phases.lane, autograd)).kind_at(launch_ns) == OPTIMIZER_PHASE
        found, is_backward = phase, by_autograd & ~in_hook
        phase = in_parts(len(found), lambda rows: np.where(is_backward[rows], BACKWARD_PHASE, found[rows]))
        backward = "inferred" if by_autograd.any() else "none"
    events = Events(
        start_ns=activities.start_ns,
        end_ns=activities.end_ns,
        lane=activities.lane,
        category=activities.category,
        step=step,
        phase=phase,
        activity=row_numbers(len(mine)) if isinstance(own, slice) else own,
        launch_ns=launch_ns,
        launcher=launcher,
    )
    return events, backward


def host_events(ranges: CollectiveRanges, steps: Steps, phases: Phases, operators: Operators | None = None) -> Events:
    """Return the compute and communication events of a CPU run.

    Compute is the time of torch's operators if they are passed, else the time in the phases other than ``synchronize``.
    Operators that autograd's engine runs belong to backward even outside of a range of backward. Operators that run in
    such a range after the engine's last operator do not belong to backward: DDP waits there for its collectives, and
    copies the gradients out of their buckets.
    """
    # `within` holds for each phase when the host computes in it; the key UNKNOWN is compute outside of all phases.
    within = {kind: phases.innermost_of(kind) for kind in range(len(PHASES))}
    if operators is None:
        del within[SYNCHRONIZE_PHASE]
    else:
        backward, waiting = select(operators, operators.is_backward == 1), phases.union_of(SYNCHRONIZE_PHASE)
        # While the host waits, only operators that began during the wait compute. One that began earlier, such as the
        # backward pass of a checkpoint, merely contains the wait.
        own = select(operators, waiting.holds(operators.start_ns))
        computing = union(operators.start_ns, operators.end_ns) - waiting | union(own.start_ns, own.end_ns) & waiting
        # An optimizer that contains forward runs a closure, and the backward in it is not the optimizer's.
        engine = union(backward.start_ns, backward.end_ns)
        forwards = np.sort(phases.start_ns[phases.kind == PHASES.index(FORWARD)])
        begun, ended = (np.searchsorted(forwards, at) for at in (phases.start_ns, phases.end_ns))
        is_closure = (phases.kind == OPTIMIZER_PHASE) & (ended > begun)
        in_phases = union(phases.start_ns[~is_closure], phases.end_ns[~is_closure])
        if OPTIMIZER_PHASE in within:  # the engine's operators in a closure are not the optimizer's
            within[OPTIMIZER_PHASE] -= engine - in_phases
        within = {kind: instants & computing for kind, instants in within.items()}
        followers = within[BACKWARD_PHASE] & _after_engine(select(phases, phases.kind == BACKWARD_PHASE), backward)
        within[BACKWARD_PHASE] = (within[BACKWARD_PHASE] - followers) | (engine - in_phases)
        within[UNKNOWN] = (computing - union(phases.start_ns, phases.end_ns) - within[BACKWARD_PHASE]) | followers
    start_ns = np.concatenate([busy.start_ns for busy in within.values()])
    computed = fill(
        Events,
        len(start_ns),
        start_ns=start_ns,
        end_ns=np.concatenate([busy.end_ns for busy in within.values()]),
        category=np.full(len(start_ns), Category.COMPUTE, np.int64),
        step=steps.index_at(start_ns),
        phase=np.repeat([*within], [len(busy) for busy in within.values()]),
        launch_ns=start_ns,
    )
    return concatenate(host_communication(ranges, steps, phases), computed)


def _after_engine(passes: Phases, engine: Operators) -> Intervals:
    """Return the time in ranges of backward after the last operator of autograd's engine that began in the range.

    Ranges in which no such operator began contribute nothing.
    """
    order = np.argsort(engine.start_ns, kind="stable")
    first, behind = (np.searchsorted(engine.start_ns[order], at) for at in (passes.start_ns, passes.end_ns))
    latest_ns = np.maximum.accumulate(engine.end_ns[order])
    ran = behind > first
    return union(np.minimum(latest_ns[behind[ran] - 1], passes.end_ns[ran]), passes.end_ns[ran])


def host_communication(ranges: CollectiveRanges, steps: Steps, phases: Phases) -> Events:
    """Return the ranges around collectives as events, with the step and phase in which each was launched."""
    return fill(
        Events,
        len(ranges),
        start_ns=ranges.start_ns,
        end_ns=ranges.end_ns,
        category=np.full(len(ranges), Category.COMMUNICATION, np.int64),
        step=steps.index_at(ranges.launch_or_start_ns),
        phase=phases.kind_at(ranges.launch_or_start_ns),
        launch_ns=ranges.launch_ns,
    )


def first_by_step(time_ns: Ints, step: Ints, steps: int) -> Ints:
    """Return the earliest time of each of ``steps`` steps, ``NEVER`` if a step has none."""
    first = np.full(steps + 1, NEVER)  # events of no step (UNKNOWN is -1) go to the additional last element
    np.minimum.at(first, step, time_ns)
    return first[:-1]


def last_by_step(time_ns: Ints, step: Ints, steps: int) -> Ints:
    """Return the latest time of each of ``steps`` steps, ``NO_TIME`` if a step has none."""
    last = np.full(steps + 1, NO_TIME, np.int64)  # events of no step (UNKNOWN is -1) go to the additional last element
    np.maximum.at(last, step, time_ns)
    return last[:-1]


def _autograd_threads(
    trace: Trace, process: int, steps: Steps, launchers: frozenset[int], computing: frozenset[int]
) -> list[int]:
    """Return the threads of autograd's engine in a process.

    These are the threads with autograd's name. If the trace does not name autograd's threads, they are the threads that
    launch both collectives and compute, without the main threads. A thread that launches collectives but no compute
    belongs to a communication library, such as Horovod. If neither steps nor names tell the main thread, and these
    threads launch all compute, none of them is autograd's, because some other thread must launch forward.
    """
    named = [lane for (pid, lane), name in trace.threads.items() if pid == process and name.startswith(AUTOGRAD)]
    if named or trace.names_autograd:
        return named
    # Main threads open the ranges of steps. Without steps, the main thread is the one that opens most ranges.
    mine = trace.spans.process == process
    step = steps.index_at(trace.spans.start_ns)
    opens_one = (step != UNKNOWN) & (take_or_unknown(steps.start_ns, step) == trace.spans.start_ns)
    openers = trace.spans.lane[mine & opens_one]
    lanes, counts = np.unique(trace.spans.lane[mine], return_counts=True)
    busiest = lanes[counts == counts.max(initial=0)]
    main = {UNKNOWN, *(openers if len(openers) else np.append(busiest, process)).tolist()}
    found = (launchers & computing) - main
    return sorted(found) if len(openers) or computing - found else []
