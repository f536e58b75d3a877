"""The skew of a run: how each rank arrives at collectives, which ones are late, and what that costs.

:mod:`.arrivals` defines lags, :mod:`.straggler` what a late rank costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.collectives.alignment import Alignment
from ddp_prof.analyze.collectives.arrivals import largest_lags
from ddp_prof.analyze.collectives.timing import RankCollectives
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, RankResult, make_frame
from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, column, derived
from ddp_prof.manifest import format_ranges
from ddp_prof.table import Floats
from ddp_prof.trace import Mask


@dataclass(frozen=True)
class RankArrivals:
    """How one rank arrives at collectives; the columns of :class:`RankSkew` are measured from it.

    Attributes:
        takes_part: For each matched collective of the run, whether the rank takes part in it.
        is_last: For each of them, whether the rank arrives last, with a lag above the residual.
        lags_ns: Its lag in each step or, without steps, at each matched collective; NaN where it has none.
        has_largest_lag: For each element of ``lags_ns``, whether it is the largest of all ranks, and above the
            residual.
        lags_before_ns: How late the rank was when each step began; ``None`` without steps.
        exposed_wait_ns, cost_ns: The columns with these names.
        steps: Number of steps with matched collectives.
    """

    rank: RankCollectives
    takes_part: Mask
    is_last: Mask
    lags_ns: Floats
    has_largest_lag: Mask
    lags_before_ns: Floats | None
    exposed_wait_ns: int | None
    cost_ns: int | None
    steps: int


def _lag_before_ns(of: RankArrivals) -> int | None:
    """Return the rank's median lag at the beginning of the steps in which it had the largest lag."""
    return None if of.lags_before_ns is None else median_lag(of.lags_before_ns[of.has_largest_lag])


def median_lag(lags: Floats) -> int | None:
    """Return the median of the lags that are not NaN, in whole nanoseconds; ``None`` if there are none."""
    known = lags[~np.isnan(lags)]
    return round(float(np.median(known))) if len(known) else None


def int_or_none(value: float) -> int | None:
    return None if np.isnan(value) else round(float(value))


_NO_STEPS = "no whole step is marked; none of its collectives is found on another rank"
_NO_COST = (
    "the exposed time of some rank is not known; none of its collectives is found on another rank; collectives of no "
    "step queued for waits"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew(RankResult):
    """The skew of one rank; ``None`` if nothing was matched."""

    rank: int | None = column("number of the rank", measure=lambda of: of.rank.rank, null="it is not known")
    process: int = column("number of the operating system's process", measure=lambda of: of.rank.process)
    device: int | None = column("number of the GPU", measure=lambda of: of.rank.device, null="the host computes")
    collectives: int | None = column(
        "its collectives",
        measure=lambda of: None if of.rank.lacks_names else len(of.rank.timings),
        null="kernels have no names",
        stays=WITH_ROOM,
    )
    matched: int = column(
        "collectives that are found on another rank",
        default=0,
        measure=lambda of: int(of.takes_part.sum()),
        stays=WITH_ROOM,
    )
    last_collectives: int = column(
        "collectives at which the rank arrived last, with a lag above the residual of the clocks",
        measure=lambda of: int(of.is_last.sum()),
        stays=WITH_ROOM,
    )
    last_steps: int = column(
        "steps in which it had the largest lag, above the residual; 0 without steps",
        measure=lambda of: int(of.has_largest_lag.sum()) if of.steps else 0,
    )
    lag_ns: int | None = column(
        "per step, its largest delay behind the others' median: median over steps, or over collectives without steps",
        measure=lambda of: median_lag(of.lags_ns),
        null="no clocks can be compared",
        is_signed=True,
        stays=ALWAYS,
    )
    worst_lag_ns: int | None = column(
        "the largest lag of any step",
        measure=lambda of: int_or_none(largest_lags(of.lags_ns[:, None])[0]),
        null="no clocks can be compared",
        is_signed=True,
        stays=USUALLY,
    )
    exposed_wait_ns: int | None = column(
        "sum of its own exposed waits for other ranks",
        measure=lambda of: of.exposed_wait_ns,
        null="the exposed time of some rank is not known; none of its collectives is found on another rank",
    )
    cost_ns: int | None = column(
        "sum of the costs of the steps in which it had the largest lag; without steps, its cost in the capture",
        measure=lambda of: of.cost_ns,
        null=_NO_COST,
    )
    qualifier: str = column(
        "name of its file, if ranks of several files are called alike; else empty",
        default="",
        measure=lambda of: of.rank.qualifier,
    )
    of_several: bool = column(
        "whether its process uses several devices", default=False, measure=lambda of: of.rank.of_several
    )
    lag_when_last_ns: int | None = column(
        "median lag over the steps, or collectives, in which it had the largest one",
        default=None,
        measure=lambda of: median_lag(of.lags_ns[of.has_largest_lag]),
        null="there are none",
    )
    lag_before_ns: int | None = column(
        "how late it was already when these steps began, by their ranges on the host: the median",
        default=None,
        measure=_lag_before_ns,
        null="there are no such steps, or the host's clock does not tell when they began",
        is_signed=True,
    )
    all_steps: int = column("steps with matched collectives", default=0, measure=lambda of: of.steps, in_document=False)

    @property
    @derived(
        "steps in which the rank arrived last",
        key="last_steps",
        null=_NO_STEPS,
        stays=ALWAYS,
        in_document=False,
        after="last_collectives",
    )
    def last_of_steps(self) -> int | None:
        """The same as ``last_steps``, but ``None`` if it is not known when the rank arrives in a step."""
        return self.last_steps if self.all_steps and self.matched else None

    @property
    @derived(
        "share of the steps in which the rank arrived last",
        key="last_%",
        null=_NO_STEPS,
        stays=WITH_ROOM,
        in_document=False,
        after="last_of_steps",
    )
    def last_ratio(self) -> float | None:
        """``last_steps`` over all steps with matched collectives, 0 to 1."""
        return self.last_steps / self.all_steps if self.all_steps and self.matched else None

    @property
    @derived(
        "exposed time in which a peer had not arrived, mean per step",
        key="exposed_wait_ms",
        null="the exposed time of some rank is not known; none of its collectives is found on another rank",
        stays=WITH_MUCH_ROOM,
        in_document=False,
        after="worst_lag_ns",
    )
    def mean_exposed_wait_ns(self) -> float | None:
        """``exposed_wait_ns`` divided by the number of steps; without steps, that of the capture."""
        return None if self.exposed_wait_ns is None else self.exposed_wait_ns / max(1, self.all_steps)

    @property
    @derived(
        "what another rank would gain at most without the lag of this one, mean per step",
        key="costs_others_ms",
        null=_NO_COST,
        stays=USUALLY,
        in_document=False,
        after="mean_exposed_wait_ns",
    )
    def mean_cost_ns(self) -> float | None:
        """``cost_ns`` divided by the number of steps; without steps, that of the capture."""
        return None if self.cost_ns is None else self.cost_ns / max(1, self.all_steps)

    @property
    def cost_when_last_ns(self) -> int | None:
        """What the rank costs the others in a step in which it had the largest lag: the mean of these steps."""
        return None if self.cost_ns is None or not self.last_steps else round(self.cost_ns / self.last_steps)


@dataclass(frozen=True, slots=True)
class StepSkew:
    """The skew of one step. Figures per rank are in the order of :attr:`RunSkew.ranks`."""

    step: int = column("key of the step")
    lags_ns: tuple[int | None, ...] = column("the largest lag of each rank", null="no clocks can be compared")
    last: int | None = column("index of the rank that arrived last", null="no lag is above the residual")
    cost_ns: int | None = column(
        "the step's cost, 0 if no rank was last", null="the exposed time of some rank is not known"
    )
    waits_ns: tuple[int | None, ...] = column(
        "the exposed wait of each rank",
        default=(),
        null="the exposed time of some rank is not known; the rank has no matched collective in the step",
    )
    lag_before_ns: int | None = column(
        "how late the rank that arrived last was already when the step began", default=None, null="no rank was last"
    )


@dataclass(frozen=True, slots=True)
class LateGroup:
    """Ranks that are late together; see :mod:`.straggler`.

    Attributes:
        ranks: Their indices.
        lag_ns: The median of their lags in the steps in which all of them are late.
        costs_ns: For each of these steps, the largest time that another rank would gain if none of them were late;
            ``None`` if the exposed time of some rank is not known.
        keys: The keys of these steps.
    """

    ranks: tuple[int, ...]
    lag_ns: int
    steps: int
    costs_ns: tuple[int, ...] | None
    keys: tuple[int, ...] = ()

    @property
    def cost_ns(self) -> int | None:
        """The mean of the steps' costs."""
        return None if self.costs_ns is None else round(sum(self.costs_ns) / self.steps)


@dataclass(frozen=True, slots=True)
class LateInTurns:
    """Ranks that are late in turns: other ones in other steps.

    Attributes:
        ranks: The indices of the ranks that are late in each step, by its key; steps without such ranks are left out.
        costs_ns: For each step, the largest time that another rank would gain if none of its late ranks were late.
    """

    ranks: Mapping[int, tuple[int, ...]]
    costs_ns: tuple[int, ...]

    @property
    def cost_ns(self) -> int:
        """The mean of the steps' costs."""
        return round(sum(self.costs_ns) / len(self.costs_ns))

    @property
    def median_cost_ns(self) -> int:
        """The median of the steps' costs: 0 if most steps lose nothing."""
        return round(float(np.median(self.costs_ns)))


@dataclass(frozen=True, slots=True)
class RunSkew(FrameResult):
    """The skew of a run.

    Attributes:
        steps: The steps with matched collectives; empty if the traces mark no steps.
        straggler: Index of the rank that is last in more steps, or in more of the costly ones, than chance explains;
            ``None`` if there is none.
        reason: Why lags are not known; ``None`` if they are.
        group: The ranks that are late together in more steps than chance explains; ``None`` if there are none.
        doubt: Why the straggler, or the group, may not be the cause of its lag; ``None`` if nothing says so.
        in_turns: The ranks that are late in each step if there is no straggler and no group; ``None`` if there is, if
            their cost is not known, or if some of them may have received late. Also on a CPU, where ranks take each
            other's time, so that one of them is always late.
        costs_ns: For each step, the largest time that another rank would gain if the straggler, or none of the group,
            were late; ``None`` if there are none of these, or it is not known.
        hides_waits: Whether GPUs compute beside much of the waiting. Communication slows that compute, so a step may be
            shorter without a lag by more than it exposes less.
    """

    ranks: tuple[RankSkew, ...]
    steps: tuple[StepSkew, ...]
    straggler: int | None
    alignment: Alignment
    reason: str | None
    warnings: tuple[str, ...]
    has_steps: bool = True
    group: LateGroup | None = None
    doubt: str | None = None
    in_turns: LateInTurns | None = None
    costs_ns: tuple[int, ...] | None = None
    hides_waits: bool = False

    def to_frame(self) -> DataFrame:
        """Return a table with one row per rank."""
        return make_frame(RankSkew, self.ranks)

    @property
    def cost_ns(self) -> int | None:
        """The mean of the steps' costs; ``None`` if these are not known."""
        return None if self.costs_ns is None else round(sum(self.costs_ns) / len(self.costs_ns))

    @property
    def late_ranks(self) -> tuple[int, ...]:
        """The indices of the group or, without one, of the straggler; empty if there is neither."""
        if self.group:
            return self.group.ranks
        return () if self.straggler is None else (self.straggler,)

    @property
    def or_more(self) -> str:
        """What to say behind the gain without a lag: that it may be more, if that may be so."""
        return ", or more if communication slows compute" if self.hides_waits else ""

    def names_of(self, ranks: Sequence[int]) -> str:
        """Return the names of several ranks, given their indices: ``ranks 4-7``, or one name after the other."""
        named = [self.ranks[index] for index in ranks]
        if any(rank.name != f"rank {rank.rank}" for rank in named):
            return ", ".join(rank.name for rank in named)
        plural = "s" if len(named) > 1 else ""
        return f"rank{plural} {format_ranges(sorted(rank.rank for rank in named if rank.rank is not None))}"

    @property
    def latest(self) -> RankSkew | None:
        """The straggler or, if there is none, the rank that is last most often.

        ``None`` if several ranks are last equally often, if no rank is ever last, or if lags are not known.
        """
        if self.straggler is not None:
            return self.ranks[self.straggler]
        times = [rank.last_steps if self.steps else rank.last_collectives for rank in self.ranks]
        most = max(times, default=0)
        return self.ranks[times.index(most)] if most and times.count(most) == 1 and not self.reason else None
