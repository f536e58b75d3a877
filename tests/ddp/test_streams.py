"""Launches wait for gradients that were copied on other CUDA streams; with stand-ins for streams and events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_prof.ddp.buckets import StreamFence, hold_for_current_stream

GPU = torch.device("cuda", 0)


class FakeGpu:
    """Streams are names; what each has queued is a list."""

    def __init__(self) -> None:
        self.current = FakeStream("main")

    def on(self, name: str) -> None:
        self.current = FakeStream(name)


class FakeStream:
    waited: list[tuple[str, Any]]

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append((self.name, event.recorded_on))


class FakeEvent:
    recorded_on: list[str]

    def __init__(self) -> None:
        self.recorded_on = []

    def record(self, stream: FakeStream) -> None:
        self.recorded_on.append(stream.name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return fake


def test_a_launch_waits_for_the_last_copy_of_each_other_stream(gpu: FakeGpu) -> None:
    fence = StreamFence()
    for name in ("left", "right", "left", "main"):
        gpu.on(name)
        fence.note(GPU)
    fence.wait(GPU)
    assert gpu.current.waited == [("main", ["left", "left"]), ("main", ["right"])]


def test_on_one_stream_nothing_waits(gpu: FakeGpu) -> None:
    fence = StreamFence()
    fence.note(GPU)
    fence.note(GPU)
    fence.wait(GPU)
    assert gpu.current.waited == []


def test_a_cpu_has_no_streams(gpu: FakeGpu) -> None:
    fence = StreamFence()
    fence.note(torch.device("cpu"))
    fence.wait(torch.device("cpu"))
    assert gpu.current.waited == []


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_tensor_of_another_stream_is_held_for_the_current_one(gpu: FakeGpu, is_cuda: bool) -> None:
    held: list[str] = []

    class Tensor:
        device = GPU

        def record_stream(self, stream: FakeStream) -> None:
            held.append(stream.name)

    tensor: Any = Tensor()
    tensor.is_cuda = is_cuda
    gpu.on("right")
    hold_for_current_stream(tensor)
    assert held == ["right"] * is_cuda
