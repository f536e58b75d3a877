"""Ranges that cross threads, as they are added to Kineto JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.ddp.annotate import Recorded
from ddp_prof.train.recording.profiler import IN_FLIGHT_LANE, GlooBarrier, in_flight_events, rank_path
from tests.ddp.gloo_ranks import run_ranks

BASE = 1_790_857_026_000_000_000
QUARTER = 7_900_000_000_000_000  # ns: Kineto's base moves on every three months


def complete(events: list[dict[str, object]]) -> list[dict[str, object]]:
    return [event for event in events if event["ph"] == "X"]


@given(st.integers(0, QUARTER), st.integers(0, 10**12))
def test_times_are_exact_to_the_nanosecond(start_ns: int, duration_ns: int) -> None:
    span = Recorded("all_reduce|bucket=0", BASE + start_ns, BASE + start_ns + duration_ns, 7, True)
    (event,) = complete(json.loads(json.dumps(in_flight_events([span], BASE, 42))))
    assert round(float(str(event["ts"])) * 1000) == start_ns
    assert round(float(str(event["dur"])) * 1000) == duration_ns
    assert (event["name"], event["pid"], event["cat"], event["args"]) == (
        "all_reduce|bucket=0",
        42,
        "user_annotation",
        {"thread": 7},
    )


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=20))
def test_ranges_in_a_lane_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    recorded = [Recorded("r", BASE + start, BASE + start + length, 1, True) for start, length in spans]
    events = in_flight_events(recorded, BASE, 1)
    ends: dict[object, float] = {}
    for event in complete(events):
        assert float(str(event["ts"])) >= ends.get(event["tid"], 0.0) - 1e-9
        ends[event["tid"]] = float(str(event["ts"])) + float(str(event["dur"]))
    named = {event["tid"] for event in events if event["ph"] == "M"}
    assert named == set(ends) == {IN_FLIGHT_LANE + lane for lane in range(len(ends))}
    assert len(complete(events)) == len(spans)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a/naive.json.gz", "a/naive.rank1.json.gz"), ("b_2.5mb.json", "b_2.5mb.rank1.json")],
)
def test_each_rank_has_a_file(path: str, expected: str) -> None:
    assert rank_path(Path(path), 1) == Path(expected)


def wait_for_a_rank_that_does_not_come(rank: int) -> float:
    meet = GlooBarrier(torch.device("cpu"), timeout_s=1.0)
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            meet()
    else:
        time.sleep(3)
    return time.monotonic() - begin


def test_ranks_wait_for_each_other_no_longer_than_the_user_said() -> None:
    """Groups that are made with no word on it wait for half an hour."""
    assert run_ranks(wait_for_a_rank_that_does_not_come)[0] < 3
