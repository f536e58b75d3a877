"""Device, backend and memory of a rank: what is chosen, and what is refused in one clear line."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_prof.ddp import VARIANTS
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.train import process_group, run
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.process_group import RankInfo, check_memory, choose_seat, find_limits, find_place
from ddp_prof.train.record import count_state, peak_resident_bytes
from tests.ddp.gloo_ranks import run_ranks

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
        (0, ["--device", "cuda"], r"finds no GPU here: .* or use --device cpu \(DEVICE=cpu\)"),
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


GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB with control groups as a test writes them."""
    monkeypatch.setattr(process_group, "CGROUPS", tmp_path)
    monkeypatch.setattr(process_group, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(process_group.os, "sysconf", lambda name: 2**12 if name == "SC_PAGE_SIZE" else 2**24)
    monkeypatch.setattr(process_group.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def limit(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limits(ranks: int = 2) -> list[tuple[int, int]]:
    return [(limit.bytes // GIB, limit.ranks) for limit in find_limits(ranks)]


def test_without_limits_there_is_the_machine(groups: Path) -> None:
    assert limits() == [(64, 2)]


def test_control_groups_of_version_2_with_those_around_them(groups: Path) -> None:
    limit(groups / "membership", "0::/user/job")
    limit(groups / "user" / "job" / "memory.max", "max")
    limit(groups / "user" / "memory.max", 8 * GIB)
    limit(groups / "memory.max", 16 * GIB)  # a container sees its own as the root
    limit(groups / "other" / "memory.max", GIB)
    assert limits() == [(64, 2), (8, 2), (16, 2)]


def test_control_groups_of_version_1(groups: Path) -> None:
    limit(groups / "membership", "9:name=systemd:/x\n4:cpu,memory:/job\n0::/")
    limit(groups / "memory" / "job" / "memory.limit_in_bytes", 4 * GIB)
    assert limits() == [(64, 2), (4, 2)]


def test_ulimit_is_of_a_process(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group.resource, "getrlimit", lambda _: (10 * GIB, resource.RLIM_INFINITY))
    assert limits(4) == [(64, 4), (10, 1)]
    check_memory("medium", 4)  # 7.9 GiB each
    with pytest.raises(
        OutOfMemoryError, match=r"^out of memory: --model-size large needs 18\.1 GiB per rank, ulimit -v "
    ):
        check_memory("large", 2)


def test_who_lacks_memory_is_named(groups: Path) -> None:
    limit(groups / "memory.max", 12 * GIB)
    limit(groups / "membership", "0::/")
    check_memory("medium", 1)
    with pytest.raises(
        OutOfMemoryError, match=r"2 ranks of --model-size medium need 15\.8 GiB, this control group has 12"
    ):
        check_memory("medium", 2)


def test_resident_bytes_count_what_was_touched() -> None:
    before = peak_resident_bytes()
    touched = bytearray(b"1") * (before + 2**26)  # more than ever was
    assert peak_resident_bytes() >= before + 2**26
    assert touched


FLOATS = 12 * 32


def keep_state(rank: int) -> dict[str, dict[str, int]]:
    """After a step of AdamW on 384 floats, and its counter."""
    kept = {}
    options: dict[str, dict[str, Any]] = {"bucketed": {"bucket_size_mb": 1.0}}
    for key in ("naive", *options, "sharded", "fsdp"):
        variant = VARIANTS[key](torch.nn.Linear(32, 12, bias=False), **options.get(key, {}))
        optimizer = torch.optim.AdamW(variant.optimizer_parameters())
        variant(torch.randn(3, 32)).sum().backward()
        variant.finish_gradient_synchronization()
        optimizer.step()
        kept[key] = count_state(variant, optimizer)
    return kept


def test_state_is_counted_whole_where_it_is_whole_and_in_part_where_it_is_divided() -> None:
    whole, part, counter = 4 * FLOATS, 2 * FLOATS, 4
    for kept in run_ranks(keep_state):
        assert kept == {
            "naive": {"parameters": whole, "gradients": whole, "optimizer": 2 * whole + counter},
            "bucketed": {"parameters": whole, "gradients": whole, "optimizer": 2 * whole + counter},
            "sharded": {"parameters": whole, "gradients": part, "optimizer": 2 * part + counter},
            "fsdp": {"parameters": part, "gradients": part, "optimizer": 2 * part + counter},
        }
