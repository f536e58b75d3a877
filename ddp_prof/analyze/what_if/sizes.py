"""The size of each gradient, and which gradients share a bucket: from the first source that agrees with the capture.

The first three sources give the size of each bucket. The others give single gradients, and are tried in this order:

=====================  ======================================  ============================================
source                 says                                    doubt
=====================  ======================================  ============================================
ranges                 the bytes of each bucket
torch.profiler         the bytes of each collective
NCCL                   the bytes of each collective
run.json               the parameters, in their order          gradients become ready in the reverse order
copies out of buckets  each gradient, in the order of buckets  none: exact
grids                  each gradient, in the order of buckets  rounded up to what a block computes
parameters             the parameters, in their order          gradients become ready in the reverse order
=====================  ======================================  ============================================

Bytes of collectives alone do not tell the gradients in a bucket: then a prediction can only join whole buckets. Single
gradients must agree with the capture: they must add up to the bytes of each collective where these are known, or else
give as many collectives as there are, by torch's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.what_if.rules import (
    TorchRule,
    fill_until_reached,
    find_rules,
    mebibytes,
    split_at_sums,
    torch_rule_of,
)
from ddp_prof.analyze.what_if.structure import Copied, RankStructure
from ddp_prof.columns import digits
from ddp_prof.table import Floats, Ints
from ddp_prof.variants import BYTES_PER_MB

RANGES, PROFILER, NCCL, MANIFEST = "ranges", "torch.profiler", "NCCL", "run.json"
COPIES, GRIDS, PARAMETERS = "copies out of buckets", "grids of kernels", "--parameters"

NO_SIZES = (
    "how large its gradients are is not known (no ranges, no sizes of collectives, no run.json, no copies out of "
    "buckets): give --parameters FILE"
)
DISAGREES = "{source} says {have} gradients of {bytes}, which do not fit its {calls} collectives of a step{more}: {way}"
IN_REVERSE = "gradients are taken to become ready in the reverse order of the parameters"
WHOLE_BUCKETS = (
    "single gradients are not known, so buckets can be joined and not divided (--parameters FILE divides them)"
)
UNUSED = "--parameters is not used: the gradients of this capture are known from {source}"
ROUNDED = "sizes are rounded up to whole blocks of {bytes:,} bytes"
BY_RULE = "which gradients share a bucket follows from torch's rule with a cap of {cap} MiB"


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, in the order in which they are taken to become ready.

    Attributes:
        bytes: The size of each gradient; shape (gradients).
        bucket: For each gradient, the position in the step of the collective that reduces it; shape (gradients).
        source: Where the sizes are from, such as ``NCCL, run.json``.
        doubts: What is assumed about them, one line each.
        are_single: Whether these are single gradients; ``False`` if each stands for a whole bucket.
        rule: torch's rule with the caps that give these buckets; ``None`` if no caps do.
    """

    bytes: Ints
    bucket: Ints
    source: str
    doubts: tuple[str, ...]
    are_single: bool
    rule: TorchRule | None

    @property
    def buckets(self) -> list[list[int]]:
        """For each bucket, the positions of its gradients."""
        return [np.flatnonzero(self.bucket == one).tolist() for one in range(int(self.bucket.max()) + 1)]

    @property
    def bucket_bytes(self) -> Ints:
        """The size of each bucket; shape (buckets)."""
        found: Ints = np.bincount(self.bucket, weights=self.bytes).astype(np.int64)
        return found


def find_gradients(
    structure: RankStructure, manifest: Sequence[int] = (), parameters: Sequence[int] | None = None
) -> Gradients | str:
    """Return the gradients of a capture, or a text that says why they are not known.

    Args:
        structure: The steps and collectives of a rank.
        manifest: Bytes of each trained parameter in ``run.json``, in the order of ``model.parameters()``.
        parameters: The same from a file that the user gives.
    """
    # ``known``: bytes of each collective. ``tried``: for each source that does not fit the capture, what is wrong.
    known = structure.bytes if structure.sizes_from else None
    calls = structure.calls
    tried: dict[str, str] = {}

    def found(sizes: Ints, bucket: Ints, source: str, doubts: list[str]) -> Gradients:
        """Make the result; if the user gave ``parameters`` that are not used, its doubts say so first."""
        unused = (
            [] if not parameters or source == PARAMETERS else [tried.get(PARAMETERS) or UNUSED.format(source=source)]
        )
        return _gradients(structure, sizes, bucket, source, [*unused, *doubts])

    # Take the first source of single gradients that fits. Gradients become ready in the reverse order of parameters.
    for source, sizes, is_reversed in (
        (COPIES, structure.out.bytes if structure.out else None, False),
        (MANIFEST, np.array(manifest[::-1], np.int64) if len(manifest) else None, True),
        (GRIDS, structure.into.bytes if structure.into and structure.into.knows_bytes else None, False),
        (PARAMETERS, np.array(parameters[::-1], np.int64) if parameters else None, True),
    ):
        if sizes is None:
            continue
        doubts = [IN_REVERSE] if is_reversed else []
        if source == GRIDS:
            doubts.append(ROUNDED.format(bytes=_GRID_BYTES))
        bucket, said = _divide(structure, source, sizes, known)
        if bucket is None:
            more = f" ({mebibytes(int(sum(known)))})" if known is not None else ""
            way = "give the file of this model" if source == PARAMETERS else "give --parameters FILE"
            tried[source] = DISAGREES.format(
                source=source, have=len(sizes), bytes=mebibytes(int(sizes.sum())), calls=calls, more=more, way=way
            )
            continue
        return found(sizes, bucket, source, [*doubts, *said])
    if known is not None and structure.sizes_from:
        return found(known, np.arange(calls), structure.sizes_from, [WHOLE_BUCKETS])
    return list(tried.values())[-1] if tried else NO_SIZES


_GRID_BYTES = 2048
"""A block of threads copies this number of bytes, so a size that is known from the grid of a kernel is a multiple."""


def _gradients(structure: RankStructure, sizes: Ints, bucket: Ints, source: str, doubts: list[str]) -> Gradients:
    """Return the gradients with these sizes in these buckets, and torch's rule that gives the buckets, if one does."""
    single = not (len(sizes) == structure.calls and WHOLE_BUCKETS in doubts)
    buckets = [np.flatnonzero(bucket == one).tolist() for one in range(structure.calls)]
    named = source if structure.sizes_from in (None, source) else f"{structure.sizes_from}, {source}"
    return Gradients(sizes, bucket, named, tuple(doubts), single, torch_rule_of(sizes, buckets))


def _divide(structure: RankStructure, source: str, sizes: Ints, known: Ints | None) -> tuple[Ints | None, list[str]]:
    """Find the bucket of each gradient: return the buckets, and lines that say what was assumed.

    The buckets are ``None`` if these gradients do not fit the capture.

    Args:
        structure: The steps and collectives of a rank.
        source: Where the gradients are from: one of the constants of this module.
        sizes: Bytes of each gradient, in the order in which they become ready.
        known: Bytes of each collective; ``None`` if not known.
    """
    calls, into = structure.calls, structure.into
    # By the bytes of the collectives; else by the copies into buckets, if these are known; else by torch's rule.
    if known is not None:
        bucket = split_at_sums(sizes, known)
        return bucket, []
    if source == GRIDS and into is not None:
        return (into.bucket if _are_all(into.bucket, calls) else None), []
    if into is not None and _may_copy(into, sizes) and _are_all(into.bucket, calls):
        return into.bucket, []
    rules = find_rules(sizes, calls)
    if not rules:
        return None, []
    took_ns = structure.took_ns.mean(axis=0)
    filled = {rule: fill_until_reached(sizes, *rule) for rule in rules}
    of_buckets = {rule: np.array([sizes[one].sum() for one in filled[rule]], np.float64) for rule in rules}
    rule = min(rules, key=lambda rule: _misfit(of_buckets[rule], took_ns))
    bucket = np.repeat(np.arange(calls), [len(one) for one in filled[rule]])  # gradients of a bucket follow each other
    return bucket, [BY_RULE.format(cap=digits(rule[1] / BYTES_PER_MB))]


def _misfit(sizes: Floats, took_ns: Floats) -> float:
    """Return the sum of squares by which times of collectives differ from a line by their sizes that does not fall."""
    if len(sizes) < 3:  # two lie on any line
        return 0.0
    from_mean, took_ns = sizes - sizes.mean(), took_ns - took_ns.mean()
    if not from_mean.any():
        return float(took_ns @ took_ns)
    slope = max(0.0, float(from_mean @ took_ns) / float(from_mean @ from_mean))
    return float(((took_ns - slope * from_mean) ** 2).sum())


def _may_copy(into: Copied, sizes: Ints) -> bool:
    """Return whether the kernels that copy into buckets may copy gradients of these sizes, one after the other.

    Where their grids do not tell the sizes, as of a recent torch, a thread computes four numbers or eight.
    """
    if into.knows_bytes:
        return np.array_equal(-(-sizes // _GRID_BYTES) * _GRID_BYTES, into.bytes)  # rounded up, as by grids
    if len(into.bytes) != len(sizes):
        return False
    return bool(np.all((into.bytes - _GRID_BYTES < sizes) & (sizes <= 2 * into.bytes)))


def _are_all(bucket: Ints, calls: int) -> bool:
    """Return whether each collective has a gradient, none is later than the last one, and buckets follow in order."""
    return bool(np.array_equal(np.unique(bucket), np.arange(calls)) and np.all(np.diff(bucket) >= 0))
