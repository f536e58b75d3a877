"""Waiting time is the host's on a CPU and the device's on a GPU; with a stand-in for a GPU's queue."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ddp_prof.ddp.base import CommunicationClock

GPU = torch.device("cuda", 0)


class FakeQueue:
    """A GPU's stream: the milliseconds of what was queued; the host goes on at once."""

    def __init__(self) -> None:
        self.queued_ms = 0.0

    def compute(self, milliseconds: float) -> None:
        self.queued_ms += milliseconds


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.reached_ms = 0.0
        self.is_synchronized = False

    def record(self, queue: FakeQueue) -> None:
        self.reached_ms = queue.queued_ms

    def synchronize(self) -> None:
        self.is_synchronized = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.is_synchronized, "an event is read before it is reached"
        return later.reached_ms - self.reached_ms


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    fake = FakeQueue()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return fake


def test_queued_compute_is_not_counted_as_communication(queue: FakeQueue) -> None:
    clock = CommunicationClock()
    queue.compute(300)  # of backward, not done when the last bucket is launched
    clock.start(GPU)
    queue.compute(3)  # the stream waits for the collective
    clock.stop(GPU)
    queue.compute(50)  # the optimizer
    assert clock.seconds() == pytest.approx(0.003)


def test_on_a_cpu_it_is_the_time_of_the_host() -> None:
    clock = CommunicationClock()
    begin = time.perf_counter()
    clock.start(torch.device("cpu"))
    time.sleep(0.02)
    clock.stop(torch.device("cpu"))
    assert 0.02 <= clock.seconds() <= time.perf_counter() - begin


def test_a_clock_that_was_never_started_shows_zero() -> None:
    answer: Any = CommunicationClock().seconds()
    assert answer == 0
