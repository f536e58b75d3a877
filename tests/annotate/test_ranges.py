"""Ranges: where they go, when they end, and that they can be switched off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_prof import annotate
from ddp_prof.annotate import Recorder, process_groups
from ddp_prof.ddp import collective
from ddp_prof.range_names import parse_range
from tests import forked_python


def record(*, on: bool = True) -> tuple[Recorder, annotate.OpenRange]:
    recorder = Recorder()
    with annotate.only_sink(recorder):
        annotate.enable(on)
        try:
            with annotate.process(rank=1, world=2, variant="flat", backend="gloo", device="cpu"):
                with annotate.step(0, warmup=True), annotate.forward():
                    pass
                with annotate.step(4):
                    with annotate.backward():
                        in_flight = annotate.start_all_reduce(bucket=3, bytes=1048576, params=2)
                    with annotate.synchronize():
                        pass
                    with annotate.optimizer():
                        pass
        finally:
            annotate.enable()
    return recorder, in_flight


def test_names_follow_the_grammar() -> None:
    recorder, in_flight = record()
    in_flight.end()
    assert [range_.text for range_ in recorder.ranges] == [
        "forward",
        "step|index=0|warmup=1",
        "backward",
        "synchronize",
        "optimizer",
        "step|index=4",
        "process|rank=1|world=2|variant=flat|backend=gloo|device=cpu",
        "all_reduce|bucket=3|bytes=1048576|params=2",
    ]
    assert parse_range(recorder.ranges[-1].text).fields == {"bucket": 3, "bytes": 1048576, "params": 2}
    assert [range_.is_start_end for range_ in recorder.ranges] == [False] * 7 + [True]


def test_times_are_those_of_the_hosts_clock_and_nest() -> None:
    before = time.perf_counter_ns()
    recorder, _ = record()
    after = time.perf_counter_ns()
    process = recorder.ranges[-1]
    assert all(process.start_ns <= range_.start_ns <= range_.end_ns <= process.end_ns for range_ in recorder.ranges)
    assert before <= process.start_ns <= process.end_ns <= after


def test_an_open_range_ends_once_on_any_thread() -> None:
    recorder, in_flight = record()
    launched_by = threading.get_native_id()
    ending = threading.Thread(target=in_flight.end)
    ending.start()
    ending.join()
    in_flight.end()
    in_flight.end("a future, as Future.add_done_callback passes it")
    found = [range_ for range_ in recorder.ranges if range_.is_start_end]
    assert len(found) == 1
    assert found[0].thread == launched_by


def test_many_threads_ending_one_range_end_it_once() -> None:
    recorder = Recorder()
    with annotate.only_sink(recorder):
        spans = [annotate.start_synchronize() for _ in range(200)]
    threads = [threading.Thread(target=lambda: [item.end() for item in spans]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.ranges) == 200


def test_switched_off_nothing_is_recorded() -> None:
    recorder, in_flight = record(on=False)
    in_flight.end()
    assert recorder.ranges == []


def test_a_range_opened_before_the_switch_still_closes() -> None:
    recorder = Recorder()
    with annotate.only_sink(recorder):
        with annotate.forward():
            annotate.enable(False)
        annotate.enable()
        with annotate.backward():
            pass
    assert [range_.text for range_ in recorder.ranges] == ["forward", "backward"]


def test_a_recorder_hears_nothing_after_it_was_removed() -> None:
    recorder, _ = record()
    count = len(recorder.ranges)
    with annotate.forward():
        pass
    assert len(recorder.ranges) == count


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


def test_the_environment_switches_ranges_off() -> None:
    code = "from ddp_prof import annotate; print(annotate.is_enabled())"
    assert run_python(code, DDP_PROF_RANGES="0") == "False"


def test_nvtx_need_not_be_installed() -> None:
    code = """
import sys
for name in [name for name in sys.modules if name.startswith("ddp_prof")]:
    del sys.modules[name]
sys.modules["nvtx"] = None
from ddp_prof import annotate
from ddp_prof.ddp import collective
with annotate.forward():
    annotate.start_all_reduce(0, 1, 1).end()
print(annotate.is_enabled())
"""
    done = forked_python.run_python(code)
    assert done.stdout.strip() == str(torch.backends.cuda.is_built()), (
        done.stderr
    )  # a torch with CUDA has NVTX of its own


@pytest.mark.parametrize(
    ("is_cuda", "backend", "ends_by_itself"),
    [(False, "gloo", True), (True, "gloo", True), (True, "nccl", False)],
)
def test_a_collective_on_the_host_ends_its_range_itself(
    is_cuda: bool, backend: str, ends_by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's do, also with tensors of a GPU; when NCCL's are done, the device knows."""
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    monkeypatch.setattr(collective.dist, "all_reduce", lambda *_, **__: SimpleNamespace(get_future=lambda: done))
    monkeypatch.setattr(collective.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(collective, "name_group", lambda group: {"group": "0"})
    tensor: Any = SimpleNamespace(nbytes=4, is_cuda=is_cuda)
    recorder = Recorder()
    with annotate.only_sink(recorder):
        collective.launch_all_reduce(tensor, None, bucket=0, params=1)
    assert len(recorder.ranges) == ends_by_itself


def test_ranks_that_share_a_gpu_say_so_in_their_range() -> None:
    recorder = Recorder()
    said = {"rank": 0, "world": 2, "variant": "flat", "backend": "nccl", "device": "cuda"}
    with annotate.only_sink(recorder):
        with annotate.process(**said, ranks_per_gpu=2):  # type: ignore[arg-type]
            pass
        with annotate.process(**said):  # type: ignore[arg-type]
            pass
    assert [parse_range(range_.text).fields for range_ in recorder.ranges] == [said | {"ranks_per_gpu": 2}, said]


@pytest.mark.parametrize(
    ("is_cuda", "backend", "op"),
    [(False, "gloo", "SUM"), (True, "gloo", "SUM"), (True, "nccl", "AVG"), (False, "cpu:gloo,cuda:nccl", "SUM")],
)
def test_nccl_averages_within_the_collective(
    is_cuda: bool, backend: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(collective, "name_group", lambda group: {"group": "0"})
    tensor: Any = SimpleNamespace(is_cuda=is_cuda)
    assert process_groups.average_op(tensor, None) == getattr(process_groups.dist.ReduceOp, op)


def test_warm_up_is_counted_over_the_run_not_over_each_epoch() -> None:
    by_number, by_itself = annotate.Recorder(), annotate.Recorder()
    with annotate.only_sink(by_number):
        for _epoch in range(2):
            for index in range(3):
                with annotate.step(index, warmup=index < 2):
                    pass
    with annotate.only_sink(by_itself):
        for _step in range(4):
            with annotate.step():
                pass
    marked = [f"step|index={index}{'|warmup=1' * (index < 2)}" for index in range(4)]
    assert [each.text for each in by_itself.ranges] == marked
    assert [each.text for each in by_number.ranges] == [*marked[:3], *(f"step|index={index}" for index in range(3))]


@pytest.mark.parametrize("index", ["3", 1.5])
def test_a_number_of_a_step_that_is_no_int_is_told(index: Any) -> None:
    """A text was an error about ``>``; a step 1.5 was marked, and had no number for whoever read it."""
    with pytest.raises(TypeError, match=f"annotate.step takes the number of the step, and {index!r} is no int"):
        annotate.step(index)
