"""A program whose step lengths are drawn instead of measured, and a store that is no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddp_prof.errors import WorkloadError
from ddp_prof.tune.measure import Loss, Made, Measured, Program, RankFile
from ddp_prof.tune.session import Limits, Session, Tuning
from ddp_prof.tune.store import Store
from ddp_prof.tune.tries import TODAY, Try, parse_tries
from tests.tune.noise import Noise, normal

PROGRAM = Program(("torchrun", "train.py"), 5, 30)
ARGUMENTS: dict[str, Any] = {"bucket_cap_mb": None, "gradient_as_bucket_view": False, "static_graph": False}


def measured(step_ns: float, losses: Sequence[float | None] = (2.0, 1.0), precision: float = 1e-7) -> Measured:
    """Two ranks that agree."""
    kept = [Loss(step, value, precision) for step, value in enumerate(losses)]
    made = [Made("DistributedDataParallel", dict(ARGUMENTS))]
    ranks = (RankFile(rank, 2, "gloo", "cpu", "2.4", 35, made, [round(step_ns)], kept) for rank in range(2))
    return Measured((step_ns,), tuple(ranks))


class Simulated:
    """Step lengths of 100 ms, less what each try gains, times what the noise does to the run."""

    def __init__(self, gains: Mapping[str, float] | None = None, noise: Noise = normal, seed: int = 0) -> None:
        self.gains = dict(gains or {})
        self.errors: dict[str, WorkloadError] = {}
        self.losses: dict[str, Sequence[float | None]] = {}
        self.runs: list[str] = []
        self._noise = iter(noise(np.random.default_rng(seed), 2000))

    def __call__(self, tried: Try, _limit_s: int) -> Measured:
        self.runs.append(tried.label)
        if error := self.errors.get(tried.label):
            raise error
        length = 100e6 * (1 - self.gains.get(tried.label, 0.0)) * float(np.exp(next(self._noise)))
        return measured(length, self.losses.get(tried.label, (2.0, 1.0)))


class NoStore(Store):
    """Keeps nothing, and draws the same turns on each machine: what a test asserts of chance is drawn once."""

    @property
    def id(self) -> str:
        return self._tuning.command

    def load(self) -> list[Any]:
        return []

    def check(self) -> None:
        pass

    def write(self, trial: Any) -> None:
        pass


def tune(program: Simulated, *tries: str, store: Store | None = None, seed: int = 0, **limits: Any) -> Tuning:
    """A tuning of a simulated program, whose runs take no time."""
    parsed = parse_tries(tries)
    kept = store or NoStore(Path("none.db"), Program(("x", str(seed)), 5, 30), parsed, Path("/"))
    return Session(PROGRAM, parsed, program, kept, Limits(**limits), {}, clock=lambda: 0.0).run()


def outcomes(result: Tuning) -> dict[str, str]:
    return {verdict.tried.label: verdict.outcome for verdict in result.verdicts}


__all__ = ["ARGUMENTS", "PROGRAM", "TODAY", "NoStore", "Simulated", "measured", "outcomes", "tune"]
