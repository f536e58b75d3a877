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
from ddp_prof.analyze.intervals import Intervals, innermost, union
from ddp_prof.communication import ALL_REDUCE, OPERATIONS, operation_of
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
from ddp_prof.table import fill, positions
from ddp_prof.trace import (
    AUTOGRAD,
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
    """Index into :data:`OPERATIONS` for each name, ``UNKNOWN`` if the name does not tell the operation."""
    code = {UNKNOWN: UNKNOWN}
    for name_id in set(distinct(name_ids)) - {UNKNOWN}:
        operation = operation_of(trace.names[name_id])
        code[name_id] = UNKNOWN if operation is None else OPERATIONS.index(operation)
    return np.array([code[name_id] for name_id in name_ids.tolist()], np.int64)


def bus_factor(operation: str | None, ranks: int | None) -> float | None:
    """The ratio of bus bandwidth to algorithm bandwidth as in nccl-tests; ``None`` if unknown."""
    if ranks is None or ranks < 1:
        return None
    if operation == ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce") else None


GLOO = "gloo:"
"""The prefix of gloo's collectives in torch.profiler."""


@dataclass(frozen=True)
class CollectiveRanges(Table):
    """The ranges around collectives, from the launch to the completion as seen by the host.

    Gloo's own events start later than their launch. ``span`` is a row of the trace's spans, ``operation`` an index into
    :data:`OPERATIONS`, ``named_by`` one into ``Trace.names``: of the range that names the process group.
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

    @property
    def launch_or_start_ns(self) -> Ints:
        return np.where(self.launch_ns == NO_TIME, self.start_ns, self.launch_ns)

    def launched_in(self, launch_ns: Ints) -> Ints:
        """Row of the innermost range that is open at each launch; ``UNKNOWN`` if there is none."""
        return innermost(self.start_ns, self.end_ns, launch_ns)

    def ranges_of_activities(self, trace: Trace, chosen: Mask | Ints) -> Ints:
        """Row of the range in which each chosen activity was launched; ``UNKNOWN`` if it is not communication."""
        row = self.launched_in(take_or_unknown(trace.calls.start_ns, trace.launching_calls[chosen], NO_TIME))
        return np.where(trace.activities.category[chosen] == Category.COMMUNICATION, row, UNKNOWN)


def find_collective_ranges(trace: Trace, process: int, phases: Phases) -> CollectiveRanges:
    """The ranges of ours around collectives of a process, and gloo's own events outside of these."""
    names, mine, spans = parse_ranges(trace.names, *COLLECTIVES), trace.spans.process == process, trace.spans
    span = np.flatnonzero(mine & np.isin(spans.name_id, list(names)))
    marked, gloo = union(spans.start_ns[span], spans.end_ns[span]), span[:0]
    activities = trace.activities
    if not np.any((activities.process == process) & (activities.category == Category.COMMUNICATION)):
        operations = {index: operation_of(name) for index, name in enumerate(trace.names) if name.startswith(GLOO)}
        of_gloo = {index: Range(operation, {}) for index, operation in operations.items() if operation is not None}
        gloo = np.flatnonzero(mine & np.isin(spans.name_id, list(of_gloo)))
        gloo = gloo[~marked.holds(spans.start_ns[gloo])]
        names, span = names | of_gloo, np.union1d(span, gloo)
    name_id = spans.name_id[span]

    def number(key: str) -> Ints:
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
    if len(gloo) and not np.isin(spans.lane[gloo], phases.lane).any():  # threads of gloo take them up
        is_gloo, launch_ns = np.isin(span, gloo), ranges.launch_ns.copy()
        launch_ns[is_gloo] = _find_launches(trace, select(ranges, is_gloo), marked)
        ranges = replace(ranges, launch_ns=launch_ns)
    sizes = np.flatnonzero(mine & np.isin(trace.spans.name_id, list(parse_ranges(trace.names, BUCKETS))))
    return _number_buckets(trace, sizes, phases, ranges) if len(sizes) else ranges


def _recorded_bytes(trace: Trace, span: Ints) -> Ints:
    """The sizes of gloo's own events that the profiler recorded, ``UNKNOWN`` for other ranges."""
    recorded = select(trace.collective_metadata, trace.collective_metadata.activity == UNKNOWN)
    return take_or_unknown(recorded.bytes, positions(recorded.span, len(trace.spans))[span])


def _find_launches(trace: Trace, ranges: CollectiveRanges, marked: Intervals) -> Ints:
    """Launch time of each collective: the start of its torch operator; operators within ``marked`` do not count.

    Gloo's threads take collectives up in the order of the operators. All times are ``NO_TIME`` if the two are not the
    same operations in the same order, for example because the recording began between an operator and its collective.
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
    """Let gloo's collectives of tensors on a GPU begin when their data leaves the GPU.

    The host launches a collective long before the GPU has computed its gradient, if it runs ahead. Gloo then copies the
    data to the host: the first copy that the launching thread launches between this collective and its next one::

        range            [=================]      opened by the host at the launch, closed when gloo is done
        gradient on GPU  ....kkkk.........
        copy to host     ........c........
        communication            ##########

    Returns:
        The ranges, and how many of them have no such copy; these begin at their launch, as before.
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
    taken_up = is_gloo & ~np.isin(lane[is_gloo], phases.lane).any()  # by threads of gloo, which launch copies back
    start_ns, found = ranges.start_ns.copy(), np.zeros(len(ranges), np.bool_)
    for thread in distinct(np.where(taken_up, UNKNOWN, lane)):
        rows = np.flatnonzero(taken_up if thread == UNKNOWN else ~taken_up & (lane == thread))
        rows = rows[np.argsort(ranges.launch_or_start_ns[rows], kind="stable")]
        launched_ns = ranges.launch_or_start_ns[rows]
        by_thread = ~np.isin(calls.lane[call], lane[taken_up]) if thread == UNKNOWN else calls.lane[call] == thread
        copy_ns, copy = calls.start_ns[call[by_thread]], copies[by_thread]
        following = np.searchsorted(copy_ns, launched_ns)  # the first copy after each launch
        following = np.where(following < len(copy), following, UNKNOWN)
        # It counts before the thread's next collective, and before this one ends.
        before_ns = np.minimum(np.append(launched_ns[1:], ranges.end_ns.max(initial=0)), ranges.end_ns[rows])
        has_copy = (following != UNKNOWN) & (take_or_unknown(copy_ns, following, NO_TIME) < before_ns)
        rows, begin_ns = rows[has_copy], activities.start_ns[copy[following[has_copy]]]
        start_ns[rows] = np.clip(begin_ns, launched_ns[has_copy], ranges.end_ns[rows])
        found[rows] = True
    return replace(ranges, start_ns=start_ns), int((~found).sum())


def are_gloo_events(trace: Trace, ranges: CollectiveRanges) -> Mask:
    """Which of these are gloo's own events as recorded by torch.profiler, not ranges of ours."""
    names = [index for index, name in enumerate(trace.names) if name.startswith(GLOO)]
    return np.isin(ranges.name_id, names)


def _number_buckets(trace: Trace, size_spans: Ints, phases: Phases, ranges: CollectiveRanges) -> CollectiveRanges:
    """Give DDP's all-reduces of each backward pass their bucket and size, from the range of sizes before the pass.

    DDP launches its buckets in order, and threads of gloo take them up in that order. ``size_spans`` are the spans
    whose names list the sizes of the buckets. A pass is left as it is if the ranges before it list different sizes.
    """
    bucket, size, named_by, group_size = (
        getattr(ranges, name).copy() for name in ("bucket", "bytes", "named_by", "group_size")
    )
    launch_ns = ranges.launch_or_start_ns
    reduces = np.flatnonzero(ranges.operation == OPERATIONS.index(ALL_REDUCE))
    reduces = reduces[np.lexsort((ranges.start_ns[reduces], launch_ns[reduces]))]
    passes = phases.union_of(BACKWARD_PHASE)
    first, end = (np.searchsorted(launch_ns[reduces], at) for at in (passes.start_ns, passes.end_ns))
    following = np.searchsorted(passes.start_ns, trace.spans.start_ns[size_spans])
    for number in range(len(passes)):
        latest = following[following <= number].max(initial=UNKNOWN)
        name_ids = set(distinct(trace.spans.name_id[size_spans[following == latest]]))
        if len(name_ids) != 1:  # models with different buckets, or of different groups
            continue
        (name_id,) = name_ids
        fields = parse_range(trace.names[name_id])
        sizes = [int(text) for text in (fields.text("bytes") or "").split(",") if text.isdecimal() and len(text) < 19]
        rows = reduces[first[number] : end[number]]
        if len(rows) == len(sizes) + (fields.number("others") or 0):
            bucket[rows[: len(sizes)]], size[rows[: len(sizes)]] = np.arange(len(sizes)), sizes
            if fields.text("group"):
                named_by[rows], group_size[rows] = name_id, fields.number("ranks") or UNKNOWN
    return replace(ranges, bucket=bucket, bytes=size, named_by=named_by, group_size=group_size)


BACKWARD_PHASE, OPTIMIZER_PHASE = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)
SYNCHRONIZE_PHASE = PHASES.index(SYNCHRONIZE)


@dataclass(frozen=True)
class Events(Table):
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


def device_events(
    trace: Trace, process: int, steps: Steps, phases: Phases, launchers: frozenset[int], computing: frozenset[int]
) -> tuple[Events, str]:
    """All events of a process's devices, and how backward was found: ``ranges``, ``inferred`` or ``none``.

    If no range marks backward, it is what autograd's threads launched, except inside an optimizer's range on the same
    thread, as in a gradient hook. On another thread that range may contain all of backward:
    ``optimizer.step(closure)``. ``launchers`` are the threads that launch collectives, ``computing`` those that launch
    compute.
    """
    mine = trace.activities.process == process
    activities, call = select(trace.activities, mine), trace.launching_calls[mine]
    launch_ns = take_or_unknown(trace.calls.start_ns, call, NO_TIME)
    launcher = take_or_unknown(trace.calls.lane, call)
    phase, backward = phases.kind_at(launch_ns), "ranges"
    if BACKWARD_PHASE not in phases.kind:
        autograd = _autograd_threads(trace, process, steps, launchers, computing)
        by_autograd = np.isin(launcher, autograd)
        in_hook = select(phases, np.isin(phases.lane, autograd)).kind_at(launch_ns) == OPTIMIZER_PHASE
        phase[by_autograd & ~in_hook] = BACKWARD_PHASE
        backward = "inferred" if by_autograd.any() else "none"
    events = Events(
        start_ns=activities.start_ns,
        end_ns=activities.end_ns,
        lane=activities.lane,
        category=activities.category,
        step=steps.index_at(launch_ns),
        phase=phase,
        activity=np.flatnonzero(mine),
        launch_ns=launch_ns,
        launcher=launcher,
    )
    return events, backward


def host_events(ranges: CollectiveRanges, steps: Steps, phases: Phases, operators: Operators | None = None) -> Events:
    """Compute and communication of a CPU run.

    Compute is the operators if they are passed, else the phases. Operators that autograd's engine runs belong to
    backward even outside of its range. What runs in this range after the engine's last one does not: DDP waits there
    for its collectives, and copies the gradients out of their buckets.
    """
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
        if OPTIMIZER_PHASE in within:
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
    """The rest of each range of backward after the last operator of autograd's engine in it, if it has one."""
    order = np.argsort(engine.start_ns, kind="stable")
    first, behind = (np.searchsorted(engine.start_ns[order], at) for at in (passes.start_ns, passes.end_ns))
    latest_ns = np.maximum.accumulate(engine.end_ns[order])
    ran = behind > first
    return union(np.minimum(latest_ns[behind[ran] - 1], passes.end_ns[ran]), passes.end_ns[ran])


def host_communication(ranges: CollectiveRanges, steps: Steps, phases: Phases) -> Events:
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


def last_by_step(time_ns: Ints, step: Ints, steps: int) -> Ints:
    """The latest time of each step, ``NO_TIME`` if it has none."""
    last = np.full(steps + 1, NO_TIME, np.int64)  # events of no step (UNKNOWN is -1) go to the additional last element
    np.maximum.at(last, step, time_ns)
    return last[:-1]


def _autograd_threads(
    trace: Trace, process: int, steps: Steps, launchers: frozenset[int], computing: frozenset[int]
) -> list[int]:
    """Autograd's threads by their names; if none has such a name, the launchers other than the main threads.

    A thread that launches collectives but no compute belongs to a communication library, such as Horovod. If neither
    steps nor names tell the main thread, threads that launch all compute are not autograd's: others launch forward.
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
