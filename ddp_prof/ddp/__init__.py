"""The data-parallel variants that are studied."""

from ddp_prof.ddp.base import DataParallel
from ddp_prof.ddp.bucketed import BucketedDDP
from ddp_prof.ddp.flat import FlatDDP
from ddp_prof.ddp.naive import NaiveDDP
from ddp_prof.ddp.overlap import OverlapDDP
from ddp_prof.ddp.reference import TorchDDP

VARIANTS: dict[str, type[DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": BucketedDDP,
    "torch": TorchDDP,
}
"""Variant by key, in the order in which each improves on the one before; last the reference."""

__all__ = ["VARIANTS", "BucketedDDP", "DataParallel", "FlatDDP", "NaiveDDP", "OverlapDDP", "TorchDDP"]
