"""Hundreds of ranks in the picture of the skew: each cell is how late one rank is in one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof import Run, load_runs
from ddp_prof.present.charts import collectives
from ddp_prof.present.charts.collectives import draw_skew
from tests.analyze.collectives.test_straggler import LATE_MS, MS, STEPS, rank_capture
from tests.charts import validated
from tests.nsys_factory import write_capture

draw_skew = validated(draw_skew)

WORLD = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 1 is late by 5 ms in each step, and the others wait for it."""
    folder = tmp_path_factory.mktemp("ranks")
    files = [write_capture(folder / f"job.rank{rank}.sqlite", rank_capture(rank, WORLD)) for rank in range(WORLD)]
    (found,) = load_runs(files, measures=["overlap", "collectives"])
    return found


def test_a_cell_a_rank_and_step(run: Run) -> None:
    heat, bars = draw_skew(run.analysis(), run.skew()).data
    late = np.arange(WORLD) == 1
    assert np.shape(heat.z) == (WORLD, STEPS)
    assert np.asarray(heat.z)[late] == pytest.approx(LATE_MS, abs=0.1)
    assert np.asarray(heat.z)[~late] == pytest.approx(0, abs=0.1)
    assert heat.zmin == 0, "a rank that is early is not coloured as if it were late"
    assert heat.zmax == np.max(heat.z), "Plotly takes no zmin without a zmax: the rank of least lag had no colour"
    assert np.asarray(bars.y) == pytest.approx(LATE_MS, abs=0.1)
    for row, lags in enumerate(heat.z):
        assert [round(ms * MS) for ms in lags] == [step.lags_ns[row] for step in run.skew().steps]


def test_of_many_steps_a_column_shows_the_worst(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MOST_COLUMNS", 7)
    figure = draw_skew(run.analysis(), run.skew())
    heat, bars = figure.data
    steps = run.skew().steps
    assert list(heat.x) == [str(first) for first in range(0, STEPS, 3)]
    for row in range(WORLD):
        worst = [max(step.lags_ns[row] for step in steps[at : at + 3]) / MS for at in range(0, STEPS, 3)]
        assert list(heat.z[row]) == pytest.approx(worst)
    assert list(bars.y) == pytest.approx(
        [max(step.cost_ns for step in steps[at : at + 3]) / MS for at in range(0, STEPS, 3)]
    )
    assert "a column is up to 3 steps and shows the largest figure" in figure.layout.title.subtitle.text


def test_ranks_of_one_node_lie_together(run: Run) -> None:
    nodes = {f"rank {rank}": f"<b>{rank % 2}" for rank in range(WORLD)}
    heat, _ = draw_skew(run.analysis(), run.skew(), nodes).data
    names = [str(row[0]) for row in heat.customdata]
    assert names == [f"&lt;b&gt;{odd} · rank {rank}" for odd in (0, 1) for rank in range(odd, WORLD, 2)]
    late = names.index("&lt;b&gt;1 · rank 1")
    assert np.asarray(heat.z)[late] == pytest.approx(LATE_MS, abs=0.1)


def test_the_picture_of_hundreds_of_ranks_is_no_higher_than_a_page(run: Run) -> None:
    skew, places = run.skew(), 50
    many = replace(
        skew,
        ranks=skew.ranks * places,
        steps=tuple(replace(step, lags_ns=step.lags_ns * places) for step in skew.steps),
    )
    figure = draw_skew(run.analysis(), many)
    assert np.shape(figure.data[0].z) == (WORLD * places, STEPS)
    assert figure.layout.height < 1300
    assert len(figure.layout.yaxis.tickvals) <= 60


def test_what_is_not_known_is_no_zero(run: Run) -> None:
    skew = run.skew()
    unknown = replace(
        skew, steps=tuple(replace(step, lags_ns=(None, *step.lags_ns[1:]), cost_ns=None) for step in skew.steps)
    )
    heat, bars = draw_skew(run.analysis(), unknown).data
    assert np.isnan(np.asarray(heat.z[0], float)).all()
    assert not np.isnan(np.asarray(heat.z[1], float)).any()
    assert np.isnan(np.asarray(bars.y, float)).all()
    other = load_runs([Path(run.files[0])])[0]  # nobody to compare with
    heat, _ = draw_skew(other.analysis(), other.skew()).data
    assert np.isnan(np.asarray(heat.z, float)).all()
