"""The fluid of a step, drawn and computed by hand; and the closed form of the course."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddp_prof.analyze.what_if.simulate import LinkTimes, StepModel, simulate


def step(ready: list[float], backward: float, copies: list[float] | None = None, rest: float = 0.0) -> StepModel:
    """One step, whose gradients have 1 byte each."""
    copy = copies or [0.0] * len(ready)
    row = np.array([ready], float), np.array([backward], float), np.array([copy], float), np.array([rest], float)
    return StepModel(np.ones(len(ready), np.int64), *row)


def length(model: StepModel, buckets: list[list[int]], overhead: float, per_byte: float, slowed: float = 0.0) -> float:
    (found,) = simulate(model, buckets, LinkTimes(overhead, per_byte), slowed)
    return float(found)


def test_each_collective_waits_for_its_gradients_and_for_the_one_before() -> None:
    """
    compute      aaaabbbbcccc...rr
    collectives      111111         ready at 4, 8, 12; each takes 3
                 ....111.222.333
    """
    assert length(step([4, 8, 12], 12, rest=2), [[0], [1], [2]], 0, 3) == 17
    # Each takes 6: 4-10, 10-16, 16-22.
    assert length(step([4, 8, 12], 12, rest=2), [[0], [1], [2]], 0, 6) == 24
    # All in one: 12-21.
    assert length(step([4, 8, 12], 12, rest=2), [[0, 1, 2]], 0, 3) == 23


def test_backward_is_slowed_beside_a_collective() -> None:
    """
    compute      aaaaBBBBBBcc.      b, c are 8 of work: at half speed for 4, 2 of it are done
    collectives      1111           then 6 alone
    """
    assert length(step([4], 12), [[0]], 4, 0, slowed=0.5) == 4 + 4 + 6
    # A collective that outlasts backward: 8 of work take 16, the collective ends at 24.
    assert length(step([4], 12), [[0]], 20, 0, slowed=0.5) == 24


def test_copies_out_of_a_bucket_wait_for_it_and_hide_the_next_collective() -> None:
    """
    compute      aaaaa|1111222       bucket 1 ends at 5, bucket 2 at 8: copied at 9
    collectives  ..111222
    """
    model = step([2, 5], 5, copies=[4, 3])
    assert length(model, [[0], [1]], 0, 3) == 12
    assert length(model.without_copies(), [[0], [1]], 0, 3) == 8
    # Beside the second one, until 8, copies go on at half speed, too; backward ended at 2 + 3 / 0.5 -> 8.
    assert length(model, [[0], [1]], 0, 3, slowed=0.5) == pytest.approx(2 + 3 + 1.5 + 3 + 2.5 + 3)


def test_gradients_may_share_a_bucket_in_any_order() -> None:
    model = step([4, 8, 12], 12)
    assert length(model, [[0, 2], [1]], 0, 1) == 12 + 2 + 1, "the second one is launched after the first"


@pytest.mark.parametrize(("size", "bandwidth", "overhead"), [(8e9, 100.0, 20_000.0), (1.6e9, 25.0, 64_000.0)])
def test_the_closed_form_of_the_course(size: float, bandwidth: float, overhead: float) -> None:
    """Equal segments of backward, each as long as its transfer: s / (n w) + n o is left, least for sqrt(s o w)."""

    def left(count: int) -> float:
        segment = size / count / bandwidth
        ready = np.cumsum(np.full((1, count), segment), axis=1)
        nothing = np.zeros((1, count)), np.zeros(1)
        backward = ready[:, -1]
        model = StepModel(np.full(count, round(size / count), np.int64), ready, backward, *nothing)
        link = LinkTimes(overhead, 1 / bandwidth)
        (found,) = simulate(model, [[at] for at in range(count)], link, slowed=0.0)
        return float(found - backward[0])

    counts = [count for count in range(1, 401) if size % count == 0]
    for count in counts:
        assert left(count) == pytest.approx(size / (count * bandwidth) + count * overhead, rel=1e-9)
    best = math.sqrt(size * overhead * bandwidth)
    nearest = min(counts, key=lambda count: abs(math.log(size / count / best)))
    assert min(counts, key=left) == nearest


def test_two_thousand_settings_are_many_steps_at_once() -> None:
    """Each row is a step of its own."""
    one, other = step([4, 8], 9, rest=1), step([3, 9], 10, rest=2)
    both = StepModel(
        one.bytes,
        *(
            np.concatenate([getattr(one, name), getattr(other, name)])
            for name in ("ready_ns", "backward_ns", "copy_ns", "rest_ns")
        ),
    )
    found = simulate(both, [[0], [1]], LinkTimes(1, 2), 0.25)
    assert found.tolist() == [length(one, [[0], [1]], 1, 2, 0.25), length(other, [[0], [1]], 1, 2, 0.25)]


def test_backward_may_end_beside_the_last_collective_and_copies_begin_then() -> None:
    #  compute      aaBBBBbbbbCCCCCCCC1111111111111111 22      capitals at half speed; copies of 10 and of 2
    #  collectives    1111    22222222222222222222
    model = StepModel(
        bytes=np.array([4, 20]),
        ready_ns=np.array([[2.0, 8.0]]),
        backward_ns=np.array([12.0]),
        copy_ns=np.array([[10.0, 2.0]]),
        rest_ns=np.array([0.0]),
    )
    # Bucket 1 is sent from 2 to 6; bucket 2 is ready at 10, as 2 of its work were done beside that, and sent until 30.
    # Backward ends at 18; 6 of the copies of bucket 1 are done by 30, and all by 34.
    assert simulate(model, [[0], [1]], LinkTimes(0.0, 1.0), 0.5).tolist() == [36.0]
