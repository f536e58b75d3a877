"""Formats numbers with their units, and makes names from traces safe to show."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddp_prof.columns import Row, count_noun
from ddp_prof.errors import printable, shown_path
from ddp_prof.table import UNKNOWN

MAX_NAME = 120
"""Most characters of a name; a C++ template gives its kernel a name of thousands of characters."""

_NOT_TEXT = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of invisible characters, some of which reverse or hide the text that follows."""


def plain_name(name: str, longest: int = MAX_NAME) -> str:
    """Return a name cut to a length; invisible characters and runs of spaces become one space."""
    plain = name[: 4 * longest]
    if not plain.isprintable():  # most names are printable
        plain = "".join(" " if unicodedata.category(item) in _NOT_TEXT else item for item in plain)
    plain = " ".join(plain.split())
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def to_plain_text(plain: str) -> str:
    """Return text escaped for Plotly, which reads a subset of HTML."""
    # A page in the dark theme replaces colours in texts; an escaped # is not taken for one.
    return html.escape(plain, quote=False).replace("#", "&#35;")


def shown_name(name: str) -> str:
    """Return a name for Plotly: cut, without invisible characters, and escaped."""
    return to_plain_text(plain_name(name))


def shown_time(time: str) -> str:
    """Return a time in UTC of the form 2026-11-26T10:06:00+00:00 for a person: 2026-11-26 10:06:00Z."""
    return time.removesuffix("+00:00").replace("T", " ") + "Z" if time.endswith("+00:00") else time


def readable_times(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows of measurements with their ``time`` as :func:`shown_time` writes it; it then fits on one line."""
    return [{**row, "time": shown_time(str(row["time"]))} for row in rows]


def join_lines(lines: Iterable[str]) -> str:
    """Join lines with line breaks; line breaks within a line, such as in the name of a file, are written out."""
    return "\n".join(map(printable, lines))


def source_name(trace: Path | str, files: int) -> str:
    """Name a run by its first file, on one line; further files are counted."""
    name = printable(shown_path(trace))
    return f"{name} and {count_noun(files - 1, 'more file')}" if files > 1 else name


def gpu_name(device: int | None) -> str:
    """Name a GPU by its number in its process; ``UNKNOWN`` if that was not recorded, ``None`` on a CPU."""
    if device is None:
        return "CPU"
    return "GPU without a number" if device == UNKNOWN else f"GPU {device}"


def collective_name(index: int | None, bucket: int | None) -> str:
    return f"collective {index}" if bucket is None else f"bucket {bucket}"


def three_digits(value: float, sign: str = "") -> str:
    """Format a number for the bar of a chart, with about three digits: ``1,077``, ``12.3``.

    With ``sign`` ``+`` a positive number gets its sign, too.
    """
    if abs(value) >= 100:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.3g}" if abs(value) >= 1e-4 or not value else f"{value:{sign}.6f}"
