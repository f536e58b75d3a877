"""Fuzzes the readers: a damaged capture must give a consistent trace or one clear error, and must not be changed.

Each execution is determined by its seed: repeat a finding by ``--reader NAME --seed SEED``. Executions run in a worker
process. If it crashes or hangs, this is a finding, too, and another worker continues with the next seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_prof.errors import DdpProfError
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from tests.nsys_factory import GENERATIONS, Capture, Kernel, Range, write_capture

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.trace import Trace

MOST_SECONDS = 30.0
LONGEST_LINE = 1000
BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"{", b'"', b"[" * 3000, b"\0" * 512, b"\xff" * 64, b"9" * 40, b"1e999")
VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 1.5, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 4 * 10**18, -(4 * 10**18), "", "x", "nan", "1e999",
    "nccl", "step 1", "ncclAllReduce", "\x1b[2J", "[bold]", "\u202e", "x" * 10_000, b"", b"\xff\x00", 1e300, -0.0,
)  # fmt: skip
SUFFIXES = {"nsys": ".sqlite", "kineto": ".json"}


class ImpossibleResult(Exception):  # noqa: N818
    """The reader returned something impossible."""


def corpus(reader: str, folder: Path) -> list[bytes]:
    if reader == "kineto":
        return [json.dumps(document).encode() for document in _documents()]
    paths = [write_capture(folder / f"{product}.sqlite", _capture(), product) for product in GENERATIONS]
    paths += sorted((Path(__file__).parents[2] / "traces").glob("overlap.sqlite"))
    return [path.read_bytes() for path in paths]


def _capture() -> Capture:
    """Two steps of kernels, copies and collectives on two ranks; one range is left open."""
    capture = Capture(threads={(100, 131): "pt_autograd_0", (200, 231): "pt_autograd_0"})
    for process in (100, 200):
        capture.ranges.append(Range(f"process|rank={process // 200}|world=2", 0, 900, process, process, "ddp_prof"))
        for step in range(2):
            at, autograd = step * 400 + process // 100, process + 31
            capture.ranges += [
                Range(f"step|index={step}", at, at + 300, process, process, "ddp_prof"),
                Range("backward", at + 50, None if step else at + 200, process, process, registered=True),
                Range("ncclAllReduce", at + 80, at + 90, autograd, process, "NCCL", registered=True),
            ]
            capture.kernels += [
                Kernel("gemm(float*)", at + 20, at + 60, at + 10, process, process),
                Kernel("ncclDevKernel_AllReduce_Sum_f32(x)", at + 100, at + 250, at + 85, autograd, process, stream=9),
                Kernel("copy", at + 120, at + 140, at + 86, autograd, process, kind="memcpy", bytes=4096),
            ]
    return capture


def _documents() -> list[object]:
    """The same events in the forms of Kineto: an object, and a list."""
    events: list[dict[str, object]] = [{"ph": "M", "name": "thread_name", "pid": 9, "tid": 2, "args": {"name": "main"}}]
    for step in range(3):
        at, id_ = step * 100.125, step * 10
        noted = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Float", "Group size": 2, "Seq": step}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 2, "dur": 1}
        kernel = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7}
        place = {"device": 0, "stream": 7, "grid": [1, 2, 3], "block": [4, 5, 6]}
        events += [
            launch | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 90},
            launch | {"ts": at + 5, "args": {"correlation": id_}},
            launch | {"ts": at + 7, "args": {"correlation": id_ + 1}},
            kernel | {"name": "gemm", "ts": at + 10, "dur": 20.5, "args": place | {"correlation": id_}},
            kernel | {"name": "ncclDevKernel_AllReduce", "ts": at + 20, "dur": 30, "tid": 9,
                      "args": place | noted | {"correlation": id_ + 1}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": at, "dur": 3, "pid": 0, "tid": 8,
             "args": {"bytes": 4096}},
        ]  # fmt: skip
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "baseTimeNanoseconds": 1 << 60}
    absolute = [event | {"ts": event["ts"] + 1_790_857_026_000_000.125} if "ts" in event else event for event in events]  # type: ignore[operator]
    return [head | {"traceEvents": events}, events, {"traceEvents": absolute}]


def change_bytes(data: bytes, random: Random) -> bytes:
    """Overwrite, remove or repeat some places, or cut off the end."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 2, 4, 8, 100, 5000))
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                changed[at : at + length] = random.randbytes(length)
            case 2:
                piece = random.choice(BYTES)
                changed[at : at + len(piece)] = piece
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5 if random.random() < 0.2:
                del changed[at:]
    return bytes(changed)


def change_database(path: Path, random: Random) -> None:
    """Change rows, columns and tables of a database; changes that SQLite refuses are left out."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous=OFF")
        for _ in range(random.randint(1, 6)):
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if tables:
                with suppress(sqlite3.Error, OverflowError):
                    _change_table(database, _drawn(tables, random), tables, random)
        database.commit()


def _drawn(tables: list[str], random: Random) -> str:
    """Return a random table; those with events are more likely."""
    weighty = [table for table in tables if table.startswith(("CUPTI", "NVTX", "StringIds"))]
    return random.choice(weighty if weighty and random.random() < 0.8 else tables)


def _change_table(database: sqlite3.Connection, table: str, tables: list[str], random: Random) -> None:
    columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
    column = random.choice(columns)
    rows = random.choice(("1", f"rowid % {random.randint(2, 9)} = 0", f"rowid = {random.randint(1, 30)}"))
    match random.randrange(11):
        case 0 | 1 | 2 | 3:
            database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {rows}', (random.choice(VALUES),))
        case 4:
            other = random.choice(columns)
            database.execute(f'UPDATE "{table}" SET "{column}" = "{other}" WHERE {rows}')
        case 5:
            factor = random.choice((-1, 0, 2, 1 << 20, 1 << 40))
            database.execute(f'UPDATE "{table}" SET "{column}" = "{column}" * {factor} WHERE {rows}')
        case 6:
            database.execute(f'DELETE FROM "{table}" WHERE {rows}')
        case 7:
            database.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE {rows}')
        case 8:
            database.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
        case 9:
            database.execute(f'DROP TABLE "{table}"')
        case 10:
            other = random.choice(tables)
            database.execute(f'DROP TABLE "{table}"')
            database.execute(f'CREATE TABLE "{table}" AS SELECT * FROM "{other}"')


def change_document(document: Any, random: Random) -> Any:
    """Replace, remove, repeat or nest values of a JSON document."""
    for _ in range(random.randint(1, 8)):
        holder, key = _drawn_place(document, random)
        match random.randrange(6):
            case 0 | 1 | 2:
                holder[key] = random.choice([value for value in VALUES if not isinstance(value, bytes)])
            case 3:
                del holder[key]
            case 4 if isinstance(holder, list):
                holder.extend(holder[key : key + random.randint(1, 3)])
            case 5:
                holder[key] = random.choice(([], {}, [holder[key]], {"x": holder[key]}, True, 10**30))
        if not document:
            break
    return document


def _drawn_place(document: Any, random: Random) -> tuple[Any, Any]:
    """Return a random container within the document and a key or position in it."""
    holder = document
    while True:
        key = random.choice([*holder]) if isinstance(holder, dict) else random.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or random.random() < 0.1:
            return holder, key
        holder = inner


def write_kineto(data: bytes, target: Path, random: Random) -> None:
    """Write a damaged trace of Kineto: changed values or bytes, sometimes gzipped before or after the damage."""
    by_value = random.random() < 0.6
    damaged = json.dumps(change_document(json.loads(data), random)).encode() if by_value else change_bytes(data, random)
    if random.random() < 0.2:
        damaged = gzip.compress(damaged, 1, mtime=0)  # without the time, so that only the seed determines the bytes
        damaged = change_bytes(damaged, random) if random.random() < 0.5 else damaged
    target.write_bytes(damaged)


def write_database(data: bytes, target: Path, random: Random) -> None:
    if random.random() < 0.4:
        target.write_bytes(change_bytes(data, random))
        return
    target.write_bytes(data)
    change_database(target, random)


WRITERS = {"nsys": write_database, "kineto": write_kineto}


def execute(reader: str, seed: int, samples: Sequence[bytes], folder: Path) -> str | None:
    """Damage a sample and read it; return the finding, ``None`` if there is none."""
    random = Random(f"{reader} {seed}")  # noqa: S311
    path = folder / f"x{SUFFIXES[reader]}"
    WRITERS[reader](random.choice(samples), path, random)
    data, began = path.read_bytes(), time.monotonic()
    found = _read(path)
    if time.monotonic() - began > MOST_SECONDS:
        found = found or f"slow: {time.monotonic() - began:.0f} s"
    if path.read_bytes() != data or [entry.name for entry in folder.iterdir()] != [path.name]:
        found = found or "the input or its folder was changed"
    return found


def _read(path: Path) -> str | None:
    try:
        check_trace(load_trace(path, ReadOptions(with_launches=True)))
    except DdpProfError as error:
        line = str(error)
        return None if len(line) < LONGEST_LINE and line.isprintable() else f"no clear line: {line[:200]!r}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "ddp_prof" in frame.filename]
        place = own[-1] if own else place
        return f"{type(error).__name__}: {str(error)[:150]} ({Path(place.filename).name}:{place.lineno})"
    return None


def check_trace(trace: Trace) -> None:
    """Raise ImpossibleResult if the trace contradicts itself."""
    names = len(trace.names)
    for table in (trace.activities, trace.spans):
        expect(bool(np.all(table.start_ns <= table.end_ns)), "an event ends before it starts")
        expect(bool(np.all((table.name_id >= 0) & (table.name_id < names))), "an event has no name")
    expect(all(isinstance(name, str) for name in trace.names), "a name is not a text")
    expect(bool(np.all(trace.launching_calls < len(trace.calls))), "a launch is not one of the calls")
    expect(0 <= trace.duration_ns < 2**62, "the capture's duration overflows")
    expect(0 <= trace.unresolved_names.share < 1, "no kernel has a name")
    expect(bool(np.all(trace.collective_metadata.activity < len(trace.activities))), "metadata of no activity")
    expect(trace.shape_id is None or len(trace.shape_id) == len(trace.activities), "shapes of other activities")


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ImpossibleResult(otherwise)


def work(reader: str, seeds: Iterable[int], until: float) -> None:
    """Execute seed after seed, and print each before and after, so that the seed of a crash is known."""
    warnings.simplefilter("error", RuntimeWarning)
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as folder:
        samples = corpus(reader, Path(made))
        for seed in seeds:
            if time.time() > until:
                break
            print(json.dumps([seed, "begun"]), flush=True)
            signal.alarm(2 * int(MOST_SECONDS))  # ends the process
            print(json.dumps([seed, execute(reader, seed, samples, Path(folder))]), flush=True)


def watch(reader: str, first: int, until: float) -> tuple[int, dict[int, str]]:
    """Run workers until the time is over; return the number of executions, and the findings by seed."""
    executions, found, seed = 0, {}, first
    while time.time() < until:
        command = [sys.executable, __file__, "--worker", "--reader", reader, "--seed", str(seed), "--until", str(until)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            last = None
            for line in worker.stdout:
                seed, last = json.loads(line)
                if last != "begun":
                    executions += 1
                    if last:
                        found[seed] = last
        if last == "begun" or worker.returncode:
            executions += 1
            found[seed] = f"the process ended with {worker.returncode}"
        seed += 1
    return executions, found


def report(reader: str, executions: int, found: dict[int, str], seconds: float) -> None:
    """Print the number of executions, and one seed for each kind of finding."""
    kinds = Counter(found.values())
    print(f"{reader}: {executions:,} executions in {seconds:.0f} s, {len(kinds)} kinds of findings")
    for kind, times in kinds.most_common():
        seed = next(seed for seed, text in found.items() if text == kind)
        print(f"  {times:>5} x {kind}\n          run again: scripts/dev/fuzz.sh --reader {reader} --seed {seed} --once")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="for each reader; default: %(default)s")
    parser.add_argument("--reader", choices=tuple(WRITERS), help="only this reader")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; default: %(default)s")
    parser.add_argument("--once", action="store_true", help="only this seed; the damaged file is kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    readers = [arguments.reader] if arguments.reader else [*WRITERS]
    if arguments.worker:
        work(readers[0], range(arguments.seed, sys.maxsize), arguments.until)
        return 0
    if arguments.once:
        return once(readers[0], arguments.seed)
    has_found = False
    for reader in readers:
        executions, found = watch(reader, arguments.seed, time.time() + 60 * arguments.minutes)
        report(reader, executions, found, 60 * arguments.minutes)
        has_found |= bool(found)
    return int(has_found)


def once(reader: str, seed: int) -> int:
    """Run one execution and keep its input."""
    warnings.simplefilter("error", RuntimeWarning)
    folder = Path(tempfile.mkdtemp(prefix="fuzz."))
    with tempfile.TemporaryDirectory() as made:
        found = execute(reader, seed, corpus(reader, Path(made)), folder)
    print(f"{next(folder.iterdir())}: {found or 'nothing found'}")
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
