"""The tables of kernels, of what hid communication, and of idle time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.tables.kernels import NO_KERNELS, kernels_views, short_name
from ddp_prof.runs import load_runs
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("void at::native::unrolled_kernel<at::native::copy(at::Iterator&)::{lambda}>(int)", "unrolled_kernel<copy…"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, T2)",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>",
        ),
        (
            "void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::List<(int)2>>(T1)",
            "multi_tensor_apply_kernel<List<2>>",
        ),
        (
            "void cudnn::ops::nchwToNhwcKernel<__half, float, (bool)0, (cudnnKernelDataType_t)0>(cudnn::ops::x<T3>)",
            "nchwToNhwcKernel<__half, float, 0, 0>",
        ),
        ("void xmma::strided_dgrad_indexed::kernel<xmma::Traits>(T)", "strided_dgrad_indexed::kernel<Traits>"),
        (
            "std::enable_if<((8)>(0))&&a::b<c>::d, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x*)",
            "fused_add_rms_norm_kernel<BFloat16, 8>",
        ),
        ("unsigned long long n::count<a::b<int> >(int)", "count<b<int> >"),
        ("a kernel without parameters", "a kernel without parameters"),
    ],
)
def test_names_are_short(name: str, short: str) -> None:
    assert short_name(name) == short


def views_of(path: Path, top: int | None = None):
    (run,) = load_runs([path])
    return run, kernels_views(run.overlap(), run.device_use(), top)


def test_parts_sum_to_the_figures_of_overlap(tmp_path: Path) -> None:
    run, views = views_of(write_capture(tmp_path / "x.sqlite", known_truth()))
    ranks = run.overlap().ranks
    overlapped, idle = (
        sum(rank.overlapped_ns for rank in ranks),
        sum(step.idle_ns for rank in ranks for step in rank.steps),
    )
    assert sum(row["overlapped_ms"] for row in views["hidden"].rows) == pytest.approx(overlapped / 1e6)
    assert sum(row["idle_ms"] for row in views["idle"].rows) == pytest.approx(idle / 1e6)
    document = views["kernels"].document
    assert sum(part["overlapped_ns"] for rank in document["ranks"] for part in rank["hidden"]) == overlapped
    assert sum(part["idle_ns"] for rank in document["ranks"] for part in rank["idle"]) == idle
    assert sum(row["count"] for row in views["kernels"].rows) == sum(rank.kernels for rank in ranks)


def test_a_collective_is_not_called_beside_communication(tmp_path: Path) -> None:
    _, views = views_of(write_capture(tmp_path / "x.sqlite", known_truth()))
    found = {
        (row["kind"] == "communication", row["beside"] is None, row["alone"] is None) for row in views["kernels"].rows
    }
    assert found == {(True, True, True), (False, False, False)}


def test_a_column_is_explained_only_where_it_holds_a_value(tmp_path: Path) -> None:
    """Pages leave out a column without any value, and explained the slowdown that no kernel had."""
    _, without = views_of(write_capture(tmp_path / "x.sqlite", known_truth()))
    _, with_it = views_of(ROOT / "traces/h200/contention/contention.sqlite")
    for views, begin in ((without, "slowdown beside communication is not known of"), (with_it, "slowdown: duration")):
        rows, notes = views["kernels"].rows, views["kernels"].notes
        assert (any(row["slowdown"] is not None for row in rows), len(notes)) == (views is with_it, 2)
        assert notes[1].startswith(begin)


def test_only_the_first_kernels_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth())
    _, every = views_of(path)
    _, first = views_of(path, top=1)
    rows = every["kernels"].rows
    assert len(rows) > 1
    assert list(first["kernels"].rows) == [rows[0]]
    assert rows[0]["total_ms"] == max(row["total_ms"] for row in rows)
    assert f"{len(rows) - 1} more kernels; all of them: --top 0" in first["kernels"].notes
    assert len(first["kernels"].document["kernels"]) == len(rows)


def test_a_cpu_capture_shows_no_kernels_and_no_zeros() -> None:
    _, views = views_of(ROOT / "traces" / "overlap.sqlite")
    assert (views["kernels"].rows, NO_KERNELS in views["kernels"].notes) == ([], True)
    assert {row["kind"] for row in views["hidden"].rows} == {"host"}
    assert all(row["idle_ms"] for row in views["idle"].rows)
