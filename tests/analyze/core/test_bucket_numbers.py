"""Which buckets DDP's own all-reduces are, where a range before backward tells how large those are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.core.attribution import find_collective_ranges
from ddp_prof.analyze.core.steps import find_phases
from ddp_prof.trace import UNKNOWN, CollectiveCalls
from tests.drawing import PID, draw_trace

ONE, OTHER = "buckets|bytes=10,20|others=0", "buckets|bytes=30,40|others=0"
THREE = "buckets|bytes=30,40,50|others=0"
N = UNKNOWN


@pytest.mark.parametrize(
    ("told", "backward", "reduces", "expected"),
    [
        # One all-reduce per bucket, told once for all passes, or before each.
        ({ONE: "#..................."}, "..######....######..", "...##.##.....#..#...", [0, 1, 0, 1]),
        ({ONE: "#.........#........."}, "..######....######..", "...##.##.....#..#...", [0, 1, 0, 1]),
        # Each model's are told before its own pass.
        ({ONE: "#...................", OTHER: "..........#........."}, "..######....######..", "...##.##.....#..#...",
         [0, 1, 0, 1]),
        # Both forward passes came before both backward passes: nobody knows which is which.
        ({ONE: "#...................", OTHER: ".#.................."}, "..######....######..", "...##.##.....#..#...",
         [N, N, N, N]),
        # But if they have different numbers of buckets, it is known.
        ({ONE: "#...................", THREE: ".#.................."}, "..######....######..", "..#.#.#......#..#...",
         [0, 1, 2, 0, 1]),
        # A pass of another number of all-reduces is another model's.
        ({ONE: "#..................."}, "..######....######..", "...##.##.....#......", [0, 1, N]),
        # Before it is told, and outside of backward.
        ({ONE: "........#..........."}, "..######....######..", ".#.##.##.#...#..#..#", [N, N, N, N, 0, 1, N]),
        # What follows the buckets.
        ({"buckets|bytes=10|others=1": "#..................."}, "..######....######..", "...##.##.....#..#...",
         [0, N, 0, N]),
        # What no number of 64 bits holds is no size.
        ({"buckets|bytes=10,9300000000000000000|others=1": "#..................."}, "..######....######..",
         "...##.##.....#..#...", [0, N, 0, N]),
        ({"buckets|bytes=,x|others=1": "#..................."}, "..######............", "...#.#..............", [N, N]),
    ],
)  # fmt: skip
def test_buckets_are_numbered_in_the_order_of_launch(
    told: dict[str, str], backward: str, reduces: str, expected: list[int]
) -> None:
    trace = draw_trace(ranges={**told, "backward": backward, "gloo:all_reduce": reduces})
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert found.bucket.tolist() == expected


def test_an_all_reduce_launched_before_backward_is_no_bucket() -> None:
    """``join()`` launches two in forward, which a busy machine takes up in backward."""
    launches_ns = np.array([0, 3, 5])
    trace = draw_trace(ranges={ONE: "#.........", "backward": "..######..", "gloo:all_reduce": "...#.#.#.."})
    name_id = np.full(3, len(trace.names))
    is_gloo = trace.spans.name_id == trace.names.index("gloo:all_reduce")
    trace = replace(
        trace,
        spans=replace(trace.spans, lane=np.where(is_gloo, 7, trace.spans.lane)),
        names=(*trace.names, "c10d::allreduce_"),
        collective_calls=CollectiveCalls(launches_ns, name_id),
    )
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert found.bucket.tolist() == [N, 0, 1]


def test_sizes_are_those_of_the_model_that_was_told_last() -> None:
    trace = draw_trace(
        ranges={ONE: "#.........", OTHER: ".....#....", "backward": "..###..###", "gloo:all_reduce": "..#.#..#.#"}
    )
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert found.bytes.tolist() == [10, 20, 30, 40]


def test_the_size_of_what_follows_the_buckets_is_known_where_the_range_tells_it() -> None:
    trace = draw_trace(
        ranges={
            "buckets|bytes=10|others=1|other_bytes=4": "#.........",
            "backward": "..#######.",
            "gloo:all_reduce": "...##.#...",
        }
    )
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert list(zip(found.bucket.tolist(), found.bytes.tolist(), strict=True)) == [(0, 10), (N, 4)]


def test_a_broadcast_is_no_bucket() -> None:
    trace = draw_trace(
        ranges={
            ONE: "#.........",
            "backward": "..#######.",
            "gloo:all_reduce": "..#...#...",
            "gloo:broadcast": "....#.....",
        }
    )
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert sorted(zip(found.start_ns.tolist(), found.bucket.tolist(), strict=True)) == [(2, 0), (4, UNKNOWN), (6, 1)]


def test_the_range_of_the_sizes_names_the_group_of_the_buckets() -> None:
    sizes = "buckets|bytes=10,20|others=0|group=1 [0, 2]|ranks=2"
    trace = draw_trace(ranges={sizes: "#.........", "backward": "..######..", "gloo:all_reduce": "...#.#...#"})
    found = find_collective_ranges(trace, PID, find_phases(trace, PID))
    assert found.named_by.tolist() == [trace.names.index(sizes)] * 2 + [UNKNOWN], "the last one is no bucket"
    assert found.group_size.tolist() == [2, 2, UNKNOWN]
