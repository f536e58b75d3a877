"""Measures reading a large capture: the ``ddp-prof overlap`` process against SQLite alone and against other programs.

    python scripts/dev/benchmark.py ingest CAPTURE.sqlite [--copies 50] [--kineto TRACE.json.gz] [--before CHECKOUT]

The floor is the time in which SQLite sums ``end - start`` over the same three tables. All programs run in turns; the
best time of each counts, because noise only adds time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repeat_capture import repeat_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
MOST_FLOORS = 8.0
MOST_MEGABYTES = 600
LEAST_KINETO = 100.0  # MB of JSON a second


class FailedProcess(Exception):  # noqa: N818
    """A measured program ended with an error."""


class Cost(NamedTuple):
    """Seconds of wall time and peak memory of a process; memory is 0 if it was not measured."""

    seconds: float
    megabytes: float = 0.0


def measure_floor(capture: Path) -> Cost:
    """Measure SQLite alone, one sum per table."""
    with closing(sqlite3.connect(f"file:{capture}?mode=ro", uri=True)) as database:
        began = time.perf_counter()
        for table in TABLES:
            database.execute(f"SELECT sum(end - start) FROM {table}").fetchone()
        return Cost(time.perf_counter() - began)


PANDAS = """
import sqlite3, sys, time
import pandas as pd
database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
for table in sys.argv[2:]:
    columns = "start, end, textId, text, globalTid" if table == "NVTX_EVENTS" else "start, end, correlationId"
    pd.read_sql(f"SELECT {columns} FROM {table}", database)
"""

OTHER_CHECKOUT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from ddp_prof.cli import main
main()
"""


def measure_process(command: Sequence[str]) -> Cost:
    """Measure a process. Its peak memory begins with that of this process, which therefore must stay small."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise FailedProcess(f"{' '.join(command)} ended with {process.returncode}")
    return Cost(time.perf_counter() - began, usage.ru_maxrss / 1024)


def list_readers(capture: Path, before: Path | None) -> dict[str, Callable[[], Cost]]:
    """Return the readers to measure, by name; those of other projects only if they are installed."""
    ours = str(Path(sys.executable).parent / "ddp-prof")
    found: dict[str, Callable[[], Cost]] = {
        "floor: sum(end - start)": lambda: measure_floor(capture),
        "ddp-prof overlap": lambda: measure_process([ours, "overlap", "--format", "json", str(capture)]),
        "pandas.read_sql, a few columns": lambda: measure_process(
            [sys.executable, "-c", PANDAS, str(capture), *TABLES]
        ),
    }
    if before:
        found[f"ddp-prof overlap of {before}"] = lambda: measure_process(
            [sys.executable, "-c", OTHER_CHECKOUT, str(before), "overlap", "--format", "json", str(capture)]
        )
    if nsys := os.environ.get("NSYS") or shutil.which("nsys"):
        stats = [nsys, "stats", "-r", "gpukernsum", str(capture)]
        found["nsys stats -r gpukernsum"] = lambda: measure_process(stats)
    if peer := shutil.which("nsys-ai"):
        found["nsys-ai overlap_breakdown"] = lambda: measure_process(
            [peer, "skill", "run", "overlap_breakdown", str(capture)]
        )
    return found


def best_of(rounds: int, readers: dict[str, Callable[[], Cost]]) -> dict[str, Cost]:
    """Return the best cost of each reader in several rounds in which they take turns."""
    working = {name: measure for name, measure in readers.items() if runs(measure)}
    costs = [{name: measure() for name, measure in working.items()} for _ in range(rounds)]
    return {name: min(cost[name] for cost in costs) for name in working}


def runs(measure: Callable[[], Cost]) -> bool:
    """Whether the reader runs; another project's may refuse the capture."""
    try:
        measure()
    except FailedProcess as problem:
        print(f"benchmark: left out: {problem}", file=sys.stderr)
        return False
    return True


def repeat_kineto(trace: Path, target: Path, megabytes: int) -> Path:
    """Write the events of a Kineto trace several times, each time later, until there is enough JSON."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    events = document["traceEvents"]
    copies = 1 + megabytes * 1_000_000 // len(json.dumps(events))
    period = 1.1 * max(event.get("ts", 0) for event in events) - min(event.get("ts", 1e18) for event in events)
    document["traceEvents"] = [
        event | {"ts": round(event["ts"] + copy * min(period, 1e6), 3)} if "ts" in event else event
        for copy in range(copies)
        for event in events
    ]
    target.write_text(json.dumps(document))
    return target


def measure_kineto(trace: Path, folder: Path, rounds: int) -> bool:
    """Print how much JSON is read per second, start-up included; return whether that is enough."""
    big = repeat_kineto(trace, folder / "big.json", 200)
    ours = str(Path(sys.executable).parent / "ddp-prof")
    cost = min(measure_process([ours, "overlap", "--format", "json", str(big)]) for _ in range(rounds))
    rate = big.stat().st_size / 1e6 / cost.seconds
    print(f"Kineto: {big.stat().st_size / 1e6:.0f} MB of JSON in {cost.seconds:.2f} s: {rate:.0f} MB/s (at least 100)")
    return rate >= LEAST_KINETO


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.py ingest", description="Reading a large capture.")
    parser.add_argument("capture", type=Path, help="an nsys SQLite export, repeated to make it large")
    parser.add_argument("--copies", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--kineto", type=Path, help="a gzipped Kineto trace, which is also repeated")
    parser.add_argument("--before", type=Path, help="another checkout of ddp_prof, measured in the same run")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--gate", action="store_true", help="exit with 3 if a target is missed")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        big = repeat_capture(arguments.capture, Path(folder) / "big.sqlite", arguments.copies)
        costs = best_of(arguments.rounds, list_readers(big, arguments.before))
        floor = costs["floor: sum(end - start)"].seconds
        for name, cost in costs.items():
            memory = f", {cost.megabytes:.0f} MB" if cost.megabytes else ""
            print(f"{name}: {cost.seconds:.2f} s, {cost.seconds / floor:.1f} floors{memory}")
        ours = costs["ddp-prof overlap"]
        is_met = ours.seconds <= MOST_FLOORS * floor and ours.megabytes <= MOST_MEGABYTES
        print(f"target: at most {MOST_FLOORS:.0f} floors and {MOST_MEGABYTES} MB: {'met' if is_met else 'NOT MET'}")
        if arguments.kineto:
            is_met &= measure_kineto(arguments.kineto, Path(folder), arguments.rounds)
    return 3 if arguments.gate and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
