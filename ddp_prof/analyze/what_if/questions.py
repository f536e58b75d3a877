"""The changes whose effect can be asked for: another bucket size, one bucket, gradient views, bf16 on the wire, ..."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_prof.variants import BYTES_PER_MB

BUCKET_SIZE, ONE_BUCKET, VIEWS, HALF_BYTES, TIME_PER_BYTE = (
    "bucket size", "one bucket", "gradient_as_bucket_view", "bf16 on the wire", "time per byte",
)  # fmt: skip
COMMUNICATION, WAITS, RANKS = "without communication", "without waits for late ranks", "ranks"


@dataclass(frozen=True, slots=True)
class Question:
    """A change of the job whose effect is asked for.

    Attributes:
        kind: One of the constants above, such as :data:`BUCKET_SIZE`.
        value: MiB for a bucket size, a factor for the time per byte, the number of ranks for :data:`RANKS`; ``None``
            for all other kinds.
        with_views: Whether ``gradient_as_bucket_view=True`` is set as well.
    """

    kind: str
    value: float | None = None
    with_views: bool = False

    @property
    def text(self) -> str:
        return f"{self._alone} with {VIEWS}" if self.with_views else self._alone

    @property
    def saves_copies(self) -> bool:
        return self.with_views or self.kind == VIEWS

    @property
    def _alone(self) -> str:
        if self.kind == BUCKET_SIZE:
            return f"bucket size {self.value:g} MiB"
        if self.kind == TIME_PER_BYTE:
            return f"time per byte x {self.value:g}"
        return f"{self.value:g} ranks" if self.kind == RANKS else self.kind

    @property
    def cap_bytes(self) -> float:
        return (self.value or 0) * BYTES_PER_MB


USUAL = (
    *(Question(BUCKET_SIZE, mb) for mb in (1.0, 5.0, 25.0, 50.0, 100.0, 200.0)),
    Question(ONE_BUCKET),
    Question(VIEWS),
    Question(TIME_PER_BYTE, 0.5),
)
"""What is asked where the user asks nothing."""
