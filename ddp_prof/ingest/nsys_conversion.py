"""Exports raw reports of Nsight Systems to SQLite, and reads these exports.

The nsys of this machine exports a report (``.nsys-rep``, ``.qdrep``). The export is written beside the report with
the suffix ``.sqlite``, as ``nsys stats`` does, and is used again as long as it is not older than the report. If that
folder is read-only, each reading exports into a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ddp_prof.atomic_file import partial_path
from ddp_prof.bounded_file import held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.cached import load_cached
from ddp_prof.ingest.nsys_export import load_nsys_sqlite
from ddp_prof.ingest.nsys_program import find_nsys, is_exported, recording_version
from ddp_prof.ingest.sqlite_columns import require_disk_space
from ddp_prof.trace import Trace

EXPORT_TO_REPORT = 4
"""Assumed ratio of the size of an export to that of its report; measured ratios are 3.2 to 3.4."""


def load_nsys_report(path: Path, options: ReadOptions) -> Trace:
    """Read a raw report without changing it; arguments and errors are those of :func:`ddp_prof.ingest.load.load_trace`.

    It is read from the export beside it, which is written first if it is missing or older than the report.
    """
    beside = path.with_suffix(".sqlite")

    def of_report(trace: Trace) -> Trace:
        """Return the trace of an export as the trace of the report."""
        return replace(trace, path=path, source="nsys-report", recorder=recording_version(path) or trace.recorder)

    if is_exported(path):
        return of_report(load_cached(load_nsys_sqlite, beside, options))
    if os.access(path.parent, os.W_OK):
        _export(path, beside)
        trace = of_report(load_cached(load_nsys_sqlite, beside, options))
        note = f"exported to {beside.name}, which lies beside the report and is read from now on"
        return replace(trace, warnings=(*trace.warnings, note))
    return load_cached(lambda _path, _options: of_report(_load_from_temporary_export(path, options)), path, options)


def _load_from_temporary_export(path: Path, options: ReadOptions) -> Trace:
    """Return the trace of a report from an export in a temporary folder, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        export = Path(folder) / path.with_suffix(".sqlite").name
        _export(path, export)
        return load_nsys_sqlite(export, options, path)


def _export(report: Path, target: Path) -> None:
    """Export a report to the file ``target``.

    Raises:
        TraceError: There is no nsys, or it cannot export the report; no file is left.
    """
    nsys = find_nsys()
    if nsys is None:
        raise TraceError(
            report, "a raw report, and there is no nsys here to export it", "install nsys or set NSYS=/path/to/nsys"
        )
    require_disk_space(report, target.parent, EXPORT_TO_REPORT * held_bytes(report))
    # Export into a folder of its own, and rename the complete file.
    folder = partial_path(target)
    folder.mkdir()
    try:
        unfinished = folder / "export.sqlite"
        lines = [line.strip() for line in nsys.export(report, unfinished).splitlines() if line.strip()]
        if unfinished.is_file():
            unfinished.replace(target)
            return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Tell why: the report may be of a newer release than the nsys here.
    reason = next((line for line in lines if re.search("error|version|disk is full", line, re.IGNORECASE)), "")
    made_by = (recording_version(report) or "0").rpartition(".")[0] or "0"
    made_by_numbers, own_numbers = ([int(part) for part in one.split(".")] for one in (made_by, nsys.version))
    if made_by_numbers > own_numbers:
        raise TraceError(
            report,
            f"made by nsys {made_by}, and the nsys found here is {nsys.version} ({nsys.path})",
            f"export it with nsys {made_by} or newer, or set NSYS=/path/to/nsys",
        )
    raise TraceError(
        report, f"nsys {nsys.version} cannot export it ({reason[:200]})", "record it again, or set NSYS=/path/to/nsys"
    )
