"""The package against a brute-force oracle (tests/oracle), on whole runs that Hypothesis draws.

The gate draws 25 runs. A nightly draws 5,000::

    scripts/dev/oracle.sh
    HYPOTHESIS_PROFILE=nightly pytest -o timeout=0 tests/analyze/test_oracle.py    # the same
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from ddp_prof.analyze.collectives import alignment, exposed_time, lateness, run_analysis
from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis, analyze_trace, merge_analyses
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap, merge_ranks
from ddp_prof.analyze.step_columns import StepLength
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.variants.regression_gate import Requirements, check_run
from ddp_prof.analyze.variants.waterfall import measure_waterfall
from ddp_prof.present.tables.collectives import _summed_rows
from ddp_prof.present.tables.overlap import overlap_view
from ddp_prof.runs.report import TraceEvents
from ddp_prof.trace import Trace
from tests import oracle
from tests.analyze.damaged_runs import NOT_IN_THE_ORACLE, DamagedRun, damaged_runs, known_to_the_oracle
from tests.examples import examples
from tests.oracle.exposure import BACK_TO_BACK

DRAWN = examples(
    200,
    nightly=5_000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _times_known_to_the_oracle() -> Iterator[None]:
    with known_to_the_oracle() as patch:
        patch.setattr(exposed_time, "BACK_TO_BACK_NS", BACK_TO_BACK)
        patch.setattr(lateness, "BACK_TO_BACK_NS", BACK_TO_BACK)
        yield


@pytest.mark.slow
@DRAWN
@given(damaged_runs(), st.sampled_from([alignment.APART_NS, 6]))
def test_all_figures_agree_with_the_oracle(run: DamagedRun, apart: int) -> None:
    """A pair is given up where its ends lie further apart than ``apart``, at the scale of what is drawn or never."""
    expected = oracle.ranks_of(*run.recorded)
    oracle.explain(expected, apart)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        for module in (alignment, run_analysis):
            patch.setattr(module, "APART_NS", apart)
        traces = [TraceEvents(trace, find_rank_events(trace)) for trace in run.read(Path(folder))]
        overlaps = [measure_overlap(*each) for each in traces]
        analysis = merge_analyses([analyze_trace(*each) for each in traces])
        assume(not any(rule in warning for rule in NOT_IN_THE_ORACLE for warning in analysis.warnings))
        check_overlap(run.recorded, overlaps, expected)
        check_collectives(analysis, expected)
        check_skew(analysis, expected, apart)
        check_waterfall(analysis, expected, apart)
        check_what_is_printed(merge_ranks(overlaps), analysis)


def check_overlap(recorded: tuple[Trace, ...], overlaps: list[TraceOverlap], ranks: list[oracle.Rank]) -> None:
    for trace, overlap in zip(recorded, overlaps, strict=True):
        own = [rank for rank in ranks if rank.file == str(trace.path)]
        for rank, expected in zip(overlap.ranks, own, strict=True):
            assert rank.clocks_disagree == expected.clocks_disagree
            assert {name: getattr(rank, name) for name in oracle.rank_figures(expected)} == oracle.rank_figures(
                expected
            )
            is_blind = expected.is_blind or not expected.events
            assert rank.clock == (("device" if oracle.runs_ahead(expected) else "host") if expected.has_steps else None)
            steps = [] if is_blind and not expected.has_steps else expected.steps
            for step, expected_step in zip(rank.steps, steps, strict=True):
                figures = {} if is_blind else oracle.step_figures(expected, expected_step)
                assert {name: getattr(step, name) for name in figures} == figures
                check_length(step.length, oracle.length_figures(expected, expected_step))


def check_length(length: StepLength, expected: dict[str, int | None]) -> None:
    assert {name: getattr(length, name) for name in expected} == expected
    parts = (length.compute_only_ns, length.overlapped_ns, length.exposed_ns, length.exposed_memory_ns, length.idle_ns)
    assert length.ns is None or length.ns >= 0
    assert all(part is None or part >= 0 for part in parts)
    assert None in parts or sum(parts) == length.ns


def check_collectives(analysis: RunAnalysis, ranks: list[oracle.Rank]) -> None:
    """When and why, to the nanosecond and for each collective."""
    found = measure_collectives(analysis).collectives
    expected = [(rank, event) for rank in ranks for event in rank.collectives()]
    for collective, (rank, event) in zip(found, expected, strict=True):
        assert (collective.start_ns, collective.end_ns, collective.launch_ns) == (event.start, event.end, event.launch)
        assert collective.ready_ns == oracle.ready_at(rank, event)
        assert (collective.blocking is not None) == oracle.is_blocking(rank, event)
        assert (collective.transfer_ns, collective.wait_ns) == (event.transfer, event.wait)
        assert {(part.when, part.why): part.ns for part in collective.exposed_by} == dict(event.exposed)
        assert (collective.overlapped_ns, collective.exposed_wait_ns or 0) == (event.overlapped, event.exposed_wait)


def check_skew(analysis: RunAnalysis, ranks: list[oracle.Rank], apart: int) -> None:
    found = measure_skew(analysis)
    steps, each = oracle.skew_figures(ranks, apart)
    if any(rank.reason for rank in analysis.ranks if len(rank.timings)):  # what hides is not known
        steps = [replace(one, cost_ns=None) for one in steps]
        each = [replace(one, cost_ns=None, exposed_wait_ns=None) for one in each]
    assert [(one.step, list(one.lags_ns), one.last) for one in found.steps] == [
        (one.step, one.lags_ns, one.last) for one in steps
    ]
    assert [
        {name: getattr(rank, name) for name in vars(expected) if name != "cost_ns"}
        for rank, expected in zip(found.ranks, each, strict=True)
    ] == [{name: value for name, value in vars(expected).items() if name != "cost_ns"} for expected in each]
    costs = [(one.cost_ns, expected.cost_ns) for one, expected in zip(found.steps, steps, strict=True)]
    costs += [(one.cost_ns, expected.cost_ns) for one, expected in zip(found.ranks, each, strict=True)]
    stands = any(
        np.any(rank.timings.blocking_ns > 0) or np.any(lateness._inferred_standstill(rank)) for rank in analysis.ranks
    )
    for cost, expected_cost in costs:
        if cost is None and not steps:
            continue  # the oracle does not follow what queued where nothing is a step
        # Nor does it know where a stream stands still.
        assert cost == expected_cost or (stands and cost is not None and cost >= (expected_cost or 0))
    for step in found.steps:
        lag = max((lag for lag in step.lags_ns if lag is not None), default=0)
        assert step.cost_ns is None or step.cost_ns >= 0
        assert not step.cost_ns or (step.last is not None and lag > 0)
    said = [(step.last, step.cost_ns or 0) for step in found.steps]
    assert found.straggler == oracle.latest([who for who, _ in said], [cost for _, cost in said], len(found.ranks))


def check_waterfall(analysis: RunAnalysis, ranks: list[oracle.Rank], apart: int) -> None:
    budgets = measure_waterfall([(analysis, ())]).budgets
    # Where one rank's backward is not known, no tail is; what the oracle knows of other ranks is transfer then.
    expected = oracle.budget(ranks, apart, knows_tail=all(budget.knows_tail for budget in budgets))
    timed = [rank for rank in analysis.ranks if len(rank.times)]
    may_hide_communication = max((rank.world_size or 1 for rank in timed), default=1) > 1 and not any(
        len(rank.timings) or rank.device is None for rank in timed
    )
    assert len(budgets) == (expected is not None) or (may_hide_communication and not budgets)
    for budget in budgets:
        assert {part: getattr(budget, f"{part}_ns") for part in expected} == expected
        assert budget.step_ns == sum(expected[part] or 0 for part in oracle.PARTS) + budget.rest_ns
        assert budget.rest_ns >= -len(oracle.PARTS), "but for what is rounded"


def check_what_is_printed(result: TraceOverlap, analysis: RunAnalysis) -> None:
    """tail <= exposed <= comm in every document that prints them."""
    (summary,) = compare_variants([result])
    document = overlap_view(result, by_step=False).document
    for row in overlap_view(result, by_step=True).rows:
        assert (row["tail_ms"] or 0) <= (row["exposed_ms"] or 0) <= (row["comm_ms"] or 0)
    for step in (step for rank in document["ranks"] for step in rank["steps"]):
        assert (step["tail_ns"] or 0) <= (step["exposed_ns"] or 0) <= (step["comm_ns"] or 0)
    if summary.comm_ns is not None and summary.exposed_ns is not None:
        assert (summary.tail_ns or 0) <= summary.exposed_ns <= summary.comm_ns
        assert summary.overlapped_ns + summary.exposed_ns == summary.comm_ns
    parts = list(summary.parts_ns.values())
    assert parts == [None] * 5 or (sum(parts) == summary.nearest_step_ns and min(parts) >= 0)
    for row in _summed_rows(measure_collectives(analysis), "step"):
        assert (row["when_tail_ms"] or 0) <= (row["exposed_ms"] or 0)
    for percentile in (50, 95, 100):
        asked = Requirements(max_exposed_ns=0, max_tail_ns=0, percentile=percentile)
        exposed, tail = (verdict.measured for verdict in check_run(result, asked).verdicts)
        assert exposed is None or tail is None or tail <= exposed
