"""Ranks in files of their own, with clocks of their own: who is late, and what is waiting and what transfer."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof import load_runs
from ddp_prof.analyze.collectives.alignment import Alignment, align_clocks
from ddp_prof.analyze.collectives.late_by_chance import find_straggler
from ddp_prof.analyze.collectives.matching import match_collectives
from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
from ddp_prof.analyze.collectives.step_view import view_step
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.overlap import measure_overlap, merge_ranks
from ddp_prof.analyze.root_cause import RootCause, explain_run, find_root_cause
from ddp_prof.ingest.load import load_trace
from ddp_prof.notes import Doubt
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.present.charts.collectives import draw_skew
from ddp_prof.present.skew_headlines import skew_headline
from ddp_prof.present.tables.skew import skew_view
from ddp_prof.runs.report import LoadOptions
from ddp_prof.trace import Trace
from tests.charts import validated
from tests.drawing import PID, draw_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of, results_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture

draw_skew = validated(draw_skew)

MS = 1_000_000
STEPS, WORLD = 20, 2
LATE_MS, CLOCK_MS, TRANSFER_MS, JITTER_MS = 5, 3, 10, 0.01


def rank_capture(rank: int, world: int = WORLD) -> Capture:
    """Rank 1 computes 5 ms longer, so its peers wait; its clock is 3 ms ahead; ends differ by some microseconds.

    ms      0                   20   25        35     37
    rank 0  BBBBBBBBBBBBBBBBBBBBB..............OO
               all-reduce        NNNNNNNNNNNNNN         5 wait, 10 transfer
    rank 1  BBBBBBBBBBBBBBBBBBBBBBBBBB.........OO
               all-reduce             NNNNNNNNN         10 transfer
    """
    generator = np.random.default_rng(rank)
    process, late = 100 + rank, LATE_MS if rank == 1 else 0
    capture = Capture(threads={(process, process): "python3", (process, 131): "pt_autograd_0"})
    whole = f"process|rank={rank}|world={world}|variant=flat|backend=nccl|device=cuda"
    ranges = [(whole, 0, 50 * STEPS, process)]
    for step in range(STEPS):
        begin = 50 * step + 1
        ready = begin + 20 + late
        end = begin + 20 + LATE_MS + TRANSFER_MS + generator.uniform(-JITTER_MS, JITTER_MS)
        ranges += [
            (f"step|index={step}", begin, begin + 8, process),
            ("backward", begin, begin + 4, process),
            ("all_reduce|bucket=0|bytes=1000000|params=3", begin + 1, begin + 6, 131),
        ]
        for name, start, stop, launch, stream in (
            ("gemm", begin + 0.1, ready, 0.05, 7),
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", ready, end, 1.5, 9),
            ("adam", end, end + 2, 7, 7),
        ):
            thread = process if name == "adam" else 131
            at = [round((item + CLOCK_MS * rank) * MS) for item in (start, stop, begin + launch)]
            capture.kernels.append(Kernel(name, *at, thread, process, stream))
    for name, start, stop, thread in ranges:
        at = [round((item + CLOCK_MS * rank) * MS) for item in (start, stop)]
        capture.ranges.append(Range(name, *at, thread, process, "ddp_prof", is_start_end=name.startswith("all_reduce")))
    return capture


def run_of(*traces: Trace) -> RunAnalysis:
    return analysis_of(*traces)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return [write_capture(folder / f"x.rank{rank}.sqlite", rank_capture(rank)) for rank in range(WORLD)]


def test_two_files_with_clocks_apart_and_a_late_rank(files: list[Path]) -> None:
    run = run_of(*map(load_trace, files))
    result = measure_collectives(run)
    assert (result.matched, result.unmatched) == (STEPS, 0)
    assert {collective.exposed_wait_ns for collective in result.collectives if collective.rank == 1} <= set(
        range(30_000)
    )
    for item in result.collectives:
        assert item.transfer_ns == pytest.approx(TRANSFER_MS * MS, rel=0.002), "not the other rank's wait"
        assert item.wait_ns == pytest.approx(LATE_MS * MS if item.rank == 0 else 0, rel=0.01, abs=0.02 * MS)
        assert item.exposed_wait_ns == item.wait_ns, "nothing is computed meanwhile"
        assert item.exposed_transfer_ns == item.transfer_ns
        assert item.when_ns("tail") == item.exposed_ns, "both ranks are done with backward"
        assert item.why_ns("peer_wait") == item.wait_ns
        assert item.why_ns("transfer") == item.exposed_ns - item.wait_ns
        assert item.busbw_bytes_per_s == pytest.approx(1_000_000 / (TRANSFER_MS / 1000), rel=0.002)
    alignment = result.alignment
    assert alignment.method == "session start, ends of matched collectives"
    assert alignment.residual_p95_ns is not None
    assert 0 < alignment.residual_p95_ns < 2.5 * JITTER_MS * MS
    assert abs(alignment.offset_for(files[1]).offset_ns + CLOCK_MS * MS) <= alignment.residual_p95_ns


def test_a_step_takes_no_memory_for_the_collectives_of_others(tmp_path: Path) -> None:
    """A thousand steps took a megabyte for each thousand collectives."""
    steps, capture = 1000, Capture()
    for process in (100, 101):
        for begin in range(0, steps * 100, 100):
            capture.ranges.append(Range(f"step {begin // 100}", begin, begin + 100, process, process))
            capture.kernels.append(Kernel("ncclDevKernel_AllReduce", begin + 20, begin + 50, begin, process, process))
    run = run_of(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert len(run.matches) == len(run.exposures[0].exposed_ns) == steps
    tracemalloc.start()
    found = measure_skew(run).steps
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.step for one in found] == list(range(steps))
    assert most_bytes < 1000 * steps


def test_the_late_rank_is_named(files: list[Path]) -> None:
    run = run_of(*map(load_trace, files))
    skew = measure_skew(run)
    assert skew.straggler == 1
    first, second = skew.ranks
    assert (first.last_steps, second.last_steps, second.last_collectives) == (0, STEPS, STEPS)
    assert second.lag_ns == pytest.approx(LATE_MS * MS, rel=0.01)
    assert second.cost_ns == pytest.approx(STEPS * LATE_MS * MS, rel=0.01)
    view = skew_view(run, skew)
    assert "Rank 1 arrives last in 20 of 20 steps, by 5.00 ms (median)" in view.title
    json.dumps(view.document, allow_nan=False)
    figure = draw_skew(run, skew)
    assert max(figure.data[0].z[1]) == pytest.approx(LATE_MS, rel=0.01)
    assert max(figure.data[0].z[0]) <= figure.data[0].zmin == 0


@pytest.mark.parametrize(
    ("times_last", "straggler"),
    [
        ([1, 9], 1), ([4, 6], None), ([0, 6], 1), ([3, 3, 3, 7], None), ([30_000, 70_000], 1), ([0, 0], None),
        ([0, 5], None),  # of two equal ranks one or the other is last in all of five steps in 6 % of the runs
        ([2, *[1] * 18, *[0] * 45], None),  # of 64 equal ranks some one is last twice in 20 steps, as a rule
    ],
)  # fmt: skip
def test_a_rank_is_a_straggler_only_beyond_chance(times_last: list[int], straggler: int | None) -> None:
    last = np.repeat(np.arange(len(times_last)), times_last)
    np.random.default_rng(0).shuffle(last)  # in no order
    assert find_straggler(last, len(times_last)) == straggler


@pytest.mark.parametrize(
    ("last", "straggler"),
    [
        ("000000000011110000001111000000", None),  # late three times, for long
        ("000010010100000010001000010010", 0),  # as often, and in no order
        ("00000000000000001111", 0),  # late from the beginning to a change, or from a change on
        ("11110000000000000000", 0),
        ("00000000000000000000", 0),
        ("01010101010101010101", None),
        ("0000000", 0),
        ("1000000", None),  # of two equal ranks, in 12 % of the runs; likeness is not told of seven steps
        ("2222222222222222222201230123", 2),
    ],
)  # fmt: skip
def test_steps_in_a_row_with_the_same_last_rank_count_as_fewer(last: str, straggler: int | None) -> None:
    assert find_straggler([int(rank) for rank in last], 1 + max(1, *map(int, last))) == straggler


def test_moments_in_which_ranks_are_slowed_make_no_straggler() -> None:
    """Of 200 runs of eight equal ranks in 50 steps, at most 12 % have one; without likeness 26 % had."""
    generator = np.random.default_rng(1)
    found = 0
    for _ in range(200):
        late = generator.standard_normal((50, 8))
        for step in range(1, 50):
            late[step] = 0.6 * late[step - 1] + 0.8 * late[step]
        found += find_straggler(late.argmax(axis=1), 8) is not None
    assert found <= 24


def test_steps_without_a_late_rank_are_no_trials() -> None:
    """Rank 1 is late in seven of seven steps in which anybody is; all begin together in the other 33."""
    run = ranks_that_start([[2] * 40, [*[4] * 7, *[2] * 33]])
    skew = measure_skew(run)
    assert (skew.straggler, skew.ranks[1].last_steps, len(skew.steps)) == (1, 7, 40)
    assert skew_headline(skew).claim.startswith("Rank 1 arrives last in 7 of 40 steps")


def test_a_rank_that_is_missing_is_named_and_nothing_is_made_up(files: list[Path]) -> None:
    run = run_of(load_trace(files[0]))
    result = measure_collectives(run)
    assert result.alignment.missing_ranks == (1,)
    assert {
        (collective.transfer_ns, collective.wait_ns, collective.exposed_wait_ns) for collective in result.collectives
    } == {(None,) * 3}
    assert {collective.why_ns("peer_wait") for collective in result.collectives} == {0}
    assert any("rank 1 is not among the traces" in warning for warning in result.warnings)
    skew = measure_skew(run)
    assert "at least two ranks" in (skew.reason or "")
    assert skew_view(run, skew).rows == []


def test_what_a_rank_without_kernels_waits_and_costs_is_not_known(tmp_path: Path) -> None:
    """Its wait, its cost and the number of steps in which it was last were 0."""
    for rank in range(3):
        capture = rank_capture(rank, world=3)
        capture.kernels = [one for one in capture.kernels if rank < 2 or not one.name.startswith("nccl")]
        write_capture(tmp_path / f"rank{rank}.sqlite", capture)
    skew = measure_skew(load_runs(tmp_path)[0].analysis())
    first, late, silent = skew.ranks
    assert (silent.matched, silent.exposed_wait_ns, silent.cost_ns, silent.last_of_steps, silent.last_ratio) == (
        0, None, None, None, None,
    )  # fmt: skip
    assert late.cost_ns
    assert late.last_of_steps == STEPS
    assert first.exposed_wait_ns
    assert first.cost_ns == 0


def test_of_three_ranks_the_two_that_are_there_are_compared(tmp_path: Path) -> None:
    present = [write_capture(tmp_path / f"x.rank{rank}.sqlite", rank_capture(rank, world=3)) for rank in (1, 2)]
    run = run_of(*map(load_trace, present))
    skew = measure_skew(run)
    assert skew.alignment.missing_ranks == (0,)
    assert (skew.ranks[skew.straggler or 0].rank, skew.straggler) == (1, 0)
    (missing,) = (warning for warning in skew.warnings if "rank 0 is not among the traces" in warning)
    assert missing.endswith("than reported, and it may be the last rank"), (
        "'rank 1 arrives last' is of those that are there"
    )


def cpu_rank(
    rank: int, first: str, second: str, path: str = "x.sqlite", shift: int = 0, phases: dict[str, str] | None = None
) -> Trace:
    def moved(picture: str) -> str:
        return "." * shift + picture

    return draw_trace(
        ranges={
            f"process|rank={rank}|world=2": moved("#" * 30),
            "step|index=0": moved("#" * 15),
            "step|index=1": moved("." * 15 + "#" * 15),
            "all_reduce|bucket=0|bytes=8|params=1": moved(first),
            "all_reduce|bucket=1|bytes=8|params=1": moved(second),
            **(phases or {}),
        },
        ranks={PID: rank},
        world_size=2,
        path=path,
    )


def without_steps(trace: Trace) -> Trace:
    return replace(trace, names=tuple(name.replace("step|", "epoch|") for name in trace.names))


def test_a_rank_without_steps_is_no_step_of_the_others() -> None:
    """Its whole capture counted as step 0: it was an outlier, and made another step the typical one."""
    pictures = (".####............#", ".................###")
    marked, unmarked = cpu_rank(0, *pictures, path="a"), without_steps(cpu_rank(1, *pictures, path="b"))
    alone, both = results_of(marked), results_of(marked, unmarked)
    assert both.exposed_by_step == alone.exposed_by_step == {0: 4, 1: 3}
    assert both.outliers == alone.outliers
    assert {collective.rank for key in (0, 1) for collective in both.of_step(key)} == {0}
    assert {rank.name for key in (0, 1) for rank in view_step(both.run, key)} == {"rank 0"}
    assert both.warnings[-2:] == (
        "the trace of rank 1 marks no whole step, so no tail is known: see --step-range",
        "no compute of any step is known to be backward, so no tail is known (see --backward-range)",
    )
    overlap = merge_ranks([measure_overlap(marked), measure_overlap(unmarked)])
    assert overlap.step_notes == (
        "rank 1: no whole step is marked, so figures per step are those of other ranks (see --step-range)",
    )
    assert {type(note) for note in overlap.step_notes} == {Doubt}
    assert measure_overlap(unmarked).step_notes == ()


@pytest.mark.parametrize(
    ("second", "backward", "told"),
    [
        ("", "#", ""),  # it was said that the tail of the second step is not known
        ("." * 20 + "###", "#", "of some steps"),
        ("." * 20 + "###", "#" + "." * 15 + "#", ""),
        ("." * 20 + "###", "", "of any step"),
    ],
)
def test_only_a_step_that_communicates_has_a_tail_that_is_not_known(second: str, backward: str, told: str) -> None:
    phases = {"backward": backward, "forward": "." * 4 + "#" + "." * 13 + "#"}
    warnings = results_of(cpu_rank(0, ".####", second, phases=phases)).warnings
    found = [text for text in warnings if "known to be backward" in text]
    assert [told in text for text in found] == ([True] if told else [])


def test_of_a_rank_whose_steps_are_all_of_warm_up_it_is_not_said_that_none_are_marked() -> None:
    marked, other = cpu_rank(0, ".####", "", path="a"), cpu_rank(1, "", "." * 32 + "####", path="b")
    warm = replace(other, names=tuple(name.replace("step|", "step|warmup=1|") for name in other.names))
    assert not [text for text in results_of(marked, warm).warnings if "marks no whole step" in text]
    assert merge_ranks([measure_overlap(marked), measure_overlap(warm)]).step_notes == ()


def test_a_rank_whose_steps_are_all_of_warm_up_does_not_hide_the_lags_of_others() -> None:
    ranks = [cpu_rank(0, ".####", "." * 16 + "####"), cpu_rank(1, "..###", "." * 17 + "###"), cpu_rank(2, ".####", "")]
    warm = replace(ranks[2], names=tuple(name.replace("step|", "step|warmup=1|") for name in ranks[2].names))
    skew = measure_skew(run_of(*ranks[:2], warm))
    assert (skew.reason, [rank.last_steps for rank in skew.ranks]) == (None, [0, 2, 0])


def test_where_a_rank_without_steps_alone_communicates_the_cause_is_of_no_step() -> None:
    """The command ended with a traceback."""
    silent, unmarked = cpu_rank(0, "", "", path="a"), without_steps(cpu_rank(1, ".####", "", path="b"))
    cause = explain_run(analysis_of(silent, unmarked)).root_cause
    assert cause is not None
    assert (cause.step, cause.exposed_ns) == (None, 4)


def test_ranks_of_one_process_number_are_kept_apart() -> None:
    """As in Kineto's files, which all call their process 0."""
    run = run_of(cpu_rank(0, ".##............", "", path="a"), cpu_rank(1, ".##............", "", path="b"))
    headline = find_root_cause(measure_collectives(run))
    assert headline is not None
    assert (headline.collectives_per_step, headline.is_last) == (1, True)


def test_collectives_are_matched_by_their_order_in_the_step() -> None:
    run = run_of(
        cpu_rank(0, ".##............##", "....###..........."),
        cpu_rank(1, ".##............##", "....###..........##"),
    )
    matches = match_collectives(run.ranks)
    assert matches.rows.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert matches.unmatched == 1, "rank 0 has no bucket 1 in step 1"
    twice = run_of(cpu_rank(0, ".##..........##..##", ""), cpu_rank(1, ".##..........##..##.##", ""))
    assert match_collectives(twice.ranks).rows.tolist() == [[0, 0], [1, 1]], "in step 1 the ranks count differently"


def test_what_one_rank_ends_before_another_begins_is_no_collective_of_both() -> None:
    """Ranks 0 and 1 of one communicator, 2 and 3 of another one, which no name tells apart."""
    first, second = ".##............##", ".....##...........##"
    run = run_of(*(cpu_rank(rank, first if rank < 2 else second, "") for rank in range(4)))
    assert (len(match_collectives(run.ranks)), match_collectives(run.ranks).unmatched) == (0, 8)
    assert measure_skew(run).reason == "what may be one collective often ended on one rank before it began on another"
    apart = run_of(cpu_rank(0, first, "", path="a"), cpu_rank(2, second, "", path="b"))
    assert len(match_collectives(apart.ranks)) == 2, "of two clocks this is not known"


def test_without_steps_collectives_are_counted() -> None:
    """Three collectives, at two of which rank 1 arrives last: the whole capture is no step."""
    launches, late = "A..B..C...", (".AAA.BBB.CCC", "..AA..BB.CCC")
    run = run_of(
        *(draw_trace(launches={"main": launches}, streams={9: one}, ranks={PID: at}) for at, one in enumerate(late))
    )
    skew = measure_skew(run)
    assert (
        skew_headline(skew).text
        == "The trace marks no whole step; rank 1 arrives last at 2 of 3 collectives, by 0.0 µs (median)."
    )
    assert "0 steps" not in skew_view(run, skew).title


def test_without_steps_each_rank_costs_the_others_what_they_wait_for_it() -> None:
    """At A rank 0 waits 2 for rank 1, at B and C rank 1 waits 1 and 3 for rank 0: the whole capture is no step."""
    launches, drawn = "A....B......C", (".AAAA.BB......CC", "...AABBB...CCCCC")
    run = run_of(
        *(draw_trace(launches={"main": launches}, streams={9: one}, ranks={PID: at}) for at, one in enumerate(drawn))
    )
    skew = measure_skew(run)
    assert (skew.steps, [rank.last_steps for rank in skew.ranks]) == ((), [0, 0])
    assert [(rank.last_collectives, rank.exposed_wait_ns, rank.cost_ns) for rank in skew.ranks] == [
        (2, 2, 4),
        (1, 4, 2),
    ]
    assert [(rank.lag_ns, rank.worst_lag_ns) for rank in skew.ranks] == [(1, 3), (-1, 2)]
    assert [row["costs_others_ms"] for row in skew_view(run, skew).rows] == [4e-6, 2e-6]
    heat, bars = draw_skew(run, skew).data
    assert (heat.z.tolist(), bars.y.tolist()) == ([[3e-6], [2e-6]], [6e-6])


def test_without_steps_nobody_is_called_late_who_is_not() -> None:
    together, tie = (".AAA.BBB", ".AAA.BBB"), (".AAA..BB", "..AA.BBB")
    said = []
    for drawn in (together, tie):
        launches = {"main": "A...B"}
        ranks = [draw_trace(launches=launches, streams={9: one}, ranks={PID: at}) for at, one in enumerate(drawn)]
        skew = measure_skew(run_of(*ranks))
        said.append(skew_headline(skew).text)
    first, second = skew.ranks
    said.append(skew_headline(replace(skew, ranks=(replace(first, matched=3), second))).text)
    assert said == [
        "The trace marks no whole step; no rank is late by more than the clocks' residual.",
        "The trace marks no whole step; 2 ranks arrive last most often, each at 1 of 2 collectives.",
        "The trace marks no whole step; 2 ranks arrive last most often, each at 1 collective.",
    ]


def test_a_lag_below_the_residual_of_the_clocks_is_no_lag() -> None:
    """Ends differ by 4 between files, so a start that differs by 2 means nothing."""
    run = run_of(
        cpu_rank(0, ".#####.........#####", "", path="a"),
        cpu_rank(1, "...#######.......####", "", path="b"),
    )
    skew = measure_skew(run)
    assert skew.alignment.residual_p95_ns == 2
    assert [step.last for step in skew.steps] == [None, None]


def test_nobody_is_late_where_a_file_has_nothing_in_common_with_the_first() -> None:
    """Ranks 1 and 2 share a collective of step 0, rank 0 has another one there: no clock is known, and no lag."""
    run = run_of(
        cpu_rank(0, "", ".####", path="a"),
        cpu_rank(1, "..####", "", path="b"),
        cpu_rank(2, "......####", "", path="c"),
    )
    skew = measure_skew(run)
    assert (skew.alignment.method, len(run.matches)) == ("none", 1)
    assert [(step.lags_ns, step.last) for step in skew.steps] == [((None, None, None), None)]
    assert skew.straggler is None
    assert "clocks of the files cannot be compared" in (skew.reason or "")


def test_clocks_are_compared_through_a_third_rank() -> None:
    """Tensor parallelism within ranks 0 and 1, and 2 and 3; data parallelism within 0 and 2, and 1 and 3.

    Ranks 0 and 3 share no collective, and the skew was said to be unknown. The clock of rank 3 is 5 ahead.
    """
    traces = []
    for rank, late in enumerate((0, 0, 0, 2)):
        first = rank // 2 * 2
        groups = {"tensor": (first, first + 1), "data": (rank % 2, rank % 2 + 2)}
        pictures = {"tensor": "." * late + "#" * (5 - late) + ".....#####....", "data": "." * 6 + "###.......###"}
        ranges = {f"process|rank={rank}|world=4|backend=gloo|device=cpu": "#" * 30}
        for index, name in enumerate(groups):
            kind = f"all_reduce|bucket={index}|bytes=8|params=1|group={name} {list(groups[name])}|ranks=2"
            ranges[kind] = "." * 5 * (rank == 3) + pictures[name]
        traces.append(draw_trace(ranges=ranges, ranks={PID: rank}, world_size=4, path=f"rank{rank}"))
    skew = measure_skew(run_of(*traces))
    assert (skew.alignment.method, skew.alignment.residual_p95_ns) == ("ends of matched collectives", 0)
    assert [clock.offset_ns for clock in skew.alignment.clocks] == [0, 0, 0, -5]
    assert [(rank.last_collectives, rank.worst_lag_ns) for rank in skew.ranks] == [(0, 0), (0, 0), (0, 0), (1, 2)]


def test_a_single_collective_does_not_tell_how_well_clocks_agree() -> None:
    """Its ends are met exactly, so that a residual of nothing let any difference be claimed."""
    run = run_of(cpu_rank(0, ".#####", "", path="a"), cpu_rank(1, "...###", "", path="b"))
    skew = measure_skew(run)
    assert (skew.alignment.method, skew.alignment.residual_p95_ns) == ("ends of matched collectives", None)
    assert (skew.straggler, skew.steps[0].lags_ns) == (None, (None, None))
    assert "fewer than 2 collectives" in (skew.reason or "")


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_single_collective_tells_who_was_late_where_utc_says_what_its_ends_say(has_steps: bool) -> None:
    """It begins 167 ms later on rank 1, by clocks that tell UTC, and ends at the same time but for 0.1 ms."""
    files = []
    for rank, (start, end) in enumerate(((100 * MS, 300 * MS), (267 * MS, 300 * MS + MS // 10))):
        trace = draw_trace(
            ranges={"step 0": "##"} if has_steps else {}, launches={"main": "A"}, streams={9: ".A"}, ranks={PID: rank},
            world_size=2, path=f"{rank}",
        )  # fmt: skip
        at = replace(trace.activities, start_ns=np.array([start]), end_ns=np.array([end]))
        files.append(replace(trace, activities=at, epoch_ns=10**18 + rank))
    run = run_of(*files)
    skew = measure_skew(run)
    assert (skew.reason, skew.alignment.method, skew.alignment.residual_p95_ns) == (None, "session start", MS // 10 + 1)
    where = "in the only step" if has_steps else "at the only collective"
    assert f"ank 1 arrives last {where}, by 167.0 ms" in skew_headline(skew).text
    cause = run_cause(run)
    assert "'ddp-prof skew' shows" in root_cause_headline(cause).text
    apart = run_of(files[0], replace(files[1], epoch_ns=10**18 + 400 * MS))
    assert measure_skew(apart).ranks[1].last_collectives == 0, "clocks that differ by more than the lag tell nothing"


def test_who_is_late_is_not_promised_where_clocks_do_not_tell() -> None:
    """One collective in common and no UTC: rank 0 waits for rank 1, but how late that came is not known."""
    run = run_of(cpu_rank(0, ".############", "", path="a"), cpu_rank(1, "............#", "", path="b"))
    assert "cannot be compared" in (measure_skew(run).reason or "")
    assert (run_cause(run).wait_ns, "ddp-prof skew" in root_cause_headline(run_cause(run)).text) == (11, False)


def run_cause(run: RunAnalysis) -> RootCause:
    cause = explain_run(run).root_cause
    assert cause is not None
    return cause


def test_a_long_run_may_drift() -> None:
    """One part in a million: 60 microseconds in a minute."""
    second = 1_000_000_000
    ranks = []
    for rank in (0, 1):
        (each,) = run_of(cpu_rank(rank, "." + "#" * 28, "", path=f"rank{rank}")).ranks
        count = 60
        end = np.arange(count) * second
        end = end + rank * (7_000 + end // 1_000_000)
        timings = {name: np.repeat(getattr(each.timings, name), count) for name in each.timings.__dataclass_fields__}
        timings |= {"end_ns": end + 500, "start_ns": end, "sequence": np.arange(count)}
        ranks.append(type(each)(**{**vars(each), "timings": type(each.timings)(**timings)}))
    alignment = align_clocks(ranks, match_collectives(ranks))
    assert alignment.clocks[1].drift == pytest.approx(-1e-6, rel=1e-3)
    assert (alignment.residual_p95_ns or 0) < 5


def clocks_that_differ(difference: np.ndarray, step_ns: int) -> Alignment:
    """Two files that share collectives, one each step; by so much the ends differ."""
    ranks = []
    for rank in (0, 1):
        (each,) = run_of(cpu_rank(rank, "." + "#" * 28, "", path=f"rank{rank}")).ranks
        count = len(difference)
        end = np.arange(count) * step_ns + rank * difference
        timings = {name: np.repeat(getattr(each.timings, name), count) for name in each.timings.__dataclass_fields__}
        timings |= {"end_ns": end + 500, "start_ns": end, "sequence": np.arange(count)}
        ranks.append(type(each)(**{**vars(each), "timings": type(each.timings)(**timings)}))
    return align_clocks(ranks, match_collectives(ranks))


def test_the_residual_is_what_nineteen_of_twenty_ends_keep_within() -> None:
    """Of 200 ends 12 differ by 1,000, which is more than a twentieth and less than a tenth."""
    alignment = clocks_that_differ(np.where(np.arange(200) < 12, 1_000, 0), 1_000)
    assert (alignment.residual_p50_ns, alignment.residual_p95_ns) == (0, 1_000)


@pytest.mark.parametrize(
    ("pairs", "scatter", "drifts"), [(60, 0, True), (60, 20_000, True), (60, 31_000, False), (30, 0, False)]
)
def test_a_drift_counts_beyond_its_scatter_and_of_enough_pairs(pairs: int, scatter: int, drifts: bool) -> None:
    """One in a million: 59 microseconds in a minute. Every second end is off to one side or the other.

    Besides, one clock is 7 ms ahead of the other all the time.
    """
    second = 1_000_000_000
    at = np.arange(pairs)
    off = np.where(at % 4 == 1, scatter, np.where(at % 4 == 3, -scatter, 0)) * 2
    assert bool(clocks_that_differ(7 * MS + at * second // 1_000_000 + off, second).clocks[1].drift) is drifts


def ranks_that_start(starts: Sequence[Sequence[int | None]], width: int = 10) -> RunAnalysis:
    """CPU ranks of one clock: in each step of ``width`` one all-reduce, which all end together.

    ``None``: the rank did not record the step.
    """
    traces = []
    for rank, at in enumerate(starts):
        pictures = ["." * width if start is None else "." * start + "#" * (width - 1 - start) + "." for start in at]
        numbers = [n for n, start in enumerate(at) if start is not None]
        steps = [(f"step|index={n}", "." * width * n + "#" * width) for n in numbers]
        whole = (f"process|rank={rank}|world={len(starts)}", "#" * width * len(at))
        ranges = [whole, *steps, ("all_reduce|bucket=0|bytes=8|params=1", "".join(pictures))]
        traces.append(draw_trace(ranges=ranges, ranks={PID: rank}, world_size=len(starts)))
    return run_of(*traces)


def test_a_straggler_is_late_by_as_much_as_where_it_is_last() -> None:
    """Rank 0 is last in 8 of 17 steps, by 3, and early by 1 in the others: its median over all steps is -1."""
    turns = [*range(1, 8), 1, 2]
    own, others = [5, *[2] * 7], [[1, *(4 if rank == turn else 2 for rank in range(1, 8))] for turn in turns]
    late = [others[0], *(step for other in others[1:] for step in (own, other))]
    run = ranks_that_start([list(rank) for rank in zip(*late, strict=True)])
    skew = measure_skew(run)
    assert (skew.straggler, skew.ranks[0].last_steps, skew.ranks[0].lag_ns) == (0, 8, -1)
    assert skew.ranks[0].lag_when_last_ns == 3
    slower = replace(skew.ranks[0], lag_ns=-1 * MS, lag_when_last_ns=3 * MS)
    headline = skew_headline(replace(skew, ranks=(slower, *skew.ranks[1:]))).claim
    assert headline == "Rank 0 arrives last in 8 of 17 steps, by 3.00 ms (median)"


def test_a_step_that_a_rank_did_not_record_does_not_tell_who_was_last_in_it() -> None:
    """Rank 2 is last in each step that it recorded. In the others, rank 1 was said to be, as often as rank 2."""
    run = ranks_that_start([[1] * 8, [2] * 8, [None, None, None, *[6] * 5]])
    skew = measure_skew(run)
    assert [step.step for step in skew.steps] == [3, 4, 5, 6, 7]
    assert [(rank.last_steps, rank.last_collectives) for rank in skew.ranks] == [(0, 0), (0, 0), (5, 5)]
    assert skew.straggler == 2
    note = "ranks are not compared in 3 of 8 steps: a rank that was not recorded there may have been last"
    assert note in skew_view(run, skew).notes


def test_where_most_steps_lack_a_rank_all_are_compared_and_that_is_said() -> None:
    run = ranks_that_start([[1] * 4, [2] * 4, [6, None, None, None]])
    skew = measure_skew(run)
    assert [step.last for step in skew.steps] == [2, 1, 1, 1]
    assert "3 of 4 steps lack a rank, which may have arrived last there" in skew.warnings
    skew = measure_skew(replace(run, ranks=tuple(replace(rank, reason=None) for rank in run.ranks)))
    absent = [[wait is None for wait in step.waits_ns] for step in skew.steps]
    assert absent == [[False] * 3, *[[False, False, True]] * 3], "no wait of 0 of a rank that was not there"


def test_what_a_rank_costs_others_is_no_wait_for_another_one_nor_its_own() -> None:
    """Rank 1 is late for A by 5, and rank 0 for B by 4: rank 2 waits for both, rank 1 for B."""
    a, late_a = ".#######.......", "......##......."
    b, late_b = ".........######", ".............##"
    ranks = enumerate([(a, late_b), (late_a, b), (a, b)])
    skew = measure_skew(run_of(*(cpu_rank(rank, *drawn, phases={"backward": "#"}) for rank, drawn in ranks)))
    (step,) = skew.steps
    assert (step.last, step.cost_ns, step.waits_ns) == (1, 5, (5, 4, 9))
    assert [rank.cost_ns for rank in skew.ranks] == [0, 5, 0]


def test_collectives_outside_of_steps_are_no_step(tmp_path: Path) -> None:
    traces = []
    for rank in (0, 1):
        events = [event("user_annotation", "ProfilerStep#3", "0", "100")]
        for sequence, (launch, start) in enumerate(((10, 20 + rank), (200, 210 + rank))):
            noted = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "Seq": sequence}
            events += [
                event("cuda_runtime", "cudaLaunchKernel", str(launch), "1", correlation=sequence + 1),
                event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", str(start), str(30 - rank), tid=20, device=0,
                      stream=20, correlation=sequence + 1, **noted),
            ]  # fmt: skip
        path = write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
        traces.append(load_trace(path))
    skew = measure_skew(run_of(*traces))
    assert [step.step for step in skew.steps] == [3]
    assert [rank.collectives for rank in skew.ranks] == [2, 2]


def test_without_steps_the_table_has_none_and_of_one_rank_nothing_is_counted() -> None:
    launches, late = "A..B..C...", (".AAA.BBB.CCC", "..AA..BB.CCC")
    ranks = [draw_trace(launches={"main": launches}, streams={9: one}, ranks={PID: at}) for at, one in enumerate(late)]
    view = skew_view(run := run_of(*ranks), measure_skew(run))
    assert {(row["last_steps"], row["last_%"]) for row in view.rows} == {(None, None)}
    assert [row["last_collectives"] for row in view.rows] == [0, 2]
    assert not any("step" in note.partition(":")[2] for note in view.notes if note.startswith(("lag", "exposed wait")))
    alone = skew_view(run := run_of(ranks[0]), measure_skew(run))
    assert "steps" not in alone.title.partition("\n")[0]


@pytest.mark.parametrize(("receives_us", "is_doubtful"), [(300, True), (100, False)])
def test_who_may_have_received_late_is_no_culprit(tmp_path: Path, receives_us: int, is_doubtful: bool) -> None:
    """The first stage of a pipeline ends its step last, whichever stage is slow: its input and clocks were blamed."""
    files = []
    for rank in range(2):
        events = []
        for step in range(8):
            begin, start = 1000 * step, 1000 * step + 300 + 500 * rank
            events.append(event("user_annotation", f"ProfilerStep#{step}", str(begin), "990"))
            noted = {"Process Group Name": "0", "Group size": 2, "device": 0}
            received = {"Collective name": "recv", "correlation": 2 * step + 1, "stream": 8}
            reduced = {"Collective name": "allreduce", "correlation": 2 * step + 2, "stream": 9, "Seq": step}
            kernels = [("AllReduce_Sum", start, begin + 850, reduced)]
            if rank == 1:
                kernels.append(("SendRecv", start - receives_us, start, received))
            for name, at, end, about in kernels:
                call = event("cuda_runtime", "cudaLaunchKernel", str(begin + 5), "1", correlation=about["correlation"])
                ran = event("kernel", f"ncclDevKernel_{name}", str(at), str(end - at), **noted, **about)
                events += [call, ran]
        info = {"rank": rank, "world_size": 2}
        files.append(write(tmp_path / f"rank{rank}.json", events, distributedInfo=info))
    (run,) = load_runs(files, LoadOptions(one_run=True))
    said = skew_headline(run.skew()).text
    assert said.startswith("Rank 1 arrives last in 8 of 8 steps, by 0.50 ms")
    doubt = "may have waited for other ranks in sends and receives, which are not matched"
    assert (doubt in said) == is_doubtful
    assert any(one.rule == "straggler" for one in run.doctor().findings) != is_doubtful
    assert ("rank 1 is late" in root_cause_headline(run.root_cause()).text) != is_doubtful
    assert skew_view(run.analysis(), run.skew()).document["doubt"] == (doubt if is_doubtful else None)
    reasons = [one.reason for one in run.doctor().abstained if one.rule == "straggler"]
    assert reasons == ([f"who arrives last (rank 1) {doubt}"] if is_doubtful else [])


def pipeline(folder: Path, slow: Collection[int], stages: int = 4) -> list[Path]:
    """Eight steps of stages, of which some compute twice as long; the first receives, and ends its step last."""
    files = []
    for rank in range(stages):
        events = []
        for step in range(8):
            begin, start = 2000 * step, 2000 * step + 1000 + 500 * (rank == 0)
            events.append(event("user_annotation", f"ProfilerStep#{step}", str(begin), "1990"))
            noted = {"Process Group Name": "0", "Group size": stages, "device": 0}
            about = {"Collective name": "recv", "stream": 8, **noted}
            reduced = {"Collective name": "allreduce", "stream": 9, "Seq": step, **noted}
            kernels: list[tuple[str, int, int, dict[str, object]]] = [
                ("ncclDevKernel_AllReduce_Sum", start, begin + 1650, reduced),
                ("gemm", begin + 10, begin + 10 + 300 * (1 + (rank in slow)), {"stream": 7, "device": 0}),
            ]
            kernels += [("ncclDevKernel_SendRecv", start - 400, start, about)] if rank == 0 else []
            for number, (name, at, end, told) in enumerate(kernels):
                correlation = 3 * step + number + 1
                call = event("cuda_runtime", "cudaLaunchKernel", str(begin + 5), "1", correlation=correlation)
                events += [call, event("kernel", name, str(at), str(end - at), correlation=correlation, **told)]
        info = {"rank": rank, "world_size": stages}
        files.append(write(folder / f"rank{rank}.json", events, distributedInfo=info))
    return files


@pytest.mark.parametrize(
    ("slow", "stages", "who"),
    [((0,), 4, "Rank 0 computes"), ((2,), 4, "Rank 2 computes"), ((), 4, ""), ((1, 2), 5, "Ranks 1-2 compute")],
)
def test_the_slow_stage_of_a_pipeline_is_named_beside_the_first_one_which_ends_last(
    tmp_path: Path, slow: tuple[int, ...], stages: int, who: str
) -> None:
    """Stage 0 ends its step last in any case: that the slow one computes longest was a note without a bound.

    The cause of exposed time was a KeyError, as the first collective of a step is a receive on rank 0 alone.
    """
    (run,) = load_runs(pipeline(tmp_path, slow, stages), LoadOptions(one_run=True))
    assert (cause := run.root_cause()) is not None
    assert cause.operation == "all_reduce"
    (reason,) = [one.reason for one in run.doctor().abstained if one.rule == "straggler"]
    assert reason.startswith("who arrives last (rank 0) may have waited")
    found = [one for one in run.doctor().findings if one.rule == "uneven compute"]
    # Without overlap of micro-batches a step passes through all stages one after another.
    named = tuple(f"rank {rank}" for rank in slow)
    assert [(one.ranks, one.cost_ns, one.expected_gain_ns) for one in found] == (
        [(named, 300_000 * len(slow), None)] if slow else []
    )
    for one in found:
        said = f"{who} longest, up to 0.60 ms of a typical step; the median of all ranks is 0.30 ms."
        assert one.evidence.startswith(said)
