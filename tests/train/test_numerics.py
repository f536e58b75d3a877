"""Precision, compilation and checkpointing: what is computed stays what it was, and the run says what was asked for."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ddp_prof.errors import WorkloadError
from ddp_prof.manifest import Manifest, load_manifest
from ddp_prof.train import MODEL_SIZES
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.run import check_numerics, set_numerics
from ddp_prof.train.workload import TransformerLM, autocast, make_tokens
from tests.train.forked import train
from tests.train.test_workload import SMALL

CPU = torch.device("cpu")


def model(*, checkpoint: bool = False) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(MODEL_SIZES["tiny"], checkpoint_blocks=checkpoint)


def gradients(trained: TransformerLM, precision: str = "fp32") -> dict[str, torch.Tensor]:
    tokens = make_tokens(1, 2, 16, seed=0)[0]
    with autocast(CPU, precision):
        loss = functional.cross_entropy(trained(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return {name: item.grad for name, item in trained.named_parameters() if item.grad is not None}


def test_checkpointing_changes_no_gradient_and_fires_each_hook_once() -> None:
    fired: list[str] = []
    trained = model(checkpoint=True)
    for name, item in trained.named_parameters():
        item.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    found, wanted = gradients(trained), gradients(model())
    assert found.keys() == wanted.keys() == set(fired)
    assert len(fired) == len(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


def test_checkpointing_keeps_less() -> None:
    def kept_bytes(trained: TransformerLM) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {parameter.untyped_storage().data_ptr() for parameter in trained.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trained(torch.zeros(2, 16, dtype=torch.int64))
        return sum(size for pointer, size in sizes.items() if pointer not in own)

    assert kept_bytes(model(checkpoint=True)) < kept_bytes(model()) / 2


def test_bf16_rounds_the_products_and_keeps_float32_gradients() -> None:
    found, wanted = gradients(model(), "bf16"), gradients(model())
    assert {value.dtype for value in found.values()} == {torch.float32}
    name = "blocks.0.feed_forward.w2.weight"
    assert not torch.equal(found[name], wanted[name])
    torch.testing.assert_close(found[name], wanted[name], rtol=0.1, atol=0.02 * float(wanted[name].abs().max()))


def test_tf32_is_of_gpus() -> None:
    arguments = parse_arguments(["--variant", "flat", "--tf32"])
    check_numerics(arguments, torch.device("cuda", 0))
    with pytest.raises(WorkloadError, match="--tf32: only GPUs compute in TF32"):
        check_numerics(arguments, CPU)
    before = torch.get_float32_matmul_precision()
    try:
        set_numerics(model(), arguments)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_compiling_takes_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(WorkloadError, match="needs a C\\+\\+ compiler"):
        check_numerics(parse_arguments(["--variant", "flat", "--compile"]), CPU)


@pytest.mark.parametrize(("word", "compiled"), [("blocks", [False, True, True]), ("model", [True, False, False])])
def test_what_is_compiled(word: str, compiled: list[bool]) -> None:
    trained = model()
    set_numerics(trained, parse_arguments(["--variant", "flat", "--compile", word]))
    modules = [trained, *trained.blocks.children()]
    assert [module._compiled_call_impl is not None for module in modules] == compiled


@pytest.mark.parametrize("word", ["blocks", pytest.param("model", marks=pytest.mark.nightly)])
def test_compiled_gradients_are_the_same(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, differentiated and run, all but the code generator: that takes a minute on a slow machine."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    trained = model()
    set_numerics(trained, parse_arguments(["--variant", "flat", "--compile", word]))
    fired: list[str] = []
    for name, item in trained.named_parameters():
        item.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    found, wanted = gradients(trained), gradients(model())
    assert sorted(fired) == sorted(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def finished(tmp_path: Path, *argv: str) -> Manifest:
    path = tmp_path / f"{'_'.join(argv)}.run.json"
    train("--variant", "overlap", *SMALL, *argv, "--run-json", path)
    manifest = load_manifest(path)
    assert manifest is not None
    return manifest


@pytest.mark.nightly
def test_a_run_with_checkpoints_ends_where_one_without_does(tmp_path: Path) -> None:
    plain, checkpointed = finished(tmp_path), finished(tmp_path, "--activation-checkpointing", "--precision", "fp32")
    assert checkpointed.final_loss == pytest.approx(plain.final_loss, rel=1e-6)
    assert (plain.options["activation_checkpointing"], checkpointed.options["activation_checkpointing"]) == (0, 1)
    assert (plain.options["precision"], plain.options["tf32"], plain.options["compile"]) == ("fp32", False, None)


def test_what_was_asked_for_is_in_the_record(tmp_path: Path) -> None:
    options = finished(tmp_path, "--activation-checkpointing", "--precision", "bf16").options
    assert (options["activation_checkpointing"], options["precision"]) == (1, "bf16")
    assert (options["tf32"], options["compile"]) == (False, None)
