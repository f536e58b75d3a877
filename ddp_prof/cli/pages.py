"""Commands that write files: the pages of a report, a timeline, a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ddp_prof.cli.options import Loader, TraceCommand
from ddp_prof.cli.terminal import Output, default_output, open_output, print_note, progress, say_written

if TYPE_CHECKING:
    from ddp_prof.present.timeline.model import Source
    from ddp_prof.runs.run import Run

SECONDS_TO_TELL = 15
"""A note says how long the pages take if more than this many seconds remain."""


@click.command(
    "report", cls=TraceCommand, example="traces/naive.sqlite traces/overlap.sqlite -o report", prints_tables=False
)
@click.option(
    "-o",
    "--output",
    "folder",
    default="figures/report",
    show_default=True,
    type=Output("folder"),
    help="The folder to write.",
)
@click.option(
    "--one-file",
    type=Output(suffix=".html"),
    help="Write one page instead, which holds all that it shows: to hand in or to mail.",
)
def report(traces: tuple[Path, ...], load: Loader, folder: Path, one_file: Path | None) -> None:
    """Linked pages about a set of runs: comparison, why communication is exposed, what to change, timelines.

    A folder stands for the traces in it. Pictures need Chromium, the pages do not. The page of --one-file has the
    conclusions, the table, step and tail over bucket size, and the pictures nsys_*.png that lie beside the page, beside
    the traces, or in figures next to their folder.
    """
    if one_file and click.get_current_context().get_parameter_source("folder") != ParameterSource.DEFAULT:
        raise click.UsageError("--one-file writes a page and no folder: leave out --output")

    from ddp_prof.benchmark.turns import load_turns
    from ddp_prof.manifest import in_variant_order
    from ddp_prof.present.charts.static_images import Pictures
    from ddp_prof.present.html.report import write_report
    from ddp_prof.runs.pages import MEASURES, make_pages, report_runs
    from ddp_prof.runs.run import compare_steps

    runs = load.runs(traces, *MEASURES, with_launches=True, to_draw=True)
    runs = in_variant_order(runs, lambda run: run.manifest)
    if one_file:
        _write_one_file(runs, one_file)
        return
    with Pictures() as pictures, progress("comparing the runs") as show:  # the browser starts meanwhile
        reports = report_runs(runs, load_turns(runs))
        show_pages = _Progress(folder, show)
        problems = write_report(
            reports,
            folder,
            compare_steps(runs) if len(runs) > 1 else None,
            pictures,
            make_pages=partial(make_pages, runs, reports, folder),
            progress=show_pages,
        )
    for problem in problems:
        print_note(problem)


def _write_one_file(runs: list[Run], path: Path) -> None:
    """Write the report of the runs as one file, with the study and the screenshots that belong to them."""
    from ddp_prof.benchmark.study import picture_folders, study_of
    from ddp_prof.benchmark.turns import load_turns
    from ddp_prof.present.html.one_file import find_screenshots, write_one_file
    from ddp_prof.runs.pages import report_runs

    with progress("comparing the runs"):
        reports = report_runs(runs, load_turns(runs))
        study = study_of(runs, [one.summary for one in reports])
    write_one_file(reports, path, study, find_screenshots(picture_folders(runs, path)))
    say_written(path)


class _Progress:
    """Prints the path of the index when it is written, then shows the progress of the pages.

    A note tells the remaining time if it is long.

    Args:
        folder: The folder of the report.
        show: Shows the progress; see ``terminal.progress``.
    """

    def __init__(self, folder: Path, show: Callable[[str, int, int], None]) -> None:
        self.folder, self.show, self.first_at, self.has_note = folder, show, 0.0, False

    def __call__(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` runs have their pages; 0 means that the index is written."""
        if not done:
            say_written(self.folder / "index.html")
        self.show("pages" if done < total else "pictures", done, total)
        if done < 2:  # the time before the first pages is mostly the start of the workers
            self.first_at = monotonic()
            return
        # The mean time of a run's pages since the first pages, times the remaining runs.
        left_s = (monotonic() - self.first_at) / (done - 1) * (total - done)
        if left_s >= SECONDS_TO_TELL and not self.has_note:
            self.has_note = True
            text = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
            print_note(f"the pages of {total} runs take about {text} more; the index is there already")


_MOST_STEPS = 1_000_000
_MOST_DIGITS = 18
"""Limits of ``--steps``: the steps of a range, and the digits of a number."""


def _is_number(text: str) -> bool:
    """Whether a text is a natural number that is not too long."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _shorten(text: str) -> str:
    return text if len(text) <= 2 * _MOST_DIGITS else f"{text[:_MOST_DIGITS]}…"


def _parse_steps(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Return the numbers that ``--steps`` means: 3, 4, 5, 8 for ``3-5,8``; ``None`` if it is not given."""
    if value is None:
        return None
    numbers: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not (_is_number(first) and (_is_number(last) or not dash)):
            raise click.BadParameter(f"{_shorten(value)!r} is neither a number nor a range such as 3-5")
        low, high = int(first), int(last or first)
        if not 0 <= high - low < _MOST_STEPS:
            raise click.BadParameter(f"{part!r} is not a range of at most {_MOST_STEPS} steps in rising order")
        numbers += range(low, high + 1)
    return numbers


@click.command("timeline", cls=TraceCommand, example="traces/overlap.sqlite -o overlap.html", prints_tables=False)
@click.option(
    "-o",
    "--output",
    type=Output("pipe"),
    help="The page; - for stdout. Default: the trace's name with .html, in this folder.",
)
@click.option("--png", type=Output(suffix=".png"), help="Also write a PNG picture; needs Chromium.")
@click.option("--svg", type=Output(suffix=".svg"), help="Also write an SVG picture; needs Chromium.")
@click.option(
    "--steps", metavar="N[-M],...", callback=_parse_steps, help="Steps to show. Default: all that was captured."
)
def timeline(
    traces: tuple[Path, ...],
    load: Loader,
    output: Path | None,
    png: Path | None,
    svg: Path | None,
    steps: list[int] | None,
) -> None:
    """What ran when: host phases, compute, communication, and which of it is overlapped or exposed.

    Several traces are drawn below each other, with their first steps aligned; the ranks of a run are put on one
    clock by their collectives, if possible. A picture shows the typical step and the next one; --steps chooses others.
    """
    from ddp_prof.present.html.timeline_page import write_timeline_page
    from ddp_prof.runs.run import timeline_sources
    from ddp_prof.runs.timelines import draw_timelines, find_drawings

    runs = load.runs(traces, with_launches=True)
    pictures = [path for path in (png, svg) if path]
    with progress() as show:

        def read() -> list[Source]:
            show("reading", 0, 2)
            sources = timeline_sources(runs)
            for run in runs:
                run.release_events()
            show("laying out", 1, 2)
            return sources

        kept = find_drawings(runs) if steps is None else None
        drawn = draw_timelines(read, kept, with_picture=bool(pictures), steps=steps)
    page = output or default_output(drawn.content.name, ".html")
    with open_output(page) as file, progress("writing"):
        write_timeline_page(drawn.content, file)
    if drawn.picture is not None:
        from ddp_prof.present.charts.static_images import write_pictures

        with progress("drawing"):
            write_pictures([(drawn.picture, path) for path in pictures])
        for path in pictures:
            say_written(path)


@click.command("export", cls=TraceCommand, example="traces/overlap.sqlite -o overlap.json.gz", prints_tables=False)
@click.option(
    "-o",
    "--output",
    type=Output("pipe"),
    help="The file to write; gzipped if it ends in .gz; - for stdout. Default: the trace's name with "
    ".perfetto.json.gz, in this folder.",
)
def export(traces: tuple[Path, ...], load: Loader, output: Path | None) -> None:
    """A file for Perfetto (ui.perfetto.dev) and chrome://tracing, with overlap and exposed communication as counters.

    Several traces become processes of one file, with their first steps aligned; the ranks of a run are put on one clock
    by their collectives, if possible. Neither viewer uploads the file.
    """
    from ddp_prof.present.perfetto import write_perfetto
    from ddp_prof.runs.run import timeline_sources

    runs = load.runs(traces, with_launches=True)
    with progress("reading"):
        sources = timeline_sources(runs)
    target = output or default_output(sources[0].title, ".perfetto.json.gz")
    with open_output(target) as file, progress("writing"):
        write_perfetto(sources, file)
