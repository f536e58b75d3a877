"""How ``annotate.instrument`` is called: lists are taken, mistakes are said, the program's own errors stay clean."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_prof import annotate
from tests.forked_python import run_python

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def warned(*arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        annotate.instrument(*arguments).remove()
    return [str(each.message) for each in caught]


def test_lists_of_models_and_optimizers_are_taken() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    recorder = annotate.Recorder()
    with annotate.only_sink(recorder):
        marks = annotate.instrument(models, optimizers)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        marks.remove()
    phases = [each.text for each in recorder.ranges if not each.text.startswith("process")]
    assert phases == ["forward", "backward", "optimizer"] * 2


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.usefixtures("_group")
def test_what_is_marked_twice_has_each_range_once(is_wrapped: bool) -> None:
    """By two calls, or by a list that names it twice; and again after the marks were taken off."""
    inner = nn.Linear(2, 2)
    model = DistributedDataParallel(inner) if is_wrapped else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        recorder = annotate.Recorder()
        with annotate.only_sink(recorder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            marks = [annotate.instrument(model, optimizer), annotate.instrument([model, model], [optimizer, optimizer])]
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        for one in marks:
            one.remove()
        phases = [each.text for each in recorder.ranges if each.text in ("forward", "backward", "optimizer")]
        assert phases == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("arguments", ["optimizer first", "a model as optimizer", "a class", "neither"])
def test_what_is_no_model_or_optimizer_is_refused(arguments: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, tuple[Any, ...]] = {
        "optimizer first": (optimizer,),
        "a model as optimizer": (model, model),
        "a class": (model, torch.optim.SGD),
        "neither": ([model, 1],),
    }
    with pytest.raises(TypeError, match=r"instrument\(model, optimizer\)"):
        annotate.instrument(*given[arguments])


@pytest.mark.usefixtures("_group")
def test_an_order_that_leaves_buckets_unmarked_is_said_once() -> None:
    inner = nn.Linear(2, 2)
    (before,) = warned(inner)
    ddp = DistributedDataParallel(inner)
    (inside,) = warned(ddp.module)
    (late,) = warned()
    assert "a Linear that nothing wraps" in before
    assert "the module inside a DistributedDataParallel" in inside
    assert "is there already" in late
    assert warned(ddp) == []


def test_marks_set_before_there_is_a_group_are_found_inside_ddp() -> None:
    model = nn.Linear(2, 2)
    marks = annotate.instrument(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp(torch.ones(1, 2))
    marks.remove()
    dist.destroy_process_group()
    assert ["inside a DistributedDataParallel" in str(each.message) for each in caught] == [True]


def _without_checkout(said: str) -> str:
    """What was said without the folder of the checkout, where the environment is, too: many call it ddp_prof."""
    return said.replace(str(ROOT), "")


FAILS = """
import threading, torch
from ddp_prof import annotate
model = torch.nn.Linear(2, 2)
annotate.instrument(model)
def fail(gradient):
    raise ValueError("the program's own")
def train():
    output = model(torch.ones(1, 2))
    output.register_hook(fail)
    output.sum().backward()
%s
"""


@pytest.mark.parametrize("where", ["train()", "one = threading.Thread(target=train); one.start(); one.join()"])
def test_a_traceback_holds_no_frame_of_the_marks(where: str) -> None:
    done = run_python(FAILS % where)
    assert "ValueError: the program's own" in done.stderr
    assert "ddp_prof" not in _without_checkout(done.stderr), done.stderr
    assert "in backward" in done.stderr  # torch's frames are still there


WARNS = """
import ddp_prof, os, warnings, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.amp import GradScaler

def warn_in(owner, name):
    original = getattr(owner, name)
    def warning(*args, **kwargs):
        warnings.warn(name, DeprecationWarning, stacklevel=2)
        return original(*args, **kwargs)
    setattr(owner, name, warning)

PLACES = [(DDP, "__init__"), (DDP, "register_comm_hook"), (torch.autograd, "backward"), (torch, "compile")]
for owner, name in [*PLACES, (GradScaler, "step")]:
    warn_in(owner, name)
START
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = DDP(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    torch.compile(model)
    GradScaler("cpu", enabled=False).step(optimizer)
ours = os.path.dirname(ddp_prof.__file__)
print(sorted((str(each.message), each.filename == __file__) for each in caught
             if each.filename.startswith((ours, __file__))))
"""
STARTS = {
    "instrument": "from ddp_prof import annotate; annotate.instrument()",
    "capture": "from ddp_prof.annotate import unattended; unattended.start()",
}


@pytest.mark.parametrize("how", STARTS)
def test_a_warning_of_torch_names_the_line_of_the_program(how: str, tmp_path: Path) -> None:
    """Of ``broadcast_buffers=False``, which torch deprecates, a line of ddp_prof was warned."""
    program = tmp_path / "train.py"
    program.write_text(WARNS.replace("START", STARTS[how]))
    done = run_python(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    names = ["__init__", "backward", "compile", "register_comm_hook", "step"]
    assert done.stdout.splitlines()[-1:] == [str([(name, True) for name in names])], done.stderr


COMPILED = """
import itertools, json, torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from ddp_prof import annotate
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def train(marks, order, how):
    torch._dynamo.reset()
    counters.clear()
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)))
    recorder = annotate.Recorder()
    def mark(model):
        if marks == "marked":
            annotate.instrument(model, torch.optim.SGD(ddp.parameters(), lr=0.1))
    with annotate.only_sink(recorder):
        if order == "before":
            mark(ddp)
        if how == "in place":
            ddp.compile(backend="eager")
            compiled = ddp
        else:
            compiled = torch.compile(ddp, backend="eager")
        if order == "after":
            mark(compiled)
        for _ in range(3):
            compiled(torch.ones(2, 4)).sum().backward()
    names = [each.text for each in recorder.ranges]
    return sum(counters["graph_break"].values()), counters["frames"]["total"], names.count("forward")

def train_compiled():
    # A step that is compiled as a whole: passes and steps of optimizers are marked, too.
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = annotate.Recorder()
    annotate.instrument(model, optimizer)
    def step(samples):
        model(samples).sum().backward()
        optimizer.step()
    compiled = torch.compile(step, backend="eager")
    with annotate.only_sink(recorder):
        for _ in range(3):
            compiled(torch.ones(2, 4))
    names = [each.text for each in recorder.ranges]
    return names.count("backward"), names.count("optimizer")

train("plain", "before", "in place")  # what is compiled first in a program counts more frames
cases = itertools.product(("plain", "marked"), ("before", "after"), ("in place", "as a module"))
print(json.dumps([*((case, train(*case)) for case in cases), (["a step"], train_compiled())]))
"""


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[tuple[str, ...], list[int]], str]:
    """Of each case the graph breaks, the frames and the marked forwards; and what one program of all cases said."""
    done = run_python(COMPILED)
    return {tuple(case): counts for case, counts in json.loads(done.stdout)}, done.stderr


@pytest.mark.parametrize("how", ["in place", "as a module"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_marks_are_not_compiled(compiled: tuple[dict[tuple[str, ...], list[int]], str], order: str, how: str) -> None:
    """Dynamo sees as many frames and graph breaks as without marks, says nothing of them, and forward is marked."""
    counts, said = compiled
    assert counts["plain", order, how][1] > 0, "something was compiled"
    assert counts["marked", order, how] == [*counts["plain", order, how][:2], 3]
    assert "ddp_prof" not in _without_checkout(said)


def test_marks_of_a_step_that_is_compiled_as_a_whole_are_not_compiled(
    compiled: tuple[dict[tuple[str, ...], list[int]], str],
) -> None:
    """Dynamo warned of what it cannot compile of them, and compiled three times as many frames."""
    counts, said = compiled
    assert counts["a step",] == [3, 3], "passes and steps are marked"
    assert "Dynamo does not know how to trace" not in said
    assert "nvtx" not in said


# Marks all that is made later, as ddp-prof capture does under nsys, and compiles a DDP in the expression that makes it.
COMPILED_AT_ONCE = """
import os, sys, warnings
os.environ["NSYS_PROFILING_SESSION_ID"] = "1"
warnings.simplefilter("ignore")
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddp_prof import annotate
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch._dynamo.config.optimize_ddp = eval(sys.argv[1])
recorder = annotate.Recorder()
annotate.instrument()
model = torch.compile(DistributedDataParallel(torch.nn.Linear(4, 4)), backend="aot_eager")
with annotate.only_sink(recorder):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
names = [each.text.partition("|")[0] for each in recorder.ranges]
print(names.count("forward"), names.count("backward"), names.count("all_reduce"))
"""


@pytest.mark.parametrize(
    ("optimize_ddp", "marked"),
    [("True", "3 3 3"), ("False", "3 3 3"), ("'python_reducer'", "3 3 0")],
)
def test_a_ddp_that_is_compiled_where_it_is_made_is_marked(optimize_ddp: str, marked: str) -> None:
    """The forward and the only bucket of each of three steps; torch's reducer in Python trains on, and has none."""
    assert run_python(COMPILED_AT_ONCE, optimize_ddp).stdout == f"{marked}\n"
