"""Raw reports (``.nsys-rep``, ``.qdrep``): exported by the nsys found, then read as an export.

The export lies beside the report under its name with ``.sqlite``, where ``nsys stats`` leaves it too, and is used again
while it is newer than the report; where that folder cannot be written, it is made anew in a temporary one.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddp_prof.errors import TraceError
from ddp_prof.ingest.enrich import ALL_SHAPES
from ddp_prof.ingest.nsys.program import Nsys, find_nsys
from ddp_prof.ingest.nsys.sqlite_export import load_nsys_sqlite
from ddp_prof.ingest.sqlite_columns import require_disk_space
from ddp_prof.trace import Trace

EXPORT_TO_REPORT = 4
"""Assumed size of an export over that of its report; ours are 3.3 times as large."""
_VERSION = re.compile(rb"(20\d\d[.@]\d+[.@]\d+)[.@]\d+-[0-9a-f]")


def load_nsys_report(
    path: Path, *, extra_patterns: Sequence[str] = (), with_launches: bool = False, with_shapes: int = 0
) -> Trace:
    """Read a raw report, which stays as it is; arguments and errors as of :func:`ddp_prof.ingest.load.load_trace`."""
    beside = path.with_suffix(".sqlite")
    load = partial(_load, path, extra_patterns=extra_patterns, with_launches=with_launches, with_shapes=with_shapes)
    if is_exported(path):
        return load(beside)
    if os.access(path.parent, os.W_OK):
        _export(path, beside)
        trace = load(beside)
        note = f"exported to {beside.name}, which lies beside the report and is read from now on"
        return replace(trace, warnings=(*trace.warnings, note))
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        _export(path, Path(folder) / beside.name)
        return load(Path(folder) / beside.name)


def is_exported(report: Path) -> bool:
    """Whether the export lies beside the report, so that reading writes no file."""
    beside = report.with_suffix(".sqlite")
    return beside.is_file() and beside.stat().st_mtime >= report.stat().st_mtime


def _load(report: Path, export: Path, *, extra_patterns: Sequence[str], with_launches: bool, with_shapes: int) -> Trace:
    trace = load_nsys_sqlite(
        export,
        extra_patterns=extra_patterns,
        run=report,
        with_launches=with_launches,
        with_shapes=with_shapes and ALL_SHAPES,  # the export may be gone when those of others are asked for
    )
    return replace(trace, path=report, source="nsys-report")


def _export(report: Path, target: Path) -> None:
    """Export to ``target``; after a failure there is no file."""
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            report, "a raw report, and there is no nsys here to export it", "install nsys or set NSYS=PATH"
        )
    require_disk_space(report, target.parent, EXPORT_TO_REPORT * report.stat().st_size)
    with tempfile.TemporaryDirectory(prefix=".ddp_prof.", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        output = nsys.export(report, unfinished)
        if not unfinished.is_file():
            raise _failure(report, nsys, output)
        unfinished.replace(target)


def _failure(report: Path, nsys: Nsys, output: str) -> TraceError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next((line for line in lines if "error" in line.lower() or "version" in line.lower()), "")
    with report.open("rb") as file:
        version = _VERSION.search(file.read(4_000_000))
    made_by = version.group(1).decode().replace("@", ".") if version else None
    if made_by and _numbers(made_by) > _numbers(nsys.version):
        return TraceError(
            report,
            f"made by nsys {made_by}, and the nsys found here is {nsys.version} ({nsys.path})",
            f"export it with nsys {made_by} or newer, or set NSYS=PATH",
        )
    return TraceError(
        report, f"nsys {nsys.version} cannot export it ({reason[:200]})", "record it again, or set NSYS=PATH"
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
