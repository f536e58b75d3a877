"""Tells kinds of files by their first bytes, and names the suffixes of raw reports of Nsight Systems."""

from __future__ import annotations

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
"""Suffixes of raw reports of Nsight Systems."""
PACKED_SUFFIXES = (".gz", *REPORT_SUFFIXES)
"""Suffixes of compressed files, whose content is several times as large."""
GZIP = b"\x1f\x8b"
"""The first bytes of what gzip compressed."""
REPORT_HEAD_BYTES = 4096
"""Number of bytes at the start of a file that tell whether it is a raw report."""


def is_sqlite(head: bytes) -> bool:
    """Return whether a file with these first bytes (16 or more) is an SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def is_report(head: bytes) -> bool:
    """Return whether a file with these first bytes is a raw report of Nsight Systems."""
    return b"Profiler Report" in head[:REPORT_HEAD_BYTES]
