"""One result per collective: its operation, its times, its exposed time, and when and why that was exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT, UNKNOWN_WHY, WHENS, WHYS
from ddp_prof.analyze.collectives.run_analysis import Alignment, RunAnalysis
from ddp_prof.analyze.collectives.timing import BLOCKING, READY_SOURCES, RankCollectives, carry_gradients
from ddp_prof.analyze.core.attribution import bus_factor
from ddp_prof.analyze.core.blocking import HELD_BY
from ddp_prof.analyze.quality import reason_of_run
from ddp_prof.analyze.result_bases import (
    DataFrame,
    FrameResult,
    RankResult,
    make_frame_from_rows,
    make_rows,
    none_for_unknown,
)
from ddp_prof.analyze.statistics import Outliers, find_outliers
from ddp_prof.analyze.typical import typical_step_of
from ddp_prof.communication import OPERATIONS
from ddp_prof.range_names import PHASES
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, distinct, select, take_or_unknown


@dataclass(frozen=True, slots=True)
class RunBlocking:
    """How long streams (on a CPU: the host) stood still for communication.

    ``typical_ns`` is the median over the ``steps`` of all ranks that communicate (0 if the trace marks none); in
    ``blocked_steps`` of them something stood still. ``needed`` collectives have a known consumer; ``least_slack_ns``
    is the smallest slack of these, ``None`` if something stood still, or without a known consumer.
    """

    typical_ns: int
    total_ns: int
    steps: int
    blocked_steps: int
    collectives: int
    needed: int
    least_slack_ns: int | None


FASTEST_LINK_BYTES_PER_S = 4e12
"""More than any link: NVLink 6, the fastest in 2026, has 3.6 TB/s in both directions together."""


@dataclass(frozen=True, slots=True)
class ExposedPart:
    """Exposed nanoseconds at one of ``exposed_time.WHENS`` for one of ``exposed_time.WHYS``."""

    when: str
    why: str
    ns: int


@dataclass(frozen=True, slots=True)
class Consumer:
    """The operation that needed a collective; of several, the one with the least slack.

    ``held_by`` is what it waited for last, one of ``core.blocking.HELD_BY``.
    """

    name: str
    stream: int
    start_ns: int
    held_by: str


@dataclass(frozen=True, slots=True)
class Collective(RankResult):
    """One collective on one rank, in nanoseconds of its file's clock; ``None`` for what is not in the trace.

    Attributes:
        step_key: Unique number of the step within its rank; see ``Steps.keys``.
        index: Position in the step, by launch.
        ranks: Number of ranks in the communicator, or in the job if there is one communicator only; never the number
            of files.
        ready_source: ``kernel`` (the end of the last gradient kernel) or ``hook``.
        blocking: Why the program waits for it, one of ``timing.BLOCKING``.
        exposed_by: The parts of ``exposed_ns``, by when and why; parts of 0 are left out.
        overlapped_ns, exposed_ns: The time that belongs to it; the collectives of a step sum to the step's.
        exposed_wait_ns: The part of ``exposed_ns`` in which a peer had not arrived.
        transfer_ns: Its shortest duration over all ranks.
        wait_ns: The rest of its duration on this rank.
        before_backward_end_ns: How long it started before the end of compute in its pass of backward; negative if
            after.
        blocking_ns: How long something stood still for it; the collectives of a step sum to the step's.
        slack_ns: How much later it could have ended without delaying its consumer. If the consumer stood still for it,
            minus that time.
    """

    rank: int | None
    process: int
    device: int | None
    step: int | None
    index: int
    op: str | None
    bucket: int | None
    bytes: int | None
    group: str | None
    ranks: int | None
    ready_ns: int | None
    ready_source: str | None
    launch_ns: int | None
    start_ns: int
    end_ns: int
    overlapped_ns: int
    exposed_ns: int
    blocking: str | None
    exposed_by: tuple[ExposedPart, ...]
    transfer_ns: int | None
    wait_ns: int | None
    exposed_wait_ns: int | None
    before_backward_end_ns: int | None
    step_key: int | None
    qualifier: str = ""
    of_several: bool = False
    phase: str | None = None
    blocking_ns: int | None = None
    slack_ns: int | None = None
    consumer: Consumer | None = None

    @property
    def step_identity(self) -> tuple[int | None, int, int | None, int | None, str]:
        """A key for the step of this rank; it contains the qualifier because every Kineto file has process 0."""
        return self.rank, self.process, self.device, self.step_key, self.qualifier

    def when_ns(self, when: str) -> int:
        """Exposed time at one of ``exposed_time.WHENS``."""
        return sum(part.ns for part in self.exposed_by if part.when == when)

    def why_ns(self, why: str) -> int:
        """Exposed time for one of ``exposed_time.WHYS``."""
        return sum(part.ns for part in self.exposed_by if part.why == why)

    @property
    def backward_end_ns(self) -> int | None:
        """The end of the last compute in its pass of backward."""
        return None if self.before_backward_end_ns is None else self.start_ns + self.before_backward_end_ns

    @property
    def duration_ns(self) -> int:
        """From the device's start to its end."""
        return self.end_ns - self.start_ns

    @property
    def queueing_ns(self) -> int | None:
        """From the host's launch to the device's start."""
        return None if self.launch_ns is None else self.start_ns - self.launch_ns

    @property
    def exposed_transfer_ns(self) -> int | None:
        """The part of ``exposed_ns`` in which all peers had arrived."""
        return None if self.exposed_wait_ns is None else self.exposed_ns - self.exposed_wait_ns

    @property
    def algbw_bytes_per_s(self) -> float | None:
        """Bytes divided by the transfer time, or by the duration if peers are not known.

        ``None`` if that is more than any link can carry: the size then is not what this collective moved.
        """
        time_ns = self.duration_ns if self.transfer_ns is None else self.transfer_ns
        if self.bytes is None or time_ns <= 0:
            return None
        rate = self.bytes / time_ns * 1e9
        return rate if rate <= FASTEST_LINK_BYTES_PER_S else None

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth times the operation's :func:`bus_factor`."""
        factor, bandwidth = bus_factor(self.op, self.ranks), self.algbw_bytes_per_s
        return None if factor is None or bandwidth is None else factor * bandwidth


_WHY_COLUMNS = tuple(f"why_{why}_" for why in WHYS if why not in (PEER_WAIT, UNKNOWN_WHY))
_WHEN_OF_BACKWARD = ("when_backward_ms", "when_tail_ms")
_EXPOSURE_COLUMNS = ("overlapped_", "exposed_", "blocking_", "slack_", "when_", "why_", "cause")


@dataclass(frozen=True, eq=False)
class RunCollectives(FrameResult):
    """The collectives of all ranks of a run.

    Attributes:
        matched: Number of collectives that were found on at least two ranks.
        unmatched: Number of collectives without a match, over all ranks; 0 if there is a single rank.
        reason: Why exposed time is not known; ``None`` if it is.
        host_waits: How often a host waited until a collective ended, over all ranks.
    """

    run: RunAnalysis
    alignment: Alignment
    matched: int
    unmatched: int
    warnings: tuple[str, ...]
    reason: str | None = None
    host_waits: int = 0

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives, ordered by rank, step and launch."""
        return tuple(one for index in range(len(self.run.ranks)) for one in _collectives_of_rank(self.run, index))

    @cached_property
    def exposed_by_step(self) -> dict[int, int]:
        """Exposed time of all ranks together in each step that communicates, by its key."""
        exposed: dict[int, int] = {}
        for rank, exposure in zip(self.run.ranks, self.run.exposures, strict=True):
            keys, of_steps = rank.sum_by_step(exposure.exposed_ns)
            for key, exposed_ns in zip(keys.tolist(), of_steps.tolist(), strict=True):
                exposed[key] = exposed.get(key, 0) + exposed_ns
        return exposed

    @property
    def typical_step(self) -> int | None:
        """The key of the step that is nearest to the medians of all, of those that reduce gradients if any do.

        ``None`` without steps that communicate. If the lengths of these are not known, it is the one of median exposed
        time. See :mod:`ddp_prof.analyze.typical`.
        """
        exposed = self.exposed_by_step
        reducing = {key for rank in self.run.ranks for key in rank.keys[carry_gradients(rank)].tolist()}
        keys = sorted([key for key in exposed if key in reducing] or exposed, key=exposed.__getitem__)
        if not keys:
            return None
        found = typical_step_of([_parts_of_steps(rank, keys) for rank in self.run.ranks if rank.marks_steps])
        return keys[len(keys) // 2] if found is None else found

    def rows_of_step(self, key: int | None) -> list[Ints]:
        """For each rank, the rows of its timings in a step; with ``None``, those outside of all steps."""
        return [np.flatnonzero(rank.keys == (UNKNOWN if key is None else key)) for rank in self.run.ranks]

    def of_step(self, key: int | None) -> list[Collective]:
        """The collectives of all ranks in a step; with ``None``, those outside of all steps."""
        found = enumerate(self.rows_of_step(key))
        return [one for index, rows in found for one in _collectives_of_rank(self.run, index, rows)]

    @cached_property
    def _unknown_ranks(self) -> frozenset[str]:
        return frozenset(rank.name for rank in self.run.ranks if rank.reason)

    @cached_property
    def _without_launches(self) -> frozenset[str]:
        return frozenset(rank.name for rank in self.run.ranks if rank.clocks_disagree)

    @cached_property
    def _without_backward(self) -> frozenset[str]:
        """The ranks of which no pass of backward is known, so that what is exposed in one, or after one, is not."""
        known = {one.name for one in self.collectives if one.before_backward_end_ns is not None}
        return frozenset(one.name for one in self.collectives) - known

    def only_known(self, row: dict[str, Any], rank: str) -> dict[str, Any]:
        """The row of a rank, with ``None`` in columns about exposed time, when it is, or its reasons, if not known."""
        if rank in self._without_launches:
            row = {name: None if name.startswith(_WHY_COLUMNS) else value for name, value in row.items()}
        if rank in self._without_backward:
            row = {name: None if name in _WHEN_OF_BACKWARD else value for name, value in row.items()}
        if rank not in self._unknown_ranks:
            return row
        return {name: None if name.startswith(_EXPOSURE_COLUMNS) else value for name, value in row.items()}

    @property
    def outliers(self) -> Outliers | None:
        """The steps that stand out by their exposed time; ``None`` if there are none."""
        return find_outliers(
            (one.step_key, one.step, one.overlapped_ns + one.exposed_ns, one.exposed_ns)
            for one in self.collectives
            if not self.reason
        )

    @property
    def blocking(self) -> RunBlocking | None:
        """Time in which something stood still; ``None`` if not known, or not the whole cost because a host waited."""
        if self.reason or self.host_waits:
            return None
        # If no collective is in a step, those outside of steps count as one step.
        timings = [rank.timings for rank in self.run.ranks if len(rank.timings)]
        if not timings or any(np.any(of_rank.blocking_ns == UNKNOWN) for of_rank in timings):
            return None
        slack_ns = np.concatenate([of_rank.slack_ns[of_rank.slack_ns != NO_TIME] for of_rank in timings])
        total = sum(int(of_rank.blocking_ns.sum()) for of_rank in timings)
        sums = [rank.sum_by_step(rank.timings.blocking_ns)[1].tolist() for rank in self.run.ranks]
        by_step = [ns for of_rank in sums for ns in of_rank] or [total]
        return RunBlocking(
            typical_ns=round(median(by_step)),
            total_ns=total,
            steps=len(by_step) if self.run.has_steps else 0,
            blocked_steps=sum(ns > 0 for ns in by_step),
            collectives=sum(map(len, timings)),
            needed=len(slack_ns),
            least_slack_ns=None if total or not len(slack_ns) else int(slack_ns.min()),
        )

    def to_frame(self) -> DataFrame:
        """One row per collective, with a column for each when and each why of exposed time; all in nanoseconds."""
        columns = [field.name for field in fields(Collective) if field.name not in ("exposed_by", "consumer")]
        columns += [f"consumer_{field.name}" for field in fields(Consumer)]
        columns += [*(f"when_{when}_ns" for when in WHENS), *(f"why_{why}_ns" for why in WHYS)]
        rows: list[dict[str, Any]] = []
        for one in self.collectives:
            values = asdict(one)
            del values["exposed_by"]
            consumer = values.pop("consumer") or dict.fromkeys(field.name for field in fields(Consumer))
            values |= {f"consumer_{name}": value for name, value in consumer.items()}
            values |= {f"when_{when}_ns": one.when_ns(when) for when in WHENS}
            values |= {f"why_{why}_ns": one.why_ns(why) for why in WHYS}
            rows.append(self.only_known(values, one.name))
        return make_frame_from_rows(columns, rows)


def _parts_of_steps(rank: RankCollectives, keys: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the keys of a rank's steps, of those in ``keys``, and a row of their parts for each."""
    times = rank.times
    rows = np.flatnonzero(times.is_known & np.isin(rank.step_keys, keys))
    alone, shared = times.compute_ns - times.overlapped_ns, times.overlapped_ns
    idle = times.length_ns - times.compute_ns - times.exposed_ns - times.exposed_memory_ns
    parts = np.column_stack([alone, shared, times.exposed_ns, times.exposed_memory_ns, idle])
    return rank.step_keys[rows], parts[rows]


def measure_collectives(run: RunAnalysis) -> RunCollectives:
    warnings = run.warnings
    too_fast = 0
    for rank, transfer_ns in zip(run.ranks, run.transfers_ns, strict=True):
        timings = rank.timings
        time_ns = np.where(transfer_ns == UNKNOWN, timings.end_ns - timings.start_ns, transfer_ns)
        known = (timings.bytes != UNKNOWN) & (time_ns > 0)
        too_fast += int((timings.bytes[known] / time_ns[known] * 1e9 > FASTEST_LINK_BYTES_PER_S).sum())
    if too_fast:
        doubt = f"collectives with more bytes than any link can move in their time: {too_fast}"
        over = f"over {FASTEST_LINK_BYTES_PER_S / 1e9:,.0f} GB/s"
        warnings += (f"{doubt} ({over}); their sizes are doubtful, so no bandwidth is given",)
    return RunCollectives(
        run=run,
        alignment=run.alignment,
        matched=len(run.matches),
        unmatched=run.matches.unmatched,
        warnings=warnings,
        reason=reason_of_run([(rank.reason, len(rank.timings) > 0) for rank in run.ranks]),
        host_waits=sum(rank.host_waits for rank in run.ranks),
    )


def _collectives_of_rank(run: RunAnalysis, index: int, rows: Ints | None = None) -> list[Collective]:
    rank, exposure = run.ranks[index], run.exposures[index]
    rows = np.arange(len(rank.timings)) if rows is None else rows
    timings, wait_ns = select(rank.timings, rows), run.waits_ns[index][rows]
    # If there are several communicators, some may contain a part of the ranks only. Those without a name are counted by
    # their streams, but for the stream of compute, which several may use.
    lanes = set(distinct(rank.timings.lane[rank.timings.group == UNKNOWN]))
    may_be_several = len(rank.groups) + len(lanes) > 1 or bool(lanes & {rank.compute_stream} - {UNKNOWN})
    all_ranks = None if may_be_several or rank.has_subgroups or run.matches.doubt else rank.world_size
    backward_end = timings.backward_end_ns
    before_end = np.where(backward_end == NO_TIME, NO_TIME, backward_end - timings.start_ns)
    kinds = [(when, why) for when in WHENS for why in WHYS]
    pairs_ns = exposure.pairs_ns[rows].reshape(len(rows), len(kinds)).tolist()
    exposed_by = [
        tuple(ExposedPart(*kind, ns) for kind, ns in zip(kinds, of_one, strict=True) if ns) for of_one in pairs_ns
    ]
    needs = (timings.consumer, timings.consumer_lane, timings.consumer_start_ns, timings.held_by)
    consumers = [
        None if name == UNKNOWN else Consumer(rank.consumers[name], stream, start_ns, HELD_BY[held_by])
        for name, stream, start_ns, held_by in zip(*(column.tolist() for column in needs), strict=True)
    ]
    columns = {
        **{name: none_for_unknown(getattr(timings, name)) for name in ("bucket", "bytes", "blocking_ns")},
        **{name: none_for_unknown(getattr(timings, name), NO_TIME) for name in ("ready_ns", "launch_ns", "slack_ns")},
        "step": none_for_unknown(take_or_unknown(rank.step_numbers, timings.step)),
        "index": rank.timings.index[rows].tolist(),
        "op": _look_up_names(OPERATIONS, timings.operation),
        "phase": _look_up_names(PHASES, timings.phase),
        "group": _look_up_names(rank.groups, timings.group),
        "ranks": [size or all_ranks for size in none_for_unknown(timings.group_size)],
        "ready_source": _look_up_names(READY_SOURCES, timings.ready_source),
        "start_ns": timings.start_ns.tolist(),
        "end_ns": timings.end_ns.tolist(),
        "overlapped_ns": exposure.overlapped_ns[rows].tolist(),
        "exposed_ns": exposure.exposed_ns[rows].tolist(),
        "blocking": _look_up_names(BLOCKING, timings.blocking),
        "exposed_by": exposed_by,
        "transfer_ns": none_for_unknown(run.transfers_ns[index][rows]),
        "wait_ns": none_for_unknown(wait_ns),
        "exposed_wait_ns": none_for_unknown(np.where(wait_ns == UNKNOWN, UNKNOWN, exposure.exposed_wait_ns[rows])),
        "before_backward_end_ns": none_for_unknown(before_end, NO_TIME),
        "step_key": none_for_unknown(rank.keys[rows]),
        "consumer": consumers,
    }
    shared = {name: getattr(rank, name) for name in ("rank", "process", "device", "qualifier", "of_several")}
    return make_rows(Collective, columns, **shared)


def _look_up_names(names: Sequence[str | None], indices: Ints) -> list[str | None]:
    return [None if index is None else names[index] for index in none_for_unknown(indices)]
