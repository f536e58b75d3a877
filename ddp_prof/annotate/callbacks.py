"""Callbacks of trainers that own the loop: each step is marked, and all that ``instrument`` marks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

from ddp_prof.annotate.hooks import Instrumented
from ddp_prof.annotate.ranges import step


def make_lightning_callback() -> Any:
    """Of ``lightning`` or the older ``pytorch_lightning``, whichever is installed.

    A step is one turn of the loop: ``on_train_batch_start`` is called only after a flag was broadcast to all ranks and
    the batch was loaded.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    undo = ExitStack()

    class Marks(Callback):  # type: ignore[misc]  # of a package that need not be installed
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            undo.close()
            undo.callback(Instrumented(trainer.model or pl_module, list(trainer.optimizers)).remove)
            loop = trainer.fit_loop.epoch_loop
            original = loop.advance

            @wraps(original)
            def advance(*args: Any) -> None:
                with step(loop.batch_progress.total.ready):
                    original(*args)

            loop.advance = advance
            undo.callback(vars(loop).pop, "advance", None)

        def on_train_end(self, *_: Any) -> None:
            undo.close()

        def on_exception(self, *_: Any) -> None:
            undo.close()

    return Marks()


def make_trainer_callback() -> Any:
    """Of ``transformers``. The Trainer shows a callback the model without its DDP, so that is met when it is made."""
    from transformers import TrainerCallback

    marked, open_step = Instrumented(None, []), ExitStack()

    class Marks(TrainerCallback):  # type: ignore[misc]  # of a package that need not be installed
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            open_step.close()
            open_step.enter_context(step(state.global_step))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            open_step.close()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            open_step.close()
            marked.remove()

    return Marks()
