"""Two runs of one variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.variants.before_after import PartChange
    from ddp_prof.runs.run import Run


def are_one_variant(runs: Sequence[Run]) -> bool:
    """Whether runs are of one variant with one size of buckets, or do not say what they are."""
    kinds = {(run.manifest.variant, run.manifest.bucket_size_mb) if run.manifest else None for run in runs}
    return len(kinds) == 1


def changes_between(before: Run, after: Run) -> tuple[PartChange, ...]:
    """What changed from one run to another, and which collective did it."""
    from ddp_prof.analyze.variants.before_after import compare_before_after

    for run in (before, after):
        run.prepare("collectives", "kernels")
    return compare_before_after((before.analysis(), before.kernels()), (after.analysis(), after.kernels()))
