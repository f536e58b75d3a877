"""``ddp-prof report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Selection, selection_options, traces_argument
from ddp_prof.cli.timeline import load_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.variants.waterfall import Waterfall
    from ddp_prof.present.html.report import Run
    from ddp_prof.present.timeline.model import Source


def gather_runs(sources: Sequence[Source]) -> list[Run]:
    """The runs that traces belong to, measured; the ranks of one run may lie in several files."""
    from ddp_prof.analyze.collectives.findings import explain_run
    from ddp_prof.analyze.collectives.run_analysis import merge_traces, reduce_trace
    from ddp_prof.analyze.collectives.step_view import typical_step, view_step
    from ddp_prof.analyze.overlap.comparison import compare_variants
    from ddp_prof.analyze.overlap.overlap import measure_ranks, merge_ranks
    from ddp_prof.manifest import SUFFIX, manifest_path
    from ddp_prof.present.html.report import Run

    runs: dict[Path, list[Source]] = {}
    for source in sources:
        runs.setdefault(manifest_path(source.trace.path), []).append(source)
    results = [merge_ranks([measure_ranks(source.trace, source.ranks) for source in own]) for own in runs.values()]
    found = []
    for (path, own), result, summary in zip(runs.items(), results, compare_variants(results), strict=True):
        findings = explain_run(merge_traces([reduce_trace(source.trace, source.ranks) for source in own]))
        step = typical_step(findings.run.ranks)
        views = {} if step is None else {step: view_step(findings.run.ranks, step)}
        name = path.name.removesuffix(SUFFIX)
        found.append(Run(name, result, tuple(own), findings, summary, views, step))
    return found


def compare_runs(runs: Sequence[Run]) -> Waterfall:
    """What each run changed of the one before."""
    from ddp_prof.analyze.variants.contention import sample_kernels
    from ddp_prof.analyze.variants.waterfall import measure_waterfall

    return measure_waterfall(
        [
            (run.findings.run, [sample_kernels(source.trace, rank) for source in run.sources for rank in source.ranks])
            for run in runs
        ]
    )


@click.command("report")
@traces_argument
@click.option(
    "-o",
    "--output",
    "folder",
    default="figures/report",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write.",
)
@selection_options
def command(traces: tuple[Path, ...], selection: Selection, folder: Path) -> None:
    """One page to read on a set of runs: comparison, why communication is exposed, timelines, what is not known.

    A folder stands for the traces in it. Pictures need Chromium; without it the pages are written all the same.
    """
    from ddp_prof.manifest import in_story_order
    from ddp_prof.present.html.report import write_report

    sources = load_sources(traces, selection, with_shapes=True)
    runs = in_story_order(gather_runs(sources), lambda run: run.manifest)
    for problem in write_report(runs, folder, compare_runs(runs), backward_pattern=selection.backward_pattern):
        click.echo(f"note: {problem}", err=True)
    click.echo(folder / "index.html")
