"""Times before a trace's 0 are times like others: figures do not depend on where its 0 lies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.device_use import measure_idle
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.trace import Trace
from tests.drawing import PID, draw_trace
from tests.measuring import results_of

ORIGINS = range(-45, 1)
"""Each instant of the picture is once the one at -1, once that at 0."""


def drawn(first_ns: int, rank: int = 0) -> Trace:
    """Two steps; what ``x`` and ``Y`` are launched by is not in the trace."""
    return draw_trace(
        ranges={
            "process|rank=0|world=2|variant=overlap|backend=nccl|device=cuda": "#" * 44,
            "step|index=4": "#####################.......................",
            "step|index=5": ".....................######################.",
            "backward": "...#########............########............",
            "synchronize": "............####................####........",
            "optimizer": "................####................####....",
        },
        launches={
            "main": "f...............o....g..............p.......",
            "pt_autograd_0": "...aM.bN................cO.dP",
        },
        streams={
            7: ".ff.aaa..bbb......oo..gg...ccc.ddd.....pp...",
            8: "...xx.......................................",
            9: ".....YYYMMMMNNN................OOOPPPPPP....",
        },
        ranks={PID: rank},
        world_size=2,
        path=f"rank{rank}.sqlite",
        first_ns=first_ns,
    )


def figures(first_ns: int) -> dict[str, Any]:
    """All that is measured of two ranks, times counted from the first one."""
    traces = [drawn(first_ns), drawn(first_ns, rank=1)]
    ranks = [rank for trace in traces for rank in find_rank_events(trace)]
    collectives = results_of(*traces)
    overlaps = [rank for trace in traces for rank in measure_overlap(trace).ranks]
    document = {
        "ranks": [asdict(rank) for rank in overlaps],
        "collectives": [asdict(collective) for collective in collectives.collectives],
        "residual_ns": collectives.alignment.residual_p95_ns,
        "warnings": collectives.warnings,
        "idle": [asdict(measure_idle(rank)) for rank in ranks],
    }
    return _since(document, first_ns)


def _since(value: Any, first_ns: int, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _since(item, first_ns, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_since(item, first_ns, key) for item in value]
    is_time = key in ("start_ns", "end_ns", "comm_end_ns", "launch_ns", "ready_ns") and value is not None
    return value - first_ns if is_time else value


def test_the_picture_has_a_tail_readiness_and_what_is_not_launched() -> None:
    found = figures(0)
    assert [step["tail_ns"] for step in found["ranks"][0]["steps"]] == [3, 5]
    assert [collective["ready_ns"] for collective in found["collectives"][:5]] == [None, 7, 12, 30, 34]
    assert found["collectives"][0]["step"] is None


@pytest.fixture(scope="module")
def at_0() -> dict[str, Any]:
    return figures(0)


@pytest.mark.parametrize(
    "first_ns", [at if at % 10 == 0 else pytest.param(at, marks=pytest.mark.slow) for at in ORIGINS]
)
def test_figures_do_not_depend_on_where_time_0_lies(first_ns: int, at_0: dict[str, Any]) -> None:
    assert figures(first_ns) == at_0
