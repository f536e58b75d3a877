"""Loads a trace in any of the supported formats; the first bytes of a file decide which reader reads it."""

from __future__ import annotations

import logging
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from ddp_prof.errors import TraceError, is_from_stdin, printable, shell_path
from ddp_prof.file_kinds import GZIP, REPORT_SUFFIXES, is_report, is_sqlite
from ddp_prof.ingest import ReadOptions
from ddp_prof.manifest import SUFFIX, in_variant_order, load_manifest, manifest_path

if TYPE_CHECKING:
    from ddp_prof.trace import Trace

_LOG = logging.getLogger(__name__)
ALL_BUT_LAUNCHES = ReadOptions()
"""The default options."""
_HEAD_BYTES = 1 << 20
"""Number of bytes at the start of a file, also after it is uncompressed, that tell its format."""
_TABLE_FOLDER = b"\0folder of tables"
"""Stands for the first bytes of a folder that holds an export of Nsight Systems, one file per table."""
_KINETO_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')


class Reader(NamedTuple):
    """A format, and the function that reads it.

    Attributes:
        source: Value of :attr:`~ddp_prof.trace.Trace.source`.
        suffixes: Ends of the names of its files.
        recognises: Returns whether a file with these first bytes has this format.
        load: The function that reads this format, as ``module:function``; it is imported at its first use.
        is_common_suffix: Whether other kinds of files have these suffixes, too, so that in a folder the content
            decides.
        is_kept: Whether its traces are kept in the cache. The reader of raw reports reads an export, and keeps the
            trace of the export itself.
    """

    source: str
    suffixes: tuple[str, ...]
    recognises: Callable[[bytes], bool]
    load: str
    is_common_suffix: bool = False
    is_kept: bool = True


def _is_kineto(head: bytes) -> bool:
    """Return whether a file begins with an object with a key of Kineto, or with a bare list of events.

    Chrome's format allows the bare list, too.
    """
    try:
        text = _unzip_head(head).lstrip()
    except zlib.error:
        return True  # damaged: the reader reports that
    return (
        any(key in text for key in _KINETO_KEYS) if text.startswith(b"{") else text.startswith(b"[") and b'"ph"' in text
    )


def _unzip_head(head: bytes) -> bytes:
    """Return the first bytes of a file uncompressed, if gzip compressed them; 31 lets zlib expect gzip's header."""
    return zlib.decompressobj(31).decompress(head, _HEAD_BYTES) if head.startswith(GZIP) else head


def _is_kineto_in_another_encoding(head: bytes) -> bool:
    """Return whether a file begins with Kineto's JSON in UTF-16 or after a byte order mark, as Windows tools write."""
    text = _unzip_head(head)
    letters = text.replace(b"\0", b"")  # each ASCII letter has one zero byte in UTF-16
    for mark in (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"):
        letters = letters.removeprefix(mark)
    return letters != text and not letters.startswith(GZIP) and _is_kineto(letters)


_PACKINGS = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"\xfd7zXZ\0": ("xz", "unxz -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -d"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", "7z x"),
}
"""First bytes of files that were not compressed by gzip: by what program, and the command that uncompresses them."""
_PACKED_SUFFIXES = (".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".sqlite.gz", ".nsys-rep.gz")


def _packed_by(head: bytes) -> tuple[str, str] | None:
    """Return what a compressed file or archive is that must be unpacked first, and the command; else ``None``."""
    for mark, (name, command) in _PACKINGS.items():
        if head.startswith(mark):
            return f"packed by {name}, which is not read", command
    if head[257:262] == b"ustar":  # where tar has its mark
        return "an archive of tar", "tar -xf"
    if head.startswith(GZIP):  # a trace of torch.profiler is read as it is; other content must be uncompressed
        inner = _unzip_head(head)
        if inner[257:262] == b"ustar":
            return "a packed archive of tar", "tar -xzf"
        if inner.startswith(GZIP):
            return "packed twice by gzip", "gunzip -k"
        if any(reader.recognises(inner) for reader in READERS):
            return "packed by gzip, which is read of traces of torch.profiler only", "gunzip -k"
    return None


READERS = (
    Reader(
        "nsys-sqlite",
        (".sqlite",),
        recognises=is_sqlite,
        load="ddp_prof.ingest.nsys_export:load_nsys_sqlite",
    ),
    Reader(
        "nsys-report",
        REPORT_SUFFIXES,
        recognises=is_report,
        load="ddp_prof.ingest.nsys_conversion:load_nsys_report",
        is_kept=False,
    ),
    Reader(
        "kineto",
        (".json", ".json.gz"),
        recognises=_is_kineto,
        load="ddp_prof.ingest.kineto_json:load_kineto_json",
        is_common_suffix=True,
    ),
    Reader(
        "nsys-tables",
        ("_pqtdir", "_arwdir"),
        recognises=lambda head: head.startswith(_TABLE_FOLDER),
        load="ddp_prof.ingest.nsys_export:load_nsys_table_folder",
    ),
)
"""All formats. To add a format, write a module that reads it and add a row here."""


def load_trace(path: Path, options: ReadOptions = ALL_BUT_LAUNCHES) -> Trace:
    """Read a trace of any supported format; the format is detected by content, not by name.

    Supported are reports of Nsight Systems, their exports (SQLite, or a folder of Parquet or Arrow files), and the JSON
    of the PyTorch profiler, plain or gzipped.

    Raises:
        TraceError: The file cannot be read as a trace.
    """
    from ddp_prof.ingest.cached import load_cached

    head = _head(path)
    if not head:
        raise TraceError(path, "an empty file", "capture or export it again")
    for reader in READERS:
        if reader.recognises(head):
            load: Callable[[Path, ReadOptions], Trace] = resolve_name(reader.load)
            started = perf_counter()
            trace = load_cached(load, path, options) if reader.is_kept else load(path, options)
            counts = f"{len(trace.activities):,} activities, {len(trace.calls):,} calls, {len(trace.spans):,} ranges"
            _LOG.info(
                "%s: %s, %s, read in %.2f s", printable(str(path)), reader.source, counts, perf_counter() - started
            )
            return trace
    # No reader knows it: tell what it is, if that is known, and what to do.
    if _is_kineto_in_another_encoding(head):
        reason = "a PyTorch profiler trace in UTF-16, or behind a byte order mark"
        raise TraceError(path, reason, "save it in UTF-8 without a mark, as torch.profiler writes it")
    if packed := _packed_by(head):
        reason, unpack = packed
        by = f", by {unpack.split()[0]}" if is_from_stdin(path) else f": {unpack} {shell_path(path)}"
        raise TraceError(path, reason, f"unpack it first{by}")
    if made := _made_by_us(path, head):
        raise TraceError(path, *made)
    raise TraceError(
        path,
        "neither a report of Nsight Systems, nor its SQLite export, nor a PyTorch profiler trace",
        "give a .nsys-rep, a .sqlite made by nsys export, or a .json or .json.gz made by torch.profiler",
    )


def _made_by_us(path: Path, head: bytes) -> tuple[str, str] | None:
    """Return what a file is that ddp-prof or a job with its monitor wrote, and what to do with it; else ``None``."""
    if path.name.endswith(SUFFIX):
        return "the description of a run, which holds no events", "give the trace that lies beside it"
    if ".jsonl" in path.name and b'"schema"' in head:
        return "the log of a monitor, which holds no events", "read it with 'ddp-prof monitor'"
    if head.lstrip()[:15].lower() == b"<!doctype html>":
        return "a page", "open it in a browser, or give the trace that it was made of"
    return None


def find_traces(path: Path) -> list[Path]:
    """Return the traces at a path: the file itself, or all traces in a folder.

    They are sorted by name, or by variant if all of them are runs of known variants. A report with its export beside it
    counts once: the export is returned. JSON files of other kinds are skipped.

    Raises:
        TraceError: The folder holds no traces.
    """
    if not path.is_dir():
        return [path]
    if _is_table_folder(path):  # ``.`` has no name, but names of files beside a trace are made of the trace's name
        return [path if path.name not in ("", "..") else path.resolve()]
    files = _files_of_traces(path.iterdir())
    # A report with an export beside it is left out.
    exports = {file.stem for file in files if file.suffix == ".sqlite"}
    traces = [file for file in files if not (file.suffix in REPORT_SUFFIXES and file.stem in exports)]
    if not traces:
        suffixes = ", *".join(suffix for reader in READERS for suffix in reader.suffixes)
        hint = f"it should hold files named *{suffixes}"
        if within := _files_of_traces(path.glob("*/*")):
            hint = f"give the folders in it, such as {within[0].parent}"
        elif packed := sorted(file.name for file in path.iterdir() if file.name.endswith(_PACKED_SUFFIXES)):
            hint = f"unpack the files in it first, such as {packed[0]}"
        raise TraceError(path, "a folder without traces", hint)
    return in_variant_order(traces, lambda trace: load_manifest(manifest_path(trace)))


def _files_of_traces(paths: Iterable[Path]) -> list[Path]:
    """Return the files that a reader may read, sorted by name.

    The suffix decides; for a suffix that other kinds of files have, too, the content decides.
    """
    found = []
    for path in sorted(paths):
        reader = next((reader for reader in READERS if path.name.endswith(reader.suffixes)), None)
        is_kind = reader and (path.is_file() or _is_table_folder(path))
        if reader and is_kind and (not reader.is_common_suffix or reader.recognises(_head(path))):
            found.append(path)
    return found


def is_of_capture(file: Path) -> bool:
    """Return whether captures make such a file, by its content: a report, an export, a trace or a ``run.json``.

    True of an empty or damaged one; false of a file that cannot be read.
    """
    if file.suffix in (".nsys-rep", ".qdstrm"):  # nothing else has these suffixes
        return file.is_file()
    try:
        head = _head(file)
    except TraceError:
        return False
    if not head:
        return True
    if file.name.endswith(SUFFIX):
        return b'"key"' in head  # older releases wrote other keys beside this one
    source = next((reader.source for reader in READERS if reader.recognises(head)), None)
    return source == "kineto" if file.suffix != ".sqlite" else source == "nsys-sqlite" and _is_export(file)


def _is_export(file: Path) -> bool:
    """Return whether a database is an export of nsys, or one that was cut off."""
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?immutable=1", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error:
        return True
    return not tables or "StringIds" in tables


def refuse_to_export(path: Path) -> None:
    """Raise TraceError if a trace is a raw report without an export beside it: to read it would write the export."""
    from ddp_prof.ingest.nsys_program import is_exported

    (raw,) = (reader for reader in READERS if reader.source == "nsys-report")
    if raw.recognises(_head(path)) and not is_exported(path):
        reason = "a raw report without its export, which would have to be written beside it"
        raise TraceError(path, reason, f"export it first: ddp-prof info {shell_path(path)}")


def _is_table_folder(path: Path) -> bool:
    """Return whether a folder is an export with one file per table: each such export has the table of strings."""
    return any((path / f"StringIds{suffix}").is_file() for suffix in (".parquet", ".arrow"))


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, or :data:`_TABLE_FOLDER` for an export that is a folder.

    Raises:
        TraceError: It cannot be read, or is no regular file: to open a pipe would wait for its writer.
    """
    try:
        if _is_table_folder(path):
            return _TABLE_FOLDER
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(path, "not a regular file", "give the trace itself, saved as a file")
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "give a file that can be read"
        raise TraceError(path, error.strerror or str(error), hint) from error
