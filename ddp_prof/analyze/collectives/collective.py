"""One result per collective: its operation, its times, its exposed time, and when and why that was exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import methodcaller

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import (
    BLOCKING_CALL,
    LATE_INPUT,
    LAUNCHED_LATE,
    OUTSIDE,
    PEER_WAIT,
    QUEUED,
    TAIL,
    TRANSFER,
    UNKNOWN_WHEN,
    UNKNOWN_WHY,
    WHENS,
    WHYS,
    Exposure,
)
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import BLOCKING, READY_SOURCES, CollectiveTimings, RankCollectives
from ddp_prof.analyze.core.attribution import bus_factor
from ddp_prof.analyze.core.blocking import HELD_BY
from ddp_prof.analyze.result_bases import RankResult, make_rows, measure_columns, none_for_unknown
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, ResultColumn, column, derived
from ddp_prof.communication import OPERATIONS
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES
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
    """The operation that needed a collective; of several, the one with the least slack."""

    name: str = column("what needs it first", key="consumer", stays=WITH_MUCH_ROOM)
    stream: int = column("the stream of that")
    start_ns: int = column("when that started", is_instant=True)
    held_by: str = column("what the consumer waited for last", stays=WITH_MUCH_ROOM)


@dataclass(frozen=True)
class RankRows:
    """Some collectives of one rank, from which the columns of :class:`Collective` are measured.

    Attributes:
        index: Index of the rank in ``run.ranks``.
        rows: The chosen rows of the rank's timings.
    """

    run: RunAnalysis
    index: int
    rows: Ints

    @property
    def rank(self) -> RankCollectives:
        return self.run.ranks[self.index]

    @property
    def exposure(self) -> Exposure:
        return self.run.exposures[self.index]

    @cached_property
    def timings(self) -> CollectiveTimings:
        return select(self.rank.timings, self.rows)

    @cached_property
    def wait_ns(self) -> Ints:
        return self.run.waits_ns[self.index][self.rows]


def _sizes_of_groups(of: RankRows) -> list[int | None]:
    """Return the number of ranks in each collective's communicator; ``None`` if not known.

    If the communicator's size was not recorded, it is the number of ranks in the job, but only if there is a single
    communicator: of several, each may contain only some of the ranks. Communicators without a name are counted by their
    streams. On the stream of compute there may be several of them.
    """
    rank = of.rank
    lanes = set(distinct(rank.timings.lane[rank.timings.group == UNKNOWN]))
    may_be_several = len(rank.groups) + len(lanes) > 1 or bool(lanes & {rank.compute_stream} - {UNKNOWN})
    all_ranks = None if may_be_several or rank.has_subgroups or of.run.matches.doubt else rank.world_size
    return [size or all_ranks for size in none_for_unknown(of.timings.group_size)]


def _exposed_by(of: RankRows) -> list[tuple[ExposedPart, ...]]:
    """Return the parts of each collective's exposed time by when and why, without those of 0."""
    kinds = [(when, why) for when in WHENS for why in WHYS]
    pairs_ns = of.exposure.pairs_ns[of.rows].reshape(len(of.rows), len(kinds))
    row, kind = np.nonzero(pairs_ns)  # few of a collective's pairs: mostly one
    known = zip(map(kinds.__getitem__, kind.tolist()), pairs_ns[row, kind].tolist(), strict=True)
    parts = iter([ExposedPart(when, why, ns) for (when, why), ns in known])
    return [tuple(islice(parts, count)) for count in np.bincount(row, minlength=len(of.rows)).tolist()]


def _consumers(of: RankRows) -> list[Consumer | None]:
    """Return what needs each collective first; ``None`` if nothing is known to need it."""
    timings = of.timings
    needs = (timings.consumer, timings.consumer_lane, timings.consumer_start_ns, timings.held_by)
    return [
        None if name == UNKNOWN else Consumer(of.rank.consumers[name], stream, start_ns, HELD_BY[held_by])
        for name, stream, start_ns, held_by in zip(*(column.tolist() for column in needs), strict=True)
    ]


def _before_backward_end_ns(of: RankRows) -> Ints:
    end_ns = of.timings.backward_end_ns
    return np.where(end_ns == NO_TIME, NO_TIME, end_ns - of.timings.start_ns)


_WHENS = {
    FORWARD: "exposed during forward",
    BACKWARD: "exposed during backward",
    TAIL: "exposed after the last compute of its pass of backward",
    OPTIMIZER: "exposed during the optimizer",
    OUTSIDE: "exposed outside of named phases, or of steps",
    UNKNOWN_WHEN: "exposed where the trace names no phases, or in a phase outside of steps",
}
_WHYS = {
    BLOCKING_CALL: "exposed in a collective launched after backward, or on the stream of compute",
    LAUNCHED_LATE: "exposed because the host launched it late",
    QUEUED: "exposed because it queued behind another collective",
    LATE_INPUT: "exposed because its input ended late",
    PEER_WAIT: "exposed because a peer had not arrived",
    TRANSFER: "exposed while bytes moved, or for no other reason",
    UNKNOWN_WHY: "exposed, and the trace does not tell why: clocks disagree, or a CUDA graph launched it",
}
_EXPOSED_PARTS = (
    *(
        ResultColumn(f"when_{when}_ns", meaning, get=methodcaller("when_ns", when), stays=USUALLY, adds_up=True)
        for when, meaning in _WHENS.items()
    ),
    *(
        ResultColumn(f"why_{why}_ns", meaning, get=methodcaller("why_ns", why), stays=USUALLY, adds_up=True)
        for why, meaning in _WHYS.items()
    ),
)
"""Columns of exposed time by when and by why. The columns by when sum to the exposed time, and those by why, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(RankResult):
    """One collective on one rank. Times are in nanoseconds of its file's clock; a value not in the trace is ``None``.

    The order of the columns is that of tables, documents and frames.
    """

    rank: int | None = column("number of the rank", null="it is not known")
    process: int = column("number of the operating system's process")
    device: int | None = column("number of the GPU", null="the host computes")
    qualifier: str = column("name of its file, if ranks of several files are called alike; else empty", default="")
    of_several: bool = column("whether its process uses several devices", default=False)
    step: int | None = column(
        "number of the step",
        measure=lambda of: take_or_unknown(of.rank.step_numbers, of.timings.step),
        null="it is in no step",
        stays=ALWAYS,
        describes=True,
    )
    step_key: int | None = column(
        "unique number of the step within its rank, see ``Steps.keys``",
        measure=lambda of: of.rank.keys[of.rows],
        null="it is in no step",
    )
    phase: str | None = column(
        "phase of the step that launched it",
        default=None,
        measure=lambda of: _look_up_names(PHASES, of.timings.phase),
        null="no phase did",
    )
    index: int = column(
        "position of the collective in its step",
        measure=lambda of: of.rank.timings.index[of.rows],
        stays=ALWAYS,
        describes=True,
    )
    bucket: int | None = column(
        "number of the bucket that it carries",
        measure=lambda of: of.timings.bucket,
        null="no range tells it",
        stays=ALWAYS,
        describes=True,
    )
    op: str | None = column(
        "what the collective does",
        measure=lambda of: _look_up_names(OPERATIONS, of.timings.operation),
        null="its name does not tell",
        stays=WITH_MUCH_ROOM,
        describes=True,
        on_page=True,
    )
    bytes: int | None = column(
        "bytes of the message",
        measure=lambda of: of.timings.bytes,
        null="they were not recorded",
        stays=WITH_ROOM,
        describes=True,
        on_page=True,
    )
    group: str | None = column(
        "communicator, by the name that the profiler noted",
        measure=lambda of: _look_up_names(of.rank.groups, of.timings.group),
        null="none was noted",
    )
    ranks: int | None = column(
        "ranks in the communicator, or in the job if there is one communicator only",
        measure=_sizes_of_groups,
        null="not known; it is never the number of files",
    )
    ready_ns: int | None = column(
        "when the last gradient of the bucket was ready",
        measure=lambda of: of.timings.ready_ns,
        null="not known",
        is_instant=True,
        stays=WITH_ROOM,
    )
    launch_ns: int | None = column(
        "when the host launched it",
        measure=lambda of: of.timings.launch_ns,
        null="not recorded",
        is_instant=True,
        stays=WITH_ROOM,
    )
    start_ns: int = column(
        "when it started on the device", measure=lambda of: of.timings.start_ns, is_instant=True, stays=USUALLY
    )
    end_ns: int = column("when it ended", measure=lambda of: of.timings.end_ns, is_instant=True, stays=WITH_ROOM)
    wait_ns: int | None = column(
        "time in which a peer had not arrived",
        measure=lambda of: of.wait_ns,
        null="it was found on no other rank",
        stays=WITH_ROOM,
        adds_up=True,
        skips_unknown=True,
    )
    transfer_ns: int | None = column(
        "the rest of its duration",
        measure=lambda of: of.run.transfers_ns[of.index][of.rows],
        null="it was found on no other rank",
        stays=WITH_ROOM,
    )
    overlapped_ns: int = column(
        "communication with compute at the same time",
        measure=lambda of: of.exposure.overlapped_ns[of.rows],
        stays=WITH_ROOM,
        adds_up=True,
    )
    exposed_ns: int = column(
        "communication without compute at the same time",
        measure=lambda of: of.exposure.exposed_ns[of.rows],
        stays=ALWAYS,
        adds_up=True,
        on_page=True,
    )
    blocking_ns: int | None = column(
        "time in which a stream (on a CPU: the host) stood still for communication",
        default=None,
        measure=lambda of: of.timings.blocking_ns,
        null="not known",
        stays=USUALLY,
        adds_up=True,
        on_page=True,
    )
    slack_ns: int | None = column(
        "how much later it could have ended without delaying what needs it",
        default=None,
        measure=lambda of: of.timings.slack_ns,
        null="nothing is known to need it",
        is_signed=True,
        stays=WITH_ROOM,
    )
    exposed_wait_ns: int | None = column(
        "exposed time in which a peer had not arrived",
        measure=lambda of: np.where(of.wait_ns == UNKNOWN, UNKNOWN, of.exposure.exposed_wait_ns[of.rows]),
        null="it was found on no other rank",
        stays=WITH_MUCH_ROOM,
        adds_up=True,
        skips_unknown=True,
    )
    before_backward_end_ns: int | None = column(
        "how long it started before the end of compute in its pass of backward; negative if after",
        measure=_before_backward_end_ns,
        null="no compute of backward is known",
        is_signed=True,
    )
    consumer: Consumer | None = column(
        "the operation that needed it; of several, the one with the least slack",
        default=None,
        measure=_consumers,
        null="none is known",
        holds=Consumer,
    )
    blocking: str | None = column(
        "why the program waits for it: ``after_backward`` or ``compute_stream``",
        measure=lambda of: _look_up_names(BLOCKING, of.timings.blocking),
        null="it does not",
    )
    exposed_by: tuple[ExposedPart, ...] = column(
        "the parts of ``exposed_ns``, by when and why; parts of 0 are left out",
        measure=_exposed_by,
        parts=_EXPOSED_PARTS,
    )
    ready_source: str | None = column(
        "source of the time of readiness: ``kernel`` (the end of the last gradient kernel) or ``hook``",
        measure=lambda of: _look_up_names(READY_SOURCES, of.timings.ready_source),
        null="the time is not known",
        key="ready_by",
        stays=WITH_MUCH_ROOM,
    )

    @property
    def step_identity(self) -> tuple[int | None, int, int | None, int | None, str]:
        """A key for the step of this rank; it contains the qualifier because every Kineto file has process 0."""
        return self.rank, self.process, self.device, self.step_key, self.qualifier

    def when_ns(self, when: str) -> int:
        """Return the exposed time (ns) at ``when``, one of ``exposed_time.WHENS``."""
        return sum(part.ns for part in self.exposed_by if part.when == when)

    def why_ns(self, why: str) -> int:
        """Return the exposed time (ns) for the reason ``why``, one of ``exposed_time.WHYS``."""
        return sum(part.ns for part in self.exposed_by if part.why == why)

    @property
    def backward_end_ns(self) -> int | None:
        """The end of the last compute in its pass of backward; ``None`` if no compute of backward is known."""
        return None if self.before_backward_end_ns is None else self.start_ns + self.before_backward_end_ns

    @property
    @derived("from start to end", stays=USUALLY, adds_up=True, on_page=True, after="end_ns")
    def duration_ns(self) -> int:
        """From the device's start to its end."""
        return self.end_ns - self.start_ns

    @property
    @derived(
        "from launch to start", called="launch to start ms", null="not recorded", stays=WITH_MUCH_ROOM, after="end_ns"
    )
    def queueing_ns(self) -> int | None:
        """From the host's launch to the device's start."""
        return None if self.launch_ns is None else self.start_ns - self.launch_ns

    @property
    @derived("exposed time in which all peers had arrived", null="it was found on no other rank")
    def exposed_transfer_ns(self) -> int | None:
        """The part of ``exposed_ns`` in which all peers had arrived."""
        return None if self.exposed_wait_ns is None else self.exposed_ns - self.exposed_wait_ns

    @property
    @derived(
        "bytes over transfer time; over the duration, where no peer is known",
        key="algbw_GB/s",
        null="bytes are not known, or doubtful",
        stays=WITH_MUCH_ROOM,
        after="transfer_ns",
    )
    def algbw_bytes_per_s(self) -> float | None:
        """Bytes per second of transfer time, or of the duration if the transfer time is not known.

        ``None`` if the size is not known, or if the result is more than any link can carry: the recorded size is then
        not what this collective moved.
        """
        time_ns = self.duration_ns if self.transfer_ns is None else self.transfer_ns
        if self.bytes is None or time_ns <= 0:
            return None
        rate = self.bytes / time_ns * 1e9
        return rate if rate <= FASTEST_LINK_BYTES_PER_S else None

    @property
    @derived(
        "algbw times 2 (n - 1) / n for an all-reduce of n ranks",
        key="busbw_GB/s",
        null="algbw, or the number of ranks, is not known",
        stays=WITH_MUCH_ROOM,
        after="algbw_bytes_per_s",
    )
    def busbw_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth times the operation's :func:`bus_factor`."""
        factor, bandwidth = bus_factor(self.op, self.ranks), self.algbw_bytes_per_s
        return None if factor is None or bandwidth is None else factor * bandwidth


def collectives_of_rank(run: RunAnalysis, index: int, rows: Ints | None = None) -> list[Collective]:
    """Return the collectives of the run's rank with this index: those in ``rows`` of its timings, or all."""
    rank = run.ranks[index]
    of_rank = RankRows(run, index, np.arange(len(rank.timings)) if rows is None else rows)
    shared = {name: getattr(rank, name) for name in ("rank", "process", "device", "qualifier", "of_several")}
    return make_rows(Collective, measure_columns(Collective, of_rank), **shared)


def _look_up_names(names: Sequence[str | None], indices: Ints) -> list[str | None]:
    """Return the name at each index; ``None`` where the index is ``UNKNOWN``."""
    return [None if index is None else names[index] for index in none_for_unknown(indices)]
