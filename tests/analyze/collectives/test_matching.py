"""Which collectives are one and the same, also where one rank began to record steps without numbers later."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.analyze.collectives.matching import match_collectives
from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.collectives.timing import find_timings
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_overlap, merge_ranks
from ddp_prof.communication import OPERATIONS
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.runs.run import Run
from ddp_prof.trace import UNKNOWN, Trace
from tests.command_line import run as run_command
from tests.drawing import PID, draw_trace
from tests.ingest.test_kineto_json import event, write
from tests.measuring import analysis_of, sources_of
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, write_capture

MS = 1_000_000
LENGTHS = (13, 17, 12, 19, 14, 16, 11, 18, 15, 12, 20, 13, 17, 14)


def rank_trace(rank: int, first: int, epoch: int | None = None):
    """Each step has one collective before its end; the file starts at ``first``.

    The steps carry no numbers, or those within an epoch of so many.
    """
    ranges = [(f"process|rank={rank}|world=2", "#" * 300)]
    at = 5 * rank
    for number, length in enumerate(LENGTHS[first:], first):
        name = "step|" if epoch is None else f"step|index={number % epoch}"
        ranges.append((name, " " * at + "#" * (length - 1)))
        ranges.append(("all_reduce|bucket=0|bytes=4", " " * (at + length - 6) + "####"))
        at += length
    path = f"rank{rank}.sqlite"
    return draw_trace(ranges=ranges, ranks={PID: rank}, world_size=2, path=path, character_ns=US)


@pytest.mark.parametrize("epoch", [None, 5], ids=["no numbers", "numbers that come again"])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 4), (3, 0), (2, 3)])
def test_steps_that_begin_apart_are_recognised(first: int, second: int, epoch: int | None) -> None:
    run = analysis_of(rank_trace(0, first, epoch), rank_trace(1, second, epoch))
    own, other = run.ranks
    assert (own.step_keys - first).tolist()[0] == (other.step_keys - second).tolist()[0]
    assert len(run.matches) == len(LENGTHS) - max(first, second)
    assert any("some steps earlier or later" in warning for warning in run.warnings)


@pytest.mark.parametrize("epoch", [None, 5], ids=["no numbers", "numbers that come again"])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 0), (0, 0)])
def test_overlap_and_collectives_call_a_step_the_same(first: int, second: int, epoch: int | None) -> None:
    """Overlap took the n-th step of one rank for the n-th of the other one."""
    traces = [rank_trace(0, first, epoch), rank_trace(1, second, epoch)]
    run, overlap = analysis_of(*traces), merge_ranks(list(map(measure_overlap, traces)))
    of_overlap = [[step.step_key for step in rank.steps] for rank in overlap.ranks]
    assert of_overlap == [rank.step_keys.tolist() for rank in run.ranks]
    assert [rank.step_names for rank in overlap.ranks] == [rank.step_names for rank in run.ranks]
    notes = [warning for warning in overlap.warnings if "some steps earlier or later" in warning]
    assert notes == [warning for warning in run.warnings if "some steps earlier or later" in warning]


@pytest.mark.parametrize("epoch", [None, 5], ids=["no numbers", "numbers that come again"])
def test_a_timeline_draws_a_step_of_all_ranks_at_one_time(epoch: int | None) -> None:
    """It took the n-th step of one rank for the n-th of the other one: each lasted from the one to the other."""
    sources = sources_of({"a": rank_trace(0, 0, epoch), "b": rank_trace(1, 1, epoch)})
    first, second = build_timeline(sources).panels
    assert [mark.key for mark in second.steps] == list(range(1, len(LENGTHS)))
    assert list(first.steps[1:]) == list(second.steps)
    assert [mark.end_ns - mark.start_ns for mark in second.steps] == [(length - 1) * US for length in LENGTHS[1:]]
    called = {key: name.partition(" (")[0] for key, name in first.step_names.items() if key}
    assert {key: name.partition(" (")[0] for key, name in second.step_names.items()} == called


def test_the_command_joins_the_same_steps(tmp_path: Path) -> None:
    """As of a loop under Lightning: the step that holds most exposed time was two, one of each rank."""
    lengths = (20, 12, 26, 14, 18, 11, 900, 16, 22)
    paths = []
    for rank, first in enumerate((0, 1)):
        capture = Capture()
        for number, length in enumerate(lengths[first:], first):
            at, kernel = number * MS + 77 * rank, 20 * number
            capture.ranges.append(Range("[pl][profile]run_training_batch", at, at + MS, 100))
            capture.kernels += [
                Kernel("gemm", at + 10 * US, at + 20 * US, at, 100, number=kernel + 1),
                Kernel(NCCL, at + 20 * US, at + (20 + length) * US, at + 1, 100, stream=20, number=kernel + 2),
            ]
        paths.append(write_capture(tmp_path / f"rank{rank}.sqlite", capture))
    overlap = json.loads(run_command("overlap", *paths, "--one-run", "--format", "json").stdout)
    assert overlap["outliers"]["steps"] == [[6, 2 * 900 * US]]
    loaded = Run(tuple(paths))
    assert loaded.overlap().outliers == loaded.collectives().outliers


def test_what_the_clocks_say_ran_minutes_apart_is_a_doubt() -> None:
    early, late = rank_trace(0, 0), rank_trace(1, 0)
    for seconds, doubted in ((0, False), (9, False), (300, True)):
        run = analysis_of(replace(early, epoch_ns=10**18), replace(late, epoch_ns=10**18 + seconds * 10**9))
        assert any(f"{seconds} s apart" in warning for warning in run.warnings) is doubted


def test_steps_that_begin_together_stay_as_they_are() -> None:
    run = analysis_of(rank_trace(0, 0), rank_trace(1, 0))
    assert len(run.matches) == len(LENGTHS)
    assert not any("steps earlier" in warning for warning in run.warnings)


def test_groups_that_one_was_split_into_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    """Of four ranks 0 and 1 are a group, 2 and 3 another one; torch 2.4 calls both "1"."""
    traces = []
    for rank, duration in enumerate((5, 4, 9, 8)):
        noted = {
            "Collective name": "allreduce", "Process Group Name": "1", "Group size": 2, "Seq": 7,
            "Process Group Ranks": "[0, 1]" if rank < 2 else "[2, 3]",
        }  # fmt: skip
        kernel = event("kernel", "ncclDevKernel_Generic", "10", str(duration), stream=9, device=0, **noted)
        path = write(tmp_path / f"{rank}.json", [kernel], distributedInfo={"rank": rank, "world_size": 4})
        traces.append(load_trace(path))
    run = analysis_of(*traces)
    assert len(run.matches) == 2
    assert [wait.tolist() for wait in run.waits_ns] == [[1_000], [0], [1_000], [0]]


def test_groups_that_ranges_name_are_told_apart() -> None:
    """FSDP2 within ranks 0 and 2, and within ranks 1 and 3; all four ranks run the same collectives at one time."""
    traces = [
        draw_trace(
            ranges={
                f"process|rank={rank}|world=4|backend=gloo|device=cpu": "#" * 12,
                f"all_gather|bucket=0|bytes=8|params=1|group=1 [{rank % 2}, {rank % 2 + 2}]|ranks=2": gather,
            },
            ranks={PID: rank}, world_size=4, path=f"rank{rank}",
        )
        for rank, gather in enumerate(("..######....", "..#######...", "...#####....", ".....####..."))
    ]  # fmt: skip
    found = measure_collectives(analysis_of(*traces))
    assert [one.wait_ns for one in found.collectives] == [1, 3, 0, 0]
    assert [(one.ranks, one.group) for one in found.collectives] == [(2, "1 [0, 2]"), (2, "1 [1, 3]")] * 2
    assert found.matched == 2


@pytest.mark.parametrize("has_steps", [True, False])
def test_replays_of_a_graph_that_repeat_the_numbers_of_its_capture_are_told_apart(
    has_steps: bool, tmp_path: Path
) -> None:
    """Newest torch notes at each replay the number from when the graph was captured: one replay in three counted."""
    traces = []
    for rank, late in enumerate((0, 2)):
        events = []
        for step in range(3):
            at = 100 * step
            events += [event("user_annotation", f"ProfilerStep#{step}", str(at), "90")] * has_steps
            events.append(event("cuda_runtime", "cudaGraphLaunch", str(at + 1), "1", correlation=step + 1))
            for number, start in ((7, 10), (8, 30)):
                noted = {
                    "Collective name": "allreduce", "Process Group Name": "0", "Group size": "2", "Seq": f"{number}",
                    "In msg nelems": "1024", "Out msg nelems": "1024", "dtype": "Float",
                }  # fmt: skip
                begun, took = str(at + start + late), str(10 - late)
                of_gpu = {"stream": 9, "device": 0, "correlation": step + 1}
                events.append(event("kernel", "ncclDevKernel_AllReduce", begun, took, **of_gpu, **noted))
        path = write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
        traces.append(load_trace(path))
    run = analysis_of(*traces)
    assert (len(run.matches), run.matches.unmatched) == (6, 0)
    assert [wait.tolist() for wait in run.waits_ns] == [[2_000] * 6, [0] * 6]


def test_numbers_of_sends_do_not_unmake_those_of_collectives(tmp_path: Path) -> None:
    """torch counts them apart within a group, so that a send has the number of a collective."""
    traces = []
    for rank, first in enumerate((7, 8)):
        events = []
        for name, number, start in (("allreduce", 7, 10), ("send", 8, 20), ("allreduce", 8, 30)):
            noted = {"Collective name": name, "Process Group Name": "0", "Group size": 2, "Seq": number}
            kernel = "ncclDevKernel_SendRecv" if name == "send" else "ncclDevKernel_AllReduce"
            if number >= first:
                events.append(event("kernel", kernel, str(start), "5", stream=9, device=0, **noted))
        path = write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
        traces.append(load_trace(path))
    matches = analysis_of(*traces).matches
    assert (len(matches), matches.unmatched) == (1, 1)


@pytest.mark.parametrize(("name", "matched"), [("all_to_allv", 2), ("allreduce", 0)])
def test_ranks_may_send_unequal_parts_in_an_all_to_all(tmp_path: Path, name: str, matched: int) -> None:
    """As tokens to experts: it was unmatched, so nobody was late whose expert computed three times as long."""
    traces = []
    for rank, (elements, start) in enumerate(((100, 10), (300, 14))):
        noted = {"Collective name": name, "Process Group Name": "1", "Group size": 2, "dtype": "Float"}
        noted |= {"In msg nelems": elements, "Out msg nelems": elements}
        events = [
            event(
                "kernel",
                "ncclDevKernel_SendRecv",
                f"{start + at}",
                f"{20 - start}",
                stream=9,
                device=0,
                Seq=at,
                **noted,
            )
            for at in (0, 20)
        ]
        path = write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
        traces.append(load_trace(path))
    run = analysis_of(*traces)
    assert (len(run.matches), run.matches.unmatched) == (matched, 4 - 2 * matched)
    assert [wait.tolist() for wait in run.waits_ns] == ([[4_000] * 2, [0] * 2] if matched else [[-1] * 2] * 2)


@pytest.mark.parametrize(
    ("groups", "operation", "warns"),
    [((0, 0, 1, 1), "AllGather", True), ((0, 0, 0, 0), "AllGather", False), ((0, 0, 1, 1), "Broadcast", False)],
)
def test_ranks_whose_ends_agree_in_groups_are_a_doubt(groups: tuple[int, ...], operation: str, warns: bool) -> None:
    """As of FSDP within nodes: each rank has one stream, and the same all-gathers as those of the other group."""
    lengths = ("34253443", "43524334")  # of the all-gathers of each group, in 100 us
    traces = []
    for rank, group in enumerate(groups):
        kernels = zip("ABCDEFGH", map(int, lengths[group]), strict=True)
        trace = draw_trace(
            ranges={f"step {index}": " " * 16 * index + "#" * 16 for index in range(4)},
            launches={"main": "".join(f"{letter}......." for letter in "ABCDEFGH")},
            streams={9: "".join(f".{letter * length}".ljust(8, ".") for letter, length in kernels)},
            ranks={PID: rank},
            world_size=4,
            path=f"rank{rank}.sqlite",
            character_ns=100_000,
        )
        traces.append(replace(trace, names=tuple(name.replace("communication", operation) for name in trace.names)))
    found = measure_collectives(analysis_of(*traces))
    assert any("agree among some ranks only" in warning for warning in found.warnings) is warns
    assert {one.wait_ns is None for one in found.collectives} == {warns}, "a false wait is worse than none"
    assert {one.ranks for one in found.collectives} == {None if warns else 4}
    assert ("agree among some ranks only" in (measure_skew(found.run).reason or "")) is warns


@pytest.mark.parametrize("groups", [(0, 0, 1, 1), (0, 0, 0, 0)])
def test_reductions_within_nodes_end_apart_though_those_between_nodes_end_together(groups: tuple[int, ...]) -> None:
    """As of HSDP: node 1 is late; 'at most 0.20 ms' was said where it cost 0.59 ms.

    stream 8    node 0  .A..............    node 1  .A..............    A, B ..: all-gathers within the node
    stream 9            ..III...........            ..IIIIII........    I, J ..: reduce-scatters within the node
    stream 10           .....QQQQQQQQ...            ........QQQQQ...    Q, R ..: all-reduces between nodes
    """
    operations = {"AllGather": "ABCDEFGH", "ReduceScatter": "IJKLMNOP", "AllReduce": "QRSTUVWX"}
    traces = []
    for rank, group in enumerate(groups):
        times = (((1, 1), (2, 3), (5, 8)), ((1, 1), (2, 6), (8, 5)))[group]
        streams = {
            number: "".join(f"{'.' * at}{letter * length}".ljust(16, ".") for letter in letters)
            for number, letters, (at, length) in zip((8, 9, 10), operations.values(), times, strict=True)
        }
        trace = draw_trace(
            ranges={f"step {index}": " " * 16 * index + "#" * 16 for index in range(8)},
            launches={
                "main": "".join(f"{a}{b}{c}".ljust(16, ".") for a, b, c in zip(*operations.values(), strict=True))
            },
            streams=streams,
            ranks={PID: rank},
            world_size=4,
            path=f"rank{rank}.sqlite",
            character_ns=100_000,
        )
        called = {f"communication {letter}": name for name, letters in operations.items() for letter in letters}
        traces.append(replace(trace, names=tuple(called.get(name, name) for name in trace.names)))
    reason = measure_skew(analysis_of(*traces)).reason or ""
    assert ("agree among some ranks only" in reason) is (len({*groups}) > 1)


@pytest.mark.parametrize("groups", [(0, 0, 1, 1), (0, 0, 0, 0)])
def test_reductions_within_nodes_may_not_meet_though_all_else_does(groups: tuple[int, ...], tmp_path: Path) -> None:
    """As of HSDP, whose node 1 is late: they were left out, as a quarter of all, or called all-reduces of other ranks.

    ms         0 1 2 3 4 5 6 7 8 9
    node 0     GGGGrrAAAAAAAAAAAAA     two all-gathers, and a reduce-scatter within the node,
    node 1     GGGG..........rrAAA     then an all-reduce between nodes
    """
    capture = Capture()
    for rank, group in enumerate(groups):
        process, late = 100 + rank, 5 * group
        for step in range(16):
            capture.ranges.append(Range(f"step {step}", step * 10 * MS + 1, (step + 1) * 10 * MS, process, process))
            times = ("AllGather", 0, 1, 20), ("AllGather", 1, 2, 20), ("ReduceScatter", 2 + late, 3 + late, 24)
            for name, start, end, stream in (*times, ("AllReduce", 3 + late, 9, 28)):
                at = (step * 10 * MS + 10 + time * MS for time in (start, end, 0))
                capture.kernels.append(Kernel(f"ncclDevKernel_{name}_RING_LL", *at, process, process, stream, rank))
    run = analysis_of(load_trace(write_capture(tmp_path / "x.sqlite", capture)))
    assert len(run.matches) == (0 if len({*groups}) > 1 else 64)


@pytest.mark.parametrize(("size", "matched"), [(2, 0), (4, 1)])
def test_of_a_job_with_subgroups_unnamed_collectives_are_not_matched(tmp_path: Path, size: int, matched: int) -> None:
    """Gloo's events name no group, but torch.profiler lists the groups of each rank."""
    traces = []
    for rank in range(4):
        groups = [{"pg_name": "0", "pg_size": 4}, {"pg_name": "1", "pg_size": size}]
        events = [
            event("cpu_op", "aten::mm", "0", "1"),
            event("user_annotation", "gloo:all_reduce", "10", str(5 + rank), tid=7),
        ]
        info = {"rank": rank, "world_size": 4, "pg_config": groups}
        traces.append(load_trace(write(tmp_path / f"{rank}.json", events, distributedInfo=info)))
    found = measure_collectives(analysis_of(*traces))
    assert found.matched == matched
    assert {one.ranks for one in found.collectives} == {4 if matched else None}
    assert any("process groups of a part of its ranks" in warning for warning in found.warnings) is not bool(matched)


def test_buckets_without_the_name_of_a_group_are_not_matched_if_their_ends_lie_apart() -> None:
    """As of FSDP2 within ranks 0 and 2, and within ranks 1 and 3: bucket and size are the same in both groups."""
    gathers = "...##.....##..........##..", ".......##..##......##....."
    traces = []
    for rank in range(4):
        ranges = {
            f"process|rank={rank}|world=4|backend=gloo|device=cpu": "#" * 26,
            "all_gather|bucket=0|bytes=8|params=1": gathers[rank % 2],
        }
        trace = draw_trace(ranges=ranges, ranks={PID: rank}, world_size=4, path=f"{rank}")
        traces.append(scaled(trace, 10 * MS))
    found = measure_collectives(analysis_of(*traces))
    assert found.matched == 0
    assert {(one.wait_ns, one.ranks) for one in found.collectives} == {(None, None)}
    assert any("without the name of a communicator are not matched" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("streams", "world", "warns"),
    [
        ({9: "..MMNN"}, 4, True),
        ({9: "..MMNN"}, 2, False),
        ({9: "..MM..", 11: "....NN"}, 4, True),
        ({9: "..MM..", 11: "....NN"}, 2, False),
        ({9: "aaMMNN"}, 4, True),  # the stream of compute
        ({9: "aaMMNN"}, 2, False),
    ],
)
def test_communicators_without_names_are_a_doubt(streams: dict[int, str], world: int, warns: bool) -> None:
    """As of tensor and data parallelism: rank 1 may share a communicator with rank 0 for M, and with rank 2 for N.

    Also on one stream, as JAX runs them: of a built capture 27 to 92 of 192 waits were wrong, and nothing said so.
    """
    traces = [
        draw_trace(
            ranges={"step 0": "######"}, launches={"main": "MN"}, streams=streams, ranks={PID: rank},
            world_size=world, path=f"{rank}",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert (
        any("communicators of collectives have no names" in warning for warning in analysis_of(*traces).warnings)
        is warns
    )


def drawn(rank: int, launches: str, streams: dict[int, str], world: int = 2) -> Trace:
    """Two steps of a rank in a file of its own; a letter is a collective and two nanoseconds wide."""
    wide = {stream: "".join(2 * character for character in picture) for stream, picture in streams.items()}
    launched = "".join(f"{character}." for character in launches)
    steps = {"step 0": "#" * 24, "step 1": "." * 24 + "#" * 24}
    return draw_trace(
        ranges=steps, launches={"main": launched}, streams=wide, ranks={PID: rank}, world_size=world, path=f"{rank}"
    )


def scaled(trace: Trace, times: int) -> Trace:
    """The same with a nanosecond drawn as so many."""
    tables = {}
    for table, names in (
        ("activities", ("start_ns", "end_ns")),
        ("spans", ("start_ns", "end_ns")),
        ("calls", ("start_ns",)),
    ):
        rows = getattr(trace, table)
        tables[table] = replace(rows, **{name: getattr(rows, name) * times for name in names})
    return replace(trace, **tables)


LONG, SHORT = ".MMMMMMMM......PPPPPPPP", "...NNN..........QQQ"
"""Communicators that two ranks share, one with long collectives and one with short ones."""


@pytest.mark.parametrize(("long", "short"), [(9, 11), (11, 9)])
def test_communicators_that_ranks_launch_in_another_order_are_told_apart_by_their_streams(
    long: int, short: int
) -> None:
    """Rank 1 launches each short one first, and may so have got the streams in another order, too."""
    run = analysis_of(
        drawn(0, "MN..........PQ", {9: LONG, 11: SHORT}), drawn(1, "NM..........QP", {long: LONG, short: SHORT})
    )
    assert (len(run.matches), run.matches.unmatched) == (4, 0)
    assert [wait.tolist() for wait in run.waits_ns] == [[0] * 4, [0] * 4]
    assert run.alignment.residual_p95_ns == 0
    assert not any("communicators" in warning for warning in run.warnings)


def test_what_a_communicator_with_a_name_does_is_the_same_on_any_stream() -> None:
    """R is of one that has a name; ranks launch it on either of the streams of the two others."""
    ranks = [
        find_timings(find_rank_events(drawn(rank, "MNR.........PQ", {9: long, 11: short}))[0])
        for rank, (long, short) in enumerate(((".MMMMMMMMRR....PPPPPPPP", SHORT), (LONG, "...NNN...RR.....QQQ")))
    ]
    named = [np.where(rank.timings.start_ns == 18, 0, UNKNOWN) for rank in ranks]
    first, second = (
        replace(rank, groups=("world",), timings=replace(rank.timings, group=group))
        for rank, group in zip(ranks, named, strict=True)
    )
    found = match_collectives([first, second])
    assert (len(found), found.unmatched, found.by_stream) == (5, 0, True)


def test_what_one_rank_alone_takes_part_in_spoils_the_pairs_of_its_own_kind_only() -> None:
    """Rank 1 gathers something (A) with others before each reduction: the reductions are the same all the same."""
    names = {"communication A": "ncclDevKernel_AllGather", "communication B": "ncclDevKernel_AllGather"}
    reduces = ".....MMMM.......PPPP"
    alone, other = drawn(0, "...M..........P", {9: reduces}), drawn(1, "A..M........B.P", {9: "..AA.MMMM...BB..PPPP"})
    run = analysis_of(*(
        replace(trace, names=tuple(names.get(name, "ncclDevKernel_AllReduce") if "communication" in name else name
                                   for name in trace.names))
        for trace in (alone, other)
    ))  # fmt: skip
    assert (len(run.matches), run.matches.unmatched) == (2, 2)


@pytest.mark.parametrize(("column", "value"), [("operation", OPERATIONS.index("all_gather")), ("bytes", 8)])
def test_collectives_of_one_number_that_differ_are_no_pair(column: str, value: int) -> None:
    ranks = [find_timings(find_rank_events(rank_trace(rank, 0, None))[0]) for rank in (0, 1)]
    count = len(ranks[0].timings)
    noted = {"group": np.zeros(count, np.int64), "sequence": np.arange(count), "bytes": np.full(count, 4)}
    first, second = (replace(rank, groups=("world",), timings=replace(rank.timings, **noted)) for rank in ranks)
    assert (len(match_collectives([first, second])), count) == (count, len(LENGTHS))
    changed = getattr(second.timings, column).copy()
    changed[2] = value
    found = match_collectives([first, replace(second, timings=replace(second.timings, **{column: changed}))])
    assert (len(found), found.unmatched) == (count - 1, 2)


def test_what_does_not_meet_on_the_common_clock_is_no_pair() -> None:
    """The capture of rank 1 holds another collective (N) than that of rank 0, as captures that sample do."""
    own, others = ".MMM..NNN...PPP..QQQ", "..MM......NNPPP...QQ"
    ranks = drawn(0, "M....N......P...Q", {9: own}), drawn(1, "M.......N...P....Q", {9: others})
    run = analysis_of(*(scaled(rank, MS) for rank in ranks))
    assert (len(run.matches), run.matches.unmatched) == (3, 2)
    assert [wait.tolist() for wait in run.waits_ns] == [[2 * MS, -1, 0, 2 * MS], [0, -1, 0, 0]]


def gloo(rank: int, *pictures: str) -> Trace:
    """All-reduces of one size by gloo, in a file of the rank's own; a character is a millisecond."""
    whole = (f"process|rank={rank}|world=2|backend=gloo|device=cpu", "#" * 60)
    ranges = [whole, *(("all_reduce|bytes=8", picture) for picture in pictures)]
    return scaled(draw_trace(ranges=ranges, ranks={PID: rank}, world_size=2, path=f"{rank}"), MS)


def test_pairs_whose_ends_lie_further_apart_than_they_last_are_none() -> None:
    """Of gloo no stream tells communicators apart, which the ranks use in another order."""
    run = analysis_of(
        gloo(0, ".#########...#########..", "...###.........###......"),
        gloo(1, "..####.........####.....", "....######......######.."),
    )
    assert (len(run.matches), run.matches.unmatched) == (0, 8)
    assert [wait.tolist() for wait in run.waits_ns] == [[-1] * 4, [-1] * 4]
    reason = "the ends of what may be one collective lie further apart than it lasts"
    assert any(reason in warning for warning in run.warnings)
    assert reason in (measure_skew(run).reason or "")


@pytest.mark.parametrize(("end", "matched"), [(20, 3), (22, 3), (23, 2)])
def test_kernels_of_one_collective_end_within_a_tenth_of_its_length(end: int, matched: int) -> None:
    """One of three that last 20 ms ends later on rank 1."""
    ranks = []
    for rank, length in enumerate((20, end)):
        streams = {9: "M" * 20 + "." * 10 + "N" * length + "." * (30 - length) + "P" * 20}
        trace = draw_trace(launches={"main": "MNP"}, streams=streams, ranks={PID: rank}, world_size=2, path=f"{rank}")
        ranks.append(scaled(trace, MS))
    assert len(analysis_of(*ranks).matches) == matched


@pytest.mark.parametrize(("ends", "doubted"), [((19, 40, 59), False), ((19, 43, 59), True)])
def test_ends_that_differ_by_milliseconds_between_files_are_a_doubt(ends: tuple[int, ...], doubted: bool) -> None:
    own, others = ([("." * start + "#" * (end - start)) for start, end in zip((0, 20, 41), at, strict=True)]
                   for at in ((19, 40, 59), ends))  # fmt: skip
    run = analysis_of(gloo(0, *own), gloo(1, *others))
    assert len(run.matches) == 3, "they last longer than that"
    assert any("differ by up to 2.70 ms" in warning for warning in run.warnings) is doubted


@pytest.mark.parametrize(("world", "said"), [(None, True), (2, False), (3, False)])
def test_without_the_number_of_ranks_waiting_is_a_lower_bound(world: int | None, said: bool) -> None:
    run = analysis_of(*(replace(gloo(rank, "####", "....####"), world_size=world) for rank in (0, 1)))
    effect = "not known: if some are not among the traces, transfer may be shorter, and waiting longer, than reported"
    assert any(effect in warning for warning in run.warnings) is said


def test_two_ranks_of_a_real_job_share_what_ends_together(shared_traces: Path) -> None:
    """Parts of two steps were recorded; by their order alone ends of pairs lie up to 134 ms apart."""
    run = analysis_of(*(load_trace(shared_traces / f"kineto_a100_rank{rank}of128.json.gz") for rank in (0, 1)))
    assert (len(run.matches), run.matches.unmatched) == (4, 12)
    assert (run.alignment.residual_p95_ns or 0) < 1_000_000


def test_what_lies_between_steps_is_not_said_to_lack_a_match(tmp_path: Path) -> None:
    """Of an evaluation's all-reduces, which both ranks have, 'have no match on the other ranks' was said."""
    capture = Capture()
    for process in (100, 101):
        for step in range(4):
            begin = 100 * step * US + 1
            capture.ranges.append(Range(f"step {step}", begin, begin + 70 * US, process, process))
            for at, length in ((10, 30), (80, 5)):  # the second one after the step
                start = begin + at * US
                capture.kernels.append(Kernel(NCCL, start, start + length * US, start - US, process, process, 20))
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture))
    (told,) = (one for one in analysis_of(trace).warnings if "distinguished" in one)
    assert told.startswith("8 collectives belong to no step, so no match is looked for: their waiting cannot be")
