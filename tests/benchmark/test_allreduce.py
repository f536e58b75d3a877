"""The all-reduce measured alone: what the ranks time, and what follows from it."""

from __future__ import annotations

import json

import pytest

from ddp_prof.benchmark.allreduce import main, make_parser, message_bytes, summarize_times, time_calls, timings_view
from ddp_prof.benchmark.findings import MessageCost
from ddp_prof.train import MODEL_SIZES

GB_PER_S = 2.0  # bytes a nanosecond
OVERHEAD_NS = 100_000
GRADIENTS = MODEL_SIZES["mini"].gradient_bytes()
SIZES = (1_000, 100_000, 10_000_000)


def rows(sizes: tuple[int, ...] = SIZES) -> list[MessageCost]:
    """Exact times of a link with OVERHEAD_NS and GB_PER_S, each call a little off."""
    return [
        summarize_times(
            size,
            [round((OVERHEAD_NS + size / GB_PER_S) * (1 + 0.01 * off)) for off in (-2, -1, 0, 0, 0, 1, 2)],
        )
        for size in sizes
    ]


def test_bandwidths_follow_from_the_latency() -> None:
    row = timings_view(rows(), 4, "", "mini").rows[2]
    assert row["latency_ms"] == pytest.approx(5.1)
    assert row["algbw_median_GB/s"] == pytest.approx(10_000_000 / 5.1e6)
    assert row["busbw_median_GB/s"] == pytest.approx(1.5 * 10_000_000 / 5.1e6), "2 (n - 1) / n of four ranks"
    assert row["low_ms"] < row["latency_ms"] < row["high_ms"]
    assert row["algbw_low_GB/s"] == pytest.approx(10_000_000 / (row["high_ms"] * 1e6), rel=1e-6)


def test_the_fitted_model_gives_the_best_bucket() -> None:
    document = timings_view(rows(), 4, "", "mini").document
    assert document["link"]["overhead_ns"] == pytest.approx(OVERHEAD_NS, rel=1e-3)
    assert document["link"]["bytes_per_ns"] == pytest.approx(GB_PER_S, rel=1e-3)
    assert document["best_bucket_bytes"] == pytest.approx((GRADIENTS * OVERHEAD_NS * GB_PER_S) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "note"),
    [
        ((1_000, 10_000_000), None),
        ((1_000_000, 10_000_000), "the overhead of a call is extrapolated"),
        ((1_000, 100_000), "the bandwidth is extrapolated"),
        ((1_000,), "no cost model: messages of fewer than two sizes were timed"),
    ],
)
def test_sizes_that_do_not_span_the_range_of_the_fit_are_said(sizes: tuple[int, ...], note: str | None) -> None:
    notes = timings_view(rows(sizes), 4, "", "mini").notes
    found = [line for line in notes if "extrapolated" in line or "no cost model" in line]
    assert [line.startswith(str(note)) for line in found] == ([True] if note else [])


def test_sizes_are_whole_elements_and_each_once() -> None:
    assert message_bytes([1.0, 0.000001, 0.001, 1.0]) == [4, 1048, 2**20]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes-mb", "0"], "must be positive"),
        (["--sizes-mb", "1", "big"], "big"),
        (["--world-size", "1"], "must be at least 2"),
        (["--backend", "mpi"], "invalid choice"),
    ],
)
def test_mistakes_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.torch
def test_ranks_are_started_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sizes-mb", "0.001", "0.1", "--world-size", "2", "3", "--calls", "6", "--warmup", "1"]
    assert main([*sizes, "--backend", "gloo", "--device", "cpu", "--format", "json"]) == 0
    worlds = json.loads(capsys.readouterr().out)["all_reduces"]
    assert [world["world_size"] for world in worlds] == [2, 3]
    for world in worlds:
        assert [message["bytes"] for message in world["messages"]] == [1048, 104856]
        for message in world["messages"]:
            assert 0 < message["low_ns"] <= message["median_ns"] <= message["high_ns"]
            factor = 2 * (world["world_size"] - 1) / world["world_size"]
            assert message["busbw_median_bytes_per_s"] == pytest.approx(factor * message["algbw_median_bytes_per_s"])


@pytest.mark.torch
def test_of_each_call_the_longest_time_of_the_ranks_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are no zeros, and the same in each call; what a call takes on this rank is told by a stand-in."""
    import torch

    times = {"min": [[1, 5]], "max": [[9, 7]]}  # of both ranks, by what the all-reduce of the times takes
    seen: list[torch.Tensor] = []
    asked: list[str] = []

    def all_reduce(tensor: torch.Tensor, op: object = None) -> None:
        if tensor.dtype == torch.int64:
            asked.append("min" if op == torch.distributed.ReduceOp.MIN else "max")
            tensor.copy_(torch.tensor(times[asked[-1]]))
        else:
            seen.append(tensor.clone())
            tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for over_ranks in ("min", "max"):
        measured = time_calls([4, 40], 1, 1, torch.device("cpu"), over_ranks)
        assert measured == {4: [times[over_ranks][0][0]], 40: [times[over_ranks][0][1]]}
    assert asked == ["min", "max"]
    assert all((tensor > 0).all() for tensor in seen)
    for tensor in seen:
        assert torch.equal(tensor, seen[0][: len(tensor)])


def test_the_statistic_is_named_beside_that_of_nccl_tests() -> None:
    (note, *_) = timings_view(rows(), 4, "", "mini", "max").notes
    assert "of the longest time of a call over the ranks (nccl-tests: the mean of calls one behind the other" in note


@pytest.mark.torch
def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--backend", "nccl", "--device", "cpu"]) == 1
    said, complaint = capfd.readouterr()
    assert (said, complaint.count("\n")) == ("", 1)
    assert complaint.startswith("ddp_prof.benchmark.allreduce: error: ")
