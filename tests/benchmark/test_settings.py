from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_prof.benchmark.settings import Setting, SettingSummary, status_text, summarize_settings
from ddp_prof.benchmark.store import FAILED, OUT_OF_MEMORY
from tests.benchmark.results_factory import MS, OTHER_ENVIRONMENT, Sweep, study_like


def by_label(sweep: Sweep):
    return {one.setting.label: one for one in summaries(sweep)}


def summaries(sweep: Sweep) -> list[SettingSummary]:
    return [one for of_testbed in summarize_settings(sweep.results()).values() for one in of_testbed]


def test_a_setting_is_the_median_over_its_runs_of_the_medians_of_their_steps() -> None:
    sweep = Sweep(noise=0, repeats=1)
    for step_ms in (100, 130, 104):
        sweep.add("naive", step_ms, 40)
        environment, run, steps, messages = sweep.runs.pop()
        run = replace(run, id=f"r{step_ms}", repeat=len(sweep.runs))
        sweep.runs.append((environment, run, [replace(step, run=run.id) for step in steps], messages))
    (found,) = summaries(sweep)
    assert found.step_ns.value == pytest.approx(104 * MS)
    assert sorted(found.step_ns.medians.values()) == pytest.approx([100 * MS, 104 * MS, 130 * MS])
    assert found.runs == 3


def test_the_two_ways_to_time_communication_are_kept_apart() -> None:
    sweep = Sweep(noise=0)
    sweep.add("naive", 100, 60, synchronized_ms=40)
    (found,) = summaries(sweep)
    assert found.communication_ns.value == pytest.approx(60 * MS)
    assert found.synchronized_ns.value == pytest.approx(40 * MS)
    assert found.backward_ns.value == pytest.approx(30 * MS, rel=0.01)


def test_what_ran_out_of_memory_is_a_row() -> None:
    sweep = Sweep()
    sweep.add("naive", 100, 50)
    sweep.fail("flat")
    sweep.fail("overlap", FAILED)
    found = by_label(sweep)
    assert [found[key].status for key in ("naive", "flat", "overlap")] == ["ok", OUT_OF_MEMORY, FAILED]
    assert (found["flat"].step_ns, found["flat"].runs, found["flat"].failed_runs) == (None, 0, 3)
    assert found["flat"].reason == "it needs 9 GB"
    assert len(summarize_settings(sweep.results())) == 1, "a run that died early tells no device"


def test_a_run_that_failed_once_does_not_hide_the_others() -> None:
    sweep = Sweep(noise=0)
    sweep.add("naive", 100, 50)
    sweep.repeats = 1
    sweep.fail("naive")
    (found,) = summaries(sweep)
    assert (found.status, found.runs, found.failed_runs, found.reason) == ("ok", 3, 1, "it needs 9 GB")
    assert status_text(found) == "ok, 1 of 4 runs failed"


def test_speedups_are_over_naive_of_the_same_work() -> None:
    sweep = Sweep(noise=0)
    for work, base in (((2, 64), 100), ((4, 64), 300)):
        sweep.add("naive", base, 50, work=work)
        sweep.add("overlap", base / 2, 20, work=work)
    sweep.add("torch", 70, 20, work=(8, 64))
    found = summaries(sweep)
    speedups = {(value.setting.variant, value.setting.local_batch_size): value.speedup for value in found}
    assert speedups["overlap", 2].value == pytest.approx(2)
    assert speedups["overlap", 4].value == pytest.approx(2)
    assert (speedups["naive", 2].value, speedups["naive", 2].half_width) == (1, 0)
    assert speedups["torch", 8] is None
    assert found[1].communication_speedup.value == pytest.approx(2.5)


def test_environments_models_and_worlds_are_testbeds_of_their_own() -> None:
    sweep = Sweep(noise=0)
    sweep.add("naive", 100, 50)
    sweep.add("flat", 50, 20, model_size="small")
    sweep.environment = OTHER_ENVIRONMENT
    sweep.add("overlap", 20, 5)
    found = by_label(sweep)
    assert len(summarize_settings(sweep.results())) == 3
    assert (found["flat"].speedup, found["overlap"].speedup) == (None, None)


def test_three_runs_tell_their_range_by_students_t_and_two_nothing() -> None:
    halves = {}
    for repeats in (2, 3):
        sweep = Sweep(noise=0.1, repeats=repeats)
        sweep.add("naive", 100, 50)
        (found,) = summaries(sweep)
        halves[repeats] = found.step_ns.half_width
        medians = found.step_ns.medians.values()
    short, middle, long = sorted(medians)
    half, centre = 2.6887 * (long - short) / 2, (short + long) / 2  # from the median to the farther end
    assert halves == {2: None, 3: pytest.approx(half + abs(middle - centre), rel=1e-3)}


def test_figures_by_other_definitions_are_a_testbed_of_their_own() -> None:
    sweep = Sweep(noise=0)
    sweep.add("naive", 100, 50)
    sweep.add("flat", 50, 20, definitions=1)
    found = by_label(sweep)
    assert [len(of_testbed) for of_testbed in summarize_settings(sweep.results()).values()] == [1, 1]
    assert found["flat"].speedup is None, "it is not compared with naive by today's definitions"


def test_settings_come_by_work_as_the_story_goes_and_buckets_by_size() -> None:
    sweep = study_like()
    sweep.runs.reverse()
    found = [one.setting for one in summaries(sweep)][:7]
    assert [value.label for value in found] == [
        "naive", "flat", "overlap", "bucketed 1 MiB", "bucketed 10 MiB", "bucketed 100 MiB", "torch",
    ]  # fmt: skip
    assert found[0] == Setting("naive", None, 2, 64)


def test_captures_give_medians() -> None:
    sweep = Sweep(noise=0, repeats=1)
    for index, exposed in enumerate((10, 30)):
        sweep.add("naive", 100, 50, trace_comm_ns=60, trace_overlapped_ns=5, trace_exposed_ns=exposed, repeat=index)
        environment, run, *_ = sweep.runs.pop()
        sweep.runs.append((environment, replace(run, id=f"r{index}"), [], []))
    (found,) = summaries(sweep)
    assert (found.trace.captures, found.trace.exposed_ns, found.trace.tail_ns) == (2, 20.0, None)
