"""All that explains a run's exposed communication, gathered: its collectives with their causes, and its skew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.root_cause import find_root_cause
from ddp_prof.analyze.collectives.straggler import measure_skew

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives.results import RunCollectives
    from ddp_prof.analyze.collectives.root_cause import RootCause
    from ddp_prof.analyze.collectives.run_analysis import Run
    from ddp_prof.analyze.collectives.straggler import RunSkew


@dataclass(frozen=True)
class Findings:
    """Why the communication of a run is exposed.

    Attributes:
        headline: What says most; ``None`` where nothing is exposed.
    """

    run: Run
    collectives: RunCollectives
    skew: RunSkew
    headline: RootCause | None


def explain_run(run: Run) -> Findings:
    """Measure the collectives and the skew of a run."""
    collectives = measure_collectives(run.ranks, run.warnings)
    return Findings(
        run, collectives, measure_skew(run.ranks, run.warnings), find_root_cause(collectives.collectives, run.manifest)
    )
