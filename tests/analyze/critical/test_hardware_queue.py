"""Which operations a common queue of all streams held up, and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.critical.critical_path import COMMON_QUEUE, find_rank_work
from ddp_prof.analyze.critical.hardware_queue import find_held_ns
from ddp_prof.analyze.critical.what_if import _replay
from tests.analyze.contended_device import US, Program, run, trace_of


def of_program(*, one_queue: bool, behind: int, transfers: tuple[int, ...]) -> RankEvents:
    """Eight kernels of 30 us in backward, with an all-reduce for each equal part of them."""
    program = Program(
        kappas=(1.0, 1.0),
        forward=(30 * US,),
        backward=(30 * US,) * 8,
        transfers=(tuple(one * US for one in transfers),),
        pace=(1.0,),
        behind=behind,
        one_queue=one_queue,
    )
    (rank,) = find_rank_events(trace_of(run(program)[0], 0, 1))
    return rank


LATE = {"behind": 3, "transfers": (50, 50)}
"""The first bucket is full after kernel 4, and launched after kernel 7."""
LONG = {"behind": 0, "transfers": (200, 50, 50, 50)}
"""The second bucket is full after kernel 4, when the first is reduced for 60 us already. Kernel 5 is launched next."""


@pytest.mark.parametrize(
    ("one_queue", "program", "collectives", "kernels"),
    [
        (True, LATE, [60, 0], 0),  # until kernel 7 begins
        (True, LONG, [0, 0, 0, 0], 140),  # until the first bucket is reduced, and the second begins
        (False, LATE, [0, 0], 0),
        (False, LONG, [0, 0, 0, 0], 0),
    ],
)
def test_what_was_launched_before_holds_up(
    one_queue: bool, program: dict[str, Any], collectives: list[int], kernels: int
) -> None:
    rank = of_program(one_queue=one_queue, **program)
    work = rank.work
    held_ns = find_held_ns(work, *(getattr(rank.dependencies(), name)[work.activity] for name in ("stream", "place")))
    assert held_ns[work.is_collective].tolist() == [one * US for one in collectives]
    assert held_ns[~work.is_collective].sum() == kernels * US
    found = find_rank_work(rank)
    assert (COMMON_QUEUE in found.left_out) == any(collectives)


@pytest.mark.parametrize("program", [LATE, LONG])
def test_a_replay_with_the_queue_gives_the_recorded_times(program: dict[str, Any]) -> None:
    replay = find_rank_work(of_program(one_queue=True, **program)).replay
    assert replay is not None
    recorded = replay.times.time_ns
    np.testing.assert_array_equal(_replay(replay, 0, np.arange(len(recorded)), 0.0), recorded)
