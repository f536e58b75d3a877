"""Two runs of one variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_prof.runs.run import Run, prepare_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.variants.before_after import PartChange


def are_one_variant(runs: Sequence[Run]) -> bool:
    """Whether runs are of one variant with one size of buckets, or do not say what they are."""
    kinds = {(run.manifest.variant, run.manifest.bucket_size_mb) if run.manifest else None for run in runs}
    return len(kinds) == 1


def changes_between(before: Run, after: Run, others: Sequence[Run] = ()) -> tuple[PartChange, ...]:
    """What changed from one run to another, and which collective did it.

    Args:
        before: A run.
        after: Another one of its variant.
        others: Runs that contention is measured against, too, as it is where they are all compared.
    """
    from ddp_prof.analyze.variants.before_after import compare_before_after

    runs = [before, after, *(run for run in others if run not in (before, after))]
    prepare_runs(runs, "collectives", "kernels")
    first, second, *reference = [(run.analysis(), run.kernels()) for run in runs]
    return compare_before_after(first, second, reference)
