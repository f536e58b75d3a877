"""Who is late in simulated programs, and what the others gain without it: they are simulated again with no rank late.

The gate asks three programs, a nightly 60.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import mean

import pytest

from ddp_prof.analyze.collectives.run_analysis import analyze_trace, merge_analyses
from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from tests.analyze.contended_device import US, Program, draw_program, lengths_of, run, trace_of
from tests.examples import IS_NIGHTLY

LATE = {
    "one": lambda step, ranks: (1,),
    "two together": lambda step, ranks: (1, 2),
    "each in its turn": lambda step, ranks: (step % ranks,),
}
"""Which ranks are late in a step."""


def draw(seed: int, kind: str) -> tuple[Program, Program]:
    """A program in which nothing is slowed, and the same with no rank late."""
    random, program = Random(f"late {seed} {kind}"), draw_program(seed)
    ranks = random.randint(4, 5)
    never = tuple(tuple(random.randint(0, 2 * US) for _ in range(ranks)) for _ in range(program.steps))
    late = [list(row) for row in never]
    for step, row in enumerate(late):
        by_ns = random.randint(150, 250) * US
        for rank in LATE[kind](step, ranks):
            row[rank] += by_ns
    program = replace(program, kappas=(1.0, 1.0), ranks=ranks, late=0, barrier=0, wait=-1)
    return replace(program, lates=tuple(map(tuple, late))), replace(program, lates=never)


def skew_of(program: Program) -> RunSkew:
    ranks = run(program)
    traces = [trace_of(rank, number, len(ranks)) for number, rank in enumerate(ranks)]
    return measure_skew(merge_analyses([analyze_trace(trace, find_rank_events(trace)) for trace in traces]))


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("seed", range(20) if IS_NIGHTLY else (6,))
def test_who_is_late_and_what_the_others_gain_without_it(seed: int, kind: str) -> None:
    """What is said is the most: a rank that ends a step late begins the next one late, which is lost once.

    The gain without ranks that are late in turns is not held: which of them is late from the step before is not known.
    """
    program, never = draw(seed, kind)
    found = skew_of(program)
    assert found.late_ranks == {"one": (1,), "two together": (1, 2)}.get(kind, ())
    if kind == "each in its turn":
        assert found.in_turns is not None
        assert found.in_turns.ranks == {step: LATE[kind](step, program.ranks) for step in range(program.steps)}
        return
    gain_ns = mean(lengths_of(run(program))) - mean(lengths_of(run(never)))
    assert gain_ns - 3 * US <= (found.cost_ns or 0) <= 1.3 * gain_ns
