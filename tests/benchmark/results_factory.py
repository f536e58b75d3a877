"""Results databases with known truth: known times, runs that scatter as said, messages of a known link."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_prof.analyze import DEFINITIONS
from ddp_prof.benchmark.store import (
    OK,
    OUT_OF_MEMORY,
    Environment,
    Results,
    StoredMessages,
    StoredRun,
    StoredStep,
    open_database,
    write_run,
)

MS = 1_000_000
ENVIRONMENT = Environment("e1", "Two Cores", 2, 2**34, "Linux", "", "3.11", "2.13", None, None, "0.1")
OTHER_ENVIRONMENT = replace(ENVIRONMENT, id="e2", cpu="Other Cores")
GRADIENT_BYTES = 40_000_000


@dataclass
class Sweep:
    """What a database is filled with.

    Attributes:
        noise: Relative standard deviation between the runs of a setting.
        repeats: Runs of each setting.
    """

    noise: float = 0.01
    repeats: int = 3
    steps: int = 4
    seed: int = 0
    environment: Environment = ENVIRONMENT
    runs: list[tuple[Environment, StoredRun, list[StoredStep], list[StoredMessages]]] = field(default_factory=list)

    def add(
        self,
        variant: str,
        step_ms: float,
        comm_ms: float,
        *,
        bucket: float | None = None,
        work: tuple[int, int] = (2, 64),
        synchronized_ms: float | None = None,
        messages: Sequence[tuple[int, float]] = (),
        **changes: object,
    ) -> None:
        """A setting: all its runs, whose times scatter about those given."""
        for repeat in range(self.repeats):
            name = f"{self.environment.id}-{variant}-{bucket}-{work}-{repeat}-{changes.get('model_size', '')}"
            shift = 1 + random.Random(f"{self.seed} {name}").gauss(0, 1) * self.noise
            run = replace(self._run(name, variant, bucket, work, repeat), **changes)
            steps = [
                self._step(run, index, mode, shift * step_ms, shift * comm)
                for mode, comm in ((False, comm_ms), (True, comm_ms if synchronized_ms is None else synchronized_ms))
                for index in range(self.steps)
            ]
            sent = [StoredMessages(size, 10, round(ns), round(ns), run=run.id) for size, ns in messages]
            self.runs.append((self.environment, run, steps, sent))

    def fail(self, variant: str, status: str = OUT_OF_MEMORY, **options: object) -> None:
        """A setting whose runs all ended early."""
        work = options.pop("work", (2, 64))
        for repeat in range(self.repeats):
            run = self._run(f"{self.environment.id}-{variant}-{work}-{repeat}-{status}", variant, None, work, repeat)
            run = replace(
                run, status=status, reason="it needs 9 GB", backend=None, device=None, collectives=None,
                communicated_bytes=None, peak_memory_bytes=None, **options,
            )  # fmt: skip
            self.runs.append((self.environment, run, [], []))

    def results(self) -> Results:
        """As if read from a database."""
        environments = dict.fromkeys(environment for environment, *_ in self.runs)
        runs = tuple(run for _, run, *_ in self.runs)
        steps = tuple(step for *_, steps, _ in self.runs for step in steps)
        return Results(tuple(environments), runs, steps, tuple(item for *_, sent in self.runs for item in sent))

    def write(self, path: Path) -> Path:
        """A database of it."""
        database = open_database(path)
        for environment, run, steps, messages in self.runs:
            write_run(database, environment, run, steps, messages)
        database.close()
        return path

    def _run(self, name: str, variant: str, bucket: float | None, work: tuple[int, int], repeat: int) -> StoredRun:
        return StoredRun(
            id=name, environment=self.environment.id, repeat=repeat, variant=variant, bucket_size_mb=bucket,
            model_size="mini", d_model=256, num_layers=4, parameters=GRADIENT_BYTES // 4,
            gradient_bytes=GRADIENT_BYTES, world_size=2, backend="gloo", device="cpu", local_batch_size=work[0],
            seq_len=work[1], warmup=1, steps=self.steps, status=OK, reason=None, caveat=None, collectives=8,
            communicated_bytes=GRADIENT_BYTES, peak_memory_bytes=1000 + repeat, tokens=2 * work[0] * work[1],
            created="2026-01-01T00:00:00+00:00", git_commit=None, command="python", definitions=DEFINITIONS,
        )  # fmt: skip

    def _step(self, run: StoredRun, index: int, mode: bool, step_ms: float, comm_ms: float) -> StoredStep:
        """Steps differ by a per mille about the run's time, and the median is that time."""
        ripple = 1 + 0.001 * (index - (self.steps - 1) / 2)
        step, comm = (round(item * ripple * MS) for item in (step_ms, comm_ms))
        rest = step - comm
        phases = (rest // 4, rest // 2, rest // 8) if mode else (None, None, None)
        return StoredStep(mode, index, step, phases[0], phases[1], comm, phases[2], run=run.id)


OVERHEAD_NS, BYTES_PER_NS = 200_000, 0.8
SIZES = (1_024, 262_144, 1_048_576, 10_240_000, 37_000_000)


def line(size: int) -> float:
    """Nanoseconds of a message on a link of known overhead and bandwidth."""
    return OVERHEAD_NS + size / BYTES_PER_NS


def study_like(noise: float = 0.002, *, repeats: int = 3, seed: int = 0) -> Sweep:
    """A sweep that bears out all that the study concludes, at little noise."""
    sweep = Sweep(noise=noise, repeats=repeats, seed=seed)
    for work, base in (((2, 64), 100.0), ((2, 128), 140.0), ((4, 128), 190.0)):
        more = (base - 100) / 8
        sweep.add("naive", base + 140, 150, work=work, messages=[(size, line(size)) for size in SIZES], collectives=39)
        sweep.add("flat", base + 138, 148, work=work, collectives=1, synchronized_ms=120)
        sweep.add("overlap", base + 90, 60 - more, work=work, collectives=39)
        for bucket, gain, wait in ((1.0, 0, 58), (10.0, 8, 44), (100.0, 4, 55)):
            sweep.add("bucketed", base + 86 - gain, wait - more, bucket=bucket, work=work)
        sweep.add("torch", base + 84, 50 - more, work=work)
    return sweep
