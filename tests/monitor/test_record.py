"""What the record of a measurement says of its steps, from traces of known truth."""

from __future__ import annotations

from pathlib import Path

from ddp_prof.monitor.gate import check_log
from ddp_prof.monitor.log import load_log
from ddp_prof.monitor.record import Part, make_record
from ddp_prof.monitor.report import monitor_view
from ddp_prof.runs.report import LoadOptions, measure_report
from ddp_prof.runs.run import SUMMARY
from tests.monitor.records import write_log
from tests.nsys_factory import STEP_NS, US, Kernel, Range, bucket_steps, write_capture


def measure_one_of_four_steps_that_communicates(folder: Path) -> Part:
    """What rank 0 measures: a step of 80 us that exposes 60, and three micro-batches of 10."""
    capture = bucket_steps(70)
    capture.ranges[0].end = 2 * STEP_NS
    for step in (1, 2, 3):
        at = 2 * STEP_NS + 10 * US * (step - 1)
        capture.ranges.append(Range(f"step {step}", at, at + 10 * US, 100))
        capture.kernels.append(Kernel("forward", at + 1 * US, at + 9 * US, at, 100, number=100 + step))
    trace = write_capture(folder / "step00000010.rank0.sqlite", capture)
    measured = {trace: measure_report(trace, LoadOptions(one_run=True, use_cache=False), SUMMARY)}
    return Part(0, "host", 0, None, (), None, measured)


def test_a_gain_is_a_share_of_the_steps_that_communicate(tmp_path: Path) -> None:
    """It said: "hiding all of it gains at most 600 %"."""
    part = measure_one_of_four_steps_that_communicates(tmp_path)
    record = make_record({"step": 10, "world": 1, "limits": {}}, [part])
    assert (record["step_ns"], record["schedule_gain_ns"]) == (10 * US, 60 * US)
    assert record["text"] == (
        "step 10; 10.0 µs a step; 80.0 µs in the 1 of 4 steps that communicate: communication 70.0 µs, of which "
        "60.0 µs exposed; hiding all of it gains at most 75 % of these"
    )
    (row,) = monitor_view(load_log(write_log(tmp_path, [record]))).rows
    assert row["gain_at_most_%"] == 75


def test_a_limit_that_the_known_ranks_meet_is_not_passed_without_the_others(tmp_path: Path) -> None:
    """Rank 1 of 2 has no result: its log said "passed", and ``ddp-prof check`` of that log "unknown"."""
    failed = Part(1, "host", 0, None, (), "the disk is full", {})
    parts = [measure_one_of_four_steps_that_communicates(tmp_path), failed]
    limits = {"max_exposed_ms": 1, "min_overlap": 0.5}
    record = make_record({"step": 10, "world": 2, "limits": limits}, parts)
    reason = "the known ranks meet the limit; not known of rank 1, which has no result"
    assert {one["requirement"]: (one["status"], one["reason"]) for one in record["limits"]} == {
        "max exposed": ("unknown", reason), "min overlap": ("failed", ""),
    }  # fmt: skip
    assert f"max exposed cannot be judged: {reason}" in record["failed"]
    view, passed = check_log(load_log(write_log(tmp_path, [record])), {"max_exposed_ns": 1e6, "min_overlap": 0.5})
    assert not passed
    assert view.document is not None
    assert [one["status"] for one in view.document["verdicts"]] == ["unknown", "failed"]
