"""All that explains a run's exposed communication, gathered: its collectives with their causes, and its skew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives import measure_collectives
from ddp_prof.analyze.headline import find_headline
from ddp_prof.analyze.skew import measure_skew

if TYPE_CHECKING:
    from ddp_prof.analyze.collectives import RunCollectives
    from ddp_prof.analyze.headline import Headline
    from ddp_prof.analyze.runs import Run
    from ddp_prof.analyze.skew import RunSkew


@dataclass(frozen=True)
class Findings:
    """Why the communication of a run is exposed.

    Attributes:
        headline: What says most; ``None`` where nothing is exposed.
    """

    run: Run
    collectives: RunCollectives
    skew: RunSkew
    headline: Headline | None


def explain_run(run: Run) -> Findings:
    """Measure the collectives and the skew of a run."""
    collectives = measure_collectives(run.ranks, run.warnings)
    return Findings(
        run, collectives, measure_skew(run.ranks, run.warnings), find_headline(collectives.collectives, run.manifest)
    )
