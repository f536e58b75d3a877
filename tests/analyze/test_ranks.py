"""What ranks are called: no two alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.analyze.collectives.straggler import measure_skew
from ddp_prof.analyze.overlap import measure_overlap, merge_ranks
from ddp_prof.ingest.load import load_trace
from ddp_prof.notes import Doubt
from ddp_prof.present.run_notes import overlap_notes
from tests.drawing import PID, draw_trace
from tests.measuring import analysis_of, collectives_of
from tests.nsys_factory import Capture, Kernel, Range, write_capture


def test_devices_of_one_process_have_names_of_their_own(tmp_path: Path) -> None:
    """As of JAX, where one process drives all GPUs of a machine: each was 'process 100'."""
    kernels = [
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20 + device, 40, 10 + device, 100, device=device, stream=9)
        for device in (0, 1)
    ]
    trace = load_trace(write_capture(tmp_path / "x.sqlite", Capture(kernels)))
    names = ["device 0 of process 100", "device 1 of process 100"]
    assert [rank.name for rank in merge_ranks([measure_overlap(trace)]).ranks] == names
    assert [rank.name for rank in measure_skew(analysis_of(trace)).ranks] == names
    assert [collective.name for collective in collectives_of(trace)] == names


@pytest.mark.parametrize(("process", "device"), [(100, 1), (200, 0)])
def test_a_device_or_a_process_that_only_copies_is_no_rank(tmp_path: Path, process: int, device: int) -> None:
    """As of a data loader that copies batches, or of a copy to the GPU of another rank."""
    kernel = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, 10, 100, stream=9)
    copy = Kernel("copy", 20, 30, 12, process, process=process, device=device, kind="memcpy")
    overlap = measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", Capture([kernel, copy]))))
    assert [(rank.process, rank.device) for rank in overlap.ranks] == [(100, 0)]
    note = f"device {device} of process {process} only copies: it is no rank, and left out"
    assert note in overlap_notes(merge_ranks([overlap]))


def test_a_process_that_only_copies_is_a_rank_where_its_range_says_so(tmp_path: Path) -> None:
    kernel = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, 10, 100, stream=9)
    copy = Kernel("copy", 20, 30, 12, 200, process=200, kind="memcpy")
    ranges = [Range(f"process|rank={rank}|world=2", 1, 50, 100 + 100 * rank, 100 + 100 * rank) for rank in (0, 1)]
    overlap = measure_overlap(load_trace(write_capture(tmp_path / "x.sqlite", Capture([kernel, copy], ranges))))
    assert [rank.rank for rank in overlap.ranks] == [0, 1]


def test_processes_of_files_of_one_name_have_names_of_their_own(tmp_path: Path) -> None:
    """As of two containers, each with a report in a folder of its own: both were 'device 0 of process 100'."""
    traces = []
    for folder in ("node0", "node1"):
        (tmp_path / folder).mkdir()
        kernels = [Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, 10, 100, stream=9)]
        traces.append(load_trace(write_capture(tmp_path / folder / "x.sqlite", Capture(kernels))))
    names = ["process 100 of node0/x.sqlite", "process 100 of node1/x.sqlite"]
    assert [rank.name for rank in merge_ranks([measure_overlap(trace) for trace in traces]).ranks] == names
    assert [rank.name for rank in measure_skew(analysis_of(*traces)).ranks] == names
    assert [collective.name for collective in collectives_of(*traces)] == names


def test_a_file_without_a_device_does_not_make_a_gpu_job_one_of_the_cpu(tmp_path: Path) -> None:
    """Where it came first, figures of GPUs were those of 'device: cpu', and no baseline was comparable."""
    lost = load_trace(write_capture(tmp_path / "a.sqlite", Capture(ranges=[Range("step 0", 1, 40, 100)])))
    kernel = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, 10, 101, process=101, stream=9)
    trace = load_trace(write_capture(tmp_path / "b.sqlite", Capture([kernel])))
    assert [one.device for one in (lost, trace)] == ["cpu", "cuda"]
    assert merge_ranks([measure_overlap(lost), measure_overlap(trace)]).device == "cuda"
    assert analysis_of(lost, trace).device == "cuda"


@pytest.mark.parametrize(("sizes", "told"), [((2, 2), 0), ((2, None), 0), ((2, 4), 1)])
def test_that_files_disagree_on_the_number_of_ranks_is_said(sizes: tuple[int, int | None], told: int) -> None:
    traces = [
        draw_trace(streams={7: "aa", 9: "..BB"}, ranks={PID: rank}, world_size=size, path=f"{rank}.sqlite")
        for rank, size in enumerate(sizes)
    ]
    merged = merge_ranks([measure_overlap(trace) for trace in traces])
    for warnings in (merged.warnings, analysis_of(*traces).warnings):
        assert sum("disagree on the number of ranks in the job (2, 4)" in line for line in warnings) == told


@pytest.mark.parametrize(("start", "step", "told"), [(8, 36, True), (25, 36, False), (8, 600, False)])
def test_that_one_rank_waits_and_another_does_not_is_said(start: int, step: int, told: bool) -> None:
    """The median over the steps of both, 17 ms, is the time of neither. Of a step of 600 ms, 22 ms more are too little.

    ms       0         10        20        30
    rank 0   ....ccccccccccccccccccccccccccAAAAAA
    rank 1   ....ccccAAAAAAAAAAAAAAAAAAAAAAAAAAAA
    """
    late, early = "." * 4 + "c" * 26, ("." * 4 + "c" * (start - 4)).ljust(30, ".")
    traces = [
        draw_trace(
            ranges={"step|index=0": "#" * step}, launches={"main": ".cA"}, ranks={PID: rank}, path=f"{rank}.sqlite",
            streams={7: compute, 9: "." * begin + "A" * (36 - begin)}, character_ns=1_000_000,
        )
        for rank, (compute, begin) in enumerate([(late, 30), (early, start)])
    ]  # fmt: skip
    notes = overlap_notes(merge_ranks([measure_overlap(trace) for trace in traces]))
    said = "ranks differ: rank 1 exposes 28.0 ms per step, rank 0 6.00 ms; figures per step are medians over the steps"
    assert any(note.startswith(said) for note in notes) is told
    assert any(isinstance(note, Doubt) for note in notes) is told


@pytest.mark.parametrize(("long_steps", "hidden", "told"), [(8, 0, True), (8, 35, True), (0, 0, False)])
def test_that_many_steps_expose_more_than_the_median_one_is_said(long_steps: int, hidden: int, told: bool) -> None:
    """That hiding all of it gains at most 5 % was said, where eight of twenty steps expose 30 % of their time.

    It was not said where step 2 stood out by its communication, of which ``hidden`` ms are hidden.
    """
    exposed = [12 if step % 2 and step < 2 * long_steps else 1 for step in range(20)]
    covered = [hidden if step == 2 else 0 for step in range(20)]
    trace = draw_trace(
        ranges={f"step|index={step}": "." * (40 * step) + "#" * 40 for step in range(20)},
        launches={"main": "".join(f"{chr(97 + step)}{chr(65 + step)}".ljust(40, ".") for step in range(20))},
        streams={
            7: "".join(("." + chr(97 + step) * (2 + length)).ljust(40, ".") for step, length in enumerate(covered)),
            9: "".join(
                ("..." + chr(65 + step) * (length + covered[step])).ljust(40, ".")
                for step, length in enumerate(exposed)
            ),
        },
        character_ns=1_000_000,
    )
    result = measure_overlap(trace)
    assert (result.outliers is not None) is bool(hidden)
    notes = overlap_notes(result)
    said = "steps differ: process 4242 exposes 5.40 ms in the mean step, 1.00 ms in the median one; hiding all of it"
    assert any(note.startswith(said) for note in notes) is told
    assert any(isinstance(note, Doubt) for note in notes) is told
