"""Where a monitor's records go: callables, Python's logging, and the loggers that training programs have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
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
    the loggers of Lightning (``log_metrics``), W&B (``log``). W&B is given no step, as it drops those of the past.

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
    if hasattr(log, "log_metrics"):
        return lambda record: log.log_metrics(dict(scalars(record)), step=record["step"])
    if hasattr(log, "log"):
        return lambda record: log.log({**dict(scalars(record)), "ddp_prof/step": record["step"]})
    if callable(log):
        return log  # type: ignore[no-any-return]
    raise TypeError(f"log={log!r}: give a callable, or a logger of logging, TensorBoard, W&B, MLflow or Lightning")


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
