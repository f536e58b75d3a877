"""Callbacks of trainers: by the real packages where they are installed, else by stand-ins of their interface."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof import annotate
from ddp_prof.annotate.ranges import NestedRange

STEPS = 3
IN_A_STEP = {"backward", "optimizer"}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    module = ModuleType(name)
    setattr(module, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def check(recorder: annotate.Recorder, in_a_step: set[str] = IN_A_STEP) -> None:
    steps = [each for each in recorder.ranges if each.text.startswith("step|")]
    assert [each.text for each in steps] == [f"step|index={index}" for index in range(STEPS)]
    for step in steps:
        inside = {
            each.text for each in recorder.ranges if step.start_ns <= each.start_ns and each.end_ns <= step.end_ns
        }
        assert inside >= in_a_step


def test_lightning_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "lightning.pytorch", "Callback")
    callback, recorder = annotate.lightning_callback(), annotate.Recorder()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Loop:
        """As Lightning's: a turn loads a batch before it calls callbacks."""

        batch_progress = SimpleNamespace(total=SimpleNamespace(ready=0))

        def advance(self, _fetcher: object) -> None:
            with NestedRange("load"):
                self.batch_progress.total.ready += 1
            run_step(model, optimizer)

    loop = Loop()
    trainer = SimpleNamespace(model=model, optimizers=[optimizer], fit_loop=SimpleNamespace(epoch_loop=loop))
    with annotate.only_sink(recorder):
        callback.on_train_start(trainer, model)
        for _ in range(STEPS):
            loop.advance(None)
        callback.on_train_end(trainer, model)
        marked = len(recorder.ranges)
        loop.advance(None)
    assert [each.text for each in recorder.ranges[marked:]] == ["load"]
    assert sum(each.text == "forward" for each in recorder.ranges) == STEPS
    check(recorder, {"load", *IN_A_STEP})


def test_trainer_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback, recorder = annotate.trainer_callback(), annotate.Recorder()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with annotate.only_sink(recorder):
        for index in range(STEPS):
            state = SimpleNamespace(global_step=index)
            callback.on_step_begin(None, state, None, model=model)
            run_step(model, optimizer)
            callback.on_step_end(None, state, None, model=model)
        callback.on_train_end(None, None, None)
    check(recorder)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
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


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
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
