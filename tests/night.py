"""Which tests are left to the scripts of the night. The gate does not collect them, so none of them counts as skipped.

A marker says which script runs a test: ``nightly`` (scripts/dev/nightly.sh, like everything that
``HYPOTHESIS_PROFILE=nightly`` adds), ``trainers`` (scripts/dev/trainers.sh, which installs their libraries) and
``alone`` (scripts/dev/tune_jobs.sh, beside which nothing else runs). Some of them are run by ``-m``::

    pytest -m nightly tests/tune
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.examples import IS_NIGHTLY

OF_THE_NIGHT = frozenset({"nightly", "trainers", "alone"})


def is_left_to_the_night(markers: Iterable[str], expression: str, is_nightly: bool = IS_NIGHTLY) -> bool:
    """Whether a test with these markers is not collected; ``expression``: what was given by ``-m``."""
    asked = {*re.findall(r"\w+", expression), *(["nightly"] if is_nightly else [])}
    return not OF_THE_NIGHT.intersection(markers) <= asked
