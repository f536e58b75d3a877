"""How many examples Hypothesis draws: the gate an eighth, without chance; a nightly all, and others.

    HYPOTHESIS_PROFILE=nightly .venv/bin/python -m pytest tests/analyze

Without chance, yet not the same wherever they run: Hypothesis also draws constants that it finds in the modules which
are loaded. No test may rest on what is drawn.

A test of which the eighth misses a mistake that the whole finds gets that example by ``@example``.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "gate")
IS_NIGHTLY = PROFILE == "nightly"
GATES_SHARE = 8
USUAL = 100


def load_profile() -> None:
    # No deadline: a busy machine is no failure.
    settings.register_profile("gate", deadline=None, derandomize=True, max_examples=USUAL // GATES_SHARE)
    settings.register_profile("nightly", deadline=None, max_examples=USUAL)
    settings.load_profile(PROFILE)


def examples(whole: int, nightly: int | None = None, **more: Any) -> settings:
    """Settings for a test of ``whole`` examples; a nightly may draw more than these."""
    return settings(max_examples=nightly or whole if IS_NIGHTLY else whole // GATES_SHARE, **more)
