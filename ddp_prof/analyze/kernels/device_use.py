"""What the devices of a run spent their time on: all that ``ddp-prof kernels`` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.frames import Framed, frame_of
from ddp_prof.analyze.kernels.hidden import HiddenTime, measure_hidden
from ddp_prof.analyze.kernels.idle import IdleTime, measure_idle
from ddp_prof.analyze.kernels.kernel_times import KernelRuns, KernelTime, find_kernel_runs, measure_kernels
from ddp_prof.analyze.quality.unknown_work import is_blind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from ddp_prof.analyze.core.rank_events import RankEvents


@dataclass(frozen=True)
class RankUse:
    """One rank.

    Attributes:
        overlapped_ns: Overlapped communication, as of ``RankOverlap``; ``None`` where it is not known.
        hidden: Its parts, which sum to it.
        runs: Every execution of a kernel.
    """

    process: int
    device: int | None
    rank: int | None
    overlapped_ns: int | None
    hidden: tuple[HiddenTime, ...]
    idle: IdleTime
    runs: KernelRuns


@dataclass(frozen=True)
class DeviceUse(Framed):
    """The ranks of a run, and their kernels taken together."""

    ranks: tuple[RankUse, ...]
    kernels: tuple[KernelTime, ...]

    def to_frame(self) -> pd.DataFrame:
        """A row a kernel."""
        return frame_of(KernelTime, self.kernels)


def use_of_rank(rank: RankEvents) -> RankUse:
    """What one rank's device spent its time on."""
    hidden = () if is_blind(rank) else measure_hidden(rank)
    return RankUse(
        process=rank.process,
        device=rank.device,
        rank=rank.rank,
        overlapped_ns=None if is_blind(rank) else sum(part.overlapped_ns for part in hidden),
        hidden=hidden,
        idle=measure_idle(rank),
        runs=find_kernel_runs(rank),
    )


def measure_device_use(ranks: Sequence[RankUse]) -> DeviceUse:
    """The ranks of a run together."""
    return DeviceUse(tuple(ranks), measure_kernels([rank.runs for rank in ranks]))
