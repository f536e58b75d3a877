"""The ranks of one run, gathered from any number of traces, each reduced to its collectives before the next is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives.timing import RankCollectives, find_timings
from ddp_prof.analyze.core.diagnostics import diagnose
from ddp_prof.manifest import label_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddp_prof.analyze.core.attribution import RankEvents
    from ddp_prof.manifest import Manifest
    from ddp_prof.trace import Trace


@dataclass(frozen=True)
class Run:
    """The collectives of a run's ranks.

    Attributes:
        trace: The file, of several the first.
        device: ``cuda`` or ``cpu``, as of ``TraceOverlap``.
        ranks: By rank, then process and device.
    """

    trace: Path
    label: str
    device: str
    manifest: Manifest | None
    ranks: tuple[RankCollectives, ...]
    warnings: tuple[str, ...]

    def does_the_work_of(self, other: Run) -> bool:
        """Whether another run, by its run.json, has ranks that compute the same: same model, same share of a batch."""
        if self is other or self.manifest is None or other.manifest is None:
            return False
        return _work(self.manifest) == _work(other.manifest)


def _work(manifest: Manifest) -> tuple[str, float, int, str]:
    return (
        manifest.model_size,
        manifest.batch_size / manifest.world_size,
        manifest.seq_len,
        manifest.device,
    )


def reduce_trace(trace: Trace, ranks: Sequence[RankEvents]) -> Run:
    """What a single trace tells of a run."""
    return Run(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        device="cuda" if len(trace.activities) else "cpu",
        manifest=trace.manifest,
        ranks=find_timings(trace, ranks),
        warnings=diagnose(trace, ranks),
    )


def merge_traces(parts: Sequence[Run]) -> Run:
    """The traces of one run as one.

    Raises:
        ValueError: There is none.
    """
    if not parts:
        raise ValueError("no traces to merge")
    ranks = [rank for part in parts for rank in part.ranks]
    return replace(
        parts[0],
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0))),
        warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
    )
