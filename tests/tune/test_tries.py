"""What is asked for by ``--try``, and the line to write for it."""

from __future__ import annotations

import pytest

from ddp_prof.errors import UsageError
from ddp_prof.tune.tries import TODAY, parse_tries


def labels(*texts: str) -> list[str]:
    return [tried.label for tried in parse_tries(texts)]


def test_several_values_are_several_tries() -> None:
    assert labels("bucket_cap_mb=5,25,0.5") == ["bucket_cap_mb=5", "bucket_cap_mb=25", "bucket_cap_mb=0.5"]


def test_one_try_has_one_name_and_another_has_another() -> None:
    """Runs of two sizes that agree in six digits were taken for those of one; order made two tries of one."""
    assert labels("bucket_cap_mb=1.0000001,1.0000002") == ["bucket_cap_mb=1.0000001", "bucket_cap_mb=1.0000002"]
    assert len(parse_tries(["A=1+B=2", "B=2+A=1", "A=1+B=1", "A=1+B=2"])) == 2


def test_a_name_alone_is_true() -> None:
    (tried,) = parse_tries(["gradient_as_bucket_view"])
    assert tried.arguments("ddp") == {"gradient_as_bucket_view": True}
    assert tried.line == "DistributedDataParallel(model, gradient_as_bucket_view=True)"


def test_settings_together() -> None:
    assert labels("bucket_cap_mb=5,50+static_graph") == [
        "bucket_cap_mb=5 + static_graph=True",
        "bucket_cap_mb=50 + static_graph=True",
    ]
    (tried,) = parse_tries(["bucket_cap_mb=50+static_graph+CUDA_DEVICE_MAX_CONNECTIONS=8"])
    assert tried.line == (
        "DistributedDataParallel(model, bucket_cap_mb=50, static_graph=True) and export CUDA_DEVICE_MAX_CONNECTIONS=8"
    )


def test_each_has_its_place() -> None:
    ddp, sharded, variable = parse_tries(["static_graph=false", "reshard_after_forward=false", "NCCL_ALGO=Ring"])
    assert (ddp.arguments("ddp"), ddp.arguments("fsdp"), ddp.environment) == ({"static_graph": False}, {}, {})
    assert sharded.arguments("fsdp") == {"reshard_after_forward": False}
    assert sharded.line == "fully_shard(module, reshard_after_forward=False)"
    assert (variable.environment, variable.line) == ({"NCCL_ALGO": "Ring"}, "export NCCL_ALGO=Ring")


def test_the_same_try_is_made_once() -> None:
    assert labels("bucket_cap_mb=5,5.0", "bucket_cap_mb=5") == ["bucket_cap_mb=5"]


def test_what_is_set_by_a_method_has_a_line_of_its_own() -> None:
    (ahead,) = parse_tries(["backward_prefetch=2+reshard_after_forward=false"])
    assert ahead.line == (
        "fully_shard(module, reshard_after_forward=False) and module.set_modules_to_backward_prefetch("
        "[the 2 modules that run next in backward]) for each module of fully_shard"
    )
    assert labels("forward_prefetch") == ["forward_prefetch=1"]
    (compressed,) = parse_tries(["comm_hook=BF16_compress+bucket_cap_mb=50"])
    assert compressed.line == (
        "DistributedDataParallel(model, bucket_cap_mb=50) and "
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    )
    assert [one.changes_numerics for one in (ahead, compressed)] == [False, True]


def test_today_is_without_settings() -> None:
    assert (TODAY.label, TODAY.line, TODAY.environment) == ("today", "", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucket_cap=5", "give one of bucket_cap_mb"),
        ("bucket_cap_mb", "a number of MiB above 0 is needed"),
        ("bucket_cap_mb=0", "a number of MiB"),
        ("bucket_cap_mb=nan", "a number of MiB"),
        ("bucket_cap_mb=5,", "a number of MiB"),
        ("static_graph=maybe", "true or false"),
        ("static_graph=none", "true or false"),
        ("comm_hook", "one of fp16_compress, bf16_compress, powerSGD is needed"),
        ("comm_hook=mine", "one of fp16_compress, bf16_compress, powerSGD is needed"),
        ("forward_prefetch=0", "a number of modules above 0"),
        ("backward_prefetch=1.5", "a number of modules above 0"),
        ("NCCL_ALGO", "NAME=value"),
        ("", "give one of"),
        ("static_graph+static_graph=false", "sets one name twice"),
        ("A=" + ",".join(map(str, range(51))), "51 tries are too many"),
        ("a\x1bb=1", r"a\x1bb=1"),
    ],
)
def test_what_cannot_be_tried(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_tries([text])
    assert said in str(raised.value)
