"""What ``ddp-prof capture`` starts in a program: it records, and the program ends as it would."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing.util
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

import ddp_prof as dp
from tests.forked_python import run_python

IN_A_THREAD = """
import os, sys, threading, torch
import torch.distributed as dist
from ddp_prof.annotate import unattended
unattended.start()
ended, trained = threading.Event(), threading.Event()
model = torch.nn.Linear(8, 8)
if sys.argv[1] == "is given DDP":
    store = dist.FileStore(os.environ["DDP_PROF_TRACE"] + ".store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(model)

def train():
    optimizer = torch.optim.SGD(model.parameters())
    try:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    finally:
        trained.set()  # also after an error, which else the test would wait for until its time is up
    if sys.argv[1] == "goes on":
        ended.wait()

thread = threading.Thread(target=train, daemon=True)
thread.start()
trained.wait()
if sys.argv[1] != "goes on":
    thread.join()
"""


@pytest.mark.torch
@pytest.mark.parametrize("thread", ["ends", "goes on", "is given DDP"])
def test_a_program_that_trains_in_a_thread(thread: str, tmp_path: Path) -> None:
    """As Ray Train's does: it ended by a segmentation fault, or nothing of the thread was recorded."""
    done = run_python(IN_A_THREAD, thread, to_the_end=thread == "goes on", DDP_PROF_TRACE=str(tmp_path / "x"))
    assert done.returncode == 0, done.stderr
    (run,) = dp.load_runs(tmp_path / "x.rank0.json.gz")
    (rank,) = run.overlap().ranks
    # In the second pass of DDP ranks agree on its buckets: its step is warm-up, too.
    assert [step.step for step in rank.marked_steps] == ([2] if thread == "is given DDP" else [1, 2])
    events = json.loads(gzip.decompress((tmp_path / "x.rank0.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["name"] == "AddmmBackward0" for event in events) == 3


def _profile_itself(trace: str, steps: str, rank: int, world: int, directory: str) -> bool:
    """Train four steps, and record a fifth by a torch.profiler of the program; return whether it is told that."""
    import torch

    from ddp_prof.annotate import unattended

    os.environ |= {"DDP_PROF_TRACE": trace, "DDP_PROF_STEPS": steps}
    sys.stderr = told = io.StringIO()
    unattended.start()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())

    def train(count: int) -> None:
        for _ in range(count):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    train(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(1)
    multiprocessing.util._exit_function()
    return "torch.profiler" in told.getvalue()


@pytest.mark.torch
@pytest.mark.parametrize(("steps", "is_recorded"), [("1:3", True), ("1:9", False), ("6:9", False)])
def test_a_profiler_of_the_program_ends_what_is_not_yet_written(steps: str, is_recorded: bool, tmp_path: Path) -> None:
    """A program whose steps 1 and 2 were recorded, and which profiled itself later, was told to read its own files."""
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    assert fork_ranks(partial(_profile_itself, str(tmp_path / "x"), steps), 1) == [not is_recorded]
    assert (tmp_path / "x.rank0.json.gz").exists() == is_recorded


def _emit(trace: str, rank: int, world: int, directory: str) -> str:
    """Train some steps under capture, of which the program emits two to ITT, one of them with that switched off."""
    import torch

    from ddp_prof.annotate import unattended

    os.environ["DDP_PROF_TRACE"] = trace
    sys.stderr = told = io.StringIO()
    unattended.start()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        with torch.autograd.profiler.emit_itt(step == 2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        if step == 1:
            assert not told.getvalue()
    multiprocessing.util._exit_function()
    return told.getvalue()


@pytest.mark.torch
def test_a_program_that_emits_ranges_is_left_to_it(tmp_path: Path) -> None:
    """Its trace was lost with a traceback at its end."""
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    (told,) = fork_ranks(partial(_emit, str(tmp_path / "x")), 1)
    assert told.count("\n") == 1
    assert "the program starts its own torch.profiler" in told


def _train_unseen(trace: str, rank: int, world: int, directory: str) -> bool:
    """Train a DDP whose forward calls no hooks, as none are called within a function that torch.compile compiled."""
    import torch
    import torch.distributed as dist

    from ddp_prof.annotate import unattended

    os.environ["DDP_PROF_TRACE"] = trace
    unattended.start()
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 1), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(6):
        model.forward(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    multiprocessing.util._exit_function()
    return True


@pytest.mark.torch
def test_the_step_in_which_ranks_agree_on_buckets_is_warm_up_though_no_forward_was_seen(tmp_path: Path) -> None:
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    assert fork_ranks(partial(_train_unseen, str(tmp_path / "x")), 1) == [True]
    (run,) = dp.load_runs(tmp_path / "x.rank0.json.gz")
    assert [step.step for step in run.overlap().ranks[0].marked_steps] == [2, 3, 4, 5]


WITH_A_FORK = """
import ctypes, os, sys, torch
from ddp_prof.annotate import unattended
unattended.start()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
sys.stdout.flush()
if not (fork := os.fork()):
    model(torch.ones(4, 8)).sum().backward()
    print("Python's")
    ctypes.CDLL(None).puts(b"C's")
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
"""


@pytest.mark.torch
def test_a_fork_of_a_program_that_is_recorded_ends(tmp_path: Path) -> None:
    """It waited for a thread of libkineto, and the program for it; what it has written arrives."""
    done = run_python(WITH_A_FORK, to_the_end=True, DDP_PROF_TRACE=str(tmp_path / "x"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["3", "C's", "Python's"]
    (run,) = dp.load_runs(tmp_path / "x.rank0.json.gz")
    assert [step.step for step in run.overlap().ranks[0].marked_steps] == [1, 2]


def _train(trace: str, steps: int, rank: int, world: int, directory: str) -> str:
    """Train by ``torch.autograd.grad`` under capture, without steps by ``backward``; return what is said."""
    import torch

    from ddp_prof.annotate import unattended

    os.environ |= {"DDP_PROF_TRACE": trace, "DDP_PROF_CAPTURE": ""}
    sys.stderr = told = io.StringIO()
    unattended.start()
    model = torch.nn.Linear(8, 8)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters)
    for _ in range(steps):
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(model(torch.ones(4, 8)).sum(), parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    if not steps:
        model(torch.ones(4, 8)).sum().backward()
    multiprocessing.util._exit_function()
    return told.getvalue()


@pytest.mark.torch
def test_an_evaluation_does_not_replace_the_trace_of_the_training_before_it(tmp_path: Path) -> None:
    """Both are rank 0 of one script: a trace without steps took the place of that of the training."""
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    def steps_after(steps: int) -> tuple[str, list[int | None]]:
        (said,) = fork_ranks(partial(_train, str(tmp_path / "x"), steps), 1)
        (run,) = dp.load_runs(tmp_path / "x.rank0.json.gz")
        (rank,) = run.overlap().ranks
        return said, [step.step for step in rank.marked_steps]

    assert steps_after(4) == ("", [1, 2, 3])
    said, steps = steps_after(0)
    assert "x.rank0.json.gz of an earlier process of rank 0 stays, as this process made no step" in said
    assert steps == [1, 2, 3]
    said, steps = steps_after(3)
    assert "is replaced by that of this process" in said
    assert steps == [1, 2]


WITHOUT_OPTIMIZER = """
import os, torch
import torch.distributed as dist
from ddp_prof.annotate import unattended
unattended.start()
store = dist.FileStore(os.environ["DDP_PROF_TRACE"] + ".store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(5):
    with model.no_sync():
        model(torch.ones(4, 8)).sum().backward()
    model(torch.ones(4, 8)).sum().backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None
"""


@pytest.mark.torch
def test_without_an_optimizer_a_step_begins_with_a_forward_that_synchronizes(tmp_path: Path) -> None:
    """Of the first DDP; the steps of its construction and of the agreement on its buckets are warm-up."""
    assert run_python(WITHOUT_OPTIMIZER, DDP_PROF_TRACE=str(tmp_path / "x")).returncode == 0
    (run,) = dp.load_runs(tmp_path / "x.rank0.json.gz")
    (rank,) = run.overlap().ranks
    assert [step.step for step in rank.marked_steps] == [2, 3]
    assert len({step.collectives for step in rank.marked_steps}) == 1


def _train_in(process: int, rank: int, world: int, directory: str) -> str:
    """Train under nsys in a Python that started in ``process``; return what is told."""
    import torch

    from ddp_prof.annotate import unattended

    os.environ.pop("DDP_PROF_TRACE", None)
    sys.modules["sitecustomize"] = cast(ModuleType, SimpleNamespace(PROCESS=process or os.getpid()))
    sys.stderr = told = io.StringIO()
    unattended.start()
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    return told.getvalue()


@pytest.mark.torch
@pytest.mark.parametrize("is_fork", [True, False])
def test_a_fork_under_nsys_is_told_that_nsys_records_none(is_fork: bool) -> None:
    """Of multiprocessing's fork and forkserver nothing arrived, and the package nvtx was blamed.

    ::

        nsys - python - fork - rank 0
                  |       |
               recorded  not recorded
    """
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    (told,) = fork_ranks(partial(_train_in, os.getpid() if is_fork else 0), 1)
    assert ("this process is a fork" in told) == is_fork
