"""The loop over all runs: skips those that the database has, writes each one as soon as it has ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import statistics
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, load_results, open_database, update_run, write_run
from ddp_prof.benchmark.sweep.capture import FIGURES, CaptureFigures, capture
from ddp_prof.benchmark.sweep.measure import measure, rows_of
from ddp_prof.benchmark.sweep.progress import show_progress
from ddp_prof.errors import TraceError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sqlite_utils import Database

    from ddp_prof.benchmark.store import StoredRun
    from ddp_prof.benchmark.sweep.grid import Job
    from ddp_prof.benchmark.sweep.measure import RunRows
    from ddp_prof.benchmark.sweep.probe import Machine
    from ddp_prof.benchmark.sweep.progress import Progress
    from ddp_prof.run_config import RunConfig


LEAST_ROOM = 16 * 2**20
"""Free bytes on the disk of the database, below which no run begins, since its rows might not be kept."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        jobs: In this order.
        database: Results are kept here.
        force: Make runs again that are there.
        profile: Capture each setting once.
    """

    jobs: Sequence[Job]
    machine: Machine
    database: Path
    force: bool = False
    profile: bool = False


KNOWN, CAPTURED, NOT_CAPTURED = "known", "captured", "not_captured"
"""What else is counted of a sweep: runs that were there before, captures, captures that failed."""


class Outcome(Counter[str]):
    """How many runs ended how, by the status of a run and the words above."""

    @property
    def is_good(self) -> bool:
        """Whether nothing failed; for want of memory a run may be missing."""
        return not self[FAILED] and not self[NOT_CAPTURED]

    def __str__(self) -> str:
        words = {
            KNOWN: "there before", OUT_OF_MEMORY: "out of memory", FAILED: "failed", CAPTURED: "captured",
            NOT_CAPTURED: "captures failed",
        }  # fmt: skip
        counts = [f"{self[key]} {what}" for key, what in words.items() if self[key]]
        return ", ".join([f"{self[OK]} runs measured", *counts])


def sweep(plan: Plan) -> Outcome:
    """Carry out a plan.

    Raises:
        TraceError: The database is something else, or cannot be written.
        WorkloadError: Another sweep is at work there.
        Stopped: A signal asked this process to end; what had ended is in the database, nothing is left running.
    """
    with closing(open_database(plan.database)) as database, _alone(plan.database.parent):
        known = {run.id: run for run in load_results(plan.database).runs}
        return _Sweep(plan, known, database).run()


class _Sweep:
    """A plan that is carried out.

    Args:
        plan: What to do.
        known: The runs that are there, by their id.
        database: Where runs go.
    """

    def __init__(self, plan: Plan, known: dict[str, StoredRun], database: Database) -> None:
        self._plan, self._known, self._database = plan, known, database
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Make the runs that are missing, then the captures, which would disturb them."""
        jobs = [job for job in self._plan.jobs if not self._is_there(job)]
        captures = [job for job in self._plan.jobs if self._is_to_be_captured(job)]
        self._outcome[KNOWN] = len(self._plan.jobs) - len(jobs)
        with show_progress(len(jobs) + len(captures)) as progress:
            for job in jobs:
                _require_room(self._plan.database)
                self._measure(job, progress)
            for job in captures:
                self._capture(job, progress)
        return self._outcome

    def _is_there(self, job: Job) -> bool:
        """Whether a run need not be made: want of memory lasts, another failure may have been chance."""
        found = self._find(job)
        is_usable = found is not None and found.status != FAILED and found.code == self._plan.machine.code
        return is_usable and not self._plan.force

    def _is_to_be_captured(self, job: Job) -> bool:
        """Each setting once, beside its first run."""
        found = self._find(job)
        is_captured = found is not None and found.trace is not None and self._is_there(job)
        return self._plan.profile and job.repeat == 0 and not is_captured

    def _find(self, job: Job) -> StoredRun | None:
        return self._known.get(job.run_id(self._plan.machine.environment.id))

    def _measure(self, job: Job, progress: Progress) -> None:
        what = f"{job.config}, repeat {job.repeat + 1}"
        progress.begin(what)
        result = rows_of(job, self._plan.machine, measure(job.config))
        write_run(self._database, self._plan.machine.environment, result.run, result.steps, result.messages)
        self._known[result.run.id] = result.run
        self._outcome[result.run.status] += 1
        progress.end(what, _describe(result), is_bad=result.run.status != OK)

    def _capture(self, job: Job, progress: Progress) -> None:
        what = f"{job.config}, capture"
        found = self._find(job)
        progress.begin(what)
        if found is None or found.status != OK:
            progress.end(what, "skipped, since the run did not finish", is_bad=False)
            return
        folder = _capture_folder(self._plan.database, job.config)
        try:
            figures = capture(job.config, folder, force=self._plan.force)
        except WorkloadError as error:
            self._outcome[NOT_CAPTURED] += 1
            progress.end(what, f"failed: {error}", is_bad=True)
            return
        update_run(self._database, _with_figures(found, figures, self._plan.database))
        self._outcome[CAPTURED] += 1
        progress.end(what, "done", is_bad=False)


def _require_room(database: Path) -> None:
    free = shutil.disk_usage(database.parent).free
    if free < LEAST_ROOM:
        reason = f"only {free / 2**20:.1f} MiB are free on its disk; runs begin from {LEAST_ROOM // 2**20} MiB on"
        raise TraceError(database, reason, "what was written before is kept: make room, and the same command goes on")


def _describe(result: RunRows) -> str:
    if result.run.status == FAILED:
        return f"failed: {result.run.reason}"
    if result.run.status == OUT_OF_MEMORY:
        return str(result.run.reason)  # says so
    steps = [step for step in result.steps if not step.is_synchronized]
    step_ms = statistics.median(step.step_ns for step in steps) / 1e6
    waits = [step.communication_ns for step in steps if step.communication_ns is not None]
    wait = f"{statistics.median(waits) / 1e6:.0f} ms" if waits else "n/a"
    return f"step {step_ms:.0f} ms, waiting for gradients {wait}"


def _capture_folder(database: Path, config: RunConfig) -> Path:
    """Beside the database, one for all variants of the same sizes: ``results/mini_2ranks_2x64``."""
    sizes = f"{config.model_size}_{config.world_size}ranks_{config.local_batch_size}x{config.seq_len}"
    return database.with_suffix("") / sizes


def _with_figures(run: StoredRun, figures: CaptureFigures, database: Path) -> StoredRun:
    return replace(
        run,
        trace=os.path.relpath(figures.file.absolute(), database.parent.absolute()),
        **{f"trace_{name}": getattr(figures, name) for name in FIGURES},
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder, as scripts/profile_variant.sh does: two at once would measure each other.

    Raises:
        WorkloadError: Somebody else holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorkloadError(
                f"{folder}: another sweep or capture writes there: wait for it, or name another --database"
            ) from error
        yield
    finally:
        os.close(descriptor)
