"""Signals that ask a process to end: the first one is told, and all others interrupt nothing, even those beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddp_prof import signals
from ddp_prof.signals import (
    STOPPING,
    Interruption,
    Stopped,
    handle_signals,
    handle_stopping,
    stop_on_signals,
    wait_for_end,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    handle_signals(before)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python could only print to stderr."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


def send_at_once(*numbers: signal.Signals) -> None:
    """Let Python note all of them before it calls the handler of the first, as on a busy machine.

    They are sent to this thread: another one of the process might take a signal so late that the test is over.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def stopped_by(block: Callable[[], None]) -> int:
    """The number of the signal that stops a block."""
    with pytest.raises(Stopped) as stopped, stop_on_signals():
        block()
    return stopped.value.number


def test_signals_that_come_together_stop_the_program_once_and_print_nothing(unraisable: list[Any]) -> None:
    cleaned = []

    def block() -> None:
        try:
            send_at_once(*STOPPING)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append("all of it")

    assert stopped_by(block) in STOPPING
    assert cleaned == ["all of it"]
    assert unraisable == []
    assert {signal.getsignal(number) for number in STOPPING} == {signal.SIG_IGN}, "also while Python ends"


def test_the_first_signal_is_told() -> None:
    def block() -> None:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGINT)

    assert stopped_by(block) == signal.SIGHUP


def test_what_is_ignored_in_the_background_stays_ignored() -> None:
    handle_signals(dict.fromkeys(STOPPING, signal.SIG_IGN))
    with stop_on_signals():
        send_at_once(*STOPPING)
    assert {signal.getsignal(number) for number in STOPPING} == {signal.SIG_IGN}


def test_a_further_signal_interrupts_what_still_runs_after_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now_s[0])
    interruption = Interruption()
    handle_stopping(interruption.handle)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    now_s[0] += signals.CLEAN_UP_S / 2
    signal.raise_signal(signal.SIGINT)  # does nothing
    now_s[0] += signals.CLEAN_UP_S
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interruption.number == signal.SIGTERM, "the first one is told"


def test_a_child_is_waited_for_though_a_signal_has_left_the_lock_of_its_popen_taken() -> None:
    """As by a handler that raises between ``acquire`` and ``try``: a stopped capture waited for ever."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    lock: Any = vars(child)["_waitpid_lock"]
    lock.acquire()
    wait_for_end(child)
    assert child.wait() == 3
    wait_for_end(child)
