from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.present.charts.comparison import (
    draw_comparison,
    draw_overlap_by_step,
    draw_step_times,
)
from tests.charts import validated
from tests.drawing import draw_trace
from tests.present.runs import HOSTILE_TITLE, cpu_run, result_of

draw_comparison = validated(draw_comparison)
draw_overlap_by_step = validated(draw_overlap_by_step)
draw_step_times = validated(draw_step_times)

HALF, BARE = (result_of(cpu_run(steps=3, shift=shift), label) for shift, label in ((2, "bucketed"), (4, "naive")))
SILENT = result_of(draw_trace(streams={7: "aa"}), "one GPU")


def with_shares(*overlapped_ns: int):
    """One step of as many ranks, of whose 4 ns of communication so much is overlapped."""
    (rank,) = HALF.ranks
    steps = [replace(rank.steps[0], overlapped_ns=item, exposed_ns=4 - item) for item in overlapped_ns]
    return replace(HALF, ranks=tuple(replace(rank, steps=(step,)) for step in steps))


def test_each_step_has_its_share_under_its_number() -> None:
    _, bare, _, half = draw_overlap_by_step([BARE, HALF]).data
    for dots, share in ((bare, "0 %"), (half, "50 %")):
        shown = [f"step {step}: {share} overlapped" for step in range(3)]
        assert [text.partition(", ")[2] for text in dots.hovertext] == shown
        assert list(dots.x) == [0, 1, 2]


def test_steps_that_come_again_are_told_apart() -> None:
    trace = cpu_run(steps=3)
    epochs = result_of(replace(trace, names=tuple(name.replace("index=2", "index=0") for name in trace.names)))
    figure = draw_overlap_by_step([epochs])
    line, dots = figure.data
    assert list(line.x) == [0, 1, 2]
    names = ["step 0 (1 of 2)", "step 1", "step 0 (2 of 2)"]
    assert [re.search("step [^:]*", text).group() for text in dots.hovertext] == names
    assert figure.layout.xaxis.title.text == "step, counted from the first"
    (summary,) = compare_variants([epochs])
    hovers = " ".join(text for each in draw_comparison([epochs], [summary]).data for text in each.hovertext or ())
    assert re.findall(r"step \d[^,]*", hovers) == names


def test_a_dot_a_rank_and_a_line_through_their_mean() -> None:
    line, dots = draw_overlap_by_step([with_shares(0, 4)]).data
    top, middle, bottom = min(dots.y), line.y[0], max(dots.y)
    assert middle == pytest.approx((top + bottom) / 2)
    assert list(line.x) == [0]
    assert {text[-len("100 % overlapped") :].strip(" :") for text in dots.hovertext} == {
        "0 % overlapped",
        "100 % overlapped",
    }
    limits = {shape.y0 for shape in draw_overlap_by_step([with_shares(0, 4)]).layout.shapes}
    assert limits == {top, bottom}


def test_runs_keep_the_order_given_and_their_bands_apart() -> None:
    figure = draw_overlap_by_step([BARE, HALF])
    assert [text.strip() for text in figure.layout.yaxis.ticktext] == ["<b>naive</b>", "<b>bucketed</b>"]
    _, bare, _, half = figure.data
    assert max(bare.y) < min(half.y)  # the axis counts downwards
    assert list(figure.layout.yaxis.range) == [1.5, -0.5]


def test_times_are_those_of_the_host() -> None:
    (box,) = draw_step_times([HALF]).data
    assert [time * 1e6 for time in box.x] == pytest.approx([20, 20, 20])
    assert box.boxpoints == "all"
    assert [text.partition("<br>")[2] for text in box.hovertext] == [f"step {step}, rank 0" for step in range(3)]


@pytest.mark.parametrize("draw", [draw_overlap_by_step, draw_step_times])
def test_every_chart_says_its_device_and_takes_any_runs(draw) -> None:
    assert "device: cpu" in draw([HALF]).layout.title.subtitle.text
    assert all(not len(trace.x) for trace in draw([SILENT]).data)
    assert len(draw([]).data) == 0


@pytest.mark.parametrize("draw", [draw_overlap_by_step, draw_step_times])
def test_labels_are_text(draw) -> None:
    figure = draw([result_of(cpu_run(), HOSTILE_TITLE)])
    hovers = [text for trace in figure.data for text in trace.hovertext or ()]
    texts = [*figure.layout.yaxis.ticktext, *hovers, *(trace.name or "" for trace in figure.data)]
    assert not any("<img" in text for text in texts)
    assert any("&lt;img" in text for text in texts)
