"""A folder to open in a browser: the runs compared, a timeline of each, and how they were made.

It works from disk and without network; its pages share one plotly.js.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_prof import __version__
from ddp_prof.present.charts import draw_comparison, overlap_ratio
from ddp_prof.present.page import figure_html, write_figure_page, write_page
from ddp_prof.present.pictures import NoBrowserError, write_pictures
from ddp_prof.present.style import percent
from ddp_prof.present.table import cell_text, heading, is_numeric
from ddp_prof.present.timeline import draw_timeline
from ddp_prof.present.timeline_build import MAX_BOXES, build_timeline, steady_steps
from ddp_prof.present.timeline_page import write_timeline_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from ddp_prof.analyze.overlap import TraceOverlap
    from ddp_prof.manifest import Manifest
    from ddp_prof.present.rows import Sheet
    from ddp_prof.present.timeline_model import Source, Timeline

COMPARISON, INDEX = "comparison", "index"

_CSS = """
main { max-width: 1400px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 40px 0 12px; }
.quiet { color: var(--quiet); }
.notice { color: var(--notice); font-weight: 700; border: 2px solid; border-radius: 6px; padding: 2px 10px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); vertical-align: bottom; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); }
.number { text-align: right; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 24px; }
.card { border: 1px solid var(--line); border-radius: 10px; overflow: hidden; color: inherit; text-decoration: none; }
.card:hover { border-color: var(--quiet); }
.card img { display: block; width: 100%; background: #ffffff; }
.card p { margin: 10px 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; margin: 8px 0; }
"""


@dataclass(frozen=True)
class GalleryEntry:
    """One run.

    Attributes:
        name: What its files are called.
        result: Its figures.
        sources: Its traces, of which one may hold all ranks.
    """

    name: str
    result: TraceOverlap
    sources: tuple[Source, ...]

    @property
    def manifest(self) -> Manifest | None:
        """How it was made, where its traces say it."""
        return next((source.trace.manifest for source in self.sources if source.trace.manifest), None)


def write_gallery(
    entries: Sequence[GalleryEntry], folder: Path, sheet: Sheet, *, backward_pattern: str | None = None
) -> list[str]:
    """Write the pages and pictures of all runs, and an ``index.html`` that leads to them.

    Args:
        entries: The runs in the order in which they are told of.
        folder: Made where it is missing; files of the same names are replaced.
        sheet: The runs side by side, as a table with notes.
        backward_pattern: The regular expression with which backward was found, if one was given.

    Returns:
        What could not be made, a line each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _file_names(entry.name for entry in entries)
    comparison = draw_comparison([entry.result for entry in entries])
    write_figure_page(comparison, folder / f"{COMPARISON}.html", title="Comparison", shared_plotly=True)
    pictures = [(comparison, folder / f"{COMPARISON}.png")]
    for name, entry in zip(names, entries, strict=True):
        whole, part = _timelines(entry, backward_pattern)
        write_timeline_page(whole, folder / f"{name}.html", shared_plotly=True)
        pictures.append((draw_timeline(part), folder / f"{name}.png"))
    problems = _try_pictures(pictures)
    body = _index(entries, names, comparison, sheet, pictures=not problems)
    write_page(folder / f"{INDEX}.html", title="Communication behind compute", body=body, css=_CSS, shared_plotly=True)
    return problems


def _timelines(entry: GalleryEntry, backward_pattern: str | None) -> tuple[Timeline, Timeline]:
    """The timeline of the whole run, to move around in, and that of a few steps, to look at."""
    steps = steady_steps([work for source in entry.sources for work in source.works])
    whole = build_timeline(entry.sources, backward_pattern=backward_pattern)
    part = build_timeline(entry.sources, steps=steps, max_boxes=MAX_BOXES, backward_pattern=backward_pattern)
    return whole, part


def _try_pictures(pictures: Sequence[tuple[go.Figure, Path]]) -> list[str]:
    """Pictures are dispensable: the pages show the same."""
    try:
        write_pictures(pictures)
    except NoBrowserError as error:
        return [str(error)]
    return []


def _file_names(names: Iterable[str]) -> list[str]:
    """Names that every file system and address takes, each once."""
    taken = {INDEX, COMPARISON}
    result = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "trace"
        free = next(
            each for number in range(1, 10_000) if (each := plain if number == 1 else f"{plain}-{number}") not in taken
        )
        taken.add(free)
        result.append(free)
    return result


def _index(
    entries: Sequence[GalleryEntry], names: Sequence[str], comparison: go.Figure, sheet: Sheet, *, pictures: bool
) -> str:
    cards = [_card(entry, name, picture=pictures) for entry, name in zip(entries, names, strict=True)]
    without_script = (
        f'<noscript><img src="{COMPARISON}.png" width="1400" alt="comparison"></noscript>' if pictures else ""
    )
    runs = "run" if len(entries) == 1 else "runs"
    measured = f"{len(entries)} {runs}, measured by ddp-prof {html.escape(__version__)}"
    parts = (
        "<main><h1>How much communication hides behind compute</h1>",
        f'<p>{_devices(entries)} <span class="quiet">{measured}</span></p>',
        figure_html(comparison, "comparison"),
        without_script,
        "<h2>Side by side</h2>",
        f'<div class="wide">{_table(sheet)}</div>',
        _notes(sheet.notes),
        "<h2>Timelines</h2>",
        f'<div class="cards">{"".join(cards)}</div>',
        "<h2>How the runs were made</h2>",
        _provenance(entries),
        "</main>",
    )
    return "\n".join(parts)


def _devices(entries: Sequence[GalleryEntry]) -> str:
    devices = sorted({entry.result.device for entry in entries})
    css = "notice" if "cpu" in devices else "quiet"
    return f'<span class="{css}">device: {html.escape(", ".join(devices))}</span>'


def _table(sheet: Sheet) -> str:
    rows = sheet.rows
    if not rows:
        return ""
    css = {key: ' class="number"' if is_numeric(rows, key) else "" for key in rows[0]}
    head = "".join(f"<th{css[key]}>{html.escape(heading(key))}</th>" for key in rows[0])
    lines = (
        "".join(f"<td{css[key]}>{html.escape(cell_text(key, value))}</td>" for key, value in row.items())
        for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="quiet">{items}</ul>' if items else ""


def _card(entry: GalleryEntry, name: str, *, picture: bool) -> str:
    label = html.escape(entry.result.label)
    image = f'<img src="{name}.png" loading="lazy" alt="timeline of {label}">' if picture else ""
    share = percent(overlap_ratio(entry.result))
    return (
        f'<a class="card" href="{name}.html">{image}<p><b>{label}</b> '
        f'<span class="quiet">{share} overlapped, device: {html.escape(entry.result.device)}</span></p></a>\n'
    )


def _provenance(entries: Sequence[GalleryEntry]) -> str:
    """What all runs have in common once, then what is each one's own."""
    facts = [_facts(entry) for entry in entries]
    common = (
        {key: value for key, value in facts[0].items() if all(each.get(key) == value for each in facts)}
        if facts
        else {}
    )
    own = (
        f"<details><summary>{html.escape(entry.result.label)}</summary>"
        f"{_definitions({key: value for key, value in each.items() if key not in common})}</details>"
        for entry, each in zip(entries, facts, strict=True)
    )
    return _definitions(common) + "\n".join(own)


def _facts(entry: GalleryEntry) -> dict[str, str]:
    result, run = entry.result, entry.manifest
    facts = {"trace": result.trace.name, "read from": " ".join(filter(None, (result.source, result.producer)))}
    if run is None:
        return {**facts, "run.json": "none beside the trace: how the run was made is not known"}
    return facts | {
        "command": " ".join(run.command),
        "created": run.created,
        "commit": run.git_commit or "not known",
        "model": f"{run.model_size}, {sum(each.numel for each in run.parameters):,} parameters",
        "batch": f"{run.batch_size} x {run.seq_len} tokens",
        "ranks": f"{run.world_size}, {run.backend}, device: {run.device}",
        "steps": f"{run.steps} after {run.warmup} of warm-up, seed {run.seed}",
        "recorded by": run.profiler or "no profiler",
        "versions": _pairs(run.versions),
        "machine": _pairs(run.machine),
    }


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _definitions(facts: dict[str, str]) -> str:
    items = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    return f"<dl>{items}</dl>" if items else ""
