"""Rules about all communication: its streams, queues and communicators, and collectives that need not be there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ddp_prof.analyze.collectives.gradients import carry_gradients
from ddp_prof.analyze.collectives.sizes import find_alike_times
from ddp_prof.analyze.collectives.timing import BLOCKING, RankCollectives
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence
from ddp_prof.analyze.doctor.gradients import median_or_zero
from ddp_prof.analyze.kernels.contention_limit import limit_contention_ns
from ddp_prof.analyze.statistics import WORTH
from ddp_prof.columns import by_number, count_noun, milliseconds, size
from ddp_prof.communication import ALL_GATHER, BARRIER, BROADCAST, OPERATIONS, REDUCE_SCATTER
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import NO_TIME, UNKNOWN, Mask

_COMPUTE_STREAM = BLOCKING.index("compute_stream")
_GATHER, _SCATTER = OPERATIONS.index(ALL_GATHER), OPERATIONS.index(REDUCE_SCATTER)
_BROADCAST, _BARRIER = OPERATIONS.index(BROADCAST), OPERATIONS.index(BARRIER)


ON_COMPUTE_STREAM = "communication on the compute stream"


def compute_stream(run: RunEvidence) -> Finding | None:
    """Find communication that runs on the compute stream, where nothing that is launched later can run beside it.

    Found if more than half of the time of communication is on the compute stream.
    """
    total_ns = there_ns = 0
    per_step: list[int] = []
    for rank in run.analysis.ranks:
        timings = rank.timings
        length_ns = timings.end_ns - timings.start_ns
        own_ns = np.where(timings.blocking == _COMPUTE_STREAM, length_ns, 0)
        total_ns, there_ns = total_ns + int(length_ns.sum()), there_ns + int(own_ns.sum())
        per_step += rank.sum_by_step(own_ns)[1].tolist()
    if run.is_cpu or 2 * there_ns <= total_ns:
        return None
    found = [one for one in run.collectives.collectives if one.blocking == "compute_stream"]
    advice = (
        "Launch collectives with async_op=True, or on a stream of their own, and wait where their result is needed."
    )
    if run.is_data_parallel:
        advice = (
            "One process drives all devices, as with torch.nn.DataParallel: DistributedDataParallel has a process for "
            "each, and reduces gradients while backward computes."
        )
    return Finding(
        ON_COMPUTE_STREAM,
        f"{len(found):,} of {len(run.collectives.collectives):,} collectives ran on the stream of compute.",
        advice,
        tuple(dict.fromkeys(one.name for one in found)),
        tuple(sorted({one.step for one in found if one.step is not None})),
        cost_ns=run.cost_ns(per_step),
    )


ONE_COMMUNICATOR = "one communicator serializes gathers and scatters"


def one_communicator(run: RunEvidence) -> Finding | None:
    """Find all-gathers and reduce-scatters that one communicator runs one after the other, though they are independent.

    Found if, in the median step of a rank, gathers and scatters on one stream wait for each other, and some time is
    exposed in the stretches of the stream without a pause in which they do. That time is the most that they can cost:
    waiting beside compute costs nothing.
    """
    if run.is_cpu or run.collectives.reason:
        return None
    found, costs, ranks = 0, [], []
    for rank, exposure in zip(run.analysis.ranks, run.analysis.exposures, strict=True):
        timings = rank.timings
        # Neighbours on a stream of which one gathers and the other scatters: the later one waits from its launch, the
        # end of its input, or the start of the earlier one, until the end of the earlier one.
        rows = np.flatnonzero(np.isin(timings.operation, (_GATHER, _SCATTER)) & (timings.launch_ns != NO_TIME))
        rows = rows[np.lexsort((timings.start_ns[rows], timings.lane[rows]))]
        before, after = rows[:-1], rows[1:]
        is_same = timings.lane[before] == timings.lane[after]
        differs = is_same & (timings.operation[before] != timings.operation[after])
        could_ns = np.maximum(timings.launch_ns, timings.input_ns)[after]
        could_ns = np.maximum(could_ns, timings.start_ns[before])
        queued_ns = np.zeros_like(timings.start_ns)
        queued_ns[after] = np.where(differs, np.maximum(0, timings.end_ns[before] - could_ns), 0)
        # Exposed time counts in the stretches of the stream without a pause in which one waited so. It may be more than
        # they waited: what waits behind an operation whose input is not there could have begun before that one, too.
        follows = is_same & (timings.start_ns[after] - timings.end_ns[before] <= BACK_TO_BACK_NS)
        stretch = np.cumsum(np.append(True, ~follows)[: len(rows)])
        exposed_ns = np.zeros_like(queued_ns)
        exposed_ns[rows] = exposure.exposed_ns[rows] * np.isin(stretch, stretch[queued_ns[rows] > 0])
        per_step = rank.sum_by_step(exposed_ns)[1]
        if len(per_step) and np.median(per_step) > 0:
            found += np.count_nonzero(queued_ns)
            costs += per_step.tolist()
            ranks.append(rank.name)
    if not ranks:
        return None
    cost_ns = run.cost_ns(costs) or 0
    return Finding(
        ONE_COMMUNICATOR,
        f"{found:,} gathers and scatters waited behind one of the other kind on their stream, which exposes at most "
        f"{milliseconds(cost_ns)} {'of a typical step' if run.analysis.has_steps else 'in all'}.",
        "Give all-gathers and reduce-scatters communicators of their own.",
        tuple(ranks),
        cost_ns=cost_ns,
    )


HARDWARE_QUEUE = "single hardware queue"


def hardware_queue(run: RunEvidence) -> Finding | Abstained | None:
    """Find collectives that wait for unrelated operations, as all streams share one hardware queue.

    Found if most collectives of a rank could have begun earlier, but began only when an operation of another stream
    ended, or when an operation that was launched before them began.
    """
    if run.is_cpu or not any(len(rank.timings) for rank in run.analysis.ranks):
        return None
    if not any(facts.could_begin for facts in run.facts):
        reason = run.why_no_dependencies or "it is not known when collectives could have begun"
        return Abstained(HARDWARE_QUEUE, reason)
    # The ranks on which most of the collectives whose earliest begin is known were held up.
    late = [
        (rank.name, facts)
        for rank, facts in zip(run.analysis.ranks, run.facts, strict=True)
        if 2 * facts.serialized > facts.could_begin
    ]
    if not late:
        return None
    serialized, could = (sum(getattr(facts, name) for _, facts in late) for name in ("serialized", "could_begin"))
    return Finding(
        HARDWARE_QUEUE,
        f"{serialized:,} of {could:,} collectives could have begun, but began only when an operation of another stream "
        "ended, or one launched before them began.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more: with 1 all streams share one queue. If it is not "
        "set, kernels that take all multiprocessors may hold collectives up.",
        tuple(name for name, _ in late),
        argument="CUDA_DEVICE_MAX_CONNECTIONS",
        value=8,
    )


NET_GAIN = "overlap without gain"


def net_gain(run: RunEvidence) -> Finding | Abstained | None:
    """Find communication that slows down compute so much that overlapping it gains nothing.

    Found if communication makes the compute beside it longer by at least the time that is overlapped. The loss is
    summed over streams. On a single stream it is always less than the overlapped time, because the compute that was
    done in this time would have taken some time even alone.
    """
    if run.is_cpu:
        return None
    if run.why_no_steps:
        return Abstained(NET_GAIN, run.why_no_steps)
    steps = [step for rank in run.overlap.ranks for step in rank.communicating_steps]
    hidden = median_or_zero([step.overlapped_ns for step in steps if step.overlapped_ns is not None])
    if not hidden:
        return None
    limit_ns = limit_contention_ns([facts.slowdown for facts in run.facts])
    # An upper limit of the loss is fast to compute: if it is less than what is overlapped, overlap gains time.
    if limit_ns is not None and limit_ns < hidden:
        return None
    part = "kernels of {} of {} traces were compared: ".format(*run.compared_files) if run.compared_files else ""
    found = run.contention()
    if found.contention_ns is None:
        return Abstained(NET_GAIN, part + (found.reason or "kernels were not compared"))
    gain = hidden - found.contention_ns
    if gain > 0:
        return Abstained(NET_GAIN, f"{part}in these overlap gains time") if part else None
    return Finding(
        NET_GAIN,
        f"Communication hides {milliseconds(hidden)} in a typical step, and slows compute beside it by "
        f"{milliseconds(found.contention_ns)}: a net gain of {milliseconds(gain)}.",
        "Let collectives take fewer multiprocessors (NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS), or overlap less.",
        tuple(dict.fromkeys(rank.name for rank in run.analysis.ranks if len(rank.timings))),
        cost_ns=-gain,
        argument="NCCL_MAX_CTAS",
    )


TIME_WITHOUT_SIZE = "time does not depend on size"


def time_without_size(run: RunEvidence) -> Finding | Abstained | None:
    """Find communication that bandwidth does not limit, as large messages take as long as small ones.

    Found if the largest messages of an operation take as long as the smallest ones, and more than a hundredth of the
    step is exposed.
    """
    if run.why_no_steps:
        return Abstained(TIME_WITHOUT_SIZE, run.why_no_steps)
    if run.collectives.reason or not run.analysis.has_steps:
        return None
    alike = find_alike_times(run.analysis)
    exposed = [step.exposed_ns or 0 for rank in run.overlap.ranks for step in rank.communicating_steps]
    window = [step.window_ns or 0 for rank in run.overlap.ranks for step in rank.communicating_steps]
    if median_or_zero(exposed) <= WORTH * median_or_zero(window):
        return None
    if not alike:
        sizes = np.concatenate([rank.timings.bytes for rank in run.analysis.ranks])
        return None if (sizes != UNKNOWN).any() else Abstained(TIME_WITHOUT_SIZE, run.why_no_sizes)
    operation = f"{alike.operation.replace('_', '-')}s"
    latency, late_rank = "measure the latency of a small all-reduce.", "Record all ranks and see which arrives late"
    way_out = latency.capitalize() if alike.is_transfer else f"{late_rank} (ddp-prof skew), or {latency}"
    return Finding(
        TIME_WITHOUT_SIZE,
        f"{operation} of {size(alike.small_bytes)} and of {size(alike.large_bytes)} take "
        f"{milliseconds(alike.small_ns)} and {milliseconds(alike.large_ns)} (medians).",
        f"Bandwidth does not limit these messages: neither fewer bytes nor a faster link would shorten them. {way_out}",
    )


BUFFER_BROADCAST = "broadcast in forward"


def buffer_broadcast(run: RunEvidence) -> Finding | Abstained | None:
    """Find broadcasts in forward, as torch's DDP does with the buffers of a model."""
    if run.is_data_parallel:
        return None  # those of the parameters
    return _find_in_most_steps(
        run,
        BUFFER_BROADCAST,
        are_broadcasts_in_forward,
        "If these are the buffers of DistributedDataParallel, broadcast_buffers=False leaves them out: averages of "
        "batch norm then differ between ranks.",
        argument="broadcast_buffers",
        value=False,
    )


def are_broadcasts_in_forward(rank: RankCollectives) -> Mask:
    """Return which collectives are broadcasts that forward launched."""
    found: Mask = (rank.timings.operation == _BROADCAST) & (rank.timings.phase == PHASES.index(FORWARD))
    return found


BARRIER_IN_STEP = "barrier in each step"


def barrier(run: RunEvidence) -> Finding | Abstained | None:
    """Find barriers: all ranks wait for each other and exchange nothing."""
    couples = _reduction_couples_all(run)
    return _find_in_most_steps(
        run,
        BARRIER_IN_STEP,
        are_barriers,
        "Leave dist.barrier() out of steps: the reduction of gradients makes ranks wait for each other already."
        if couples
        else "Leave dist.barrier() out of steps, unless ranks that share no reduction must wait for each other there.",
    )


def are_barriers(rank: RankCollectives) -> Mask:
    """Return which collectives are barriers."""
    found: Mask = rank.timings.operation == _BARRIER
    return found


def _reduction_couples_all(run: RunEvidence) -> bool:
    """Return whether each rank reduces gradients together with all other ranks.

    Where the sizes of groups are not known: whether no rank has subgroups.
    """
    for rank in run.analysis.ranks:
        sizes = rank.timings.group_size[carry_gradients(rank)]
        is_known = bool(len(sizes)) and bool((sizes != UNKNOWN).any()) and rank.world_size is not None
        if not len(sizes) or (sizes.max() < (rank.world_size or 0) if is_known else rank.has_subgroups):
            return False
    return True


def _find_in_most_steps(
    run: RunEvidence,
    rule: str,
    choose: Callable[[RankCollectives], Mask],
    advice: str,
    argument: str | None = None,
    value: bool | None = None,
) -> Finding | Abstained | None:
    """Find collectives that most steps of a rank have, if they are exposed for more than a hundredth of a typical step.

    The finding has no cost: ranks that do not wait for each other in these collectives would wait elsewhere.

    Args:
        run: The run.
        rule: Name of the rule.
        choose: Returns the mask of these among the collectives of a rank.
        advice: What to do about them.
        argument: The setting that the advice changes; ``None`` for none.
        value: Its new value.
    """
    if run.why_no_steps:
        return Abstained(rule, run.why_no_steps)
    if run.collectives.reason or not run.analysis.has_steps:
        return None
    # ``found`` and ``steps``: in how many of how many steps such collectives are, on the ranks that are reported.
    ranks, found, steps, exposed = [], 0, 0, []
    for rank, exposure, overlap in zip(run.analysis.ranks, run.analysis.exposures, run.overlap.ranks, strict=True):
        chosen = choose(rank)
        times = np.count_nonzero(rank.sum_by_step(chosen.astype(np.int64))[1])
        exposed_ns = median_or_zero(rank.sum_by_step(np.where(chosen, exposure.exposed_ns, 0))[1])
        window_ns = median_or_zero([step.window_ns or 0 for step in overlap.communicating_steps])
        if 2 * times > len(rank.step_keys) and exposed_ns > WORTH * window_ns:
            ranks.append(rank.name)
            exposed.append(exposed_ns)
            found, steps = found + times, steps + len(rank.step_keys)
    if not ranks:
        return None
    text = (
        f"{found} of {count_noun(steps, 'step')} {by_number(found, 'has', 'have')} such collectives: "
        f"{milliseconds(max(exposed))} of a typical step are exposed."
    )
    return Finding(rule, text, advice, tuple(ranks), argument=argument, value=value)
