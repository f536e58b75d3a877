"""Keeps what tunings measured in a database of four tables, so that the same command goes on where it stopped.

A trial is one run of the program with the settings of a try. Round 0 is a run with today's settings, which fills caches
and shows what is set today, and with ``--in-process`` also runs of faster tries by themselves; it is in no pair.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from msgspec import convert, to_builtins

from ddp_prof.benchmark.store import Tables, load_tables, open_database, upsert, writing
from ddp_prof.errors import TraceError
from ddp_prof.tune.measure import Loss, Made, Measured, Program
from ddp_prof.tune.tries import Try

OK, OUT_OF_MEMORY, OUT_OF_TIME, FAILED = "ok", "out_of_memory", "out_of_time", "failed"
_DECIDING = (
    *("NCCL_", "RCCL_", "GLOO_", "UCC_", "UCX_", "FI_"),  # communication
    *("CUDA_", "HIP_", "ROCR_", "TORCH_", "PYTORCH_"),  # devices, and what torch does on them
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),  # how many threads compute, and on which cores
)
"""Beginnings of the names of environment variables that decide how fast a program computes and communicates."""

ROOM = 2**18
"""Bytes that the disk must have before a run: more than its trials take."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the program, or one block of steps of a run.

    Attributes:
        round: Number of the round.
        tried: Label of the try.
        status: ``ok``, ``out_of_memory``, ``out_of_time`` or ``failed``.
        wall_s: Seconds from the start of the program to its end; for a block, its part of them.
        reason: Why ``status`` is not ``ok``; then there are no measurements.
        step_ns: Length of each measured step in nanoseconds, as the mean over the ranks.
        losses: For each rank its losses, in the order in which it computed them.
        made: The calls of ``DistributedDataParallel`` and ``fully_shard`` on all ranks.
    """

    round: int
    tried: str
    status: str
    wall_s: float
    reason: str | None = None
    step_ns: tuple[float, ...] = ()
    losses: tuple[tuple[Loss, ...], ...] = ()
    made: tuple[Made, ...] = ()
    world: int | None = None
    backend: str | None = None
    device: str | None = None
    torch: str | None = None

    @property
    def median_ns(self) -> float | None:
        return median(self.step_ns) if self.step_ns else None

    @classmethod
    def of(cls, round_: int, tried: Try, measured: Measured, wall_s: float) -> Trial:
        """Return the trial of a run that ended cleanly."""
        first = measured.ranks[0]
        return cls(
            round=round_,
            tried=tried.label,
            status=OK,
            wall_s=wall_s,
            step_ns=measured.step_ns,
            losses=tuple(tuple(rank.losses) for rank in measured.ranks),
            made=tuple(made for rank in measured.ranks for made in rank.made),
            world=first.world,
            backend=first.backend,
            device=first.device,
            torch=first.torch,
        )


@dataclass(frozen=True, slots=True)
class StoredTuning:
    """A row of the table of tunings; ``command`` and ``tries`` (labels) are JSON."""

    id: str
    command: str
    folder: str
    tries: str
    warmup: int
    steps: int
    created: str


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A row of the table of trials, see :class:`Trial`; ``made`` is JSON, and ``step_ns`` the median over its steps."""

    id: str
    tuning: str
    round: int
    tried: str
    status: str
    reason: str | None
    wall_s: float
    step_ns: float | None
    world: int | None
    backend: str | None
    device: str | None
    torch: str | None
    made: str
    created: str


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A row of the table of steps: the length of one measured step of a trial."""

    trial: str
    step: int
    step_ns: float


@dataclass(frozen=True, slots=True)
class StoredLoss:
    """A row of the table of losses, see :class:`Loss`; ``position`` counts the losses of the rank in the trial."""

    trial: str
    rank: int
    position: int
    step: int
    value: float | None
    precision: float


TABLES: Tables = {
    "tunings": (StoredTuning, ("id",), None),
    "trials": (StoredTrial, ("id",), "tuning"),
    "trial_steps": (StoredStep, ("trial", "step"), "trial"),
    "trial_losses": (StoredLoss, ("trial", "rank", "position"), "trial"),
}


class Store:
    """The trials of one tuning in a database file.

    A tuning is identified by the program, its folder and the text of its scripts, the tries, what their variables and
    others that decide (:func:`deciding_variables`) are today, the numbers of warm-up and measured steps, and the
    machine. So a program that was changed is measured anew.
    """

    def __init__(
        self, path: Path, program: Program, tries: Sequence[Try], folder: Path, environ: Mapping[str, str] = {}
    ) -> None:
        self.path = path
        labels = [one.label for one in tries]
        known: dict[str, Any] = {"command": program.command, "folder": str(folder), "tries": labels}
        known |= {"warmup": program.warmup, "steps": program.steps, "machine": platform.node()}
        known["scripts"] = digest_scripts(program.command, folder)
        known |= {"in_process": True} if program.in_process else {}
        tried_today = {name: environ[name] for tried in tries for name in tried.environment if name in environ}
        today = {**deciding_variables(environ), **tried_today}
        known |= {"environment": today} if today else {}
        self._tuning = StoredTuning(
            id=sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16],
            command=json.dumps(program.command),
            folder=str(folder),
            tries=json.dumps(labels),
            warmup=program.warmup,
            steps=program.steps,
            created=_now(),
        )

    @property
    def id(self) -> str:
        return self._tuning.id

    def load(self) -> list[Trial]:
        """Return the trials of this tuning; none without a file. Raises TraceError if the file is something else."""
        if not self.path.is_file():
            return []
        _, trials, steps, losses = load_tables(self.path, TABLES)
        return [_trial_of(row, steps, losses) for row in trials if row.tuning == self.id]

    def check(self) -> None:
        """Raise TraceError if trials cannot be written, or the disk is full: before a run, which may take minutes."""
        path = self.path.absolute()
        needed = [path.parent, *([path] if path.exists() else [])]  # SQLite makes a file of its own in the folder
        if not all(os.access(each, os.W_OK) for each in needed if each.exists()):
            raise TraceError(self.path, "cannot be written", "name another file with --store")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path.parent) as file:
                file.write(bytes(ROOM))
        except OSError as error:
            hint = "make room there, or name another file with --store"
            raise TraceError(self.path, f"cannot be written ({error.strerror})", hint) from error

    def write(self, trial: Trial) -> None:
        """Write a trial, completely or not at all; it replaces an earlier trial of the same round and try.

        Raises TraceError if it cannot be written.
        """
        name = f"{self.id}/{trial.round}/{trial.tried}"
        row = StoredTrial(
            id=name,
            tuning=self.id,
            round=trial.round,
            tried=trial.tried,
            status=trial.status,
            reason=trial.reason,
            wall_s=trial.wall_s,
            step_ns=trial.median_ns,
            world=trial.world,
            backend=trial.backend,
            device=trial.device,
            torch=trial.torch,
            made=json.dumps(to_builtins(trial.made)),
            created=_now(),
        )
        losses = [
            StoredLoss(name, rank, position, loss.step, loss.value, loss.precision)
            for rank, of_rank in enumerate(trial.losses)
            for position, loss in enumerate(of_rank)
        ]
        steps = [StoredStep(name, step, value) for step, value in enumerate(trial.step_ns)]
        with closing(open_database(self.path, TABLES)) as database, writing(database):
            for table in ("trial_steps", "trial_losses"):
                database.table(table).delete_where("trial = ?", [name])
            upsert(database, TABLES, tunings=[self._tuning], trials=[row], trial_steps=steps, trial_losses=losses)


def deciding_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that decide how fast a program computes and communicates."""
    return {name: value for name, value in environ.items() if name.startswith(_DECIDING)}


def digest_scripts(command: Sequence[str], folder: Path) -> Mapping[str, str]:
    """Return the digest of each Python file that a command line names, by the word that names it.

    ``folder`` is where the command is started.
    """
    files = {word: folder / word for word in command if word.endswith(".py")}
    return {word: sha256(file.read_bytes()).hexdigest() for word, file in files.items() if file.is_file()}


def _trial_of(row: StoredTrial, steps: Sequence[StoredStep], losses: Sequence[StoredLoss]) -> Trial:
    """Return a trial from its row; its steps and losses are selected from the rows of all trials."""
    own = sorted((each for each in losses if each.trial == row.id), key=lambda each: (each.rank, each.position))
    ranks: dict[int, list[Loss]] = {rank: [] for rank in range(row.world or 0)}
    for each in own:
        ranks.setdefault(each.rank, []).append(Loss(each.step, each.value, each.precision))
    return Trial(
        round=row.round,
        tried=row.tried,
        status=row.status,
        wall_s=row.wall_s,
        reason=row.reason,
        step_ns=tuple(
            each.step_ns for each in sorted((s for s in steps if s.trial == row.id), key=lambda step: step.step)
        ),
        losses=tuple(tuple(ranks[rank]) for rank in sorted(ranks)),
        made=tuple(convert(json.loads(row.made), list[Made])),
        world=row.world,
        backend=row.backend,
        device=row.device,
        torch=row.torch,
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
