"""Where a monitor's records go: callables, Python's logging, and the loggers that training programs have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

Target = Callable[[dict[str, Any]], object]

NS_PER_MS = 1e6
TIMES = ("step", "comm", "overlapped", "exposed", "blocking", "contention", "network_gain")
"""The figures of a record that are logged in ms."""


def print_text(record: Mapping[str, Any]) -> None:
    """Write one line to stderr, which launchers show as the log of a job."""
    sys.stderr.write(f"ddp-prof monitor: {record['text']}\n")


def as_target(log: Any) -> Target:
    """Return a function that passes a record on to ``log``.

    Recognised by their methods, as none of the packages need be installed: TensorBoard's ``SummaryWriter``, MLflow and
    the loggers of Lightning (``log_metrics``), W&B (``log``). W&B is given no step, as it drops those of the past, and
    no commit, as that would begin a new step of W&B amid the program's own: the figures go with its next record.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(log, logging.Logger):
        return lambda record: log.info("ddp-prof monitor: %s", record["text"])
    if hasattr(log, "add_scalar"):

        def to_tensorboard(record: Mapping[str, Any]) -> None:
            for name, value in scalars(record):
                log.add_scalar(name, value, record["step"])

        return to_tensorboard
    if hasattr(log, "log_metrics") and hasattr(log, "active_run"):
        return MlflowTarget(log)
    if hasattr(log, "log_metrics"):
        return lambda record: log.log_metrics(dict(scalars(record)), step=record["step"])
    if hasattr(log, "log"):
        return lambda record: log.log({**dict(scalars(record)), "ddp_prof/step": record["step"]}, commit=False)
    if callable(log):
        return log  # type: ignore[no-any-return]
    raise TypeError(f"log={log!r}: give a callable, or a logger of logging, TensorBoard, W&B, MLflow or Lightning")


class MlflowTarget:
    """Logs to the MLflow run of the training thread. In MLflow, each thread has an active run of its own.

    Args:
        mlflow: The module.
    """

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self._takes_run = "run_id" in signature(mlflow.log_metrics).parameters
        self._run_id: str | None = None
        self.find_run()

    def find_run(self) -> None:
        """Look for the run that is active in this thread."""
        run = self._mlflow.active_run()
        if run is not None:
            self._run_id = run.info.run_id

    def __call__(self, record: Mapping[str, Any]) -> None:
        if not self._takes_run:  # before MLflow 2.14, all threads have the same run
            self._mlflow.log_metrics(dict(scalars(record)), step=record["step"])
        elif self._run_id is None:
            raise RuntimeError("no run of MLflow is active in the thread that trains: call mlflow.start_run() in it")
        else:
            self._mlflow.log_metrics(dict(scalars(record)), step=record["step"], run_id=self._run_id)


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values of what is known: times in ms, shares from 0 to 1, the late rank and its lag."""
    for name in TIMES:
        if (ns := record[f"{name}_ns"]) is not None:
            yield f"ddp_prof/{name}_ms", ns / NS_PER_MS
    if record["overlap_ratio"] is not None:
        yield "ddp_prof/overlap", record["overlap_ratio"]
    if (late := record["late"]) is not None:
        yield "ddp_prof/late_rank", late["rank"]
        yield "ddp_prof/lag_ms", late["lag_ns"] / NS_PER_MS
