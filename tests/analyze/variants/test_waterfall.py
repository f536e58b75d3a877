"""What one variant changes of another's step: parts that sum exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.kernel_times import find_kernel_runs
from ddp_prof.analyze.variants.waterfall import (
    PARTS,
    MeasuredRun,
    Waterfall,
    match_parts,
    measure_waterfall,
    subtract_budgets,
)
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.charts import comparison
from ddp_prof.present.charts.comparison import Bar, draw_waterfall, waterfall_steps
from ddp_prof.present.tables.compare import readable_rows, waterfall_notes, waterfall_rows
from ddp_prof.trace import UNKNOWN, Category
from tests.analyze.kernels.test_contention import ALONE, BESIDE, KERNELS
from tests.analyze.kernels.test_contention import capture as kernels_beside_communication
from tests.charts import validated
from tests.drawing import PID, draw_trace
from tests.examples import examples
from tests.measuring import analysis_of
from tests.nsys_factory import write_capture

draw_waterfall = validated(draw_waterfall)


def run_of(label: str, *ranks: dict[str, str], world: int | None = None) -> RunAnalysis:
    """A run whose ranks lie in files of their own, drawn by their ranges in one step; one rank is one of two."""
    world, traces = world or max(2, len(ranks)), []
    for rank, ranges in enumerate(ranks):
        length = max(map(len, ranges.values()))
        whole = {f"process|rank={rank}|world={world}": "#" * length, "step|index=0": "#" * length}
        trace = draw_trace(ranges=whole | ranges, ranks={PID: rank}, world_size=world, path=f"{label}{rank}")
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
    assert sum(second[f"{part}_ms"] or 0 for part in PARTS) == pytest.approx(second["sum_ms"])
    *changes, (last, _, start, length, _) = waterfall_steps(waterfall)[1:]
    assert (last, start, length) == ("overlap", 0, 19e-6)
    assert changes[0][2] == 23e-6
    assert changes[-1][2] + changes[-1][3] == pytest.approx(19e-6)
    title = draw_waterfall(waterfall).layout.title
    assert title.text == "<b>Where the mean step differs from naive to overlap</b>", "no speed-up is known"
    assert "device: cpu" in title.subtitle.text


def test_what_is_not_known_is_said() -> None:
    notes = " ".join(waterfall_notes(waterfall_of(NAIVE, OVERLAP)))
    assert "ranks could not be compared" in notes
    assert "contention cannot be measured" in notes
    waterfall = waterfall_of(NAIVE, OVERLAP)
    assert [parts.contention_ns for parts in (*waterfall.budgets, *waterfall.changes)] == [None] * 3
    for rows in (readable_rows, waterfall_rows):
        assert [row["contention_ms"] for row in rows(waterfall)] == [None, None]


def test_where_one_run_tells_no_contention_the_change_keeps_it_in_compute() -> None:
    before, after = waterfall_of(NAIVE, OVERLAP).budgets
    contended = replace(before, contention_ns=2, compute_ns=before.compute_ns - 2)
    change = subtract_budgets(*match_parts(MeasuredRun(NAIVE, contended), MeasuredRun(OVERLAP, after)))
    assert change.contention_ns is None
    assert change.compute_ns == after.compute_ns - before.compute_ns
    assert sum(getattr(change, f"{part}_ns") or 0 for part in PARTS) == change.step_ns


def test_contention_is_no_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_prof.analyze.kernels.contention.LEAST_KERNELS", 4)
    monkeypatch.setattr(RunAnalysis, "has_same_workload", lambda self, other: self is not other)
    runs = []
    for label, overlaps in (("naive", False), ("overlap", True)):
        trace = load_trace(write_capture(tmp_path / f"{label}.sqlite", kernels_beside_communication(overlaps)))
        kernels = [find_kernel_runs(rank) for rank in find_rank_events(trace)]
        runs.append((analysis_of(trace, label=label), kernels))
    overlap = measure_waterfall(runs).budgets[1]
    assert (overlap.compute_ns, overlap.contention_ns) == (KERNELS * ALONE, 4 * (BESIDE - ALONE))
    assert sum(parts_of(overlap).values()) == overlap.step_ns


def test_a_run_without_steps_is_left_out() -> None:
    trace = draw_trace(streams={7: "aa"})
    waterfall = waterfall_of(replace(analysis_of(trace), label="x"), NAIVE)
    assert (waterfall.left_out, waterfall.changes) == (("x",), ())
    (how, *_) = waterfall_notes(waterfall)
    assert how == "mean step, ms: the first row has the parts of the step", "nothing is said of changes"
    assert not any("mean step" in note for note in waterfall_notes(waterfall_of(analysis_of(trace))))
    assert draw_waterfall(waterfall_of()).layout.title.text == "<b>No run marks its steps</b>"


def test_a_run_of_which_nothing_but_steps_is_known_has_no_parts() -> None:
    """A job of one rank communicates with nobody; its compute was said to be 0."""
    waterfall = waterfall_of(run_of("x", {"step|index=1": "####"}), run_of("y", {"backward": "####"}))
    assert [(budget.label, budget.compute_ns) for budget in waterfall.budgets] == [("y", 4)]
    assert (waterfall.unknown, waterfall.left_out, waterfall.untimed) == (("x",), (), ())


def test_a_run_of_one_rank_whose_kernels_have_no_name_has_no_parts() -> None:
    """It communicates with nobody; its compute was said to be 0, although a kernel ran."""
    drawn = draw_trace(
        ranges={"step|index=1": "####"}, launches={"main": "a..."}, streams={7: ".aa."}, ranks={PID: 0}, world_size=1
    )
    nameless = replace(drawn.activities, category=np.array([Category.UNKNOWN]), name_id=np.array([UNKNOWN]))
    known, unknown = (waterfall_of(analysis_of(replace(drawn, activities=one))) for one in (drawn.activities, nameless))
    assert [budget.compute_ns for budget in known.budgets] == [2]
    assert (unknown.budgets, unknown.unknown) == ((), ("drawn",))


def test_a_run_on_another_device_is_no_change() -> None:
    waterfall = waterfall_of(NAIVE, replace(NAIVE, label="elsewhere", device="cuda"))
    assert [budget.label for budget in waterfall.budgets] == ["naive"]
    assert (waterfall.changes, waterfall.other_device) == ((), ("elsewhere",))
    assert "elsewhere: left out, it ran on another device than the first run" in waterfall_notes(waterfall)


def run_of_steps(label: str, *ranks: list[int]) -> RunAnalysis:
    """Steps of nothing but compute, so many nanoseconds each."""
    world, traces = max(2, len(ranks)), []
    for rank, lengths in enumerate(ranks):
        ranges, time = [(f"process|rank={rank}|world={world}", "#" * sum(lengths))], 0
        for index, length in enumerate(lengths):
            picture = "." * time + "#" * length
            ranges += [(f"step|index={index}", picture), ("backward", picture)]
            time += length
        traces.append(draw_trace(ranges=ranges, ranks={PID: rank}, world_size=world, path=f"{label}{rank}"))
    return analysis_of(*traces, label=label)


def test_a_change_within_the_scatter_of_the_steps_is_none_that_can_be_told() -> None:
    """As of compute, 30.1 ms less from naive to flat, which do the same work: it scatters by more than that."""
    naive, flat = run_of_steps("naive", [150, 90, 210, 130, 170]), run_of_steps("flat", [120, 60, 180, 100, 140])
    (change,) = waterfall_of(naive, flat).changes
    assert change.compute_ns == -30
    assert change.half_width_ns["compute"] > 30
    assert (change.is_beyond_spread("compute"), change.is_beyond_spread("step")) == (False, False)


def test_a_change_beyond_the_scatter_is_told() -> None:
    (change,) = waterfall_of(
        run_of_steps("naive", [1500, 1510, 1490, 1500]), run_of_steps("flat", [1200, 1210, 1190, 1200])
    ).changes
    assert (change.compute_ns, change.is_beyond_spread("compute")) == (-300, True)
    # Of each run 7.5, as 9 of 256 draws are that far below, times 1.87 for four steps.
    alone = 2**0.5 * 7.5 * 1.875
    assert change.half_width_ns["step"] == pytest.approx(1.144 * alone, abs=1), "half of all misses"
    assert change.half_width_ns["compute"] == pytest.approx(1.432 * alone, abs=1), "of five parts, the other half"
    assert (change.rest_ns, change.half_width_ns["rest"]) == (0, 0), "all of each step is compute"


def test_a_part_has_no_more_digits_than_its_bar_has_room_for() -> None:
    """'+0.166' of a step of 242 ms was written in letters half as high as the others."""
    bars = [Bar("naive", "step", 0, 298.0), Bar("", "tail", 298, -40.62), Bar("", "small parts", 257.4, 0.166)]
    assert comparison._waterfall_bars(bars)["text"] == ["298", "-40.6", "+0.2"]
    in_microseconds = [bar._replace(length=bar.length / 1e4) for bar in bars]
    assert comparison._waterfall_bars(in_microseconds)["text"] == ["0.0298", "-0.00406", "+0.000020"]


def test_the_picture_marks_what_cannot_be_told() -> None:
    scattered = waterfall_of(
        run_of_steps("naive", [150, 90, 210, 130, 170]), run_of_steps("flat", [120, 60, 180, 100, 140])
    )
    clear = waterfall_of(
        run_of_steps("naive", [1500, 1510, 1490, 1500]), run_of_steps("flat", [1200, 1210, 1190, 1200])
    )
    for waterfall, shape in ((scattered, "/"), (clear, "")):
        (figure,) = draw_waterfall(waterfall).data
        assert list(figure.marker.pattern.shape) == ["", shape, ""]
        assert ("hatched" in draw_waterfall(waterfall).layout.title.subtitle.text) == bool(shape)
        assert ("no clear change" in figure.hovertext[1]) == bool(shape)
        signs = [re.search(r"<br>(\D*)[\d.]+ ms", text)[1] for text in figure.hovertext]
        assert signs == ["", "-", ""], "a run has a length, only a part has a change"


@pytest.mark.parametrize(("steps", "vary"), [([150, 90, 210, 130, 170], True), ([150] * 5, False)])
def test_steps_are_said_to_vary_too_much_where_a_change_lies_within_that(steps: list[int], vary: bool) -> None:
    """It was said below each waterfall, also of steps that are all alike."""
    waterfall = waterfall_of(run_of_steps("naive", steps), run_of_steps("flat", steps))
    assert any("within ±" in str(cell) for row in readable_rows(waterfall) for cell in row.values()) == vary
    assert any("vary too much" in note for note in waterfall_notes(waterfall)) == vary


def test_two_steps_tell_no_scatter() -> None:
    (change,) = waterfall_of(run_of_steps("naive", [150, 90]), run_of_steps("flat", [20, 21])).changes
    assert change.half_width_ns == {}
    assert change.is_beyond_spread("compute") is None


def test_ranks_with_other_numbers_of_steps_are_not_mixed() -> None:
    """Rank 0 has a step more. By step the ranks' mean is 20 each time: there is no scatter."""
    (budget,) = waterfall_of(run_of_steps("flat", [10, 30, 10, 30], [30, 10, 30])).budgets
    assert budget.half_width_ns["step"] == 0


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=3, max_size=6), st.integers(1, 30), st.integers(1, 3))
@examples(30)
def test_the_half_width_is_of_the_scatter_only(steps: list[int], more: int, ranks: int) -> None:
    """Longer steps scatter as much; ranks that do the same add no knowledge; a run differs from itself by nothing."""
    plain, longer = run_of_steps("naive", steps), run_of_steps("flat", *[[step + more for step in steps]] * ranks)
    first, second = waterfall_of(plain, longer).budgets
    assert first.half_width_ns == pytest.approx(second.half_width_ns, abs=1)  # ns: halves are rounded
    (change,) = waterfall_of(plain, run_of_steps("flat", steps)).changes
    assert not any(change.is_beyond_spread(part) for part in (*PARTS, "step"))


@pytest.mark.slow
@examples(40)
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
        assert sum(getattr(budget, f"{part}_ns") or 0 for part in PARTS) == budget.step_ns
    if waterfall.budgets:
        total = sum(change.step_ns for change in waterfall.changes)
        assert Fraction(total) == waterfall.budgets[-1].step_ns - waterfall.budgets[0].step_ns


def test_waiting_that_cannot_be_told_is_not_0() -> None:
    """Of one rank it is part of transfer and tail; the table said 0.00."""
    phases = {"backward": "##........", "synchronize": "..########"}
    early, late = (phases | {FIRST: picture} for picture in ("...#####..", ".....###.."))
    assert [row["wait_ms"] for row in waterfall_rows(waterfall_of(run_of("naive", early)))] == [None]
    # The only rank of a job waits for nobody: beside four, what these wait is what they add.
    assert [row["wait_ms"] for row in waterfall_rows(waterfall_of(run_of("naive", early, world=1)))] == [0]
    assert [row["wait_ms"] for row in waterfall_rows(waterfall_of(run_of("naive", early, late)))] == [1e-6]
