"""Callbacks of trainers: by stand-ins of their interface, and by the real packages in the night."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof import annotate
from ddp_prof.annotate import ranges, steps
from ddp_prof.annotate.ranges import NestedRange
from ddp_prof.annotate.steps import CountedSteps

STEPS = 3
IN_A_STEP = {"backward", "optimizer"}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    module = ModuleType(name)
    setattr(module, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of two batches."""
    optimizer.zero_grad()
    for _ in range(2):
        with NestedRange("load"):
            batch = torch.ones(1, 4)
        model(batch).sum().backward()
    optimizer.step()


def check(recorder: annotate.Recorder, in_a_step: set[str] = IN_A_STEP) -> None:
    """A step lasts from one step of the optimizer to the next; the first is warm-up, the last not finished."""
    steps = [each for each in recorder.ranges if each.text.startswith("step|")]
    assert [each.text for each in steps] == [
        "step|index=0|warmup=1",
        *(f"step|index={index}" for index in range(1, STEPS)),
        f"step|index={STEPS}|unfinished=1",
        f"step|index={STEPS}",
    ]
    for step in steps[:STEPS]:
        inside = {
            each.text for each in recorder.ranges if step.start_ns <= each.start_ns and each.end_ns <= step.end_ns
        }
        assert inside >= in_a_step


def test_lightning_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "lightning.pytorch", "Callback")
    callback, recorder = annotate.lightning_callback(), annotate.Recorder()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    trainer = SimpleNamespace(model=model, optimizers=[optimizer])
    with annotate.only_sink(recorder):
        callback.on_train_start(trainer, model)
        for _ in range(STEPS):
            accumulate(model, optimizer)
        callback.on_train_end(trainer, model)
        marked = len(recorder.ranges)
        accumulate(model, optimizer)
    assert [each.text for each in recorder.ranges[marked:]] == ["load"] * 2
    assert sum(each.text == "forward" for each in recorder.ranges) == 2 * STEPS
    check(recorder, {"load", *IN_A_STEP})


def test_trainer_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback, recorder = annotate.trainer_callback(), annotate.Recorder()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with annotate.only_sink(recorder):
        callback.on_train_begin(None, None, None)
        for _ in range(STEPS):
            accumulate(model, optimizer)
        callback.on_train_end(None, None, None)
    check(recorder, {"load", *IN_A_STEP})


@pytest.mark.parametrize("trainer", ["lightning.pytorch", "transformers"])
def test_a_callback_leaves_steps_to_a_capture(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which counts the same ones: each is marked once."""
    stand_in(monkeypatch, trainer, "Callback" if "lightning" in trainer else "TrainerCallback")
    model, recorder = nn.Linear(4, 4), annotate.Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with annotate.only_sink(recorder):
        marks = annotate.instrument()
        capture = CountedSteps()
        capture.begin()
        if "lightning" in trainer:
            callback = annotate.lightning_callback()
            callback.on_train_start(SimpleNamespace(model=model, optimizers=[optimizer]), model)
        else:
            callback = annotate.trainer_callback()
            callback.on_train_begin(None, None, None)
        for _ in range(STEPS):
            accumulate(model, optimizer)
        callback.on_train_end(None, None, None)
        capture.stop()
        marks.remove()
    check(recorder)
    assert sum(each.text == "optimizer" for each in recorder.ranges) == STEPS


class Sending(torch.optim.Optimizer):
    """Steps by another optimizer and then sends parameters, as ``ZeroRedundancyOptimizer`` does."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.own = torch.optim.SGD(self.param_groups[0]["params"], **options)
        self.fails = False

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        self.own.step()
        with annotate.synchronize():
            if self.fails:
                raise RuntimeError("a rank has ended")


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_step_of_an_optimizer_that_calls_another_one_is_one_step(is_counted: bool) -> None:
    """What it sends after the other one's step was outside of the optimizer's range, and in the next step."""
    model, recorder = nn.Linear(4, 4), annotate.Recorder()
    optimizer = Sending(model.parameters(), lr=0.1)
    counted = CountedSteps()
    with annotate.only_sink(recorder):
        marks = annotate.instrument() if is_counted else annotate.instrument(model, [optimizer, optimizer.own])
        if is_counted:
            counted.begin()
        for optimizer.fails in (False, True, False, False):
            with suppress(RuntimeError):
                optimizer.step()
        counted.stop()
        marks.remove()
    found = sorted(recorder.ranges, key=lambda each: each.start_ns)
    sent = [each for each in found if each.text == "synchronize"]
    steps = [each for each in found if each.text == "optimizer"]
    assert len(sent) == len(steps) == 4
    for inner, outer in zip(sent, steps, strict=True):
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    if is_counted:
        assert counted.index == 3
        ends = [each.end_ns for each in found if each.text.startswith("step|") and each.is_start_end]
        assert ends[0] > sent[0].end_ns


def test_marks_keep_nothing_of_a_step_that_raised() -> None:
    """The frames around it were kept until the next step: after a lack of memory, their tensors could not be freed."""
    kept: list[weakref.ref[torch.Tensor]] = []

    class Failing(torch.optim.SGD):
        def step(self, _closure: object = None) -> None:  # type: ignore[override]
            raise MemoryError

    def train(optimizer: torch.optim.Optimizer) -> None:
        activations = torch.ones(4)
        kept.append(weakref.ref(activations))
        optimizer.step()

    counted, marks = CountedSteps(), annotate.instrument()
    with suppress(MemoryError):
        train(Failing([nn.Parameter(torch.ones(1))], lr=0.1))
    assert kept[0]() is None
    counted.stop()
    marks.remove()


def test_a_step_lasts_until_the_next_one_also_where_nsys_takes_its_time_for_a_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvtx registers each new name, which took up to 14 ms: that time lay between two steps, and in none of them.

    ::

        step 2   |----------------|
        register             ***
        step 3                    |-------------
    """
    called: list[tuple[str, str]] = []

    class Domain:
        @lru_cache  # noqa: B019  # as nvtx's
        def get_registered_string(self, text: str) -> None:
            called.append(("register", text))

    domain = Domain()

    def start(text: str, *_: object) -> str:
        domain.get_registered_string(text)
        called.append(("start", text))
        return text

    fake = SimpleNamespace(
        annotate=lambda text, *_: domain.get_registered_string(text),
        start_range=start, end_range=lambda text: called.append(("end", text)),
        push_range=lambda *_: None, pop_range=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(ranges, "nvtx", fake)
    optimizer, counted = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), CountedSteps()
    with annotate.only_sink(ranges.NvtxSink()):
        counted.begin()
        optimizer.step()
        optimizer.step()
        counted.stop()
    assert called[-7:] == [
        ("register", "step|index=1"), ("end", "step|index=0|warmup=1"), ("start", "step|index=1"),
        ("register", "step|index=2"), ("end", "step|index=1"), ("start", "step|index=2"),
        ("end", "step|index=2"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_a_scaler_leaves_out_counts(is_fused: bool) -> None:
    """It was part of the next one, which seemed to take twice as long. A fused optimizer is called nevertheless."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    begun: list[int] = []
    counted = CountedSteps(begun.append, marks=False)
    counted.begin()
    for factor in (1, torch.inf, 1):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    counted.stop()
    assert begun == [0, 1, 2, 3]
    scaler.step(optimizer)
    assert begun == [0, 1, 2, 3]
    assert parameter.item() == pytest.approx(0.8 - 0.1)


def test_the_scaler_of_an_older_torch_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.3 it stands elsewhere; a job that is captured may have any release."""
    monkeypatch.delattr(torch.amp, "GradScaler")
    original = torch.cuda.amp.GradScaler.step
    monkeypatch.setattr(torch.cuda.amp.GradScaler, "step", original)
    steps._follow_scalers.__wrapped__()
    assert vars(torch.cuda.amp.GradScaler)["step"].__wrapped__ is original


@pytest.mark.trainers
def test_lightning_itself() -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, _index: int) -> Any:
            with NestedRange("load"):
                return (torch.randn(4),)

    recorder, data = annotate.Recorder(), torch.utils.data.DataLoader(Samples())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    with annotate.only_sink(recorder):
        pl.Trainer(max_epochs=1, callbacks=[annotate.lightning_callback()], devices=1, **quiet).fit(Module(), data)
    check(recorder, {"load", *IN_A_STEP})


@pytest.mark.trainers
def test_trainer_itself(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).sum()}

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no"
    )
    data: Any = [{"x": torch.randn(4), "labels": 0} for _ in range(8)]
    recorder = annotate.Recorder()
    with annotate.only_sink(recorder):
        Trainer(Model(), arguments, train_dataset=data, callbacks=[annotate.trainer_callback()]).train()
    check(recorder)
