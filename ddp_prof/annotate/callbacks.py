"""Callbacks of trainers that own the loop: each step is marked, and all that ``instrument`` marks."""

from __future__ import annotations

from typing import Any

from ddp_prof.annotate.hooks import Instrumented
from ddp_prof.annotate.ranges import NestedRange, step


class _LoopMarks:
    """The marks of a loop: of the model from its start to its end, and of the step that runs."""

    def __init__(self) -> None:
        self._marked: Instrumented | None = None
        self._step: NestedRange | None = None

    def begin(self, model: Any, optimizers: list[Any]) -> None:
        self.end()
        self._marked = Instrumented(model, optimizers)

    def begin_step(self, index: int) -> None:
        self.end_step()
        self._step = step(index)
        self._step.__enter__()

    def end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__()
            self._step = None

    def end(self) -> None:
        self.end_step()
        if self._marked is not None:
            self._marked.remove()
            self._marked = None


def make_lightning_callback() -> Any:
    """Of ``lightning`` or the older ``pytorch_lightning``, whichever is installed."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    marks = _LoopMarks()

    class Marks(Callback):  # type: ignore[misc]  # of a package that need not be installed
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            marks.begin(trainer.model or pl_module, list(trainer.optimizers))

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            marks.begin_step(trainer.fit_loop.total_batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            marks.end_step()

        def on_train_end(self, *_: Any) -> None:
            marks.end()

        def on_exception(self, *_: Any) -> None:
            marks.end()

    return Marks()


def make_trainer_callback() -> Any:
    """Of ``transformers``. The Trainer shows a callback the model without its DDP, so that is met when it is made."""
    from transformers import TrainerCallback

    marks = _LoopMarks()
    marks.begin(None, [])

    class Marks(TrainerCallback):  # type: ignore[misc]  # of a package that need not be installed
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            marks.begin_step(state.global_step)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.end_step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            marks.end()

    return Marks()
