"""What communication costs: what waits for it, what it slows, and what could be gained at most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof import load_runs
from ddp_prof.analyze.cost import Bounds, Cost, find_bounds, measure_cost, measure_run_cost
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.overlap import measure_overlap, merge_ranks
from ddp_prof.analyze.step_cost import ON_CPU, PARTS, StepCost, divide_step, find_slowed
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.present.headlines import cost_text, gain_headline, gain_in_short
from ddp_prof.trace import Trace
from tests.analyze.random_runs import runs
from tests.command_line import run
from tests.drawing import draw_trace
from tests.examples import examples

SUMMARY = VariantSummary(
    label="job",
    device="cuda",
    ranks=1,
    steps=10,
    step_ns=30_000_000,
    step_spread_ns=0,
    collectives=8,
    comm_ns=4_900_000,
    overlapped_ns=4_500_000,
    exposed_ns=400_000,
    tail_ns=400_000,
    overlap_ratio=0.92,
    backward_overlap_ratio=0.92,
    speedup=None,
    blocking_ns=0,
    blocking_at_most_ns=0,
    blocked_steps=0,
    communicating_steps=10,
    communicating_step_ns=30_000_000,
)
KNOWN = Contention(kernels=77, runs=900, slowdown=1.5, slowed=1 / 3, slowed_low=0.3, slowed_high=0.36)


def test_what_is_slowed_is_a_cost_where_nothing_waits() -> None:
    cost = measure_cost(SUMMARY, KNOWN)
    assert cost == Cost(0, 1_500_000, 1_350_000, 1_620_000, 1.5, 77, None)
    assert find_bounds(SUMMARY, cost) == Bounds(0, 1_500_000, 1_350_000, 1_620_000)
    assert gain_headline(SUMMARY, cost).endswith(
        "hiding all of it would gain nothing. But it slows the compute that hides it: by 1.50 ms per step (5.0 %)."
    )
    # Less than a hundredth of a step is not worth a word.
    little = replace(cost, contention_ns=290_000, contention_low_ns=250_000, contention_high_ns=299_000)
    assert "slows" not in gain_headline(SUMMARY, little)
    # Of few steps there is no interval; then nothing excludes that compute is slowed by chance.
    without_interval = replace(cost, contention_low_ns=None, contention_high_ns=None)
    assert "slows" not in gain_headline(SUMMARY, without_interval)
    assert cost_text(cost, find_bounds(SUMMARY, cost)) == (
        "compute beside communication takes 1.50 times as long (77 kernels compared): 1.50 ms per step (1.35 ms to "
        "1.62 ms); hiding all of it can gain nothing, no network more than 1.50 ms (1.35 ms to "
        "1.62 ms)."
    )


def test_the_limit_of_a_faster_network_is_the_upper_end_of_its_interval() -> None:
    """'at most 5.0 %' was said of 4.5 to 5.4 %."""
    cost = measure_cost(SUMMARY, KNOWN)
    text = gain_in_short(SUMMARY, cost, find_bounds(SUMMARY, cost))
    assert text.endswith("hiding it gains nothing, a faster network at most 5.4 % (communication slows compute).")


def test_what_waits_and_what_is_slowed_add_up() -> None:
    summary = replace(SUMMARY, blocking_ns=300_000, blocked_steps=10)
    bounds = find_bounds(summary, measure_cost(summary, KNOWN))
    assert bounds == Bounds(300_000, 1_800_000, 1_650_000, 1_920_000)


def test_an_unknown_slowdown_is_a_range_and_never_0() -> None:
    """As for naive, or where each position always runs beside the same communication."""
    cost = measure_cost(SUMMARY, Contention(reason="no kernel ran both ways"))
    assert cost == Cost(0, None, 0, 4_500_000, None, 0, "no kernel ran both ways")
    bounds = find_bounds(SUMMARY, cost)
    assert bounds == Bounds(0, None, 0, 4_500_000, "no kernel ran both ways")
    assert gain_headline(SUMMARY, cost) == gain_headline(SUMMARY)
    assert cost_text(cost, bounds) == (
        "by how much communication slows compute is not known, at most 4.50 ms per step: no kernel ran both ways; "
        "hiding all of it can gain nothing, no network more than 4.50 ms."
    )


def test_a_limit_as_long_as_the_step_is_none() -> None:
    """'no network more than 6.76 ms' was said of a step of 6.76 ms, in which a pipeline waits or computes."""
    pipeline = replace(
        SUMMARY, step_ns=6_760_000, communicating_step_ns=6_760_000, comm_ns=6_760_000, overlapped_ns=3_300_000,
        exposed_ns=3_460_000, blocking_ns=3_460_000, blocked_steps=10,
    )  # fmt: skip
    cost = replace(measure_cost(pipeline, Contention(reason="no kernel ran both ways")), medians_ns={"step": 6_760_000})
    bounds = find_bounds(pipeline, cost)
    text = cost_text(cost, bounds) or ""
    assert text.endswith("3.46 ms per step; for a faster network no limit that is much less than the step is known.")
    assert gain_in_short(pipeline, cost, bounds).endswith(": hiding it gains at most 51 %.")
    # What is measured is said, however large it is.
    measured = replace(bounds, network_ns=6_700_000, high_ns=6_700_000)
    assert "no network more than 6.70 ms" in (cost_text(cost, measured) or "")
    assert gain_in_short(pipeline, cost, measured).endswith("a faster network 99.1 %.")


def test_communication_beside_nothing_slows_nothing() -> None:
    naive = replace(SUMMARY, overlapped_ns=0, exposed_ns=4_900_000, blocking_ns=4_900_000)
    cost = measure_cost(naive, Contention(reason="no kernel ran beside communication"))
    assert (cost.contention_ns, cost.reason) == (0, None)
    assert find_bounds(naive, cost) == Bounds(4_900_000, 4_900_000, 4_900_000, 4_900_000)


@pytest.mark.parametrize(
    ("summary", "reason"),
    [(replace(SUMMARY, device="cpu"), ON_CPU), (replace(SUMMARY, overlapped_ns=None, reason="graphs"), "graphs")],
)
def test_what_cannot_be_known_is_null_with_a_reason(summary: VariantSummary, reason: str) -> None:
    cost = measure_cost(summary, KNOWN)
    assert (cost.contention_ns, cost.contention_low_ns, cost.contention_high_ns) == (None, None, None)
    assert cost.reason == reason
    assert find_bounds(summary, cost).network_ns is None


def test_on_a_real_job_the_slowdown_costs_four_times_what_is_exposed(shared_traces: Path) -> None:
    trace = shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"
    (document,) = json.loads(run("summary", "--format", "json", trace).stdout)["runs"]
    cost, bounds = document["cost"], document["bounds"]
    assert cost["kappa"] == pytest.approx(1.5, abs=0.03)
    assert 1_400_000 <= cost["contention_ns"] <= 1_600_000
    assert cost["contention_low_ns"] <= 1_500_000 <= cost["contention_high_ns"]
    assert bounds["schedule_ns"] == pytest.approx(0, abs=100_000)
    assert 0.045 <= bounds["network_ns"] / document["step_ns"] <= 0.055
    overlap = json.loads(run("overlap", "--format", "json", trace).stdout)
    assert (overlap["cost"], overlap["bounds"]) == (cost, bounds), "a figure does not depend on the command"


def test_what_waits_while_the_device_idles_is_no_standstill() -> None:
    """A stream stands still from the launch of what waits, also before the collective begins and while copies run."""
    #  compute      ccccc...............
    #  collective   .......NNNNN........   exposed: 5
    #  copies       ............MM......   exposed: 2
    #  blocking     ......^^^^^^^.......   7: of these 1 idle, 5 exposed, 1 copies
    trace = draw_trace(ranges={"step 0": "#" * 20}, streams={7: "ccccc"})
    (step,) = measure_overlap(trace).ranks[0].steps
    length = replace(
        step.length, ns=20, compute_only_ns=5, overlapped_ns=0, exposed_ns=5, exposed_memory_ns=2, idle_ns=8,
        blocking_ns=7, blocking_exposed_ns=5, blocking_memory_ns=1, blocking_at_most_ns=7,
    )  # fmt: skip
    cost = divide_step(replace(step, length=length), find_slowed(KNOWN, "cuda"), None)
    assert (cost.blocking_ns, cost.standstill_ns) == (7, 8)
    assert cost.standstill_by_ns == {"communication": 0, "copies": 1, "idle": 7}
    without_copies = replace(length, exposed_memory_ns=None, idle_ns=None)
    cost = divide_step(replace(step, length=without_copies), find_slowed(KNOWN, "cuda"), None)
    assert (cost.standstill_ns, cost.standstill_by_ns) == (8, None), "copies and idle time were said to be 0"


def is_divided(step: StepCost) -> bool:
    """Whether the parts that are known sum to the step, and each lies within its limits."""
    ends = {end: [getattr(step, f"{part}_{end}ns") for part in PARTS] for end in ("low_", "", "high_")}
    for part, low, ns, high in zip(PARTS, *ends.values(), strict=True):
        assert (ns is None) == ({"work": "contention", "standstill": "blocking"}.get(part, part) in step.reasons)
        known = [one for one in (low, ns, high) if one is not None]
        assert known == sorted(known)
        assert min(known, default=0) >= 0
    if step.step_ns is None or step.reasons:
        return False
    assert step.standstill_by_ns is not None
    assert min(step.standstill_by_ns.values()) >= 0
    assert sum(step.standstill_by_ns.values()) == step.standstill_ns
    assert sum(ends[""]) == step.step_ns
    for one, other in (("low_", "high_"), ("high_", "low_")):  # what is less work is more contention
        mixed = [ends[one][0], ends[other][1], ends[one][2], ends[other][3]]
        assert None in mixed or sum(mixed) == step.step_ns
    return True


@examples(100)
@given(runs(), st.sampled_from([KNOWN, Contention(reason="not known"), replace(KNOWN, slowed_low=None)]))
def test_the_parts_of_each_step_of_any_run_sum_to_it(traces: tuple[Trace, ...], contention: Contention) -> None:
    cost = measure_run_cost(merge_ranks([measure_overlap(trace) for trace in traces]), lambda: contention)
    for rank in cost.ranks:
        for step in rank.steps:
            is_divided(step)


def test_the_parts_of_each_step_of_a_real_job_sum_to_it(shared_traces: Path) -> None:
    (of_run,) = load_runs(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite")
    (rank,) = of_run.cost().ranks
    assert all(map(is_divided, rank.steps))


def test_where_waits_were_not_recorded_work_is_known_and_what_waited_is_not(shared_traces: Path) -> None:
    (of_run,) = load_runs(shared_traces / "kineto_a100_ddp_rank0of2.json.gz")
    (rank,) = of_run.cost().ranks
    assert not any(map(is_divided, rank.steps))
    assert all(step.reasons.keys() == {"blocking"} for step in rank.steps)


@pytest.mark.parametrize("trace", ["traces/torch.sqlite", "traces/naive.sqlite"])
def test_on_a_cpu_work_and_contention_are_not_known_and_the_rest_is(trace: str) -> None:
    """Of ``naive``, which overlaps nothing, the run had null, and its steps and medians 0."""
    (of_run,) = load_runs(trace)
    cost = of_run.cost()
    steps = [step for rank in cost.ranks for step in rank.steps]
    assert {step.reasons["contention"] for step in steps} == {ON_CPU}
    assert all(step.work_ns is step.contention_high_ns is None for step in steps)
    assert all((step.blocking_ns or 0) + (step.standstill_ns or 0) <= (step.step_ns or 0) for step in steps)
    assert cost.cost.medians_ns is not None
    assert cost.cost.medians_ns["blocking"]
    assert cost.cost.medians_ns["work"] is None


@pytest.mark.parametrize(("limit_ms", "verdict"), [(2, "passed"), (1, "failed")])
def test_a_gate_limits_what_waits_and_what_is_slowed(limit_ms: float, verdict: str, shared_traces: Path) -> None:
    trace = shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"
    found = run("check", "--max-cost-ms", limit_ms, "--format", "json", trace)
    ((one,),) = [of_run["verdicts"] for of_run in json.loads(found.stdout)["runs"]]
    assert (one["requirement"], one["status"]) == ("max cost", verdict)
    assert one["measured"] == pytest.approx(1_410_000, abs=50_000)


def test_a_gate_cannot_judge_a_cost_that_nothing_bounds() -> None:
    found = run("check", "--max-cost-ms", 200, "--format", "json", "traces/torch.sqlite")
    ((one,),) = [of_run["verdicts"] for of_run in json.loads(found.stdout)["runs"]]
    assert (one["status"], one["reason"]) == ("unknown", ON_CPU)


def _unexplained(one: object) -> list[str]:
    """Keys of times, at any depth of a cost or of bounds, that are null while no reason beside them is given."""
    if isinstance(one, list):
        return [found for part in one for found in _unexplained(part)]
    if not isinstance(one, dict):
        return []
    reasons = [value for key, value in one.items() if "reason" in key and value]
    own = [key for key, value in one.items() if key.endswith("_ns") and value is None and not reasons]
    return own + [found for key in ("cost", "bounds", "ranks", "steps") for found in _unexplained(one.get(key, []))]


@pytest.mark.parametrize("trace", ["traces/torch.sqlite", "traces/naive.sqlite"])
def test_what_is_not_known_of_costs_has_a_reason(trace: str) -> None:
    document = json.loads(run("overlap", trace, "--format", "json").stdout)
    costs = [{name: one[name] for name in ("cost", "bounds")} for one in (document, *document["ranks"])]
    costs += [{"cost": step["cost"]} for rank in document["ranks"] for step in rank["steps"]]
    assert _unexplained(costs) == []
    findings = json.loads(run("doctor", trace, "--format", "json").stdout)["findings"]
    for one in findings:
        assert one["cost_ns"] is not None or one["cost_reason"]
        assert one["expected_gain_ns"] is not None or one["gain_reason"]


def test_copies_out_of_buckets_cost_less_than_they_take(shared_traces: Path) -> None:
    """A measured pair of captures of this job gained 0.60 ms; the copies and their launches take up to 1.72."""
    (of_run,) = load_runs(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite")
    (finding,) = of_run.doctor().findings
    assert (finding.argument, finding.value) == ("gradient_as_bucket_view", True)
    assert finding.expected_gain_ns == pytest.approx(640_000, abs=60_000)
    assert finding.gain_low_ns is not None
    assert finding.gain_high_ns is not None
    assert finding.gain_low_ns <= finding.expected_gain_ns <= finding.gain_high_ns <= (finding.cost_ns or 0)
    assert finding.gain_low_ns <= 600_000, "an interval that leaves out what was measured is wrong"
    assert finding.gain_high_ns - finding.gain_low_ns <= 600_000
