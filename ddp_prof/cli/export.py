"""``ddp-prof export``."""

from __future__ import annotations

from pathlib import Path

import click

from ddp_prof.cli.options.commands import Loader, load_options, trace_command, traces_argument
from ddp_prof.cli.options.outputs import Output, default_output, open_output
from ddp_prof.cli.options.verbosity import progress


@trace_command("export", "traces/overlap.sqlite -o overlap.json.gz")
@traces_argument
@click.option(
    "-o",
    "--output",
    type=Output("pipe"),
    help="The file to write; gzipped where it ends in .gz; - for stdout. Default: TRACE's name .perfetto.json.gz.",
)
@load_options
def command(traces: tuple[Path, ...], load: Loader, output: Path | None) -> None:
    """A file for Perfetto (ui.perfetto.dev) and chrome://tracing, with overlap and exposed communication as counters.

    Several traces become processes of one file, with their first steps aligned. Neither viewer uploads the file.
    """
    from ddp_prof.present.perfetto import write_perfetto
    from ddp_prof.runs.run import timeline_sources

    runs = load.runs(traces, with_launches=True)
    with progress(1) as begin:
        begin("reading")
        sources = timeline_sources(runs)
    target = output or default_output(sources[0].title, ".perfetto.json.gz")
    with open_output(target) as file, progress(1) as begin:
        begin("writing")
        write_perfetto(sources, file)
