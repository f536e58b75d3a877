"""Rules about buckets: how gradients are put into collectives, when these are launched, and what they hold up."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from ddp_prof.analyze.collectives.gradients import SHARDING, are_many_and_small, are_votes
from ddp_prof.analyze.collectives.sizes import count_equal_passes
from ddp_prof.analyze.collectives.timing import BLOCKING
from ddp_prof.analyze.core.attribution import BACKWARD_PHASE, SYNCHRONIZE_PHASE
from ddp_prof.analyze.doctor.evidence import Abstained, Finding, RunEvidence
from ddp_prof.analyze.doctor.gradients import Gradients, median_or_zero
from ddp_prof.analyze.what_if.rules import DEFAULT_MB
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES
from ddp_prof.columns import by_number, capitalized, count_noun, milliseconds, percent, size
from ddp_prof.communication import OPERATIONS, POINT_TO_POINT
from ddp_prof.table import NO_TIME, UNKNOWN, select
from ddp_prof.variants import BYTES_PER_MB

_AFTER_BACKWARD, _SEND_RECV = BLOCKING.index("after_backward"), OPERATIONS.index(POINT_TO_POINT)
_MOSTLY_EXPOSED = 0.5
"""A collective is mostly exposed if more than this fraction of its duration is."""
_LATE, _LEAST_BUCKETS = 0.8, 3
"""The first bucket is late if launched after this fraction of backward; passes with fewer buckets do not count."""
_OF_MANY, _OF_ONE = 16, 6
"""How many buckets to leave of a collective for each parameter, and of a single one.

Many remain to begin while backward computes, and so few that latency is small. How long a collective of another size
takes is not known, so the advice is a number of buckets. In 32 simulated jobs with a collective per parameter, buckets
of 25 MiB made the step 0.9 % longer (mean; 37 % at worst), as they often leave one bucket; a size that leaves sixteen
made it 13 % shorter (0.2 % longer at worst). In 30 jobs with one bucket, 25 MiB made the step 6 % shorter, and a size
that leaves six 16 % (1.8 % at worst).
"""


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
        return Abstained(REDUCED_AFTER_BACKWARD, run.why_no_sizes)
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
        cap = None if every.are_sharded else _bucket_cap_mb(every, _OF_MANY)
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
        cap = None if every.are_sharded else _bucket_cap_mb(every, _OF_ONE)
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


def _bucket_cap_mb(gradients: Gradients, buckets: int) -> int | float | None:
    """Return the ``bucket_cap_mb`` that divides the gradients of a typical unit into so many buckets, at most torch's.

    ``None`` if the sizes of collectives are not known.
    """
    if np.any(gradients.bytes == UNKNOWN):
        return None
    whole = median_or_zero(gradients.by_unit(np.add, gradients.bytes)) / BYTES_PER_MB
    cap = float(f"{min(DEFAULT_MB, whole / buckets):.2g}")
    return int(cap) if cap.is_integer() else cap


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
    every = select(run.gradients, ~np.isin(run.gradients.operation, SHARDING))
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
    # Steps that only accumulate gradients copy none.
    of_ranks = [
        (
            median_or_zero([ns for ns in facts.copies_ns if ns]),
            round(min(median_or_zero([ns for ns in facts.copy_launches_ns if ns]), most_ns)),
        )
        for facts in run.facts_of_steps
    ]
    slowest = max(range(len(of_ranks)), key=lambda index: sum(of_ranks[index]))
    copies_ns, launches_ns = of_ranks[slowest]
    do_some_not = any(0 in facts.copies_ns for facts in run.facts_of_steps)
    whole = f"{run.whole}{' that copies' if do_some_not else ''}"
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
        return Abstained(UNUSED_VOTE, run.why_no_sizes)
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
        return Abstained(REPEATED_REDUCTION, run.why_no_sizes) if is_undecided else None
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
