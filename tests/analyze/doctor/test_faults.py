"""Runs with a fault put into them on purpose: the doctor names each, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.doctor.gradients import median_or_zero
from ddp_prof.analyze.doctor.rank_facts import measure_facts
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.tables.doctor import doctor_view
from ddp_prof.run_config import FAULTS
from ddp_prof.runs import load_runs

CAPTURES = Path(__file__).parent / "captures"
NAMED = {
    "nothing": [],
    "host-sync": ["host synchronization in backward"],
    "one-bucket": ["one bucket for all gradients"],
    "reversed": ["gradients ready in another order than buckets"],
    "slow-rank": ["straggler"],
    "starved": ["launch-bound host"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_doctor_names_the_fault_and_nothing_else(fault: str) -> None:
    (run,) = load_runs([CAPTURES / f"{fault.replace('-', '_')}.sqlite"])
    diagnosis = run.doctor()
    assert [one.rule for one in diagnosis.findings] == NAMED[fault]
    assert diagnosis.abstained == ()


def test_the_slow_rank_is_the_one_that_was_made_slow() -> None:
    (run,) = load_runs([CAPTURES / "slow_rank.sqlite"])
    (finding,) = run.doctor().findings
    assert finding.ranks == ("rank 1",)
    assert (finding.cost_ns or 0) >= 200_000_000, "rank 1 slept 200 ms in each step"


def test_a_host_that_prepares_costs_at_most_what_the_slowest_rank_needs() -> None:
    """It was the median over ranks, less than a step of the slowest rank becomes shorter: the others wait for it."""
    path = CAPTURES / "starved.sqlite"
    (run,) = load_runs([path])
    (finding,) = run.doctor().findings
    facts = [measure_facts(rank) for rank in find_rank_events(load_trace(path))]
    assert finding.cost_ns == max(median_or_zero(one.outside_ns) for one in facts)


def test_a_finding_names_its_ranks_where_it_is_not_about_all() -> None:
    (run,) = load_runs([CAPTURES / "slow_rank.sqlite"])
    (finding,) = run.doctor().findings
    for ranks, words in ((("rank 1",), " on rank 1"), (("rank 0", "rank 1"), "")):
        diagnosis = Diagnosis((replace(finding, ranks=ranks),), ())
        first = doctor_view(run.analysis(), diagnosis).title.splitlines()[1]
        assert first.startswith(f"1. straggler{words} (expected gain 322.8 ms")
