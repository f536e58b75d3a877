"""What passes the gate, what fails it, and what fails because it is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze import statistics
from ddp_prof.analyze.overlap import (
    Attribution,
    RankOverlap,
    TraceOverlap,
    measure_overlap,
)
from ddp_prof.analyze.step_columns import StepLength, StepOverlap
from ddp_prof.analyze.variants.regression_gate import GateReport, GateResult, Requirements, check_run, find_differences
from ddp_prof.ingest.load import load_trace
from ddp_prof.manifest import Manifest, load_manifest
from tests.drawing import draw_trace
from tests.nsys_factory import US, bucket_steps, write_capture


def a_step(
    exposed: int, *, hidden: int = 60, host: int | None = 1000, tail: int | None = 0, idle: int | None = 0
) -> StepOverlap:
    return StepOverlap(
        step=None,
        start_ns=0,
        host_ns=host,
        kernels=1,
        collectives=1 if exposed + hidden else 0,
        comm_ns=exposed + hidden,
        overlapped_ns=hidden,
        exposed_ns=exposed,
        backward_overlapped_ns=hidden,
        tail_ns=tail,
        window_ns=1000,
        compute_only_ns=idle,
        exposed_memory_ns=0,
        idle_ns=idle,
        other_comm_ns=0,
        length=StepLength(ns=host),
    )


def a_rank(*steps: StepOverlap, number: int = 0, comm: int | None = None) -> RankOverlap:
    """A rank whose communication is that of its steps, or more."""
    comm = sum(step.comm_ns for step in steps) if comm is None else comm
    overlapped = sum(step.overlapped_ns for step in steps)
    return RankOverlap(
        process=number,
        device=0,
        rank=number,
        kernels=1,
        collectives=1,
        compute_ns=1,
        comm_ns=comm,
        overlapped_ns=overlapped,
        exposed_ns=comm - overlapped,
        backward_overlapped_ns=overlapped,
        reason=None if comm else "nothing in this trace is known to communicate",
        steps=tuple(replace(step, step_key=key) for key, step in enumerate(steps)),
    )


def a_run(*ranks: RankOverlap, device: str = "cuda") -> TraceOverlap:
    return TraceOverlap(
        Path("x.sqlite"), "x", "nsys-sqlite", None, device, Attribution(1, 1, 1, 1, "ranges"), ranks, ()
    )


def only_verdict(check: GateReport) -> GateResult:
    (verdict,) = check.verdicts
    assert check.passed == (verdict.status == "passed")
    return verdict


SOUND = a_rank(a_step(40), a_step(20), a_step(90))
GRAPHS = replace(a_rank(a_step(1, idle=None), a_step(1), a_step(1)), reason="CUDA graphs were recorded whole")


def test_the_worst_rank_decides_the_overlap() -> None:
    run = a_run(a_rank(a_step(20, hidden=80)), a_rank(a_step(40, hidden=60), number=1))
    failed = only_verdict(check_run(run, Requirements(min_overlap=0.7)))
    assert (failed.status, failed.measured, failed.rank.rank) == ("failed", 0.6, 1)
    assert only_verdict(check_run(run, Requirements(min_overlap=0.6))).status == "passed", "a limit may be reached"


def test_times_are_medians_over_the_worst_ranks_steps() -> None:
    run = a_run(SOUND, a_rank(a_step(10), a_step(50), a_step(50), number=1))
    failed = only_verdict(check_run(run, Requirements(max_exposed_ns=49)))
    assert (failed.status, failed.measured, failed.rank.rank) == ("failed", 50, 1)
    assert only_verdict(check_run(run, Requirements(max_exposed_ns=50))).status == "passed"


def test_the_tail() -> None:
    run = a_run(a_rank(a_step(1, tail=5), a_step(1, tail=7), a_step(1, tail=900)))
    assert only_verdict(check_run(run, Requirements(max_tail_ns=6))).measured == 7
    assert only_verdict(check_run(run, Requirements(max_tail_ns=7))).status == "passed"


EVERYTHING = Requirements(min_overlap=0.0, max_exposed_ns=1e18, max_tail_ns=1e18)


@pytest.mark.parametrize(
    ("ranks", "unknown", "reason"),
    [
        ([], "min overlap, max exposed, max tail", "no ranks"),
        ([a_rank(a_step(0, hidden=0))], "min overlap, max exposed, max tail", "nothing in this trace"),
        ([SOUND, a_rank(a_step(0, hidden=0))], "min overlap, max exposed, max tail", "nothing in this trace"),
        ([GRAPHS], "min overlap, max exposed, max tail", "CUDA graphs"),
        ([a_rank(a_step(40, host=None))], "max exposed, max tail", "--step-range"),
        ([a_rank(a_step(0), a_step(0), comm=200)], "max exposed, max tail", "belongs to no step"),
        ([a_rank(a_step(40), a_step(40, tail=None))], "max tail", "--backward-range"),
    ],
)
def test_what_is_not_known_fails_the_widest_limit(ranks: list[RankOverlap], unknown: str, reason: str) -> None:
    check = check_run(a_run(*ranks), EVERYTHING)
    assert not check.passed
    missing = [verdict for verdict in check.verdicts if verdict.status == "unknown"]
    assert ", ".join(verdict.requirement for verdict in missing) == unknown
    assert all(verdict.measured is None and reason in verdict.reason for verdict in missing)


def test_a_rank_that_fails_is_said_rather_than_one_unknown() -> None:
    run = a_run(a_rank(a_step(0, hidden=0)), a_rank(a_step(90), number=1))
    verdict = only_verdict(check_run(run, Requirements(max_exposed_ns=80)))
    assert (verdict.status, verdict.rank.rank) == ("failed", 1)


def test_steps_that_only_accumulate_do_not_lower_the_median() -> None:
    quiet = a_step(0, hidden=0)
    run = a_run(a_rank(quiet, quiet, quiet, a_step(90)))
    assert only_verdict(check_run(run, Requirements(max_exposed_ns=10))).measured == 90


def test_nothing_required_is_not_passed() -> None:
    assert not check_run(a_run(SOUND), Requirements()).passed


def test_a_drawn_trace_without_collectives_and_one_that_tells_nothing_fail() -> None:
    for trace in (draw_trace(launches={"main": "a"}, streams={7: "aaa"}), draw_trace(ranges={"step 0": "####"})):
        assert {verdict.status for verdict in check_run(measure_overlap(trace), EVERYTHING).verdicts} == {"unknown"}


def run_of(*times: int) -> TraceOverlap:
    """One rank with steps of these times, which expose as much."""
    return a_run(a_rank(*(a_step(time, host=time) for time in times)))


def against(baseline: TraceOverlap, run: TraceOverlap, max_regression: float = 0.05) -> tuple[GateResult, GateResult]:
    step_time, exposed = check_run(run, Requirements(baseline=baseline, max_regression=max_regression)).verdicts
    return step_time, exposed


OF_THREE = statistics._widen(3, 3)


def test_a_regression_beyond_limit_and_spread_fails() -> None:
    for verdict in against(run_of(99, 100, 101), run_of(109, 110, 111)):
        assert (verdict.status, verdict.measured, verdict.baseline) == ("failed", 110, 100)
        assert verdict.spread == pytest.approx(2**0.5 * OF_THREE), "of each run its whole range, 1 to either side"


def test_noise_within_the_spread_passes_and_says_so() -> None:
    for verdict in against(run_of(80, 100, 120), run_of(90, 110, 130)):
        assert (verdict.status, verdict.measured) == ("passed", 110)
        assert verdict.measured > verdict.limit
        assert "within both runs' spread" in verdict.reason


def test_where_every_second_step_takes_twice_as_long_the_mean_tells_it() -> None:
    """The median is that of either kind, and its interval holds both: such a run passed."""
    usual, doubled = range(100, 110), [length * (1 + step % 2) for step, length in enumerate(range(100, 110))]
    for verdict in against(run_of(*usual), run_of(*doubled)):
        assert (verdict.status, verdict.baseline, verdict.measured) == ("failed", 104.5, 157)
        assert verdict.reason.startswith("means of the steps")
    assert [verdict.status for verdict in against(run_of(*doubled), run_of(*doubled))] == ["passed", "passed"]


def test_a_step_or_two_that_take_long_are_no_regression_of_the_mean() -> None:
    usual = run_of(*range(100, 110))
    for long in ([400], [400, 400]):
        assert [one.status for one in against(usual, run_of(*range(100, 110 - len(long)), *long))] == ["passed"] * 2


def test_what_differs_by_less_than_the_limit_passes_however_sure_it_is() -> None:
    for verdict in against(run_of(100, 100, 100), run_of(104, 104, 104)):
        assert (verdict.status, verdict.reason, verdict.spread) == ("passed", "", 0)


def test_any_exposed_time_is_more_than_none() -> None:
    perfect = a_run(a_rank(*(a_step(0, host=100) for _ in range(3))))
    worse = a_run(a_rank(*(a_step(5, host=100) for _ in range(3))))
    assert [verdict.status for verdict in against(perfect, worse)] == ["passed", "failed"]
    assert [verdict.status for verdict in against(perfect, perfect)] == ["passed", "passed"]


def test_more_ranks_do_not_make_steps_surer() -> None:
    two = run_of(80, 100, 120)
    two = replace(two, ranks=two.ranks * 2)
    (verdict, _) = against(two, two)
    assert verdict.spread == pytest.approx(2**0.5 * 20 * OF_THREE), "that of three steps"


@pytest.mark.parametrize(
    ("baseline", "run", "reason"),
    [
        (run_of(1, 1), run_of(1, 1, 1), "baseline: fewer than 3 steps"),
        (run_of(1, 1, 1), run_of(1, 1), "fewer than 3 steps"),
        (run_of(1, 1, 1), a_run(SOUND, a_rank(a_step(1, host=None), number=1)), "--step-range"),
        (a_run(), run_of(1, 1, 1), "baseline: fewer than 3 steps"),
        (a_run(SOUND, device="cpu"), a_run(SOUND), "a run on cuda cannot be compared with one on cpu"),
    ],
)
def test_what_cannot_be_compared_fails(baseline: TraceOverlap, run: TraceOverlap, reason: str) -> None:
    for verdict in against(baseline, run, max_regression=0.99):
        assert verdict.status == "unknown"
        assert reason in verdict.reason


def test_a_step_is_timed_where_its_communication_is_not_known() -> None:
    assert [verdict.status for verdict in against(a_run(GRAPHS), a_run(GRAPHS))] == ["passed", "unknown"]


steps = st.builds(
    a_step,
    st.integers(0, 100),
    hidden=st.integers(0, 100),
    host=st.none() | st.integers(1, 200),
    tail=st.none() | st.integers(0, 100),
    idle=st.sampled_from([0, 0, 0, None]),
)
ranks = st.lists(steps, max_size=6).map(lambda item: a_rank(*item))
run_results = st.lists(ranks, max_size=3).map(lambda item: a_run(*item))
shares, lengths = st.floats(0, 1), st.integers(0, 200)


@given(run_results, run_results, shares, shares, lengths, lengths, lengths, lengths, shares, shares)
def test_a_tighter_limit_never_turns_a_failure_into_a_pass(
    run: TraceOverlap, baseline: TraceOverlap, a: float, b: float, c: int, d: int, e: int, f: int, g: float, h: float
) -> None:
    loose = Requirements(min(a, b), max(c, d), max(e, f), baseline, max(g, h))
    tight = Requirements(max(a, b), min(c, d), min(e, f), baseline, min(g, h))
    for before, after in zip(check_run(run, loose).verdicts, check_run(run, tight).verdicts, strict=True):
        assert before.requirement == after.requirement
        assert before.status == "passed" or after.status != "passed"
        assert before.status != "unknown" or before.reason


@given(run_results, run_results)
def test_only_what_is_known_passes(run: TraceOverlap, baseline: TraceOverlap) -> None:
    for verdict in check_run(run, Requirements(0.0, 10**9, 10**9, baseline, 0.99)).verdicts:
        if verdict.status == "passed":
            assert verdict.measured is not None
            assert run.ranks


@pytest.mark.parametrize(
    ("world_size", "status", "measured"), [(1, "passed", 1), (2, "failed", 1), (None, "unknown", None)]
)
def test_every_rank_can_be_required(world_size: int | None, status: str, measured: int | None) -> None:
    run = replace(a_run(SOUND), world_size=world_size)
    verdict = only_verdict(check_run(run, Requirements(all_ranks=True)))
    assert (verdict.status, verdict.measured, verdict.limit) == (status, measured, world_size)


def test_the_median_hides_bad_steps_that_a_percentile_shows() -> None:
    run = run_of(*[10] * 6, *[900] * 5)
    assert only_verdict(check_run(run, Requirements(max_exposed_ns=100))).status == "passed"
    for percentile, name in ((90, "max exposed, percentile 90 of steps"), (100, "max exposed, worst step")):
        verdict = only_verdict(check_run(run, Requirements(max_exposed_ns=100, percentile=percentile)))
        assert (verdict.requirement, verdict.measured, verdict.status) == (name, 900, "failed")


def test_a_percentile_is_called_as_it_was_asked_for() -> None:
    verdict = only_verdict(check_run(run_of(1, 2, 3), Requirements(max_exposed_ns=9, percentile=99.9)))
    assert verdict.requirement == "max exposed, percentile 99.9 of steps"


def test_one_rank_given_twice_or_by_two_devices_is_one_rank() -> None:
    twice = replace(a_run(a_rank(a_step(1)), a_rank(a_step(1))), world_size=2)
    verdict = only_verdict(check_run(twice, Requirements(all_ranks=True)))
    assert (verdict.measured, verdict.limit, verdict.status) == (1, 2, "failed")


def test_ranks_without_numbers_are_not_counted() -> None:
    nameless = replace(a_run(*(replace(a_rank(a_step(1)), rank=None) for _ in range(2))), world_size=2)
    verdict = only_verdict(check_run(nameless, Requirements(all_ranks=True)))
    assert (verdict.status, verdict.reason) == ("unknown", "the traces do not tell which process is which rank")


def test_a_baseline_of_another_job_is_no_baseline() -> None:
    ours, run = a_manifest(), run_of(1, 1, 1)

    def differences(**changed: object) -> tuple[str, ...]:
        return find_differences(run, run, ours, replace(ours, **changed))

    assert differences(variant="naive", bucket_size_mb=None) == ()
    found = differences(model_size="xl", world_size=4, machine={"gpus": "H100"})
    assert found == (f"model {ours.model_size} and xl", f"ranks {ours.world_size} and 4", "GPUs none and H100")
    verdicts = check_run(run, Requirements(baseline=run, incomparable=found)).verdicts
    assert {verdict.status for verdict in verdicts} == {"unknown"}
    assert "not comparable with the baseline: model" in verdicts[0].reason


def test_what_the_traces_say_counts_where_no_manifest_does() -> None:
    small = replace(
        a_run(*(replace(a_rank(a_step(1), number=rank), gpu="Tesla V100") for rank in (0, 1))), world_size=2
    )
    large = replace(small, world_size=8, ranks=tuple(replace(rank, gpu="NVIDIA A100") for rank in small.ranks))
    assert find_differences(small, large) == ("ranks 2 and 8", "GPUs Tesla V100 and NVIDIA A100")
    assert find_differences(small, small) == ()
    unnamed = replace(large, world_size=None, ranks=(large.ranks[0], replace(large.ranks[1], gpu=None)))
    assert find_differences(small, unnamed) == (), "of one GPU nothing is known, nor how many ranks there are"
    told = a_manifest()
    assert find_differences(small, large, told, replace(told, world_size=8)) == (
        "ranks 2 and 8",
        "GPUs Tesla V100 and NVIDIA A100",
    ), "each difference once"


def a_manifest() -> Manifest:
    manifest = load_manifest(Path(__file__).parents[3] / "traces" / "overlap.run.json")
    assert manifest is not None
    return replace(manifest, machine={})


@pytest.mark.parametrize(("limit", "status"), [(6 * US, "failed"), (10 * US, "passed")])
def test_a_limit_on_blocking_is_put_to_what_stood_still(tmp_path: Path, limit: int, status: str) -> None:
    run = blocked_run(tmp_path)
    verdict = only_verdict(check_run(run, Requirements(max_blocking_ns=limit)))
    assert (verdict.requirement, verdict.measured, verdict.status) == ("max blocking", 10 * US, status)


def test_a_limit_on_blocking_is_not_met_where_no_waits_are_known(tmp_path: Path) -> None:
    run = blocked_run(tmp_path, has_event_records=False)
    verdict = only_verdict(check_run(run, Requirements(max_blocking_ns=9 * US)))
    assert (verdict.measured, verdict.status) == (None, "unknown")
    assert "--cuda-event-trace" in verdict.reason


def test_a_limit_on_blocking_is_met_where_launches_tell_that_no_more_blocks(tmp_path: Path) -> None:
    run = blocked_run(tmp_path, has_event_records=False)
    verdict = only_verdict(check_run(run, Requirements(max_blocking_ns=10 * US)))
    assert (verdict.measured, verdict.status) == (10 * US, "passed")
    assert "upper limit" in verdict.reason


@pytest.mark.parametrize(
    ("hosts", "limit", "reason"),
    [(0, 10, ""), (3, 10, "own waits for collectives cost is not included (3)"), (3, 9, "")],
)
def test_a_met_limit_on_blocking_says_that_the_host_waits_too(
    tmp_path: Path, hosts: int, limit: int, reason: str
) -> None:
    run = blocked_run(tmp_path)
    coverage = [replace(rank.dependencies, host_waits=hosts) for rank in run.ranks if rank.dependencies]
    ranks = tuple(replace(rank, dependencies=found) for rank, found in zip(run.ranks, coverage, strict=True))
    verdict = only_verdict(check_run(replace(run, ranks=ranks), Requirements(max_blocking_ns=limit * US)))
    assert reason in verdict.reason
    assert bool(verdict.reason) == bool(reason)


def blocked_run(tmp_path: Path, **settings: bool) -> TraceOverlap:
    """A step of 30 us in which a copy waits 10 us for an all-reduce."""
    capture = bucket_steps(20, **settings)
    return measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", capture, "2023.4")))
