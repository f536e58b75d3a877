"""HTML pages that work offline; their Content-Security-Policy forbids the network.

Pages are Jinja2 templates, which escape each value; only our own CSS, scripts and JSON are passed as markup. A figure
is JSON without ``<`` and ``>``, so it cannot end its element. A short script draws it in the light or the dark theme,
as the reader's system prefers. plotly.js is either in the page itself, or one file for all pages of a folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ddp_prof.atomic_file import atomic_write
from ddp_prof.present import theme
from ddp_prof.present.charts import Chart, pack_array
from ddp_prof.present.html.scripts import page_script
from ddp_prof.present.text import plain_name

LONGEST_TITLE = 79
"""Most characters of a page's title; a longer one is cut."""
PLOTLY_FILE = "plotly.min.js"
"""Name of plotly.js in a folder whose pages load the same file."""


def write_shared_plotly(folder: Path) -> None:
    """Write plotly.js into a folder, for its pages with ``shared_plotly``."""
    from plotly.offline import get_plotlyjs

    with atomic_write(folder / PLOTLY_FILE) as partial:
        partial.write_text(get_plotlyjs(), encoding="utf-8")


def write_figure(
    figure: Chart,
    *,
    title: str,
    page: Path | None,
    picture: Path | None = None,
    more: Sequence[str] = (),
    shared_plotly: bool = False,
) -> None:
    """Write a figure as a page (see :func:`write_page`), as a picture (PNG or SVG), or both.

    ``more`` are sentences that the page has under its title.

    Raises:
        PictureError: The picture cannot be drawn here.
    """
    if page:
        figures = {"figure": figure}
        values = {"heading": title, "more": more}
        write_page(page, "figure.html", values, title=title, figures=figures, shared_plotly=shared_plotly)
    if picture:
        from ddp_prof.present.charts.static_images import write_pictures

        write_pictures([(figure, picture)])


def write_page(
    path: Path,
    template: str,
    values: Mapping[str, Any],
    *,
    title: str,
    navigation: Sequence[Mapping[str, str]] = (),
    figures: Mapping[str, Chart] | None = None,
    css: str = "",
    scripts: Sequence[str] = (),
    shared_plotly: bool = False,
    late_plotly: bool = False,
) -> None:
    """Write a page; if that fails, an older page at the path is unchanged.

    Args:
        path: The page.
        template: Name of a file in ``templates``.
        values: Values for the template, which escapes them.
        title: Plain text; cut if it is long.
        navigation: Links beside the one to the index. Each has ``title``, ``href``, ``relation`` (``prev``, ``next`` or
            empty), and ``page`` (``timeline``, ``why`` or ``kernels`` of the same run, else empty).
        figures: Figures for the template, by name, in the light theme.
        css: Added to the style of all pages.
        scripts: JavaScript modules beside those of all pages; see :mod:`~ddp_prof.present.html.scripts`.
        shared_plotly: Whether plotly.js is a file beside the page, not a part of the page.
        late_plotly: Whether plotly.js does not start when the page is loaded: the element ``plotly`` then only holds
            its text or file name, and a script of the page starts it.
    """
    from plotly.offline import get_plotlyjs

    plotly = "" if shared_plotly else _without_loader(get_plotlyjs())
    script = page_script("html/assets/draw.js", "html/assets/sideways.js", *scripts)
    # The template is rendered piece by piece, because a page may have many megabytes.
    stream = _environment().get_template(template).stream(
        values,
        title=plain_name(title, LONGEST_TITLE),
        navigation=navigation,
        policy=_policy([script, plotly], shared_plotly=shared_plotly),
        css=trusted_markup(_base_css() + css),
        plotly=trusted_markup(plotly),
        plotly_file=PLOTLY_FILE,
        late_plotly=late_plotly,
        script=trusted_markup(script),
        recoloring=json_in_page(theme.recoloring()),
        figures={name: _figure_html(figure) for name, figure in (figures or {}).items()},
    )  # fmt: skip
    with (
        atomic_write(path) as partial,
        partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        file.writelines(stream)


def _without_loader(plotly: str) -> str:
    """Return plotly.js without the function around it that serves module loaders.

    A browser parses a function twice, first to find its end, and this function has megabytes. If plotly.js has another
    form than expected, it is returned unchanged.
    """
    found = re.fullmatch(
        r"(/\*.*?\*/\n)\(\n function\(root, factory\).*?\(\) => \{\n(.*)return Plotly;\n\}\)\);\s*", plotly, re.DOTALL
    )
    return "".join(found.groups()) if found else plotly


def asset(name: str, room: str = "html") -> str:
    """Return the text of a file in the folder ``assets`` of ``present/html``, or of another folder of ``present``."""
    return (files(f"ddp_prof.present.{room}") / "assets" / name).read_text(encoding="utf-8")


def trusted_markup(ours: str) -> Markup:
    """Mark text that is our own as markup, which templates do not escape."""
    return Markup(ours)  # noqa: S704


def json_in_page(data: Any) -> Markup:
    """Return data as JSON that cannot end its HTML element, because it has no ``<`` and ``>``."""
    return escape_json(json_text(data))


def json_text(data: Any) -> str:
    """Return data as JSON without spaces; it is no markup yet."""
    return json.dumps(data, default=pack_array, ensure_ascii=False, separators=(",", ":"))


def escape_json(text: str) -> Markup:
    """Return JSON as markup: without ``<`` and ``>``, which occur only in its texts."""
    return trusted_markup(text.replace("<", "\\u003c").replace(">", "\\u003e"))


def _figure_html(figure: Chart) -> dict[str, str]:
    """Return a figure for a template: as ``json``, and its title and subtitle as plain text, the ``label``."""
    title = figure["layout"]["title"]
    words = " · ".join(part["text"] for part in (title, title["subtitle"]) if part["text"])
    plain = " ".join(unescape(re.sub(r"<[^>]*>", " ", words)).split())
    return {"json": json_in_page(figure), "label": plain}


@cache
def _environment() -> jinja2.Environment:
    """Return the environment of our templates, which escapes values and rejects names without a value."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ddp_prof.present.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _base_css() -> str:
    """Return the style of all pages, with the colours of both themes."""
    light, dark = (
        trusted_markup(" ".join(f"--{name}: {color};" for name, color in palette.uncategorized.items()))
        for palette in (theme.LIGHT, theme.DARK)
    )
    template = _environment().from_string(asset("page.css"))
    return template.render(light=light, dark=dark, font=trusted_markup(theme.FONT))


def _policy(scripts: Sequence[str], *, shared_plotly: bool) -> str:
    """Return a Content-Security-Policy that allows only these scripts, and no files but those beside the page.

    Args:
        scripts: Texts of the scripts; empty ones are left out.
        shared_plotly: Whether to allow scripts in files beside the page, too.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts if script]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests) + (" 'self' file:" if shared_plotly else "")
    rules = (
        "default-src 'none'",
        f"script-src {sources}",
        "style-src 'unsafe-inline'",
        "img-src 'self' file: data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)
