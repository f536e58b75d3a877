"""``ddp-prof skew``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options import Selection, format_option, one_run_option, selection_options, traces_argument


@click.command("skew")
@traces_argument
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write a page with the picture, too.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the picture, too; needs Chromium.")
@one_run_option
@format_option
@selection_options
def command(
    traces: tuple[Path, ...], selection: Selection, page: Path | None, png: Path | None, one_run: bool, form: str
) -> None:
    """Which rank arrives last at the collectives, how often, by how much, and what it costs.

    Give the traces of all ranks of a run; files of their own are brought to one clock. Ranks may be missing.
    """
    from ddp_prof.analyze.collectives.straggler import measure_skew
    from ddp_prof.present.headlines import skew_headline
    from ddp_prof.present.tables.render import show
    from ddp_prof.present.tables.straggler import skew_view

    runs = selection.runs(traces, one_run=one_run)
    skews = [measure_skew(run.ranks, run.warnings) for run in runs]
    show(form, [skew_view(run, skew) for run, skew in zip(runs, skews, strict=True)])
    if page or png:
        if len(runs) > 1:
            raise click.UsageError("--html and --png draw one run: give the traces of a single one")
        from ddp_prof.present.charts.static_images import write_pictures
        from ddp_prof.present.charts.straggler import draw_skew
        from ddp_prof.present.html.page import write_figure_page

        figure = draw_skew(runs[0], skews[0])
        if page:
            write_figure_page(figure, page, title=skew_headline(skews[0]).claim)
        if png:
            write_pictures([(figure, png)])
