"""One step, drawn: what the figure of a step shows and where."""

from __future__ import annotations

from dataclasses import replace

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.step_view import ExposedStretch, view_step
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.charts.collectives import MOST_ROWS, draw_step_collectives
from ddp_prof.present.headlines import Headline
from tests.analyze.collectives.test_straggler import LATE_MS, MS, rank_capture, run_of
from tests.analyze.collectives.test_timing import OURS
from tests.charts import validated
from tests.drawing import draw_trace
from tests.measuring import analysis_of
from tests.nsys_factory import write_capture
from tests.present.runs import HOSTILE_TITLE

draw_step_collectives = validated(draw_step_collectives)

RUN = analysis_of(OURS)


def test_a_step_is_told_from_its_first_launch() -> None:
    (rank,) = view_step(RUN, 4)
    first, second = rank.collectives
    assert (first.launch_ns, first.ready_ns, first.start_ns, first.end_ns) == (0, 5, 5, 9)
    assert (second.launch_ns, second.ready_ns, second.start_ns, second.end_ns) == (4, 14, 14, 18)
    assert first.exposed == (ExposedStretch("backward", "transfer", False, 5, 9),)
    assert second.exposed == (ExposedStretch("tail", "transfer", False, 14, 18),)
    assert rank.backward_ends_ns == (14,)
    assert rank.compute == ((0, 5), (11, 14))


def test_ranks_share_a_clock_and_show_who_waits(tmp_path) -> None:
    files = [write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)]
    run = run_of(*map(load_trace, files))
    step = measure_collectives(run).typical_step
    assert step is not None
    (early,), (late,) = (rank.collectives for rank in view_step(run, step))
    assert abs(late.start_ns - early.start_ns - LATE_MS * MS) < 0.05 * MS
    assert [(stretch.when, stretch.why, stretch.is_wait) for stretch in early.exposed] == [
        ("tail", "peer_wait", True),
        ("tail", "transfer", False),
    ]
    assert abs(early.exposed[0].end_ns - early.exposed[0].start_ns - LATE_MS * MS) < 0.05 * MS
    total = sum(stretch.end_ns - stretch.start_ns for stretch in early.exposed)
    (measured,) = (
        collective
        for collective in measure_collectives(run).collectives
        if (collective.rank, collective.step) == (0, step)
    )
    assert total == measured.exposed_ns


def test_the_figure_has_a_row_a_collective_and_a_colour_a_reason() -> None:
    figure = draw_step_collectives(RUN, 4, view_step(RUN, 4), Headline("50 % is tail", HOSTILE_TITLE))
    names = [item.name for item in figure.data if item.type == "bar"]
    assert names == [
        "compute",
        "exposed: transfer",
    ]
    assert [text.strip() for text in figure.layout.yaxis.ticktext] == [
        "<b>rank 0</b>  compute",
        "bucket 0, 3.91 KiB",
        "bucket 1, 7.81 KiB",
    ]
    assert "<img" not in figure.layout.title.subtitle.text


def test_of_many_collectives_those_exposed_longest_are_shown() -> None:
    (rank,) = view_step(RUN, 4)
    lines = [replace(rank.collectives[0], index=index, bucket=index, exposed=()) for index in range(100)]
    bare = replace(rank.collectives[1], index=100, bucket=100)
    figure = draw_step_collectives(RUN, 4, [replace(rank, collectives=(*lines, bare))], Headline("tail"))
    assert len(figure.layout.yaxis.tickvals) == MOST_ROWS + 1
    assert figure.layout.yaxis.ticktext[-1].startswith("bucket 100")
    assert "the 60 of 101 collectives that are exposed longest" in figure.layout.title.subtitle.text


def test_a_step_without_communication_has_no_lives() -> None:
    assert view_step(RUN, 99) == ()


def test_without_collectives_no_step_is_typical() -> None:
    silent = analysis_of(draw_trace(ranges={"step 0": "######"}, streams={7: "ccccc."}))
    assert measure_collectives(silent).typical_step is None


def test_exposed_time_that_is_counted_elsewhere_does_not_pass_for_overlapped() -> None:
    """
    compute     ####............
    collective  ..##########....   2 overlapped, 3 its own tail, 5 counted with another collective
    """
    (rank,) = view_step(RUN, 4)
    tail = (ExposedStretch("tail", "transfer", False, 9, 12),)
    line = replace(rank.collectives[0], start_ns=2, end_ns=12, exposed=tail, ready_ns=None, launch_ns=None)
    figure = draw_step_collectives(RUN, 4, [replace(rank, compute=((0, 4),), collectives=(line,))], Headline("tail"))
    lengths = {bar.name: [round(1e6 * length) for length in bar.x] for bar in figure.data if bar.type == "bar"}
    assert lengths == {
        "compute": [4], "overlapped": [2], "exposed, counted with another collective": [5], "exposed: transfer": [3]
    }  # fmt: skip
