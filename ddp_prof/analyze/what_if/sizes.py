"""How large each gradient is, and which share a bucket today: from the first source that agrees with the capture.

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

Bytes of collectives alone do not divide a bucket: then whole buckets can only be joined. Where a source says single
gradients, these must sum to the bytes of each collective that another one says, or give as many calls by a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.what_if.rules import (
    TorchRule,
    fill_until_reached,
    find_rule,
    mebibytes,
    split_at_sums,
    torch_rule_of,
)
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.table import UNKNOWN, Ints
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
BY_RULE = "which gradients share a bucket follows from torch's rule with a cap of {cap:.3g} MiB"


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, in the order in which they are taken to become ready.

    Attributes:
        bytes: Of each.
        bucket: The position of the collective that reduces it; shape (gradients).
        source: What says so; ``doubts``: what is assumed, a line each.
        are_single: Whether they are single gradients, and not whole buckets.
        rule: What of torch's rule gives these buckets; ``None`` if it does not.
    """

    bytes: Ints
    bucket: Ints
    source: str
    doubts: tuple[str, ...]
    are_single: bool
    rule: TorchRule | None

    @property
    def buckets(self) -> list[list[int]]:
        return [np.flatnonzero(self.bucket == one).tolist() for one in range(int(self.bucket.max()) + 1)]

    @property
    def bucket_bytes(self) -> Ints:
        found: Ints = np.bincount(self.bucket, weights=self.bytes).astype(np.int64)
        return found


def find_gradients(
    structure: RankStructure, manifest: Sequence[int] = (), parameters: Sequence[int] | None = None
) -> Gradients | str:
    """The gradients of a capture; a text says why they are not known.

    Args:
        structure: Of a rank.
        manifest: Bytes of the trained parameters in ``run.json``, in the order of ``model.parameters()``.
        parameters: The same from a file of the user's.
    """
    known = structure.bytes if structure.sizes_from else None
    calls = structure.calls
    tried: dict[str, str] = {}

    def found(sizes: Ints, bucket: Ints, source: str, doubts: list[str]) -> Gradients:
        unused = (
            [] if not parameters or source == PARAMETERS else [tried.get(PARAMETERS) or UNUSED.format(source=source)]
        )
        return _gradients(structure, sizes, bucket, source, [*unused, *doubts])

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


def _gradients(structure: RankStructure, sizes: Ints, bucket: Ints, source: str, doubts: list[str]) -> Gradients:
    single = not (len(sizes) == structure.calls and WHOLE_BUCKETS in doubts)
    buckets = [np.flatnonzero(bucket == one).tolist() for one in range(structure.calls)]
    named = source if structure.sizes_from in (None, source) else f"{structure.sizes_from}, {source}"
    return Gradients(sizes, bucket, named, tuple(doubts), single, torch_rule_of(sizes, buckets))


def _divide(structure: RankStructure, source: str, sizes: Ints, known: Ints | None) -> tuple[Ints | None, list[str]]:
    """The bucket of each gradient, and what was assumed; ``None`` if they do not fit the capture."""
    calls, into = structure.calls, structure.into
    if known is not None:
        bucket = split_at_sums(sizes, known)
        return bucket, []
    if source == GRIDS and into is not None:
        return (into.bucket if _are_all(into.bucket, calls) else None), []
    if (
        into is not None
        and into.knows_bytes
        and np.array_equal(-(-sizes // _GRID_BYTES) * _GRID_BYTES, into.bytes)
        and _are_all(into.bucket, calls)
    ):
        return into.bucket, []
    rule = find_rule(sizes, calls)
    if rule is None:
        return None, []
    bucket = np.full(len(sizes), UNKNOWN, np.int64)
    for position, members in enumerate(fill_until_reached(sizes, *rule)):
        bucket[members] = position
    return bucket, [BY_RULE.format(cap=rule[1] / BYTES_PER_MB)]


def _are_all(bucket: Ints, calls: int) -> bool:
    """Whether each collective has a gradient, and none comes after the last one."""
    return bool(np.array_equal(np.unique(bucket), np.arange(calls)) and np.all(np.diff(bucket) >= 0))
