"""Commands that print tables. ``ddp-prof mcp`` offers those of traces to assistants, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.monitor import logs_among, show_logs_compared
from ddp_prof.cli.options import Answer, InputPath, Loader, TraceCommand
from ddp_prof.cli.terminal import Output, print_note, protect_inputs, say, say_lines
from ddp_prof.errors import TraceError, printable, shell_quote
from ddp_prof.present.table import TableOptions, TableView, show, shown_after
from ddp_prof.runs.run import SUMMARY_RESULTS, Run, are_one_variant, compare_steps, what_changed

if TYPE_CHECKING:
    from ddp_prof.analyze.variants.comparison import VariantSummary
    from ddp_prof.analyze.variants.waterfall import Waterfall
    from ddp_prof.present.headlines import Headline
    from ddp_prof.present.tables.compare import WhatChanged


def summary_views(runs: list[Run], *, whole: bool = False) -> list[TableView]:
    """Return the short answer about one run, or the table of several runs; ``whole`` as in ``summary_view``."""
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.tables.summary import SummarizedRun, summary_view

    results = [run.overlap() for run in runs]
    summaries = compare_variants(results, manifests=[run.manifest for run in runs])
    summarized = [
        SummarizedRun(
            result,
            summary,
            run.explanation(),
            run.doctor(),
            run.cost(),
            _options_of(run),
        )
        for run, result, summary in zip(runs, results, summaries, strict=True)
    ]
    return [summary_view(summarized, whole=whole)]


def _options_of(run: Run) -> str:
    """Return the options of the command line that change what is read as the run, quoted for a shell."""
    options = run.options
    given = (("--step-range", options.step_range), ("--backward-range", options.backward_range))
    found = [f"{name} {shell_quote(value)}" for name, value in given if value is not None]
    found += [f"--warmup-steps {options.warmup_steps}"] if options.warmup_steps else []
    found += [f"--comm-pattern {shell_quote(pattern)}" for pattern in options.comm_patterns]
    return " ".join([*found, *(["--one-run"] if options.one_run and len(run.files) > 1 else [])])


SUMMARY_ANSWER = Answer(SUMMARY_RESULTS, summary_views)
"""What the summary of runs measures and shows; ``ddp-prof capture`` prints it, too."""


@click.command("summary", cls=TraceCommand, answer=SUMMARY_ANSWER, example="traces/overlap.sqlite")
@click.option("--notes", "whole", is_flag=True, help="Print the notes, too, and shorten nothing.")
def summary(traces: tuple[Path, ...], load: Loader, whole: bool, output: TableOptions) -> None:
    """The answer in short: how much communication is exposed, what hiding it would gain, why, and what to change.

    'ddp-prof TRACE...' does the same. A terminal wraps long lines, a pipe gets one line for each name.
    """
    show(output, summary_views(load.runs_for(traces, output), whole=whole))


def _info_views(runs: list[Run]) -> list[TableView]:
    """Return the contents of each trace."""
    from ddp_prof.present.tables.info import info_view

    return [info_view(file) for run in runs for file in run.inventory()]


@click.command("info", cls=TraceCommand, answer=Answer(("inventory",), _info_views), example="traces/overlap.sqlite")
def info(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What a trace holds, and what is missing for which question."""
    show(output, _info_views(load.runs_for(traces, output)))


def _overlap_views(runs: list[Run], *, by_step: bool = False) -> list[TableView]:
    """Return the overlap of each run, by rank or by step; with costs if kernels were measured, as for JSON."""
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.headlines import gain_headline
    from ddp_prof.present.tables.overlap import overlap_view

    results = [run.overlap() for run in runs]
    costs = [run.cost() if run.has_contention else None for run in runs]
    return [
        overlap_view(
            result, gain_headline(summary, cost.cost if cost else None), cost, by_step=by_step, told=summary.reason
        )
        for result, summary, cost in zip(results, compare_variants(results), costs, strict=True)
    ]


# Only JSON has the cost, which takes another look at all kernels.
@click.command(
    "overlap",
    cls=TraceCommand,
    answer=Answer(("overlap",), _overlap_views, for_json=("contention",)),
    example="--steps traces/overlap.sqlite",
)
@click.option("--steps", is_flag=True, help="One row per step instead of one row per rank.")
def overlap(traces: tuple[Path, ...], load: Loader, steps: bool, output: TableOptions) -> None:
    """How much communication hides behind compute, per rank and step.

    TRACE is a report of Nsight Systems (.nsys-rep) or its export (sqlite, parquetdir, arrowdir), a trace of
    torch.profiler (.json, .json.gz), or a folder with several of these.
    """
    runs = load.runs_for(traces, output)
    for run in runs:
        run.drop_events()  # all is measured; JSON compares kernels, which takes as much memory again
    show(output, _overlap_views(runs, by_step=steps))


def _collectives_views(runs: list[Run], by: str | None = None) -> list[TableView]:
    """Return the collectives of each run; ``by`` says what a row stands for, see ``collectives_view``."""
    from ddp_prof.present.tables.collectives import collectives_view

    return [collectives_view(run.analysis(), run.collectives(), _main_cause(run), by) for run in runs]


def _main_cause(run: Run) -> Headline:
    """Return the main cause of exposed time as a headline."""
    from ddp_prof.present.cause_headlines import root_cause_headline

    collectives = run.collectives()
    return root_cause_headline(run.root_cause(), collectives.why_no_cause, collectives.blocking)


@click.command(
    "collectives",
    cls=TraceCommand,
    answer=Answer(("collectives",), _collectives_views),
    example="--by bucket traces/bucketed_10mb.sqlite",
)
@click.option(
    "--by",
    type=click.Choice(["collective", "step", "bucket", "group"]),
    help="What a row stands for; JSON always lists every collective. Default: a collective in CSV and JSON; in tables "
    "buckets, or the ten worst collectives.",
)
@click.option("--html", "page", type=Output(), help="Also write a page that shows one step.")
@click.option("--png", type=Output(suffix=".png"), help="Also write a picture of it; needs Chromium.")
@click.option("--step", type=int, help="The step that --html and --png show. Default: a typical one.")
def collectives(
    traces: tuple[Path, ...],
    load: Loader,
    by: str | None,
    page: Path | None,
    png: Path | None,
    step: int | None,
    output: TableOptions,
) -> None:
    """The life of each collective, and why it is exposed.

    A row shows when the collective was ready, launched, started and ended, and how much of it is overlapped or exposed.
    Exposed time is divided by when (forward, backward, tail, optimizer, outside) and by why (blocking call, launched
    late, queued, late input, peer wait, transfer). The ranks of a run may be in several files.
    """
    if step is not None and not (page or png):
        raise click.UsageError("--step is the step that --html and --png show: give one of them")
    runs = load.runs_for(traces, output, to_draw=bool(page or png))
    _refuse_to_draw_several(runs, page, png)
    with shown_after(output, _collectives_views(runs, by or ("collective" if output.columns else None))):
        if page or png:
            _draw_step(runs[0], step, page, png)


def _draw_step(run: Run, step: int | None, page: Path | None, png: Path | None) -> None:
    """Draw the collectives of a step (``None``: of the typical one) as a page, a picture, or both.

    Raises:
        TraceError: Nothing communicates in the step.
    """
    from ddp_prof.analyze.collectives.step_view import view_step
    from ddp_prof.present.charts.collectives import draw_step_collectives
    from ddp_prof.present.html.page import write_figure
    from ddp_prof.table import UNKNOWN, distinct

    analysis = run.analysis()
    shown = run.collectives().typical_step if step is None else step
    ranks = () if shown is None else view_step(analysis, shown)
    communicating = sorted({*chain.from_iterable(distinct(rank.keys) for rank in analysis.ranks)} - {UNKNOWN})
    if not communicating:
        raise TraceError(
            analysis.trace, "nothing in its steps is known to communicate", "'ddp-prof timeline' draws what they hold"
        )
    if shown is None or not ranks:
        which = "the typical step" if shown is None else f"step {shown}"
        others = f"choose another one with --step, from {communicating[0]} to {communicating[-1]}"
        raise TraceError(analysis.trace, f"no communication in {which}", others)
    headline = _main_cause(run)
    figure = draw_step_collectives(analysis, shown, ranks, headline)
    write_figure(figure, title=headline.claim, page=page, picture=png)


def _refuse_to_draw_several(runs: list[Run], page: Path | None, png: Path | None) -> None:
    """Raise an error if a page or a picture is asked for and there are several runs."""
    if (page or png) and len(runs) > 1:
        raise click.UsageError("--html and --png show one run: pass the traces of a single one")


def _critical_views(runs: list[Run]) -> list[TableView]:
    """Return the critical paths of each run."""
    from ddp_prof.present.tables.critical import critical_view

    return [critical_view(run.analysis(), run.critical()) for run in runs]


@click.command(
    "critical",
    cls=TraceCommand,
    answer=Answer(("collectives", "critical"), _critical_views),
    example="traces/h200/nccl/torch.sqlite",
)
def critical(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What the critical path of each step consists of: compute, transfer, waiting, host.

    The path is followed backwards from the last operation of a step: each operation could begin only after the one
    before it on its stream, a recorded wait, or its launch. Its parts sum to its length. Pass the traces of all ranks:
    at a collective the path continues on the rank that arrived last. It is known for GPUs only, and only if waits
    between streams were recorded, or follow from the order of calls; else the reason is printed.
    """
    show(output, _critical_views(load.runs_for(traces, output)))


def _doctor_views(runs: list[Run]) -> list[TableView]:
    """Return the findings of each run."""
    from ddp_prof.present.tables.doctor import doctor_view

    return [doctor_view(run.analysis(), run.doctor()) for run in runs]


@click.command(
    "doctor", cls=TraceCommand, answer=Answer(("collectives", "diagnosis"), _doctor_views), example="traces/flat.sqlite"
)
def doctor(traces: tuple[Path, ...], load: Loader, output: TableOptions) -> None:
    """What in the set-up of a job keeps its communication from hiding: findings, evidence, what to change.

    Each rule looks for one thing, such as gradients reduced after backward, collectives on the stream of compute, a
    host that waits in backward, or a rank that is late. A rule that cannot be decided from the traces says so.
    """
    show(output, _doctor_views(load.runs_for(traces, output)))


def _skew_views(runs: list[Run]) -> list[TableView]:
    """Return the skew of each run."""
    from ddp_prof.present.tables.skew import skew_view

    return [skew_view(run.analysis(), run.skew()) for run in runs]


@click.command("skew", cls=TraceCommand, answer=Answer(("collectives",), _skew_views), example="traces/overlap.sqlite")
@click.option("--html", "page", type=Output(), help="Also write a page with the picture.")
@click.option("--png", type=Output(suffix=".png"), help="Also write the picture; needs Chromium.")
def skew(traces: tuple[Path, ...], load: Loader, page: Path | None, png: Path | None, output: TableOptions) -> None:
    """Which rank arrives last at the collectives, how often, by how much, and what it costs.

    Pass the traces of all ranks of a run; the clocks of several files are aligned. Some ranks may be missing.
    """
    runs = load.runs_for(traces, output)
    _refuse_to_draw_several(runs, page, png)
    with shown_after(output, _skew_views(runs)):
        if page or png:
            _draw_skew(runs[0], page, png)


def _draw_skew(run: Run, page: Path | None, png: Path | None) -> None:
    """Draw which rank arrives last as a page, a picture, or both.

    Raises:
        TraceError: The skew is not known.
    """
    from ddp_prof.present.charts.collectives import draw_skew
    from ddp_prof.present.html.page import write_figure
    from ddp_prof.present.skew_headlines import skew_headline

    result = run.skew()
    if result.reason:
        raise TraceError(run.analysis().trace, result.reason, "without that there is nothing to draw")
    figure = draw_skew(run.analysis(), result)
    write_figure(figure, title=skew_headline(result).claim, page=page, picture=png)


_KERNEL_TABLES = ("kernels", "hidden", "idle")
"""The tables of ``kernels``, by the names of ``kernels_views``."""


def _kernels_views(runs: list[Run], names: Sequence[str] = ("kernels",), top: int = 0) -> list[TableView]:
    """Return some of the tables of kernels for each run.

    Args:
        runs: The runs.
        names: Names in ``_KERNEL_TABLES``.
        top: Number of kernels to show; 0 for all.
    """
    from ddp_prof.present.tables.kernels import kernels_views

    found = []
    for run in runs:
        tables = kernels_views(run.overlap(), run.device_use(), top or None)
        views = [tables[name] for name in names]
        if "idle" not in names:  # that table has the warnings
            views[-1] = replace(views[-1], notes=[*views[-1].notes, *run.overlap().warnings])
        found += views
    return found


@click.command(
    "kernels",
    cls=TraceCommand,
    answer=Answer(("overlap", "kernels", "device use"), _kernels_views),
    example="--top 5 traces/overlap.sqlite",
)
@click.option(
    "--table",
    "name",
    type=click.Choice(_KERNEL_TABLES),
    help="Table to show. Default: all of them; with CSV, Markdown or --columns only kernels. JSON always holds all.",
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    help="How many kernels; 0 shows all. Default: 15, with CSV all. JSON always holds all.",
)
def kernels(traces: tuple[Path, ...], load: Loader, name: str | None, top: int | None, output: TableOptions) -> None:
    """Which kernels took the time, what hid communication, and why devices were idle.

    A kernel's slowdown is how many times as long it takes beside communication as alone, at the same position of a
    step: the median. Overlapped communication is divided by the compute beside it, idle time by its cause; both sum
    exactly to the figures of 'ddp-prof overlap'.
    """
    runs = load.runs_for(traces, output)
    shows_all = output.form == "table" and not (name or output.columns)
    if top is None:
        top = 0 if output.form == "csv" else 15
    show(output, _kernels_views(runs, _KERNEL_TABLES if shows_all else (name or "kernels",), top))


def comparison_views(runs: list[Run], output: TableOptions | None = None) -> list[TableView]:
    """Return the tables of ``compare``: the comparison, and for two runs of one variant what changed between them.

    The second table is shown as text only. Without ``output`` there is only the first.
    """
    summaries = _compared(runs)
    changed = _what_changed(runs, summaries)
    view = _comparison_view(runs, compare_steps(runs), changed, summaries)
    return _with_changes(view, runs, changed, summaries, output)


@click.command(
    "compare",
    cls=TraceCommand,
    answer=Answer(("overlap", "collectives", "kernels"), comparison_views),
    example="--waterfall traces/naive.sqlite traces/overlap.sqlite",
)
@click.option("--waterfall", is_flag=True, help="Show the change from each variant to the next, by parts of the step.")
@click.option("--html", "page", type=Output(), help="Also write a page with the waterfall.")
@click.option("--png", type=Output(suffix=".png"), help="Also write a picture of it; needs Chromium.")
def compare(
    traces: tuple[Path, ...],
    load: Loader,
    waterfall: bool,
    page: Path | None,
    png: Path | None,
    output: TableOptions,
) -> None:
    """Compare runs: step time, communication, and how much of it is hidden.

    Speed-ups are over the run called 'naive', if there is one: from training in turns, where profile_all.sh left its
    turns.db beside the traces, else from the captures. The waterfall leads from naive to flat, overlap and
    bucketed: it shows what each removed from the mean step and what it added; these parts sum exactly. For two runs of
    one variant, such as before and after a change, a second table shows what changed beyond their spread, and which
    collective changed most. For several monitor.jsonl, the medians over their measurements are compared, of each since
    its step last changed.
    """
    if logs := logs_among(traces):
        if waterfall or page or png:
            raise click.UsageError(f"--waterfall, --html and --png need traces, and {logs[0]} is the log of a monitor")
        show_logs_compared(logs, output)
        return
    runs = load.runs_for(traces, output)
    changes, summaries = compare_steps(runs), _compared(runs)
    changed = _what_changed(runs, summaries)
    view = _comparison_view(runs, changes, changed, summaries)
    if waterfall:
        from ddp_prof.present.run_notes import notes_of_runs
        from ddp_prof.present.tables.compare import readable_rows, waterfall_notes, waterfall_rows

        notes = [*waterfall_notes(changes, summaries), *notes_of_runs([run.overlap() for run in runs])]
        views = [TableView("", waterfall_rows(changes), notes, view.document, readable_rows(changes))]
    else:
        from ddp_prof.present.tables.compare import unchanged_notes

        if len(runs) == 2 and are_one_variant(runs) and not changed.parts:
            view = replace(view, notes=[*view.notes, *unchanged_notes(changes)])
        views = _with_changes(view, runs, changed, summaries, output)
    with shown_after(output, views):
        if page or png:
            from ddp_prof.present.charts.comparison import draw_waterfall
            from ddp_prof.present.html.page import write_figure

            title = "What each variant changed in the step"
            write_figure(draw_waterfall(changes, summaries), title=title, page=page, picture=png)


def _compared(runs: list[Run]) -> Sequence[VariantSummary]:
    """Return the figures of each run, with its speed-up over the baseline."""
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.benchmark.turns import load_turns

    return compare_variants([run.overlap() for run in runs], load_turns(runs), [run.manifest for run in runs])


def _comparison_view(
    runs: list[Run], changes: Waterfall, changed: WhatChanged, summaries: Sequence[VariantSummary]
) -> TableView:
    """Return the table with a row for each run.

    Args:
        runs: The runs.
        changes: How the mean step changes from run to run.
        changed: What changed between two runs of one variant.
        summaries: The figures of each run.
    """
    from ddp_prof.present.tables.compare import compare_view

    costs = [run.cost() for run in runs]
    return compare_view([run.overlap() for run in runs], summaries, changes, changed, costs)


def _with_changes(
    view: TableView,
    runs: Sequence[Run],
    changed: WhatChanged,
    summaries: Sequence[VariantSummary],
    output: TableOptions | None,
) -> list[TableView]:
    """Return the comparison, and after it the table of what changed if there is one and ``output`` shows it."""
    # CSV and Markdown have the rows of the comparison only; the JSON document holds the changes, too.
    shows_changes = changed.parts and output and output.form == "table" and not output.columns
    return [view, *([_changes_view(runs, changed, summaries)] if shows_changes else [])]


def _what_changed(runs: Sequence[Run], summaries: Sequence[VariantSummary]) -> WhatChanged:
    """Return what changed between two runs of one variant; nothing for other runs."""
    from ddp_prof.present.tables.compare import WhatChanged

    if len(runs) != 2 or not are_one_variant(runs):
        return WhatChanged()
    are_one_job = not any(one.other_job for one in summaries)
    return what_changed(*runs, names=[run.label for run in runs], are_one_job=are_one_job)


def _changes_view(runs: Sequence[Run], changed: WhatChanged, summaries: Sequence[VariantSummary]) -> TableView:
    """Return the table of what changed between two runs."""
    from ddp_prof.present.tables.compare import HOW_TO_READ_CHANGES, change_rows, changed_text

    other_job = next((f" ({one.label} is another job: {one.other_job})" for one in summaries if one.other_job), "")
    title = f"from {runs[0].label} to {runs[1].label}{other_job}, mean step: {changed_text(changed.parts)}"
    notes = [*changed.causes, HOW_TO_READ_CHANGES]
    return TableView(printable(title), change_rows(changed.parts), notes, {})


OWN_RESULTS, RESULTS = Path("traces/local/results.db"), Path("traces/results.db")


@click.command("results", cls=TraceCommand, example="traces/results.db", reads_traces=False)
@click.argument(
    "database",
    default=lambda: OWN_RESULTS if OWN_RESULTS.is_file() else RESULTS,
    type=InputPath("give the database"),
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

    table = database.parent / f"{database.stem}.csv"  # with_suffix refuses a folder such as "."
    protect_inputs([database], *([table] if folder else []))
    testbeds = gather_testbeds(load_results(database))
    if not testbeds:
        raise TraceError(database, "no runs in it yet", "fill it with scripts/run_comparison.sh")
    if output.columns and output.form in ("markdown", "table"):  # the other tables have none of these columns
        for one in testbeds:  # figures of two machines are never in one table
            show(output, [report.settings_view(one)])
    elif output.form == "markdown":
        say_lines(report.results_markdown(testbeds).removesuffix("\n"))
    elif output.form == "table":
        show(output, report.results_views(testbeds))
    else:
        show(output, [TableView("", report.csv_rows(testbeds), [], report.results_document(database, testbeds))])
    if folder:
        for problem in report.write_results(testbeds, folder):
            print_note(problem)
        report.write_results_csv(testbeds, table)
        say(f"{folder / report.REPORT} {table}", err=True)
