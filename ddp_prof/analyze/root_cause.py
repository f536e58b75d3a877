"""The main finding about a run's exposed communication, from its typical step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.collectives.collective import Collective
from ddp_prof.analyze.collectives.exposed_time import TAIL, TRANSFER
from ddp_prof.analyze.collectives.gradients import SHARDING_OPERATIONS, are_many_and_small, are_votes, carry_gradients
from ddp_prof.analyze.collectives.results import RunCollectives, measure_collectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.sizes import AlikeTimes, count_equal_passes, find_alike_times
from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.collectives.timing import CollectiveTimings
from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.intervals import union
from ddp_prof.analyze.statistics import WORTH
from ddp_prof.communication import ALL_REDUCE
from ddp_prof.manifest import Manifest
from ddp_prof.table import Brief, Ints
from ddp_prof.trace import NO_TIME, UNKNOWN
from ddp_prof.variants import BYTES_PER_MB

MatchKey = tuple[int | None, str | None, int]
"""See :func:`_match_key`."""

LARGE_PART, MOST = 0.25, 0.5
"""Smallest fractions of the exposed time that are a large part, or most, of it."""


@dataclass(frozen=True, slots=True)
class RootCause(Brief):
    """When and why most of the exposed time of the typical step is exposed, and the collective with most of that time.

    Figures are of the typical step (see :mod:`ddp_prof.analyze.typical`) and summed over all ranks. The collective is
    the same collective on all ranks.

    Attributes:
        step: The number of the typical step; ``None`` without steps.
        steps: Number of steps that communicate.
        exposed_ns: The step's exposed time; if it is 0, the attributes from ``when`` on are meaningless.
        total_exposed_ns: Exposed time of all steps.
        when, why: The pair of a when and a why with most exposed time (``exposed_time.WHENS`` and ``WHYS``).
        pair_ns: The part of ``exposed_ns`` with this when and why.
        wait_ns: The part of ``exposed_ns`` in which a peer had not arrived.
        knows_late: Whether the clocks of the ranks tell which rank is late.
        step_ns: Sum of the step's length over all ranks; ``None`` if not known.
        operation: Operation of the collective. The attributes from here on describe the collective, if not stated
            otherwise.
        knows_wait: Whether its waits can be distinguished from transfer, on all ranks that take part in it.
        collectives_per_step: Number of collectives of one rank in the step.
        alike_per_step: Number of these with the same value of ``Collective.blocking`` as the collective.
        same_operation_per_step: Number of these with the same operation.
        gradients_per_pass: Number of collectives of its operation that reduce gradients in its pass of backward (in the
            step if no pass is known), without a vote on unused parameters.
        bucket: Number of its bucket; ``None`` if not known.
        last_bucket: The largest bucket number among collectives with its operation.
        index: Its position in the step.
        is_last: Whether it is the last collective of its operation in its pass of backward.
        ends_gradients: Whether it is the last of those that ``gradients_per_pass`` counts: a vote, or the reduction of
            a loss or of a norm, may follow.
        follows_own_bucket: Whether an earlier collective of the step has its bucket and operation.
        alike: Sizes of collectives of its operation that take equally long; ``None`` if there are none.
        times_per_step: How often one rank communicates its bucket with its operation and size in the step; where
            buckets have no numbers, in how many passes of backward, if all reduce gradients of the same sizes. 1 if an
            optimizer updates parameters in between.
        collective_ns: Its part of ``pair_ns``.
        bytes: Its size; ``None`` if not known, or if ranks differ.
        parameters: Names of the parameters in its bucket, in the model's order; empty if not known.
        lead_ns: How long it starts before the compute of its pass of backward ends, negative if after; ``None`` if not
            known. The median over ranks and ``lead_passes``.
        lead_passes: Number of passes of backward, of one rank in the step, in which this collective is known to start.
        carries_gradients: Whether it seems to reduce gradients.
        passes: Number of passes of backward, of one rank in the step, that communicate.
        has_launch: Whether its launch is in the trace; its phase is known by the launch.
        ranks: Number of ranks with collectives in the step.
        exceeds_others: Whether it is more than twice as large as every one that ``gradients_per_pass`` counts but the
            first. Then most of it is one parameter, because a bucket closes when it has reached its size.
        are_many_and_small: Whether those that ``gradients_per_pass`` counts are so many and small that latency adds up.
        is_sharded: Whether its step also reduces to shards, as FSDP does before groups of ranks reduce these.
        is_in_graph: Whether a CUDA graph launched it beside other work, so that its input is not known.
        follows_another: Whether its stream was busy with another collective until it started, on its first rank: a
            smaller one in its place would not have ended earlier.
        held_up_ns: On a host, how long earlier collectives of its rank ran between its launch and its start, as gloo's
            threads take up few at once: the median over ranks. 0 on a device, where streams tell what it queued behind.
        late_rank: Name of the rank that arrives last in the step, or names of those that are late together; ``None``
            if there is none.
        late_cost_ns: What another rank would gain at most without the lag of these, queues behind its waits included;
            ``None`` if that is not known.
        late_ranks: The number of these ranks.
        is_usually_late: Whether they are late in most steps.
    """

    step: int | None
    steps: int
    exposed_ns: int
    total_exposed_ns: int
    when: str
    why: str
    pair_ns: int
    wait_ns: int
    knows_wait: bool
    collectives_per_step: int
    operation: str | None
    blocking: str | None
    alike_per_step: int
    same_operation_per_step: int
    bucket: int | None
    last_bucket: int | None
    index: int
    is_last: bool
    follows_own_bucket: bool
    collective_ns: int
    bytes: int | None
    parameters: tuple[str, ...]
    lead_ns: int | None
    lead_passes: int = 1
    carries_gradients: bool = True
    knows_late: bool = True
    has_launch: bool = True
    step_ns: int | None = None
    times_per_step: int = 1
    alike: AlikeTimes | None = None
    passes: int = 1
    gradients_per_pass: int | None = None
    ends_gradients: bool = False
    late_rank: str | None = None
    late_cost_ns: int | None = None
    late_ranks: int = 1
    is_usually_late: bool = True
    ranks: int = 1
    exceeds_others: bool = False
    are_many_and_small: bool = False
    is_sharded: bool = False
    is_in_graph: bool = False
    follows_another: bool = False
    held_up_ns: int = 0

    @property
    def is_last_bucket(self) -> bool:
        """Whether other reductions of gradients of its pass of backward come before it, and none after it."""
        return self.ends_gradients and (self.gradients_per_pass or 0) > 1

    @property
    def is_late(self) -> bool:
        """Whether a late rank explains a large part of the exposed time or, if others are late in other steps, most.

        The exposed time is the sum over all ranks. So what one rank would gain without the lag is multiplied by the
        number of ranks that wait.
        """
        gained_ns = (self.late_cost_ns or 0) * max(1, self.ranks - self.late_ranks)
        return (
            self.late_rank is not None and gained_ns >= (LARGE_PART if self.is_usually_late else MOST) * self.exposed_ns
        )

    @property
    def smaller_bucket_mb(self) -> int | None:
        """A value of ``bucket_cap_mb`` of torch's DDP that divides the last bucket: half of its size, in MB.

        ``None`` if a smaller last bucket would not shorten the exposed time, or if that is not known: the time is
        exposed for another reason, the bucket holds a single parameter, its time does not depend on its size, its
        stream was busy until it started, or gradients are sharded, which torch's DDP does not do.
        """
        half = (self.bytes or 0) // (2 * BYTES_PER_MB)
        is_tail = self.when == TAIL and self.operation == ALL_REDUCE
        is_tail &= self.why == TRANSFER and self.carries_gradients and self.is_last_bucket and not self.follows_another
        can_divide = self.operation == ALL_REDUCE and not (self.alike or self.parameters or self.exceeds_others)
        can_divide &= self.times_per_step == 1 and not self.is_sharded
        is_late = 2 * self.wait_ns > self.exposed_ns or self.is_late
        is_late |= self.late_rank is not None and self.is_usually_late
        is_worth = not self.step_ns or self.pair_ns >= WORTH * self.step_ns
        return half if half and is_tail and can_divide and is_worth and not is_late else None

    @property
    def smaller_bucket_advice(self) -> str | None:
        """Words that advise :attr:`smaller_bucket_mb`; ``None`` if there is no such value."""
        if (setting := self.smaller_bucket_mb) is None:
            return None
        return f"with DistributedDataParallel, bucket_cap_mb={setting} divides it unless one parameter is most of it"


@dataclass(frozen=True)
class RunExplanation:
    """Why the communication of a run is exposed; ``root_cause`` is ``None`` if no communication is exposed."""

    run: RunAnalysis
    collectives: RunCollectives
    skew: RunSkew
    root_cause: RootCause | None


def explain_run(run: RunAnalysis) -> RunExplanation:
    """Return the collectives of a run, which rank is late, and the main cause of its exposed time."""
    collectives = measure_collectives(run)
    skew = measure_skew(run)
    return RunExplanation(run, collectives, skew, find_root_cause(collectives, skew))


def find_root_cause(found: RunCollectives, skew: RunSkew | None = None) -> RootCause | None:
    """Return the main cause of a run's exposed time; ``None`` if no communication is exposed.

    ``skew`` tells which rank is late, and what that costs; without it, this is not known.
    """
    run = found.run
    total = sum(int(exposure.exposed_ns.sum()) for exposure in run.exposures)
    if not total:
        return None
    typical = found.typical_step
    step, rows = found.of_step(typical), found.rows_of_step(typical)
    (when, why), pair_ns, key, culprit_ns = _find_culprit(step)
    culprit, late = _Culprit(run, step, rows, key), _find_late(skew, typical)
    one, on_rank = culprit.one, culprit.collectives_of_rank
    return RootCause(
        # The step.
        step=one.step,
        steps=max(1, len(found.exposed_by_step)),
        step_ns=_sum_lengths(run, typical),
        exposed_ns=sum(collective.exposed_ns for collective in step),
        total_exposed_ns=total,
        when=when,
        why=why,
        pair_ns=pair_ns,
        wait_ns=sum(collective.exposed_wait_ns or 0 for collective in step),
        ranks=sum(len(of_rank) > 0 for of_rank in rows),
        # Who is late in it.
        knows_late=skew is None or skew.reason is None,
        late_rank=late and late.name,
        late_cost_ns=late and late.cost_ns,
        late_ranks=late.ranks if late else 1,
        is_usually_late=late is None or late.is_usual,
        # The collective.
        operation=one.op,
        blocking=one.blocking,
        bucket=one.bucket,
        index=one.index,
        collective_ns=culprit_ns,
        bytes=culprit.bytes,
        parameters=_parameter_names(run.manifest, one.bucket),
        alike=find_alike_times(run, one.op) if one.op else None,
        lead_ns=culprit.lead_ns,
        lead_passes=culprit.lead_passes,
        held_up_ns=culprit.held_up_ns,
        has_launch=one.launch_ns is not None,
        knows_wait=culprit.knows_wait,
        is_in_graph=bool(culprit.timings.graph_input_ns[culprit.row] != NO_TIME),
        follows_another=culprit.follows_another,
        # Its place among the others of its rank.
        collectives_per_step=len(on_rank),
        alike_per_step=sum(collective.blocking == one.blocking for collective in on_rank),
        same_operation_per_step=sum(collective.op == one.op for collective in on_rank),
        last_bucket=max((each.bucket for each in step if each.op == one.op and each.bucket is not None), default=None),
        is_last=culprit.is_last_among([collective for collective in step if collective.op == one.op]),
        follows_own_bucket=culprit.follows_own_bucket,
        passes=len({end_ns for collective in on_rank if (end_ns := collective.backward_end_ns) is not None}),
        is_sharded=any(collective.op in SHARDING_OPERATIONS for collective in on_rank),
        # Its place among those that reduce gradients.
        carries_gradients=culprit.are_gradients[culprit.at],
        gradients_per_pass=len(culprit.gradients_of_pass),
        ends_gradients=culprit.is_last_among(culprit.gradients),
        times_per_step=culprit.times_per_step,
        exceeds_others=culprit.exceeds_others,
        are_many_and_small=are_many_and_small(
            len(culprit.gradients_of_pass),
            np.array([each.bytes for each in culprit.gradients_of_pass if each.bytes is not None]),
        ),
    )


def _find_culprit(step: Sequence[Collective]) -> tuple[tuple[str, str], int, MatchKey, int]:
    """Return the pair of when and why with most exposed time in a step, and the collective with most of that time.

    The results are the pair, its time, the :func:`_match_key` of the collective, and the collective's part of that
    time, summed over ranks.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    for collective in step:
        for part in collective.exposed_by:
            pairs[part.when, part.why] += part.ns
    pair = max(pairs, key=pairs.__getitem__, default=("unknown", "transfer"))
    parts: Counter[MatchKey] = Counter()
    for collective in step:
        parts[_match_key(collective)] += sum(part.ns for part in collective.exposed_by if (part.when, part.why) == pair)
    ((culprit, culprit_ns),) = parts.most_common(1)
    return pair, pairs[pair], culprit, culprit_ns


@dataclass(frozen=True)
class _Culprit:
    """The collective that is the main cause, on all its ranks, and the collectives of the step beside it.

    Properties with the names of attributes of :class:`RootCause` are described there.

    Attributes:
        run: The run.
        step: The collectives of the step, rank by rank.
        rows: The rows of these in the timings of each rank.
        key: The :func:`_match_key` of the culprit.
    """

    run: RunAnalysis
    step: Sequence[Collective]
    rows: Sequence[Ints]
    key: MatchKey

    @cached_property
    def on_ranks(self) -> list[Collective]:
        """The culprit on each of its ranks, and in each pass of backward."""
        return [collective for collective in self.step if _match_key(collective) == self.key]

    @property
    def one(self) -> Collective:
        """The first of these, by which the others of its rank and pass are found."""
        return self.on_ranks[0]

    @cached_property
    def at(self) -> int:
        """The position of :attr:`one` in ``step``."""
        return self.step.index(self.one)

    @cached_property
    def rank(self) -> int:
        """The index of its rank."""
        return int(np.repeat(np.arange(len(self.rows)), [len(of_rank) for of_rank in self.rows])[self.at])

    @cached_property
    def row(self) -> int:
        """Its row in :attr:`timings`."""
        return int(np.concatenate(self.rows)[self.at])

    @property
    def timings(self) -> CollectiveTimings:
        """The timings of its rank."""
        return self.run.ranks[self.rank].timings

    @cached_property
    def collectives_of_rank(self) -> list[Collective]:
        """The collectives of its rank in the step, as ranks may have different numbers of them."""
        return self._of_rank(self.step)

    @cached_property
    def are_gradients(self) -> list[bool]:
        """For each collective of the step, whether it seems to reduce gradients."""
        of_ranks = [carry_gradients(rank)[own] for rank, own in zip(self.run.ranks, self.rows, strict=True)]
        return [bool(carries) for of_rank in of_ranks for carries in of_rank]

    @cached_property
    def gradients(self) -> list[Collective]:
        """Those that reduce gradients by its operation, on all ranks; a vote on unused parameters is none of them."""
        reducing = [each for each, carries in zip(self.step, self.are_gradients, strict=True) if carries]
        return [each for each in reducing if each.op == self.one.op and not _is_vote(each, self.one)]

    @cached_property
    def gradients_of_pass(self) -> list[Collective]:
        """Those of them in its pass of backward on its rank."""
        return [each for each in self.gradients if _pass_key(each) == _pass_key(self.one)]

    def _of_rank(self, collectives: Sequence[Collective]) -> list[Collective]:
        return [each for each in collectives if each.step_identity == self.one.step_identity]

    def is_last_among(self, collectives: Sequence[Collective]) -> bool:
        """Return whether it is the last of some collectives of the step in each of its passes of backward."""
        last = {_pass_key(each): each.index for each in sorted(collectives, key=lambda each: each.index)}
        return all(each.index == last.get(_pass_key(each)) for each in self.on_ranks)

    @property
    def bytes(self) -> int | None:
        sizes = {each.bytes for each in self.on_ranks if each.bytes is not None}
        return sizes.pop() if len(sizes) == 1 else None  # those of an all-to-all differ between ranks

    @property
    def lead_ns(self) -> int | None:
        leads = [lead for each in self.on_ranks if (lead := each.before_backward_end_ns) is not None]
        return round(median(leads)) if leads else None

    @property
    def lead_passes(self) -> int:
        return len({each.backward_end_ns for each in self._of_rank(self.on_ranks)})

    @property
    def held_up_ns(self) -> int:
        return round(median(_held_up_ns(each, self.step) for each in self.on_ranks))

    @property
    def knows_wait(self) -> bool:
        is_known = all(each.exposed_wait_ns is not None for each in self.on_ranks)
        return self.run.is_alone or (is_known and self._has_all_parts)

    @property
    def _has_all_parts(self) -> bool:
        """Whether all ranks that take part are among the traces; where one is not, it may have arrived last."""
        if self.one.ranks is None:  # those that are among the traces take part, or have another communicator
            world = max((of_run.world_size or 0 for of_run in self.run.ranks), default=0)
            recorded = sum(len(of_run.timings) > 0 for of_run in self.run.ranks)
            return not self.run.unrecorded and recorded == max(len(self.run.ranks), world)
        matches = self.run.matches.rows
        return int((matches[matches[:, self.rank] == self.row] != UNKNOWN).sum()) >= self.one.ranks

    @property
    def follows_another(self) -> bool:
        timings, row, rows = self.timings, self.row, self.rows[self.rank]
        start_ns = timings.start_ns[row]
        before = rows[(timings.lane[rows] == timings.lane[row]) & (timings.start_ns[rows] < start_ns)]
        if timings.lane[row] == UNKNOWN or not len(before):  # gloo's, or the first one
            return False
        ended_ns = timings.end_ns[before].max()
        # What was launched, or whose input was ready, only after that end did not wait for it.
        due_ns = max(timings.launch_ns[row], timings.ready_ns[row], timings.input_ns[row])
        return bool(ended_ns >= start_ns - BACK_TO_BACK_NS and due_ns <= ended_ns)

    @property
    def follows_own_bucket(self) -> bool:
        same = [each for each in self.collectives_of_rank if _match_key(each)[:2] == self.key[:2]]
        return self.one.bucket is not None and any(each.index < self.one.index for each in same)

    @property
    def times_per_step(self) -> int:
        mine = self.collectives_of_rank
        updates = dict(
            zip((each.index for each in mine), self.timings.updates[self.rows[self.rank]].tolist(), strict=True)
        )
        if self.one.bucket is None:
            gradients = self._of_rank(self.gradients)
            ends_ns, sizes = [each.backward_end_ns for each in gradients], [each.bytes for each in gradients]
            return count_equal_passes(ends_ns, sizes, [updates[each.index] for each in gradients])
        same = [each.index for each in mine if _match_key(each) == self.key]
        return len(same) if len({updates[index] for index in same}) == 1 else 1

    @property
    def exceeds_others(self) -> bool:
        """Torch makes the first bucket smaller than the others on purpose."""
        between = [other.bytes for other in self.gradients_of_pass if other is not self.one][1:]
        known = [size for size in between if size is not None]
        return self.one.bytes is not None and bool(known) and self.one.bytes > 2 * max(known)


def _held_up_ns(one: Collective, step: Sequence[Collective]) -> int:
    """Return :attr:`RootCause.held_up_ns` of a collective on its rank."""
    if one.device is not None or one.launch_ns is None:
        return 0
    earlier = [
        (other.start_ns, other.end_ns)
        for other in step
        if other.step_identity == one.step_identity and (other.launch_ns or other.start_ns) < one.launch_ns
    ]
    starts_ns, ends_ns = np.array(earlier, np.int64).reshape(-1, 2).T
    return (union(starts_ns, ends_ns) & union(np.array([one.launch_ns]), np.array([one.start_ns]))).length_ns


class _Late(NamedTuple):
    """Who is late in a step: names, what that costs, how many ranks they are, and whether they are in most steps."""

    name: str
    cost_ns: int | None
    ranks: int
    is_usual: bool


def _find_late(skew: RunSkew | None, key: int | None) -> _Late | None:
    """Return the ranks that are late together in the step with this key, else the rank that arrives last in it.

    ``None`` also if it may have received late: who is the cause is not known.
    """
    if skew is None or key is None or skew.doubt:
        return None
    if (group := skew.group) and key in group.keys:
        cost_ns = None if group.costs_ns is None else group.costs_ns[group.keys.index(key)]
        return _Late(skew.names_of(group.ranks), cost_ns, len(group.ranks), 2 * group.steps > len(skew.steps))
    for one in skew.steps:
        if one.step == key and one.last is not None:
            rank = skew.ranks[one.last]
            return _Late(rank.name, one.cost_ns, 1, 2 * rank.last_steps > len(skew.steps))
    return None


def _sum_lengths(run: RunAnalysis, key: int | None) -> int | None:
    """Return the length of the step with this key, summed over ranks; ``None`` if it is not known of a rank."""
    lengths = [
        length_ns
        for rank in run.ranks
        for of_step, length_ns in zip(rank.step_keys.tolist(), rank.times.length_ns.tolist(), strict=False)
        if of_step == key
    ]
    return sum(lengths) if lengths and UNKNOWN not in lengths else None


def _is_vote(one: Collective, bucket: Collective) -> bool:
    """Return whether a collective is so small beside a bucket that it is a vote on unused parameters, and no bucket."""
    if one.bytes is None or bucket.bytes is None:
        return False
    return bool(are_votes(np.array([one.bytes]), np.array([bucket.bytes])).all())


def _pass_key(collective: Collective) -> tuple[object, int | None]:
    """Return a key of the collective's pass of backward on its rank; of its step, if no pass is known."""
    return collective.step_identity, collective.backward_end_ns


def _match_key(collective: Collective) -> MatchKey:
    """Return a key of a collective that is the same on all ranks: bucket, operation and size.

    If its bucket is not known, the key contains its operation and its position in the step: what stands there on
    another rank, such as a receive of the next stage of a pipeline, is another collective.
    """
    if collective.bucket is None:
        return (None, collective.op, collective.index)
    return (collective.bucket, collective.op, -1 if collective.bytes is None else collective.bytes)


def _parameter_names(manifest: Manifest | None, bucket: int | None) -> tuple[str, ...]:
    """Return the names of the parameters in a bucket; empty if not known.

    run.json (``manifest``) lists for each bucket the positions of its parameters among the trained parameters.
    """
    buckets = None if manifest is None else manifest.options.get("buckets")
    if manifest is None or bucket is None or not isinstance(buckets, list) or not 0 <= bucket < len(buckets):
        return ()
    trained = [parameter.name for parameter in manifest.parameters if parameter.requires_grad]
    return tuple(trained[position] for position in sorted(buckets[bucket]) if position < len(trained))
