"""The part of a report that says why communication is exposed: what was found of each run, and a page of figures."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives.step_view import typical_step, view_step
from ddp_prof.present.charts.collectives import draw_step_collectives
from ddp_prof.present.charts.straggler import draw_skew
from ddp_prof.present.html.page import figure_html, write_page
from ddp_prof.present.tables.collectives import root_cause_text
from ddp_prof.present.tables.straggler import skew_headline

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddp_prof.analyze.root_cause import RunExplanation

SUFFIX = "-why"
"""Ends the name of a run's page of figures: ``overlap-why.html``."""


def finding_text(explanation: RunExplanation) -> str:
    """The main cause of exposed time, in words."""
    return root_cause_text(explanation.root_cause, explanation.collectives.collectives)


def findings_html(named: Iterable[tuple[str, str, RunExplanation]]) -> str:
    """A row a run.

    Args:
        named: Of each run the name of its files, its label, and what was found.
    """
    rows = "".join(
        f'<tr><td><a href="{name}{SUFFIX}.html">{html.escape(label)}</a></td>'
        f"<td>{html.escape(finding_text(found))}</td><td>{html.escape(skew_headline(found.skew))}</td></tr>"
        for name, label, found in named
    )
    head = "<tr><th>run</th><th>what is exposed</th><th>who is late</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def write_why_page(explanation: RunExplanation, path: Path) -> None:
    """The collectives of a typical step, and who was late in which; plotly.js lies beside the page."""
    run, finding = explanation.run, finding_text(explanation)
    step = typical_step(run.ranks)
    lines = () if step is None else view_step(run, step)
    body = figure_html(draw_step_collectives(run, step, lines, finding), "collectives")
    if explanation.skew.reason is None:
        body += figure_html(draw_skew(run, explanation.skew), "skew")
    write_page(path, title=f"{run.label}: {finding}", body=body, shared_plotly=True)
