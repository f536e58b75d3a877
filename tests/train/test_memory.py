"""What the ranks may have: the machine's memory, limits of control groups, ``ulimit -v``."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_prof.ddp import VARIANTS
from ddp_prof.errors import OutOfMemoryError
from ddp_prof.train import process_group as module
from ddp_prof.train.process_group import check_memory, find_limits
from ddp_prof.train.record import count_state, peak_resident_bytes
from tests.ddp.gloo_ranks import run_ranks

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB with control groups as a test writes them."""
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(module.os, "sysconf", lambda name: 2**12 if name == "SC_PAGE_SIZE" else 2**24)
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
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
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (10 * GIB, resource.RLIM_INFINITY))
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
