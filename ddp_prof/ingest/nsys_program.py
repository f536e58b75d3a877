"""Finds an nsys on this machine, its version and its options, and exports reports with it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddp_prof.atomic_file import is_file
from ddp_prof.bounded_file import held_bytes
from ddp_prof.file_kinds import REPORT_SUFFIXES, is_report
from ddp_prof.signals import wait_for_end

PLACES = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
)
"""Patterns of paths to search for an nsys, after PATH and the folder into which ``scripts/install_nsys.sh`` puts it."""
ANSWER_LIMIT_S = 30
"""Time limit for ``nsys --version`` and ``--help``, in seconds."""
EXPORT_LIMIT_S = 300
EXPORT_BYTES_PER_S = 100_000
"""Time limit for an export: ``EXPORT_LIMIT_S`` plus the report's size at this speed, a tenth of a slow machine's."""


@dataclass(frozen=True)
class Nsys:
    """A program of Nsight Systems that runs on this machine; a ``version`` looks like 2022.4.2.1."""

    path: str
    version: str

    def supports(self, command: str, option: str) -> bool:
        """Return whether a command of nsys has an option, by its help text."""
        return option in _read_help(self.path, command)

    def export(self, report: Path, target: Path) -> str:
        """Export a report to SQLite, into the file ``target``, which must not exist; return the output of nsys.

        If nsys fails or takes too long, ``target`` does not exist afterwards.
        """
        # The sizes of collectives are in JSON columns, which newer releases export only on request.
        more = ["--include-json", "true"] if self.supports("export", "--include-json") else []
        # Absolute paths, since a path that begins with a dash would be an option.
        command = [self.path, "export", "--type", "sqlite", "--output", str(target.absolute()), *more]
        limit_s = EXPORT_LIMIT_S + held_bytes(report) // EXPORT_BYTES_PER_S
        try:
            code, output = _run([*command, str(report.absolute())], limit_s)
        except subprocess.TimeoutExpired:
            code, output = 1, f"error: not done after {limit_s} s"
        # Where the disk becomes full, nsys 2022.4 returns 0, and leaves an empty file.
        if code or (target.is_file() and not target.stat().st_size):
            target.unlink(missing_ok=True)
        return output


def find_nsys(environ: Mapping[str, str] = os.environ) -> Nsys | None:
    """Return the first program of :func:`list_nsys`, ``None`` if there is none."""
    return next(list_nsys(environ), None)


def list_nsys(environ: Mapping[str, str] = os.environ) -> Iterator[Nsys]:
    """Yield the executables of nsys that can run on this machine.

    If ``$NSYS`` is set, this is the only candidate. Else it yields the nsys on PATH, in ``$NSYS_PREFIX``, and in
    :data:`PLACES` or the patterns in ``$NSYS_SEARCH``, with colons as in PATH; the newest match of each pattern comes
    first.
    """
    for candidate in _candidates(environ):
        with suppress(LookupError):
            if os.access(candidate, os.X_OK):
                yield Nsys(candidate, _version_of(candidate, Path(candidate).stat().st_mtime_ns))


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield paths at which an nsys may be, in the order of :func:`list_nsys`; they need not exist."""
    if chosen := environ.get("NSYS"):
        yield chosen
        return
    if found := shutil.which("nsys", path=environ.get("PATH")):
        yield found
    yield str(Path(environ.get("NSYS_PREFIX") or Path(__file__).parents[2] / ".nsys", "bin", "nsys"))
    for pattern in environ["NSYS_SEARCH"].split(os.pathsep) if "NSYS_SEARCH" in environ else PLACES:
        found_here = [str(path) for path in Path("/").glob(pattern.lstrip("/"))] if pattern else []
        yield from sorted(found_here, key=by_number, reverse=True)


def by_number(path: str) -> list[int | str]:
    """Return a key by which paths are sorted with their numbers as numbers: 2024.10 after 2024.9."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", path)]


@cache
def _read_help(nsys: str, command: str) -> str:
    return _query_nsys(nsys, command, "--help")


@cache
def _version_of(nsys: str, _changed_ns: int) -> str:
    """Return the version of a program of nsys.

    The answer, which takes 0.1 s, is cached by the path and the modification time of the program (``_changed_ns``).

    Raises:
        LookupError: It tells no version; the next call asks again, because errors are not cached.
    """
    if found := re.search(r"20\d\d(\.\d+)+", _query_nsys(nsys, "--version")):
        return found.group()
    raise LookupError(nsys)


def _query_nsys(nsys: str, *question: str) -> str:
    """Return the output of nsys with these arguments; an empty text if it does not run or takes too long."""
    try:
        return _run([nsys, *question], ANSWER_LIMIT_S)[1]
    except (OSError, subprocess.SubprocessError):
        return ""


def _run(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a command, and return its exit code and its output, stderr first.

    If it takes longer than ``limit_s``, it is killed with all processes that it started, and TimeoutExpired is raised.
    """
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        errors="replace",
        start_new_session=True,  # a process group of its own, which killpg ends
    ) as program:
        try:
            output, errors = program.communicate(timeout=limit_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            wait_for_end(program)
            raise
    return program.returncode, errors + output


_VERSION = re.compile(rb"(20\d\d[.@]\d+[.@]\d+[.@]\d+)-[0-9a-f]")
"""The version in a report, before the hash of a build."""
_HEADER_BYTES = 4_000_000
"""Number of bytes at the start of a report in which the version is looked for."""


def recording_version(file: Path) -> str | None:
    """Return the version of the nsys that recorded a trace, ``None`` if it is not known.

    ``file`` is a report, or an export: then the report beside it tells.
    """
    reports = (one for one in (file, *map(file.with_suffix, REPORT_SUFFIXES)) if one.suffix in REPORT_SUFFIXES)
    return next(filter(None, map(_version_in, filter(is_file, reports))), None)


def _version_in(report: Path) -> str | None:
    """Return the version of nsys in the header of a report; ``None`` if there is none, or it cannot be read."""
    with suppress(OSError), report.open("rb") as opened:
        head = opened.read(_HEADER_BYTES)
        if found := is_report(head) and _VERSION.search(head):
            return found[1].decode().replace("@", ".")
    return None


def is_exported(report: Path) -> bool:
    """Return whether an export that is not older lies beside the report, so that reading writes no file."""
    beside = report.with_suffix(".sqlite")
    return beside.is_file() and beside.stat().st_mtime >= report.stat().st_mtime
