"""Ordinary training loops under each variant equal one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from ddp_prof.ddp import VARIANTS
from tests.ddp import loops
from tests.ddp.cases import assert_equal
from tests.ddp.gloo_ranks import run_ranks
from tests.examples import IS_NIGHTLY
from tests.pairs import one_of_each

WORLDS = (2, 4)
KEYS = (*VARIANTS, "divided")
MOST_CODE = ("bucketed", "sharded")
IMPOSSIBLE = [
    ("groups", "sharded"),
    ("kept copies", "fsdp"),
    ("gradient penalty", "fsdp"),  # torch has freed the parameters of the first forward
    *[
        (name, "torch")
        for name in ("unused head", "unused head, momentum", "seldom used head", "seldom used head, zeroed")
    ],  # without its option
    ("a head before and under no_sync", "torch"),
    ("buffers of all types", "torch"),
    ("there and back, forward within no_sync", "torch"),  # asks at forward whether to reduce
    ("sharpness", "sharded"),  # the program reads gradients, which sharded does not give to parameters
    *[
        (name, "torch") for name in ("only adapters wrapped", "wrapper bypassed", "learning to learn")
    ],  # needs its forward
    ("gradients set by the program", "torch"),  # reduces only what a hook brings
    ("wrapped teacher", "torch"),
    *[(f"a rank without boxes{more}", "torch") for more in ("", " in two batches")],  # without find_unused_parameters
    *[(name, "fsdp") for name in ("sharpness", "only adapters wrapped", "learning to learn", "masked gradient")],
    *[(name, "fsdp") for name in ("gradients set by the program", "a rank without boxes")],
    ("a weight without a gradient now and then", "torch"),  # without find_unused_parameters
    *[(name, "fsdp") for name in ("a weight without a gradient now and then", "the same under no_sync")],
    *[(name, "fsdp") for name in ("a rank without boxes in two batches", "zeroed after no_sync")],
    # DDP's and FSDP2's own limits: what backward brings is reduced, of parameters that stay where they were.
    *[(name, "torch") for name in ("gradients set again", "tied later", "called with other tensors")],
    *[(name, "torch") for name in ("parametrized later", "pruned later")],
    *[(name, "fsdp") for name in ("gradients set again", "tied later", "called with other tensors")],
    *[(name, "fsdp") for name in ("parametrized later", "pruned later", "empty parameters")],
    *[(name, "fsdp") for name in ("weights replaced before a step", "TorchScript")],
    ("average in the place of weights", "fsdp"),  # the last unit keeps what its forward has gathered
]
Run = tuple[int, str, str]


def wrap_in(key: str) -> Any:
    """The variant, or the one with a ShardedOptimizer."""
    if key == "divided":
        return lambda module: loops.Divided(VARIANTS["overlap"](module))
    options = {"bucket_size_mb": 0.0005} if key in ("bucketed", "sharded") else {}
    return lambda module: loops.Variant(VARIANTS[key](module, **options))


def is_on_four(name: str, key: str) -> bool:
    """Four ranks divide a model in other places than two; where one of them overflows, three others learn of it."""
    return name == "accumulation with an overflow" or (name == "attention" and key in ("sharded", "divided", "fsdp"))


def every_run() -> list[Run]:
    """(world, loop, variant)."""
    return [
        (world, name, key)
        for world in WORLDS
        for name in loops.LOOPS
        for key in KEYS
        if (name, key) not in IMPOSSIBLE and (world == 2 or is_on_four(name, key))
    ]


def runs() -> list[Run]:
    """Each loop under the two variants that have most code, and one of the others in turns; on four ranks under one.

    A nightly runs all. What fsdp does is torch's; of its own it has only the norm of what is clipped.
    """
    if IS_NIGHTLY:
        return every_run()
    most, others = [], []
    for run in every_run():
        if (run[0] == 2 and run[2] in MOST_CODE) or run[1:] == ("clipping of the largest", "fsdp"):
            most.append(run)
        elif run[2] != "fsdp":
            others.append(run)
    return most + one_of_each(others, lambda run: run[:2])


def all_runs(rank: int, world: int) -> dict[Run, loops.Tensors]:
    return {run: loops.run(loops.LOOPS[run[1]], wrap_in(run[2]), [rank]) for run in runs() if run[0] == world}


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[Any]]:
    return {world: run_ranks(partial(all_runs, world=world), world) for world in WORLDS}


@cache
def one_process(world: int, name: str) -> loops.Tensors:
    return loops.run(loops.LOOPS[name], loops.OneProcess, range(world))


@pytest.mark.parametrize(("world", "name", "key"), runs())
def test_equals_one_process(ranks: dict[int, list[Any]], world: int, name: str, key: str) -> None:
    for results in ranks[world]:
        assert_equal(results[world, name, key], one_process(world, name), tolerance=1e-10)
