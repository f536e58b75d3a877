"""Passes a monitor's records on: to callables, Python's logging, and the loggers that training programs have.

A *record* is the result of one measurement: a dictionary as in a line of ``monitor.jsonl``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

Target = Callable[[dict[str, Any]], object]

NS_PER_MS = 1e6
TIMES = ("step", "comm", "overlapped", "exposed", "blocking", "contention", "network_gain")
"""The figures of a record that are logged in ms; their keys have the suffix ``_ns``."""


def print_text(record: Mapping[str, Any]) -> None:
    """Write the text of a record as one line to stderr, which launchers show as the log of a job."""
    sys.stderr.write(f"ddp-prof monitor: {record['text']}\n")


def as_target(log: Any) -> Target:
    """Return a function that passes a record on to ``log``.

    ``log`` is a callable or a ``logging.Logger``, or one of these, which are recognised by their methods because none
    of the packages need be installed: TensorBoard's ``SummaryWriter`` (``add_scalar``), MLflow and the loggers of
    Lightning (``log_metrics``), W&B (``log``).

    W&B gets no ``step`` argument, because it drops a step that is not its newest. It gets ``commit=False``, because a
    commit would begin a new step of W&B amid the program's own: the figures go with the program's next record.

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
    """Logs to the MLflow run of the training thread, though called in another: in MLflow each thread has its own run.

    Args:
        mlflow: The module ``mlflow``.
    """

    def __init__(self, mlflow: Any) -> None:
        """Find the run that is active in this thread, which must be the thread that trains."""
        self._mlflow = mlflow
        self._takes_run = "run_id" in signature(mlflow.log_metrics).parameters
        self._run_id: str | None = None
        self.find_run()

    def find_run(self) -> None:
        """Remember the run that is active in the thread that calls this; call it in the thread that trains."""
        run = self._mlflow.active_run()
        if run is not None:
            self._run_id = run.info.run_id

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log the figures of a record; RuntimeError if no run was active in the thread that trains."""
        if not self._takes_run:  # before MLflow 2.14, all threads have the same run
            self._mlflow.log_metrics(dict(scalars(record)), step=record["step"])
        elif self._run_id is None:
            raise RuntimeError("no run of MLflow is active in the thread that trains: call mlflow.start_run() in it")
        else:
            self._mlflow.log_metrics(dict(scalars(record)), step=record["step"], run_id=self._run_id)


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each figure of a record that is not ``None``.

    These are times in ms, the overlap ratio from 0 to 1, the late rank and its lag in ms.
    """
    for name in TIMES:
        if (ns := record[f"{name}_ns"]) is not None:
            yield f"ddp_prof/{name}_ms", ns / NS_PER_MS
    if record["overlap_ratio"] is not None:
        yield "ddp_prof/overlap", record["overlap_ratio"]
    if (late := record["late"]) is not None:
        yield "ddp_prof/late_rank", late["rank"]
        yield "ddp_prof/lag_ms", late["lag_ns"] / NS_PER_MS
