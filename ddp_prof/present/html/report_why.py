"""The part of a report that says why communication is exposed: what was found of each run, and a page of figures."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ddp_prof.present.charts.collectives import draw_step_collectives
from ddp_prof.present.charts.straggler import draw_skew
from ddp_prof.present.headlines import Headline, root_cause_headline, skew_headline
from ddp_prof.present.html.page import figure_html, write_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ddp_prof.analyze.collectives.findings import Findings
    from ddp_prof.analyze.collectives.step_view import RankStepView

SUFFIX = "-why"
"""Ends the name of a run's page of figures: ``overlap-why.html``."""


def finding_of(findings: Findings) -> Headline:
    """The main cause of exposed time, in words."""
    return root_cause_headline(findings.headline, has_collectives=bool(findings.collectives.collectives))


def findings_html(named: Iterable[tuple[str, str, Findings]]) -> str:
    """A row a run.

    Args:
        named: Of each run the name of its files, its label, and what was found.
    """
    rows = "".join(
        f'<tr><td><a href="{name}{SUFFIX}.html">{html.escape(label)}</a></td>'
        f"<td>{html.escape(finding_of(found).text)}</td><td>{html.escape(skew_headline(found.skew).text)}</td></tr>"
        for name, label, found in named
    )
    head = "<tr><th>run</th><th>what is exposed</th><th>who is late</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def write_why_page(findings: Findings, step: int | None, ranks: Sequence[RankStepView], path: Path) -> None:
    """The collectives of a step, and who was late in which; plotly.js lies beside the page."""
    run, finding = findings.run, finding_of(findings)
    body = figure_html(draw_step_collectives(run, step, ranks, finding), "collectives")
    if findings.skew.reason is None:
        body += figure_html(draw_skew(run, findings.skew), "skew")
    write_page(path, title=f"{run.label}: {finding.claim}", body=body, shared_plotly=True)
