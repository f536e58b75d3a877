from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.present import theme
from ddp_prof.present.charts import comparison, run_label
from ddp_prof.present.charts.comparison import parts_ms
from ddp_prof.present.tables.compare import compare_rows
from tests.charts import validated
from tests.drawing import PID, draw_trace
from tests.present.runs import HOSTILE_TITLE, cost_of, cpu_run, result_of

HIDDEN, HALF, BARE = (
    result_of(cpu_run(shift=shift), label) for shift, label in ((0, "overlap"), (2, "bucketed"), (4, "naive"))
)
SILENT = result_of(draw_trace(streams={7: "aa"}), "one GPU")


def bars(figure, category: str):
    return next(item for item in figure.data if item.name == theme.LEGEND[category])


def draw_comparison(results):
    return validated(comparison.draw_comparison)(results, compare_variants(results))


def test_the_parts_are_those_of_the_table_and_sum_to_the_window() -> None:
    results = [HIDDEN, HALF, BARE]
    for summary, result in zip(compare_variants(results), results, strict=True):
        parts = parts_ms(summary)
        (row,) = compare_rows([summary], [cost_of(result)])
        assert (parts["exposed"], parts["overlapped"]) == (row["exposed_ms"], row["overlapped_ms"])
        assert row["comm_ms"] == pytest.approx(parts["exposed"] + parts["overlapped"])
        assert sum(parts.values()) * 1e6 == pytest.approx(summary.window_ns)


def test_of_unequal_steps_the_parts_are_those_of_one() -> None:
    """Medians of the parts, here 7 and 4, are those of no step."""
    steps = ["bbbbbbAAAA", "bbbbbbbbA", "bbbbbbbAAAAAAAAA"]
    run = "".join(steps)
    ranges = {f"step|index={number}": "." * run.index(step) + "#" * len(step) for number, step in enumerate(steps)}
    ranges["process|rank=0|world=1|variant=overlap|backend=gloo|device=cpu"] = "#" * len(run)
    for name, sign in (("backward", "b"), ("synchronize", "A"), ("all_reduce|bucket=0|bytes=8|params=1", "A")):
        ranges[name] = "".join("#" if each == sign else "." for each in run)
    (summary,) = compare_variants([result_of(draw_trace(ranges=ranges, ranks={PID: 0}))])
    parts = {part: round(ms * 1e6) for part, ms in parts_ms(summary).items()}
    assert (parts["compute_only"], parts["exposed"]) in [(step.count("b"), step.count("A")) for step in steps]
    assert sum(parts.values()) == summary.nearest_step_ns


def test_a_row_a_run_in_the_order_given() -> None:
    figure = draw_comparison([BARE, HIDDEN, HALF])
    assert [text.strip() for text in figure.layout.yaxis.ticktext] == [
        "<b>naive</b>",
        "<b>overlap</b>",
        "<b>bucketed</b>",
    ]
    assert list(figure.layout.yaxis.range) == [2.5, -0.5]  # the first on top
    assert [length * 1e6 for length in bars(figure, theme.OVERLAPPED).x] == pytest.approx([0, 4, 2])
    assert [length * 1e6 for length in bars(figure, theme.EXPOSED).x] == pytest.approx([4, 0, 2])


def test_each_step_is_a_dot_and_each_run_has_its_share() -> None:
    figure = draw_comparison([BARE, HALF])
    dots = [item for item in figure.data if item.name.startswith("overlap of one")]
    assert [list(dot.x) for dot in dots] == [[0, 0], [50, 50]]
    assert [item.text for item in figure.layout.annotations] == ["<b>0 %</b>", "<b>50 %</b>"]
    totals = next(item for item in figure.data if item.name == "overlap of all communication")
    assert list(totals.x) == [0, 50]


def test_a_dot_of_a_step_without_a_number_has_its_position() -> None:
    trace = draw_trace(ranges=[("step|", "###..###")], launches={"main": ".M...N.."}, streams={9: ".MM..NN."})
    (dots,) = (item for item in draw_comparison([result_of(trace)]).data if item.name.startswith("overlap of one"))
    assert [re.search(r"step \w+", text).group() for text in dots.hovertext] == ["step 0", "step 1"]


def test_the_headline_names_few_runs_or_the_extremes_and_a_cpu() -> None:
    title = draw_comparison([BARE, HIDDEN]).layout.title
    assert title.text == "<b>naive hides 0 %, overlap 100 % of their communication behind compute</b>"
    assert "device: cpu" in title.subtitle.text
    many = draw_comparison([HALF, BARE, HIDDEN, SILENT]).layout.title
    assert many.text == "<b>From 0 % (naive) to 100 % (overlap) of the communication hides behind compute</b>"
    alike = draw_comparison([BARE] * 4).layout.title
    assert alike.text == "<b>0 % of the communication hides behind compute</b>"


def test_numbers_of_ranks_are_not_a_fraction() -> None:
    """'1/2 ranks' may be one of two."""
    runs = [replace(BARE, ranks=BARE.ranks * count) for count in (8, 1, 2, 2)]
    assert [comparison.subtitle(runs[:count]).rpartition("·")[2].strip() for count in (1, 2, 4)] == [
        "8 ranks", "1 or 8 ranks", "1, 2 or 8 ranks",
    ]  # fmt: skip


def test_bars_are_as_long_as_the_steps_of_the_table() -> None:
    """The device ends what the first step launched at 14, when the host's step is over since 8."""
    late = draw_trace(
        ranges={"step|index=0": "########", "forward": ".##.....", "backward": "...####."},
        launches={"main": ".a.bB"},
        streams={7: "..aabbbb", 9: "......BB"},
    )
    (summary,) = compare_variants([result := result_of(late)])
    bars = [bar.x[0] for bar in draw_comparison([result]).data if bar.type == "bar"]
    assert sum(bars) == pytest.approx(summary.step_ns / 1e6) == pytest.approx(8e-6)


def test_an_exposed_part_too_thin_for_its_number_has_it_above() -> None:
    thin, wide = (
        draw_trace(
            ranges={"step|index=0": "#" * 60, "backward": "#" * 60},
            launches={"main": "aB"},
            streams={7: "." * 2 + "a" * 50, 9: "." * 50 + "B" * length},
        )
        for length in (3, 8)
    )
    texts = [[item.text for item in draw_comparison([result_of(trace)]).layout.annotations] for trace in (thin, wide)]
    assert [len(found) for found in texts] == [2, 1]
    assert texts[0][1] == "0.000001"  # ms


def test_without_steps_the_shares_take_the_room_of_the_bars() -> None:
    figure = draw_comparison([result_of(draw_trace(streams={7: "aa..", 9: ".BB."}), "no steps")])
    assert (figure.layout.xaxis2.domain, figure.layout.xaxis.visible) == ((0, 1), False)
    assert draw_comparison([BARE]).layout.xaxis2.domain[0] > 0.5


def test_what_cannot_be_known_is_left_out() -> None:
    assert parts_ms(compare_variants([SILENT])[0]) == {}


def test_a_step_is_drawn_with_the_communication_that_none_is_known_to_have_launched() -> None:
    """Its compute alone was, as if the step had been as short."""
    trace = draw_trace(
        ranges={"step 0": "########"}, launches={"main": "a......."}, streams={7: "aaaa....", 9: "..MMMM.."}
    )
    result = result_of(trace)
    (summary,) = compare_variants([result])
    lengths = {part: round(ms * 1e6) for part, ms in parts_ms(summary).items() if ms}
    assert lengths == {"compute_only": 2, "overlapped": 2, "exposed": 2, "idle": 2}
    drawn = {item.name for item in draw_comparison([result]).data if item.type == "bar"}
    assert drawn == {theme.LEGEND[part] for part in lengths}


@pytest.mark.parametrize("is_named", [True, False])
def test_no_share_of_a_step_is_drawn_where_that_of_its_rank_is_not_known(is_named: bool) -> None:
    pictures = {
        "process|rank=0|world=2|backend=gloo|device=cpu": "########",
        "step|index=0": "########",
        "backward": ".####...",
        "all_reduce|bucket=0|bytes=8|params=1": "..####..",
        **({"synchronize": ".....#.."} if is_named else {}),
    }
    result = result_of(draw_trace(ranges=pictures, ranks={PID: 0}))
    (dots,) = (item for item in draw_comparison([result]).data if (item.name or "").startswith("overlap of one"))
    assert len(dots.x or ()) == is_named
    assert [len(item.x or ()) for item in validated(comparison.draw_overlap_by_step)([result]).data] == [
        is_named,
        is_named,
    ]


def test_the_axis_says_where_parts_are_those_of_some_steps() -> None:
    pictures = {"step 0": "####", "step 1": "....####"}
    trace = draw_trace(ranges=pictures, launches={"main": "a...bM.."}, streams={7: "aa..bb..", 9: ".....MM."})
    titles = [draw_comparison([result]).layout.xaxis.title.text for result in (result_of(trace), BARE)]
    assert [title.partition(",")[0] for title in titles] == [
        "parts of the typical step that communicates",
        "parts of the typical step",
    ]
    figure = draw_comparison([SILENT])
    assert [item.text for item in figure.layout.annotations] == ["<b>n/a</b>"]
    assert figure.layout.title.text == f"<b>{SILENT.label}: how much communication hides is not known</b>"


def test_nothing_at_all_is_a_figure_too() -> None:
    assert draw_comparison([]).layout.title.text == "<b>how much communication hides is not known</b>"


def test_labels_are_text() -> None:
    hostile = result_of(cpu_run(), HOSTILE_TITLE)
    figure = draw_comparison([hostile, BARE])
    texts = [
        *figure.layout.yaxis.ticktext,
        figure.layout.title.text,
        *(t for d in figure.data for t in d.hovertext or ()),
    ]
    assert not any("<img" in text for text in texts)


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("naive", ["naive"]),
        ("bucketed 100 MB", ["bucketed 100 MB"]),
        ("nsys2022_4_ddp_unet_a100_rank0of4", ["nsys2022_4_ddp_", "unet_a100_rank0of4"]),
        ("x" * 30, ["x" * 22, "x" * 8]),
    ],
)
def test_a_long_label_is_wrapped_and_not_clipped(label: str, lines: list[str]) -> None:
    assert re.findall(r"<b>(.*?)</b>", run_label(label)) == lines
