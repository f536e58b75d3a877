"""What a sweep runs, and in which order; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ddp_prof.variants import BUCKETED, VARIANT_NAMES, VARIANTS, variant_label


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run.

    Attributes:
        bucket_size_mb: Of ``bucketed``, in MB of 2**20 bytes; ``None`` is no cap. ``None`` for the other variants.
        local_batch_size: Sequences a step of one rank.
    """

    variant: str
    bucket_size_mb: float | None
    model_size: str
    world_size: int
    local_batch_size: int
    seq_len: int

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.model_size}, {self.world_size} ranks, "
            f"{self.local_batch_size} x {self.seq_len} tokens each"
        )

    @property
    def name(self) -> str:
        """The variant, with its bucket size where it has one."""
        return variant_label(self.variant, self.bucket_size_mb)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all runs of a sweep have in common; see ``ddp_prof.train``.

    Attributes:
        steps: Measured steps, and as many synchronized ones.
    """

    steps: int
    warmup: int
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class Grid:
    """All values of each dimension."""

    variants: tuple[str, ...]
    bucket_sizes_mb: tuple[float | None, ...]
    model_sizes: tuple[str, ...]
    world_sizes: tuple[int, ...]
    local_batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def candidates(self) -> list[tuple[str, float | None]]:
        """The variants, ``bucketed`` once a bucket size."""
        return [
            (variant, size)
            for variant in self.variants
            for size in (self.bucket_sizes_mb if variant == BUCKETED else (None,))
        ]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is run where nothing else is asked for."""

    grid: Grid
    steps: int
    warmup: int
    repeats: int


def choose_defaults(gpus: int) -> Defaults:
    """The published study's grid where there are two GPUs; else one that two CPU cores finish in some minutes."""
    if gpus >= 2:
        study = Grid(VARIANT_NAMES, (1.0, 10.0, 100.0, 1000.0), ("xl",), (2,), (2, 4), (128, 256, 512))
        return Defaults(study, steps=10, warmup=5, repeats=3)
    # 37 MB of gradients: from 100 MB on there is one bucket.
    return Defaults(
        Grid(VARIANT_NAMES, (1.0, 10.0, 100.0), ("mini",), (2,), (2,), (32, 64, 128)), steps=4, warmup=2, repeats=3
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be made: a setting and which of its repetitions, from 0."""

    setting: Setting
    repeat: int


def order_jobs(grid: Grid, repeats: int) -> list[Job]:
    """Repeats outermost and variants innermost, so that what drifts hits all variants alike.

    Each repeat begins with another variant: none is always the one that follows a change of sizes.
    """
    sizes = list(product(grid.model_sizes, grid.world_sizes, grid.local_batch_sizes, grid.seq_lens))
    candidates = grid.candidates()
    return [
        Job(Setting(variant, bucket_size_mb, *size), repeat)
        for repeat in range(repeats)
        for size in sizes
        for variant, bucket_size_mb in _rotate(candidates, repeat)
    ]


def train_arguments(setting: Setting, conditions: Conditions) -> list[str]:
    """The command line of ``ddp_prof.train`` for a setting, without outputs."""
    return [
        *("--variant", setting.variant),
        *bucket_size_arguments(setting),
        *("--model-size", setting.model_size),
        *("--world-size", str(setting.world_size)),
        *("--batch-size", str(setting.world_size * setting.local_batch_size)),
        *("--seq-len", str(setting.seq_len)),
        *("--steps", str(conditions.steps)),
        *("--synchronized-steps", str(conditions.steps)),
        *("--warmup", str(conditions.warmup)),
        *("--seed", str(conditions.seed)),
        *("--device", conditions.device),
        *("--backend", conditions.backend),
    ]


def bucket_size_arguments(setting: Setting) -> list[str]:
    """The bucket size as ``ddp_prof.train`` takes it; nothing for a variant without one."""
    if setting.bucket_size_mb is not None:
        return ["--bucket-size-mb", f"{setting.bucket_size_mb:g}"]
    return ["--bucket-size-mb", "none"] if VARIANTS[setting.variant].can_be_uncapped else []


def _rotate(candidates: list[tuple[str, float | None]], places: int) -> list[tuple[str, float | None]]:
    first = places % len(candidates)
    return candidates[first:] + candidates[:first]
