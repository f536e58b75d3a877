"""Orders a launch after work that was queued on several CUDA streams.

Autograd runs the hook of a parameter on the stream on which its layer ran. A collective waits only for the stream that
is current where it is launched, which is that of the bucket's last gradient: the copies on other streams need events.
"""

from __future__ import annotations

import torch


class StreamFence:
    """Remembers, of each stream, the last work that was noted; :meth:`wait` orders the current stream after all."""

    def __init__(self) -> None:
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self, device: torch.device) -> None:
        """Note what was queued up to now on the current stream of ``device``; nothing where it has no streams."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if stream not in self._events:
            self._events[stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's omission
        self._events[stream].record(stream)

    def wait(self, device: torch.device) -> None:
        """Make the current stream of ``device`` wait for what was noted on other streams; the host does not wait."""
        if not self._events:
            return
        current = torch.cuda.current_stream(device)
        for stream, event in self._events.items():
            if stream != current:
                current.wait_event(event)


def hold_for_current_stream(tensor: torch.Tensor) -> None:
    """Let the memory of a tensor of another stream live until the current stream has used it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
