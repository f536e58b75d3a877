"""Runs ordinary training loops with torch's classes and ours, and shows which of them train as one process does.

    python scripts/dev/compare_loops.py           # print the table in Markdown
    python scripts/dev/compare_loops.py --write   # put it into docs/compared_with_ddp.md

The loops are those of tests/ddp, with gloo on the CPU. A cell is *right* if all results of the loop equal those of one
process on the samples of all ranks; *wrong* if they do not and there was no error.
"""

# ruff: noqa: E402  # what is imported from tests/ is found only after the path is set
from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.ddp import VARIANTS
from tests.ddp import loops, test_unfinished
from tests.ddp.gloo_ranks import run_ranks

PAGE = ROOT / "docs/compared_with_ddp.md"
BEGIN = "<!-- made by scripts/dev/compare_loops.py -->"
END = "<!-- end -->"
TIMEOUT_S = 20
TOLERANCE = 1e-9
Wrap = Callable[[nn.Module], loops.OneProcess]


class TorchLoop(loops.OneProcess):
    """DistributedDataParallel."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)
        self.model = self.ddp = DistributedDataParallel(module, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()


class TorchShardedOptimizerLoop(TorchLoop):
    """DistributedDataParallel with ZeroRedundancyOptimizer."""

    def optimizer(
        self, cls: Callable[..., torch.optim.Optimizer], groups: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(groups or self.parameters(), cls, **options)

    def saved(self, optimizer: Any) -> Any:
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(rank)
            if rank == dist.get_rank():
                state = copy.deepcopy(optimizer.state_dict())
        return state


class TorchFullyShardedLoop(loops.OneProcess):
    """``fully_shard`` on each block and on the whole model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        blocks = [each for listed in module.modules() if isinstance(listed, nn.ModuleList) for each in listed]
        for unit in (*blocks, module):
            fully_shard(unit, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)


def our_loop(key: str, module: nn.Module, **options: Any) -> loops.Variant:
    return loops.Variant(VARIANTS[key](module, **options))


def our_sharded_loop(module: nn.Module) -> loops.Divided:
    return loops.Divided(VARIANTS["overlap"](module))


COLUMNS: dict[str, list[Wrap]] = {
    "DDP": [TorchLoop],
    "DDP, `ZeroRedundancyOptimizer`": [TorchShardedOptimizerLoop],
    "FSDP2": [TorchFullyShardedLoop],
    "`naive` to `bucketed`": [
        partial(our_loop, "naive"),
        partial(our_loop, "flat"),
        partial(our_loop, "overlap"),
        partial(our_loop, "bucketed", bucket_size_mb=0.0005),
    ],
    "`overlap`, `ShardedOptimizer`": [our_sharded_loop],
    "`sharded`": [partial(our_loop, "sharded", bucket_size_mb=0.0005)],
}


class Row(NamedTuple):
    """A loop, its number of ranks, and the options that DDP needs for it."""

    loop: loops.Loop
    world: int = 2
    ddp_options: Mapping[str, Any] = {}


UNUSED = {"find_unused_parameters": True}
ROWS = {
    "GAN: the generator's loss brings gradients to the critic": Row(test_unfinished.LOOPS["adversaries"]),
    "the loss is not a number: `zero_grad()`, no step": Row(test_unfinished.LOOPS["skipped"], 2, UNUSED),
    "`zero_grad()` between two backwards of one forward": Row(test_unfinished.LOOPS["between"]),
    "two optimizers; the gradients of one part are dropped between backwards": Row(test_unfinished.LOOPS["partly"]),
    "auxiliary loss of another expert on each of four ranks": Row(test_unfinished.LOOPS["auxiliary"], 4, UNUSED),
    "accumulation, `GradScaler`, an overflow on one of four ranks": Row(
        loops.LOOPS["accumulation with an overflow"], 4
    ),
    "`clip_grad_norm_`": Row(loops.LOOPS["clipping"]),
    "`clip_grad_norm_`, largest value": Row(loops.LOOPS["clipping of the largest"]),
    "weight decay for matrices, none for biases": Row(loops.LOOPS["groups"]),
    "multi-head attention": Row(loops.LOOPS["attention"]),
    "`ParameterList`, `ParameterDict`": Row(loops.LOOPS["parameter list"]),
    "a layer's weight is read by another": Row(loops.LOOPS["borrowed weight"]),
    "`load_state_dict` after a step": Row(loops.LOOPS["load after step"]),
    "weights are averaged after each step": Row(loops.LOOPS["running mean of weights"]),
    "weights are clamped after each step": Row(loops.LOOPS["clamped weights"]),
    "`deepcopy` of the module after each step": Row(loops.LOOPS["kept copies"]),
    "evaluation after each step": Row(loops.LOOPS["evaluation"]),
    "two steps on one gradient": Row(loops.LOOPS["two steps"]),
    "resume with a schedule": Row(loops.LOOPS["resume with a schedule"]),
    "`OneCycleLR`": Row(loops.LOOPS["one cycle"]),
    "GAN: the critic is frozen while the generator trains": Row(loops.LOOPS["frozen critic"]),
    "gradient penalty: `autograd.grad(create_graph=True)`": Row(loops.LOOPS["gradient penalty"]),
    "the loss uses one of two heads, weights decay": Row(loops.LOOPS["unused head"], 2, UNUSED),
    "buffers of int16, float8, complex64": Row(loops.LOOPS["buffers of all types"]),
    "module and gradients get other memory after each step": Row(loops.LOOPS["there and back"]),
    "one of two heads is used in each third step, momentum": Row(loops.LOOPS["seldom used head"], 2, UNUSED),
    "sharpness-aware minimization: two passes, weights moved between": Row(loops.LOOPS["sharpness"]),
    "GradCache: chunks run again with the gradients of their outputs": Row(loops.LOOPS["cached gradients"]),
    "a loss over the embeddings of all ranks": Row(loops.LOOPS["contrast over ranks"]),
    "the loss has parameters and is wrapped, too": Row(loops.LOOPS["loss with parameters"]),
    "only a list of adapters is wrapped, the model is called": Row(loops.LOOPS["only adapters wrapped"]),
    "the module is called instead of what wraps it": Row(loops.LOOPS["wrapper bypassed"]),
    "the loss is weighted by the valid samples of all ranks": Row(loops.LOOPS["weighted by valid samples"]),
    "`weight_norm`, old and new": Row(loops.LOOPS["weight norm"]),
    "MAML: `functional_call`, differentiated through a step": Row(loops.LOOPS["learning to learn"]),
    "LSTM, truncated backpropagation through time": Row(loops.LOOPS["truncated in time"]),
    "gradient surgery: the program sets gradients": Row(loops.LOOPS["gradients set by the program"]),
    "the frozen teacher is wrapped, too": Row(loops.LOOPS["wrapped teacher"]),
    "a hook masks rows of a gradient": Row(loops.LOOPS["masked gradient"]),
    "one rank's batch has no boxes": Row(loops.LOOPS["a rank without boxes"], 2, UNUSED),
    "encoder and decoder are wrapped each": Row(loops.LOOPS["encoder and decoder wrapped each"]),
    "`model.zero_grad()`, not the optimizer's": Row(loops.LOOPS["zeroed by the model"]),
    "a layer is parametrized after it was wrapped": Row(loops.LOOPS["parametrized later"]),
}


def try_rows(rank: int, wrap: Wrap, names: Sequence[str]) -> dict[str, loops.Tensors | str]:
    """Return the result of each loop on this rank, or its error, after which the group is not used any more."""
    found: dict[str, loops.Tensors | str] = {}
    for name in names:
        row = ROWS[name]
        options = row.ddp_options if wrap in (TorchLoop, TorchShardedOptimizerLoop) else {}
        try:
            found[name] = loops.run(row.loop, partial(wrap, **options), [rank])
        except Exception as error:
            return {**found, name: f"{type(error).__name__}: {str(error).splitlines()[0]}".replace("`", "")}
    return found


def outcomes(wrap: Wrap, names: Sequence[str], world: int) -> dict[str, str]:
    if not names:
        return {}
    try:
        ranks = run_ranks(partial(try_rows, wrap=wrap, names=names), world, TIMEOUT_S)
        is_answered = None not in ranks
    except AssertionError:  # no rank answered
        is_answered = False
    if not is_answered and len(names) == 1:
        return {names[0]: "hangs or ends the process"}
    if not is_answered:
        return {name: ending for each in names for name, ending in outcomes(wrap, [each], world).items()}
    found: dict[str, str] = {}
    for name in names:
        answers = [answered[name] for answered in ranks if name in answered]
        found[name] = judge(answers, expected(name))
        if any(isinstance(answer, str) for answer in answers):  # the group is not used after an error
            break
    return {**found, **outcomes(wrap, names[len(found) :], world)}


@cache
def expected(name: str) -> loops.Tensors:
    return loops.run(ROWS[name].loop, loops.OneProcess, range(ROWS[name].world))


def judge(answers: Sequence[loops.Tensors | str], right: loops.Tensors) -> str:
    """Return ``right``, ``wrong``, or the error of the first rank that has one."""
    for answer in answers:
        if isinstance(answer, str):
            return answer
        if not all(
            torch.allclose(answer[name], value, rtol=TOLERANCE, atol=TOLERANCE) for name, value in right.items()
        ):
            return "**wrong**"
    return "right"


def make_table() -> str:
    """Return the table: a row per loop, a column per way to train; errors are numbered and listed below it."""
    ends = {column: [try_all(wrap) for wrap in wraps] for column, wraps in COLUMNS.items()}
    lines = [f"| loop | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    errors: list[str] = []
    for name in ROWS:
        cells = []
        for column in COLUMNS:
            (ending,) = {found[name] for found in ends[column]}  # all variants of a column must agree
            if ": " in ending:
                errors += [] if ending in errors else [ending]
                ending = f"error {errors.index(ending) + 1}"
            cells.append(ending)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {error}" for number, error in enumerate(errors, 1))])


def try_all(wrap: Wrap) -> dict[str, str]:
    found = {}
    for world in sorted({row.world for row in ROWS.values()}):
        found |= outcomes(wrap, [name for name, row in ROWS.items() if row.world == world], world)
    return found


def main() -> int:
    table = f"{BEGIN}\n{make_table()}\n{END}"
    if "--write" not in sys.argv[1:]:
        print(table)
        return 0
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
