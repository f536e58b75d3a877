from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.collectives.skew import RunSkew
from ddp_prof.analyze.overlap import TraceOverlap
from ddp_prof.present import theme
from ddp_prof.present.charts.ranks import MOST_RANKS, draw_ranks, rank_bars
from ddp_prof.present.skew_headlines import late_text
from ddp_prof.runs import load_runs
from tests.analyze.collectives.test_straggler import rank_capture
from tests.charts import validated
from tests.nsys_factory import write_capture

draw_ranks = validated(draw_ranks)


def ranks_of(folder: Path, world: int) -> tuple[TraceOverlap, RunSkew]:
    """A run of which rank 1 is late by 5 ms in each step."""
    files = [write_capture(folder / f"x.rank{rank}.sqlite", rank_capture(rank, world)) for rank in range(world)]
    (run,) = load_runs(files)
    return run.overlap(), run.skew()


@pytest.mark.parametrize("world", [2, 8])
def test_each_rank_is_a_bar_and_the_late_one_comes_first(tmp_path: Path, world: int) -> None:
    result, skew = ranks_of(tmp_path, world)
    bars = rank_bars(result, skew)
    assert [bar.rank for bar in bars] == ["rank 1", "rank 0", *(f"rank {rank}" for rank in range(2, world))]
    assert [bar.mark for bar in bars] == ["arrives last in 20 of 20 steps", *[""] * (world - 1)]
    for bar in bars:
        (rank,) = [rank for rank in result.ranks if rank.name == bar.rank]
        lengths = rank.lengths_ns
        assert sum(bar.parts_ns.values()) == pytest.approx(sum(lengths) / len(lengths)), "they sum to the mean step"
        assert bar.parts_ns[theme.EXPOSED] == pytest.approx((10 if bar.rank == "rank 1" else 15) * 1e6, rel=0.01)
    figure = draw_ranks(result, skew)
    assert all(len(trace.x) == world for trace in figure.data)
    (mark,) = figure.layout.annotations
    assert (mark.y, "arrives last" in mark.text) == (0, True)


def test_of_hundreds_those_with_most_are_drawn_and_the_late_one(tmp_path: Path) -> None:
    result, skew = ranks_of(tmp_path, 2)
    early, late = result.ranks
    many = [replace(early, rank=rank) for rank in range(2, 300)]
    figure = draw_ranks(replace(result, ranks=(early, late, *many)), skew)
    assert len(figure.data[0].x) == MOST_RANKS
    assert "128 of 300 ranks" in figure.layout.title.text
    assert "rank 1<" in figure.layout.yaxis.ticktext[0], "late, so it exposes least"


def test_one_rank_is_no_chart(tmp_path: Path) -> None:
    result, skew = ranks_of(tmp_path, 2)
    assert rank_bars(replace(result, ranks=result.ranks[:1]), skew)
    from ddp_prof.present.charts import ranks

    assert ranks.draw_ranks(replace(result, ranks=result.ranks[:1]), skew) is None


def test_a_rank_without_steps_is_no_bar_beside_steps(tmp_path: Path) -> None:
    """Its whole capture of 20 steps stood beside the mean steps of the others."""
    result, skew = ranks_of(tmp_path, 3)
    *others, last = result.ranks
    without = replace(last, steps=())
    assert len(rank_bars(result, skew)) == 3
    assert {bar.rank for bar in rank_bars(replace(result, ranks=(*others, without)), skew)} == {"rank 0", "rank 1"}
    assert len(rank_bars(replace(result, ranks=tuple(replace(one, steps=()) for one in result.ranks)), skew)) == 3


def test_a_mark_without_steps_is_of_the_collectives_that_others_have_too(tmp_path: Path) -> None:
    """Of a collective that no other rank has, it is not known who came last."""
    _, skew = ranks_of(tmp_path, 2)
    ranks = tuple(
        replace(one, collectives=10, matched=4, last_collectives=3 * (one.rank == 1), last_steps=0)
        for one in skew.ranks
    )
    assert late_text(replace(skew, steps=(), straggler=None, ranks=ranks)) == "arrives last at 3 of 4 collectives"
