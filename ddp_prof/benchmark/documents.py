"""The documents of ``ddp-prof results``: the JSON, ``results.csv``, figures as pages and pictures, ``results.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_prof.atomic_file import atomic_write
from ddp_prof.benchmark.bucket_model import Unknown
from ddp_prof.benchmark.charts import draw_figures
from ddp_prof.benchmark.report import (
    KEPT_APART,
    NOTHING,
    SENTENCES,
    TestbedResults,
    csv_row,
    sentences,
    settings_view,
    testbed_notes,
)
from ddp_prof.benchmark.settings import SettingSummary
from ddp_prof.present.charts.static_images import Pictures
from ddp_prof.present.html.page import write_figure_page, write_shared_plotly
from ddp_prof.present.json_documents import SCHEMA
from ddp_prof.present.table import markdown, markdown_text, write_csv

REPORT = "results.md"


def results_document(database: Path, testbeds: Sequence[TestbedResults]) -> dict[str, Any]:
    """The JSON document, times in nanoseconds: keys may be added, never renamed."""
    return {
        "schema": SCHEMA,
        "database": str(database),
        "testbeds": [_testbed_document(results) for results in testbeds],
        "warnings": [KEPT_APART.format(len(testbeds))] if len(testbeds) > 1 else [],
    }


def _testbed_document(results: TestbedResults) -> dict[str, Any]:
    model = None if isinstance(results.model, Unknown) else results.model
    return {
        **asdict(results.testbed),
        "environment": asdict(results.environment) if results.environment else {"id": results.testbed.environment},
        "settings": [_setting_document(summary) for summary in results.summaries],
        "link": model and asdict(model.link),
        "best_bucket_bytes": model and model.best_bytes,
        "observations": [asdict(observation) for observation in results.observations],
        "warnings": testbed_notes(results),
    }


def _setting_document(summary: SettingSummary) -> dict[str, Any]:
    values = asdict(summary)
    del values["testbed"], values["environment"]
    setting, run = values.pop("setting"), values.pop("first")
    shared = (
        "d_model", "num_layers", "parameters", "gradient_bytes", "backend", "steps", "collectives",
        "communicated_bytes", "tokens", "git_commit",
    )  # fmt: skip
    return {**setting, **{key: run[key] for key in shared}, **values}


def results_markdown(testbeds: Sequence[TestbedResults], pictures: Sequence[dict[str, str]] = ()) -> str:
    """The results as Markdown that can stand alone; ``pictures`` are the titles of each testbed's pictures, by file."""
    parts = ["# Results\n", "Written by `ddp-prof results` from the database of `scripts/run_comparison.sh`.\n"]
    if len(testbeds) > 1:
        parts.append(f"{KEPT_APART.format(len(testbeds)).capitalize()}.\n")
    for index, results in enumerate(testbeds):
        settings = settings_view(results)
        parts += [f"## {markdown_text(settings.title)}\n", markdown(settings.rows), _list(settings.notes)]
        parts += [f"![{title}]({name}.png)\n" for name, title in (pictures[index] if pictures else {}).items()]
        found = sentences(results)
        parts += ["### What these numbers show\n", _list([*found, SENTENCES] if found else [NOTHING])]
    return "\n".join(parts)


def _list(lines: Sequence[str]) -> str:
    return "".join(f"- {markdown_text(line)}\n" for line in lines)


def write_results(testbeds: Sequence[TestbedResults], folder: Path) -> list[str]:
    """Write figures as pages and pictures, and ``results.md``; returns what could not be made, a line each."""
    write_shared_plotly(folder)
    shown = []
    with Pictures() as drawing:
        for prefix, results in zip(_prefixes(testbeds), testbeds, strict=True):
            titles = {}
            for name, (title, figure) in draw_figures(results).items():
                titles[f"{prefix}{name}"] = title
                drawing.draw(figure, folder / f"{prefix}{name}.png")
                write_figure_page(figure, folder / f"{prefix}{name}.html", title=title, shared_plotly=True)
            shown.append(titles)
        problems = drawing.try_finish()
    with atomic_write(folder / REPORT) as partial:
        partial.write_text(results_markdown(testbeds, () if problems else shown), encoding="utf-8")
    return problems


def _prefixes(testbeds: Sequence[TestbedResults]) -> list[str]:
    """Prefixes that tell the files of several testbeds apart; empty for a single one."""
    if len(testbeds) == 1:
        return [""]
    names = [
        f"{index}-{own.testbed.model_size}-{own.testbed.world_size}-ranks-{own.testbed.device or 'none'}"
        for index, own in enumerate(testbeds, 1)
    ]
    return [re.sub(r"[^A-Za-z0-9.-]+", "-", name) + "-" for name in names]


def write_results_csv(summaries: Sequence[SettingSummary], path: Path) -> None:
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        write_csv([csv_row(summary) for summary in summaries], file)
