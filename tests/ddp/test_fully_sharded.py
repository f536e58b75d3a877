"""Fsdp: its collectives are marked and told apart by phase; what it cannot do is one clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddp_prof import annotate
from ddp_prof.annotate import Recorder
from ddp_prof.ddp import FullyShardedDDP
from ddp_prof.errors import CommunicationError
from ddp_prof.range_names import COLLECTIVES, SYNCHRONIZE, parse_range
from tests.ddp.cases import Blocks

BLOCKS = 3


def phases(rank: int) -> dict[str, Any]:
    """Collectives by phase, in the order of their launches: (name, bucket)."""
    variant = FullyShardedDDP(Blocks())
    launched, blocked = {}, {}
    for phase in ("forward", "backward"):
        recorder = Recorder()
        with annotate.only_sink(recorder):
            if phase == "forward":
                loss = variant(torch.randn(4, 6), torch.zeros(4)).sum()
            else:
                loss.backward()
        ranges = sorted(recorder.ranges, key=lambda taken: taken.start_ns)
        parsed = [parse_range(taken.text) for taken in ranges]
        launched[phase] = [(each.name, each.number("bucket")) for each in parsed if each.name in COLLECTIVES]
        blocked[phase] = sum(each.name == SYNCHRONIZE for each in parsed)
    sizes = {parse_range(taken.text).number("bytes") for taken in recorder.ranges if "bucket=0" in taken.text}
    return {"launched": launched, "blocked": blocked, "block bytes": sizes, "seconds": variant.communication_seconds}


def refused(rank: int) -> list[str]:
    messages = []
    variant = FullyShardedDDP(nn.Linear(4, 4))
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.randn(4, 4).t())
    for action in (
        lambda: FullyShardedDDP(nn.Linear(2, 2), find_unused_parameters=True),
        lambda: FullyShardedDDP(strided),
        lambda: copy.deepcopy(variant),
        variant.remove,
    ):
        with pytest.raises(CommunicationError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def everything(rank: int) -> dict[str, Any]:
    return {"phases": phases(rank), "refused": refused(rank)}


def test_forward_gathers_each_unit_and_backward_gathers_and_reduces_it(results: list[dict[str, Any]]) -> None:
    launched = results[0]["phases"]["launched"]
    units = list(range(BLOCKS + 1))
    assert sorted(launched["forward"]) == [("all_gather", unit) for unit in units]
    reduced = [unit for name, unit in launched["backward"] if name == "reduce_scatter"]
    gathered = [unit for name, unit in launched["backward"] if name == "all_gather"]
    assert reduced == [2, 1, 0, 3]  # the last unit is what is in no block: its stem's gradient comes last
    assert set(gathered) <= set(units)
    assert {0, 1, 2} <= set(gathered)


def test_bytes_are_of_the_whole_unit(results: list[dict[str, Any]]) -> None:
    assert results[0]["phases"]["block bytes"] == {(6 * 6 + 6) * 4}


def test_the_wait_for_gradients_is_not_known(results: list[dict[str, Any]]) -> None:
    assert results[0]["phases"]["seconds"] != results[0]["phases"]["seconds"]


def test_what_fully_shard_cannot_do_is_refused(results: list[dict[str, Any]]) -> None:
    unused, strided, copied, removed = results[0]["refused"]
    assert "find_unused_parameters" in unused
    assert strided.startswith("fully_shard cannot take this model: ")
    assert "state_dict()" in copied
    assert "build the model again" in removed


def test_on_a_cpu_the_host_is_seen_to_wait_for_each_collective(results: list[dict[str, Any]]) -> None:
    taken = results[0]["phases"]
    assert taken["blocked"] == {phase: len(launched) for phase, launched in taken["launched"].items()}
