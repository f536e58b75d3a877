"""``--inject one-bucket``: all gradients are in one bucket, whatever size is asked for."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from ddp_prof.ddp import BucketedDDP
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.train.run import make_variant


@pytest.mark.parametrize(("inject", "buckets"), [([], 4), (["--inject", "one-bucket"], 1)])
def test_one_bucket_holds_all_gradients(inject: list[str], buckets: int) -> None:
    arguments = parse_arguments(["--variant", "bucketed", "--bucket-size-mb", "0.001", *inject])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        variant = make_variant(arguments, nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))))
    finally:
        dist.destroy_process_group()
    assert isinstance(variant, BucketedDDP)
    assert len(variant.assignment) == buckets
