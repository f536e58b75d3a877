"""``ddp-prof results``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options.commands import table_options, trace_command
from ddp_prof.cli.options.outputs import Output, protect_inputs, say
from ddp_prof.cli.options.verbosity import print_note
from ddp_prof.errors import TraceError
from ddp_prof.present.table import TableOptions, TableView, show

if TYPE_CHECKING:
    from ddp_prof.benchmark.report import TestbedResults
    from ddp_prof.benchmark.settings import SettingSummary, Study

OWN_RESULTS, RESULTS = Path("traces/local/results.db"), Path("traces/results.db")

FILTERS: dict[str, Callable[[SettingSummary], str | int]] = {
    "variant": lambda summary: summary.setting.variant,
    "model_size": lambda summary: summary.testbed.model_size,
    "batch_size": lambda summary: summary.setting.local_batch_size,
    "seq_len": lambda summary: summary.setting.seq_len,
    "world_size": lambda summary: summary.testbed.world_size,
}
"""The field that each option for settings compares with."""


def _default_database() -> Path:
    """The user's own results if they exist, else those of the repository."""
    return OWN_RESULTS if OWN_RESULTS.is_file() else RESULTS


@trace_command("results", "traces/results.db")
@click.argument("database", default=_default_database, type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Choice(["cs336"]),
    help="Show a published study beside the results.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=Output("folder"),
    help="Write the figures and results.md into this folder, and results.csv beside the database.",
)
@click.option("--variant", multiple=True, help="Variants to show. May be repeated.")
@click.option("--model-size", multiple=True, help="Model sizes to show. May be repeated.")
@click.option("--batch-size", type=int, multiple=True, help="Batch sizes of a rank to show. May be repeated.")
@click.option("--seq-len", type=int, multiple=True, help="Context lengths to show. May be repeated.")
@click.option("--world-size", type=int, multiple=True, help="Numbers of ranks to show. May be repeated.")
@table_options
def command(
    database: Path, against: str | None, folder: Path | None, output: TableOptions, **filters: tuple[str | int, ...]
) -> None:
    """Results of the benchmark suite: one row per setting with its spread, and statistically supported differences.

    DATABASE is what scripts/run_comparison.sh writes: by default traces/local/results.db where it is there, else
    traces/results.db. Settings that ran out of memory or failed have rows, too. Pictures need Chromium; the HTML pages
    are written without it.
    """
    from ddp_prof.benchmark.report import gather_testbeds
    from ddp_prof.benchmark.settings import load_study, summarize_settings
    from ddp_prof.benchmark.store import load_results

    table = database.with_suffix(".csv")
    protect_inputs([database], *([table] if folder else []))
    results = load_results(database)
    summaries = summarize_settings(results)
    selected = _select(database, summaries, filters)
    testbeds = gather_testbeds(results, selected)
    study = load_study(against) if against else None
    _show(output, database, testbeds, study)
    if folder:
        from ddp_prof.benchmark.documents import REPORT, write_results, write_results_csv

        for problem in write_results(testbeds, study, folder):
            print_note(problem)
        # The table of the database is whole, whatever was asked to be shown; its folder may be somebody else's.
        write_results_csv(summaries, table)
        say(f"{folder / REPORT} {table}", err=True)


def _select(
    database: Path, summaries: Sequence[SettingSummary], filters: dict[str, tuple[str | int, ...]]
) -> list[SettingSummary]:
    """The settings that all filters select.

    Raises:
        TraceError: There are none.
    """
    if not summaries:
        raise TraceError(database, "no runs in it yet", "fill it with scripts/run_comparison.sh")
    left = list(summaries)
    for name, value_of in FILTERS.items():
        if asked := filters[name]:
            there = sorted({value_of(summary) for summary in left})
            left = [summary for summary in left if value_of(summary) in asked]
            if not left:
                wanted = f"no setting with --{name.replace('_', '-')} {' or '.join(map(str, asked))}"
                raise TraceError(database, wanted, f"choose from {', '.join(map(str, there))}")
    return left


def _show(output: TableOptions, database: Path, testbeds: Sequence[TestbedResults], study: Study | None) -> None:
    from ddp_prof.benchmark.documents import results_document, results_markdown
    from ddp_prof.benchmark.report import csv_view, results_views

    if output.form == "markdown":
        say(results_markdown(testbeds, study).removesuffix("\n"))
    elif output.form == "json":
        show(output, [TableView("", [], [], results_document(database, testbeds, study))])
    elif output.form == "csv":
        show(output, [csv_view(testbeds, study)])
    else:
        show(output, results_views(testbeds, study))
