"""Everything that data-parallel training has to get right, each a small training run that can be split over ranks.

A case runs in one process on the whole batch and on two ranks on a half each; the parameters must come out the same.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_prof.ddp import VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 4
BATCH = 8
WIDTH = 6
Tensors = dict[str, torch.Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale


class Tied(nn.Module):
    """The first layer's weight is the third's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Blocks(nn.Module):
    """Equal blocks in a list, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden) + hidden
        return self.head(hidden)


class Experts(nn.Module):
    """Each sample goes to one of two experts; an expert without samples is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([mlp(), mlp()])

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        parts = [(expert, which == expert) for expert in (0, 1) if (which == expert).any()]
        out = hidden.new_zeros(len(x), 3)
        for expert, mask in parts:
            out = out.index_put((mask,), self.experts[expert](hidden[mask]))
        return out


class Order(nn.Module):
    """Two branches whose gradients come in an order that depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(), mlp()

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        branches = (self.left, self.right) if which[0] == 0 else (self.right, self.left)
        first = branches[0](x)
        return first + branches[1](x)


class Mixed(nn.Module):
    """Layers of two data types, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        for layer in self.layers[::2]:
            nn.Module._apply(layer, lambda tensor: tensor.float())
        return result

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


class Strided(nn.Module):
    """A weight that is dense but not contiguous, and a scalar one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        image = x.reshape(len(x), 2, 3, 1).expand(-1, -1, -1, 3)
        return self.conv(image.contiguous(memory_format=torch.channels_last)).flatten(1) * self.gain


class SharedStorage(nn.Module):
    """Parameters that are added: autograd gives their gradients one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left, self.right, self.scalar = (nn.Parameter(torch.randn(shape)) for shape in (WIDTH, WIDTH, ()))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        return hidden.square() * (self.left[None] + self.right[None]) + self.scalar


class ChannelsLast(nn.Module):
    """Two convolutions whose weights lie in memory with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3))
        self.net.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        image = x.reshape(len(x), 2, 3, 1).expand(-1, -1, -1, 3)
        return self.net(image.contiguous(memory_format=torch.channels_last)).flatten(1)


class Checkpointed(nn.Module):
    """One block used twice, each time under a checkpoint; ``reentrant`` fires its hooks twice in one backward."""

    def __init__(self, reentrant: bool, twice_for: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.reentrant, self.twice_for = reentrant, twice_for

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        hidden = self._block(self.stem(x))
        twice = torch.isin(which, torch.tensor(self.twice_for))
        if twice.any():
            hidden = torch.where(twice[:, None], self._block(torch.tanh(hidden)), hidden)
        return self.head(hidden)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return result


class Buffered(Plain):
    """What it computes depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("turned", torch.randn(3, 2).t())

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.shift) + self.turned.sum()


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        build: Makes the model.
        choose: For (step, sample of the whole batch): the value of ``which`` handed to the model.
        micro: Backwards a step; all but the last under ``no_sync``.
        sync_all: No ``no_sync``: every backward synchronizes, with one finish at the end.
        set_to_none: How gradients are cleared.
        find_unused: Passed to the variants.
        optimizers: Which must agree; AdamW feels the difference between zeros and no gradient, fused ones read memory.
        sharded_optimizers: For ``sharded``, where a parameter that no rank used has a gradient of zeros.
        torch_options: For TorchDDP; ``None`` where it cannot run the case.
        fsdp: Whether ``fully_shard`` can run the case.
    """

    build: Callable[[], nn.Module]
    choose: Callable[[int, int], int] = lambda step, sample: 0
    micro: int = 1
    sync_all: bool = False
    set_to_none: bool = True
    find_unused: bool = False
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    sharded_optimizers: tuple[str, ...] = ("sgd", "adamw", "adamw-foreach", "adamw-fused")
    torch_options: dict[str, Any] | None = field(default_factory=dict)
    fsdp: bool = False


def by_half(step: int, sample: int) -> int:
    """First half of the batch 0, second half 1: the ranks differ."""
    return int(sample >= BATCH // 2)


def seldom(step: int, sample: int) -> int:
    """1 only in steps 1 and 3, for the second half: unused everywhere in step 0, and in 2, with optimizer state."""
    return int(step in (1, 3) and sample >= BATCH // 2)


def first_micro_only(step: int, sample: int) -> int:
    """0 in the second micro-batch of a rank, 1 in the first: expert 1 is unused when gradients are synchronized."""
    return int(sample % (BATCH // 2) < BATCH // 4)


EVERY_OPTIMIZER = ("sgd", "adamw", "adamw-foreach", "adamw-fused")
UNUSED_TORCH = {"find_unused_parameters": True}

CASES = {
    "plain": Case(Plain, fsdp=True),
    "frozen": Case(Frozen),
    "tied": Case(Tied, fsdp=True),
    "order": Case(Order, by_half),
    "unused-on-one-rank": Case(Experts, by_half, torch_options=UNUSED_TORCH),
    "unused-on-one-rank-found": Case(Experts, by_half, find_unused=True),
    "unused-everywhere": Case(Experts, seldom, sharded_optimizers=("sgd",), torch_options=UNUSED_TORCH),
    "unused-everywhere-found": Case(Experts, seldom, sharded_optimizers=("sgd",), find_unused=True),
    "unused-everywhere-zeroed": Case(Experts, seldom, sharded_optimizers=("sgd",), set_to_none=False, find_unused=True),
    "mixed-dtypes": Case(Mixed),
    "strided": Case(Strided, optimizers=EVERY_OPTIMIZER),
    "channels-last": Case(ChannelsLast, optimizers=EVERY_OPTIMIZER),
    "channels-last-zeroed": Case(ChannelsLast, set_to_none=False, optimizers=EVERY_OPTIMIZER),
    "shared-storage": Case(SharedStorage, optimizers=EVERY_OPTIMIZER),
    "buffers": Case(Buffered, fsdp=True),
    "blocks": Case(Blocks, fsdp=True),
    "zeroed": Case(Plain, set_to_none=False, fsdp=True),
    "accumulation": Case(Plain, micro=2, fsdp=True),
    "accumulation-zeroed": Case(Plain, micro=2, set_to_none=False),
    # torch's DDP loses what only the earlier micro-batch contributed
    "accumulation-unused": Case(Experts, first_micro_only, micro=2, torch_options=None),
    "accumulation-unused-found": Case(Experts, first_micro_only, micro=2, find_unused=True, torch_options=None),
    "accumulation-synchronized": Case(Plain, micro=2, sync_all=True, torch_options=None),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), fsdp=True),
    "checkpoint-reentrant": Case(lambda: Checkpointed(reentrant=True), torch_options={"static_graph": True}),
    "checkpoint-reentrant-zeroed": Case(lambda: Checkpointed(reentrant=True), set_to_none=False, torch_options=None),
    "checkpoint-reentrant-one-rank": Case(
        lambda: Checkpointed(reentrant=True, twice_for=(1,)), by_half, find_unused=True, torch_options=None
    ),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": ("naive", {}),
    "flat": ("flat", {}),
    "overlap": ("overlap", {}),
    "bucketed-tiny": ("bucketed", {"bucket_size_mb": 0.0001}),
    "bucketed-small": ("bucketed", {"bucket_size_mb": 0.001}),
    "bucketed-unbounded": ("bucketed", {"bucket_size_mb": None}),
    "bucketed-rebuilt": ("bucketed", {"bucket_size_mb": [0.0001, 0.001], "rebuild_buckets": True}),
    "torch": ("torch", {}),
    "sharded-tiny": ("sharded", {"bucket_size_mb": 0.0001}),
    "sharded-unbounded": ("sharded", {"bucket_size_mb": None}),
    "fsdp": ("fsdp", {}),
}
"""Name of a setting -> key of the variant and its options."""


class OneProcess:
    """The face of a variant without anything behind it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def optimizer_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def finish_gradient_synchronization(self) -> None:
        pass

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def possible() -> list[tuple[str, str, str]]:
    """All (case, setting, optimizer) that are to agree with one process."""
    return [
        (case, setting, optimizer)
        for case, what in CASES.items()
        for setting in SETTINGS
        for optimizer in what.optimizers
        if can_run(what, SETTINGS[setting][0])
        and (SETTINGS[setting][0] != "sharded" or optimizer in what.sharded_optimizers)
    ]


def can_run(case: Case, variant: str) -> bool:
    """Whether a variant can run a case as one process does."""
    if variant == "torch":
        return case.torch_options is not None
    return variant != "fsdp" or case.fsdp


def make_variant(case: Case, setting: str, module: nn.Module) -> Any:
    """The variant, with what the case asks for."""
    key, options = SETTINGS[setting]
    options = {"find_unused_parameters": case.find_unused, **options}
    return VARIANTS[key](module, **{**options, **((case.torch_options or {}) if key == "torch" else {})})


def build(case: Case, seed: int) -> nn.Module:
    """The model in double precision, so that agreement can be asked for sharply."""
    torch.manual_seed(seed)
    return case.build().double()


def train(case: Case, variant: Any, optimizer: str, rank: int = 0, world: int = 1) -> Tensors:
    """Train on this rank's share; returns parameters and buffers."""
    stepper = OPTIMIZERS[optimizer](variant.optimizer_parameters())
    data = torch.Generator().manual_seed(7)
    share = BATCH // world
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=data, dtype=torch.float64)
        which = torch.tensor([case.choose(step, sample) for sample in range(BATCH)])
        mine = slice(rank * share, (rank + 1) * share)
        stepper.zero_grad(set_to_none=case.set_to_none)
        _backwards(case, variant, x[mine], which[mine])
        variant.finish_gradient_synchronization()
        stepper.step()
    return {name: whole(tensor).detach().clone() for name, tensor in variant.module.state_dict().items()}


def whole(tensor: Any) -> torch.Tensor:
    """The tensor itself, or all parts of one that ``fully_shard`` divided."""
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def assert_equal(found: Tensors, expected: Tensors, tolerance: float) -> None:
    """Fail unless both have the same tensors, to a relative and absolute tolerance.

    ``assert_close`` takes ten times as long as to compare, so it only tells what is unequal.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one = found[name]
        is_alike = one.dtype == value.dtype and one.shape == value.shape
        if not is_alike or not torch.allclose(one, value, rtol=tolerance, atol=tolerance):
            torch.testing.assert_close(one, value, rtol=tolerance, atol=tolerance, msg=name)


def _backwards(case: Case, variant: Any, x: torch.Tensor, which: torch.Tensor) -> None:
    parts = list(zip(x.chunk(case.micro), which.chunk(case.micro), strict=True))
    for index, (x_part, which_part) in enumerate(parts):
        is_last = index == len(parts) - 1
        with nullcontext() if is_last or case.sync_all else variant.no_sync():
            loss = variant(x_part, which_part).square().mean() / len(parts)
            loss.backward()
