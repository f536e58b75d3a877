"""Raw reports (``.nsys-rep``, ``.qdrep``): exported by the nsys found, then read as an export.

The export lies beside the report under its name with ``.sqlite``, where ``nsys stats`` leaves it too, and is used again
while it is newer than the report; where that folder cannot be written, it is made anew in a temporary one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.errors import TraceError
from ddp_prof.ingest.nsys.sqlite_export import load_nsys_sqlite
from ddp_prof.ingest.sqlite_columns import require_room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddp_prof.trace import Trace

EXPORT_TO_REPORT = 4
"""So many times larger than a report its export is taken to be; of ours it is 3.3 times."""
_PLACES = (
    ".nsys/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
)
_VERSION = re.compile(rb"(20\d\d[.@]\d+[.@]\d+)[.@]\d+-[0-9a-f]")


def load_nsys_report(path: Path, *, extra_patterns: Sequence[str] = (), with_launches: bool = False) -> Trace:
    """Read a raw report.

    Args:
        path: The report; it stays as it is.
        extra_patterns: Regular expressions for communication kernels unknown to the classifier.
        with_launches: Read shapes of kernels, names and ends of calls, too.

    Raises:
        TraceError: There is no nsys, or it cannot export the report.
    """
    beside = path.with_suffix(".sqlite")
    if beside.is_file() and beside.stat().st_mtime >= path.stat().st_mtime:
        return _load(path, beside, extra_patterns, with_launches)
    if os.access(path.parent, os.W_OK):
        _export(path, beside)
        trace = _load(path, beside, extra_patterns, with_launches)
        note = f"exported to {beside.name}, which lies beside the report and is read from now on"
        return replace(trace, warnings=(*trace.warnings, note))
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as folder:
        _export(path, Path(folder) / beside.name)
        return _load(path, Path(folder) / beside.name, extra_patterns, with_launches)


def _load(report: Path, export: Path, extra_patterns: Sequence[str], with_launches: bool) -> Trace:
    trace = load_nsys_sqlite(export, extra_patterns=extra_patterns, run=report, with_launches=with_launches)
    return replace(trace, path=report, source="nsys-report")


def _export(report: Path, target: Path) -> None:
    """Export to ``target``, which is there whole or not at all."""
    nsys = _find_nsys()
    if nsys is None:
        raise TraceError(
            report, "a raw report, and there is no nsys here to export it", "install nsys or set NSYS=PATH"
        )
    require_room(report, target.parent, EXPORT_TO_REPORT * report.stat().st_size)
    with tempfile.TemporaryDirectory(prefix=".ddp_prof.", dir=target.parent) as folder:
        partial = Path(folder) / target.name
        command = [nsys, "export", "--type", "sqlite", "--output", str(partial), *_optional_flags(nsys), str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode or not partial.is_file():
            raise _failure(report, nsys, done.stderr + done.stdout)
        partial.replace(target)


def _optional_flags(nsys: str) -> list[str]:
    """Sizes of collectives travel in JSON, which newer releases leave out unless told."""
    shown = subprocess.run([nsys, "export", "--help"], capture_output=True, text=True, check=False)  # noqa: S603
    return ["--include-json", "true"] if "--include-json" in shown.stdout else []


def _failure(report: Path, nsys: str, output: str) -> TraceError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next((line for line in lines if "error" in line.lower() or "version" in line.lower()), "")
    made_by, ours = _report_version(report), _nsys_version(nsys)
    if made_by and ours and _numbers(made_by) > _numbers(ours):
        return TraceError(
            report,
            f"made by nsys {made_by}, and the nsys found here is {ours} ({nsys})",
            f"export it with nsys {made_by} or newer, or set NSYS=PATH",
        )
    return TraceError(
        report, f"nsys {ours or '?'} cannot export it ({reason[:200]})", "record it again, or set NSYS=PATH"
    )


def _find_nsys() -> str | None:
    """``$NSYS``, PATH, then the usual places, the newest first; beside the package where that is a checkout."""
    for candidate in _candidates():
        if os.access(candidate, os.X_OK) and _nsys_version(candidate):
            return candidate
    return None


def _candidates() -> Iterator[str]:
    if chosen := os.environ.get("NSYS"):
        yield chosen
        return
    if found := shutil.which("nsys"):
        yield found
    checkout = Path(__file__).parents[3]
    for pattern in _PLACES:
        root = Path("/") if pattern.startswith("/") else checkout
        yield from sorted(map(str, root.glob(pattern.lstrip("/"))), reverse=True)


def _nsys_version(nsys: str) -> str | None:
    with suppress(OSError):
        shown = subprocess.run([nsys, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
        if found := re.search(r"20\d\d\.\d+(?:\.\d+)?", shown.stdout):
            return found.group()
    return None


def _report_version(report: Path) -> str | None:
    with report.open("rb") as file:
        found = _VERSION.search(file.read(4_000_000))
    return found.group(1).decode().replace("@", ".") if found else None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
