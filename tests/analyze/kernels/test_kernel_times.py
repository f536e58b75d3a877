"""Kernels by time, and their slowdown beside communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
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
from ddp_prof.table import constant_column
from ddp_prof.trace import UNKNOWN
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
        ("void split_embedding_forward<float>(fbgemm_gpu::FixedDivisor)", "embedding"),
        ("void moe::finalize<cutlass::bfloat16_t, 4>()", "other"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816>()", "matrix product"),
        ("triton_poi_fused_convert_element_type_0", "elementwise"),
        ("implicit_convolve_sgemm<float, float, 128>", "convolution"),
    ],
)
def test_kinds_of_kernels_whose_names_hold_several_words(name: str, kind: str) -> None:
    assert kind_of_compute(name) == kind


def execution() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Kernel, duration, how much of it communication covers, and its step; -1: it is of none."""
    return st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9), st.integers(-1, 5)).map(
        lambda found: (found[0], found[1], min(found[1], found[2]), found[3])
    )


@given(st.lists(st.lists(execution(), max_size=60), min_size=1, max_size=3))
def test_ranks_are_taken_together(ranks: list[list[tuple[int, int, int, int]]]) -> None:
    ranks = [sorted(rank, key=lambda row: row[3]) for rank in ranks]
    arrays = [np.array(rank, np.int64).reshape(-1, 4).T for rank in ranks]
    found = {(time.name, time.shape): time for time in measure_kernels([KernelRuns(KEYS, *part, 6) for part in arrays])}
    for number, key in enumerate(KEYS):
        # By rank and position: how long it takes beside communication, and alone.
        beside, alone = defaultdict(list), defaultdict(list)
        durations = []
        for rank, rows in enumerate(ranks):
            seen = Counter[int]()
            for kernel, duration, under, step in rows:
                if kernel == number:
                    durations.append(duration)
                    place = (rank, "nowhere", step < 0) if step < 0 else (rank, seen[step], False)
                    seen[step] += 1
                    if 2 * under > duration:
                        beside[place].append(duration)
                    if under == 0:
                        alone[place].append(duration)
        if not durations:
            continue
        time = found[key[:2]]
        assert (time.count, time.total_ns) == (len(durations), sum(durations))
        counts = [sum(map(len, way.values())) for way in (beside, alone)]
        assert (time.median_ns, time.beside, time.alone) == (median(durations), *counts)
        # Neither ranks nor positions that show it in one way only are compared with others.
        both = [place for place in beside.keys() & alone.keys() if not place[-1]]
        ratios = [duration / max(1, median(alone[place])) for place in both for duration in beside[place]]
        compared = [duration for place in both for duration in alone[place]]
        is_told = min(len(ratios), len(compared)) >= LEAST_EXECUTIONS and any(compared)
        assert time.slowdown == (pytest.approx(median(ratios)) if is_told else None)
        assert (time.reason is None) == is_told


def test_a_kernel_that_does_other_work_elsewhere_in_the_step_is_not_slowed() -> None:
    """Of nine matrix products of one name and shape the first, of 42 us, is alone, and the others, of 7 us, never."""
    position, steps = np.tile(np.arange(9), 6), np.repeat(np.arange(6), 9)
    duration = np.where(position == 0, 42_000, 7_000)
    always = KernelRuns(KEYS, 0 * position, duration, np.where(position == 0, 0, duration), steps, 6)
    (gemm,) = measure_kernels([always])
    assert (gemm.beside, gemm.alone, gemm.slowdown) == (48, 6, None)
    assert "different positions of the step" in str(gemm.reason)
    unmarked = replace(always, step=constant_column(UNKNOWN, len(steps)), steps=0)
    assert "no whole step is marked" in str(measure_kernels([unmarked])[0].reason)
    # In every second step the third one is alone, too: only that one tells, 7 us and 10.
    now_and_then = (position == 2) & (steps % 2 == 0)
    longer = np.where((position == 2) & (steps % 2 == 1), 10_000, duration)
    beside = np.where((position == 0) | now_and_then, 0, longer)
    (gemm,) = measure_kernels([KernelRuns(KEYS, 0 * position, longer, beside, steps, 6)] * 2)
    assert gemm.slowdown == pytest.approx(10 / 7)


def kernels_of(tmp_path, capture: Capture) -> list[KernelTime]:
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture), ReadOptions(with_launches=True))
    (rank,) = find_rank_events(trace)
    return list(measure_kernels([find_kernel_runs(rank)]))


def test_a_kernel_is_one_name_one_shape_one_phase(tmp_path) -> None:
    """Five gemms of 100 ns alone in forward, five of 150 ns beside communication, in turns of steps; one of another
    shape in backward."""
    capture = Capture()
    for step in range(10):
        at = 1_000 * step
        capture.ranges += [Range(f"step_{step}", at, at + 999, 1), Range("forward", at + 1, at + 600, 1)]
        capture.ranges.append(Range("backward", at + 600, at + 990, 1))
        if step % 2:
            comm = Kernel("ncclDevKernel_AllReduce", at + 291, at + 459, launch=at + 200, thread=1, stream=9)
            capture.kernels += [Kernel("gemm", at + 300, at + 450, launch=at + 100, thread=1), comm]
        else:
            capture.kernels.append(Kernel("gemm", at + 300, at + 400, launch=at + 100, thread=1))
    capture.kernels.append(Kernel("gemm", 9_700, 9_900, launch=9_650, thread=1, grid=7))
    gemm, comm, other = kernels_of(tmp_path, capture)
    assert (gemm.phase, gemm.kind, gemm.count, gemm.beside, gemm.alone) == ("forward", "matrix product", 10, 5, 5)
    assert gemm.slowdown == pytest.approx(1.5)
    assert (other.phase, other.count, other.slowdown) == ("backward", 1, None)
    assert other.shape != gemm.shape
    assert (comm.kind, comm.slowdown, comm.reason) == ("communication", None, "it communicates itself")
    assert (comm.beside, comm.alone, comm.beside_ns, comm.alone_ns) == (None,) * 4, "it is not beside itself"


def test_without_kernels_there_is_nothing() -> None:
    assert measure_kernels([]) == ()
