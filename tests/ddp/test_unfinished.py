"""Loops in which backward brings what no ``finish`` takes, or brings it in turns: they equal one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import VARIANTS
from ddp_prof.errors import CommunicationError
from tests.ddp.cases import assert_equal
from tests.ddp.gloo_ranks import run_ranks
from tests.ddp.loops import STEPS, WIDTH, Loop, OneProcess, Tensors, Variant, inputs, loss_of, mean, mlp, run, weights
from tests.examples import IS_NIGHTLY
from tests.pairs import one_of_each

Wrap = Callable[[nn.Module], OneProcess]
OPTIONS: dict[str, dict[str, Any]] = {
    "naive": {},
    "flat": {},
    "overlap": {},
    "overlap-found": {"find_unused_parameters": True},
    "bucketed": {"bucket_size_mb": 0.001},
    "bucketed-found": {"bucket_size_mb": 0.001, "find_unused_parameters": True},
    "torch": {"find_unused_parameters": True},
    "sharded": {"bucket_size_mb": 0.001},
}
MOST_CODE = ("bucketed-found", "sharded")
WORLDS = (2, 4)


class Experts(nn.Module):
    """A stem, then the mean of four experts of different sizes; ``only`` asks one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 3)) for width in (8, 8, 5, 8)
        )

    def forward(self, x: torch.Tensor, only: int | None = None) -> torch.Tensor:
        hidden = self.stem(x)
        asked = self.experts if only is None else [self.experts[only]]
        return torch.stack([expert(hidden) for expert in asked]).mean(0)


def adversaries(wrap: Wrap, model: nn.Module, shares: Sequence[int], set_to_none: bool) -> Tensors:
    """A GAN: the generator's loss brings gradients to the critic, which are dropped and never finished."""
    critic, maker = wrap(model[0]), wrap(model[1])
    critics = critic.optimizer(torch.optim.AdamW, lr=0.02)
    makers = maker.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        makers.zero_grad(set_to_none=set_to_none)
        mean(critic.model(maker.model(inputs(step, share))).mean() for share in shares).backward()
        maker.finish()
        makers.step()
        critics.zero_grad(set_to_none=set_to_none)
        for share in shares:
            made = maker.module(inputs(step, share)).detach()
            loss = critic.model(torch.cat([made, inputs(step + 50, share)])).square().mean()
            (loss / len(shares)).backward()
        critic.finish()
        critics.step()
    return {**weights(model[0]), **{f"maker {name}": value for name, value in weights(model[1]).items()}}


def skipping(
    wrap: Wrap, model: nn.Module, shares: Sequence[int], drop: str, reached: int | None = None, *, apart: bool = False
) -> Tensors:
    """The loss of step 1 is not a number: what its backward brought is dropped, in one of three ways.

    It reaches one expert, all, or (``apart``) another one of each share.
    """
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        only = reached if step == 1 else None
        loss = mean(
            trained.model(inputs(step, share), share if apart and step == 1 else only).square().mean()
            for share in shares
        )
        loss = loss * (torch.nan if step == 1 else 1)
        loss.backward()
        if loss.isnan() and drop == "discard" and isinstance(trained, Variant):
            trained.variant.discard()
        elif loss.isnan():
            optimizer.zero_grad(set_to_none=drop != "zero")
        else:
            trained.finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=drop != "zero")
    return weights(model)


def failing(wrap: Wrap, model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Step 1 fails on one share before its backward: all finish, drop what the others brought, and go on."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in shares:
            if (step, share) != (1, 1):
                (trained.model(inputs(step, share)).square().mean() / len(shares)).backward()
        trained.finish()
        if step != 1:
            optimizer.step()
    return weights(model)


def between(wrap: Wrap, model: nn.Module, shares: Sequence[int], set_to_none: bool, by_module: bool = False) -> Tensors:
    """Gradients are dropped between two backwards of one forward."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        outputs = [trained.model(inputs(step, share)) for share in shares]
        mean(output.abs().mean() for output in outputs).backward(retain_graph=True)
        (model if by_module else optimizer).zero_grad(set_to_none=set_to_none)
        mean(output.square().mean() for output in outputs).backward()
        trained.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return weights(model)


def partly(wrap: Wrap, model: nn.Module, shares: Sequence[int], set_to_none: bool) -> Tensors:
    """Two optimizers on parts of one model; the gradients of one part are dropped, those of the other add up."""
    trained = wrap(model)
    parts = [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (model.stem, model.experts)]
    for step in range(STEPS):
        loss_of(trained.model, step, shares).backward()
        parts[step % 2].zero_grad(set_to_none=set_to_none)
        loss_of(trained.model, step + 50, shares).backward()
        trained.finish()
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return weights(model)


def auxiliary(wrap: Wrap, model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A second backward reaches another expert on each rank."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(trained.model, step, shares).backward()
        mean(model.experts[share](inputs(step + 50, share)).square().mean() for share in shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def both(wrap: Wrap, model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The auxiliary loss comes first, and a third backward reaches all."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean(model.experts[share](inputs(step + 50, share)).square().mean() for share in shares).backward()
        for micro in range(2):
            (loss_of(trained.model, 2 * step + micro, shares) / 2).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def pair() -> nn.Module:
    return nn.ModuleList([mlp(), nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))])


LOOPS = {
    "adversaries": Loop(pair, partial(adversaries, set_to_none=True)),
    "adversaries, zeroed": Loop(pair, partial(adversaries, set_to_none=False)),
    "skipped": Loop(Experts, partial(skipping, drop="none")),
    "skipped, zeroed": Loop(Experts, partial(skipping, drop="zero")),
    "skipped, discarded": Loop(Experts, partial(skipping, drop="discard")),
    "skipped, not all reached": Loop(Experts, partial(skipping, drop="none", reached=1)),
    "skipped, not all reached, zeroed": Loop(Experts, partial(skipping, drop="zero", reached=1)),
    "skipped, each reached another": Loop(Experts, partial(skipping, drop="none", apart=True)),
    "skipped, each reached another, zeroed": Loop(Experts, partial(skipping, drop="zero", apart=True)),
    "failed on a share, finished by all": Loop(Experts, failing),
    "between": Loop(mlp, partial(between, set_to_none=True)),
    "between, zeroed": Loop(mlp, partial(between, set_to_none=False)),
    "between, by the module": Loop(mlp, partial(between, set_to_none=True, by_module=True)),
    "partly": Loop(Experts, partial(partly, set_to_none=True)),
    "partly, zeroed": Loop(Experts, partial(partly, set_to_none=False)),
    "auxiliary": Loop(Experts, auxiliary),
    "auxiliary first": Loop(Experts, both),
}
IMPOSSIBLE = {
    # The second backward of a step torch's DDP does not reduce, or refuses; within backward it waits for all ranks.
    "torch": ("between", "partly", "auxiliary", "failed"),
    # Optimizers step on parts of buckets, not on parts of the model.
    "sharded": ("partly",),
}


def every_run() -> list[tuple[int, str, str]]:
    """(world, loop, variant)."""
    return [
        (world, name, key)
        for world in WORLDS
        for name in LOOPS
        for key in OPTIONS
        if not name.startswith(IMPOSSIBLE.get(key, ()))
        and (world == 2 or name.startswith(("auxiliary", "skipped, not all")))
    ]


def runs() -> list[tuple[int, str, str]]:
    """Each loop under the two variants that have most code, and one of the others in turns; on four ranks under one.

    A nightly runs all.
    """
    if IS_NIGHTLY:
        return every_run()
    most, others = [], []
    for each in every_run():
        (most if each[0] == 2 and each[2] in MOST_CODE else others).append(each)
    return most + one_of_each(others, lambda each: each[:2])


def all_runs(rank: int, world: int) -> dict[tuple[int, str, str], Tensors]:
    def wrap_in(key: str) -> Wrap:
        return lambda module: Variant(VARIANTS[key.partition("-")[0]](module, **OPTIONS[key]))

    return {each: run(LOOPS[each[1]], wrap_in(each[2]), [rank]) for each in runs() if each[0] == world}


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[Any]]:
    return {world: run_ranks(partial(all_runs, world=world), world) for world in WORLDS}


@cache
def one_process(world: int, name: str) -> Tensors:
    return run(LOOPS[name], OneProcess, range(world))


@pytest.mark.parametrize(("world", "name", "key"), runs())
def test_equals_one_process(ranks: dict[int, list[Any]], world: int, name: str, key: str) -> None:
    for results in ranks[world]:
        assert_equal(results[world, name, key], one_process(world, name), tolerance=1e-10)


def drop_a_part(rank: int) -> torch.Tensor:
    """This rank's part of the gradients where those of the first layer, which are not finite, were dropped."""
    module = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)])
    variant = VARIANTS["sharded"](module)
    x = torch.full((1, 2), float(rank + 1))
    (module[0](x) * torch.nan + module[1](x)).sum().backward()
    module[0].zero_grad()
    variant.finish_gradient_synchronization()
    (part,) = variant.optimizer_parameters()
    return torch.Tensor(part.grad)


def test_sharded_leaves_out_what_zero_grad_of_a_part_dropped() -> None:
    assert torch.cat(run_ranks(drop_a_part)).tolist() == [1.5] * 6 + [0] * 6


class Halves(nn.Module):
    """Two layers, of which the second one need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_both: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if uses_both else self.first(x)


def wrapped_each(rank: int) -> list[str]:
    """What is said of two variants in one group where rank 0 uses less; in two groups; in one where both use less."""
    said = []
    for has_group, uses_both in ((False, rank == 1), (True, rank == 1), (False, False)):
        encoder, decoder = (
            VARIANTS["overlap"](Halves(), process_group=dist.new_group() if has_group else None) for _ in range(2)
        )
        decoder(encoder(torch.ones(1, 4), True), uses_both).sum().backward()
        try:
            decoder.finish_gradient_synchronization()
            said.append("")
        except CommunicationError as error:
            said.append(str(error))
        encoder.finish_gradient_synchronization()
    return said


def test_messages_of_two_variants_are_not_mixed_up_in_silence() -> None:
    """The last layer of the decoder was averaged with the first one of the encoder."""
    said = run_ranks(wrapped_each)
    assert "give each variant a group of its own" in said[0][0]
    assert said == [[said[0][0], "", ""], ["", "", ""]]
