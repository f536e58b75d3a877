"""Several ranks on one GPU: NCCL's environment, its refusals, and that everything shown of such a run says so."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddp_prof.errors import WorkloadError
from ddp_prof.manifest import Caveat, caveats_of
from ddp_prof.train import process_group as module
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.process_group import (
    RankInfo,
    Seat,
    choose_seat,
    explain_nccl_refusal,
    nccl_environment,
    process_group,
)
from tests.test_manifest import MANIFEST
from tests.train.test_process_group import set_machine

OLD, NEW = (2, 28, 9), (2, 30, 3)


def place(rank: int, world: int = 2) -> RankInfo:
    return RankInfo(rank, world, rank, world)


def test_before_2_30_each_rank_is_a_host_of_its_own() -> None:
    first, second = (nccl_environment(rank, OLD, {}) for rank in (0, 1))
    assert {name for name in first if first[name] != second[name]} == {"NCCL_HOSTID"}
    assert first["NCCL_P2P_DISABLE"] == first["NCCL_SHM_DISABLE"] == "1"
    assert (first["NCCL_NET"], first["NCCL_NET_PLUGIN"]) == ("Socket", "none")
    assert first["NCCL_SOCKET_IFNAME"] == first["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in first


def test_from_2_30_nccl_is_asked_to_allow_it() -> None:
    environment = nccl_environment(1, NEW, {})
    assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert not {"NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET"} & environment.keys()


def test_what_the_user_set_stays() -> None:
    own = {"NCCL_HOSTID": "mine", "NCCL_MAX_CTAS": "8"}
    assert not own.keys() & nccl_environment(0, OLD, own).keys()


def test_several_machines_do_not_talk_through_the_loopback() -> None:
    environment = nccl_environment(3, OLD, {}, one_machine=False)
    assert environment["NCCL_HOSTID"] == "ddp_prof-3"
    assert not {"NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME"} & environment.keys()


@pytest.mark.parametrize(
    "line",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        "Multiple ranks detected using the same GPU on this node. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to allow it",
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ],
)
def test_each_refusal_is_one_line_with_the_way_out(line: str) -> None:
    text = f"NCCL error in: /src/NCCLUtils.cpp:94, NCCL version 2.28.9\nLast error:\n{line}\n"
    said = explain_nccl_refusal(text, OLD)
    assert said is not None
    assert said.startswith(f"NCCL 2.28.9 refuses ranks that share a GPU ({line}")
    assert said.endswith("use --backend gloo --device cuda, or start one rank per GPU")
    assert "\n" not in said


def test_the_reason_is_told_rather_than_the_sign() -> None:
    text = "NCCL error, invalid usage (run with NCCL_DEBUG=WARN)\nLast error:\nDuplicate GPU detected : rank 1"
    assert "(Duplicate GPU detected : rank 1)" in (explain_nccl_refusal(text, OLD) or "")


def test_other_failures_are_not_taken_for_a_refusal() -> None:
    assert (
        explain_nccl_refusal("NCCL error: unhandled system error, NCCL version 2.28.9\nBootstrap : no socket", OLD)
        is None
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one GPU and an NCCL of before 2.30; what it sets is undone."""
    set_machine(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: OLD)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(module.os, "environ", dict(os.environ))
    return monkeypatch


@pytest.mark.parametrize(
    ("gpus", "rank", "world", "argv", "expected"),
    [
        (1, 1, 2, ["--ranks-per-gpu", "2"], ("cuda:0", "nccl", 2)),
        (2, 1, 4, ["--ranks-per-gpu", "2"], ("cuda:0", "nccl", 2)),
        (2, 2, 4, ["--ranks-per-gpu", "2"], ("cuda:1", "nccl", 2)),
        (4, 3, 4, ["--ranks-per-gpu", "1"], ("cuda:3", "nccl", 1)),
        (1, 1, 2, ["--ranks-per-gpu", "2", "--backend", "gloo"], ("cuda:0", "gloo", 2)),
        (1, 1, 3, ["--device", "cuda", "--backend", "gloo"], ("cuda:0", "gloo", 3)),  # shared though not asked for
        (2, 1, 3, ["--device", "cuda", "--backend", "gloo"], ("cuda:1", "gloo", 2)),
        (1, 0, 1, [], ("cuda:0", "nccl", 1)),
        (1, 0, 1, ["--ranks-per-gpu", "2"], ("cuda:0", "nccl", 1)),
        (1, 1, 2, ["--device", "cpu"], ("cpu", "gloo", 1)),
    ],
)
def test_seats(
    gpu: pytest.MonkeyPatch, gpus: int, rank: int, world: int, argv: list[str], expected: tuple[str, str, int]
) -> None:
    set_machine(gpu, gpus)
    arguments = parse_arguments(["--variant", "flat", *argv])
    device, backend, sharing = choose_seat(arguments, place(rank, world))
    assert (str(device), backend, sharing) == expected


@pytest.mark.parametrize(
    ("gpus", "world", "argv", "message"),
    [
        (1, 3, ["--ranks-per-gpu", "2", "--device", "cuda"], "2 seats 2 ranks on 1 GPUs, but there are 3: use"),
        (1, 3, ["--ranks-per-gpu", "2", "--backend", "nccl"], "take turns with --ranks-per-gpu"),
        (0, 2, ["--ranks-per-gpu", "2"], "--ranks-per-gpu 2, but torch finds no GPU for 2 ranks: leave it out"),
        (1, 2, ["--backend", "nccl"], "or let them take turns with --ranks-per-gpu"),
    ],
)
def test_too_few_seats_are_refused(
    gpu: pytest.MonkeyPatch, gpus: int, world: int, argv: list[str], message: str
) -> None:
    set_machine(gpu, gpus)
    with pytest.raises(WorkloadError, match=message):
        choose_seat(parse_arguments(["--variant", "flat", *argv]), place(1, world))


def refuse(*_: object, **__: object) -> None:
    raise dist.DistBackendError("NCCL error\nLast error:\nDuplicate GPU detected : rank 1 and rank 0")


def test_nccl_finds_its_environment_and_a_refusal_is_plain(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(dist, "init_process_group", refuse)
    shared = process_group(place(1), Seat(torch.device("cuda", 0), "nccl", 2), 1)
    with pytest.raises(WorkloadError, match=r"rank 1: NCCL 2\.28\.9 refuses ranks that share a GPU"), shared:
        pass
    assert module.os.environ["NCCL_HOSTID"] == "ddp_prof-1"


def test_gpus_of_their_own_leave_nccl_alone(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(dist, "init_process_group", refuse)
    alone = process_group(place(1), Seat(torch.device("cuda", 0), "nccl"), 1)
    with pytest.raises(WorkloadError, match="cannot form a process group with nccl: NCCL error"), alone:
        pass
    assert "NCCL_HOSTID" not in module.os.environ


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is set for the whole cluster: gloo said where in its sources it had failed."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    expected = "gloo: GLOO_SOCKET_IFNAME=eth9 is no network interface with an address here: choose another, or unset it"
    cpu = process_group(RankInfo(), Seat(torch.device("cpu"), "gloo"), 1)
    with pytest.raises(WorkloadError, match=expected), cpu:
        pass


def test_a_loopback_interface_that_is_down_is_brought_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice was to unset a variable, which only our launcher had set."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=RuntimeError("Unable to find address for: lo")))
    cpu = process_group(RankInfo(), Seat(torch.device("cpu"), "gloo"), 1)
    with pytest.raises(WorkloadError, match="lo has no address here: 'ip link set lo up' brings it up"), cpu:
        pass


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"options": {"ranks_per_gpu": 2}}, (Caveat.SHARED_GPU.value,)),
        ({"options": {"ranks_per_gpu": 1}}, ()),
        ({"options": {"ranks_per_gpu": "two"}}, ()),
        ({"world_size": 1, "backend": "nccl"}, ("one rank: it has no peer",)),
    ],
)
def test_caveats(changes: dict[str, object], expected: tuple[str, ...]) -> None:
    found = caveats_of(replace(MANIFEST, **changes))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))
