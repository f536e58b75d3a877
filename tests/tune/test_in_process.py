"""Tries as blocks of steps of one run: what fits into the minutes, and the losses, of runs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ddp_prof.errors import WorkloadError
from ddp_prof.tune.measure import SETTLING, Blocks, Made, Measured, Program
from ddp_prof.tune.session import BlocksSession, Limits, Tuning
from ddp_prof.tune.store import Store
from ddp_prof.tune.tries import Try, parse_tries
from tests.tune.simulated import ARGUMENTS, NoStore, Simulated, outcomes

WARMUP, STEPS = 2, 18
PROGRAM = Program(("torchrun", "train.py"), WARMUP, STEPS, in_process=True)
FAST = {"static_graph=True": 0.2}
TRIES = ("static_graph", "gradient_as_bucket_view")
MADE = (Made("DistributedDataParallel", ARGUMENTS),)
SEEDED = tuple(3.0 / (step + 1) for step in range(WARMUP + STEPS))


@dataclass
class Job:
    """A program on a clock that stands still but while it runs: a start, then steps of 100 ms, less what a try gains.

    Attributes:
        starts: What was run, in order: a try alone, or the number of blocks.
        in_blocks: Losses of the run in blocks, for as long as its settings are today's.
        calls: The program's calls that take settings.
    """

    start_s: float = 10.0
    gains: dict[str, float] = field(default_factory=dict)
    losses: dict[str, Sequence[float]] = field(default_factory=dict)
    errors: dict[str, WorkloadError] = field(default_factory=dict)
    in_blocks: Sequence[float] = SEEDED[:WARMUP]
    calls: Sequence[Made] = MADE
    now_s: float = 0.0
    starts: list[str | int] = field(default_factory=list)

    def alone(self, tried: Try, _limit_s: int) -> Measured:
        self.starts.append(tried.label)
        self.now_s += self.start_s + 0.1 * (WARMUP + STEPS)
        program = Simulated(self.gains)
        program.errors = self.errors
        program.losses = {"today": SEEDED, **self.losses}
        program.losses.setdefault(tried.label, SEEDED)
        found = program(tried, 0)
        return replace(found, ranks=tuple(replace(rank, made=[*self.calls]) for rank in found.ranks))

    def blocks(self, tries: Sequence[Try], limit_s: int) -> Blocks:
        self.starts.append(len(tries))
        took = self.start_s + 0.1 * (WARMUP + len(tries) * (SETTLING + STEPS))
        assert took <= limit_s, "it would be ended"
        self.now_s += took
        lengths = Simulated(self.gains, seed=len(self.starts))
        found = [lengths(tried, 0) for tried in tries]
        program = Simulated()
        # The blocks train on with losses of their own.
        program.losses = {"today": [*self.in_blocks, *(0.1 for _ in range(took and len(tries) * STEPS))]}
        (ranks,) = (program(Try(), 0).ranks,)
        return Blocks(ranks, tuple(one.step_ns for one in found))


def tune(job: Job, *tries: str, store: Store | None = None, minutes: float = 60, rounds: int = 6) -> Tuning:
    parsed = parse_tries(tries)
    kept = store or NoStore(Path("none.db"), PROGRAM, parsed, Path("/"))
    limits = Limits(rounds=rounds, minutes=minutes)
    session = BlocksSession(job.blocks, PROGRAM, parsed, job.alone, kept, limits, {}, clock=lambda: job.now_s)
    return session.run()


def losses_of(result: Tuning) -> dict[str, str]:
    return {verdict.tried.label: verdict.losses for verdict in result.verdicts}


def test_losses_of_a_faster_try_are_those_of_a_run_of_its_own() -> None:
    job = Job(gains=FAST)
    result = tune(job, *TRIES)
    assert outcomes(result)["static_graph=True"] == "faster"
    assert losses_of(result) == {"static_graph=True": "same", "gradient_as_bucket_view=True": "not seen"}
    assert job.starts == ["today", 18, "static_graph=True"], "a try that is not faster is not started"
    assert result.best is not None
    assert (result.rounds, result.today.tried) == (6, "today")


def test_after_rounds_of_one_run_the_last_one_is_told() -> None:
    """'round 1: 0 of 1 decided' followed 'rounds 1 to 6 are measured', and nothing of the other five."""
    job, parsed, said = Job(gains=FAST), parse_tries(["static_graph"]), list[str]()
    store = NoStore(Path("none.db"), PROGRAM, parsed, Path("/"))
    limits = Limits(rounds=6, minutes=60)
    BlocksSession(job.blocks, PROGRAM, parsed, job.alone, store, limits, {}, said.append, lambda: job.now_s).run()
    assert [line for line in said if "decided" in line or "rounds" in line] == [
        "rounds 1 to 6 are measured, in one run",
        "round 6: 1 of 1 decided",
    ]


def test_a_faster_try_that_changes_losses_is_not_recommended() -> None:
    job = Job(gains=FAST, losses={"static_graph=True": [*SEEDED[:-1], 1.01 * SEEDED[-1]]})
    result = tune(job, *TRIES)
    assert outcomes(result)["static_graph=True"] == "faster"
    assert losses_of(result)["static_graph=True"] == "changed"
    assert result.best is None


def test_losses_that_vary_are_known_by_the_warm_up_of_the_run_in_blocks() -> None:
    job = Job(gains=FAST, losses={"static_graph=True": [2.7, *SEEDED[1:]]}, in_blocks=(2.9, 1.4))
    assert losses_of(tune(job, *TRIES))["static_graph=True"] == "vary by themselves"


def test_a_faster_try_that_fails_by_itself_is_not_recommended() -> None:
    job = Job(gains=FAST, errors={"static_graph=True": WorkloadError("ValueError: at the start")})
    result = tune(job, *TRIES)
    (fails, _) = result.verdicts
    assert (fails.outcome, fails.reason) == ("failed", "ValueError: at the start")
    assert result.best is None


def test_a_program_without_losses_is_not_started_for_them() -> None:
    job = Job(gains=FAST, losses={"today": ()})
    assert losses_of(tune(job, "static_graph")) == {"static_graph=True": "not seen"}
    assert job.starts == ["today", 12]


def test_a_program_without_ddp_is_not_run_in_blocks() -> None:
    """That 'without --in-process a try that fails stops no other' was its advice, after a second run."""
    job = Job(calls=())
    with pytest.raises(WorkloadError, match="calls no DistributedDataParallel, and --in-process changes nothing else"):
        tune(job, *TRIES)
    assert job.starts == ["today"]


def test_what_is_in_the_store_is_not_run_again(tmp_path: Path) -> None:
    def store() -> Store:
        return Store(tmp_path / "tune.db", PROGRAM, parse_tries(TRIES), tmp_path)

    first = tune(Job(gains=FAST), *TRIES, store=store())
    again = Job(gains=FAST)
    assert tune(again, *TRIES, store=store()).verdicts == first.verdicts
    assert again.starts == []


@pytest.mark.parametrize(
    ("start_s", "tries", "minutes", "starts", "rounds"),
    [
        # 62 s for today, then 60 s and 6 x 6 blocks of 2.1 s: 198 s.
        (60, 5, 3.4, ["today", 36], 6),
        (60, 5, 3.2, ["today", 30], 5),
        # Little start and many steps: 3 s for today, then 1.2 s and 12.6 s a round.
        (1, 5, 0.5, ["today", 12], 2),
        # Two rounds, then one of 1.2 + 4.2 s for two of the next.
        (1, 1, 0.55, ["today", 12], 6),
        (60, 1, 2, ["today"], 0),
    ],
)  # fmt: skip
def test_so_many_rounds_as_end_within_the_minutes(
    start_s: float, tries: int, minutes: float, starts: list[str | int], rounds: int
) -> None:
    job = Job(start_s)
    result = tune(job, "bucket_cap_mb=" + ",".join(map(str, range(1, 1 + tries))), minutes=minutes)
    assert (job.starts, result.rounds) == (starts, rounds)
    assert job.now_s <= 60 * minutes


def test_losses_for_which_there_is_no_time_are_not_seen() -> None:
    """3 s for today, 1.2 s and 12 blocks of 2.1 s: 29.4 s; a run of its own takes 3 s."""
    short, long = Job(1, FAST), Job(1, FAST)
    assert losses_of(tune(short, "static_graph", minutes=0.5)) == {"static_graph=True": "not seen"}
    assert losses_of(tune(long, "static_graph", minutes=0.55)) == {"static_graph=True": "same"}
    assert replace(short, starts=long.starts[:2]).starts == short.starts
