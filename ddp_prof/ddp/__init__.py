"""The data-parallel variants that are studied: each is a module that wraps a model and averages its gradients."""

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
"""The class of each variant, by the variant's name on the command line; ``ddp_prof.variants`` has their properties."""

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
