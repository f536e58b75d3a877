"""Measures reading: a large capture against SQLite alone and other programs; a run of many ranks with several workers.

    python scripts/dev/benchmark.py ingest CAPTURE.sqlite [--kineto TRACE.json.gz] [--before CHECKOUT]
    python scripts/dev/benchmark.py ranks CAPTURE.sqlite [--ranks 64] [--copies 45] [--rounds 1] [--scheduler]

The capture is repeated end to end until it is large.

*ingest.* The floor is the time in which SQLite sums ``end - start`` over the same three tables. Beside it stands the
time of reading columns of these tables by ddp-prof's own driver, and nothing else. All programs run in turns, without
the cache but for one row; the best time of each counts, because noise only adds time.

*ranks.* The file is linked once per rank. So all ranks have the same events, which does not change the time to read
them; their names tell the ranks apart. One worker on one core, one on two cores, and two on two cores take turns. A
worker reads a file with several threads, so its time on two cores does not show the gain of a second worker. With
``--scheduler`` a scheduler and two workers of one thread each run on the loopback interface; in the last run one worker
is killed when half of the reports are done. All outputs must be equal to the byte.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repeat_capture import repeat_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BIN = Path(sys.executable).parent
OVERLAP = [BIN / "ddp-prof", "overlap", "--format", "json"]
TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
MOST_FLOORS = 8.0
MOST_MEGABYTES = 600
LEAST_KINETO = 100.0  # MB of JSON a second
MOST_KINETO_FLOORS = 1.3
LEAST_GAIN = 1.7
SECONDS_TO_END = 10
PANDAS = """
import sqlite3, sys, time
import pandas as pd
database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
for table in sys.argv[2:]:
    columns = "start, end, textId, text, globalTid" if table == "NVTX_EVENTS" else "start, end, correlationId"
    pd.read_sql(f"SELECT {columns} FROM {table}", database)
"""
DRIVER = """
import sys
import adbc_driver_sqlite
import pyarrow
from adbc_driver_manager import AdbcConnection, AdbcDatabase, AdbcStatement
connection = AdbcConnection(AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=f"file:{sys.argv[1]}?mode=ro"))
for table in sys.argv[2:]:
    columns = "eventType, globalTid, textId" if table == "NVTX_EVENTS" else "correlationId"
    columns += ", globalTid, nameId" if table.endswith("RUNTIME") else ""
    columns += ", deviceId, streamId, globalPid, demangledName" if table.endswith("KERNEL") else ""
    statement = AdbcStatement(connection)
    statement.set_options(**{"adbc.sqlite.query.batch_rows": "16384"})
    statement.set_sql_query(f"SELECT start, end, {columns} FROM {table}")
    with pyarrow.RecordBatchReader.from_stream(statement.execute_query()[0]) as reader:
        assert sum(batch.num_rows for batch in reader)
    statement.close()
"""
OTHER_CHECKOUT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from ddp_prof.cli import main
main()
"""
WHOLE_DOCUMENT = """
import os, sys
from pathlib import Path
from ddp_prof.ingest.kineto_document import read_document
document = read_document(Path(sys.argv[1]))
os._exit(0)
"""
KILLER = """
import os, signal, sys
from ddp_prof.cli import main
from ddp_prof.runs import workers

measure = workers.measure_files
def watched(reports, workers):
    for done, outcome in enumerate(measure(reports, workers), 1):
        if done == len(reports) // 2:
            os.kill(int(os.environ["DDP_PROF_VICTIM"]), signal.SIGKILL)
        yield outcome
workers.measure_files = watched
from ddp_prof.runs import run
run.measure_files = watched
main()
"""


class Cost(NamedTuple):
    """What a command took: seconds, the peak of its largest process (0: not measured), processor time; its digest."""

    seconds: float
    megabytes: float = 0.0
    digest: str = ""
    processor_s: float = 0.0


class FailedProcess(SystemExit):
    """A measured program ended with an error."""


def measure(command: Sequence[str | Path], cores: int | None = None, **environment: str) -> Cost:
    """Run a command on ``cores`` cores, or on all.

    Its peak memory begins with that of this process, which therefore must stay small.
    """
    allowed = os.sched_getaffinity(0)
    began = time.perf_counter()
    digest = hashlib.sha256()
    os.sched_setaffinity(0, sorted(allowed)[:cores])  # the child inherits it; this process's is restored below
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        os.sched_setaffinity(0, allowed)
        assert process.stdout
        while part := process.stdout.read(1 << 20):
            digest.update(part)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise FailedProcess(f"benchmark: {' '.join(map(str, command))} ended with {process.returncode}")
    seconds, processor_s = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    return Cost(seconds, usage.ru_maxrss / 1024, digest.hexdigest(), processor_s)


def measure_floor(capture: Path) -> Cost:
    with closing(sqlite3.connect(f"file:{capture}?mode=ro", uri=True)) as database:
        began = time.perf_counter()
        try:
            for table in TABLES:
                database.execute(f"SELECT sum(end - start) FROM {table}").fetchone()
        except sqlite3.OperationalError as error:
            raise SystemExit(f"benchmark: {error}: give the export of a job on a GPU") from error
        return Cost(time.perf_counter() - began)


def list_readers(capture: Path, before: Path | None) -> dict[str, Callable[[], Cost]]:
    """Return the readers to measure, by name; those of other projects only if they are installed."""
    commands: dict[str, list[str | Path]] = {
        "ddp-prof overlap": [*OVERLAP, capture],
        "the columns alone, by ddp-prof's driver": [sys.executable, "-c", DRIVER, capture, *TABLES],
        "pandas.read_sql, a few columns": [sys.executable, "-c", PANDAS, capture, *TABLES],
    }
    if before:
        other = [sys.executable, "-c", OTHER_CHECKOUT, before, "overlap", "--format", "json", capture]
        commands[f"ddp-prof overlap of {before}"] = other
    if nsys := os.environ.get("NSYS") or shutil.which("nsys"):
        commands["nsys stats -r gpukernsum"] = [nsys, "stats", "-r", "gpukernsum", capture]
    if peer := shutil.which("nsys-ai"):
        commands["nsys-ai overlap_breakdown"] = [peer, "skill", "run", "overlap_breakdown", capture]
    readers = {name: partial(measure, command) for name, command in commands.items()}
    # The first run, which is not counted, fills this cache.
    again = partial(measure, commands["ddp-prof overlap"], DDP_PROF_CACHE=str(capture.with_name("cache")))
    return {"floor: sum(end - start)": partial(measure_floor, capture), **readers, "ddp-prof overlap again": again}


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
        print(f"{problem}: left out", file=sys.stderr)
        return False
    return True


def repeat_kineto(trace: Path, target: Path, megabytes: int) -> Path:
    """Write the events of a Kineto trace several times, each time later and with new numbers, until there is enough."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    events = document.pop("traceEvents")
    copies = 1 + megabytes * 1_000_000 // len(json.dumps(events))
    timed = [event["ts"] for event in events if event.get("ph") == "X"]
    period = max(timed) - min(timed) + 1e5
    with target.open("w") as file:
        file.write(json.dumps(document)[:-1] + ', "traceEvents": [')
        for copy in range(copies):
            copied = (copy_event(event, copy * period, copy * _CORRELATIONS) for event in events)
            file.write(", " * bool(copy) + ", ".join(map(json.dumps, copied)))
        file.write("]}")
    return target


_CORRELATIONS = 1 << 32  # more than a trace has


def copy_event(event: dict[str, Any], later_us: float, higher: int) -> dict[str, Any]:
    copied = event | {"ts": round(event["ts"] + later_us, 3)} if event.get("ph") == "X" else event
    args = event.get("args", {})
    return copied | {"args": args | {"correlation": args["correlation"] + higher}} if "correlation" in args else copied


def measure_kineto(trace: Path, folder: Path, megabytes: int, rounds: int) -> bool:
    """Print what a large document costs, start-up included, and the floor: to decode it as a whole, all in objects.

    Returns whether that is little enough.
    """
    big = repeat_kineto(trace, folder / "big.json", megabytes)
    floor_of: list[str | Path] = [sys.executable, "-c", WHOLE_DOCUMENT, big]
    turns = [(measure(floor_of), measure([*OVERLAP, big])) for _ in range(rounds)]
    floor, cost = (min(costs) for costs in zip(*turns, strict=True))
    size, floors = big.stat().st_size / 1e6, cost.seconds / floor.seconds
    print(
        f"Kineto: {size:.0f} MB of JSON in {cost.seconds:.2f} s, {cost.megabytes:.0f} MB; "
        f"its document alone in {floor.seconds:.2f} s, {floor.megabytes:.0f} MB: {floors:.2f} floors "
        f"(at most {MOST_KINETO_FLOORS}), {size / cost.seconds:.0f} MB/s (at least {LEAST_KINETO:.0f})"
    )
    return floors <= MOST_KINETO_FLOORS and size / cost.seconds >= LEAST_KINETO


def compare_readers(arguments: argparse.Namespace, big: Path) -> bool:
    costs = best_of(arguments.rounds, list_readers(big, arguments.before))
    floor = costs["floor: sum(end - start)"].seconds
    for name, cost in costs.items():
        memory = f", {cost.processor_s:.2f} s of processors, {cost.megabytes:.0f} MB" if cost.megabytes else ""
        print(f"{name}: {cost.seconds:.2f} s, {cost.seconds / floor:.1f} floors{memory}")
    ours = costs["ddp-prof overlap"]
    is_met = ours.seconds <= MOST_FLOORS * floor and ours.megabytes <= MOST_MEGABYTES
    print(f"target: at most {MOST_FLOORS:.0f} floors and {MOST_MEGABYTES} MB: {'met' if is_met else 'NOT MET'}")
    if arguments.kineto:
        is_met &= measure_kineto(arguments.kineto, big.parent, arguments.megabytes, arguments.rounds)
    return is_met


class Cluster:
    """A scheduler and two workers, each in its own process, on the loopback interface."""

    def __init__(self, folder: Path) -> None:
        address = folder / "scheduler.json"
        host = ["--host", "127.0.0.1"]
        self.file = address
        self.processes = [self._start("scheduler", *host, "--port", "0", "--no-dashboard", "--scheduler-file", address)]
        while not address.exists():
            time.sleep(0.1)
        one = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", folder]
        self.processes += [self._start("worker", "--scheduler-file", address, *host, *one) for _ in range(2)]

    @staticmethod
    def _start(*arguments: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [BIN / "dask", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # ended by stop()

    def peak_megabytes(self) -> float:
        """Return the peak memory of the largest running worker."""
        found = [0.0]
        for process in self.processes[1:]:
            status = Path(f"/proc/{process.pid}/status")
            if process.poll() is None and (peak := re.search(r"VmHWM:\s+(\d+)", status.read_text())):
                found.append(int(peak.group(1)) / 1024)
        return max(found)

    def stop(self) -> None:
        """End all processes, if necessary by SIGKILL: a worker may wait for ever for a scheduler that has ended."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            process.kill()
            process.wait()


def load_average() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def measure_scheduler(files: Sequence[Path], expected: str) -> bool:
    """Print the cost through a scheduler, without and with a killed worker; return whether the outputs are right."""
    arguments = [*OVERLAP[1:], *files]
    good = True
    for is_killed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(Path(folder))
            try:
                program = [sys.executable, "-c", KILLER] if is_killed else OVERLAP[:1]
                command = [*program, *arguments, "--scheduler", cluster.file]
                cost = measure(command, DDP_PROF_VICTIM=str(cluster.processes[1].pid))
                peak, lost = cluster.peak_megabytes(), cluster.processes[1].poll() is not None
            finally:
                cluster.stop()
        same = cost.digest == expected
        good &= same and lost == is_killed
        name = "scheduler, one of two workers killed half-way" if is_killed else "scheduler, two workers"
        print(
            f"{name}: {cost.seconds:.1f} s, a worker's peak {peak:.0f} MB, "
            f"{'the same to the byte' if same else 'ANOTHER OUTPUT'} ({load_average()})",
            flush=True,
        )
    return good


def compare_workers(arguments: argparse.Namespace, big: Path) -> bool:
    files = [big.with_name(f"job.rank{rank}.sqlite") for rank in range(arguments.ranks)]
    for file in files:
        os.link(big, file)
    print(f"{len(files)} ranks of {big.stat().st_size / 1e6:.0f} MB each, all linked to one file", flush=True)
    best: dict[tuple[int, int], Cost] = {}
    digests = set()
    for _ in range(arguments.rounds):
        for jobs, cores in ((1, 1), (1, 2), (2, 2)):
            cost = measure([*OVERLAP, *files, "--jobs", str(jobs)], cores)
            digests.add(cost.digest)
            best[jobs, cores] = min(cost, best.get((jobs, cores), cost))
            memory = f"the largest process {cost.megabytes:.0f} MB"
            print(f"--jobs {jobs} on {cores} cores: {cost.seconds:.1f} s, {memory} ({load_average()})", flush=True)
    gain = best[1, 1].seconds / best[2, 2].seconds
    is_met = gain >= LEAST_GAIN and len(digests) == 1
    words = "the same to the byte" if len(digests) == 1 else "DIFFERENT OUTPUTS"
    print(
        f"two workers with a core each: {gain:.2f} times as fast as one (at least {LEAST_GAIN}), {words}: "
        f"{'met' if is_met else 'NOT MET'}; than one with both cores: "
        f"{best[1, 2].seconds / best[2, 2].seconds:.2f} times"
    )
    if arguments.scheduler:
        is_met &= measure_scheduler(files, best[1, 1].digest)
    return is_met


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.py", description="Reading.")
    subparsers = parser.add_subparsers(required=True)
    ingest = subparsers.add_parser("ingest", help="a large capture")
    ingest.add_argument("--kineto", type=Path, help="a gzipped Kineto trace, which is also repeated")
    ingest.add_argument("--before", type=Path, help="another checkout of ddp_prof, measured in the same run")
    ingest.add_argument("--megabytes", type=int, default=200, help="of the repeated Kineto trace; default: %(default)s")
    ranks = subparsers.add_parser("ranks", help="many ranks, one and two workers")
    ranks.add_argument("--ranks", type=int, default=64, help="default: %(default)s")
    ranks.add_argument("--scheduler", action="store_true", help="also measure through a Dask scheduler")
    for sub, compare, copies, rounds in ((ingest, compare_readers, 50, 5), (ranks, compare_workers, 45, 1)):
        sub.set_defaults(compare=compare)
        sub.add_argument("capture", type=Path, help="an nsys SQLite export, repeated to make it large")
        sub.add_argument("--copies", type=int, default=copies, help="default: %(default)s")
        sub.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
        sub.add_argument("--gate", action="store_true", help="exit with 3 if a target is missed")
    arguments = parser.parse_args(argv)
    os.environ["DDP_PROF_CACHE"] = "off"
    # Where it is set, each command compiles the package first (0.3 s), which an installed one never does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        big = repeat_capture(arguments.capture, Path(folder) / "big.sqlite", arguments.copies)
        is_met = arguments.compare(arguments, big)
    return 3 if arguments.gate and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
