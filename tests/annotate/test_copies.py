"""A marked model is copied, pickled and deleted as one without marks; copies have none, and need no ddp_prof."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_prof import annotate
from ddp_prof.annotate import bucket_marks
from tests.ddp.gloo_ranks import run_ranks

WAYS = {"copied": copy.copy, "deeply copied": copy.deepcopy, "pickled": lambda one: pickle.loads(pickle.dumps(one))}
HOOKS: dict[str, Any] = {"none": None, "its own": allreduce_hook}
PROFILERS = {"none": None, "nsys": "1"}
HERE = [(hook, profiler) for hook in HOOKS for profiler in PROFILERS]


def phases_of(model: nn.Module, recorder: annotate.Recorder) -> list[str]:
    """What a forward and a backward of the model mark, but for the backward, which any model's is."""
    before = len(recorder.ranges)
    model(torch.ones(4, 8)).sum().backward()
    return sorted({each.text.partition("|")[0] for each in recorder.ranges[before:]} - {"backward", "process"})


def treat(hook: str, profiler: str) -> dict[str, Any]:
    """What becomes of a DDP that is marked as any that is made."""
    found: dict[str, Any] = {}
    recorder = annotate.Recorder()
    with pytest.MonkeyPatch.context() as patch, annotate.only_sink(recorder):
        if PROFILERS[profiler]:
            patch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        marks = annotate.instrument()
        ddp: Any = DistributedDataParallel(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if HOOKS[hook]:
            ddp.register_comm_hook(None, HOOKS[hook])
        found["itself"] = phases_of(ddp, recorder)
        optimizer.step()
        for way, taken in WAYS.items():
            copied = taken(ddp)
            assert all(map(torch.equal, copied.parameters(), ddp.parameters()))
            found[way] = phases_of(copied, recorder)
        found["names us"] = b"ddp_prof." in pickle.dumps(ddp)
        copied.register_comm_hook(None, allreduce_hook)
        found["counts as marked"] = bucket_marks.BucketMarks.of(copied) is not None
        left = [weakref.ref(one) for one in (ddp, ddp.module, optimizer)]
        del ddp, optimizer, copied
        gc.collect()
        found["left"] = [one() is not None for one in left]
        marks.remove()
    return found


def treat_all(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {one: treat(*one) for one in HERE}


@pytest.fixture(scope="module")
def found() -> Any:
    return run_ranks(treat_all, world=1)[0]


@pytest.mark.parametrize("way", ["deeply copied", "pickled"])
@pytest.mark.parametrize("one", HERE)
def test_a_copy_of_a_marked_ddp_trains_without_marks(found: Any, one: tuple[str, str], way: str) -> None:
    """Under capture ``torch.save(ddp)`` and ``deepcopy(ddp)`` ended a program that works without it."""
    assert found[one][way] == []
    assert "forward" in found[one]["itself"]
    assert not found[one]["counts as marked"]
    assert not found[one]["names us"], "whoever loads it needs ddp_prof"


@pytest.mark.parametrize("one", HERE)
def test_what_the_program_deletes_is_gone_though_it_was_marked(found: Any, one: tuple[str, str]) -> None:
    """A DDP per epoch kept the buckets of all epochs in memory."""
    assert found[one]["left"] == [False] * 3


def test_a_marked_module_is_pickled_without_marks() -> None:
    recorder = annotate.Recorder()
    model = nn.Linear(8, 8)
    with annotate.only_sink(recorder):
        marks = annotate.instrument(model)
        assert "forward" in phases_of(model, recorder)
        for way in ("deeply copied", "pickled"):
            assert phases_of(WAYS[way](model), recorder) == []
        assert b"ddp_prof." not in pickle.dumps(model)
        marks.remove()
        assert phases_of(model, recorder) == []
    assert not [name for name in vars(model) if "ddp_prof" in name]
