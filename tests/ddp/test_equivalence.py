"""Each variant equals one process on the whole batch: the definition of data-parallel training."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from ddp_prof.ddp import VARIANTS
from tests.ddp import cases
from tests.ddp.gloo_ranks import run_ranks

WORLDS = (2, 4)
EXACT = 1e-12
Run = tuple[int, str, str, str]


def runs() -> list[Run]:
    """(world, case, setting, optimizer): on two ranks all cases with all settings, on four a part of these."""
    return [(world, *run) for world in WORLDS for run in cases.possible() if is_run(world, *run)]


def is_run(world: int, case: str, setting: str, optimizer: str) -> bool:
    """On two ranks the optimizers of a case in turns, on four the last one, which asks the most.

    On four are all cases with what divides by the number of ranks, and one in seven of the others, whose last optimizer
    is on two as well. Where data types are mixed, all optimizers are on two: by what is tolerated there, AdamW does not
    feel a factor in the gradients.
    """
    turn = list(cases.CASES).index(case) + list(cases.SETTINGS).index(setting)
    optimizers = cases.CASES[case].optimizers
    is_on_four = cases.SETTINGS[setting][0] in ("sharded", "fsdp") or turn % 7 == 0
    if world == 4:
        return is_on_four and optimizer == optimizers[-1]
    in_turn = optimizer == optimizers[turn % len(optimizers)]
    return in_turn or tolerance(case) > EXACT or (not is_on_four and optimizer == optimizers[-1])


def all_runs(rank: int, world: int) -> dict[Run, Any]:
    """Every run on this rank of as many. Ranks start from different weights: rank 0's must win."""
    results = {}
    for key in runs():
        if key[0] == world:
            case = cases.CASES[key[1]]
            variant = cases.make_variant(case, key[2], cases.build(case, seed=rank))
            results[key] = cases.train(case, variant, key[3], rank, world)
    return results


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[Any]]:
    return {world: run_ranks(partial(all_runs, world=world), world) for world in WORLDS}


@cache
def one_process(case: str, optimizer: str) -> cases.Tensors:
    what = cases.CASES[case]
    return cases.train(what, cases.OneProcess(cases.build(what, seed=0)), optimizer)


def tolerance(case: str) -> float:
    return 1e-5 if case == "mixed-dtypes" else EXACT


@pytest.mark.parametrize(("world", "case", "setting", "optimizer"), runs())
def test_equals_one_process(ranks: dict[int, list[Any]], world: int, case: str, setting: str, optimizer: str) -> None:
    expected = one_process(case, optimizer)
    for results in ranks[world]:
        got = results[world, case, setting, optimizer]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=tolerance(case), atol=tolerance(case), msg=name)


@pytest.mark.parametrize("case", list(cases.CASES))
def test_training_moved_the_parameters(case: str) -> None:
    before = cases.build(cases.CASES[case], seed=0).state_dict()
    after = one_process(case, "sgd")
    assert sum(not torch.equal(before[name], after[name]) for name in after) >= 2


@pytest.mark.parametrize("key", list(VARIANTS))
def test_every_variant_is_covered(key: str) -> None:
    assert key in {variant for variant, _ in cases.SETTINGS.values()}


@pytest.mark.parametrize("world", WORLDS)
def test_every_case_and_every_setting_is_run(world: int) -> None:
    on_these = [run for run in runs() if run[0] == world]
    assert {case for _, case, _, _ in on_these} == set(cases.CASES)
    assert {setting for _, _, setting, _ in on_these} == set(cases.SETTINGS)


def test_no_pair_and_no_optimizer_is_left_out() -> None:
    possible, on_any = cases.possible(), {run[1:] for run in runs()}
    pairs = {(case, setting) for case, setting, _ in possible}
    assert {run[1:3] for run in runs() if run[0] == 2} == pairs
    assert {(case, setting, cases.CASES[case].optimizers[-1]) for case, setting in pairs} <= on_any
    for which in (0, 1):  # cases, settings
        assert {(run[which], run[2]) for run in on_any} == {(run[which], run[2]) for run in possible}
