"""The collectives of a run, with the figures and warnings that concern all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from ddp_prof.analyze.collectives.alignment import Alignment
from ddp_prof.analyze.collectives.collective import FASTEST_LINK_BYTES_PER_S, Collective, collectives_of_rank
from ddp_prof.analyze.collectives.exposed_time import PEER_WAIT, UNKNOWN_WHY, WHYS
from ddp_prof.analyze.collectives.gradients import carry_gradients
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.core.blocking import BESIDE
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame_from_rows
from ddp_prof.analyze.statistics import Outliers, find_outliers
from ddp_prof.analyze.typical import PARTS, typical_step_of
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES, reason_of_run
from ddp_prof.columns import frame_names, frame_row
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints


@dataclass(frozen=True, slots=True)
class RunBlocking:
    """How long streams (on a CPU: the host) stood still for communication, over all ranks.

    Attributes:
        typical_ns: Median over the steps that communicate, each step of each rank counted once.
        total_ns: Sum over all collectives.
        steps: Number of these steps of all ranks; 0 if the trace marks no steps.
        blocked_steps: Number of these steps in which something stood still.
        collectives: Number of collectives.
        needed: Number of collectives with a known consumer.
        least_slack_ns: Smallest slack of these collectives; ``None`` if there are none, or if something stood still.
        exceeds_exposed: Whether streams stood still for much longer than communication was exposed, so that another
            stream computed meanwhile.
    """

    typical_ns: int
    total_ns: int
    steps: int
    blocked_steps: int
    collectives: int
    needed: int
    least_slack_ns: int | None
    exceeds_exposed: bool = False


_WHY_COLUMNS = tuple(f"why_{why}_" for why in WHYS if why not in (PEER_WAIT, UNKNOWN_WHY))
_WHEN_OF_BACKWARD = ("when_backward_ms", "when_tail_ms")
_EXPOSURE_COLUMNS = ("overlapped_", "exposed_", "blocking_", "slack_", "when_", "why_", "cause")


@dataclass(frozen=True, eq=False)
class RunCollectives(FrameResult):
    """The collectives of all ranks of a run.

    Attributes:
        alignment: How the clocks of the ranks' files were aligned.
        matched: Number of collectives that were found on at least two ranks, each counted once.
        unmatched: Number of collectives without a match, summed over all ranks; 0 if there is a single rank.
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
        return tuple(one for index in range(len(self.run.ranks)) for one in collectives_of_rank(self.run, index))

    @property
    def why_no_cause(self) -> str | None:
        """Why it is not known what exposes most of the time of a typical step; ``None`` if it is."""
        loses = self.exposed_by_step and any(rank.loses_launches for rank in self.run.ranks)
        return self.reason or (LOST_LAUNCHES if loses else None)

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
        """The key of the step that is nearest to the medians of all steps; see :mod:`ddp_prof.analyze.typical`.

        Only steps that communicate count and, if any of them reduce gradients, only those that do. ``None`` if no step
        communicates. If the lengths of the steps are not known, it is the step of median exposed time.
        """
        exposed = self.exposed_by_step
        reducing = {key for rank in self.run.ranks for key in rank.keys[carry_gradients(rank)].tolist()}
        keys = sorted([key for key in exposed if key in reducing] or exposed, key=exposed.__getitem__)
        if not keys:
            return None
        found = typical_step_of([_parts_of_steps(rank, keys) for rank in self.run.ranks if rank.marks_steps])
        return keys[len(keys) // 2] if found is None else found

    def rows_of_step(self, key: int | None) -> list[Ints]:
        """Return for each rank the rows of its timings in the step with this key; ``None``: outside of all steps."""
        return [np.flatnonzero(rank.keys == (UNKNOWN if key is None else key)) for rank in self.run.ranks]

    def of_step(self, key: int | None) -> list[Collective]:
        """Return the collectives of all ranks in the step with this key; ``None``: outside of all steps."""
        found = enumerate(self.rows_of_step(key))
        return [one for index, rows in found for one in collectives_of_rank(self.run, index, rows)]

    @cached_property
    def _unknown_ranks(self) -> frozenset[str]:
        """The names of the ranks of which exposed time is not known."""
        return frozenset(rank.name for rank in self.run.ranks if rank.reason)

    @cached_property
    def _without_launches(self) -> frozenset[str]:
        """The names of the ranks whose clocks of host and device disagree, so that no launch time is known."""
        return frozenset(rank.name for rank in self.run.ranks if rank.clocks_disagree)

    @cached_property
    def _without_backward(self) -> frozenset[str]:
        """The names of the ranks of which no pass of backward is known.

        The exposed time during backward, and after it, is then not known.
        """
        return frozenset(
            rank.name
            for rank in self.run.ranks
            if len(rank.timings) and np.all(rank.timings.backward_end_ns == NO_TIME)
        )

    def only_known(self, row: dict[str, Any], rank: str) -> dict[str, Any]:
        """Return a row of the frame with ``None`` in the columns that are not known for its rank.

        - ``row``: The row's values by the names of their columns.
        - ``rank``: Name of the row's rank.
        """
        if rank in self._without_launches:
            row = {name: None if name.startswith(_WHY_COLUMNS) else value for name, value in row.items()}
        if rank in self._without_backward:
            row = {name: None if name in _WHEN_OF_BACKWARD else value for name, value in row.items()}
        if rank not in self._unknown_ranks:
            return row
        return {name: None if name.startswith(_EXPOSURE_COLUMNS) else value for name, value in row.items()}

    @cached_property
    def outliers(self) -> Outliers | None:
        """The steps that stand out by their exposed time; ``None`` if there are none."""
        return find_outliers(
            (one.step_key, one.step, one.overlapped_ns + one.exposed_ns, one.exposed_ns)
            for one in self.collectives
            if not self.reason
        )

    @property
    def blocking(self) -> RunBlocking | None:
        """How long streams or the host stood still; ``None`` if not known.

        Also ``None`` if the host of a device waited for collectives: the time that this costs is not included, so the
        result would be too small.
        """
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
            exceeds_exposed=total > BESIDE * sum(int(exposure.exposed_ns.sum()) for exposure in self.run.exposures),
        )

    def to_frame(self) -> DataFrame:
        """Return one row per collective, with a column for each when and each why of exposed time; in nanoseconds."""
        rows = [self.only_known(frame_row(one), one.name) for one in self.collectives]
        return make_frame_from_rows(frame_names(Collective), rows)


def _parts_of_steps(rank: RankCollectives, keys: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the keys of those of a rank's steps that are in ``keys`` and have a known length, and their parts.

    The parts have one row per step, whose columns are :data:`~ddp_prof.analyze.typical.PARTS`, in nanoseconds.
    """
    times = rank.times
    rows = np.flatnonzero(times.is_known & np.isin(rank.step_keys, keys))
    parts = np.column_stack([getattr(times, f"{part}_ns") for part in PARTS])
    return rank.step_keys[rows], parts[rows]


def measure_collectives(run: RunAnalysis) -> RunCollectives:
    """Return the collectives of a run, with a warning if some seem faster than any link."""
    warnings = run.warnings
    too_fast = 0  # number of collectives whose recorded size is more than any link can carry in their time
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
