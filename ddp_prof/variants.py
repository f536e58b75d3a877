"""The data-parallel variants: their names, order and properties; needs no torch.

A new variant is a row of :data:`VARIANTS` and a class in ``ddp_prof.ddp``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTES_PER_MB = 2**20
"""Bytes of one unit of ``bucket_size_mb``: a MiB, as in torch's ``bucket_cap_mb``."""
BASELINE = "naive"
"""The variant over which speed-ups are computed."""
BUCKETED = "bucketed"
"""The variant that is measured with several bucket sizes."""


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """Properties of a variant, known without its class.

    Attributes:
        takes_bucket_size: Whether the variant has an option for the cap of a bucket.
        default_bucket_size_mb: Default cap of a bucket; ``None``: torch's own default, or the variant takes no size.
        can_be_uncapped: Whether ``bucket_size_mb = None`` means that all gradients share one bucket.
        computes_as_naive: Whether a step does the same computation as a step of ``naive``. Variants that shard states
            or parameters do not.
    """

    takes_bucket_size: bool = False
    default_bucket_size_mb: float | None = None
    can_be_uncapped: bool = False
    computes_as_naive: bool = True


VARIANTS: dict[str, VariantInfo] = {
    "naive": VariantInfo(),
    "flat": VariantInfo(),
    "overlap": VariantInfo(),
    BUCKETED: VariantInfo(takes_bucket_size=True, default_bucket_size_mb=25.0, can_be_uncapped=True),
    "torch": VariantInfo(takes_bucket_size=True),
    "sharded": VariantInfo(
        takes_bucket_size=True, default_bucket_size_mb=25.0, can_be_uncapped=True, computes_as_naive=False
    ),
    "fsdp": VariantInfo(computes_as_naive=False),
}
"""The variants in the order of tables and figures; up to ``bucketed``, each improves on the variant before it."""
VARIANT_NAMES = tuple(VARIANTS)
UNKNOWN_VARIANT = VariantInfo()
"""What is assumed about a variant that only a later version knows."""
COMM_HOOKS = ("bf16", "powersgd")
"""Communication hooks that torch's DDP can be given."""


def variant_label(name: str, bucket_size_mb: float | None, extras: Sequence[str] = ()) -> str:
    """Return the label of a variant: ``overlap``, ``bucketed 10 MB``, ``bucketed no cap``, ``torch + bf16``.

    ``name`` may be a variant that only a later version has.
    """
    label = name if bucket_size_mb is None else f"{name} {bucket_size_mb:g} MB"
    if bucket_size_mb is None and VARIANTS.get(name, UNKNOWN_VARIANT).can_be_uncapped:
        label = f"{name} no cap"
    return " + ".join([label, *extras])


def without_folder(label: str) -> str:
    """Return the label of a run without the folder that tells it from another run: ``naive`` for ``before/naive``."""
    return label.rpartition("/")[2]


def is_baseline(label: str) -> bool:
    """Return whether the label of a run is that of the baseline, in whichever folder."""
    return without_folder(label) == BASELINE


def variant_and_size(label: str) -> tuple[str, float | None]:
    """Return the variant and the bucket size, ``None`` without one, in a run's label; see :func:`variant_label`."""
    name, _, rest = without_folder(label).partition(" ")
    size = _SIZE.match(rest)
    return name, float(size[1]) if size else None


_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]\d+)?) MB(?: \+ |$)")
"""A bucket size in a label, behind the name."""


def variant_extras(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return short labels of options that change a variant: ``bf16``, ``no communication hook``.

    Older captures may have the options ``compression`` and ``step_in_backward``.
    """
    words = (options.get(name) for name in ("comm_hook", "compression"))
    flags = ("no_communication_hook", "gradient_as_bucket_view", "step_in_backward")
    return (
        *(word for word in words if isinstance(word, str)),
        *(flag.replace("_", " ") for flag in flags if options.get(flag) is True),
    )


def variant_position(name: str) -> int:
    """Return the position of a variant in :data:`VARIANTS`; an unknown variant comes after all known ones."""
    return VARIANT_NAMES.index(name) if name in VARIANTS else len(VARIANTS)


def variant_order(name: str, bucket_size_mb: float | None) -> tuple[int, str, float]:
    """Return a sort key for variants: their order, then the bucket size; no cap comes last."""
    if bucket_size_mb is None:
        bucket_size_mb = math.inf if VARIANTS.get(name, UNKNOWN_VARIANT).can_be_uncapped else 0.0
    return variant_position(name), name, bucket_size_mb
