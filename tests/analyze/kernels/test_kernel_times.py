"""Kernels by time, and their slowdown beside communication."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.analyze.kernels.kernel_times import (
    KINDS,
    LEAST_EXECUTIONS,
    KernelRuns,
    KernelTime,
    find_kernel_runs,
    kind_of_compute,
    measure_kernels,
)
from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from tests.nsys_factory import Capture, Kernel, Range, write_capture

KEYS = (("gemm", "64", "forward", "matrix product"), ("gemm", "32", "forward", "matrix product"))


EXAMPLES = {
    "attention": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>()",
    "optimizer": "multi_tensor_apply_kernel<AdamFunctor>()",
    "normalization": "cudnn::bn_bw_1C11_kernel_new<float>()",
    "layout": "void cudnn::ops::nchwToNhwcKernel<float>()",
    "convolution": "sm80_xmma_wgrad_implicit_gemm_f16_execute",
    "matrix product": "ampere_sgemm_128x64_nn",
    "embedding": "void at::native::indexFuncLargeIndex<float>()",
    "reduction": "void at::native::reduce_kernel<512, 1>()",
    "elementwise": "vectorized_elementwise_kernel<4>()",
}


def test_each_kind_has_an_example() -> None:
    assert {kind: kind_of_compute(name) for kind, name in EXAMPLES.items()} == {kind: kind for kind in KINDS}


def test_what_is_in_no_row_is_other() -> None:
    assert kind_of_compute("saxpy(double *, double)") == "other"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>()", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<...>>>()", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("_attn_fwd", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>()", "matrix product"),
        ("triton_poi_fused_convert_element_type_0", "elementwise"),
        ("implicit_convolve_sgemm<float, float, 128>", "convolution"),
    ],
)
def test_kinds_of_kernels_whose_names_hold_several_words(name: str, kind: str) -> None:
    assert kind_of_compute(name) == kind


def execution() -> st.SearchStrategy[tuple[int, int, int]]:
    """Kernel, duration, how much of it communication covers."""
    return st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9)).map(
        lambda found: (found[0], found[1], min(found[1], found[2]))
    )


@given(st.lists(st.lists(execution(), max_size=30), min_size=1, max_size=3))
def test_ranks_are_taken_together(ranks: list[list[tuple[int, int, int]]]) -> None:
    rows = [row for rank in ranks for row in rank]
    arrays = [np.array(rank, np.int64).reshape(-1, 3).T for rank in ranks]
    found = {
        (time.name, time.shape): time
        for time in measure_kernels([KernelRuns(KEYS, *part, 0 * part[0], 1) for part in arrays])
    }
    for number, key in enumerate(KEYS):
        durations = [duration for kernel, duration, _ in rows if kernel == number]
        if not durations:
            continue
        beside = [duration for kernel, duration, under in rows if kernel == number and 2 * under > duration]
        alone = [duration for kernel, duration, under in rows if kernel == number and under == 0]
        time = found[key[:2]]
        assert (time.count, time.total_ns) == (len(durations), sum(durations))
        assert (time.median_ns, time.beside, time.alone) == (median(durations), len(beside), len(alone))
        # Ranks that show it in one way only are not compared with others.
        ways = [
            (
                [length for kernel, length, under in rank if kernel == number and 2 * under > length],
                [length for kernel, length, under in rank if kernel == number and under == 0],
            )
            for rank in ranks
        ]
        beside = [length for way in ways if all(way) for length in way[0]]
        alone = [length for way in ways if all(way) for length in way[1]]
        is_told = min(len(beside), len(alone)) >= LEAST_EXECUTIONS and median(alone) > 0
        assert time.slowdown == (median(beside) / median(alone) if is_told else None)
        assert (time.reason is None) == is_told


def kernels_of(tmp_path, capture: Capture) -> list[KernelTime]:
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture), ReadOptions(with_launches=True))
    (rank,) = find_rank_events(trace)
    return list(measure_kernels([find_kernel_runs(rank)]))


def test_a_kernel_is_one_name_one_shape_one_phase(tmp_path) -> None:
    """Five gemms of 100 ns alone in forward, five of 150 ns beside communication; one of another shape in backward."""
    capture = Capture(ranges=[Range("forward", 0, 2_000, 1), Range("backward", 2_000, 9_000, 1)])
    for number in range(5):
        capture.kernels.append(Kernel("gemm", 1_000 * number, 1_000 * number + 100, launch=number, thread=1))
        beside = Kernel("gemm", 1_000 * number + 300, 1_000 * number + 450, launch=100 + number, thread=1)
        comm = Kernel("ncclDevKernel_AllReduce", beside.start - 9, beside.end + 9, launch=200, thread=1, stream=9)
        capture.kernels += [beside, comm]
    capture.kernels.append(Kernel("gemm", 8_000, 8_500, launch=2_500, thread=1, grid=7))
    gemm, comm, other = kernels_of(tmp_path, capture)
    assert (gemm.phase, gemm.kind, gemm.count, gemm.beside, gemm.alone) == ("forward", "matrix product", 10, 5, 5)
    assert gemm.slowdown == pytest.approx(1.5)
    assert (other.phase, other.count, other.slowdown) == ("backward", 1, None)
    assert other.shape != gemm.shape
    assert (comm.kind, comm.slowdown, comm.reason) == ("communication", None, "it communicates itself")
    assert (comm.beside, comm.alone, comm.beside_ns, comm.alone_ns) == (None,) * 4, "it is not beside itself"


def test_without_kernels_there_is_nothing() -> None:
    assert measure_kernels([]) == ()
