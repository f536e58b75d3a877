"""``ddp-prof report``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic

import click

from ddp_prof.cli.options.commands import Loader, load_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output, say
from ddp_prof.cli.options.verbosity import print_note, progress_bar

SECONDS_TO_TELL = 15
"""How long the pages must take for a note to say it."""


@trace_command("report", "traces/naive.sqlite traces/overlap.sqlite -o report")
@traces_argument
@click.option(
    "-o",
    "--output",
    "folder",
    default="figures/report",
    show_default=True,
    type=Output("folder"),
    help="The folder to write.",
)
@load_options
def command(traces: tuple[Path, ...], load: Loader, folder: Path) -> None:
    """Linked pages about a set of runs: comparison, why communication is exposed, timelines, what is not known.

    A folder stands for the traces in it. Pictures need Chromium, the pages do not.
    """
    from ddp_prof.manifest import in_variant_order
    from ddp_prof.present.charts.static_images import Pictures
    from ddp_prof.present.html.report import write_report
    from ddp_prof.runs.pages import MEASURES, make_pages, report_runs
    from ddp_prof.runs.run import compare_steps

    runs = load.runs(traces, *MEASURES, with_launches=True, to_draw=True)
    runs = in_variant_order(runs, lambda run: run.manifest)
    with Pictures() as pictures, progress_bar() as show:  # the browser starts while runs are compared
        show("comparing the runs", 0, 1)
        reports = report_runs(runs)
        tell = _Progress(folder, show)
        problems = write_report(
            reports,
            folder,
            compare_steps(runs),
            pictures,
            make_pages=partial(make_pages, runs, reports, folder),
            progress=tell,
        )
    for problem in problems:
        print_note(problem)


class _Progress:
    """Prints the index's path when it is written, then the progress of the pages and the remaining time."""

    def __init__(self, folder: Path, show: Callable[[str, int, int], None]) -> None:
        self.folder, self.show, self.first_at, self.is_told = folder, show, 0.0, False

    def __call__(self, done: int, total: int) -> None:
        if not done:
            say(self.folder / "index.html")
        self.show("pages" if done < total else "pictures", done, total)
        if done < 2:  # until the first ones are there, workers start
            self.first_at = monotonic()
            return
        left_s = (monotonic() - self.first_at) / (done - 1) * (total - done)
        if left_s >= SECONDS_TO_TELL and not self.is_told:
            self.is_told = True
            text = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
            print_note(f"the pages of {total} runs take about {text} more; the index is there already")
