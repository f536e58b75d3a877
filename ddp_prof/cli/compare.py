"""``ddp-prof compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options.commands import Loader, load_options, table_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output
from ddp_prof.present.table import TableOptions, TableView, show
from ddp_prof.runs.run import Run, are_one_variant, changes_between, compare_steps

if TYPE_CHECKING:
    from ddp_prof.analyze.variants.before_after import PartChange
    from ddp_prof.analyze.variants.waterfall import Waterfall

MEASURES = ("overlap", "collectives", "kernels")


@trace_command("compare", "--waterfall traces/naive.sqlite traces/overlap.sqlite")
@traces_argument
@click.option("--waterfall", is_flag=True, help="Show the change from each variant to the next, by parts of the step.")
@click.option("--html", "page", type=Output(), help="Also write a page with the waterfall.")
@click.option("--png", type=Output(), help="Also write a picture of it; needs Chromium.")
@table_options
@load_options
def command(
    traces: tuple[Path, ...],
    load: Loader,
    waterfall: bool,
    page: Path | None,
    png: Path | None,
    output: TableOptions,
) -> None:
    """Compare runs: step time, communication, and how much of it is hidden.

    Speed-ups are over the run called 'naive', if there is one. The waterfall leads from naive to flat, overlap and
    bucketed: it shows what each removed from the mean step and what it added; these parts sum exactly. For two runs of
    one variant, such as before and after a change, a second table tells what changed beyond their spread, and which
    collective changed most.
    """
    runs = load.runs(traces, *MEASURES)
    changes, parts = compare_steps(runs), _changed_parts(runs)
    view = _comparison_view(runs, changes, parts)
    if waterfall:
        from ddp_prof.present.tables.comparison import readable_rows, waterfall_notes, waterfall_rows
        from ddp_prof.present.tables.overlap import notes_of_runs

        notes = [*waterfall_notes(changes), *notes_of_runs([run.overlap() for run in runs])]
        show(output, [TableView("", waterfall_rows(changes), notes, view.document, readable_rows(changes))])
    else:
        # Rows for programs are those of the comparison alone; their document holds the changes, too.
        is_read = parts and output.form == "table" and not output.columns
        show(output, [view, *([_changes_view(runs, parts)] if is_read else [])])
    if page or png:
        from ddp_prof.present.charts.comparison import draw_waterfall
        from ddp_prof.present.html.page import write_figure

        title = "What each variant changed in the step"
        write_figure(draw_waterfall(changes), title=title, page=page, picture=png)


def views(runs: list[Run]) -> list[TableView]:
    return [_comparison_view(runs, compare_steps(runs), _changed_parts(runs))]


def _comparison_view(runs: list[Run], changes: Waterfall, parts: Sequence[PartChange]) -> TableView:
    from ddp_prof.analyze.variants.comparison import compare_variants
    from ddp_prof.present.json_documents import changes_document, waterfall_document
    from ddp_prof.present.tables.comparison import compare_view

    results = [run.overlap() for run in runs]
    view = compare_view(results, compare_variants(results))
    more = {"waterfall": waterfall_document(changes), "changes": changes_document(parts)}
    return replace(view, document={**view.document, **more})


def _changed_parts(runs: Sequence[Run]) -> Sequence[PartChange]:
    """What changed between two runs of one variant."""
    return changes_between(runs[0], runs[1]) if len(runs) == 2 and are_one_variant(runs) else ()


def _changes_view(runs: Sequence[Run], parts: Sequence[PartChange]) -> TableView:
    from ddp_prof.present.tables.comparison import HOW_TO_READ_CHANGES, change_rows, change_texts

    texts = "; ".join(change_texts(parts)) or "nothing changed beyond the spread"
    title = f"from {runs[0].label} to {runs[1].label}, mean step: {texts}"
    return TableView(title, change_rows(parts), [HOW_TO_READ_CHANGES], {})
