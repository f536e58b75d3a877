"""Look at the first bytes of a file and pick its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.errors import TraceError
from ddp_prof.manifest import in_variant_order, load_manifest, manifest_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddp_prof.trace import Trace

_SQLITE = b"SQLite format 3\0"
_REPORT = b"Profiler Report"
_GZIP = b"\x1f\x8b"
_REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
_SUFFIXES = (".sqlite", ".json", ".json.gz", *_REPORT_SUFFIXES)


def load_trace(path: Path, *, extra_patterns: Sequence[str] = (), with_shapes: bool = False) -> Trace:
    """Read a trace of any supported format, told by content and not by name.

    Args:
        path: A report of Nsight Systems or its SQLite export, or a PyTorch profiler's JSON, plain or gzipped.
        extra_patterns: Regular expressions for communication kernels unknown to the classifier.
        with_shapes: Read the launch shapes of kernels, too.

    Raises:
        TraceError: The file cannot be read as a trace.
    """
    head = _head(path)
    if head.startswith(_SQLITE):
        from ddp_prof.ingest.nsys_sqlite import load_nsys_sqlite

        return load_nsys_sqlite(path, extra_patterns=extra_patterns, with_shapes=with_shapes)
    if head.startswith(_GZIP) or head.lstrip()[:1] in (b"{", b"["):
        from ddp_prof.ingest.kineto_json import load_kineto_json

        return load_kineto_json(path, extra_patterns=extra_patterns, with_shapes=with_shapes)
    if _REPORT in head:
        from ddp_prof.ingest.nsys_report import load_nsys_report

        return load_nsys_report(path, extra_patterns=extra_patterns, with_shapes=with_shapes)
    raise TraceError(
        path,
        "neither a report or export of Nsight Systems nor a PyTorch profiler trace",
        "give a .nsys-rep, a .sqlite made by nsys export, or a .json or .json.gz made by torch.profiler",
    )


def find_traces(path: Path) -> list[Path]:
    """The traces that a path stands for: the file itself, or those in a folder.

    By name; where all of them are runs of known variants, in the variants' order.

    A report whose export lies beside it is not named twice, JSON of other kinds is passed over.

    Raises:
        TraceError: A folder without traces.
    """
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.is_file() and item.name.endswith(_SUFFIXES))
    exports = {file.stem for file in files if file.suffix == ".sqlite"}
    traces = [
        file
        for file in files
        if not (file.suffix in _REPORT_SUFFIXES and file.stem in exports)
        and not (file.suffix == ".json" and b'"traceEvents"' not in file.read_bytes())
    ]
    if not traces:
        raise TraceError(path, "a folder without traces", f"it should hold files named *{', *'.join(_SUFFIXES)}")
    return in_variant_order(traces, lambda trace: load_manifest(manifest_path(trace)))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        way_out = "check the path" if not path.exists() else "give a file that can be read"
        raise TraceError(path, error.strerror or str(error), way_out) from error
    if not head:
        raise TraceError(path, "an empty file", "capture or export it again")
    return head
