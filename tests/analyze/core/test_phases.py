"""Phases within each other: each instant belongs to one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.steps import Phases, find_phases
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.range_names import PHASES
from ddp_prof.trace import Category
from tests.drawing import PID, column, draw_trace, picture_of

LENGTH = 24
STEPPING = {
    "process|rank=0|world=2": "#" * LENGTH,
    "step|index=0": "#" * LENGTH,
    "forward": "###.....................",
    "backward": "...##############.......",
    "optimizer|bucket=0": ".......##...............",
    "optimizer|bucket=1": "....................##..",
    "synchronize": ".................#####..",
    "optimizer": "......................##",
    "all_reduce|bucket=0|bytes=8|params=1": "....###.................",
    "all_reduce|bucket=1|bytes=8|params=1": "......##############....",
}
"""A run on a CPU whose optimizer steps on one bucket in backward, and on one while the other is waited for."""


def test_of_phases_within_each_other_the_innermost_counts() -> None:
    phases = find_phases(draw_trace(ranges=STEPPING), PID)
    assert {phase: picture_of(phases.innermost_of(kind), LENGTH) for kind, phase in enumerate(PHASES)} == {
        "forward": "###.....................",
        "backward": "...####..########.......",
        "synchronize": ".................###....",
        "optimizer": ".......##...........####",
    }


def test_forward_again_in_backward_is_backward() -> None:
    """Activation checkpointing of a model that names its own forward."""
    ranges = {"forward": "###...##...##", "backward": "...########.."}
    phases = find_phases(draw_trace(ranges=ranges), PID)
    assert picture_of(phases.innermost_of(PHASES.index("forward")), 13) == "###........##"
    assert picture_of(phases.innermost_of(PHASES.index("backward")), 13) == "...########.."


def test_an_optimizer_range_of_another_bucket_is_no_phase_of_that_name() -> None:
    """A foreign name that only begins alike."""
    assert len(find_phases(draw_trace(ranges={"optimizer|bucket=x": "##", "optimizer|more": "##"}), PID)) == 0


def test_on_a_cpu_each_instant_is_computed_in_one_phase() -> None:
    (rank,) = find_rank_events(draw_trace(ranges=STEPPING, ranks={PID: 0}))
    compute = rank.select_category(Category.COMPUTE)
    assert (compute.end_ns - compute.start_ns).sum() == rank.union_of(Category.COMPUTE).length_ns == 21
    assert rank.passes.end_ns.tolist() == [17], "not where the optimizer first steps"


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, len(PHASES) - 1)), max_size=8)


@given(ranges)
def test_phases_are_disjoint_and_cover_what_the_ranges_do(drawn: list[tuple[int, int, int]]) -> None:
    phases = Phases(
        column(start for start, _, _ in drawn),
        column(start + length for start, length, _ in drawn),
        column(kind for _, _, kind in drawn),
        column(0 for _ in drawn),
    )
    pictures = [picture_of(phases.innermost_of(kind), 45) for kind in range(len(PHASES))]
    for instant in range(45):
        holders = [(start, -length, kind) for start, length, kind in drawn if start <= instant < start + length]
        named = [kind for kind, picture in enumerate(pictures) if picture[instant] == "#"]
        assert len(named) == bool(holders)
        latest = {kind for start, length, kind in holders if (start, length) == max(holders)[:2]}
        assert set(named) <= latest
