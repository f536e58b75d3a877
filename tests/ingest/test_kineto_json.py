from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.errors import TraceError
from ddp_prof.ingest.load import load_trace
from ddp_prof.notes import Doubt
from ddp_prof.trace import Category, Kind
from tests.command_line import run

BASE = 1_790_857_026_000_000_000


def event(category: str, name: str, ts: str, dur: str, tid: int | str = 1, **arguments: Any) -> str:
    """One event as text: the digits of its times are ours, not a float's."""
    rest = json.dumps({"ph": "X", "cat": category, "name": name, "pid": 99, "tid": tid, "args": arguments})
    return f'{rest[:-1]}, "ts": {ts}, "dur": {dur}}}'


def write(path: Path, events: list[str], **top: Any) -> Path:
    head = json.dumps(top)[1:-1]
    text = "{" + (head + ", " if head else "") + f'"traceEvents": [{", ".join(events)}]}}'
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    ("pids", "devices", "ranks"),
    [((1, 2), (0, 1), {}), ((1, 1), (0, 1), {0: 3}), ((), (0, 1), {}), ((), (0, 0), {0: 3})],
    ids=["two processes", "one process drives both", "who launched is not told", "one device"],
)
def test_a_file_put_together_of_two_ranks_does_not_tell_which_is_which(
    tmp_path: Path, pids: tuple[int, ...], devices: tuple[int, int], ranks: dict[int, int]
) -> None:
    events = [
        event("kernel", "gemm", "20", "10", tid=7, device=device, stream=7, correlation=number)
        for number, device in enumerate(devices)
    ]
    for number, pid in enumerate(pids):
        call = event("cuda_runtime", "cudaLaunchKernel", "12", "1", tid=2, correlation=number)
        events.append(call.replace('"pid": 99', f'"pid": {pid}'))
    trace = load_trace(write(tmp_path / "x.json", events, distributedInfo={"rank": 3, "world_size": 8}))
    assert trace.ranks == ranks


@pytest.mark.parametrize(("marked", "is_read"), [("all", False), ("some", True)])
def test_what_is_left_of_a_trace_on_a_critical_path_is_refused(marked: str, is_read: bool, tmp_path: Path) -> None:
    """HolisticTraceAnalysis leaves out all else by default: compute that hid communication, so 0 % was hidden."""
    events = [json.loads(text) for number in range(3) for text in launch(number, 20 * number)]
    for one in events[(marked == "some") :]:
        one["args"]["critical"] = 1
    events.append(json.loads(event("user_annotation", "ProfilerStep#1", "0", "80")))
    arrow = {"ph": "s", "cat": "critical_path", "name": "critical_path", "pid": 99, "tid": 2, "ts": 20, "id": 1}
    path = write(tmp_path / "x.json", [json.dumps(one) for one in (*events, arrow)])
    if is_read:
        assert len(load_trace(path).activities) == 3
    else:
        with pytest.raises(TraceError, match="only the events of a critical path are left in it"):
            load_trace(path)


def launch(number: int, ts: int, category: str = "cuda_runtime", name: str = "cudaLaunchKernel") -> list[str]:
    call = event(category, name, str(ts), "2", tid=2, correlation=number)
    kernel = event("kernel", "gemm", str(ts + 10), "5", tid=7, device=0, stream=7, correlation=number)
    return [call, kernel] if category == "cuda_runtime" else [call]


def test_ranks_with_one_pid_in_a_file_are_refused(tmp_path: Path) -> None:
    """As of containers: their steps cut each other, and 82 % of communication was hidden where 50 % was.

    us       0  20 40 60 80 100
    rank 0      1  2  3  4  5
    rank 1         1  2  3  4  5
    """
    events = [text for rank in (0, 1) for number in range(1, 6) for text in launch(number, 20 * number + 21 * rank)]
    with pytest.raises(TraceError, match="traces of several processes with one pid, 99: nothing tells which launched"):
        load_trace(write(tmp_path / "x.json", events))


@pytest.mark.parametrize(
    ("pid", "late", "lasts", "told"),
    [
        (99, None, 20, None),
        (99, 7, 20, "several processes with one pid, 99"),
        (98, 7, 20, "of 2 processes"),
        (98, 900, 20, "of 2 processes"),
        (99, None, 2000, None),
    ],
    ids=["one rank", "one pid", "two pids", "two pids, one after another", "in a wrong unit"],
)
def test_ranks_on_cpus_in_one_file_are_refused(
    pid: int, late: int | None, lasts: int, told: str | None, tmp_path: Path
) -> None:
    """They were taken for one: compute of each rank hid 70 % of the communication of both.

    us       0           100
    rank 0   aa.bb.cc.dd
    rank 1     aa.bb.cc.dd
    """
    events = []
    for shift, of in [(0, 99)] + [(late, pid)] * (late is not None):
        rank = [event("user_annotation", "ProfilerStep#3", str(10 + shift), "100", tid=2)]
        rank += [event("cpu_op", "aten::mm", str(10 + shift + 25 * at), str(lasts), tid=2) for at in range(4)]
        rank.append(event("user_annotation", "gloo:all_reduce", str(60 + shift), "30", tid=5))
        events += [text.replace('"pid": 99', f'"pid": {of}') for text in rank]
    path = write(tmp_path / "x.json", events)
    if told is None:
        assert len(load_trace(path).operators) == 4
    else:
        with pytest.raises(TraceError, match=f"put together from the traces .*{told}"):
            load_trace(path)


@pytest.mark.parametrize(
    ("late_us", "number", "calls", "is_read"),
    [(9, 1, False, False), (9, 50, False, False), (9, 50, True, False), (17, 50, False, True), (9, None, False, True)],
    ids=["no calls", "numbers of their own", "calls, numbers of their own", "dependent launch", "nodes of a graph"],
)
def test_ranks_whose_streams_have_the_same_numbers_are_refused(
    late_us: int, number: int | None, calls: bool, is_read: bool, tmp_path: Path
) -> None:
    """Where nothing else tells them apart. They were taken for one rank, with 48 collectives for 24.

    us            0         20        40
    stream 7      gggggggggggggggggggg
    of the other     gggggggggggggggggggg
    """
    events = [event("kernel", "scale", "5", "3", tid=7, device=0, stream=7, correlation=1)]
    for shift, first in ((0, 1), (late_us, number or 1)):
        for at in range(4):
            shared = {"device": 0, "stream": 7, "correlation": 1 if number is None else first + at}
            events.append(event("kernel", "gemm", str(100 * at + 20 + shift), "20", tid=7, **shared))
            if calls:
                call = str(100 * at + 11 + shift)
                events.append(event("cuda_runtime", "cudaLaunchKernel", call, "1", tid=2, correlation=first + at))
        if calls:
            events.append(event("user_annotation", "ProfilerStep#3", str(10 + shift), "400", tid=2))
    path = write(tmp_path / "x.json", events)
    if is_read:
        assert len(load_trace(path).activities) == 9
    else:
        with pytest.raises(TraceError, match="put together from the traces of several processes"):
            load_trace(path)


def test_a_process_that_numbers_its_calls_anew_is_one(tmp_path: Path) -> None:
    """As of three windows in one file; the driver's calls within those of the runtime have their numbers."""
    rounds = [(number, 1000 * again + 20 * number) for again in range(3) for number in range(1, 7 - 2 * (again == 1))]
    events = [text for number, at in rounds for text in launch(number, at)]
    events += [text for number, at in rounds for text in launch(number, at + 1, "cuda_driver", "cuLaunchKernel")]
    assert len(load_trace(write(tmp_path / "x.json", events)).activities) == len(rounds)


@pytest.mark.parametrize(
    ("start_us", "top", "epoch_ns"),
    [
        ("20", {"baseTimeNanoseconds": BASE}, BASE),
        ("1700000000000000.5", {}, 0),  # until torch 2.3
        ("20", {}, None),  # made relative by another program: clocks of two ranks seemed to agree
    ],
)
def test_utc_is_known_where_a_base_or_the_times_themselves_tell_it(
    start_us: str, top: dict[str, int], epoch_ns: int | None, tmp_path: Path
) -> None:
    kernel = event("kernel", "gemm", start_us, "10", tid=7, device=0, stream=7)
    assert load_trace(write(tmp_path / "x.json", [kernel], **top)).epoch_ns == epoch_ns


def gpu_step(**kernel: Any) -> list[str]:
    return [
        event("user_annotation", "ProfilerStep#3", "0", "100"),
        event("user_annotation", "backward", "10", "40"),
        event("cuda_runtime", "cudaLaunchKernel", "12.5", "1", tid=2, correlation=5),
        event("cuda_driver", "cuLaunchKernel", "14.5", "1", tid=2, correlation=6),
        event(kernel.get("kernel", "kernel"), "gemm", "20.001", "10.5", tid=7, device=0, stream=7, correlation=5),
        event(
            kernel.get("kernel", "kernel"),
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            "25.001",
            "10",
            tid=20,
            device=0,
            stream=20,
            correlation=6,
        ),
        event("gpu_user_annotation", "nccl:all_reduce", "25", "10.002", tid=20),
    ]


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "no_extension_at_all"])
def test_a_step_is_measured(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, gpu_step(), baseTimeNanoseconds=BASE, distributedInfo={"rank": 1, "world_size": 2})
    result = measure_overlap(load_trace(path))
    (rank,) = result.ranks
    assert (result.source, rank.rank, rank.device, rank.kernels, rank.collectives) == ("kineto", 1, 0, 2, 1)
    assert (rank.comm_ns, rank.overlapped_ns, rank.exposed_ns, rank.backward_overlapped_ns) == (
        10_000,
        5_500,
        4_500,
        5_500,
    )
    assert (rank.steps[0].step, rank.steps[0].tail_ns) == (3, 4_500)


def test_an_event_that_is_drawn_on_another_stream_is_of_its_own(tmp_path: Path) -> None:
    """As torch's export_chrome_trace(graph_lanes="all") draws the kernels of CUDA graphs: all ran on the one stream."""
    moved = [text.replace('"stream": 20', '"stream": 7, "original_stream": 20') for text in gpu_step()]
    trace = load_trace(write(tmp_path / "x.json", [text.replace('"tid": 20', '"tid": 7') for text in moved]))
    assert trace.activities.lane.tolist() == [7, 20]
    assert not any("compute stream" in warning for warning in measure_overlap(trace).warnings)


def test_the_name_of_the_gpu_is_read(tmp_path: Path) -> None:
    noted = [{"id": 0, "name": "NVIDIA A100"}, {"id": 1, "name": 5}, "?", {"name": "nameless"}]
    trace = load_trace(write(tmp_path / "x.json", gpu_step(), deviceProperties=noted))
    assert trace.gpus == {(0, 0): "NVIDIA A100"}
    assert measure_overlap(trace).ranks[0].gpu == "NVIDIA A100"
    assert load_trace(write(tmp_path / "y.json", gpu_step(), deviceProperties={"id": 0})).gpus == {}


@pytest.mark.parametrize(
    ("name", "rows"),
    [("Activity Buffer Request", 1), ("Buffer Flush", 1), ("Command Buffer Full", 0), ("Lazy Function Loading", 0)],
)
def test_what_cuda_does_without_a_profiler_is_not_the_profiler_s_work(name: str, rows: int, tmp_path: Path) -> None:
    """A host that runs ahead waits in launches for room in the command buffer."""
    events = [*gpu_step(), event("overhead", name, "10", "30", tid=0)]
    assert len(load_trace(write(tmp_path / "x.json", events)).overhead) == rows


def test_old_capitalised_categories_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", gpu_step(kernel="Kernel"))
    assert measure_overlap(load_trace(path)).ranks[0].kernels == 2


@pytest.mark.parametrize("category", ["collective_comm", "concurrent_kernel", "gpu_kernel"])
def test_kernels_of_other_categories_are_read(category: str, tmp_path: Path) -> None:
    """Kineto's own names of them; their launches had no activities, so the profiler was said to have lost them."""
    compute, collective = (launch(number, 20 * number)[1] for number in (1, 2))
    collective = collective.replace("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
    trace = load_trace(write(tmp_path / "x.json", [collective.replace('"kernel"', f'"{category}"'), compute]))
    assert trace.activities.category.tolist() == [Category.COMMUNICATION, Category.COMPUTE]


@pytest.mark.parametrize(("grid", "kernels"), [([64, 1, 1], 2), (None, 1)])
def test_what_has_a_grid_is_a_kernel_in_a_category_that_no_one_knows(
    grid: list[int] | None, kernels: int, tmp_path: Path
) -> None:
    """As where a tool files collectives under 'communication'; their launches seemed to have lost their work."""
    about = {"stream": 20, "device": 0, "correlation": 1} | ({"grid": grid} if grid else {})
    collective = event("communication", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "30", "10", tid=20, **about)
    trace = load_trace(write(tmp_path / "x.json", [*launch(1, 20)[:1], *launch(2, 40), collective]))
    assert len(trace.activities) == kernels


def test_torch_1_8_calls_all_operations_operator_and_writes_ids_as_texts(tmp_path: Path) -> None:
    events = [
        event("Operator", "ProfilerStep#3", "0", "100", tid="123"),
        event("Operator", "aten::forward", "1", "2", tid="123"),
        event("Runtime", "cudaLaunchKernel", "12", "1", tid="456 (python)", correlation="5"),
        event("Runtime", "cudaLaunchKernel", "14", "1", tid="456 (python)", correlation=6),
        event("Kernel", "gemm", "20", "10", tid="stream 7", device=0, correlation=5),
        event("Kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(x)", "25", "10", tid="stream 20", correlation=6),
    ]
    trace = load_trace(write(tmp_path / "x.json", [text.replace('"pid": 99', '"pid": 0') for text in events]))
    assert (trace.activities.lane.tolist(), trace.activities.device.tolist()) == ([7, 20], [0, 0])
    assert (trace.calls.lane.tolist(), trace.launching_calls.tolist()) == ([456, 456], [0, 1])
    assert [trace.names[name] for name in trace.spans.name_id] == ["ProfilerStep#3"]
    result = measure_overlap(trace)
    ((step,),) = (rank.steps for rank in result.ranks)
    assert (step.step, step.tail_ns, result.attribution.method) == (3, 5_000, "inferred")


def test_numbers_that_another_program_wrote_as_floats_are_read(tmp_path: Path) -> None:
    """All work was on device -1, and no launch was known."""
    noted = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Float", "Group size": 2, "Seq": 5}
    collective = event("kernel", "ncclDevKernel_AllReduce", "40", "9", device=0, stream=20, correlation=7, **noted)
    whole = write(tmp_path / "x.json", [*gpu_step(), collective])
    document = json.loads(whole.read_text(), parse_int=float)
    (tmp_path / "y.json").write_text(json.dumps(document))
    trace = load_trace(tmp_path / "y.json")
    integers, floats = map(measure_overlap, (load_trace(whole), trace))
    assert (floats.ranks[0].steps, floats.ranks[0].device) == (integers.ranks[0].steps, 0)
    told = trace.collective_metadata
    assert (told.bytes.tolist(), told.group_size.tolist(), told.sequence.tolist()) == ([256], [2], [5])


@pytest.mark.parametrize(
    ("base", "rank", "told"),
    [(float(BASE), 1.0, (BASE, 1)), (str(BASE), "1", (BASE, 1)), (None, None, (None, None)), (0, -1, (None, None))],
)
def test_rank_and_base_that_another_program_wrote_are_read(
    base: object, rank: object, told: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """The trace was said to be none of torch.profiler's."""
    info = {"rank": rank, "world_size": 2.0}
    trace = load_trace(write(tmp_path / "x.json", gpu_step(), baseTimeNanoseconds=base, distributedInfo=info))
    assert (trace.epoch_ns, trace.ranks.get(0), trace.world_size) == (*told, 2)


@pytest.mark.parametrize("category", ["cpu_op", "Operator"])
def test_ranges_that_old_torch_records_as_operators_do_not_compute(category: str, tmp_path: Path) -> None:
    """A step held all of its all-reduce, so 100 % of it was hidden; as 'cpu_op', nothing was known to communicate."""
    events = [
        event(category, "ProfilerStep#3", "0", "100", tid=99),
        event(category, "gloo:all_reduce", "35", "20", tid=8),
        event(category, "c10d::allreduce_", "34", "1", tid=7),
        event(category, "autograd::engine::evaluate_function: AddmmBackward0", "40", "20", tid=7),
        event(category, "aten::mm", "40", "9", tid=7),
    ]
    (rank,) = measure_overlap(load_trace(write(tmp_path / "x.json", events))).ranks
    assert (rank.steps[0].step, rank.comm_ns, rank.overlapped_ns) == (3, 20_000, 15_000)


def test_of_streams_that_no_event_names_none_is_said_to_be_computes(tmp_path: Path) -> None:
    kernels = [event("kernel", name, "20", "10", tid="gpu", device=0) for name in ("gemm", "ncclDevKernel_Generic")]
    assert not any(
        "stream" in warning for warning in measure_overlap(load_trace(write(tmp_path / "x.json", kernels))).warnings
    )


def test_what_to_record_is_said_in_the_profilers_own_words(tmp_path: Path) -> None:
    kernels_only = [text for text in gpu_step() if '"kernel"' in text]
    (warning, *_) = measure_overlap(load_trace(write(tmp_path / "x.json", kernels_only))).warnings
    assert "ProfilerActivity.CPU" in warning


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"stream": 7', b'"memory bandwidth (GB/s)": inf, "stream": 7'),
        (b'"stream": 7', b'"occupancy": -NaN,\n "stream": 7'),
        (b'"gemm"', b'"ge\x01mm\t"'),
        (b'"gemm"', b'"C:\\users\\Gemm \\"new\\" \\u00e9"'),
        (b'"gemm"', b'"gemm\xff\xe9"'),
        (b'"gemm"', b'"{"device": "cpu", \\"dtype": "float32"}(12): gemm"'),
        (b'"gemm"', b'"<module>\n"doc""'),
        (b'"stream": 7', b'"memory bandwidth (GB/s)": N/A, "stream": 7'),
    ],
)
def test_what_torch_writes_and_json_does_not_allow_is_read(good: bytes, bad: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", gpu_step())
    expected = measure_overlap(load_trace(path))
    path.write_bytes(path.read_bytes().replace(good, bad, 1))
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        msgspec.json.decode(path.read_bytes())
    assert measure_overlap(load_trace(path)) == expected


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(f"[{', '.join(gpu_step())}]")
    assert measure_overlap(load_trace(path)).ranks[0].kernels == 2


@given(whole=st.integers(0, 2**51), fraction=st.integers(0, 999))
def test_times_are_exact_to_the_nanosecond(whole: int, fraction: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also 16 digits of microseconds with three decimals, which no float64 can hold."""
    text = f"{whole}.{fraction:03}"
    kernel = event("kernel", "gemm", text, "0.001", device=0, stream=1, correlation=1)
    path = write(tmp_path_factory.mktemp("t") / "x.json", [kernel])
    activities = load_trace(path).activities
    assert activities.start_ns.tolist() == [int(Decimal(text) * 1000)]
    assert activities.end_ns.tolist() == [int(Decimal(text) * 1000) + 1]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_file_cut_off_is_refused(suffix: str, tmp_path: Path) -> None:
    """Of plain text it was said that it was no trace of torch.profiler's."""
    whole = write(tmp_path / f"x{suffix}", gpu_step()).read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(whole[:-20])
    with pytest.raises(TraceError, match=rf"cut{suffix}: damaged or cut off"):
        load_trace(path)


@pytest.mark.parametrize("cut", [0.5, 0.6])
def test_a_file_that_two_ranks_wrote_is_damaged_and_not_of_another_program(cut: float, tmp_path: Path) -> None:
    """TensorRT-LLM let all ranks export to one path."""
    whole = write(tmp_path / "x.json", gpu_step()).read_bytes()
    path = tmp_path / "both.json"
    path.write_bytes(whole[: int(cut * len(whole))] + whole + whole)
    with pytest.raises(TraceError, match=r"both\.json: damaged or cut off .*, each process to a file of its own"):
        load_trace(path)


@pytest.mark.parametrize("thread", [-1, 2**31 - 1, 2**60])
def test_any_number_of_a_thread_is_one(thread: int, tmp_path: Path) -> None:
    """Counting threads in an array took 16 GiB, or ended in a ValueError."""
    path = write(tmp_path / "x.json", [text.replace('"tid": 1,', f'"tid": {thread},') for text in gpu_step()])
    (rank,) = find_rank_events(load_trace(path))
    assert rank.main_thread == thread


def launched_by(thread: int, path: Path) -> str:
    """How backward is told of a step without collectives, in which autograd's engine ran in this thread."""
    events = [
        event("user_annotation", "ProfilerStep#3", "0", "100", tid=1),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", "10", "9", tid=thread),
        event("cuda_runtime", "cudaLaunchKernel", "12", "1", tid=thread, correlation=5),
        event("kernel", "gemm", "20", "10", tid=7, device=0, stream=7, correlation=5),
    ]
    name = json.dumps(
        {"ph": "M", "name": "thread_name", "pid": 99, "tid": thread, "args": {"name": "thread 2 (python)"}}
    )
    nameless = '{"ph": "M", "name": "thread_name", "pid": 99, "tid": 8}'
    trace = load_trace(write(path / "x.json", [*events, name, nameless]))
    assert (0, 8) not in trace.threads
    return measure_overlap(trace).attribution.method


def test_autograd_s_threads_are_told_by_its_engine(tmp_path: Path) -> None:
    assert launched_by(2, tmp_path) == "inferred"
    assert launched_by(1, tmp_path) == "none", "of one thread all launches would be backward's"


@pytest.mark.parametrize(("category", "method"), [("cpu_op", "none"), ("Operator", "inferred")])
def test_no_thread_is_autograd_s_where_operators_tell_that_it_did_not_run(
    category: str, method: str, tmp_path: Path
) -> None:
    """SGLang's servers run a model in a second thread, without ranges: 99 % was said to be exposed during backward."""
    events = [event(category, "aten::mm", "10", "9", tid=2)]
    for number, (tid, kernel) in enumerate([(1, "sample"), (2, "gemm"), (2, "ncclDevKernel_AllReduce_Sum_f32(x)")]):
        events.append(event("cuda_runtime", "cudaLaunchKernel", f"{11 + number}", "1", tid=tid, correlation=number + 1))
        events.append(event("kernel", kernel, f"{20 + 9 * number}", "9", tid=7, device=0, correlation=number + 1))
    assert measure_overlap(load_trace(write(tmp_path / "x.json", events))).attribution.method == method


@pytest.mark.parametrize(
    "events",
    [
        ['{"ph": "X", "name": "ncclDevKernel_AllReduce", "pid": 1, "tid": 14, "ts": 5.1, "dur": 2}', "{}"],
        [event("cpu_op", "aten::mm", "5", "2"), '{"ph": "X", "name": "hcom_allReduce__1", "ts": "6", "dur": 2}'],
        [event("FEE", "train (train.py:3)", "5", "2")],
        ['{"ph": "b", "cat": "COLL", "name": "AllReduce", "id": 0, "pid": 1, "ts": 5.1}', "{}"],
        ['{"ph": "B", "name": "NCCL_ALLREDUCE", "pid": 1, "ts": 5.1}', '{"ph": "E", "pid": 1, "ts": 7.1}'],
    ],
    ids=["JAX", "torch_npu", "VizTracer", "NCCL's profiler plugin", "Horovod's timeline"],
)
def test_a_trace_of_another_program_is_refused_and_not_said_to_hold_no_gpu(events: list[str], tmp_path: Path) -> None:
    """Ascend's names a category for what the host did, and none for its device: no collective was in it, on a CPU."""
    with pytest.raises(TraceError, match="without the categories"):
        load_trace(write(tmp_path / "x.json", events, displayTimeUnit="ns"))


def test_an_activity_without_an_end_is_told(tmp_path: Path) -> None:
    """Its time would be missing in silence."""
    kernels = [event("kernel", "gemm", ts, dur, device=0) for ts, dur in (("5", "2"), ("8", "0"), ("9", "-1"))]
    no_end = kernels[0].replace(', "dur": 2', "")
    trace = load_trace(write(tmp_path / "x.json", [*kernels, no_end]))
    assert trace.warnings == ("activities that have no end, or one before they start: 2; they count as taking no time",)
    assert (trace.activities.end_ns - trace.activities.start_ns).tolist() == [2000, 0, 0, 0]


@pytest.mark.parametrize("first_us", [0, 1_615_207_264_505_000])
def test_an_activity_whose_time_was_not_collected_is_left_out_and_told(first_us: int, tmp_path: Path) -> None:
    """CUPTI gives it 0 for start and end: the step began with the trace, or the times were said to be impossible."""

    def step(ts: int, *others: str) -> Path:
        launch = event("cuda_runtime", "cudaLaunchKernel", str(first_us + ts), "1", correlation=5)
        kernel = event("kernel", "gemm", str(first_us + ts + 8), "10", device=0, stream=7, correlation=5)
        marked = event("user_annotation", "ProfilerStep#3", str(first_us + ts - 5), "50")
        return write(tmp_path / "x.json", [marked, launch, kernel, *others])

    lost = event("kernel", "gemm", "0", "0", device=0, stream=7, correlation=6)
    result, without = measure_overlap(load_trace(step(20, lost))), measure_overlap(load_trace(step(20)))
    assert result.ranks == without.ranks
    assert {*result.warnings} - {*without.warnings} == {"1 of 2 activities has no start and is left out"}


def test_events_in_two_rows_are_refused_and_not_said_to_be_none(tmp_path: Path) -> None:
    whole = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "5", "2", device=0)
    events = [whole.replace('"X"', '"B"'), whole.replace('"X"', '"E"').replace('"ts": 5', '"ts": 7')]
    other = '{"ph": "B", "cat": "memory", "name": "of another tool", "ts": 5}'
    assert len(load_trace(write(tmp_path / "x.json", [whole, other])).activities) == 1
    with pytest.raises(TraceError, match="separate rows for the begin and the end of an event"):
        load_trace(write(tmp_path / "x.json", events))


def test_launches_of_other_accelerators_are_known(tmp_path: Path) -> None:
    events = [
        event("xpu_runtime", "urEnqueueKernelLaunch", "12", "1", correlation=5),
        event("kernel", "oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "20", "10", device=0, correlation=5),
    ]
    assert load_trace(write(tmp_path / "x.json", events)).launching_calls.tolist() == [0]


@pytest.mark.parametrize("categories", [("mlu_memcpy", "mlu_memset"), ("GCU_MEMCPY", "GCU_MEMSET")])
def test_copies_of_other_accelerators_are_known(categories: tuple[str, ...], tmp_path: Path) -> None:
    """Those of Cambricon and Enflame."""
    events = [event(category, "of a device", "5", "2", device=0) for category in categories]
    assert load_trace(write(tmp_path / "x.json", events)).activities.kind.tolist() == [Kind.COPY, Kind.MEMORY_SET]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("__amd_rocclr_copyBufferRectAligned.kd", Kind.COPY),
        ("MEMORY_COPY_DEVICE_TO_DEVICE", Kind.COPY),
        ("__amd_rocclr_fillBufferAligned", Kind.MEMORY_SET),
        ("CopyHostToDevice", Kind.COPY),  # as torch 1.12 names them
        ("CopyDeviceToDevice2D", Kind.COPY),
        ("FillBuffer", Kind.MEMORY_SET),
        ("CopyDeviceToDeviceKernel<float>", Kind.KERNEL),
        ("triton_per_fused__to_copy_sum_2.kd", Kind.KERNEL),
    ],
)
def test_copies_that_rocm_records_as_kernels_do_not_compute(name: str, kind: Kind, tmp_path: Path) -> None:
    """They hid communication, as those of CUDA do not."""
    gemm = event("kernel", "gemm", "1", "2", device=0, grid=[1, 1, 1], block=[64, 1, 1])
    trace = load_trace(write(tmp_path / "x.json", [event("kernel", name, "5", "2", device=0, correlation=7), gemm]))
    assert sorted(trace.activities.kind.tolist()) == sorted([kind, Kind.KERNEL])
    row = trace.activities.kind.tolist().index(kind)
    expected = Category.COMPUTE if kind is Kind.KERNEL else Category.MEMORY
    assert (trace.activities.category[row], trace.activities.correlation[row]) == (expected, 7)


def test_a_correlation_number_of_0_is_none(tmp_path: Path) -> None:
    """ROCm's tracer gave it to all collectives: the capture was said to be trimmed."""
    launch = event("cuda_runtime", "hipExtLaunchKernel", "12", "1", correlation=5)
    kernels = [event("kernel", "ncclDevKernel_Generic", ts, "3", device=0, correlation=0) for ts in ("20", "30")]
    for of_call in (5, 0):
        events = [launch.replace('"correlation": 5', f'"correlation": {of_call}'), *kernels]
        result = measure_overlap(load_trace(write(tmp_path / "x.json", events)))
        assert any(text.startswith("2 of 2 activities carry no correlation number") for text in result.warnings)
        assert not any("trimmed" in text for text in result.warnings)


@pytest.mark.parametrize("category", ["hpu_op", "mtia_ccp_events"])
def test_a_device_whose_events_are_not_read_is_refused_and_not_said_to_have_lost_them(
    category: str, tmp_path: Path
) -> None:
    events = [
        event("privateuse1_runtime", "launch", "4", "1", correlation=1),
        event(category, "gemm", "5", "2", device=0, correlation=1),
    ]
    with pytest.raises(TraceError, match=f"its device's events are of the category {category}, which is not read"):
        load_trace(write(tmp_path / "x.json", events))
    kernel = event("kernel", "gemm", "5", "2", device=0, correlation=1)
    assert len(load_trace(write(tmp_path / "x.json", [*events, kernel])).activities) == 1


def test_a_file_put_together_from_two_processes_says_so(tmp_path: Path) -> None:
    events = [event("cuda_runtime", "cudaLaunchKernel", "12", "1", correlation=5)]
    other = events[0].replace('"pid": 99', '"pid": 98')
    assert not load_trace(write(tmp_path / "one.json", events)).warnings
    (warning,) = load_trace(write(tmp_path / "two.json", [*events, other])).warnings
    assert warning.startswith("2 processes")


@pytest.mark.parametrize("pid", ["[TP01] 99", "rank1-99", "99 (rank 1)"])
def test_ranks_put_together_into_one_file_are_told_apart_by_their_labels(pid: str, tmp_path: Path) -> None:
    """As SGLang's ProfileMerger makes them: compute of one GPU hid communication of the other."""
    events = gpu_step()
    (alone,) = measure_overlap(load_trace(write(tmp_path / "one.json", events))).ranks
    other = [text.replace('"pid": 99', f'"pid": "{pid}"') for text in events]
    result = measure_overlap(load_trace(write(tmp_path / "x.json", [*events, *other])))
    assert [rank.process for rank in result.ranks] == [0, 1]
    for rank in result.ranks:
        assert (rank.kernels, rank.comm_ns, rank.overlapped_ns) == (alone.kernels, alone.comm_ns, alone.overlapped_ns)
        assert rank.steps == alone.steps
    assert any("each is taken for a rank" in warning for warning in result.warnings)


@pytest.mark.parametrize(("numbers", "is_known"), [((5, 6), True), ((5, 5), False)], ids=["own", "same"])
def test_ranks_put_together_without_labels_need_numbers_of_their_own(
    numbers: tuple[int, int], is_known: bool, tmp_path: Path
) -> None:
    events = []
    for pid, number in enumerate(numbers):
        call = event("cuda_runtime", "cudaLaunchKernel", "12", "1", tid=2, correlation=number)
        events.append(call.replace('"pid": 99', f'"pid": {pid}'))
        events.append(event("kernel", "gemm", "20", "10", tid=7, device=0, stream=7, correlation=number))
    path = write(tmp_path / "x.json", events)
    if is_known:
        assert [rank.kernels for rank in measure_overlap(load_trace(path)).ranks] == [1, 1]
    else:
        with pytest.raises(TraceError, match="traces of 2 processes, and nothing tells which launched what: give the"):
            load_trace(path)


@pytest.mark.parametrize("key", ["traceEvents", "distributedInfo"])
def test_a_second_list_of_events_is_refused_and_does_not_replace_the_first(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", gpu_step(), distributedInfo={"rank": 0, "world_size": 2})
    value = {"traceEvents": "[]", "distributedInfo": '{"rank": 1}'}[key]
    path.write_text(path.read_text()[:-1] + f', "{key}": {value}}}')
    with pytest.raises(TraceError, match=f"it holds '{key}' more than once: it is put together from several traces"):
        load_trace(path)


def test_events_without_times_are_no_steps_of_0_ns(tmp_path: Path) -> None:
    """Releases 2.12 and 2.13 of torch wrote 0.000 as start and duration of everything in the second half."""
    late = [text.replace("ProfilerStep#3", "ProfilerStep#4") for text in gpu_step()]
    without = [re.sub(r'"ts": [\d.]+, "dur": [\d.]+', '"ts": 0.000, "dur": 0.000', text) for text in late]
    shifted = [re.sub(r'"ts": ([\d.]+)', lambda found: f'"ts": {float(found[1]) + 1000}', text) for text in gpu_step()]
    result = measure_overlap(load_trace(write(tmp_path / "x.json", [*shifted, *without])))
    (rank,) = result.ranks
    assert [(step.step, step.host_ns) for step in rank.steps] == [(3, 100_000)]
    for counts in ("2 of 4 activities", "2 of 4 ranges", "2 of 4 calls"):
        assert f"{counts} have no start and are left out" in result.warnings


def test_events_that_lost_their_start_alone_are_left_out(tmp_path: Path) -> None:
    """They keep their durations, but several cannot all begin at 0. What is known of a collective stays with it."""
    meta = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
    shifted = [re.sub(r'"ts": ([\d.]+)', lambda found: f'"ts": {float(found[1]) + 1000}', text) for text in gpu_step()]
    late = [text.replace("ProfilerStep#3", f"ProfilerStep#{number}") for number in range(4, 8) for text in gpu_step()]
    without = [re.sub(r'"ts": [\d.]+', '"ts": 0.000', text) for text in late]
    events = [text.replace('"stream": 20', f'"stream": 20, {json.dumps(meta)[1:-1]}') for text in [*without, *shifted]]
    trace = load_trace(write(tmp_path / "x.json", events))
    (rank,) = measure_overlap(trace).ranks
    assert [(step.step, step.host_ns, step.comm_ns) for step in rank.steps] == [(3, 100_000, 10_000)]
    assert "8 of 10 activities have no start and are left out" in trace.warnings
    assert [trace.names[trace.activities.name_id[row]][:4] for row in trace.collective_metadata.activity] == ["nccl"]


@pytest.mark.parametrize(("end", "steps"), [("1000", [3]), ("1000.001", [3, 4])])
def test_a_range_that_ends_with_the_recording_is_no_step(end: str, steps: list[int], tmp_path: Path) -> None:
    """A range that is still open when torch.profiler stops ends at its "Record Window End"."""
    last = [
        event("user_annotation", "ProfilerStep#4", "100", "900"),
        event("user_annotation", "backward", "110", "40"),
        event("cuda_runtime", "cudaLaunchKernel", "112.5", "1", tid=2, correlation=7),
        event("kernel", "gemm", "120.001", "10.5", tid=7, device=0, stream=7, correlation=7),
        json.dumps({"ph": "i", "name": "Record Window End", "pid": "", "tid": ""})[:-1] + f', "ts": {end}}}',
    ]
    result = measure_overlap(load_trace(write(tmp_path / "x.json", [*gpu_step(), *last])))
    assert [step.step for step in result.ranks[0].steps] == steps
    note = "1 range that could be a step left out: still open when the recording ended"
    assert (note in result.warnings) == (steps == [3])


def test_what_torch_profiler_logged_about_lost_records_is_said(tmp_path: Path) -> None:
    logged = {"WARNING": ["x.cpp:5] Dropped 17 activity records", "Failed to set name"], "ERROR": 5}
    warnings = load_trace(write(tmp_path / "x.json", gpu_step(), **logged)).warnings
    assert warnings == ("torch.profiler itself reports: 'x.cpp:5] Dropped 17 activity records'",)


def test_a_rank_beyond_the_size_of_the_job_is_doubted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", gpu_step(), distributedInfo={"rank": 9, "world_size": 2})
    trace = load_trace(path)
    assert (trace.ranks, trace.world_size) == ({0: 9}, None)
    (warning,) = trace.warnings
    assert warning == "rank 9 of a job of 2 ranks: one of the two is wrong, so the size is not used"
    assert isinstance(warning, Doubt)


@pytest.mark.parametrize(
    ("world", "size", "known"), [(1, 4, None), (4, 4, 4), (8, 4, 8), (2, 1 << 40, 2), (0, 4, None)]
)
def test_a_job_smaller_than_a_group_of_its_ranks_is_doubted(
    world: int, size: int, known: int | None, tmp_path: Path
) -> None:
    """As of replicas that are jobs of their own: 'the only rank of its job sends nothing to another one'."""
    about = {"Collective name": "allreduce", "Group size": size}
    kernel = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "20", "9", tid=20, stream=20, **about)
    trace = load_trace(write(tmp_path / "x.json", [kernel], distributedInfo={"rank": 0, "world_size": world}))
    assert trace.world_size == known
    told = f"collectives of 4 ranks, but its job is said to have {world} rank: that number is not used"
    assert [warning for warning in trace.warnings if "its job" in warning] == ([told] if world == 1 else [])


def test_an_operator_with_our_prefix_is_a_range(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "ddp_prof|step|index=3", "0", "100"),
        event("cpu_op", "ddp_prof|backward", "10", "40"),
        event("cpu_op", "backward", "20", "5"),
        event("cpu_op", "aten::mm", "30", "5"),
        event("user_annotation", "gloo:all_reduce", "35", "5", tid=2),
    ]
    trace = load_trace(write(tmp_path / "x.json", events))
    assert sorted(trace.names[name] for name in trace.spans.name_id) == ["backward", "gloo:all_reduce", "step|index=3"]
    assert (trace.operators.start_ns - trace.spans.start_ns.min()).tolist() == [20_000, 30_000]


@pytest.mark.parametrize(
    ("call", "gpu", "device"),
    [
        ("cudaLaunchKernel", "NVIDIA H200", "cuda"),
        ("cudaLaunchKernel", None, "cuda"),
        ("hipLaunchKernel", None, "rocm"),
        ("hipExtModuleLaunchKernel", "AMD Instinct MI300X VF", "rocm"),
        ("cudaLaunchKernel", "AMD Radeon Graphics", "rocm"),  # as torch names calls of older releases
    ],
)
def test_devices_of_amd_are_called_rocm(call: str, gpu: str | None, device: str, tmp_path: Path) -> None:
    """They were called cuda, as torch calls them; what a CPU did is cpu on any machine."""
    told = {} if gpu is None else {"deviceProperties": [{"id": 0, "name": gpu}]}
    launch = event("cuda_runtime", call, "10", "5", correlation=7)
    kernel = event("kernel", "gemm", "20", "9", device=0, stream=7, correlation=7)
    assert load_trace(write(tmp_path / "gpu.json", [launch, kernel], **told)).device == device
    alone = load_trace(write(tmp_path / "cpu.json", [event("cpu_op", "aten::mm", "20", "9")], **told))
    assert alone.device == "cpu"
    assert f"device: {device}" in run("overlap", tmp_path / "gpu.json").stdout


@pytest.mark.parametrize(("number", "start", "said"), [(2, "10", 1), (2, "10.1", 0)])
def test_a_kernel_that_is_there_again_under_another_number_is_told(
    number: int, start: str, said: int, tmp_path: Path
) -> None:
    """As in exports that were merged with new numbers: twice as many kernels, and twice their time, were told."""
    events = [
        event("kernel", "gemm", ts, "5", 7, device=0, stream=7, correlation=correlation)
        for ts, correlation in (("10", 1), (start, number))
    ]
    warnings = load_trace(write(tmp_path / "x.json", events)).warnings
    assert (
        sum("duplicate activities under other correlation numbers: 1 of 2" in warning for warning in warnings) == said
    )
