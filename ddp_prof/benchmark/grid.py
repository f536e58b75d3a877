"""What a sweep runs, in which order, and the id of each run; needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

from ddp_prof.run_config import RunConfig
from ddp_prof.variants import BUCKETED, VARIANT_NAMES, VARIANTS


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be made."""

    config: RunConfig
    repeat: int

    def run_id(self, environment: str) -> str:
        """Id of the run: a digest of its settings, its repeat and the environment.

        The code that is measured is not part of it. When that changes, the new run replaces the old one, so a database
        never holds runs of two versions under one setting.
        """
        config = self.config
        cap = config.bucket_size_mb
        if cap is None and VARIANTS[config.variant].can_be_uncapped:
            cap = math.inf  # as in the ids of existing databases
        names = ("variant", "model_size", "world_size", "local_batch_size", "seq_len")
        setting = {name: getattr(config, name) for name in names} | {"bucket_size_mb": cap}
        conditions = {name: getattr(config, name) for name in ("steps", "warmup", "seed", "device", "backend")}
        return digest([{"setting": setting, "repeat": self.repeat}, conditions, environment])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All values of each dimension, and what all runs have in common.

    Attributes:
        bucket_sizes_mb: Of ``bucketed``, in MiB; ``None`` is no cap.
        steps: Measured steps, and as many synchronized ones.
    """

    variants: tuple[str, ...] = VARIANT_NAMES
    bucket_sizes_mb: tuple[float | None, ...]
    model_sizes: tuple[str, ...]
    world_sizes: tuple[int, ...] = (2,)
    local_batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]
    steps: int
    warmup: int
    repeats: int = 3
    device: str = "auto"
    backend: str = "auto"

    def jobs(self) -> list[Job]:
        """The runs. Repeats are outermost and variants innermost, so that drift affects all variants alike.

        Each repeat begins with another variant, so that no variant is always the one after a change of sizes.
        """
        candidates = [
            (variant, size)
            for variant in self.variants
            for size in (self.bucket_sizes_mb if variant == BUCKETED else (VARIANTS[variant].default_bucket_size_mb,))
        ]
        sizes = list(product(self.model_sizes, self.world_sizes, self.local_batch_sizes, self.seq_lens))
        jobs = []
        for repeat in range(self.repeats):
            first = repeat % len(candidates)
            rotated = candidates[first:] + candidates[:first]
            for (model_size, ranks, local_batch_size, seq_len), (variant, bucket) in product(sizes, rotated):
                config = RunConfig(
                    variant=variant,
                    bucket_size_mb=bucket,
                    model_size=model_size,
                    world_size=ranks,
                    batch_size=ranks * local_batch_size,
                    seq_len=seq_len,
                    steps=self.steps,
                    synchronized_steps=self.steps,
                    warmup=self.warmup,
                    device=self.device,
                    backend=self.backend,
                )
                jobs.append(Job(config, repeat))
        return jobs


def default_grid(gpus: int) -> Grid:
    """The grid of the course's study where there are two GPUs; else one that two CPU cores finish in some minutes."""
    if gpus >= 2:
        return Grid(
            bucket_sizes_mb=(1.0, 10.0, 100.0, 1000.0),
            model_sizes=("xl",),
            local_batch_sizes=(2, 4),
            seq_lens=(128, 256, 512),
            steps=10,
            warmup=5,
        )
    return Grid(
        bucket_sizes_mb=(1.0, 10.0, 100.0),  # 37 MB of gradients: from 100 MB on there is one bucket
        model_sizes=("mini",),
        local_batch_sizes=(2,),
        seq_lens=(32, 64, 128),
        steps=4,
        warmup=2,
    )


def digest(value: Any) -> str:  # whatever JSON can hold
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
