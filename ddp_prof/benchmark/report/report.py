"""The files of ``ddp-prof results``: figures as pages and pictures, ``results.md`` to read, ``results.csv``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddp_prof.benchmark.report.bandwidth_chart import draw_bandwidth
from ddp_prof.benchmark.report.bucket_sweep_chart import batch_sizes, draw_bucket_sweep
from ddp_prof.benchmark.report.rows import csv_rows
from ddp_prof.benchmark.report.variants_chart import draw_variants
from ddp_prof.benchmark.report.views import (
    PLACES,
    SUPPORTED,
    bucket_notes,
    bucket_rows,
    comparison_view,
    conclusions_view,
    nothing_supported,
    settings_view,
)
from ddp_prof.benchmark.report.words import analysis
from ddp_prof.present.charts.static_images import try_pictures
from ddp_prof.present.html.page import write_figure_page
from ddp_prof.present.tables.render import markdown, write_csv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ddp_prof.benchmark.places import PlaceResults
    from ddp_prof.benchmark.settings import SettingSummary
    from ddp_prof.benchmark.store import Environment
    from ddp_prof.benchmark.study import Study
    from ddp_prof.present.table_view import TableView

REPORT = "results.md"
TITLES = {"variants": "Step time and communication by variant", "bandwidth": "Bandwidth by message size"}


def write_results(places: Sequence[PlaceResults], study: Study | None, folder: Path) -> list[str]:
    """Write the figures of each place, and ``results.md``.

    Args:
        places: At least one.
        study: A published study to put beside each.
        folder: Made where it is missing; files of the same names are replaced.

    Returns:
        What could not be made, a line each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = [_figures(place, prefix) for place, prefix in zip(places, _prefixes(places), strict=True)]
    for name, figure in (pair for own in figures for pair in own.items()):
        write_figure_page(figure, folder / f"{name}.html", title=_title(name), shared_plotly=True)
    problems = try_pictures([(figure, folder / f"{name}.png") for own in figures for name, figure in own.items()])
    pictures = [[] if problems else list(own) for own in figures]
    (folder / REPORT).write_text(results_markdown(places, study, pictures), encoding="utf-8")
    return problems


def write_results_csv(summaries: Sequence[SettingSummary], environments: Mapping[str, Environment], path: Path) -> None:
    """Write a row a setting; the file is there whole or as it was."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        write_csv(csv_rows(summaries, environments), file)
    partial.replace(path)


def results_markdown(
    places: Sequence[PlaceResults], study: Study | None, pictures: Sequence[Sequence[str]] = ()
) -> str:
    """All that can be said of the places, as Markdown that can stand alone.

    Args:
        places: The places.
        study: A published study to put beside each.
        pictures: The names of each place's pictures beside the text.
    """
    parts = ["# Results\n"]
    if len(places) > 1:
        parts.append(f"{PLACES.format(len(places)).capitalize()}.\n")
    for index, place in enumerate(places):
        parts += _chapter(place, study, pictures[index] if pictures else ())
    return "\n".join(parts)


def _chapter(place: PlaceResults, study: Study | None, pictures: Sequence[str]) -> list[str]:
    settings = settings_view(place)
    parts = [f"## {_plain(settings.title)}\n", *_sheet(settings)]
    parts += [f"![{_title(name)}]({name}.png)\n" for name in pictures]
    parts += ["### What these numbers say\n", *_analysis(place)]
    if rows := bucket_rows(place):
        parts += ["### The course's model of bucketing\n", markdown(rows), *_list(bucket_notes(place))]
    if study:
        for heading, view in (
            ("The published study beside it", comparison_view(place, study)),
            ("Its conclusions", conclusions_view(place, study)),
        ):
            parts += [f"### {heading}\n", f"{_plain(view.title)}\n", *_sheet(view)]
    return parts


def _analysis(place: PlaceResults) -> list[str]:
    """The topics that something can be said of."""
    told = {heading: texts for heading, texts in analysis(place.facts).items() if texts}
    if not told:
        return [f"{nothing_supported(place).capitalize()}.\n"]
    return [*(f"**{heading}.** {_plain(' '.join(texts))}\n" for heading, texts in told.items()), *_list([SUPPORTED])]


def _sheet(view: TableView) -> list[str]:
    return [markdown(view.rows), *_list(view.notes)]


def _list(lines: Sequence[str]) -> list[str]:
    return ["".join(f"- {_plain(line)}\n" for line in lines)]


def _plain(text: str) -> str:
    """Text in which nothing is markup."""
    return re.sub(r"([\\`*\[\]<>_])", r"\\\1", text)


def _figures(place: PlaceResults, prefix: str) -> dict[str, go.Figure]:
    """The figures of a place by the names of their files."""
    figures = {f"{prefix}variants": draw_variants(place)}
    figures |= {f"{prefix}buckets-batch-{batch}": draw_bucket_sweep(place, batch) for batch in batch_sizes(place)}
    if place.messages:
        figures[f"{prefix}bandwidth"] = draw_bandwidth(place)
    return figures


def _prefixes(places: Sequence[PlaceResults]) -> list[str]:
    """What tells the files of several places apart; nothing where there is only one."""
    if len(places) == 1:
        return [""]
    names = []
    for index, place in enumerate(places, 1):
        own = place.place
        words = f"{index}-{own.model_size}-{own.world_size}-ranks-{own.device or 'none'}"
        names.append(re.sub(r"[^A-Za-z0-9.-]+", "-", words) + "-")
    return names


def _title(name: str) -> str:
    known = next((title for end, title in TITLES.items() if name.endswith(end)), None)
    return known or f"Step time by bucket size, batch {name.rpartition('-')[2]}"
