"""The text of a report's page: figures, tables and lists of a set of runs, as HTML."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_prof import __version__
from ddp_prof.analyze.overlap.comparison import compare_variants
from ddp_prof.manifest import SHARED_GPU
from ddp_prof.present.charts.comparison import overlap_ratio
from ddp_prof.present.charts.theme import percent
from ddp_prof.present.html.page import figure_html
from ddp_prof.present.html.report_why import findings_html
from ddp_prof.present.tables.render import cell_text, heading, is_numeric
from ddp_prof.present.tables.rows import HOW_TO_READ, compare_rows, warnings_by_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import plotly.graph_objects as go

    from ddp_prof.analyze.overlap.overlap import TraceOverlap
    from ddp_prof.analyze.root_cause import RunExplanation
    from ddp_prof.manifest import Manifest
    from ddp_prof.present.tables.rows import Row

CSS = """
main { max-width: 1400px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 40px 0 12px; }
.quiet { color: var(--quiet); }
.notice { color: var(--notice); font-weight: 700; border: 2px solid; border-radius: 6px; padding: 2px 10px; }
.wide { overflow-x: auto; }
nav a { margin-right: 18px; }
a { color: inherit; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--quiet); vertical-align: bottom; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); }
.number { text-align: right; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 24px; }
.card { border: 1px solid var(--line); border-radius: 10px; overflow: hidden; text-decoration: none; }
.card:hover { border-color: var(--quiet); }
.card img { display: block; width: 100%; background: #ffffff; }
.card p { margin: 10px 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; margin: 8px 0; }
"""

WATERFALL = "waterfall"
"""Name of the chart that belongs to the section on causes."""

_SECTIONS = {
    "table": "Side by side",
    "why": "Why it is exposed",
    "unknown": "What could not be known, or was assumed",
    "steps": "Step by step",
    "timelines": "Timelines",
    "provenance": "How the runs were made",
}


@dataclass(frozen=True)
class RunSection:
    """What the page tells of one run.

    Attributes:
        name: Of its timeline: ``name.html`` and, where there are pictures, ``name.png`` lie beside the page.
        result: Its figures.
        manifest: How it was made; ``None`` where its traces do not say it.
    """

    name: str
    result: TraceOverlap
    manifest: Manifest | None
    explanation: RunExplanation


def report_body(sections: Sequence[RunSection], charts: Mapping[str, go.Figure], *, pictures: bool) -> str:
    """The page, top to bottom.

    Args:
        sections: The runs, in the order in which they are told of.
        charts: Figures by name, the most telling one first; of these the waterfall tells why.
        pictures: Whether ``.png`` files of timelines and charts lie beside the page.
    """
    results = [section.result for section in sections]
    drawn = {name: _chart(name, figure, picture=pictures) for name, figure in charts.items()}
    waterfall = drawn.pop(WATERFALL, "")
    first, *others = drawn.values()
    cards = "".join(_card(section, picture=pictures) for section in sections)
    parts = (
        "<main><h1>How much communication hides behind compute</h1>",
        _about(results),
        _navigation(),
        first,
        _heading("table"),
        f'<div class="wide">{_table(compare_rows(compare_variants(results)))}</div>',
        f'<p class="quiet">{html.escape(HOW_TO_READ)}; speed-up: over naive</p>',
        _heading("why"),
        f'<div class="wide">{findings_html((run.name, run.result.label, run.explanation) for run in sections)}</div>',
        waterfall,
        _heading("unknown"),
        _unknown(sections),
        _heading("steps"),
        *others,
        _heading("timelines"),
        f'<div class="cards">{cards}</div>',
        _heading("provenance"),
        _provenance(sections),
        "</main>",
    )
    return "\n".join(parts)


def _about(results: Sequence[TraceOverlap]) -> str:
    devices = sorted({result.device for result in results})
    where = [f"device: {', '.join(devices)}"]
    if any(SHARED_GPU in result.warnings for result in results):
        where.append(SHARED_GPU)
    css = "notice" if "cpu" in devices or SHARED_GPU in where else "quiet"
    measured = f"{len(results)} run{'' if len(results) == 1 else 's'}, measured by ddp-prof {__version__}"
    place = f'<span class="{css}">{html.escape(" · ".join(where))}</span>'
    return f'<p>{place} <span class="quiet">{html.escape(measured)}</span></p>'


def _navigation() -> str:
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in _SECTIONS.items())
    return f'<nav class="quiet">{links}</nav>'


def _heading(anchor: str) -> str:
    return f'<h2 id="{anchor}">{_SECTIONS[anchor]}</h2>'


def _chart(name: str, figure: go.Figure, *, picture: bool) -> str:
    still = f'<noscript><img src="{name}.png" width="1400" alt="{name}"></noscript>' if picture else ""
    return figure_html(figure, f"chart-{name}") + still


def _table(rows: Sequence[Row]) -> str:
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


def _unknown(sections: Sequence[RunSection]) -> str:
    """Each warning with the runs that it is about."""
    warnings = warnings_by_run([section.result for section in sections])
    if unmade := [section.result.label for section in sections if section.manifest is None]:
        warnings["how the run was made: no run.json lies beside its trace"] = unmade
    if not warnings:
        return "<p>Nothing.</p>"
    everyone = len(sections) if len(sections) > 1 else None
    about = (("all runs" if len(labels) == everyone else ", ".join(labels), text) for text, labels in warnings.items())
    return _definitions(about)


def _card(section: RunSection, *, picture: bool) -> str:
    label = html.escape(section.result.label)
    image = f'<img src="{section.name}.png" loading="lazy" alt="timeline of {label}">' if picture else ""
    share = percent(overlap_ratio(section.result))
    return (
        f'<a class="card" href="{section.name}.html">{image}<p><b>{label}</b> '
        f'<span class="quiet">{share} overlapped, device: {html.escape(section.result.device)}</span></p></a>\n'
    )


def _provenance(sections: Sequence[RunSection]) -> str:
    """What all runs have in common once, then what is each one's own."""
    facts = [_facts(section) for section in sections]
    common = set.intersection(*(set(fact.items()) for fact in facts)) if facts else set()
    own = (
        f"<details><summary>{html.escape(section.result.label)}</summary>"
        f"{_definitions(pair for pair in fact.items() if pair not in common)}</details>"
        for section, fact in zip(sections, facts, strict=True)
    )
    return _definitions(pair for pair in (facts[0].items() if facts else ()) if pair in common) + "\n".join(own)


def _facts(section: RunSection) -> dict[str, str]:
    result, run = section.result, section.manifest
    facts = {"trace": result.trace.name, "read from": " ".join(filter(None, (result.source, result.producer)))}
    if run is None:
        return facts
    return facts | {
        "command": " ".join(run.command),
        "created": run.created,
        "commit": run.git_commit or "not known",
        "model": f"{run.model_size}, {sum(parameter.numel for parameter in run.parameters):,} parameters",
        "batch": f"{run.batch_size} x {run.seq_len} tokens",
        "ranks": f"{run.world_size}, {run.backend}, device: {run.device}",
        "steps": f"{run.steps} after {run.warmup} of warm-up, seed {run.seed}",
        "recorded by": run.profiler or "no profiler",
        "versions": _pairs(run.versions),
        "machine": _pairs(run.machine),
    }


def _pairs(values: Mapping[str, Any]) -> str:
    """Names and values that are not empty; bytes as a person counts them."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {value / 2**30:.1f} GiB" if key.endswith("_bytes") else f"{key} {value}"
        for key, value in values.items()
        if value != ""
    )


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in pairs)
    return f"<dl>{items}</dl>" if items else ""
