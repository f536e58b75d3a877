"""One description of a run, and the forms that follow from it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.capture.variant import read_plan
from ddp_prof.manifest import Manifest
from ddp_prof.run_config import MANIFEST_FIELDS, RunConfig
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.variants import VARIANTS

CONFIG = RunConfig(variant="bucketed", bucket_size_mb=2.5, model_size="tiny", world_size=2, batch_size=6, seq_len=16)


def configs() -> st.SearchStrategy[RunConfig]:
    """Runs that the command line allows."""
    counts = st.integers(1, 64)
    return st.builds(
        RunConfig,
        variant=st.sampled_from([name for name, variant in VARIANTS.items() if variant.default_bucket_size_mb is None]),
        find_unused_parameters=st.booleans(),
        model_size=st.sampled_from(["tiny", "mini", "xl"]),
        batch_size=counts,
        seq_len=counts,
        steps=counts,
        warmup=counts,
        synchronized_steps=st.integers(0, 9),
        seed=st.integers(0, 2**31),
        world_size=st.none() | counts,
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        backend=st.sampled_from(["auto", "gloo", "nccl"]),
        ranks_per_gpu=st.none() | counts,
        timeout=st.sampled_from([120.0, 0.5]),
        precision=st.sampled_from(["fp32", "bf16"]),
        tf32=st.booleans(),
        compile=st.sampled_from([None, "blocks", "model"]),
        activation_checkpointing=st.booleans(),
    )


@given(configs())
def test_the_command_line_says_all_of_a_run(config: RunConfig) -> None:
    read = parse_arguments(config.argv())
    assert {field.name: getattr(read, field.name) for field in fields(RunConfig)} == {
        field.name: getattr(config, field.name) for field in fields(RunConfig)
    }


@pytest.mark.parametrize(
    ("variant", "size", "words"),
    [
        ("naive", None, []),
        ("bucketed", 10.0, ["--bucket-size-mb", "10"]),
        ("bucketed", 2.5, ["--bucket-size-mb", "2.5"]),
        ("bucketed", None, ["--bucket-size-mb", "none"]),
        ("torch", None, []),
        ("torch", 10.0, ["--bucket-size-mb", "10"]),
    ],
)
def test_bucket_sizes(variant: str, size: float | None, words: list[str]) -> None:
    config = RunConfig(variant=variant, bucket_size_mb=size)
    assert config.argv()[2:4] == words or not words
    assert "--bucket-size-mb" in config.argv() or not words
    assert parse_arguments(config.argv()).bucket_size_mb == size


def test_a_hook_of_torchs_is_part_of_the_name() -> None:
    config = RunConfig(variant="torch", bucket_size_mb=10.0, comm_hook="powersgd")
    assert config.argv()[4:6] == ["--comm-hook", "powersgd"]
    assert parse_arguments(config.argv()).manifest_options() == config.manifest_options()
    assert config.label == "torch 10 MB + powersgd"


def test_ddp_as_it_is_has_a_name_of_its_own() -> None:
    config = RunConfig(variant="torch", no_communication_hook=True)
    assert config.label == "torch + no communication hook"


def test_views_of_buckets_are_part_of_the_name() -> None:
    config = RunConfig(variant="torch", gradient_as_bucket_view=True)
    assert parse_arguments(config.argv()).manifest_options() == config.manifest_options()
    assert config.label == "torch + gradient as bucket view"


def test_the_capture_script_is_told_the_same_run() -> None:
    unrelated = {"MODEL_SIZE": "xl", "BATCH_SIZE": "64", "SEQ_LEN": "7", "STEPS": "3", "WARMUP": "4"}
    plan = read_plan(CONFIG.script_argv(), {"NGPU": "2", "DEVICE": "cpu", **unrelated})
    assert plan.name == "bucketed_2.5mb"
    assert parse_arguments(plan.workload).argv() == replace(CONFIG, device="cpu").argv()


def test_the_manifest_has_what_was_asked_for_under_its_own_names() -> None:
    assert set(MANIFEST_FIELDS) <= {field.name for field in fields(Manifest)}
    assert set(MANIFEST_FIELDS) <= {field.name for field in fields(RunConfig)}
    assert "inject" not in CONFIG.manifest_options()
    assert CONFIG.manifest_options()["lr"] == 1e-3


def test_a_row_has_the_batch_of_one_rank() -> None:
    assert CONFIG.row_fields() == {
        "variant": "bucketed", "bucket_size_mb": 2.5, "model_size": "tiny", "world_size": 2, "local_batch_size": 3,
        "seq_len": 16, "warmup": 5, "steps": 10,
    }  # fmt: skip


def test_what_a_sweep_says_of_a_run() -> None:
    assert str(CONFIG) == "bucketed 2.5 MB, tiny, 2 ranks, 3 x 16 tokens each"
