"""The data-parallel variants that are studied."""

from ddp_prof.ddp.all_reduce import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddp_prof.ddp.base import DataParallel
from ddp_prof.ddp.reference import FullyShardedDDP, TorchDDP
from ddp_prof.ddp.sharded import ShardedDDP
from ddp_prof.ddp.sharded_optimizer import ShardedOptimizer

VARIANTS: dict[str, type[DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
    "sharded": ShardedDDP,
    "fsdp": FullyShardedDDP,
}
"""Variant by key; order and properties are in ``ddp_prof.variants``."""

__all__ = [
    "VARIANTS",
    "BucketedDDP",
    "DataParallel",
    "FlatDDP",
    "FullyShardedDDP",
    "NaiveDDP",
    "OverlapDDP",
    "ShardedDDP",
    "ShardedOptimizer",
    "TorchDDP",
]
