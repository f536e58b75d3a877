"""Each variant equals one process on the whole batch: the definition of data-parallel training."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from ddp_prof.ddp import VARIANTS
from tests.ddp import cases
from tests.ddp.gloo_ranks import run_ranks


def all_runs(rank: int) -> dict[tuple[str, str, str], Any]:
    """Every possible run on this rank. Ranks start from different weights: rank 0's must win."""
    results = {}
    for key in cases.possible():
        case = cases.CASES[key[0]]
        variant = cases.make_variant(case, key[1], cases.build(case, seed=rank))
        results[key] = cases.train(case, variant, key[2], rank, 2)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(all_runs)


@cache
def one_process(case: str, optimizer: str) -> cases.Tensors:
    what = cases.CASES[case]
    return cases.train(what, cases.OneProcess(cases.build(what, seed=0)), optimizer)


def comparable() -> list[tuple[str, str, str]]:
    """Runs of our variants that torch's DDP can do too."""
    return [item for item in cases.possible() if item[1] != "torch" and cases.CASES[item[0]].torch_options is not None]


def tolerance(case: str) -> float:
    return 1e-5 if case == "mixed-dtypes" else 1e-12


@pytest.mark.parametrize(("case", "setting", "optimizer"), cases.possible())
def test_equals_one_process(ranks: list[Any], case: str, setting: str, optimizer: str) -> None:
    expected = one_process(case, optimizer)
    for results in ranks:
        got = results[case, setting, optimizer]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=tolerance(case), atol=tolerance(case), msg=name)


@pytest.mark.parametrize("case", list(cases.CASES))
def test_training_moved_the_parameters(case: str) -> None:
    before = cases.build(cases.CASES[case], seed=0).state_dict()
    after = one_process(case, "sgd")
    assert sum(not torch.equal(before[name], after[name]) for name in after) >= 2


@pytest.mark.parametrize(("case", "setting", "optimizer"), comparable())
def test_equals_torch(ranks: list[Any], case: str, setting: str, optimizer: str) -> None:
    reference = ranks[0][case, "torch", optimizer]
    for name, value in ranks[0][case, setting, optimizer].items():
        torch.testing.assert_close(value, reference[name], rtol=tolerance(case), atol=tolerance(case))


@pytest.mark.parametrize("key", list(VARIANTS))
def test_every_variant_is_covered(key: str) -> None:
    assert key in {variant for variant, _ in cases.SETTINGS.values()}
