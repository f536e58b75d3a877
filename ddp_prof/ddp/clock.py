"""Times the wait for gradients: by the host's clock where the host waits, by CUDA events where the device does."""

from __future__ import annotations

import time

import torch


class CommunicationClock:
    """The time from :meth:`start` to :meth:`stop`.

    On a GPU both are events of the current stream. The first is reached when the compute queued before it is done, the
    second when the stream has waited for the collectives: between them lies communication that nothing hides. The
    host's clock would only see how long it takes to queue them.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._begin = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def start(self, device: torch.device) -> None:
        """Begin to time; the events are on the current stream of ``device``."""
        if device.type == "cuda":
            self._events = _timing_event(), _timing_event()
            self._events[0].record(torch.cuda.current_stream(device))
        self._begin = time.perf_counter()

    def stop(self, device: torch.device) -> None:
        """End what :meth:`start` began."""
        self._seconds = time.perf_counter() - self._begin
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(device))

    def seconds(self) -> float:
        """The last time taken. Waits for the device where it is the device's."""
        if self._events is None:
            return self._seconds
        begin, end = self._events
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's omission
