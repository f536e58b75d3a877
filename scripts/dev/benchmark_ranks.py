"""Measures reading a run of many ranks with one and with two workers, and through a Dask scheduler.

    python scripts/dev/benchmark.py ranks CAPTURE.sqlite [--ranks 64] [--copies 45] [--rounds 1] [--scheduler]

The capture is repeated end to end until it is large, and the file is linked once per rank. So all ranks have the same
events, which does not change the time to read them; their names tell the ranks apart.

One worker on one core, one on two cores, and two on two cores take turns. A worker reads a file with several threads,
so its time on two cores does not show the gain of a second worker.

With ``--scheduler`` a scheduler and two workers of one thread each run on the loopback interface; in the last run one
worker is killed when half of the reports are done. All outputs must be equal to the byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repeat_capture import repeat_capture

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_GAIN = 1.7
SECONDS_TO_END = 10
BIN = Path(sys.executable).parent
KILLER = """
import os, signal, sys
from ddp_prof.cli import main
from ddp_prof.runs import workers

measure = workers.measure_files
def watched(files, options, workers):
    for done, outcome in enumerate(measure(files, options, workers), 1):
        if done == len(files) // 2:
            os.kill(int(os.environ["DDP_PROF_VICTIM"]), signal.SIGKILL)
        yield outcome
workers.measure_files = watched
from ddp_prof.runs import run
run.measure_files = watched
main()
"""


class Cost(NamedTuple):
    """Seconds of a command, the peak of its largest process in megabytes, and a digest of its output."""

    seconds: float
    megabytes: float
    digest: str


def measure(command: Sequence[str | Path], cores: int | None = None, **environment: str) -> Cost:
    """Run a command on ``cores`` cores, or on all."""
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
        raise SystemExit(f"benchmark: {' '.join(map(str, command))} ended with {process.returncode}")
    return Cost(time.perf_counter() - began, usage.ru_maxrss / 1024, digest.hexdigest())


def link_capture_per_rank(capture: Path, folder: Path, ranks: int) -> list[Path]:
    """Link the capture once per rank."""
    files = [folder / f"job.rank{rank}.sqlite" for rank in range(ranks)]
    for file in files:
        os.link(capture, file)
    return files


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
    arguments = ["overlap", "--format", "json", *map(str, files)]
    good = True
    for is_killed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(Path(folder))
            try:
                program = [sys.executable, "-c", KILLER] if is_killed else [BIN / "ddp-prof"]
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.py ranks", description="Many ranks, one and two workers.")
    parser.add_argument("capture", type=Path, help="an nsys SQLite export, repeated to make it large")
    parser.add_argument("--ranks", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--copies", type=int, default=45, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--scheduler", action="store_true", help="also measure through a Dask scheduler")
    parser.add_argument("--gate", action="store_true", help="exit with 3 if a target is missed")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        big = repeat_capture(arguments.capture, Path(folder) / "big.sqlite", arguments.copies)
        files = link_capture_per_rank(big, Path(folder), arguments.ranks)
        size = big.stat().st_size / 1e6
        print(f"{len(files)} ranks of {size:.0f} MB each, all linked to one file", flush=True)
        ours = [BIN / "ddp-prof", "overlap", "--format", "json", *map(str, files)]
        best: dict[tuple[int, int], Cost] = {}
        digests = set()
        for _ in range(arguments.rounds):
            for jobs, cores in ((1, 1), (1, 2), (2, 2)):
                cost = measure([*ours, "--jobs", str(jobs)], cores)
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
    return 3 if arguments.gate and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
