"""Records of a log as a monitor writes them, from the few figures that a test is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MS = 1_000_000


def record(number: int, **figures: Any) -> dict[str, Any]:
    """The record of measurement ``number``; times are given in ms, ``late`` as (rank, lag), ``lag`` is of rank 1."""
    late, lag_ns = figures.pop("late", None), round(figures.pop("lag", 0.5) * MS)
    known = {"step": 50.0, "comm": 20.0, "exposed": 10.0, "overlapped": 10.0, "blocking": 9.0, "contention": None}
    times = {f"{name}_ns": None if value is None else round(value * MS) for name, value in {**known, **figures}.items()}
    of_rank = {name: times[name] for name in ("step_ns", "comm_ns", "exposed_ns", "overlapped_ns", "blocking_ns")}
    return {
        "schema": 1,
        "time": f"2026-11-26T10:{number % 60:02}:00+00:00",
        "step": 1000 * number,
        "steps": 3,
        "world_size": 2,
        "ranks": 2,
        **times,
        "overlap_ratio": 0.5,
        "schedule_gain_ns": times["blocking_ns"],
        "network_gain_ns": None,
        "late": late and {"rank": late[0], "lag_ns": round(late[1] * MS), "steps": 3, "of_steps": 3, "cost_ns": None},
        "finding": None,
        "failed": [],
        "by_rank": [
            {"rank": 0, **of_rank, "tail_ns": 5 * MS, "overlap_ratio": 0.5, "lag_ns": -lag_ns},
            {"rank": 1, **of_rank, "tail_ns": None, "overlap_ratio": 0.4, "lag_ns": lag_ns},
        ],
        "text": f"step {1000 * number}",
    }


def courses(picture: str, low: float, high: float, figure: str = "exposed") -> list[dict[str, Any]]:
    """A measurement a character: ``#`` has the high value of a figure, ``.`` the low one, both with some scatter."""
    scatter = (0.0, 0.2, -0.1, 0.1, -0.2, 0.05, -0.15)
    return [
        record(number, **{figure: (high if sign == "#" else low) + scatter[number % len(scatter)]})
        for number, sign in enumerate(picture)
    ]


def write_log(folder: Path, records: list[dict[str, Any]], name: str = "monitor.jsonl") -> Path:
    (log := folder / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    return log
