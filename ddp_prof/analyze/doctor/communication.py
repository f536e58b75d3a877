"""Rules about streams, queues and communicators, and about how gradients are put into collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from ddp_prof.analyze.collectives.sizes import count_equal_passes, find_alike_times
from ddp_prof.analyze.collectives.timing import (
    BLOCKING,
    RankCollectives,
    are_many_and_small,
    are_votes,
    carry_gradients,
)
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.doctor.bucket_size import OF_MANY, OF_ONE, bucket_cap_mb
from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence, median_or_zero
from ddp_prof.analyze.kernels.contention_limit import limit_contention_ns
from ddp_prof.analyze.statistics import WORTH
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES
from ddp_prof.columns import by_number, capitalized, count_noun, milliseconds, percent, size
from ddp_prof.communication import ALL_GATHER, BARRIER, BROADCAST, OPERATIONS, POINT_TO_POINT, REDUCE, REDUCE_SCATTER
from ddp_prof.range_names import FORWARD, PHASES
from ddp_prof.table import NO_TIME, UNKNOWN, Mask, select

_AFTER_BACKWARD, _COMPUTE_STREAM = BLOCKING.index("after_backward"), BLOCKING.index("compute_stream")
_GATHER, _SCATTER = OPERATIONS.index(ALL_GATHER), OPERATIONS.index(REDUCE_SCATTER)
_TO_ONE_RANK, _SEND_RECV = OPERATIONS.index(REDUCE), OPERATIONS.index(POINT_TO_POINT)
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


def are_broadcasts_in_forward(rank: RankCollectives) -> Mask:
    """Return which collectives are broadcasts that forward launched."""
    found: Mask = (rank.timings.operation == _BROADCAST) & (rank.timings.phase == PHASES.index(FORWARD))
    return found


def are_barriers(rank: RankCollectives) -> Mask:
    """Return which collectives are barriers."""
    found: Mask = rank.timings.operation == _BARRIER
    return found


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


REPEATED_REDUCTION = "buckets reduced several times"


def repeated_reduction(run: RunEvidence) -> Finding | Abstained | None:
    """Find buckets that are reduced several times per step, as when gradients are accumulated without ``no_sync``.

    Found if most steps that reduce gradients repeat the same sequence of buckets, such as 0, 1, 2, 0, 1, 2; where
    buckets have no numbers, if all passes of backward of a step reduce the same sequence of sizes. Not found if an
    optimizer updates parameters in between, as where a step trains two models.
    """
    gradients = run.gradients
    if run.why_no_steps:
        return Abstained(REPEATED_REDUCTION, run.why_no_steps)
    if not len(gradients):
        return None
    columns = (gradients.bucket, gradients.bytes, gradients.backward_end_ns, gradients.updates)
    split = zip(*(np.split(one, gradients.first[1:]) for one in columns), strict=True)
    of_steps = [[one.tolist() for one in of_step] for of_step in split]
    times = np.array([_count_turns(*of_step) for of_step in of_steps])
    chosen = times > 1  # ``times``: for each step, how often it repeats its buckets
    if 2 * np.count_nonzero(chosen) <= len(times):
        is_undecided = 2 * sum(_may_repeat(*of_step) for of_step in of_steps) > len(times)
        return Abstained(REPEATED_REDUCTION, _why_no_sizes(run)) if is_undecided else None
    repeated = gradients.of_units(chosen)
    usual = median_or_zero(times[chosen])
    spared_ns = repeated.cost_ns * (times[chosen] - 1) // times[chosen]
    cost_ns = None if run.collectives.reason else run.cost_ns(spared_ns.tolist())
    spared = "no_sync()"
    beyond = " Their copies into and out of buckets, and what they slow, are left out, too, and not in the bound."
    if repeated.are_sharded:
        spared = "set_requires_gradient_sync(False) of fully_shard, or no_sync() of FullyShardedDataParallel,"
    # Two models of equal sizes, as the generators of a CycleGAN, reduce buckets of equal numbers in one pass.
    are_in_one_pass = any(len(set(one[2])) < turns for one, turns in zip(of_steps, times.tolist(), strict=True))
    of_one_model = ", if all of these are buckets of one model" if are_in_one_pass else ""
    if UNKNOWN in repeated.bucket:
        of_one_model = ", if its passes of backward, which reduce the same sizes, are of one model"
    return Finding(
        REPEATED_REDUCTION,
        f"In {np.count_nonzero(chosen)} of {len(times)} steps each bucket is reduced several times, typically {usual}"
        f"{of_one_model}.",
        f"If the step accumulates gradients, {spared} around forward and backward of all micro-batches but the last "
        f"leaves the other reductions out.{'' if cost_ns is None else beyond}",
        *run.where(repeated),
        cost_ns=cost_ns,
    )


def _count_turns(numbers: list[int], sizes: list[int], pass_ends_ns: list[int], updates: list[int]) -> int:
    """Return how often a step repeats the same sequence of buckets; 1 if it repeats none, or that is not known.

    Args:
        numbers: Number of the bucket of each collective, in order.
        sizes: Its bytes.
        pass_ends_ns: The end of the compute of its pass of backward.
        updates: Its :attr:`.CollectiveTimings.updates`.
    """
    if UNKNOWN in numbers:
        return count_equal_passes(pass_ends_ns, sizes, updates)
    if len(set(updates)) > 1:
        return 1
    buckets = list(zip(numbers, sizes, strict=True))
    different = len(dict.fromkeys(buckets))
    turns, rest = divmod(len(buckets), different)
    return turns if not rest and buckets == buckets[:different] * turns else 1


def _may_repeat(numbers: list[int], sizes: list[int], pass_ends_ns: list[int], updates: list[int]) -> bool:
    """Return whether a step's passes of backward reduce equally often, and neither numbers nor sizes tell what.

    The arguments are those of :func:`_count_turns`.
    """
    if UNKNOWN not in numbers or UNKNOWN not in sizes or NO_TIME in pass_ends_ns or len(set(updates)) > 1:
        return False
    of_passes = Counter(pass_ends_ns)
    return len(of_passes) > 1 and len(set(of_passes.values())) == 1


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


_MOSTLY_EXPOSED = 0.5
"""A collective is mostly exposed if more than this fraction of its duration is."""
_LATE, _LEAST_BUCKETS = 0.8, 3
"""The first bucket is late if launched after this fraction of backward; passes with fewer buckets do not count."""
_SIZES_BY_PROFILER = "torch.profiler writes them for NCCL with PyTorch 2.2 and later, if it records the CPU, too"
_SIZES_BY_NSYS = "NCCL 2.16 and later tells them to nsys, and 'nsys export --include-json=true' keeps them"
_SIZES_OF_GLOO_BY_PROFILER = (
    "torch.profiler writes them for gloo with record_shapes=True; 'ddp-prof capture', which does not set it, marks the "
    "buckets of DDP by --profiler nsys"
)
_NO_SIZES_IN_GRAPHS = (
    "the trace does not tell the sizes of collectives that a CUDA graph launches: record some steps without graphs, "
    "or, with PyTorch later than 2.13, export by export_chrome_trace(cuda_graph_annotations=...)"
)
_SIZES_OF_GLOO_BY_NSYS = "nsys records none of gloo, but ddp_prof.annotate.instrument(model) marks those of DDP"


def _why_no_sizes(run: RunEvidence) -> str:
    """Return that sizes are not known, and what records them."""
    timings = [rank.timings for rank in run.analysis.ranks]
    if all(np.all(one.graph_input_ns[one.bytes == UNKNOWN] != NO_TIME) for one in timings):
        return _NO_SIZES_IN_GRAPHS
    is_gloo = all(facts.is_gloo for facts in run.facts)
    by_profiler, by_nsys = (
        (_SIZES_OF_GLOO_BY_PROFILER, _SIZES_OF_GLOO_BY_NSYS) if is_gloo else (_SIZES_BY_PROFILER, _SIZES_BY_NSYS)
    )
    sources = {source for source, *_ in run.overlap.recorded_by}
    where = "; ".join([by_profiler] * ("kineto" in sources) + [by_nsys] * bool(sources - {"kineto"}))
    return f"the trace does not tell the sizes of collectives: {where}"


REDUCED_AFTER_BACKWARD = "gradients reduced after backward"


def after_backward(run: RunEvidence) -> Finding | Abstained | None:
    """Find reductions of gradients that begin only after backward, so that they cannot overlap with it.

    Found if most steps launch all their reductions after backward, and these are mostly exposed and not small.
    """
    if run.why_no_steps:
        return Abstained(REDUCED_AFTER_BACKWARD, run.why_no_steps)
    if run.is_data_parallel:
        return None
    # The steps of which all reductions of gradients are launched after backward.
    late = run.gradients.of_units(run.gradients.by_unit(np.logical_and, run.gradients.blocking == _AFTER_BACKWARD))
    if 2 * len(late.counts) <= len(run.gradients.counts) or late.are_small:
        return None
    # A stage of a pipeline may reduce nothing but the norm of its gradients, which sizes tell from the gradients.
    is_stage = any((rank.timings.operation == _SEND_RECV).any() for rank in run.analysis.ranks)
    if is_stage and np.all(late.counts == 1) and np.any(late.bytes == UNKNOWN):
        return Abstained(REDUCED_AFTER_BACKWARD, _why_no_sizes(run))
    if run.collectives.reason:
        return Abstained(REDUCED_AFTER_BACKWARD, run.collectives.reason)
    exposed_ns, duration_ns = (median_or_zero(late.by_unit(np.add, ns)) for ns in (late.exposed_ns, late.duration_ns))
    if exposed_ns <= _MOSTLY_EXPOSED * duration_ns:
        return None
    # DDP launches a bucket of all gradients at the end of backward, and may be seen to do so after it.
    may_be_ddp = bool(np.all(late.counts == 1)) and SYNCHRONIZE_PHASE not in late.phase
    may_be_ddp &= not late.are_sharded
    of_ddp = " If DDP runs already, one bucket holds all gradients: take a smaller bucket_cap_mb." if may_be_ddp else ""
    return Finding(
        REDUCED_AFTER_BACKWARD,
        f"{len(late.counts)} of {count_noun(len(run.gradients.counts), 'step')} "
        f"{by_number(len(late.counts), 'launches', 'launch')} all reductions of gradients after backward: "
        f"{milliseconds(exposed_ns)} of a typical step are exposed.",
        "Launch reductions while backward runs, from hooks of the gradients and in several buckets, as "
        f"{'fully_shard' if late.are_sharded else 'DistributedDataParallel'} does (DeepSpeed: overlap_comm, "
        f"Megatron-LM: --overlap-grad-reduce).{of_ddp}",
        *run.where(late),
        cost_ns=median_or_zero(late.cost_ns),
    )


MANY_BUCKETS = "one collective per parameter"
SINGLE_BUCKET = "one bucket for all gradients"


def bucket_count(run: RunEvidence) -> Finding | Abstained | None:
    """Find too many buckets or too few: one collective per parameter, or a single collective for all gradients.

    Each collective costs its latency, and a single collective cannot begin before the last gradient is ready. Found if
    the median pass of backward has very many small reductions, or a single reduction that is launched in backward,
    mostly exposed and not small.
    """
    if run.why_no_steps:
        return Abstained(MANY_BUCKETS, run.why_no_steps)
    every = run.gradients.by_pass
    if not len(every) or run.is_data_parallel:
        return None
    # Too many: the median pass has very many, and they are small or their sizes are not known.
    count = np.sort(every.counts)[len(every.counts) // 2]
    sizes = every.bytes[every.bytes != UNKNOWN]
    if are_many_and_small(int(count), sizes):
        typical = f", half of them of {size(median_or_zero(sizes))} or less" if len(sizes) else ""
        cap = None if every.are_sharded else bucket_cap_mb(every, OF_MANY)
        larger = "Put gradients into a dozen buckets or more, of at most 25 MiB"
        if cap is not None:
            larger = f"Put gradients into larger buckets, as DistributedDataParallel does with bucket_cap_mb={cap}"
        return Finding(
            MANY_BUCKETS,
            f"A typical {every.unit_name} reduces its gradients by {count} collectives{typical}.",
            "Shard larger parts of the model as one unit each: each collective costs its latency."
            if every.are_sharded
            else f"{larger}: each collective costs its latency.",
            *run.where(every),
            argument=None if every.are_sharded else "bucket_cap_mb",
            value=cap,
        )
    # Too few: a single one. If it is launched after backward, ``after_backward`` reports it.
    if count > 1 or 2 * np.count_nonzero(every.blocking == _AFTER_BACKWARD) > len(every):
        return None
    if run.collectives.reason:
        return Abstained(SINGLE_BUCKET, run.collectives.reason)
    exposed = median_or_zero(every.exposed_ns)
    if not every.are_small and exposed > _MOSTLY_EXPOSED * median_or_zero(every.duration_ns):
        cap = None if every.are_sharded else bucket_cap_mb(every, OF_ONE)
        setting = "(bucket_cap_mb)" if cap is None else f"(bucket_cap_mb={cap})"
        return Finding(
            SINGLE_BUCKET,
            f"One collective reduces all gradients of a {every.unit_name}, and {milliseconds(exposed)} of it are "
            "exposed: it cannot begin before the last gradient is ready.",
            "Shard the model in several units (fully_shard: its layers, too; DeepSpeed: a smaller reduce_bucket_size), "
            "so that the first reductions begin while backward computes."
            if every.are_sharded
            else f"Take several buckets {setting}, so that the first begin while backward computes.",
            *run.where(every),
            cost_ns=median_or_zero(every.sum_of_steps(every.cost_ns)),
            argument=None if every.are_sharded else "bucket_cap_mb",
            value=cap,
        )
    return None


WAIT_IN_BACKWARD = "backward waits for its reductions"


def wait_in_backward(run: RunEvidence) -> Finding | Abstained | None:
    """Find a backward that goes on only when what it has reduced is there, as where a hook waits for its collective.

    Found if, in most passes, backward launches several reductions, compute of backward needs each of them but the last,
    and they stand still for most of the time that these take.
    """
    if run.is_cpu or run.why_no_steps or run.collectives.reason:
        return None  # on a CPU, ``hosts.host_sync`` looks for it
    every = run.gradients.by_pass
    is_launched = every.of_units((every.counts > 1) & every.by_unit(np.logical_and, every.phase == BACKWARD_PHASE))
    but_last = np.ones(len(is_launched), np.bool_)
    but_last[is_launched.last] = False
    waited = select(is_launched, but_last)
    exposed_ns, duration_ns = waited.by_unit(np.add, waited.exposed_ns), waited.by_unit(np.add, waited.duration_ns)
    waited = waited.of_units(exposed_ns > _MOSTLY_EXPOSED * duration_ns)
    if 2 * len(waited.counts) <= len(every.counts):
        return None  # compute runs beside them
    if 2 * np.count_nonzero(waited.consumer == UNKNOWN) > len(waited):
        return Abstained(WAIT_IN_BACKWARD, run.unknown_needs)
    waited = waited.of_units(waited.by_unit(np.logical_and, waited.is_needed_on_stream & (waited.blocking_ns > 0)))
    if 2 * len(waited.counts) <= len(every.counts):
        return None
    cost_ns = median_or_zero(waited.sum_of_steps(waited.by_unit(np.add, waited.blocking_ns)))
    return Finding(
        WAIT_IN_BACKWARD,
        f"In {waited.steps} of {every.steps} steps compute of backward needs each reduction but the last, and stands "
        f"still for them for {milliseconds(cost_ns)} of a typical step.",
        "Where hooks of your own wait for their collectives, launch these with async_op=True and wait after backward; "
        "an optimizer that steps in backward needs them at once.",
        *run.where(waited),
        cost_ns=cost_ns,
    )


LAST_BUCKET = "large last bucket"


def last_bucket(run: RunEvidence) -> Finding | Abstained | None:
    """Find a last bucket that is so large that a smaller bucket would leave less communication after backward.

    Found if the tail of the last bucket is the main cause of exposed time in the typical step, and something waits for
    it. (The tail is exposed communication after the last compute of backward.)
    """
    if run.collectives.why_no_cause == LOST_LAUNCHES:
        return Abstained(LAST_BUCKET, LOST_LAUNCHES)
    cause, blocking = run.cause, run.collectives.blocking
    if cause is None or (advice := cause.smaller_bucket_advice) is None:
        return None
    if blocking and not blocking.typical_ns:
        return None
    tail_ns = cause.collective_ns // max(1, cause.ranks)
    cost_ns = min(tail_ns, blocking.typical_ns) if blocking else tail_ns
    less = f"; the median step stands still for {milliseconds(cost_ns)}" if cost_ns < tail_ns else ""
    return Finding(
        LAST_BUCKET,
        f"{milliseconds(tail_ns)} of the typical step are the tail of the last bucket, of "
        f"{size(cause.bytes or 0)}, after backward{less}.",
        f"{capitalized(advice)}.",
        cost_ns=cost_ns,
        argument="bucket_cap_mb",
        value=cause.smaller_bucket_mb,
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
        is_known = not len(sizes) or bool((sizes != UNKNOWN).any())
        return None if is_known else Abstained(TIME_WITHOUT_SIZE, _why_no_sizes(run))
    operation = f"{alike.operation.replace('_', '-')}s"
    latency, late_rank = "measure the latency of a small all-reduce.", "Record all ranks and see which arrives late"
    way_out = latency.capitalize() if alike.is_transfer else f"{late_rank} (ddp-prof skew), or {latency}"
    return Finding(
        TIME_WITHOUT_SIZE,
        f"{operation} of {size(alike.small_bytes)} and of {size(alike.large_bytes)} take "
        f"{milliseconds(alike.small_ns)} and {milliseconds(alike.large_ns)} (medians).",
        f"Bandwidth does not limit these messages: neither fewer bytes nor a faster link would shorten them. {way_out}",
    )


LATE_READINESS = "gradients ready in another order than buckets"


def late_readiness(run: RunEvidence) -> Finding | Abstained | None:
    """Find gradients that become ready in another order than that of the buckets, so that all buckets are ready late.

    Found if most passes of backward launch their first bucket when backward is almost over, though they have several
    buckets. Passes whose first bucket has half of the gradients do not count: such a bucket is late in any order. A
    collective without a size is not taken for a bucket if other collectives of its pass have sizes.
    """
    if run.why_no_steps:
        return Abstained(LATE_READINESS, run.why_no_steps)
    every = run.gradients.by_pass
    has_size = every.bytes != UNKNOWN
    buckets = select(every, has_size | ~np.repeat(every.by_unit(np.logical_or, has_size), every.counts))
    # Passes with several buckets, all but the last launched in backward, and the first smaller than half of the bytes.
    is_outside, first_bytes = buckets.phase != BACKWARD_PHASE, buckets.bytes[buckets.first]
    is_outside[buckets.last] = False
    are_hooks = (buckets.counts >= _LEAST_BUCKETS) & ~buckets.by_unit(np.logical_or, is_outside)
    are_hooks &= (first_bytes == UNKNOWN) | (2 * first_bytes < buckets.by_unit(np.add, buckets.bytes))
    hooks = buckets.of_units(are_hooks)
    if 2 * len(hooks.counts) <= len(every.counts):
        return None  # nothing is launched in backward, or it is a single bucket: other rules say so
    # For each rank that is late, the median fraction of backward that is over when the first bucket is launched.
    late = {}
    for rank, facts in zip(run.analysis.ranks, run.facts, strict=True):
        shares = sorted(share for share in facts.first_share if not math.isnan(share))
        if shares and shares[len(shares) // 2] >= _LATE:
            late[rank.name] = shares[len(shares) // 2]
    if not any(not math.isnan(share) for facts in run.facts for share in facts.first_share):
        return Abstained(LATE_READINESS, "the trace does not tell when backward began")
    if not late:
        return None
    exposed = run.typical_exposed_ns(hooks.sum_of_steps(hooks.by_unit(np.add, hooks.exposed_ns)))
    told = "" if exposed is None else f": {milliseconds(exposed)} of a typical step's communication are exposed"
    return Finding(
        LATE_READINESS,
        f"The first of {hooks.counts[0]} buckets was launched when {percent(max(late.values()))} of backward was over"
        f"{told}.",
        "Register parameters in the order in which forward uses them, or let DDP rebuild its buckets: it does so after "
        "the first step unless find_unused_parameters is set.",
        tuple(late),
        cost_ns=run.typical_exposed_ns(hooks.sum_of_steps(hooks.cost_ns)),
    )


BUCKET_COPIES = "copies out of buckets"


def bucket_copies(run: RunEvidence) -> Finding | Abstained | None:
    """Find copies of gradients out of their buckets.

    Found if the first operation that needs a reduced bucket is a memory copy, for most reductions of gradients. The
    cost is that of the slowest rank: the copies, and their launches as far as the host delays the step. What is reduced
    to shards or to one rank is none of torch's DDP, whose argument is the advice.
    """
    every = select(run.gradients, ~np.isin(run.gradients.operation, (_SCATTER, _TO_ONE_RANK)))
    if run.is_cpu or (len(run.gradients) and not len(every)):
        return None
    if not len(every):
        return Abstained(BUCKET_COPIES, run.why_no_steps) if run.why_no_steps else None
    needed = int((every.consumer != UNKNOWN).sum())
    if 2 * needed <= len(every):
        return Abstained(BUCKET_COPIES, run.unknown_needs)
    copied = select(every, every.is_copied)
    if 2 * len(copied) <= needed:
        return None
    # On the critical path of a typical step, the host delays the step by ``most_ns``: launches cost no more than that.
    most_ns = math.inf if run.critical.reason else median_or_zero([path.host_delay_ns for path in run.critical.steps])
    of_ranks = [
        (median_or_zero(facts.copies_ns), round(min(median_or_zero(facts.copy_launches_ns), most_ns)))
        for facts in run.facts_of_steps
    ]
    slowest = max(range(len(of_ranks)), key=lambda index: sum(of_ranks[index]))
    copies_ns, launches_ns = of_ranks[slowest]
    whole = run.whole
    if sum(len(facts.copies_ns) > 0 for facts in run.facts_of_steps) > 1:
        whole += f" of {run.analysis.ranks[slowest].name}"
    launches = f", and their launches up to {milliseconds(launches_ns)} more" if launches_ns else ""
    return Finding(
        BUCKET_COPIES,
        f"For {len(copied):,} of {needed:,} reductions of gradients, a memory copy is what needs the result first; "
        f"copies on the stream of compute take {milliseconds(copies_ns)} of {whole}{launches}.",
        "With DistributedDataParallel, gradient_as_bucket_view=True leaves these copies out.",
        *run.where(copied),
        cost_ns=copies_ns + launches_ns,
        argument="gradient_as_bucket_view",
        value=True,
    )


NEED_ORDER = "the last bucket is needed first"


def need_order(run: RunEvidence) -> Finding | Abstained | None:
    """Find buckets in the wrong order: the bucket that is needed first is launched last.

    Then the operation that needs it waits for all buckets. Found if, in most passes of backward, the first operation
    that needs a collective needs the one that was launched last, and stands still for it.
    """
    if run.is_cpu:
        return None
    if run.why_no_steps:
        return Abstained(NEED_ORDER, run.why_no_steps)
    several = run.gradients.by_pass.of_several
    if not len(several):
        return None
    # Only passes in which it is known of all collectives which operation needs them, and how long it stands still.
    is_unknown = (several.consumer == UNKNOWN) | (several.blocking_ns == UNKNOWN)
    known = several.of_units(~several.by_unit(np.logical_or, is_unknown))
    if 2 * len(known.counts) <= len(several.counts):
        return Abstained(NEED_ORDER, run.unknown_needs)
    # The last collective of each pass, and whether its consumer begins before those of all other collectives.
    last = select(known, known.last)
    is_first = last.consumer_start_ns < known.least_but_last(known.consumer_start_ns)
    found = select(last, is_first & (last.blocking_ns > 0))
    if 2 * len(found) <= len(last):
        return None
    cost = median_or_zero(found.sum_of_steps(found.blocking_ns))
    return Finding(
        NEED_ORDER,
        f"In {found.steps} of {last.steps} steps the first operation that needs a collective needs the one launched "
        f"last, and stands still for it for {milliseconds(cost)}.",
        "Launch first what is needed first, or let the first consumer wait for its own bucket only.",
        *run.where(found),
        cost_ns=cost,
    )


UNUSED_VOTE = "vote on unused parameters"


def unused_vote(run: RunEvidence) -> Finding | Abstained | None:
    """Find the small collective by which the ranks agree on which parameters were used, after the buckets of each pass.

    Found if, in most passes of backward, the last reduction is far smaller than all others and is launched in backward
    or synchronize.
    """
    if run.why_no_steps:
        return Abstained(UNUSED_VOTE, run.why_no_steps)
    several = run.gradients.by_pass.of_several
    if not len(several):
        return None
    if np.any(several.bytes == UNKNOWN):
        return Abstained(UNUSED_VOTE, _why_no_sizes(run))
    # The last collective of each pass, if it is small, far smaller than the others, and launched in these phases.
    last = select(several, several.last)
    is_vote = are_votes(last.bytes, several.least_but_last(several.bytes))
    is_in_phase = np.isin(last.phase, (BACKWARD_PHASE, SYNCHRONIZE_PHASE))
    votes = select(last, is_vote & is_in_phase)
    if 2 * len(votes) <= len(last):
        return None
    exposed = run.typical_exposed_ns(votes.sum_of_steps(votes.exposed_ns))
    told = "" if exposed is None else f", {milliseconds(exposed)} of it exposed"
    return Finding(
        UNUSED_VOTE,
        f"In {votes.steps} of {last.steps} steps a collective of "
        f"{median_or_zero(votes.bytes):,} bytes follows the buckets{told}.",
        "Without find_unused_parameters there is no such collective; only a model with unused parameters needs the "
        "option.",
        *run.where(votes),
        cost_ns=run.typical_exposed_ns(votes.sum_of_steps(votes.cost_ns)),
        argument="find_unused_parameters",
        value=False,
    )
