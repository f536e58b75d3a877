"""What a report shows of a run: its figures, and why its communication is exposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_prof.analyze.collectives.straggler import RankStepView
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RunExplanation
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.manifest import Manifest
from ddp_prof.present.headlines import Headline, root_cause_headline
from ddp_prof.present.table import TableView
from ddp_prof.present.timeline.model import Source


@dataclass(frozen=True)
class ReportRun:
    """One run.

    Attributes:
        name: What its files are called; on the pages what theirs are.
        result: Its figures.
        load_sources: Reads the traces that its timeline shows, of which one may hold all ranks.
        explanation: Why its communication is exposed.
        summary: Its row in the comparison of all runs.
        load_steps: What each rank communicated, by the key of the step.
        typical_step: The key of one of them; ``None`` where there are none.
        use: What its devices spent their time on, as tables by name.
    """

    name: str
    result: TraceOverlap
    load_sources: Callable[[], Sequence[Source]]
    explanation: RunExplanation
    summary: VariantSummary
    load_steps: Callable[[], Mapping[int, Sequence[RankStepView]]]
    typical_step: int | None
    use: Mapping[str, TableView]

    @property
    def manifest(self) -> Manifest | None:
        """How it was made, where its traces say it."""
        return self.explanation.run.manifest

    @property
    def cause(self) -> Headline:
        """The cost of communication and its main cause, as text."""
        collectives = self.explanation.collectives
        return root_cause_headline(self.explanation.root_cause, collectives.reason, collectives.blocking)
