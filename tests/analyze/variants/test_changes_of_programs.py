"""What two recordings of simulated programs differ by: the cause is told, and of equal programs nothing is.

The gate asks few programs, a nightly 200 pairs of equal ones and ten of each cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import pytest

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis, analyze_trace, merge_analyses
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.kernel_times import KernelRuns, find_kernel_runs
from ddp_prof.analyze.variants.same_factor import find_same_factor
from ddp_prof.analyze.variants.waterfall import PartChange, compare_before_after
from ddp_prof.present.tables.compare import late_ranks_text
from tests.analyze.contended_device import US, Program, run, trace_of
from tests.examples import IS_NIGHTLY

MISSES = 0.05
"""Of pairs of equal programs, so many may differ by the test's own word."""
SEEDS = range(10) if IS_NIGHTLY else range(2)


def program_of(seed: int) -> Program:
    """Of several ranks; each of its steps is alike, and nothing is slowed."""
    random = Random(f"compared {seed}")
    buckets = tuple(random.randint(60, 300) * US for _ in range(random.choice([2, 4])))
    layers = random.randint(12, 20)
    steps = random.choice([8, 12, 20])
    return Program(
        kappas=(1.0, 1.0),
        forward=tuple(random.randint(10, 40) * US for _ in range(layers)),
        backward=tuple(random.randint(10, 40) * US for _ in range(layers)),
        transfers=(buckets,) * steps,
        pace=(1.0,) * steps,
        ranks=random.choice([2, 3]),
        lates=((0,) * 3,) * steps,
    )


def recorded(program: Program, name: str) -> Program:
    """With noise of its own: of the machine, of the network, and of each rank."""
    random = Random(name)
    return replace(
        program,
        pace=tuple(pace * random.gauss(1, 0.005) for pace in program.pace),
        transfers=tuple(tuple(round(ns * random.gauss(1, 0.05)) for ns in step) for step in program.transfers),
        lates=tuple(tuple(ns + random.randint(0, 10) * US for ns in step) for step in program.lates),
    )


@dataclass(frozen=True)
class Pair:
    before: Program
    after: Program

    @cached_property
    def analyzed(self) -> list[tuple[RunAnalysis, list[KernelRuns]]]:
        found = []
        for program in (self.before, self.after):
            ranks = run(program)
            traces = [trace_of(rank, number, len(ranks)) for number, rank in enumerate(ranks)]
            events = [find_rank_events(trace) for trace in traces]
            runs = [find_kernel_runs(rank) for of_trace in events for rank in of_trace]
            found.append((merge_analyses(list(map(analyze_trace, traces, events))), runs))
        return found

    @cached_property
    def changes(self) -> dict[str, PartChange]:
        """Those beyond the spread, by part."""
        changes = compare_before_after(*self.analyzed)
        return {change.part: change for change in changes if change.is_beyond_spread}

    @property
    def factor(self) -> float | None:
        found = find_same_factor(*(kernels for _, kernels in self.analyzed))
        return found and found.factor

    @property
    def late(self) -> str:
        skews = [measure_skew(analysis) for analysis, _ in self.analyzed]
        return late_ranks_text(tuple(self.changes.values()), skews, ("before", "after"))


def pair_of(seed: int, change: Callable[[Program], Program] = lambda program: program) -> Pair:
    program = program_of(seed)
    return Pair(recorded(program, f"before {seed}"), recorded(change(program), f"after {seed}"))


@pytest.mark.slow
def test_of_equal_programs_no_more_pairs_differ_than_the_test_says() -> None:
    count = 200 if IS_NIGHTLY else 8
    pairs = [pair_of(seed) for seed in range(count)]
    assert sum(bool(pair.changes) for pair in pairs) <= MISSES * count
    assert not any(pair.factor or pair.late for pair in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slower_kernel_is_compute(seed: int) -> None:
    """The first kernel of forward, behind which everything comes later alike."""
    pair = pair_of(seed, lambda one: replace(one, forward=(one.forward[0] + 150 * US, *one.forward[1:])))
    assert {*pair.changes} == {"step", "compute"}
    for change in pair.changes.values():
        assert abs((change.change_ns or 0) - 150 * US) <= (change.half_width_ns or 0)
    assert (pair.factor, pair.late) == (None, "")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slower_network_is_longer_collectives(seed: int) -> None:
    def slower(program: Program) -> Program:
        return replace(program, transfers=tuple(tuple(2 * ns for ns in step) for step in program.transfers))

    pair = pair_of(seed, slower)
    assert {"step", "tail"} <= {*pair.changes} <= {"step", "tail", "wait", "transfer"}
    cause = pair.changes["tail"].cause
    assert cause is None or cause.moved in ("transfer", "queueing")
    assert (pair.factor, pair.late) == (None, "")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slower_machine_is_one_factor_of_all_kernels(seed: int) -> None:
    pair = pair_of(seed, lambda one: replace(one, pace=(1.1,) * one.steps))
    assert {"step", "compute"} <= {*pair.changes} <= {"step", "compute", "tail"}
    assert pair.factor == pytest.approx(1.1, abs=0.02)
    assert not pair.late


@pytest.mark.parametrize("seed", SEEDS)
def test_a_late_rank_is_named(seed: int) -> None:
    def late(program: Program) -> Program:
        return replace(program, lates=tuple((0, 200 * US, 0) for _ in program.lates))

    pair = pair_of(seed, late)
    assert pair.late.startswith("Rank 1 arrives last in after")
    assert pair.factor is None
