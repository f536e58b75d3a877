"""HTML pages that need no network and, by their Content-Security-Policy, could not use it.

A figure travels as JSON that no parser of HTML can take for markup; a few lines of script draw it in the light or the
dark palette, as the reader's system prefers. plotly.js is part of the page, or one file beside the pages of a folder.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import TYPE_CHECKING

from ddp_prof.present.charts import theme

if TYPE_CHECKING:
    from pathlib import Path

    import plotly.graph_objects as go

PLOTLY_FILE = "plotly.min.js"

_DRAW = """
"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const darkOf = read("recoloring");
const recolor = (part) => JSON.parse(
  JSON.stringify(part).replace(/#[0-9a-f]{6}/g, (color) => (dark.matches && darkOf[color]) || color));
const config = { displaylogo: false, scrollZoom: true, responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const COLORED = ["marker", "line", "error_x", "error_y"];
const repaint = (trace) => ({ ...trace,
  ...Object.fromEntries(COLORED.filter((key) => trace[key]).map((key) => [key, recolor(trace[key])])) });
function draw() {
  for (const element of document.querySelectorAll(".figure")) {
    const { data, layout } = read(element.id + "-data");
    Plotly.react(element, data.map(repaint), recolor(layout), config);
  }
}
dark.addEventListener("change", draw);
draw();
"""

_CSS = f"""
:root {{ color-scheme: light dark; --paper: {theme.LIGHT.paper}; --text: {theme.LIGHT.text};
  --quiet: {theme.LIGHT.quiet}; --line: {theme.LIGHT.line}; --notice: {theme.LIGHT.notice}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: {theme.DARK.paper}; --text: {theme.DARK.text}; --quiet: {theme.DARK.quiet};
    --line: {theme.DARK.line}; --notice: {theme.DARK.notice}; }} }}
html {{ overflow-y: scroll; }} /* a bar that came after the figures were drawn would leave them too wide */
body {{ margin: 0; background: var(--paper); color: var(--text); font: 15px/1.5 {theme.FONT}; }}
.figure {{ min-width: 760px; }}
"""


def write_figure_page(figure: go.Figure, path: Path, *, title: str, shared_plotly: bool = False) -> None:
    """Write a page that holds one figure.

    Args:
        figure: The figure, in the light palette.
        path: The page.
        title: Plain text.
        shared_plotly: Whether plotly.js lies beside the page, once for all pages; else it is part of it.
    """
    write_page(path, title=title, body=figure_html(figure, "figure"), shared_plotly=shared_plotly)


def figure_html(figure: go.Figure, identity: str) -> str:
    """The element that a figure is drawn in, and its data."""
    # Plotly's JSON writes <, > and / as escapes, so that nothing in it can end the element.
    return (
        f'<div class="figure" id="{identity}"></div>\n'
        f'<script type="application/json" id="{identity}-data">{figure.to_json()}</script>\n'
    )


def write_page(
    path: Path,
    *,
    title: str,
    body: str,
    css: str = "",
    script: str = "",
    tail: str = "",
    shared_plotly: bool = False,
) -> None:
    """Write a page with any number of figures in its body; see :func:`write_figure_page`.

    Args:
        path: The page.
        title: Plain text.
        body: HTML.
        css: Added to the style of all pages.
        script: Runs after that of all pages, and may use what it defines.
        tail: HTML after all scripts: what is so large that drawing should not wait for it.
        shared_plotly: Whether plotly.js lies beside the page.
    """
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    own = [item for item in (_DRAW, script) if item]
    scripts = list(own)
    if shared_plotly:
        library = f'<script src="{PLOTLY_FILE}"></script>'
        if not (path.parent / PLOTLY_FILE).is_file():
            (path.parent / PLOTLY_FILE).write_text(get_plotlyjs(), encoding="utf-8")
    else:
        scripts.append(get_plotlyjs())
        library = f"<script>{scripts[-1]}</script>"
    recoloring = json.dumps(theme.recoloring())
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8">{_policy(scripts, shared_plotly=shared_plotly)}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_CSS}{css}</style></head>\n'
        f"<body>\n{body}\n"
        f'<script type="application/json" id="recoloring">{recoloring}</script>\n'
        f"{library}\n{''.join(f'<script>{summary}</script>' for summary in own)}\n{tail}\n</body></html>\n",
        encoding="utf-8",
    )


def _policy(scripts: list[str], *, shared_plotly: bool) -> str:
    """Only these very scripts run, and nothing is fetched but what lies beside the page."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests) + (" 'self' file:" if shared_plotly else "")
    rules = (
        "default-src 'none'",
        f"script-src {sources}",
        "style-src 'unsafe-inline'",
        "img-src 'self' file: data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'
