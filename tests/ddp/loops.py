"""Ordinary training loops, written once for one process and for ranks under any variant, or under torch's own classes.

The samples come in shares, one a rank. A rank computes the loss of its own share, one process the mean over all of
them; what a loop returns must be equal.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.nn.functional
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured

from ddp_prof.ddp import ShardedOptimizer
from tests.ddp.cases import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH = 8
SAMPLES = 4
STEPS = 4
Tensors = dict[str, torch.Tensor]


class OneProcess:
    """A module that is trained, and what a loop calls besides; others override what they do in another way."""

    def __init__(self, module: nn.Module) -> None:
        self.module = self.model = module

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer steps on."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def optimizer(
        self, cls: Callable[..., torch.optim.Optimizer], groups: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Of all parameters, or of groups of the module's."""
        return cls(groups or self.parameters(), **options)

    def saved(self, optimizer: torch.optim.Optimizer) -> Any:
        return copy.deepcopy(optimizer.state_dict())

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)


class Variant(OneProcess):
    """One of ours."""

    def __init__(self, variant: Any) -> None:
        super().__init__(variant.module)
        self.model = self.variant = variant

    def parameters(self) -> list[nn.Parameter]:
        return self.variant.optimizer_parameters()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.variant.no_sync()

    def finish(self) -> None:
        self.variant.finish_gradient_synchronization()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self.variant.clip_grad_norm_(max_norm, norm_type)


class Divided(Variant):
    """One of ours with a ShardedOptimizer."""

    def optimizer(
        self, cls: Callable[..., torch.optim.Optimizer], groups: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        return ShardedOptimizer(groups or self.parameters(), cls, **options)


class Loop(NamedTuple):
    """A model, and a way to train it: what it gets is the wrapped model and the shares that this process computes."""

    build: Callable[[], nn.Module]
    train: Callable[[Callable[[nn.Module], OneProcess], nn.Module, Sequence[int]], Tensors]


def run(loop: Loop, wrap: Callable[[nn.Module], OneProcess], shares: Sequence[int]) -> Tensors:
    """What the loop returns; every rank starts from the same weights."""
    torch.manual_seed(0)
    return loop.train(wrap, loop.build().double(), shares)


def inputs(step: int, share: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + share)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def mean(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean()


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, shares: Sequence[int]) -> torch.Tensor:
    return mean(model(inputs(step, share)).square().mean() for share in shares)


def weights(module: nn.Module) -> Tensors:
    return {name: whole(tensor).detach().clone() for name, tensor in module.state_dict().items()}


def take_step(trained: OneProcess, optimizer: torch.optim.Optimizer, step: int, shares: Sequence[int]) -> None:
    optimizer.zero_grad()
    loss_of(trained.model, step, shares).backward()
    trained.finish()
    optimizer.step()


def plainly(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
    return weights(model)


def accumulating(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Of three micro-batches the second one is under ``no_sync``."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            with trained.no_sync() if micro == 1 else nullcontext():
                loss_of(trained.model, 3 * step + micro, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def grouping(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Matrices have weight decay, biases none."""
    trained = wrap(model)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
    optimizer = trained.optimizer(torch.optim.AdamW, groups, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
    return weights(model)


def twice(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Two steps on the same gradients."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        optimizer.step()
    return weights(model)


def loading(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Every second step is taken back: what was saved before is loaded right after it."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        take_step(trained, optimizer, step, shares)
        if step % 2:
            model.load_state_dict(before)
    return weights(model)


def averaging(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A running mean of the weights is kept, from ``parameters()`` right after each step."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    averages = [torch.zeros_like(whole(parameter.detach())) for parameter in model.parameters()]
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(whole(parameter.detach()), 0.3)
    return {f"average {index}": average for index, average in enumerate(averages)}


def clamping(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Weights are clamped after each step, as a Wasserstein critic's."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    return weights(model)


def keeping(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A copy of the module is kept right after each step, as of the best one so far."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    kept = []
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        kept.append(copy.deepcopy(model))
    return {f"{step} {name}": value for step, each in enumerate(kept) for name, value in weights(each).items()}


def evaluating(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The module itself, not what wraps it, is evaluated after each step."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    outputs = []
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        model.eval()
        with torch.no_grad():
            outputs.append(model(inputs(99, 0)).clone())
        model.train()
    return {f"output {step}": output for step, output in enumerate(outputs)}


def scaling(
    wrap: Callable[[nn.Module], OneProcess],
    model: nn.Module,
    shares: Sequence[int],
    fused: bool = False,
    drops: bool = False,
) -> Tensors:
    """Accumulation under a GradScaler; in the second step one gradient of one share overflows.

    A fused optimizer is called nevertheless, and skips the step itself; then all gradients overflow. With ``drops`` the
    gradients of the first step are set to zeros after its backward, and those of each are replaced by halves of them.
    """
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not drops)
        for micro in range(2):
            with nullcontext() if micro else trained.no_sync():
                loss = loss_of(trained.model, 2 * step + micro, shares)
                if (step, micro) == (1, 0) and 1 in shares:
                    loss = (
                        loss + sum(each.sum() for each in (model.parameters() if fused else [model.gain])) * torch.inf
                    )
                scaler.scale(loss / 2).backward()
        if drops and step == 0:
            optimizer.zero_grad(set_to_none=False)
        trained.finish()
        for group in optimizer.param_groups if drops else ():
            for parameter in group["params"]:
                parameter.grad = parameter.grad / 2
        scaler.step(optimizer)
        scaler.update()
    return {**weights(model), "scale": torch.tensor(scaler.get_scale())}


def clipping(
    wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int], norm_type: float = 2.0
) -> Tensors:
    """Gradients are clipped; their norms are returned, too."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.5)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(trained.model, step, shares).mul(10).backward()
        trained.finish()
        norms.append(float(trained.clip(0.5, norm_type)))
        optimizer.step()
    return {**weights(model), "norms": torch.tensor(norms, dtype=torch.float64)}


def resuming(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The learning rate is halved after each step; half way optimizer and schedule are saved and made anew."""
    trained = wrap(model)

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = trained.optimizer(torch.optim.AdamW, lr=0.05)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    optimizer, schedule = make()
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = trained.saved(optimizer), copy.deepcopy(schedule.state_dict())
            optimizer, schedule = make()
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        take_step(trained, optimizer, step, shares)
        schedule.step()
    return weights(model)


def cycling(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """OneCycleLR moves learning rate and momentum."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        schedule.step()
    return weights(model)


def freezing(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The critic is frozen while the generator's loss passes through it, as in pix2pix and CycleGAN."""
    critic, maker = wrap(model[0]), wrap(model[1])
    critics = critic.optimizer(torch.optim.AdamW, lr=0.02)
    makers = maker.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        model[0].requires_grad_(False)
        makers.zero_grad()
        made = [maker.model(inputs(step, share)) for share in shares]
        mean(critic.model(each).mean() for each in made).backward()
        maker.finish()
        makers.step()
        model[0].requires_grad_(True)
        critics.zero_grad()
        mean(critic.model(each.detach()).square().mean() for each in made).backward()
        critic.finish()
        critics.step()
    return {**weights(model[0]), **{f"maker {name}": value for name, value in weights(model[1]).items()}}


def taking(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """After each step module and gradients get other memory, as by ``cpu()`` and ``cuda()`` around a checkpoint."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        model._apply(torch.clone)
    return weights(model)


def taking_by_swaps(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The same there and back, by torch's way of conversion that swaps tensors instead of setting ``data``."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model._apply(torch.clone)._apply(torch.clone)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    return weights(model)


def taking_within_no_sync(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The same, and the next forward is under ``no_sync``, though its backward is not."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        with trained.no_sync():
            loss = loss_of(trained.model, step, shares)
        loss.backward()
        trained.finish()
        optimizer.step()
        model._apply(torch.clone)
    return weights(model)


def penalizing(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A penalty on the gradient of a critic by its inputs, as in WGAN-GP."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for share in shares:
            samples = inputs(step, share).requires_grad_()
            output = trained.model(samples)
            (slope,) = torch.autograd.grad(output.sum(), samples, create_graph=True)
            losses.append(output.mean() + 10 * (slope.norm(dim=1) - 1).square().mean())
        mean(losses).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def heading(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Of two heads the loss uses one; the weights of the other have no gradient and must not decay."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02, weight_decay=0.5)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
    return weights(model)


def heading_by_momentum(
    wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int], set_to_none: bool = True
) -> Tensors:
    """The same with momentum, whose buffer must not grow by the decay; the head may be used now and then.

    If gradients are set to zeros, those of an unused head are zeros, and it decays.
    """
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.5)
    for step in range(2 * STEPS):
        model.step = step
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(trained.model, step, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


class SeldomHead(nn.Module):
    """The output of the second head is used in each third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.seldom = mlp(), mlp()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + (self.seldom(x) if self.step % 3 == 2 else 0)


def alone_between(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Of three micro-batches the second one alone is under ``no_sync``, and the third one does without a head."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            model.step = 2 if micro < 2 else 0
            with trained.no_sync() if micro == 1 else nullcontext():
                loss_of(trained.model, 3 * step + micro, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


class TwoHeads(nn.Module):
    """The output of the second head is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.used(x)


class Buffers(nn.Module):
    """Buffers of all sorts: rotations and their conjugates, a mask, rows that share memory, quantized values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rotation", torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH))))
        self.register_buffer("back", torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH))).conj())
        self.register_buffer("mask", torch.ones(WIDTH).bool())
        self.register_buffer("shift", torch.arange(float(WIDTH)).expand(SAMPLES, WIDTH))
        for dtype in (torch.int16, torch.uint8, torch.bfloat16, torch.float8_e4m3fn):
            self.register_buffer(f"of_{dtype}".replace("torch.", ""), torch.ones(WIDTH).to(dtype), persistent=False)

    def double(self) -> Buffers:
        """Convert the layer only."""
        self.layer.double()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (self.rotation.real + self.back.imag) * self.mask * self.of_int16 + self.shift


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def attention() -> nn.Module:
    """Reads ``out_proj.weight`` without calling ``out_proj``."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Unflatten(0, (1, -1)), *layers)


class Lists(nn.Module):
    """Parameters in a list and in a dictionary, which are modules that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.gains = nn.ParameterDict({"first": torch.ones(WIDTH), "second": torch.ones(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gains["first"]
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.gains["second"]


class Gained(nn.Module):
    """A network and one number, which is in one rank's part when parameters are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain = mlp(), nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.gain


class Borrowed(nn.Module):
    """Reads the weight of a layer before it calls that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(nn.functional.linear(x, self.last.weight))))


def sharpening(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Sharpness-aware minimization: the step's gradients are those at weights a little up the slope of a first pass."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(trained.model, step, shares).backward()
        trained.finish()
        norm = trained.clip(1e9)
        climbed = [(each, 0.1 * whole(each.grad) / norm) for each in model.parameters()]
        with torch.no_grad():
            for parameter, by in climbed:
                parameter.add_(by)
        optimizer.zero_grad()
        loss_of(trained.model, step, shares).backward()
        trained.finish()
        with torch.no_grad():
            for parameter, by in climbed:
                parameter.sub_(by)
        optimizer.step()
    return weights(model)


def caching(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """GradCache: first the gradients of a batch's outputs, then each chunk runs again and continues from them."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        chunks = [(share, half) for share in shares for half in (0, 1)]
        for number, (share, half) in enumerate(chunks):
            samples = inputs(step, share)
            with torch.no_grad():
                outputs = trained.model(samples)
            outputs.requires_grad_()
            (torch.logsumexp(outputs, 0).square().mean() / len(shares)).backward()
            rows = slice(2 * half, 2 * half + 2)
            with nullcontext() if number == len(chunks) - 1 else trained.no_sync():
                assert outputs.grad is not None
                (trained.model(samples[rows]) * outputs.grad[rows]).sum().backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def gather(own: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks; gradients flow back to each."""
    return torch.cat(torch.distributed.nn.functional.all_gather(own))


def contrasting(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A loss over the embeddings of all ranks, gathered between forward and backward."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    is_divided = torch.distributed.is_initialized()
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = torch.cat([trained.model(inputs(step, share)) for share in shares])
        every = gather(rows) if is_divided else rows
        torch.logsumexp(every @ every.T, 1).mean().backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def classifying(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The loss has parameters of its own, as ArcFace's, and is wrapped, too; one optimizer for both."""
    network, loss = model[0], model[1]
    trained, judged = wrap(network), wrap(loss)
    optimizer = trained.optimizer(torch.optim.AdamW, [*trained.parameters(), *judged.parameters()], lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean(judged.model(trained.model(inputs(step, share))).square().mean() for share in shares).backward()
        trained.finish()
        judged.finish()
        optimizer.step()
    return weights(model)


class Adapted(nn.Module):
    """A frozen layer, and a list of adapters that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base = mlp().requires_grad_(False)
        self.adapters = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(2, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapters[1](self.adapters[0](x))


def adapting(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Only the list of adapters is wrapped, which nobody calls: the whole model is called."""
    trained = wrap(model.adapters)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def bypassing(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The loss is computed by the module instead of by what wraps it."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def weighting(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Shares have different numbers of valid samples; the sum of losses is divided by the number on all ranks."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for step in range(STEPS):
        optimizer.zero_grad()
        valid = {share: 1 + (step + share) % SAMPLES for share in shares}
        total = torch.tensor(float(sum(valid.values())))
        losses = [trained.model(inputs(step, share)[:count]).square().sum() for share, count in valid.items()]
        if world > 1:
            torch.distributed.all_reduce(total)
        (torch.stack(losses).sum() * world / total).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def learning_to_learn(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """MAML: the loss of weights that took a step of their own, differentiated through that step."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for share in shares:
            slow = dict(model.named_parameters())
            inner = torch.func.functional_call(model, slow, inputs(step, share)).square().mean()
            slopes = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
            fast = {name: value - 0.1 * slope for (name, value), slope in zip(slow.items(), slopes, strict=True)}
            losses.append(torch.func.functional_call(model, fast, inputs(step + 50, share)).square().mean())
        mean(losses).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(WIDTH, 6, num_layers=2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        x, state = self.lstm(x, state)
        return self.last(x), state


def unrolling(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Truncated backpropagation through time: three parts of a sequence, each with a backward; one step for all."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        states: dict[int, Any] = dict.fromkeys(shares)
        for part in range(3):
            losses = []
            for share in shares:
                output, state = trained.model(inputs(10 * step + part, share), states[share])
                states[share] = tuple(each.detach() for each in state)
                losses.append(output.square().mean())
            with nullcontext() if part == 2 else trained.no_sync():
                mean(losses).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def combining(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The gradients of two losses are found apart and put together by the program, as gradient surgery does."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    parameters = list(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = [trained.model(inputs(step, share)) for share in shares]
        losses = [mean(output.square().mean() for output in outputs), mean(output.abs().mean() for output in outputs)]
        found = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        for parameter, one, other in zip(parameters, *found, strict=True):
            parameter.grad = one + 0.5 * other
        trained.finish()
        optimizer.step()
    return weights(model)


def distilling(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The frozen teacher is wrapped as the student is."""
    teacher, student = wrap(model[0].requires_grad_(False)), wrap(model[1])
    optimizer = student.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [inputs(step, share) for share in shares]
        mean((student.model(batch) - teacher.model(batch)).square().mean() for batch in batches).backward()
        student.finish()
        optimizer.step()
    return weights(model)


def masking(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """A hook on a parameter sets the gradients of some rows to zero, as for new tokens of an embedding."""
    mask = (torch.arange(16) % 3 == 0).double()[:, None]
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return plainly(wrap, model, shares)


class Boxes(nn.Module):
    """Two heads, and a buffer; a batch without boxes uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = mlp(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.body(x) * self.scale
        return self.classes(x), self.boxes(x)


def detecting(
    wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int], micros: int = 1
) -> Tensors:
    """In each batch one share has no boxes, so its loss leaves that head out; a step has one or several batches."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            losses = []
            for share in shares:
                classes, boxes = trained.model(inputs(step + 50 * micro, share))
                loss = classes.square().mean()
                losses.append(loss if (step + share) % 2 else loss + boxes.abs().mean())
            mean(losses).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def chaining(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Encoder and decoder are wrapped each, and have an optimizer each."""
    parts = [wrap(part) for part in model]
    optimizers = [part.optimizer(torch.optim.AdamW, lr=0.02) for part in parts]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean(parts[1].model(parts[0].model(inputs(step, share))).square().mean() for share in shares).backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            part.finish()
            optimizer.step()
    return weights(model)


def weight_normed() -> nn.Module:
    """Layers of which autograd computes the weight, by hooks of the old and by parametrization of the new kind."""
    new = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 16))
    return nn.Sequential(new, nn.Tanh(), nn.utils.weight_norm(nn.Linear(16, 3)))


def zeroing(
    wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int], zero: Callable[[nn.Module], None]
) -> Tensors:
    """Gradients are dropped without the optimizer's ``zero_grad``: after a forward, and in a step that is not made."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        loss = loss_of(trained.model, step, shares)
        zero(trained.model)
        loss.backward()
        trained.finish()
        optimizer.step()
        zero(trained.model)
        optimizer.step()
    return weights(model)


def zero_by_module(model: nn.Module, *, set_to_none: bool = True) -> None:
    model.zero_grad(set_to_none=set_to_none)


def zero_one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_as_ever(model: nn.Module) -> None:
    """As torch's optimizers did until 1.5, and programs that copied it do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def dropping_own(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """What a backward under ``no_sync`` brings, as a generator's to its critic, is dropped by the optimizer."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        with trained.no_sync():
            loss_of(trained.model, step + 50, shares).backward()
        take_step(trained, optimizer, step, shares)
    return weights(model)


def zeroing_a_part(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Gradients of the first layer are dropped before each step, those of the others add up over all steps."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.02)
    for step in range(STEPS):
        next(model.children()).zero_grad()
        loss_of(trained.model, step, shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def setting_again(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """The program sets each gradient, in place of that of the step before."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    parameters = list(model.parameters())
    for step in range(STEPS):
        gradients = torch.autograd.grad(loss_of(trained.model, step, shares), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        trained.finish()
        optimizer.step()
    return weights(model)


def restructuring(
    wrap: Callable[[nn.Module], OneProcess], model: Any, shares: Sequence[int], change: Callable[[Any], None]
) -> Tensors:
    """The parameters get other names or places in the module right after a step."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.02)
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        if step == 0:
            change(model)
    return weights(model)


class Upper(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


def tie(model: Any) -> None:
    model[2].weight = model[0].weight


def deep() -> nn.Module:
    """So much of it that an all-gather takes a while."""
    layers = [nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3)]
    return nn.Sequential(*layers)


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class WithEmpty(nn.Module):
    """Parameters without elements, among others and as all that there is of a data type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.empty = nn.Parameter(torch.zeros(2, 0, 3))
        self.alone = nn.Parameter(torch.zeros(0, dtype=torch.float16))

    def double(self) -> WithEmpty:
        self.linear.double()
        self.empty.data = self.empty.data.double()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.empty.sum() + self.alone.sum()


def substituting(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """What wraps the module is called with tensors in place of its parameters."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.SGD, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaled = {name: parameter * 1.5 for name, parameter in trained.model.named_parameters()}
        call = partial(torch.func.functional_call, trained.model, scaled)
        mean(call((inputs(step, share),)).square().mean() for share in shares).backward()
        trained.finish()
        optimizer.step()
    return weights(model)


def stages() -> nn.Module:
    """Two networks, one after the other."""
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 3)))


def replacing(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Weights decay by hand before each step: the parameters get other memory."""
    trained = wrap(model)
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(trained.model, step, shares).backward()
        trained.finish()
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
        optimizer.step()
    return weights(model)


def scripting(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """TorchScript reads parameters by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return plainly(wrap, torch.jit.script(model), shares)


def swapping(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    """Evaluates with the average of the weights in their place, by a list of parameters of its own, as torch_ema."""
    trained = wrap(model)
    own = list(model.parameters())
    averages = [parameter.detach().clone() for parameter in own]
    optimizer = trained.optimizer(torch.optim.AdamW, lr=0.02)
    outputs = []
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
        kept = copy.deepcopy(own)
        assert {type(parameter) for parameter in kept} == {type(parameter) for parameter in own}
        for average, parameter in zip(averages, own, strict=True):
            average.lerp_(parameter.detach(), 0.3)
        for average, parameter in zip(averages, own, strict=True):
            parameter.data.copy_(average)
        with torch.no_grad():
            outputs.append(trained.model(inputs(99, 0)))
        for before, parameter in zip(kept, own, strict=True):
            parameter.data.copy_(before.detach())
    return {**weights(model), "outputs": torch.stack(outputs)}


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer, and goes half the way of each second step back."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0
        self.slow = [parameter.detach().clone() for parameter in self._parameters()]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, parameter in zip(self.slow, self._parameters(), strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def looking_ahead(wrap: Callable[[nn.Module], OneProcess], model: nn.Module, shares: Sequence[int]) -> Tensors:
    trained = wrap(model)
    optimizer = Lookahead(trained.optimizer(torch.optim.AdamW, lr=0.02))
    for step in range(STEPS):
        take_step(trained, optimizer, step, shares)
    return weights(model)


class Seldom(torch.autograd.Function):
    """A layer whose backward has no gradient for its weight in about half of the batches."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(context: Any, *slopes: torch.Tensor) -> Any:
        x, weight = context.saved_tensors
        return slopes[0] @ weight.T, None if x.sum() > 0 else x.T @ slopes[0]


class SeldomWeight(nn.Module):
    """Its own weight has no gradient in many batches, though autograd passes it in each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.net = nn.Parameter(torch.randn(WIDTH, WIDTH)), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(Seldom.apply(x.detach().requires_grad_(), self.weight))


LOOPS = {
    "attention": Loop(attention, plainly),
    "parameter list": Loop(Lists, plainly),
    "borrowed weight": Loop(Borrowed, plainly),
    "groups": Loop(mlp, grouping),
    "kept copies": Loop(mlp, keeping),
    "two steps": Loop(mlp, twice),
    "load after step": Loop(mlp, loading),
    "running mean of weights": Loop(mlp, averaging),
    "clamped weights": Loop(mlp, clamping),
    "accumulation with an overflow": Loop(Gained, scaling),
    "accumulation with an overflow, fused": Loop(Gained, partial(scaling, fused=True)),
    "overflow, gradients dropped and replaced": Loop(Gained, partial(scaling, drops=True)),
    "clipping": Loop(mlp, clipping),
    "clipping of the largest": Loop(mlp, partial(clipping, norm_type=torch.inf)),
    "resume with a schedule": Loop(mlp, resuming),
    "one cycle": Loop(mlp, cycling),
    "evaluation": Loop(attention, evaluating),
    "frozen critic": Loop(lambda: nn.Sequential(critic(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), freezing),
    "gradient penalty": Loop(critic, penalizing),
    "there and back": Loop(mlp, taking),
    "there and back by swaps": Loop(mlp, taking_by_swaps),
    "there and back, forward within no_sync": Loop(mlp, taking_within_no_sync),
    "unused head": Loop(TwoHeads, heading),
    "unused head, momentum": Loop(TwoHeads, heading_by_momentum),
    "seldom used head": Loop(SeldomHead, heading_by_momentum),
    "seldom used head, zeroed": Loop(SeldomHead, partial(heading_by_momentum, set_to_none=False)),
    "a head before and under no_sync": Loop(SeldomHead, alone_between),
    "buffers of all types": Loop(Buffers, plainly),
    "sharpness": Loop(mlp, sharpening),
    "cached gradients": Loop(mlp, caching),
    "contrast over ranks": Loop(mlp, contrasting),
    "loss with parameters": Loop(stages, classifying),
    "only adapters wrapped": Loop(Adapted, adapting),
    "wrapper bypassed": Loop(mlp, bypassing),
    "weighted by valid samples": Loop(mlp, weighting),
    "weight norm": Loop(weight_normed, plainly),
    "learning to learn": Loop(mlp, learning_to_learn),
    "truncated in time": Loop(Recurrent, unrolling),
    "gradients set by the program": Loop(mlp, combining),
    "wrapped teacher": Loop(lambda: nn.Sequential(mlp(), mlp()), distilling),
    "masked gradient": Loop(mlp, masking),
    "a rank without boxes": Loop(Boxes, detecting),
    "a rank without boxes in two batches": Loop(Boxes, partial(detecting, micros=2)),
    "encoder and decoder wrapped each": Loop(stages, chaining),
    "zeroed by the model": Loop(mlp, partial(zeroing, zero=zero_by_module)),
    "zeroed to zeros by the model": Loop(mlp, partial(zeroing, zero=partial(zero_by_module, set_to_none=False))),
    "zeroed after no_sync": Loop(mlp, dropping_own),
    "zeroed one by one": Loop(mlp, partial(zeroing, zero=zero_one_by_one)),
    "zeroed as ever": Loop(mlp, partial(zeroing, zero=zero_as_ever)),
    "zeroed in part": Loop(mlp, zeroing_a_part),
    "gradients set again": Loop(mlp, setting_again),
    "tied later": Loop(square, partial(restructuring, change=tie)),
    "parametrized later": Loop(
        deep,
        partial(restructuring, change=lambda model: register_parametrization(model[2], "weight", Upper())),
    ),
    "pruned later": Loop(deep, partial(restructuring, change=lambda model: l1_unstructured(model[2], "weight", 0.5))),
    "empty parameters": Loop(WithEmpty, plainly),
    "called with other tensors": Loop(mlp, substituting),
    "weights replaced before a step": Loop(mlp, replacing),
    "a weight without a gradient now and then": Loop(SeldomWeight, plainly),
    "the same under no_sync": Loop(SeldomWeight, accumulating),
    "TorchScript": Loop(deep, scripting),
    "an optimizer that calls another": Loop(deep, looking_ahead),
    "average in the place of weights": Loop(deep, swapping),
}
