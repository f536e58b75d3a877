"""One result per collective: its operation, its times, its exposed time, and when and why that was exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import WHENS, WHYS
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import BLOCKING, READY_SOURCES
from ddp_prof.analyze.core.attribution import bus_factor
from ddp_prof.analyze.core.blocking import HELD_BY
from ddp_prof.analyze.result_bases import RankResult, make_rows, none_for_unknown
from ddp_prof.communication import OPERATIONS
from ddp_prof.range_names import PHASES
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, distinct, select, take_or_unknown

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


def collectives_of_rank(run: RunAnalysis, index: int, rows: Ints | None = None) -> list[Collective]:
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
