"""In place of a result that cannot be had: why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """A result that is not known.

    Attributes:
        reason: Why, as part of a sentence: ``messages of fewer than two sizes were timed``.
    """

    reason: str
