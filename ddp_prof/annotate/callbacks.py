"""Callbacks for trainers that own the training loop: they mark each step and what ``instrument`` marks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

from ddp_prof.annotate.ranges import step


def lightning_callback() -> Any:
    """Return a callback for Lightning's ``Trainer(callbacks=[...])`` that marks steps and what ``instrument`` marks.

    It is for ``lightning`` or the older ``pytorch_lightning``, whichever is installed. A step is one iteration of the
    loop: ``on_train_batch_start`` would begin it too late, after the loading of the batch and a broadcast to all ranks.
    """
    from ddp_prof.annotate.hooks import Instrumented

    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
    undo = ExitStack()

    class Marks(Callback):  # type: ignore[misc]  # the package need not be installed
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


def trainer_callback() -> Any:
    """Return a callback for Hugging Face's ``Trainer(callbacks=[...])``: marks steps and what ``instrument`` marks.

    The Trainer does not pass the DDP wrapper to a callback, so every DDP that is created later is marked.
    """
    from transformers import TrainerCallback

    from ddp_prof.annotate.hooks import Instrumented

    marked, open_step = Instrumented(None, []), ExitStack()

    class Marks(TrainerCallback):  # type: ignore[misc]  # the package need not be installed
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            open_step.close()
            open_step.enter_context(step(state.global_step))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            open_step.close()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            open_step.close()
            marked.remove()

    return Marks()
