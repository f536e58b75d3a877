"""The data of a run in a report, and the first page of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_prof import __version__
from ddp_prof.analyze.collectives.straggler import RankStepView
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.analyze.root_cause import RunExplanation
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.present import theme
from ddp_prof.present.charts import Chart
from ddp_prof.present.columns import columns_of
from ddp_prof.present.headlines import Headline, describe_changes, gain_headline, root_cause_headline, skew_headline
from ddp_prof.present.html.page import asset, write_page
from ddp_prof.present.table import TableView
from ddp_prof.present.tables.comparison import compare_rows, how_to_read
from ddp_prof.present.tables.kernels import most_of
from ddp_prof.present.tables.overlap import warnings_by_run
from ddp_prof.present.tables.summary import SummarizedRun, main_advice
from ddp_prof.present.text import percent, source_name
from ddp_prof.present.timeline.model import Source


@dataclass(frozen=True)
class ReportRun:
    """One run.

    Attributes:
        name: The name of its trace; :func:`write_report` makes it the unique name of its pages.
        load_sources: Reads the traces for its timeline.
        summary: Its row in the comparison of all runs.
        load_steps: Returns what each rank communicated, by the key of the step.
        use: Tables on how its devices spent their time, by name.
        diagnose: Asks the doctor.
    """

    name: str
    result: TraceOverlap
    load_sources: Callable[[], Sequence[Source]]
    explanation: RunExplanation
    summary: VariantSummary
    load_steps: Callable[[], Mapping[int, Sequence[RankStepView]]]
    use: Mapping[str, TableView]
    diagnose: Callable[[], Diagnosis]

    @property
    def cause(self) -> Headline:
        collectives = self.explanation.collectives
        return root_cause_headline(self.explanation.root_cause, collectives.reason, collectives.blocking)


MOST_PICTURES = 20
"""A report of more runs has no pictures of timelines, because each takes a browser about a second."""
CHARTS = ("comparison", "overlap-by-step", "step-times")
"""Names of the charts of all runs, in the order of the page."""
INDEX = "index"
TIMELINE, WHY, KERNELS = "", "-why", "-kernels"
"""Endings of the names of a run's pages: ``overlap.html``, ``overlap-why.html``, ``overlap-kernels.html``."""


def write_index(
    runs: Sequence[ReportRun],
    folder: Path,
    figures: Mapping[str, Chart],
    *,
    is_whole: bool = True,
    missing: Collection[str] = (),
    pictures: Collection[str] = (),
) -> None:
    """Write the first page.

    Args:
        runs: The runs.
        folder: Where to write.
        figures: Charts of all runs, by name.
        is_whole: Whether the pages of the runs are written already.
        missing: Names of the runs whose pages could not be written.
        pictures: Names of the ``.png`` files beside the page, without their ending.
    """
    rows = compare_rows(run.summary for run in runs)
    facts = [_facts(run) for run in runs]
    shared = set.intersection(*(set(fact.items()) for fact in facts))
    values = {
        **place_values(runs),
        "story": _story(runs),
        "version": __version__,
        "charts": [name for name in CHARTS if name in figures],
        "is_whole": is_whole,
        "pictures": pictures,
        "most_pictures": MOST_PICTURES,
        "comparison": rows,
        "comparison_columns": [item for item in columns_of(rows) if any(row[item.key] is not None for row in rows)],
        "how_to_read": how_to_read(run.summary for run in runs),
        "unknown": _unknown_facts(runs),
        "shared_facts": [pair for pair in facts[0].items() if pair in shared],
        "runs": [_run_values(run, fact, shared, missing) for run, fact in zip(runs, facts, strict=True)],
    }
    write_page(
        folder / f"{INDEX}.html",
        "index.html",
        values,
        title="Communication behind compute",
        figures=figures,
        css=asset("index.css") + asset("tables.css"),
        script=asset("tables.js"),
        shared_plotly=True,
    )


def _story(runs: Sequence[ReportRun]) -> list[str]:
    if sentences := describe_changes([run.summary for run in runs]) if len(runs) > 1 else []:
        return sentences
    worst = max(runs, key=lambda run: run.summary.gain_at_most or 0)
    if len(runs) > 1 and not worst.summary.gain_at_most:
        return ["No run is known to gain from hiding communication"]
    gain = gain_headline(worst.summary)
    return [gain if len(runs) == 1 else f"Most is to be gained in {worst.result.label}: {gain}"]


def _run_values(
    run: ReportRun, facts: Mapping[str, str], shared: set[tuple[str, str]], missing: Collection[str]
) -> dict[str, Any]:
    ends = {"timeline": TIMELINE, "why": WHY, "kernels": KERNELS}
    pages = {page: f"{run.name}{end}.html" for page, end in ends.items()}
    worst = f"{run.name}.html#worst" if any(rank.exposed_ns or rank.blocking_ns for rank in run.result.ranks) else ""
    return {
        "name": run.name,
        "has_pages": run.name not in missing,
        "label": run.result.label,
        "device": run.result.device,
        "share": percent(run.summary.overlap_ratio),
        **pages,
        "gain": gain_headline(run.summary),
        "finding": run.cause.text,
        "advice": main_advice(SummarizedRun(run.result, run.summary, run.explanation, run.diagnose())),
        "skew": skew_headline(run.explanation.skew).text,
        "use": [most_of(run.use[name]) for name in ("kernels", "hidden", "idle")],
        "facts": [pair for pair in facts.items() if pair not in shared],
        "worst": "" if run.name in missing else worst,
        "pages": {} if run.name in missing else ({"show me": worst} if worst else {}) | pages,
    }


def place_values(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """Return the device label of the runs for a template, and whether to highlight it."""
    words, is_notice = theme.device_label(
        (run.result.device for run in runs), (caveat for run in runs for caveat in run.result.caveats)
    )
    return {"where": " · ".join(words), "is_notice": is_notice}


def _unknown_facts(runs: Sequence[ReportRun]) -> list[tuple[str, str]]:
    warnings = warnings_by_run([run.result for run in runs])
    for run in runs:
        for text in run.explanation.run.warnings:
            if run.result.label not in warnings.setdefault(text, []):
                warnings[text].append(run.result.label)
    if unmade := [run.result.label for run in runs if run.explanation.run.manifest is None]:
        warnings["how the run was made: no run.json lies beside its trace"] = unmade
    everyone = len(runs) if len(runs) > 1 else None
    return [("all runs" if len(labels) == everyone else ", ".join(labels), text) for text, labels in warnings.items()]


def _facts(run: ReportRun) -> dict[str, str]:
    result, made = run.result, run.explanation.run.manifest
    facts = {
        "trace": source_name(result.trace.name, result.files),
        "read from": " ".join(filter(None, (result.source, result.producer))),
    }
    if made is None:
        return facts
    return facts | {
        "command": " ".join(made.command),
        "created": made.created,
        "commit": made.git_commit or "not known",
        "model": f"{made.model_size}, {sum(parameter.numel for parameter in made.parameters):,} parameters",
        "batch": f"{made.batch_size} x {made.seq_len} tokens",
        "ranks": f"{made.world_size}, {made.backend}, device: {made.device}",
        "steps": f"{made.steps} after {made.warmup} of warm-up, seed {made.seed}",
        "recorded by": made.profiler or "no profiler",
        "versions": _pairs(made.versions),
        "machine": _pairs(made.machine),
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """Format names with their values, without empty values; bytes are converted to GiB."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {value / 2**30:.1f} GiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in values.items()
        if value != ""
    )
