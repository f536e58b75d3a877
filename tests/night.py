"""Which tests are left to the scripts of the night. The gate does not collect them, so none of them counts as skipped.

A marker says which script runs a test: ``nightly`` (scripts/dev/nightly.sh, like everything that
``HYPOTHESIS_PROFILE=nightly`` adds), ``trainers`` (scripts/dev/trainers.sh, which installs their libraries) and
``alone`` (scripts/dev/tune_jobs.sh, beside which nothing else runs). Some of them are run by ``-m``::

    pytest -m nightly tests/tune
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.examples import IS_NIGHTLY

OF_THE_NIGHT = frozenset({"nightly", "trainers", "alone"})


def is_left_to_the_night(markers: Iterable[str], expression: str, is_nightly: bool = IS_NIGHTLY) -> bool:
    """Whether a test with these markers is not collected; ``expression``: what was given by ``-m``."""
    asked = {*re.findall(r"\w+", expression), *(["nightly"] if is_nightly else [])}
    return not OF_THE_NIGHT.intersection(markers) <= asked


LARGEST_CAPTURE = "nsys2026_2_two_processes_h100"


LARGE = (LARGEST_CAPTURE, "nsys2022_4_ddp_unet_a100_rank0of4")
"""What is asked of the second one, too, stands in tests about it: its figures, its timeline, how it is damaged."""


ALIKE = {"bucketed_100mb", "bucketed_1mb", "flat", "overlap", "sharded", "torch", "torch_gradient_as_bucket_view"}
"""Variants in traces/ beside which another one was recorded alike: what holds of any capture is asked of that."""


def but_the_largest(captures: Iterable[Any]) -> list[Any]:
    """Captures, or their names, to call a test with, of which the gate leaves the largest to the night.

    It alone takes as long as all others. What it alone holds, two processes in one report, tests draw by themselves,
    and its figures are held against those of an independent program in every gate.
    """
    by_night = pytest.mark.nightly
    return [pytest.param(one, marks=by_night) if LARGEST_CAPTURE in str(one) else one for one in captures]


def one_of_each_kind(captures: Sequence[Path]) -> list[Any]:
    """Captures to call a test with, of which the gate leaves others to the night."""
    return of_which_the_gate_keeps(kept_by_the_gate(captures), captures)


def kept_by_the_gate(captures: Sequence[Path]) -> list[Path]:
    """All but those that another one tells, and of the ranks of a job the first one."""
    jobs = [re.sub(r"rank\d+of", "rank", one.name) for one in captures]
    return [one for at, one in enumerate(captures) if jobs[at] not in jobs[:at] and not is_told_by_another(one)]


def is_told_by_another(capture: Path) -> bool:
    """Whether it is large, or in :data:`ALIKE`."""
    return capture.name.startswith(LARGE) or capture.name.partition(".")[0] in ALIKE


def of_which_the_gate_keeps(kept: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases to call a test with, of which the gate leaves others to the night; a tuple is a case of several values."""
    by_night = pytest.mark.nightly
    values = [(one, one if isinstance(one, tuple) else (one,)) for one in cases]
    return [pytest.param(*each, marks=[] if one in kept else by_night) for one, each in values]
