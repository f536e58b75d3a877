"""The model: its sizes, and that it is what it is said to be."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ddp_prof.train import MODEL_SIZES, VOCABULARY
from ddp_prof.train.workload import TransformerLM, activation_bytes, make_tokens, rotary_angles, rotate

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
    assert count == size.parameter_count == PARAMETERS.get(name, count)
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


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 16), (3, 32)])
def test_flops_are_those_that_torch_counts(batch: int, seq_len: int) -> None:
    model = TransformerLM(MODEL_SIZES["tiny"])
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert MODEL_SIZES["tiny"].step_flops(batch * seq_len, seq_len) == counter.get_total_flops()


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 16), (3, 32)])
def test_flops_are_those_of_the_matrix_products_in_a_profile(batch: int, seq_len: int) -> None:
    model = TransformerLM(MODEL_SIZES["tiny"])
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), profile(activities=[ProfilerActivity.CPU], with_flops=True) as recorded:
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    flops = {event.key: event.flops for event in recorded.key_averages() if event.flops}
    products = {name: flops.pop(name) for name in ("aten::mm", "aten::bmm")}
    assert set(flops) <= {"aten::mul", "aten::add"}, "what is left is elementwise, and not counted"
    assert MODEL_SIZES["tiny"].step_flops(batch * seq_len, seq_len) == sum(products.values())


def test_activations_are_what_autograd_keeps() -> None:
    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens).square()

    tokens = torch.zeros(2, 3, dtype=torch.long)
    indices, rows, softmax, weight = 6 * 8, 6 * 4 * 4, 6 * 4 * 4, 4
    assert activation_bytes(Squares(), tokens) == indices + rows + softmax + weight


def test_checkpointing_keeps_less_and_meta_tensors_are_counted_alike() -> None:
    kept = {}
    for device in ("cpu", "meta"):
        for checkpoint in (False, True):
            with torch.device(device), sdpa_kernel(SDPBackend.MATH):
                model = TransformerLM(MODEL_SIZES["tiny"], checkpoint_blocks=checkpoint)
                kept[device, checkpoint] = activation_bytes(model, torch.zeros(2, 16, dtype=torch.long))
    assert kept["cpu", True] < kept["cpu", False]
    assert kept["meta", False] == kept["cpu", False]
