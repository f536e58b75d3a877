"""What the files of the ranks tell of a run: whether it counts, and if not, what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddp_prof.cli.tune import tune
from ddp_prof.errors import WorkloadError
from ddp_prof.tune.measure import LEAST_STEPS, LEAST_WARMUP, Program, RankFile
from ddp_prof.tune.recorded import RECORDED_STEPS
from ddp_prof.tune.tries import TODAY

PROGRAM = Program(("torchrun", "train.py"), 5, 30)


def refused(ranks: Sequence[int], world: int = 2, done: int = 35, program: Program = PROGRAM) -> str:
    """Why a run does not count in which these ranks wrote a file, after so many steps."""
    timed = [1000] * max(0, min(program.steps, done - program.warmup))
    files = [RankFile(rank, world, "gloo", "cpu", "2.4", done, [], timed, []) for rank in ranks]
    with pytest.raises(WorkloadError) as raised:
        program.check(files, TODAY)
    return str(raised.value)


@pytest.mark.parametrize(
    ("ranks", "world", "said"),
    [
        ([0, 1, 3], 4, "the ranks with a result are 0, 1, 3, of a world of 4: each rank must train"),
        ([0, 0, 1], 2, "the ranks with a result are 0, 0, 1, of a world of 2: each rank must train, in one process"),
    ],
)
def test_ranks_that_are_not_each_there_once_are_named(ranks: Sequence[int], world: int, said: str) -> None:
    """It said that 3 of 2 ranks had ended, and no way out."""
    assert refused(ranks, world).startswith(said)


@pytest.mark.parametrize("done", range(1, 35))
def test_steps_that_would_fit_are_steps_that_the_command_takes(done: int) -> None:
    """Of a program of two steps, --steps 1 was said to fit, which the command refuses."""
    assert [{one.name: one.type for one in tune.params}[name].min for name in ("warmup", "steps")] == [
        LEAST_WARMUP,
        LEAST_STEPS,
    ]
    said = refused([0, 1], done=done)
    assert said.startswith(f"the program ends after {done} optimizer steps, and 35 are needed: ")
    if done < 4:
        assert said.endswith("let it make at least 4, for --warmup 1 --steps 3")
        return
    words = said.split()
    warmup, steps = (int(words[words.index(option) + 1]) for option in ("--warmup", "--steps"))
    assert (warmup >= LEAST_WARMUP, steps >= LEAST_STEPS, warmup + steps <= done) == (True, True, True)


@pytest.mark.parametrize(
    ("done", "said"),
    [(14, "--warmup 3 would fit"), (12, "--warmup 1 would fit"), (11, "give --try, and leave out --why")],
)
def test_a_capture_has_a_length_of_its_own(done: int, said: str) -> None:
    """It was told that fewer --steps would fit, which do not shorten a capture."""
    captured = replace(PROGRAM, steps=RECORDED_STEPS + 1, is_recorded=True)
    assert refused([0, 1], done=done, program=captured).endswith(
        f" optimizer steps, and 16 are needed for a capture: {said}"
    )
