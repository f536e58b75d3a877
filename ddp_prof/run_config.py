"""The configuration of one run of the workload; command lines, ``run.json`` and database rows are made from it.

Options of ``python -m ddp_prof.train`` have the names and defaults of the fields here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from ddp_prof.variants import VARIANTS, variant_extras, variant_label

MANIFEST_FIELDS = ("variant", "bucket_size_mb", "model_size", "batch_size", "seq_len", "steps", "warmup", "seed")
"""Fields that a ``run.json`` has under the same names."""
FAULTS = ("nothing", "host-sync", "one-bucket", "reversed", "slow-rank", "starved")
"""Faults that ``--inject`` can put into a run, to test whether ``ddp-prof doctor`` finds them."""
LEARNING_RATE = 1e-3
"""Learning rate of AdamW."""
NUMERICS = ("precision", "tf32", "compile", "activation_checkpointing")
"""Fields that determine how the model is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run computes, on which ranks, and for how long.

    Attributes:
        bucket_size_mb: Cap of a bucket in MiB; ``None``: no cap, or the variant takes no bucket size.
        comm_hook: A communication hook of torch's DDP, one of ``variants.COMM_HOOKS``; ``None``: gradients are sent
            unchanged.
        batch_size: Sequences per step of all ranks together, of ``seq_len`` tokens each.
        steps: Measured steps, after ``warmup`` steps. Then follow ``synchronized_steps``, in which the host waits for
            the device after each phase.
        world_size: Number of ranks; ``None``: as many as the launcher started, else one.
        compile: ``None``, ``blocks`` or ``model``.
        inject: One of :data:`FAULTS`.
    """

    variant: str
    bucket_size_mb: float | None = None
    comm_hook: str | None = None
    find_unused_parameters: bool = False
    no_communication_hook: bool = False
    gradient_as_bucket_view: bool = False
    model_size: str = "mini"
    batch_size: int = 4
    seq_len: int = 128
    steps: int = 10
    warmup: int = 5
    synchronized_steps: int = 0
    seed: int = 0
    world_size: int | None = None
    device: str = "auto"
    backend: str = "auto"
    ranks_per_gpu: int | None = None
    timeout: float = 120.0  # seconds that a rank waits for another
    precision: str = "fp32"
    tf32: bool = False
    compile: str | None = None
    activation_checkpointing: bool = False
    inject: str = "nothing"

    def __str__(self) -> str:
        ranks = self.world_size or 1
        return f"{self.label}, {self.model_size}, {ranks} ranks, {self.local_batch_size} x {self.seq_len} tokens each"

    @property
    def label(self) -> str:
        """Name of the run in tables: ``bucketed 10 MB``."""
        return variant_label(self.variant, self.bucket_size_mb, variant_extras(self.manifest_options()))

    @property
    def local_batch_size(self) -> int:
        """Sequences per step of one rank."""
        return self.batch_size // (self.world_size or 1)

    def argv(self, *, leave_out: Collection[str] = ()) -> list[str]:
        """Return the arguments of ``python -m ddp_prof.train`` for all fields but those of ``leave_out``."""
        return [word for field in fields(RunConfig) if field.name not in leave_out for word in self._option(field.name)]

    def script_argv(self) -> list[str]:
        """Return the arguments of ``scripts/profile_variant.sh`` for this configuration.

        They lack the number of ranks and the device, which the script takes from its environment (NGPU and DEVICE).
        """
        others = self.argv(leave_out={"variant", "bucket_size_mb", "world_size", "device"})
        return [self.variant, *self._option("bucket_size_mb"), "--", *others]

    def manifest_options(self) -> dict[str, Any]:
        """Return the settings that a ``run.json`` holds as ``options``; a fault only if there is one."""
        fault = ("inject",) if self.inject != FAULTS[0] else ()
        names = (
            "comm_hook",
            "no_communication_hook",
            "gradient_as_bucket_view",
            "find_unused_parameters",
            *fault,
            *NUMERICS,
        )
        return {"lr": LEARNING_RATE, **{name: getattr(self, name) for name in names}}

    def row_fields(self) -> dict[str, Any]:
        """Return the settings by the names of their columns in the results database."""
        names = ("variant", "bucket_size_mb", "model_size", "local_batch_size", "seq_len", "warmup", "steps")
        return {"world_size": self.world_size or 1, **{name: getattr(self, name) for name in names}}

    def _option(self, name: str) -> list[str]:
        """Return the words of one field's option on a command line; none if it is off or the workload chooses it."""
        flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
        if name == "bucket_size_mb" and value is None and VARIANTS[self.variant].can_be_uncapped:
            return [flag, "none"]
        if value is None or value is False:
            return []
        if value is True:
            return [flag]
        return [flag, f"{value:g}" if isinstance(value, float) else str(value)]
