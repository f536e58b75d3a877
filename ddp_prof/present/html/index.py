"""What the first page of a report says: figures, tables and lists of a set of runs, as values of its template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_prof import __version__
from ddp_prof.manifest import Caveat
from ddp_prof.present.charts.comparison import overlap_ratio
from ddp_prof.present.columns import columns_of
from ddp_prof.present.headlines import root_cause_headline, skew_headline, tell_story
from ddp_prof.present.tables.comparison import HOW_TO_READ, compare_rows
from ddp_prof.present.tables.kernels import most_of
from ddp_prof.present.tables.overlap import warnings_by_run
from ddp_prof.present.text import percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddp_prof.analyze.overlap.comparison import VariantSummary
    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.analyze.root_cause import RunExplanation
    from ddp_prof.manifest import Manifest
    from ddp_prof.present.headlines import Headline
    from ddp_prof.present.table_view import TableView

INDEX = "index"
TIMELINE, WHY, KERNELS = "", "-why", "-kernels"
"""How the names of a run's pages end: ``overlap.html``, ``overlap-why.html``, ``overlap-kernels.html``."""


@dataclass(frozen=True)
class RunSection:
    """What the page tells of one run.

    Attributes:
        name: Of its timeline: ``name.html`` and, where there are pictures, ``name.png`` lie beside the page.
        result: Its figures.
        summary: Its row among all runs.
        manifest: How it was made; ``None`` where its traces do not say it.
        explanation: Why its communication is exposed.
        use: What its devices spent their time on, as tables by name.
    """

    name: str
    result: TraceOverlap
    summary: VariantSummary
    manifest: Manifest | None
    explanation: RunExplanation
    use: Mapping[str, TableView]

    @property
    def cause(self) -> Headline:
        """The main cause of exposed time, in words."""
        return root_cause_headline(
            self.explanation.root_cause, has_collectives=bool(self.explanation.collectives.collectives)
        )


def index_values(sections: Sequence[RunSection], charts: Sequence[str], *, pictures: bool) -> dict[str, Any]:
    """The values of ``templates/index.html``.

    Args:
        sections: The runs, in the order in which they are told of.
        charts: Names of its figures but the waterfall.
        pictures: Whether ``.png`` files of timelines and charts lie beside the page.
    """
    rows = compare_rows(section.summary for section in sections)
    facts = [_facts(section) for section in sections]
    shared = set.intersection(*(set(fact.items()) for fact in facts)) if facts else set()
    return {
        **place_notice(
            (section.result.device for section in sections),
            (caveat for section in sections for caveat in section.result.caveats),
        ),
        "story": tell_story([section.summary for section in sections]),
        "version": __version__,
        "charts": charts,
        "pictures": pictures,
        "comparison": rows,
        "comparison_columns": [item for item in columns_of(rows) if any(row[item.key] is not None for row in rows)],
        "how_to_read": HOW_TO_READ,
        "unknown": _unknown(sections),
        "shared_facts": [pair for pair in (facts[0].items() if facts else ()) if pair in shared],
        "runs": [_run_values(section, fact, shared) for section, fact in zip(sections, facts, strict=True)],
    }


def _run_values(section: RunSection, facts: Mapping[str, str], shared: set[tuple[str, str]]) -> dict[str, Any]:
    return {
        "label": section.result.label,
        "device": section.result.device,
        "share": percent(overlap_ratio(section.result)),
        "timeline": f"{section.name}.html",
        "picture": f"{section.name}.png",
        "why": f"{section.name}{WHY}.html",
        "finding": section.cause.text,
        "skew": skew_headline(section.explanation.skew).text,
        "kernels": f"{section.name}{KERNELS}.html",
        "use": [most_of(section.use[name]) for name in ("kernels", "hidden", "idle")],
        "facts": [pair for pair in facts.items() if pair not in shared],
    }


def place_notice(devices: Iterable[str], caveats: Iterable[Caveat]) -> dict[str, Any]:
    """On what runs were made, and whether that must not be overlooked."""
    names, is_shared = sorted(set(devices)), Caveat.SHARED_GPU in set(caveats)
    parts = [f"device: {', '.join(names)}", *([Caveat.SHARED_GPU.value] if is_shared else [])]
    return {"where": " · ".join(parts), "is_notice": is_shared or "cpu" in names}


def _unknown(sections: Sequence[RunSection]) -> list[tuple[str, str]]:
    """Each warning with the runs that it is about."""
    warnings = warnings_by_run([section.result for section in sections])
    if unmade := [section.result.label for section in sections if section.manifest is None]:
        warnings["how the run was made: no run.json lies beside its trace"] = unmade
    everyone = len(sections) if len(sections) > 1 else None
    return [("all runs" if len(labels) == everyone else ", ".join(labels), text) for text, labels in warnings.items()]


def _facts(section: RunSection) -> dict[str, str]:
    result, run = section.result, section.manifest
    facts = {"trace": result.trace.name, "read from": " ".join(filter(None, (result.source, result.producer)))}
    if run is None:
        return facts
    return facts | {
        "command": " ".join(run.command),
        "created": run.created,
        "commit": run.git_commit or "not known",
        "model": f"{run.model_size}, {sum(parameter.numel for parameter in run.parameters):,} parameters",
        "batch": f"{run.batch_size} x {run.seq_len} tokens",
        "ranks": f"{run.world_size}, {run.backend}, device: {run.device}",
        "steps": f"{run.steps} after {run.warmup} of warm-up, seed {run.seed}",
        "recorded by": run.profiler or "no profiler",
        "versions": _pairs(run.versions),
        "machine": _pairs(run.machine),
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """Names and values that are not empty; bytes as a person counts them."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {value / 2**30:.1f} GiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in values.items()
        if value != ""
    )
