"""The exported file, read back by the rules that Perfetto's trace processor applies to it."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_rank
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.perfetto import CATEGORIES, separate_crossing, write_perfetto
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.present.timeline.model import Source
from ddp_prof.trace import UNKNOWN, Category, Trace
from tests import measuring
from tests.analyze.core.test_dependencies import one_bucket
from tests.analyze.critical.scheduler import ALL_REDUCE
from tests.drawing import PID, column, draw_trace, runs, with_details
from tests.night import of_which_the_gate_keeps
from tests.present.runs import HOSTILE_TITLE, cpu_run, two_clocks
from tests.present.tables.test_collectives import of_backward


def source_of(trace: Trace, title: str = "run") -> Source:
    return measuring.source_of(title, trace)


def nanoseconds(text: str) -> int:
    """A decimal number of microseconds, without a detour over floats."""
    whole, _, decimals = text.partition(".")
    assert len(decimals) == 3
    return int(whole + decimals)


@dataclass
class Viewed:
    """A file as a viewer understands it."""

    events: list[dict[str, Any]]
    about: dict[str, Any]

    @classmethod
    def open(cls, *sources: Source, folder: Path) -> Viewed:
        write_perfetto(sources, folder / "trace.json.gz")
        document = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()), parse_float=nanoseconds)
        return cls(document["traceEvents"], document["otherData"])

    @property
    def slices(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ph"] == "X"]

    def titles(self, kind: str) -> list[str]:
        return [event["args"]["name"] for event in self.events if event["name"] == kind]

    def tracks(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        tracks = defaultdict(list)
        for event in self.slices:
            tracks[event["pid"], event["tid"]].append(event)
        return tracks

    def arrows(self, kind: str = "launch") -> list[tuple[str, int, str, int]]:
        """Name and start of what each arrow leads from, and of what it leads to: of the innermost slice of a track."""
        innermost: dict[int, dict[str, Any]] = {}
        begun: dict[int, dict[str, Any]] = {}
        found = []
        for event in sorted((event for event in self.events if event["ph"] in "Xsf"), key=lambda event: event["ts"]):
            if event["ph"] == "X":
                innermost[event["tid"]] = event
                continue
            if event["name"] != kind:
                continue
            bound = innermost[event["tid"]]
            assert event["ts"] == bound["ts"], "right after the slice that it is bound to"
            if event["ph"] == "s":
                assert begun.setdefault(event["id"], bound) is bound, "each begins once"
            else:
                assert event["bp"] == "e"
                call = begun[event["id"]]
                found.append((call["name"], call["ts"], bound["name"], bound["ts"]))
        return sorted(found)

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Number and summed nanoseconds of the slices that the viewer keeps."""
        number, total = Counter[str](), Counter[str]()
        for lane in self.tracks().values():
            for event in kept(lane):
                number[event["cat"]] += 1
                total[event["cat"]] += event["dur"]
        return {category: (number[category], total[category]) for category in number}

    def integral(self, pid: int, name: str) -> int:
        """Nanoseconds in which a counter of a process is 1."""
        steps = [
            (event["ts"], event["args"][name]) for event in self.events if (event["ph"], event["pid"]) == ("C", pid)
        ]
        assert steps == sorted(steps)
        assert not steps or steps[-1][1] == 0
        return sum(value * (after - before) for (before, value), (after, _) in pairwise(steps))


def kept(lane: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The slices of a track that the trace processor keeps, taken by start and then in the order of the file."""
    open_ends: list[tuple[int, int]] = []  # (end, duration)
    for event in sorted(lane, key=lambda event: event["ts"]):
        start, duration = event["ts"], event["dur"]
        # Instants at the same time stack; all else that has ended is closed.
        while open_ends and (
            open_ends[-1][0] < start or (open_ends[-1][0] == start and (open_ends[-1][1] or duration))
        ):
            open_ends.pop()
        if not any(start < end < start + duration for end, _ in open_ends):
            open_ends.append((start + duration, duration))
            yield event


def ours(trace: Trace) -> dict[str, tuple[int, int]]:
    """Number and summed nanoseconds by category, from the trace itself."""
    found = {}
    for category in Category:
        rows = trace.activities.category == category
        if rows.any():
            duration = trace.activities.end_ns[rows] - trace.activities.start_ns[rows]
            found[CATEGORIES[category]] = (int(rows.sum()), int(duration.sum()))
    if trace.call_details:
        found["call"] = (len(trace.calls), int((trace.call_details.end_ns - trace.calls.start_ns).sum()))
    if len(trace.spans):
        found["range"] = (len(trace.spans), int((trace.spans.end_ns - trace.spans.start_ns).sum()))
    return found


def gpu_run() -> Trace:
    """A copy, three kernels, and two all-reduces that run at once on two streams; 2 ns of them are exposed."""
    return draw_trace(
        ranges=[
            ("step|index=7", "##########.............."),
            ("backward", "..######................"),
            ("all_reduce|bucket=3|bytes=4096|params=2", "...########............."),
        ],
        launches={"main": "ab...1", "pt_autograd_0": "..c.AB"},
        streams={7: "..aaabbbbb..cc.......", 9: "....AAAAAAAA.......", 10: "..........BBBB", 11: "....11.."},
        ranks={PID: 0},
    )


def crossing_kernels() -> Trace:
    trace = draw_trace(
        streams={7: "aaaa......", 8: "..bbbb....", 9: "....cc....", 10: "dddddddddd"}, launches={"main": "abcd"}
    )
    return replace(trace, activities=replace(trace.activities, lane=np.full(4, 7, np.int64)))


@pytest.mark.parametrize(("make", "tracks"), [(gpu_run, 6), (crossing_kernels, 2)])
def test_no_slice_is_lost_and_none_changes_its_length(make: Any, tracks: int, tmp_path: Path) -> None:
    trace = make()
    viewed = Viewed.open(source_of(trace), folder=tmp_path)
    assert viewed.by_category() == ours(trace)
    assert len(viewed.tracks()) == tracks


def test_on_a_cpu_the_slices_are_the_measured_work(tmp_path: Path) -> None:
    trace = cpu_run(steps=3, shift=2)
    (rank,) = find_rank_events(trace)
    by_category = Viewed.open(source_of(trace), folder=tmp_path).by_category()
    for category in (Category.COMPUTE, Category.COMMUNICATION):
        events = rank.select_category(category)
        total = int((events.end_ns - events.start_ns).sum())
        assert by_category[CATEGORIES[category]] == (len(events), total)


@pytest.mark.parametrize("trace", [gpu_run(), cpu_run(shift=2)], ids=["gpu", "cpu"])
def test_counters_integrate_to_the_figures(trace: Trace, tmp_path: Path) -> None:
    (rank,) = find_rank_events(trace)
    figures = measure_rank(rank)
    viewed = Viewed.open(source_of(trace), folder=tmp_path)
    assert figures.overlapped_ns
    assert figures.exposed_ns
    assert viewed.integral(1, "overlapped") == figures.overlapped_ns
    assert viewed.integral(1, "exposed") == figures.exposed_ns


@pytest.mark.parametrize(
    ("trace", "counts"),
    [
        (draw_trace(streams={7: "aa"}, launches={"main": "a"}), False),
        (of_backward(is_named=True), True),
        (of_backward(is_named=False), False),
    ],
    ids=["silent", "known", "unknown"],
)
def test_no_counter_where_nothing_communicates_or_is_known(trace: Trace, counts: bool, tmp_path: Path) -> None:
    viewed = Viewed.open(source_of(trace), folder=tmp_path)
    assert any(event["ph"] == "C" for event in viewed.events) is counts


def test_a_collective_tells_its_bucket_bytes_step_and_correlation(tmp_path: Path) -> None:
    viewed = Viewed.open(source_of(gpu_run()), folder=tmp_path)
    collective = next(event for event in viewed.slices if event["name"] == "communication A")
    assert collective["cat"] == "communication"
    assert collective["args"] == {"bytes": 4096, "bucket": 3, "step": 7, "correlation": ord("A")}
    assert (collective["ts"], collective["dur"]) == (4, 8)
    compute = next(event for event in viewed.slices if event["name"] == "compute a")
    assert compute["args"] == {"step": 7, "correlation": ord("a")}


def test_a_thread_that_is_named_by_its_number_has_it_once(tmp_path: Path) -> None:
    """torch.profiler's threads are called ``thread 4244 (python)``."""
    trace = draw_trace(launches={"main": "a..", "thread 4244 (python)": ".b."}, streams={7: ".aab"})
    viewed = Viewed.open(source_of(with_details(trace)), folder=tmp_path)
    assert "CUDA calls, thread 4244 (python)" in viewed.titles("thread_name")


def test_an_arrow_leads_from_each_call_to_what_it_launched(tmp_path: Path) -> None:
    """A graph is one call that launches two kernels."""
    trace = draw_trace(
        launches={"main": "a.g.", "worker": ".b.."}, streams={7: "...aagg..", 9: "...bb.", 10: "......hh"}
    )
    graph = np.where(trace.activities.correlation == ord("h"), ord("g"), trace.activities.correlation)
    trace = replace(trace, activities=replace(trace.activities, correlation=graph), launching_calls=None)
    viewed = Viewed.open(source_of(with_details(trace)), source_of(with_details(trace), "again"), folder=tmp_path)
    assert viewed.titles("thread_name")[:2] == [f"CUDA calls, main thread {PID}", "CUDA calls, worker 4244"]
    call = "cudaLaunchKernel"
    assert viewed.arrows() == sorted(
        2 * [(call, 0, "compute a", 3), (call, 1, "compute b", 3), (call, 2, "compute g", 5), (call, 2, "compute h", 6)]
    )
    correlations = {event["args"]["correlation"] for event in viewed.slices if event["cat"] == "call"}
    assert correlations == {ord("a"), ord("b"), ord("g")}
    assert Viewed.open(source_of(trace), folder=tmp_path).arrows() == [], "names and ends of calls were not read"


def test_an_arrow_leads_from_a_collective_to_what_waited_for_it(tmp_path: Path) -> None:
    #  stream 7   kkkk######......ccc
    #  stream 20  ....CCCCCCCCCCCC
    trace = one_bucket(kernel=4, collective=12, then=6).trace(has_step=True)
    viewed = Viewed.open(source_of(trace), source_of(trace, "again"), folder=tmp_path)
    assert viewed.arrows("needed by") == 2 * [(ALL_REDUCE, 4, "gemm", 16)]


def test_steps_that_come_again_tell_number_and_occurrence(tmp_path: Path) -> None:
    trace = draw_trace(
        ranges=[("step|index=0", "##...."), ("step|index=1", "..##.."), ("step|index=0", "....##")],
        launches={"main": "a.b.c."},
        streams={7: "aabbcc"},
    )
    viewed = Viewed.open(source_of(trace), folder=tmp_path)
    told = {event["name"]: event["args"] for event in viewed.slices if event["cat"] == "compute"}
    assert [(args["step"], args.get("occurrence")) for args in told.values()] == [(0, 1), (1, None), (0, 2)]


def test_warm_up_is_there_too(tmp_path: Path) -> None:
    trace = draw_trace(
        ranges={
            "step|index=0|warmup=1": "########........",
            "step|index=0": "........########",
            "forward": ".##......##.....",
            "backward": "...##......##...",
            "synchronize": ".....#.......#..",
            "all_reduce|bucket=0": "....##......##..",
        },
        ranks={PID: 0},
    )
    viewed = Viewed.open(source_of(trace), folder=tmp_path)
    compute = [(event["ts"], event["args"].get("step")) for event in viewed.slices if event["cat"] == "compute"]
    assert sorted(compute, key=lambda pair: pair[0]) == [(1, None), (3, None), (9, 0), (11, 0)]
    assert (viewed.integral(1, "overlapped"), viewed.integral(1, "exposed")) == (2, 2), "of both steps"


def test_processes_and_lanes_are_named(tmp_path: Path) -> None:
    viewed = Viewed.open(source_of(gpu_run()), folder=tmp_path)
    assert viewed.titles("process_name") == [f"rank 0 (pid {PID}, GPU 0)"]
    assert viewed.titles("thread_name") == [
        f"main thread {PID}",
        "collectives, launch to completion",
        "GPU 0, stream 7: compute",
        "GPU 0, stream 9: communication",
        "GPU 0, stream 10: communication",
        "GPU 0, stream 11: memory",
    ]


def test_several_traces_have_processes_of_their_own_and_first_steps_at_one_time(tmp_path: Path) -> None:
    late = cpu_run()
    late = replace(
        late, spans=replace(late.spans, start_ns=late.spans.start_ns + 12_345, end_ns=late.spans.end_ns + 12_345)
    )
    viewed = Viewed.open(source_of(cpu_run(), "naive"), source_of(late, "overlap"), folder=tmp_path)
    assert viewed.titles("process_name") == [f"naive: rank 0 (pid {PID}, CPU)", f"overlap: rank 0 (pid {PID}, CPU)"]
    first_steps = {event["pid"]: event["ts"] for event in viewed.slices if event["name"] == "step|index=0"}
    assert set(first_steps) == {1, 2}
    assert len(set(first_steps.values())) == 1
    assert min(event["ts"] for event in viewed.slices) == 0
    tids = [event["tid"] for event in viewed.events if event["name"] == "thread_name"]
    assert len(tids) == len(set(tids))
    assert viewed.about["time 0"]["overlap (drawn.sqlite)"] == "12345 ns"
    assert viewed.about["device"] == "cpu"


def test_ranks_of_a_run_are_on_one_clock(tmp_path: Path) -> None:
    """Each was lined up at the start of its own first step, so that none seemed to wait for another."""
    first, second = two_clocks()
    viewed = Viewed.open(*measuring.sources_of({"rank 0": first, "rank 1": second}), folder=tmp_path)
    times = defaultdict(list)
    for event in viewed.slices:
        if event["name"].startswith("all_reduce"):
            times[event["pid"]].append((event["ts"], event["dur"]))
    assert times[1] == times[2] != []
    assert [event["ts"] for event in viewed.slices if event["name"] == "step|index=0"] == [0, 3]
    assert viewed.about["clocks"] == {}


def test_a_caveat_names_its_trace_where_it_does_not_hold_for_all(tmp_path: Path) -> None:
    """Of eight ranks, 'arrives last in the only step' was said of none."""
    shared = "ranks share a GPU"
    late = source_of(of_backward(is_named=True), "rank 0")._replace(caveats=("arrives last in 3 of 4 steps", shared))
    others = [source_of(of_backward(is_named=True), f"rank {rank}")._replace(caveats=(shared,)) for rank in (1, 2)]
    told = Viewed.open(late, *others, folder=tmp_path).about["caveats"]
    assert told == ["rank 0: arrives last in 3 of 4 steps", shared]


def test_a_drift_that_is_left_out_is_told(tmp_path: Path) -> None:
    """Analysis moves later times by more; here, and on pages, all times of a file are moved alike."""
    first, second = measuring.sources_of(dict(zip(("rank 0", "rank 1"), two_clocks(), strict=True)))
    assert second.clock is not None
    drifting = second._replace(clock=replace(second.clock, drift=100.0, origin_ns=1000))
    about = Viewed.open(first, drifting, folder=tmp_path).about
    told = "its clock drifts by 4.0 µs from the first file's meanwhile, which is not drawn"
    assert about["clocks"] == {"rank 1 (second.sqlite)": told}
    panels = build_timeline([first, drifting]).panels
    assert [told in panel.facts for panel in panels] == [False, True]


def test_long_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    trace, year = cpu_run(steps=1), 365 * 86_400 * 10**9
    # A clock that counts from 1970, and a last range that is open for a year and a nanosecond.
    start = trace.spans.start_ns + 50 * year
    end = np.append(start[:-1] + 3, start[-1] + year + 1)
    viewed = Viewed.open(
        source_of(replace(trace, spans=replace(trace.spans, start_ns=start, end_ns=end))), folder=tmp_path
    )
    assert {event["dur"] for event in viewed.slices if event["cat"] != "compute"} == {3, year + 1}


def test_names_are_data(tmp_path: Path) -> None:
    names = (HOSTILE_TITLE, '"\\\n\0</script>', "x" * 10_000, "\N{HEBREW LETTER ALEF}\u202ecod.exe \ud800")
    trace = draw_trace(streams={7: "abcd"}, launches={"main": "abcd"})
    viewed = Viewed.open(source_of(replace(trace, names=names), HOSTILE_TITLE), folder=tmp_path)
    assert [event["name"] for event in viewed.slices] == list(names)


def test_the_same_trace_gives_the_same_bytes_and_a_plain_file_the_same_text(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz", "plain.json"):
        write_perfetto([source_of(gpu_run())], tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == (tmp_path / "plain.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json.gz", "b.json.gz", "plain.json"}


def test_a_trace_without_events_is_a_file_without_slices(tmp_path: Path) -> None:
    assert Viewed.open(source_of(draw_trace()), folder=tmp_path).events == []


def test_a_slice_that_crosses_goes_to_the_next_lane() -> None:
    drawn = [
        runs(row)[0]
        for row in ("000000000000..", ".0000.........", "...1111.......", ".....0........", "........111111")
    ]
    tracks = separate_crossing(column(start for _, start, _ in drawn), column(end for _, _, end in drawn))
    assert tracks.tolist() == [int(row) for row, _, _ in drawn]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=40))
def test_slices_of_a_lane_always_nest(drawn: list[tuple[int, int]]) -> None:
    start, end = column(s for s, _ in drawn), column(s + d for s, d in drawn)
    tracks = separate_crossing(start, end)
    for lane in set(tracks.tolist()):
        rows = np.flatnonzero(tracks == lane)
        rows = rows[np.lexsort((-end[rows], start[rows]))]
        events = [{"ts": int(start[row]), "dur": int(end[row] - start[row])} for row in rows]
        assert list(kept(events)) == events


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    of_which_the_gate_keeps(
        ["nsys2024_6_cuda_graphs_a100.sqlite", "kineto_a100_ddp_rank0of2.json.gz"],
        [
            "nsys2026_2_two_processes_h100.sqlite",
            "nsys2022_4_ddp_unet_a100_rank0of4.sqlite",
            "nsys2024_6_cuda_graphs_a100.sqlite",
            "kineto_a100_ddp_rank0of2.json.gz",
        ],
    ),
)
def test_real_captures_keep_every_slice_and_every_figure(shared_traces: Path, name: str, tmp_path: Path) -> None:
    trace = load_trace(shared_traces / name, ReadOptions(with_launches=True))
    source = source_of(trace)
    viewed = Viewed.open(source, folder=tmp_path)
    assert viewed.by_category() == ours(trace)
    launched = np.flatnonzero(trace.launching_calls != UNKNOWN)
    tables = (trace.activities, trace.spans, trace.calls)
    zero = min(int(table.start_ns.min()) for table in tables if len(table))
    calls = trace.calls.start_ns[trace.launching_calls[launched]] - zero
    starts, names = trace.activities.start_ns[launched] - zero, trace.activities.name_id[launched]
    assert sorted((start, name, at) for _, start, name, at in viewed.arrows()) == sorted(
        (start, trace.names[name], at)
        for start, name, at in zip(calls.tolist(), names.tolist(), starts.tolist(), strict=True)
    )
    for pid, rank in enumerate(source.ranks, 1):
        figures = measure_rank(rank)
        assert viewed.integral(pid, "overlapped") == (figures.overlapped_ns or 0)
        assert viewed.integral(pid, "exposed") == (figures.exposed_ns or 0)
