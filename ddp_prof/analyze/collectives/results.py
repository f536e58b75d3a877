"""One result a collective: what it was, its life, what of it was exposed, and why."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.collectives.clock_alignment import align_clocks
from ddp_prof.analyze.collectives.exposure import CAUSES, Exposure, explain_exposure
from ddp_prof.analyze.collectives.matching import match_collectives
from ddp_prof.analyze.collectives.timing import READY_SOURCES, find_timings
from ddp_prof.analyze.core.attribution import find_rank_events
from ddp_prof.analyze.core.frames import frame_of
from ddp_prof.analyze.core.operations import OPERATIONS, bus_factor
from ddp_prof.trace import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from ddp_prof.analyze.collectives.clock_alignment import Alignment
    from ddp_prof.analyze.collectives.matching import Matches
    from ddp_prof.analyze.collectives.timing import RankCollectives
    from ddp_prof.trace import Ints, Trace


@dataclass(frozen=True, slots=True)
class Causes:
    """Exposed nanoseconds by cause; see :mod:`~ddp_prof.analyze.collectives.exposure`."""

    tail: int
    launched_late: int
    queued: int
    waiting: int
    starved: int
    synchronous: int

    @property
    def total_ns(self) -> int:
        """All that is exposed."""
        return sum(getattr(self, cause) for cause in CAUSES)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one rank, in nanoseconds of its file's clock; ``None`` for what the trace does not tell.

    Attributes:
        step: The step's own number.
        index: Position in the step, by launch.
        ready_source: ``kernel`` (the last gradient's) or ``hook``.
        overlapped_ns, exposed_ns: Of the instants that belong to it; the collectives of a step sum to the step's.
        exposed_wait_ns: Exposed while a peer had not arrived.
        transfer_ns: Shortest duration over the ranks; ``wait_ns`` the rest of this one's.
        ranks: Ranks in the communicator.
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
    causes: Causes
    transfer_ns: int | None
    wait_ns: int | None
    exposed_wait_ns: int | None
    before_backward_end_ns: int | None
    """How long before the end of backward's compute it started; negative after it."""

    @property
    def step_identity(self) -> tuple[int | None, int, int | None, int | None]:
        """What the collectives of one step of one rank have in common; every Kineto file calls its process 0."""
        return self.rank, self.process, self.device, self.step

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
        """Exposed while bytes moved."""
        return None if self.exposed_wait_ns is None else self.exposed_ns - self.exposed_wait_ns

    @property
    def algbw_bytes_per_s(self) -> float | None:
        """Bytes over the time of transfer, which is the duration where peers are not known."""
        time_ns = self.duration_ns if self.transfer_ns is None else self.transfer_ns
        return self.bytes / time_ns * 1e9 if self.bytes is not None and time_ns > 0 else None

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth times the operation's factor, :func:`~ddp_prof.analyze.core.operations.bus_factor`."""
        factor, bandwidth = bus_factor(self.op, self.ranks), self.algbw_bytes_per_s
        return None if factor is None or bandwidth is None else factor * bandwidth


@dataclass(frozen=True, slots=True)
class RunCollectives:
    """The collectives of all ranks of a run.

    Attributes:
        matched: Collectives that were found on several ranks.
        unmatched: Collectives of a rank that found no match on others, though there are others.
    """

    collectives: tuple[Collective, ...]
    alignment: Alignment
    matched: int
    unmatched: int
    warnings: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """A row a collective."""
        return frame_of(self.collectives)


def measure_collectives(ranks: Sequence[RankCollectives], warnings: Sequence[str] = ()) -> RunCollectives:
    """Explain the collectives of a run.

    Args:
        ranks: The ranks of one run, from any number of files, as ``timing.find_timings`` gives them.
        warnings: What is doubtful about the traces.
    """
    matches = match_collectives(ranks)
    alignment = align_clocks(ranks, matches)
    transfers = transfer_times(ranks, matches)
    return RunCollectives(
        collectives=tuple(
            item
            for rank, transfer_ns in zip(ranks, transfers, strict=True)
            for item in _of_rank(rank, transfer_ns, len(ranks))
        ),
        alignment=alignment,
        matched=len(matches),
        unmatched=matches.unmatched,
        warnings=(*warnings, *diagnose_ranks(ranks, matches, alignment)),
    )


def measure_trace(
    trace: Trace, *, step_pattern: str | None = None, backward_pattern: str | None = None
) -> RunCollectives:
    """Explain the collectives of a run that lies in one trace; arguments as of ``measure_overlap``."""
    ranks = find_rank_events(trace, step_pattern=step_pattern, backward_pattern=backward_pattern)
    return measure_collectives(find_timings(trace, ranks), trace.warnings)


def transfer_times(ranks: Sequence[RankCollectives], matches: Matches) -> list[Ints]:
    """For each rank's collectives the shortest duration over the ranks, which needs no common clock."""
    duration = matches.column(ranks, "end_ns") - matches.column(ranks, "start_ns")
    present = matches.rows != UNKNOWN
    shortest = np.where(present, duration, np.iinfo(np.int64).max).min(axis=1, initial=np.iinfo(np.int64).max)
    transfers = []
    for column, rank in enumerate(ranks):
        transfer = np.full(len(rank.timings), UNKNOWN, np.int64)
        transfer[matches.rows[present[:, column], column]] = shortest[present[:, column]]
        transfers.append(transfer)
    return transfers


def wait_times(rank: RankCollectives, transfer_ns: Ints) -> Ints:
    """What of each duration is not transfer; ``UNKNOWN`` where transfer is."""
    duration = rank.timings.end_ns - rank.timings.start_ns
    return np.where(transfer_ns == UNKNOWN, UNKNOWN, duration - transfer_ns)


def _of_rank(rank: RankCollectives, transfer_ns: Ints, ranks: int) -> list[Collective]:
    timings = rank.timings
    wait_ns = wait_times(rank, transfer_ns)
    exposure = explain_exposure(rank, wait_ns)
    backward_end = np.append(rank.backward_end_ns, UNKNOWN)[timings.step].tolist()
    column = {column.name: getattr(timings, column.name).tolist() for column in fields(timings)}
    part = {column.name: getattr(exposure, column.name).tolist() for column in fields(Exposure)}
    numbers = [*rank.step_numbers.tolist(), UNKNOWN]
    found = []
    for row, index in enumerate(_positions(timings.step).tolist()):
        has_match = wait_ns[row] != UNKNOWN
        found.append(
            Collective(
                rank=rank.rank,
                process=rank.process,
                device=rank.device,
                step=_known(numbers[column["step"][row]]),
                index=index,
                op=_named(OPERATIONS, column["operation"][row]),
                bucket=_known(column["bucket"][row]),
                bytes=_known(column["bytes"][row]),
                group=_named(rank.groups, column["group"][row]),
                ranks=_known(column["group_size"][row]) or rank.world_size or (ranks if ranks > 1 else None),
                ready_ns=_known(column["ready_ns"][row]),
                ready_source=_named(READY_SOURCES, column["ready_source"][row]),
                launch_ns=_known(column["launch_ns"][row]),
                start_ns=column["start_ns"][row],
                end_ns=column["end_ns"][row],
                overlapped_ns=part["overlapped_ns"][row],
                exposed_ns=part["exposed_ns"][row],
                causes=Causes(*(part[f"{cause}_ns"][row] for cause in CAUSES)),
                transfer_ns=_known(int(transfer_ns[row])),
                wait_ns=int(wait_ns[row]) if has_match else None,
                exposed_wait_ns=part["exposed_wait_ns"][row] if has_match else None,
                before_backward_end_ns=(
                    None if backward_end[row] == UNKNOWN else backward_end[row] - column["start_ns"][row]
                ),
            )
        )
    return found


def _positions(step: Ints) -> Ints:
    """The position of each row within its step; rows are ordered by step."""
    first = np.searchsorted(step, step, side="left")
    return np.arange(len(step)) - first


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _named(names: Sequence[str], index: int) -> str | None:
    return None if index == UNKNOWN else names[index]


def diagnose_ranks(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> list[str]:
    """What ranks, matches and clocks do not let one say."""
    doubts = []
    if (missing := alignment.missing_ranks) and any(len(rank.timings) for rank in ranks):
        which = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {_ranges(missing)} are"
        effect = (
            "waiting cannot be told from transfer"
            if len(ranks) < 2
            else "transfer may be shorter and waiting longer than told"
        )
        doubts.append(f"{which} not among the traces: {effect}")
    if matches.unmatched:
        doubts.append(
            f"{matches.unmatched:,} collectives have no match on the other ranks: "
            "their waiting cannot be told from transfer"
        )
    if any(len(rank.timings) and not len(rank.times) for rank in ranks):
        doubts.append(
            "the trace tells no steps: only the last tail is known, earlier ones count as starved; see --step-range"
        )
    elif any(np.any(rank.backward_end_ns == UNKNOWN) for rank in ranks if len(rank.timings)):
        doubts.append("steps without any compute known to be backward: their tail counts as starved")
    return doubts


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` for 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
