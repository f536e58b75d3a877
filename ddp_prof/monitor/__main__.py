"""The processes that ``annotate.Monitor`` starts: one per rank analyzes its trace, and one combines the results.

    python -m ddp_prof.monitor measure TRACE OUT PID     compresses the trace, and writes what was measured of it
    python -m ddp_prof.monitor merge ASKED PART...       prints the record of a measurement as JSON

ASKED is JSON, see :func:`.make_record`. A PART is a file with the results of one rank: a line of JSON from the process
that trains, and after it the content of the file OUT that ``measure`` wrote. PID is the process that wrote the trace.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from ddp_prof.errors import DdpProfError, printable
from ddp_prof.monitor.record import Part, make_record
from ddp_prof.runs.report import LoadOptions, measure_report
from ddp_prof.runs.run import MOST_FILES_OF_KERNELS, SUMMARY

LOWEST = 19
"""How much the priority of the process is lowered (``nice``): the training comes first."""


_MOST_OF_NAME = 8192
"""Bytes at the end of a trace, and at its start if it is compressed, in which the name is looked for."""
_OWN_FOLDER = "if another job writes to this folder, too, give each job a folder of its own"


def measure(trace: Path, out: Path, *, rank: int, writer: int) -> None:
    """Compress a trace, measure it and write the results to ``out``.

    As in all commands, kernels are compared in the first few ranks only. ``writer`` is the process that wrote the
    trace. Raises OSError if the trace is gone, or another job has replaced it by one of the same name.
    """
    if not trace.exists():
        raise FileNotFoundError(f"{trace} was removed before it was read: {_OWN_FOLDER}")
    if _is_other_s(trace, writer):
        raise OSError(f"{trace} was replaced before it was read: {_OWN_FOLDER}")
    measured = compress(trace, writer)
    measures = tuple(name for name in SUMMARY if name != "kernels" or rank < MOST_FILES_OF_KERNELS)
    found = measure_report(measured, LoadOptions(one_run=True, use_cache=False), measures)
    if _is_other_s(measured, writer):
        raise OSError(f"{measured} was replaced while it was read: {_OWN_FOLDER}")
    out.write_bytes(pickle.dumps({measured: found}))


def _is_other_s(trace: Path, writer: int) -> bool:
    """Return whether a trace names another process than ``writer`` as the one that wrote it.

    It contains the temporary name under which it was written, in which the process follows the name of the trace.
    ``False`` if the trace is gone.
    """
    try:
        with trace.open("rb") as read:
            if trace.suffix != ".gz":
                read.seek(max(0, trace.stat().st_size - _MOST_OF_NAME))
            found = re.search(rf"\.{re.escape(trace.name)}\.(\d+)\.".encode(), read.read(_MOST_OF_NAME))
    except FileNotFoundError:
        return False
    return found is not None and int(found[1]) != writer


def compress(trace: Path, writer: int) -> Path:
    """Replace a trace by a compressed file and return that; where it cannot be written, the trace stays."""
    compressed = trace.with_suffix(".json.gz")
    partial = compressed.with_name(f".{compressed.name}.{writer}.partial")
    try:
        with trace.open("rb") as read, gzip.open(partial, "wb", compresslevel=1) as written:
            shutil.copyfileobj(read, written)
        partial.replace(compressed)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return trace
    if not _is_other_s(trace, writer):
        trace.unlink(missing_ok=True)
    return compressed


def read_part(file: Path) -> Part:
    """Read the results of one rank from a file: a line of JSON, then a pickle of the measures, if there are any."""
    head, _, packed = file.read_bytes().partition(b"\n")
    # The parts come over the store of the job itself, whose processes could run anything here anyway.
    return Part(**json.loads(head), measured=pickle.loads(packed) if packed else {})  # noqa: S301


def main(command: str, *arguments: str) -> str | None:
    """Run one of two commands, at the lowest priority.

    ``measure TRACE OUT PID`` analyses the trace of a rank and writes the result to ``OUT``. ``merge REQUEST PART...``
    puts the ranks' results together to a record of the log and prints it; ``REQUEST`` is the JSON of what
    :func:`.record.make_record` takes.

    Returns:
        ``None``, or the reason why it failed, with which ``sys.exit`` then ends.
    """
    if hasattr(os, "nice"):
        os.nice(LOWEST)
    try:
        if command == "measure":
            trace, out = map(Path, arguments[:2])
            number = trace.stem.rpartition(".rank")[2]  # a trace is named like "step00000100.rank3.json"
            measure(trace, out, rank=int(number), writer=int(arguments[2]))
        else:
            asked, *files = arguments
            record = make_record(json.loads(asked), [read_part(Path(file)) for file in files])
            sys.stdout.write(json.dumps(record))
    except (DdpProfError, OSError) as error:
        return printable(str(error))
    return None


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(*sys.argv[1:]))
