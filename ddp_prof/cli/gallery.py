"""``ddp-prof gallery``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_prof.cli.options import Selection, selection_options, traces_argument
from ddp_prof.cli.timeline import load_sources

if TYPE_CHECKING:
    from ddp_prof.present.timeline_model import Source


@click.command("gallery")
@traces_argument
@click.option("-o", "--output", "folder", default="figures", show_default=True, type=click.Path(path_type=Path))
@selection_options
def command(traces: tuple[Path, ...], selection: Selection, folder: Path) -> None:
    """A folder with everything to look at: index.html, the comparison, a timeline and a picture of each run.

    TRACE is read as by 'ddp-prof overlap'. Pictures need Chromium; without it the pages are written all the same.
    """
    from ddp_prof.analyze.overlap import measure_works, merge_ranks
    from ddp_prof.manifest import SUFFIX, manifest_path
    from ddp_prof.present.gallery import GalleryEntry, write_gallery
    from ddp_prof.present.rows import compare_sheet

    runs: dict[Path, list[Source]] = {}
    for source in load_sources(traces, selection):
        runs.setdefault(manifest_path(source.trace.path), []).append(source)
    entries = [
        GalleryEntry(
            run.name.removesuffix(SUFFIX),
            merge_ranks([measure_works(source.trace, source.works) for source in sources]),
            tuple(sources),
        )
        for run, sources in runs.items()
    ]
    sheet = compare_sheet([entry.result for entry in entries])
    for problem in write_gallery(entries, folder, sheet, backward_pattern=selection.backward_pattern):
        click.echo(f"note: {problem}", err=True)
    click.echo(folder / "index.html")
