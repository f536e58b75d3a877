"""Each variant equals one process on the whole batch: the definition of data-parallel training."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from ddp_prof.ddp import VARIANTS
from tests.ddp import cases
from tests.ddp.gloo_ranks import run_ranks
from tests.examples import IS_NIGHTLY
from tests.pairs import one_of_each

WORLDS = (2, 4)
MOST_CODE = ("bucketed", "sharded")
EXACT = 1e-12
Run = tuple[int, str, str, str]


def runs() -> list[Run]:
    """(world, case, setting, optimizer).

    Each case runs under the two variants that have most code, and under one of the others in turns, as settings and
    optimizers come in turns. On four ranks each setting trains one case. Where data types are mixed, each setting has
    all optimizers: by what is tolerated there, AdamW does not feel a factor in the gradients. A nightly runs all.
    """
    of_two, of_four = ([(world, *run) for run in cases.possible()] for world in WORLDS)
    if IS_NIGHTLY:
        return of_two + of_four
    most = one_of_each([run for run in of_two if variant_of(run) in MOST_CODE], lambda run: (run[1], variant_of(run)))
    others = one_of_each([run for run in of_two if variant_of(run) not in MOST_CODE], lambda run: run[1])
    mixed = [run for run in of_two if tolerance(run[1]) > EXACT and run not in most + others]
    return most + others + mixed + one_of_each(of_four, lambda run: run[2])


def variant_of(run: Run) -> str:
    return cases.SETTINGS[run[2]][0]


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
        cases.assert_equal(results[world, case, setting, optimizer], expected, tolerance(case))


@pytest.mark.parametrize("case", list(cases.CASES))
def test_training_moved_the_parameters(case: str) -> None:
    before = cases.build(cases.CASES[case], seed=0).state_dict()
    after = one_process(case, "sgd")
    assert sum(not torch.equal(before[name], after[name]) for name in after) >= 2


@pytest.mark.parametrize("key", list(VARIANTS))
def test_every_variant_is_covered(key: str) -> None:
    assert key in {variant for variant, _ in cases.SETTINGS.values()}


def test_what_a_run_is_made_of_is_tried_in_twos() -> None:
    found = runs()
    every = {case for case, *_ in cases.possible()}
    for variant in MOST_CODE:
        assert {run[1] for run in found if variant_of(run) == variant} == every
    assert {run[3] for run in found} == {*cases.OPTIMIZERS}
    assert {(world, setting) for world, _, setting, _ in found} == {*product(WORLDS, cases.SETTINGS)}
    assert min(Counter(map(variant_of, found)).values()) > 4
