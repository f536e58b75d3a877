"""Device and backend of a rank: what is chosen, and what is refused in one clear line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_prof.errors import WorkloadError
from ddp_prof.train import process_group, run
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.process_group import RankInfo, choose_seat, find_place

TWO = RankInfo(1, 2, 1, 2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of which a test says what is there: no GPUs, gloo and NCCL, to begin with."""
    set_machine(monkeypatch, 0)
    return monkeypatch


def set_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, *, nccl: bool = True, gloo: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: gloo)


def choose(*argv: str) -> tuple[str, str]:
    seat = choose_seat(parse_arguments(["--variant", "flat", *argv]), TWO)
    return str(seat.device), seat.backend


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        (0, [], ("cpu", "gloo")),
        (1, [], ("cpu", "gloo")),  # not each rank has a GPU of its own
        (2, [], ("cuda:1", "nccl")),
        (8, [], ("cuda:1", "nccl")),
        (2, ["--device", "cpu"], ("cpu", "gloo")),
        (2, ["--backend", "gloo"], ("cuda:1", "gloo")),
        (1, ["--device", "cuda"], ("cuda:0", "gloo")),  # shared by the ranks
        (2, ["--device", "cuda", "--backend", "nccl"], ("cuda:1", "nccl")),
    ],
)
def test_choice(machine: pytest.MonkeyPatch, gpus: int, argv: list[str], expected: tuple[str, str]) -> None:
    set_machine(machine, gpus)
    assert choose(*argv) == expected


@pytest.mark.parametrize(
    ("gpus", "argv", "message"),
    [
        (0, ["--device", "cuda"], "finds no GPU here"),
        (0, ["--backend", "nccl"], "finds no GPU here"),
        (1, ["--backend", "nccl"], "here are 1 GPUs for 2 ranks"),
        (2, ["--backend", "nccl", "--device", "cpu"], "NCCL reduces on GPUs only"),
    ],
)
def test_refusal(machine: pytest.MonkeyPatch, gpus: int, argv: list[str], message: str) -> None:
    set_machine(machine, gpus)
    with pytest.raises(WorkloadError, match=message):
        choose(*argv)


def test_a_missing_backend_is_named(machine: pytest.MonkeyPatch) -> None:
    set_machine(machine, 2, nccl=False)
    with pytest.raises(WorkloadError, match="built without NCCL: use --backend gloo"):
        choose("--backend", "nccl")
    assert choose() == ("cuda:1", "gloo")
    set_machine(machine, 0, gloo=False)
    with pytest.raises(WorkloadError, match="built without gloo"):
        choose()


def test_place() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_place(torchrun) == RankInfo(5, 8, 1, 4)
    assert find_place({}) == RankInfo(0, 1, 0, 1)


@pytest.mark.parametrize("told", [{"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": ""}])
def test_a_place_that_is_no_number_is_refused(told: dict[str, str]) -> None:
    with pytest.raises(WorkloadError, match=r"a launcher must set RANK, WORLD_SIZE, .* to whole numbers"):
        find_place(told)


@pytest.mark.parametrize("port", ["x", "", "0", "65536", "99999999", "-1", "1e3"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: str) -> None:
    monkeypatch.setenv("DDP_PROF_LAUNCH_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(WorkloadError, match=f"MASTER_PORT={port}: not a port from 1 to 65535"):
        process_group._make_store(RankInfo(0, 2, 0, 2), timedelta(seconds=1))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "3"], "a batch of 3 cannot be split evenly over 2 ranks: use --batch-size 4"),
        (["--batch-size", "1"], "use --batch-size 2"),
        (["--world-size", "4"], "--world-size 4, but torchrun started 2 ranks"),
        (["--model-size", "2.7B"], "out of memory: 2 ranks of --model-size 2.7B need 127 GiB, this machine has 8"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(
    machine: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    machine.setattr(process_group, "find_limits", lambda ranks: [process_group.Limit("this machine has", 2**33, ranks)])
    with pytest.raises(WorkloadError, match=message):
        run.check(parse_arguments(["--variant", "flat", *argv]), TWO)
