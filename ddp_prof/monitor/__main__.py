"""The processes that ``annotate.Monitor`` starts: one per rank analyzes its trace, and one combines the results.

    python -m ddp_prof.monitor measure TRACE OUT     compresses the trace, and writes what was measured of it
    python -m ddp_prof.monitor merge ASKED PART...   prints the record of a measurement as JSON

ASKED is JSON, see :func:`.make_record`. A PART is a file with the results of one rank: a line of JSON from the process
that trains, and after it the content of the file OUT that ``measure`` wrote.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
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


def measure(trace: Path, out: Path, *, rank: int) -> None:
    """Compress a trace, measure it and write the results to ``out``.

    As in all commands, kernels are compared in the first few ranks only.
    """
    trace = compress(trace)
    measures = tuple(name for name in SUMMARY if name != "kernels" or rank < MOST_FILES_OF_KERNELS)
    found = measure_report(trace, LoadOptions(one_run=True, use_cache=False), measures)
    out.write_bytes(pickle.dumps({trace: found}))


def compress(trace: Path) -> Path:
    """Replace a trace by a compressed file and return that; where it cannot be written, the trace stays."""
    compressed = trace.with_suffix(".json.gz")
    partial = compressed.with_name(f".{compressed.name}.partial")
    try:
        with trace.open("rb") as read, gzip.open(partial, "wb", compresslevel=1) as written:
            shutil.copyfileobj(read, written)
        partial.replace(compressed)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return trace
    trace.unlink()
    return compressed


def read_part(file: Path) -> Part:
    """Read the results of one rank from a file: a line of JSON, then a pickle of the measures, if there are any."""
    head, _, packed = file.read_bytes().partition(b"\n")
    # The parts come over the store of the job itself, whose processes could run anything here anyway.
    return Part(**json.loads(head), measured=pickle.loads(packed) if packed else {})  # noqa: S301


def main(command: str, *arguments: str) -> str | None:
    """Run one of two commands, at the lowest priority.

    ``measure TRACE OUT`` analyses the trace of a rank and writes the result to ``OUT``. ``merge REQUEST PART...`` puts
    the ranks' results together to a record of the log and prints it; ``REQUEST`` is the JSON of what
    :func:`.record.make_record` takes.

    Returns:
        ``None``, or the reason why it failed, with which ``sys.exit`` then ends.
    """
    if hasattr(os, "nice"):
        os.nice(LOWEST)
    try:
        if command == "measure":
            trace, out = map(Path, arguments)
            number = trace.stem.rpartition(".rank")[2]  # a trace is named like "step00000100.rank3.json"
            measure(trace, out, rank=int(number))
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
