"""Threads that take calls in turns."""

from __future__ import annotations

import threading

import pytest

from ddp_prof import threads
from ddp_prof.threads import in_thread, in_threads


@pytest.mark.parametrize("cores", [1, 2])
def test_calls_are_taken_in_their_order_by_a_thread_per_core(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the first ``cores`` calls returns before all of these have begun, so each has a thread."""
    monkeypatch.setattr(threads, "count_cores", lambda: cores)
    begun, together = list[int](), threading.Barrier(cores)

    def call(number: int) -> tuple[int, threading.Thread]:
        begun.append(number)
        if number < cores:
            together.wait()
        return number, threading.current_thread()

    results = [future.result() for future in in_threads(*(lambda number=one: call(number) for one in range(4)))]
    assert [number for number, _ in results] == [0, 1, 2, 3]
    assert len({thread for _, thread in results}) <= cores
    assert begun[cores:] == [*range(cores, 4)]
    assert all(thread.daemon for _, thread in results), "the end of the program does not wait for them"


def test_what_a_call_raises_is_raised_by_its_future_and_stops_no_other_call() -> None:
    def fail() -> None:
        raise IndexError("mine")

    failed, done = in_threads(fail, lambda: 1, most=1)
    with pytest.raises(IndexError, match="mine"):
        failed.result()
    assert done.result() == 1
    with pytest.raises(IndexError, match="mine"):
        in_thread(fail).result()
