"""``ddp-prof timeline``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options.commands import Loader, load_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output, default_output, open_output, say
from ddp_prof.cli.options.verbosity import progress

_MOST_STEPS = 1_000_000


def _parse_steps(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[int] | None:
    """``3-5,8`` as numbers."""
    if value is None:
        return None
    numbers: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise click.BadParameter(f"{value!r} is neither a number nor a range such as 3-5")
        low, high = int(first), int(last or first)
        if not 0 <= high - low < _MOST_STEPS:
            raise click.BadParameter(f"{part!r} is no range of at most {_MOST_STEPS} steps in rising order")
        numbers += range(low, high + 1)
    return numbers


@trace_command("timeline", "traces/overlap.sqlite -o overlap.html")
@traces_argument
@click.option(
    "-o",
    "--output",
    type=Output("pipe"),
    help="The page; - for stdout. Default: TRACE's name .html.",
)
@click.option("--png", type=Output(), help="Also write a PNG picture; needs Chromium.")
@click.option("--svg", type=Output(), help="Also write an SVG picture; needs Chromium.")
@click.option("--steps", metavar="N[-M]", callback=_parse_steps, help="Steps to show. Default: all that was captured.")
@load_options
def command(
    traces: tuple[Path, ...],
    load: Loader,
    output: Path | None,
    png: Path | None,
    svg: Path | None,
    steps: list[int] | None,
) -> None:
    """What ran when: host phases, compute, communication, and which of it is overlapped or exposed.

    Several traces are drawn below each other, with their first steps aligned. A picture shows a few steps; --steps
    chooses which.
    """
    from ddp_prof.present.charts.static_images import write_pictures
    from ddp_prof.present.html.timeline_page import write_timeline_page
    from ddp_prof.present.timeline.build import build_excerpt, build_timeline
    from ddp_prof.present.timeline.figure import draw_timeline
    from ddp_prof.runs.run import timeline_sources

    runs = load.runs(traces, with_launches=True)
    with progress(2) as begin:
        begin("reading")
        sources = timeline_sources(runs)
        begin("laying out")
        model = build_timeline(sources, steps=steps)
    pictures = [path for path in (png, svg) if path]
    figure = draw_timeline(build_excerpt(sources, steps)) if pictures else None
    page = output or default_output(sources[0].title, ".html")
    del sources  # the events take more memory than all that is drawn
    with open_output(page) as file, progress(1) as begin:
        begin("writing")
        write_timeline_page(model, file)
    if figure is not None:
        with progress(1) as begin:
            begin("drawing")
            write_pictures([(figure, path) for path in pictures])
        say("\n".join(map(str, pictures)))
