"""CUDA graphs recorded whole: what they computed is not known, nor what it hid, in any answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.device_use import measure_rank_use
from ddp_prof.analyze.overlap import RankOverlap, measure_overlap
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.analyze.variants.regression_gate import Requirements, check_run
from ddp_prof.analyze.why_unknown import GRAPHS
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.perfetto import write_perfetto
from ddp_prof.trace import Trace
from tests.measuring import results_of, source_of
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, write_capture


def captured(path: Path, *, communicates: bool = True, of_two: bool = False) -> Trace:
    """Steps of a graph and a collective beside it; ``of_two`` processes, only the first replays graphs.

    us         0         200       400       600       800      1000
    graph      ..gggggggggggggggggggggggggggg
    stream 20  ....................NNNNNNNNNNNNNNNNNNNN
    """
    capture = Capture()
    for process in (100, 101)[: 1 + of_two]:
        for step in range(5):
            at = 1000 * US * step
            capture.ranges.append(Range(f"step {step}", at, at + 1000 * US, process, process=process))
            for kind, name, stream, begin, end in (
                ("graph" if process == 100 else "kernel", "graph", 7, 20, 600),
                ("kernel", NCCL, 20, 400, 800),
                ("kernel", "adam", 7, 800, 900),
                ("memcpy", "copy", 7, 500, 650),
            ):
                if communicates or name != NCCL:
                    times = (at + begin * US, at + end * US, at + US)
                    capture.kernels.append(Kernel(name, *times, process, process, stream, kind=kind))
    return load_trace(write_capture(path / "x.sqlite", capture))


def test_no_figure_tells_what_is_hidden(tmp_path: Path) -> None:
    trace = captured(tmp_path)
    (rank,) = measure_overlap(trace).ranks
    assert rank.reason == GRAPHS
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.overlap_ratio) == (5 * 400 * US, None, None, None)
    for step in rank.steps:
        assert (step.comm_ns, step.window_ns, step.length.ns) == (400 * US, 880 * US, 1000 * US)
        for part in ("compute_only_ns", "overlapped_ns", "exposed_ns", "exposed_memory_ns", "idle_ns"):
            assert (getattr(step, part), getattr(step.length, part)) == (None, None)
        assert (step.tail_ns, step.blocking_ns, step.other_comm_ns) == (None, None, None)
    (use,) = map(measure_rank_use, find_rank_events(trace))
    assert (use.overlapped_ns, use.hidden, use.idle.idle_ns) == (None, (), None)
    found = results_of(trace)
    assert found.reason == GRAPHS
    assert found.to_frame()[["overlapped_ns", "exposed_ns", "when_unknown_ns"]].isna().all(axis=None)


@pytest.mark.parametrize("of_two", [False, True], ids=["all ranks", "one of two"])
def test_a_run_is_not_compared_by_what_is_not_known(of_two: bool, tmp_path: Path) -> None:
    """The steps of a rank without graphs do not stand for those of the other."""
    overlap = measure_overlap(captured(tmp_path, of_two=of_two))
    (summary,) = compare_variants([overlap])
    assert summary.reason == GRAPHS
    assert (summary.step_ns, summary.comm_ns) == (1000 * US, 400 * US)
    assert (summary.overlapped_ns, summary.exposed_ns, summary.tail_ns, summary.overlap_ratio) == (None,) * 4
    assert set(summary.parts_ns.values()) == {None}
    asked = Requirements(max_exposed_ns=1, max_tail_ns=1, min_overlap=0.1)
    assert "passed" not in {verdict.status for verdict in check_run(overlap, asked).verdicts}


def test_perfetto_gets_no_counter_of_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    trace = captured(tmp_path)
    write_perfetto([source_of("x", trace)], path)
    assert '"exposed"' not in path.read_text()


def test_where_only_graphs_may_communicate_nothing_is_known_of_it(tmp_path: Path) -> None:
    """Sums over the rank are of what was recorded, which is nothing."""
    (rank,) = measure_overlap(captured(tmp_path, communicates=False)).ranks
    assert isinstance(rank, RankOverlap)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.overlap_ratio) == (0, 0, 0, None)
    for step in rank.steps:
        assert (step.comm_ns, step.overlapped_ns, step.exposed_ns, step.overlap_ratio) == (None, None, None, None)
