"""The oracle's runs hold each kind of damage: what is never drawn, is never compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from ddp_prof.trace import Trace
from tests import oracle
from tests.analyze.damaged_runs import DamagedRun, damaged_runs
from tests.analyze.random_runs import COPY_WITHIN, OF_COPIES
from tests.oracle.recorded import lost_launches
from tests.oracle.steps import work_of_steps

KINDS = {
    "lost kernels", "a shifted clock", "zero times", "an overlong kernel", "an open last range", "a silent process",
    "copies that communicate", "a host range that ends early", "several ranks", "a late rank", "torch.profiler", "nsys",
}  # fmt: skip
DRAWS, MOST_SEEDS = 100, 20


def kinds_of(run: DamagedRun) -> Iterator[str]:
    yield "torch.profiler" if run.is_kineto else "nsys"
    ranks = oracle.ranks_of(*run.recorded)
    if len(ranks) > 1:
        yield "several ranks"
        oracle.explain(ranks, 6)
        if any(step.last is not None and step.cost_ns for step in oracle.skew_figures(ranks, 6)[0]):
            yield "a late rank"
    for rank in ranks:
        if rank.clocks_disagree:
            yield "a shifted clock"
        if any(step.end < event_end for step, event_end in work_of_steps(rank)):
            yield "a host range that ends early"
    for trace in run.recorded:
        yield from _kinds_of_recording(trace)


def _kinds_of_recording(trace: Trace) -> Iterator[str]:
    activities, spans = trace.activities, trace.spans
    if any(lost_launches(trace, process) for process in {*trace.calls.process.tolist()}):
        yield "lost kernels"
    silent = {*trace.calls.process.tolist()} - {*activities.process.tolist()}
    if silent:
        yield "a silent process"
    if any((np.any((of.start_ns == 0) & (of.end_ns == 0)) and len(of) > 1) for of in (activities, spans)):
        yield "zero times"
    if np.any(spans.is_open == 1):
        yield "an open last range"
    names = set(trace.names)
    if COPY_WITHIN in names and names & set(OF_COPIES):
        yield "copies that communicate"
    for lane in {*activities.lane.tolist()}:
        own = sorted(
            (start, end)
            for start, end, of in zip(activities.start_ns, activities.end_ns, activities.lane, strict=True)
            if of == lane
        )
        if any(end > later[1] for (_, end), later in zip(own, own[2:], strict=False)):
            yield "an overlong kernel"


@pytest.mark.nightly  # of what is drawn, not of the package
def test_each_kind_of_damage_is_drawn() -> None:
    """Draws of one seed resemble each other, and depend on the modules that are loaded: a kind may be missing there."""
    drawn: Counter[str] = Counter()
    for number in range(MOST_SEEDS):

        @seed(number)
        @settings(
            max_examples=DRAWS, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(damaged_runs())
        def draw(run: DamagedRun) -> None:
            drawn.update(set(kinds_of(run)))

        draw()
        if all(drawn[kind] >= 3 for kind in KINDS):
            return
    raise AssertionError(drawn)
