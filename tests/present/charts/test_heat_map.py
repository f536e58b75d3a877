"""Hundreds of ranks in one figure: each cell is one rank's figure in one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof import Run, load_runs
from ddp_prof.present.charts import ranks
from ddp_prof.present.charts.ranks import draw_heat_map
from tests.analyze.collectives.test_straggler import LATE_MS, MS, STEPS, TRANSFER_MS, rank_capture
from tests.charts import validated
from tests.nsys_factory import write_capture

draw_heat_map = validated(draw_heat_map)

WORLD = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 1 is late by 5 ms in each step, and the others wait for it."""
    folder = tmp_path_factory.mktemp("ranks")
    files = [write_capture(folder / f"job.rank{rank}.sqlite", rank_capture(rank, WORLD)) for rank in range(WORLD)]
    (found,) = load_runs(files, measures=["overlap", "collectives"])
    return found


def test_a_cell_a_rank_and_step(run: Run) -> None:
    exposed, waited, times = draw_heat_map(run.overlap(), run.skew()).data
    late = np.arange(WORLD) == 1
    for panel in (exposed, waited, times):
        assert np.shape(panel.z) == (WORLD, STEPS)
    assert np.asarray(waited.z)[late] == pytest.approx(0, abs=0.1)
    assert np.asarray(waited.z)[~late] == pytest.approx(LATE_MS, abs=0.1)
    assert np.asarray(exposed.z)[~late] == pytest.approx(LATE_MS + TRANSFER_MS, abs=0.1)
    for rank, row in zip(run.overlap().ranks, exposed.z, strict=True):
        assert [round(ms * MS) for ms in row] == [step.exposed_ns for step in rank.steps]


def test_of_many_steps_a_column_shows_the_worst(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_COLUMNS", 7)
    exposed = draw_heat_map(run.overlap(), run.skew()).data[0]
    of_rank = [step.exposed_ns / MS for step in run.overlap().ranks[0].steps]
    assert list(exposed.x) == [str(first) for first in range(0, STEPS, 3)]
    assert list(exposed.z[0]) == pytest.approx([max(of_rank[at : at + 3]) for at in range(0, STEPS, 3)])


def test_ranks_of_one_node_lie_together(run: Run) -> None:
    result = run.overlap()
    placed = replace(result, ranks=tuple(replace(rank, node=f"<b>{(rank.rank or 0) % 2}") for rank in result.ranks))
    figure = draw_heat_map(placed, run.skew())
    names = [str(row[0]) for row in figure.data[0].customdata]
    assert names == [f"&lt;b&gt;{odd} · rank {rank}" for odd in (0, 1) for rank in range(odd, WORLD, 2)]


def test_what_is_not_known_is_no_zero(run: Run) -> None:
    result = run.overlap()
    alone = replace(result, ranks=result.ranks[:1])
    other = load_runs([Path(run.files[0])])[0].skew()  # nobody to compare with
    waited = draw_heat_map(alone, other).data[1]
    assert np.isnan(np.asarray(waited.z, float)).all()
