"""What hid communication and why devices idled: as drawn, and against the oracle on runs that Hypothesis draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given

from ddp_prof.analyze.core.rank_events import ONLY_WARMUP
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.device_use import IdleTime, RankUse, measure_rank_use
from ddp_prof.analyze.overlap import measure_rank
from ddp_prof.analyze.why_unknown import LOST_LAUNCHES, NO_NCCL_KERNEL, NOT_TIMED
from ddp_prof.trace import Category, Kind, Overhead, Trace
from tests import oracle
from tests.analyze.damaged_runs import NOT_IN_THE_ORACLE, DamagedRun, damaged_runs, known_to_the_oracle
from tests.drawing import column, draw_trace
from tests.examples import examples
from tests.oracle.device_use import hidden_by_phase, idle_causes, inferred_backward
from tests.oracle.ranks import PHASES

DRAWN = examples(
    100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


def use_of(trace: Trace) -> RankUse:
    (rank,) = find_rank_events(trace)
    return measure_rank_use(rank)


def test_an_instant_beside_several_kernels_belongs_to_one() -> None:
    trace = draw_trace(
        ranges={"backward": "####................", "optimizer": "....####............"},
        launches={"main": "bA.co..............."},
        streams={7: "....bbbbcccc........", 8: "......oooooooo......", 9: "....AAAAAAAAAAAA...."},
    )
    found = {(part.phase, part.kind): part.overlapped_ns for part in use_of(trace).hidden}
    assert found == {("backward", "other"): 8, ("optimizer", "other"): 2}


def test_idle_time_before_and_after_the_launch() -> None:
    trace = draw_trace(
        ranges={"step|index=0": "#" * 30, "forward": "######..............", "backward": "......########......"},
        launches={"main": "a.........b.....2..."},
        streams={7: "..aa........bbb.....2."},
    )
    use = use_of(trace)
    assert dict(use.idle.causes) == {
        "host in forward": 2,  # 4 and 5
        "host in backward": 4,  # 6 to 9
        "launched, not begun": 2 + 4,  # 10 and 11, 16 to 19
        "host outside of named phases": 1,  # 15
    }
    assert use.idle.idle_ns == sum(ns for _, ns in use.idle.causes)


def test_the_host_is_in_backward_where_autograd_launches_it_too() -> None:
    trace = draw_trace(
        ranges={"step 0": "#" * 30, "forward": "####................"},
        launches={"main": "a...................o....", "pt_autograd_0": "......b........c"},
        streams={7: ".aaa...bb.......cc...oo"},
    )
    assert dict(use_of(trace).idle.causes) == {
        "host outside of named phases": 2 + 2,  # 4 and 5, before the first launch of backward; 18 and 19, after it
        "host in backward": 6,  # 9 to 14
        "launched, not begun": 1 + 1 + 1,  # 6, 15 and 20
    }


def test_a_gap_is_not_said_to_be_communication_of_another_step_where_its_launch_is_lost() -> None:
    """It is the step's own: 'communication of another step' was 100 % of idle time, which overlap did not know."""
    trace = draw_trace(
        ranges={"step 0": "############"},
        launches={"main": "a.......b..."},
        streams={7: ".aaa......b.", 9: "....AAAAAA.."},
    )
    idle = use_of(trace).idle
    assert (idle.idle_ns, idle.causes) == (None, ())
    assert idle.reason == LOST_LAUNCHES
    (step,) = measure_rank(find_rank_events(trace)[0]).steps
    assert step.idle_ns is None


def test_a_single_kernel_tells_no_idle_time() -> None:
    idle = use_of(draw_trace(launches={"main": "a..."}, streams={7: "..aa"})).idle
    assert (idle.idle_ns, idle.causes) == (None, ())
    assert "a single kernel" in idle.reason


def test_beside_a_graph_recorded_whole_nothing_is_hidden_if_nothing_communicates() -> None:
    """What the graph computed is not known, and 'overlap' tells 0 of such a rank, too."""
    drawn = draw_trace(launches={"main": "a..................."}, streams={7: "..aa................"})
    graph = replace(drawn.activities, kind=column([Kind.GRAPH]), category=column([Category.OTHER]))
    (rank,) = find_rank_events(replace(drawn, activities=graph))
    assert (measure_rank_use(rank).overlapped_ns, measure_rank(rank).overlapped_ns) == (0, 0)


def test_a_capture_of_warmup_alone_says_so_of_idle_time() -> None:
    """Work outside of its step is left: "no step was measured" did not tell why."""
    ranges = {"step|index=0|warmup=1": "####................"}
    trace = draw_trace(ranges=ranges, launches={"main": "a.......b.........."}, streams={7: "..aa......bb........"})
    assert use_of(trace).idle == IdleTime(None, (), ONLY_WARMUP)


def test_work_without_a_known_launch_leaves_the_cause_unknown() -> None:
    trace = draw_trace(launches={"main": "a..................."}, streams={7: "..aa......bb........"})
    assert dict(use_of(trace).idle.causes) == {"unknown": 6}


def test_what_the_profiler_did_is_named() -> None:
    drawn = draw_trace(launches={"main": "a.......b..........."}, streams={7: "..aa......bb........"})
    overhead = Overhead(np.array([5]), np.array([7]))
    trace = Trace(**{**{name: getattr(drawn, name) for name in drawn.__dataclass_fields__}, "overhead": overhead})
    assert dict(use_of(trace).idle.causes) == {
        "the profiler at work": 2,
        "launched, not begun": 2,
        "host outside of named phases": 2,
    }


def test_graphs_recorded_whole_leave_idle_time_unknown() -> None:
    (rank,) = find_rank_events(draw_trace(launches={"main": "a"}, streams={7: "..aa"}))
    rank.events.category[:] = Category.OTHER
    idle = measure_rank_use(rank).idle
    assert (idle.idle_ns, idle.causes) == (None, ())
    assert idle.reason


def test_a_device_that_does_work_of_a_step_that_was_lost_is_not_idle() -> None:
    """Of step 0 the kernel ``b`` was lost; ``a`` runs until step 1 has begun on another stream."""
    trace = draw_trace(
        ranges={"step 0": "########", "step 1": "........########"},
        launches={"main": "ab......cd......"},
        streams={7: ".aaaaaaaaaaa....", 8: ".........c....d."},
    )
    trace = replace(trace, is_launch=np.ones(len(trace.calls), np.bool_))
    (step,) = measure_rank(find_rank_events(trace)[0]).steps
    idle = use_of(trace).idle
    assert (step.step, step.idle_ns, idle.idle_ns) == (1, 2, 2)
    assert sum(ns for _, ns in idle.causes) == 2


def test_what_a_lost_step_computes_hides_communication_of_another_one() -> None:
    trace = draw_trace(
        ranges={"step 0": "########", "step 1": "........########"},
        launches={"main": "ab......cN......"},
        streams={7: ".aaaaaaaaaaa....", 8: ".........c......", 9: "..........NNN..."},
    )
    use = use_of(replace(trace, is_launch=np.ones(len(trace.calls), np.bool_)))
    assert use.overlapped_ns == 2 == sum(part.overlapped_ns for part in use.hidden)


def test_idle_time_is_unknown_where_no_nccl_kernel_was_recorded() -> None:
    trace = draw_trace(
        ranges={"step 0": "########", "nccl:all_reduce": ".##"}, launches={"main": "ab"}, streams={7: ".aa..bb."}
    )
    assert use_of(trace).idle == IdleTime(None, (), NO_NCCL_KERNEL)


@pytest.mark.slow
@DRAWN
@given(damaged_runs())
def test_parts_agree_with_the_oracle_and_sum(run: DamagedRun) -> None:
    with TemporaryDirectory() as folder, known_to_the_oracle():
        traces = run.read(Path(folder))
        assume(not any(rule in warning for rule in NOT_IN_THE_ORACLE for trace in traces for warning in trace.warnings))
        _assert_agree(traces, run.recorded)


def _assert_agree(traces: Sequence[Trace], run: Sequence[Trace]) -> None:
    for trace, recorded in zip(traces, run, strict=True):
        for rank, expected in zip(find_rank_events(trace), oracle.ranks_of(recorded), strict=True):
            use, measured = measure_rank_use(rank), measure_rank(rank)
            # Sums over the rank are of what was recorded, and what hid communication is asked of all of it.
            assert use.overlapped_ns == (None if measured.reason in NOT_TIMED else measured.overlapped_ns)
            if use.overlapped_ns is not None:
                phases = Counter[str | None]()
                for part in use.hidden:
                    phases[part.phase] += part.overlapped_ns
                assert phases == hidden_by_phase(expected)
            idle = [step.idle_ns for step in measured.steps]
            if use.idle.idle_ns is None or not measured.steps:
                continue
            assert use.idle.idle_ns == sum(idle) == sum(ns for _, ns in use.idle.causes)
            host = {
                phase: [
                    (int(rank.phases.start_ns[row]), int(rank.phases.end_ns[row]))
                    for row in np.flatnonzero(rank.phases.kind == PHASES.index(phase))
                ]
                for phase in PHASES
            }
            if rank.backward == "inferred":
                host["inferred"] = inferred_backward(expected)
            assert Counter(dict(use.idle.causes)) == idle_causes(expected, trace, host)
