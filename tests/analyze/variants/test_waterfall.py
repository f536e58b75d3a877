"""What one variant changes of another's step: parts that sum exactly."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.variants.waterfall import PARTS, Waterfall, measure_waterfall
from ddp_prof.present.charts.waterfall import draw_waterfall, waterfall_steps
from ddp_prof.present.tables.waterfall import waterfall_notes, waterfall_rows
from tests.drawing import PID, draw_trace
from tests.measuring import analysis_of


def run_of(label: str, *ranks: dict[str, str]) -> RunAnalysis:
    """A run whose ranks lie in files of their own, drawn by their ranges in one step."""
    traces = []
    for rank, ranges in enumerate(ranks):
        length = max(map(len, ranges.values()))
        whole = {f"process|rank={rank}|world={len(ranks)}": "#" * length, "step|index=0": "#" * length}
        trace = draw_trace(ranges=whole | ranges, ranks={PID: rank}, world_size=len(ranks), path=f"{label}{rank}")
        traces.append(trace)
    return analysis_of(*traces, label=label)


def waterfall_of(*runs: RunAnalysis) -> Waterfall:
    return measure_waterfall([(run, ()) for run in runs])


FIRST, SECOND = (f"all_reduce|bucket={bucket}|bytes=8|params=1" for bucket in (0, 1))
NAIVE = run_of(
    "naive",
    {
        "forward": "####...................",
        "backward": "....######.............",
        "synchronize": "..........##########...",
        FIRST: "...........###.........",
        SECOND: "...............####....",
        "optimizer": "....................###",
    },
)
OVERLAP = run_of(
    "overlap",
    {
        "forward": "####...............",
        "backward": "....#######........",
        "synchronize": "...........####....",
        FIRST: "......###..........",
        SECOND: "..........#####....",
        "optimizer": "...............###.",
    },
)


def parts_of(each) -> dict[str, int]:
    return {part: ns for part in PARTS if (ns := getattr(each, f"{part}_ns"))}


def test_a_step_is_divided_into_parts() -> None:
    naive, overlap = waterfall_of(OVERLAP, NAIVE).budgets
    assert (naive.label, naive.step_ns, parts_of(naive)) == (
        "naive",
        23,
        {"compute": 13, "tail": 7, "calls": 3},
    )
    assert (overlap.step_ns, parts_of(overlap)) == (19, {"compute": 14, "tail": 4, "rest": 1})


def test_changes_sum_to_the_difference() -> None:
    (change,) = waterfall_of(NAIVE, OVERLAP).changes
    assert (change.before, change.after, change.step_ns) == ("naive", "overlap", -4)
    assert parts_of(change) == {"compute": 1, "tail": -3, "calls": -3, "rest": 1}


def test_waiting_has_a_part_of_its_own_where_ranks_are_known() -> None:
    early = {"backward": "####....", "synchronize": "....####", FIRST: "....####"}
    late = {"backward": "######..", "synchronize": "......##", FIRST: "......##"}
    (budget,) = waterfall_of(run_of("flat", early, late)).budgets
    assert parts_of(budget) == {"compute": 5, "tail": 2, "wait": 1}
    assert budget.knows_wait


def test_rows_and_bars_lead_from_run_to_run() -> None:
    waterfall = waterfall_of(NAIVE, OVERLAP)
    first, second = waterfall_rows(waterfall)
    assert (first["from -> to"], second["from -> to"]) == ("naive", "naive -> overlap")
    assert second["sum_ms"] == pytest.approx(-4e-6)
    assert sum(second[f"{part}_ms"] for part in PARTS) == pytest.approx(second["sum_ms"])
    *changes, (last, _, start, length) = waterfall_steps(waterfall)[1:]
    assert (last, start, length) == ("overlap", 0, 19e-6)
    assert changes[0][2] == 23e-6
    assert changes[-1][2] + changes[-1][3] == pytest.approx(19e-6)
    title = draw_waterfall(waterfall).layout.title
    assert title.text == "<b>overlap takes 17 % off the step of naive</b>"
    assert "device: cpu" in title.subtitle.text


def test_what_is_not_known_is_said() -> None:
    notes = " ".join(waterfall_notes(waterfall_of(NAIVE, OVERLAP)))
    assert "ranks could not be compared" in notes
    assert "contention cannot be told from compute" in notes


def test_a_run_without_steps_is_left_out() -> None:
    trace = draw_trace(streams={7: "aa"})
    waterfall = waterfall_of(replace(analysis_of(trace), label="x"), NAIVE)
    assert (waterfall.left_out, waterfall.changes) == (("x",), ())
    assert draw_waterfall(waterfall_of()).layout.title.text == "<b>No run tells its steps</b>"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("f.s", min_size=12, max_size=12), min_size=1, max_size=3), st.text("#.", min_size=12))
def test_parts_sum_exactly_for_any_schedule(schedules: list[str], collectives: str) -> None:
    runs = [
        run_of(
            f"run{index}",
            *(
                {
                    "backward": schedule.replace("f", "#").replace("s", "."),
                    "synchronize": schedule.replace("s", "#").replace("f", "."),
                    FIRST: collectives[shift : shift + 12],
                }
                for shift in range(3)
            ),
        )
        for index, schedule in enumerate(schedules)
    ]
    waterfall = waterfall_of(*runs)
    for budget in (*waterfall.budgets, *waterfall.changes):
        assert sum(getattr(budget, f"{part}_ns") for part in PARTS) == budget.step_ns
    if waterfall.budgets:
        total = sum(change.step_ns for change in waterfall.changes)
        assert Fraction(total) == waterfall.budgets[-1].step_ns - waterfall.budgets[0].step_ns
