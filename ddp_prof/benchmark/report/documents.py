"""The documents of ``ddp-prof results``: figures as pages and pictures, ``results.md``, ``results.csv``, the JSON."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.alpha_beta import Unknown
from ddp_prof.benchmark.claims import check_claims
from ddp_prof.benchmark.report.bandwidth_chart import draw_bandwidth
from ddp_prof.benchmark.report.bucket_sweep_chart import batch_sizes, draw_bucket_sweep
from ddp_prof.benchmark.report.rows import csv_rows
from ddp_prof.benchmark.report.variants_chart import draw_variants
from ddp_prof.benchmark.report.views import (
    KEPT_APART,
    SUPPORTED,
    bucket_notes,
    bucket_rows,
    claims_view,
    comparison_view,
    nothing_supported,
    settings_view,
    testbed_notes,
)
from ddp_prof.benchmark.report.words import HEADINGS, analysis, sentence
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.html.page import write_figure_page, write_shared_plotly
from ddp_prof.present.json_documents import SCHEMA
from ddp_prof.present.table import markdown, markdown_text, write_csv
from ddp_prof.whole_file import written_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ddp_prof.benchmark.report.testbeds import TestbedResults
    from ddp_prof.benchmark.settings import SettingSummary
    from ddp_prof.benchmark.study import Study
    from ddp_prof.present.table import TableView

REPORT = "results.md"
TITLES = {"variants": "Step time and communication by variant", "bandwidth": "Bandwidth by message size"}


def write_results(testbeds: Sequence[TestbedResults], study: Study | None, folder: Path) -> list[str]:
    """Write the figures of each testbed, and ``results.md``.

    Args:
        testbeds: At least one.
        study: A published study to put beside each.
        folder: Made where it is missing; files of the same names are replaced.

    Returns:
        What could not be made, a line each.
    """
    write_shared_plotly(folder)
    figures = [_figures(results, prefix) for results, prefix in zip(testbeds, _prefixes(testbeds), strict=True)]
    with Pictures() as drawing:
        for name, figure in (pair for own in figures for pair in own.items()):
            drawing.draw(figure, folder / f"{name}.png")
            write_figure_page(figure, folder / f"{name}.html", title=_title(name), shared_plotly=True)
        problems = drawing.try_finish()
    pictures = [[] if problems else list(own) for own in figures]
    with written_whole(folder / REPORT) as partial:
        partial.write_text(results_markdown(testbeds, study, pictures), encoding="utf-8")
    return problems


def write_results_csv(summaries: Sequence[SettingSummary], path: Path) -> None:
    """Write a row a setting; the file is there whole or as it was."""
    with written_whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        write_csv(csv_rows(summaries), file)


def results_markdown(
    testbeds: Sequence[TestbedResults], study: Study | None, pictures: Sequence[Sequence[str]] = ()
) -> str:
    """The results of the testbeds, as Markdown that can stand alone.

    Args:
        testbeds: The testbeds.
        study: A published study to put beside each.
        pictures: The names of each testbed's pictures beside the text.
    """
    parts = ["# Results\n"]
    if len(testbeds) > 1:
        parts.append(f"{KEPT_APART.format(len(testbeds)).capitalize()}.\n")
    for index, results in enumerate(testbeds):
        parts += _section(results, study, pictures[index] if pictures else ())
    return "\n".join(parts)


def _section(results: TestbedResults, study: Study | None, pictures: Sequence[str]) -> list[str]:
    settings = settings_view(results)
    parts = [f"## {markdown_text(settings.title)}\n", *_table(settings)]
    parts += [f"![{_title(name)}]({name}.png)\n" for name in pictures]
    parts += ["### What these numbers show\n", *_analysis(results)]
    if rows := bucket_rows(results):
        parts += ["### The course's model of bucketing\n", markdown(rows), *_list(bucket_notes(results))]
    if study:
        for heading, view in (
            ("The published study beside it", comparison_view(results, study)),
            ("Its claims", claims_view(results, study)),
        ):
            parts += [f"### {heading}\n", f"{markdown_text(view.title)}\n", *_table(view)]
    return parts


def _analysis(results: TestbedResults) -> list[str]:
    """The topics with supported observations."""
    supported = {heading: texts for heading, texts in analysis(results.observations).items() if texts}
    if not supported:
        return [f"{nothing_supported(results).capitalize()}.\n"]
    return [
        *(f"**{heading}.** {markdown_text(' '.join(texts))}\n" for heading, texts in supported.items()),
        *_list([SUPPORTED]),
    ]


def _table(view: TableView) -> list[str]:
    return [markdown(view.rows), *_list(view.notes)]


def _list(lines: Sequence[str]) -> list[str]:
    return ["".join(f"- {markdown_text(line)}\n" for line in lines)]


def _figures(results: TestbedResults, prefix: str) -> dict[str, go.Figure]:
    """The figures of a testbed by the names of their files."""
    figures = {f"{prefix}variants": draw_variants(results)}
    figures |= {f"{prefix}buckets-batch-{batch}": draw_bucket_sweep(results, batch) for batch in batch_sizes(results)}
    if results.messages:
        figures[f"{prefix}bandwidth"] = draw_bandwidth(results)
    return figures


def _prefixes(testbeds: Sequence[TestbedResults]) -> list[str]:
    """Prefixes that tell the files of several testbeds apart; empty for a single one."""
    if len(testbeds) == 1:
        return [""]
    names = []
    for index, results in enumerate(testbeds, 1):
        own = results.testbed
        words = f"{index}-{own.model_size}-{own.world_size}-ranks-{own.device or 'none'}"
        names.append(re.sub(r"[^A-Za-z0-9.-]+", "-", words) + "-")
    return names


def _title(name: str) -> str:
    known = next((title for end, title in TITLES.items() if name.endswith(end)), None)
    return known or f"Step time by bucket size, batch {name.rpartition('-')[2]}"


def results_document(database: Path, testbeds: Sequence[TestbedResults], study: Study | None) -> dict[str, Any]:
    """The JSON document, times in nanoseconds: keys may be added, never renamed."""
    return {
        "schema": SCHEMA,
        "database": str(database),
        "testbeds": [_testbed_document(results) for results in testbeds],
        "study": study and _study_document(study),
        "warnings": [KEPT_APART.format(len(testbeds))] if len(testbeds) > 1 else [],
    }


def _testbed_document(results: TestbedResults) -> dict[str, Any]:
    model = results.model
    return {
        **asdict(results.testbed),
        "environment": asdict(results.environment) if results.environment else {"id": results.testbed.environment},
        "settings": [_setting_document(summary) for summary in results.summaries],
        "link": None if isinstance(model, Unknown) else asdict(model.link),
        "best_bucket_bytes": None if isinstance(model, Unknown) else model.best_bytes,
        "observations": [
            {
                **asdict(observation),
                "heading": HEADINGS[observation.topic],
                "text": sentence(observation) if observation.is_supported else None,
            }
            for observation in results.observations
        ],
        "claims": [asdict(result) for result in results.claims],
        "warnings": testbed_notes(results),
    }


def _setting_document(summary: SettingSummary) -> dict[str, Any]:
    values = asdict(summary)
    del values["testbed"], values["environment"]
    timing, run = values.pop("timing"), values.pop("first")
    shared = (
        "d_model", "num_layers", "parameters", "gradient_bytes", "backend", "steps", "collectives",
        "communicated_bytes", "tokens", "git_commit",
    )  # fmt: skip
    return {
        **timing["setting"],
        "status": timing["status"],
        **{key: run[key] for key in shared},
        "step_ns": timing["step_ns"],
        "communication_ns": timing["communication_ns"],
        **values,
    }


def _study_document(study: Study) -> dict[str, Any]:
    return {
        "name": study.name,
        "about": study.about,
        "settings": [
            {**asdict(timing.setting), "status": timing.status, "step_ns": timing.step_ns and timing.step_ns.value,
             "communication_ns": timing.communication_ns and timing.communication_ns.value}
            for timing in study.timings
        ],
        "claims": [asdict(result) for result in check_claims(study.timings)],
    }  # fmt: skip
