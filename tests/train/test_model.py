"""The model: its sizes, and that it is what it is said to be."""

from __future__ import annotations

import pytest
import torch

from ddp_prof.train.data import make_tokens
from ddp_prof.train.model import TransformerLM, rotary_angles, rotate
from ddp_prof.train.sizes import MODEL_SIZES, VOCABULARY

PARAMETERS = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
    "xl-2026": 3_406_809_600,
    "10B-2026": 12_832_823_808,
}


@pytest.mark.parametrize("name", list(MODEL_SIZES))
def test_number_of_parameters(name: str) -> None:
    size = MODEL_SIZES[name]
    with torch.device("meta"):
        model = TransformerLM(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == size.parameters == PARAMETERS.get(name, count)
    assert len(list(model.parameters())) == 9 * size.layers + 3
    assert size.d_model % (2 * size.heads) == 0


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(MODEL_SIZES["tiny"])


def test_logits_for_each_position(model: TransformerLM) -> None:
    assert model(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, VOCABULARY)


def test_a_token_sees_nothing_after_it(model: TransformerLM) -> None:
    tokens = torch.randint(VOCABULARY, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotary_positions_are_relative() -> None:
    query, key = torch.randn(2, 8)
    cosine, sine = rotary_angles(10, 8, torch.device("cpu"))
    products = [rotate(query, cosine, sine)[i] @ rotate(key, cosine, sine)[i - 2] for i in range(2, 10)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(8))
    torch.testing.assert_close(rotate(query, cosine, sine).norm(dim=-1), query.norm().expand(10))


def test_tokens_are_the_same_for_a_seed() -> None:
    tokens = make_tokens(3, 4, 5, seed=1)
    assert tokens.shape == (3, 4, 6)
    assert torch.equal(tokens, make_tokens(3, 4, 5, seed=1))
    assert not torch.equal(tokens, make_tokens(3, 4, 5, seed=2))
