"""``ddp-prof results``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options import trace_command
from ddp_prof.cli.terminal import Output, print_note, protect_inputs, say
from ddp_prof.errors import TraceError
from ddp_prof.present.table import TableOptions, TableView, show

OWN_RESULTS, RESULTS = Path("traces/local/results.db"), Path("traces/results.db")


@trace_command("results", "traces/results.db", reads_traces=False)
@click.argument(
    "database", default=lambda: OWN_RESULTS if OWN_RESULTS.is_file() else RESULTS, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=Output("folder"),
    help="Write the figures and results.md into this folder, and results.csv beside the database.",
)
def results(database: Path, folder: Path | None, output: TableOptions) -> None:
    """Results of the benchmark suite: one row per setting with its spread, and statistically supported differences.

    DATABASE is a file that scripts/run_comparison.sh wrote: by default traces/local/results.db if it exists, else
    traces/results.db. Settings that ran out of memory or failed have rows, too. Pictures need Chromium; the HTML pages
    do not.
    """
    from ddp_prof.benchmark import report
    from ddp_prof.benchmark.findings import gather_testbeds
    from ddp_prof.benchmark.store import load_results

    table = database.with_suffix(".csv")
    protect_inputs([database], *([table] if folder else []))
    testbeds = gather_testbeds(load_results(database))
    if not testbeds:
        raise TraceError(database, "no runs in it yet", "fill it with scripts/run_comparison.sh")
    if output.form == "markdown":
        say(report.results_markdown(testbeds).removesuffix("\n"))
    elif output.form == "table":
        show(output, report.results_views(testbeds))
    else:
        show(output, [TableView("", report.csv_rows(testbeds), [], report.results_document(database, testbeds))])
    if folder:
        for problem in report.write_results(testbeds, folder):
            print_note(problem)
        report.write_results_csv(testbeds, table)
        say(f"{folder / report.REPORT} {table}", err=True)
