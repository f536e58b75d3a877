"""All-reduces counted and timed from their ranges."""

from __future__ import annotations

import pytest

from ddp_prof import annotate
from ddp_prof.annotate import Recorded, Recorder
from ddp_prof.manifest import MessageTimes
from ddp_prof.train.record import MessageLog


def test_only_all_reduces_are_noted_and_nobody_else_hears_of_them() -> None:
    log, profiler = MessageLog(lambda: None), Recorder()
    with annotate.only_sink(profiler):
        with annotate.only_sink(log), annotate.step(0), annotate.forward():
            span = annotate.start_all_reduce(0, 4096, 1)
            annotate.start_synchronize().end()
            span.end()
            span.end()
        with annotate.backward():
            pass
    assert [row.bytes for row in log.summarize()] == [4096]
    assert [range_.text for range_ in profiler.ranges] == ["backward"]


def test_ranges_that_are_off_are_off_again_afterwards() -> None:
    log = MessageLog(lambda: None)
    annotate.enable(False)
    try:
        with annotate.only_sink(log):
            annotate.start_all_reduce(0, 1, 1).end()
        assert not annotate.is_enabled()
    finally:
        annotate.enable()
    assert [row.calls for row in log.summarize()] == [1]


def test_what_the_device_did_before_is_not_part_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_ns = [50, 10]  # for what was computed before, for the message
    now_ns = 0

    def wait_for_device() -> None:
        nonlocal now_ns
        now_ns += waits_ns.pop(0)

    monkeypatch.setattr("ddp_prof.annotate.ranges.time.perf_counter_ns", lambda: now_ns)
    log = MessageLog(wait_for_device)
    token = log.start("all_reduce|bucket=0|bytes=8|params=1")
    log.end(token)
    assert log.summarize() == (MessageTimes(8, 1, 10, 10),)


def test_a_row_a_size() -> None:
    log = MessageLog(lambda: None)
    assert log.summarize() == ()
    log.ranges = [
        Recorded(f"all_reduce|bucket=0|bytes={size}|params=1", 7, 7 + duration_ns, 1, True)
        for size, duration_ns in ((8, 30), (8, 10), (4, 5), (8, 20))
    ]
    assert log.summarize() == (MessageTimes(4, 1, 5, 5), MessageTimes(8, 3, 20, 10))
