"""The published study that the variants were made for, in the same shape as what is measured here."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

from ddp_prof.benchmark.settings import Setting, Timing, setting_order
from ddp_prof.benchmark.statistics import Estimate

STUDIES = {"cs336": "cs336_xl_2gpu.csv"}
"""File of each study, beside this one; its first lines say what it is of."""

NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Study:
    """Published timings: of one run each, so without a spread.

    Attributes:
        about: What was measured on what, as the file says it.
    """

    name: str
    about: str
    timings: tuple[Timing, ...]


def load_study(name: str) -> Study:
    """Read a study that comes with the package, settings in the order of :func:`setting_order`."""
    lines = (files(__package__) / STUDIES[name]).read_text(encoding="utf-8").splitlines()
    about = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    timings = [_timing(row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]
    return Study(name, " ".join(about[:2]), tuple(sorted(timings, key=lambda timing: setting_order(timing.setting))))


def _timing(row: dict[str, str]) -> Timing:
    size = row["bucket_size_mb"]
    setting = Setting(row["variant"], float(size) if size else None, int(row["local_batch_size"]), int(row["seq_len"]))
    return Timing(setting, row["status"], _estimate(row["step_s"]), _estimate(row["communication_s"]))


def _estimate(seconds: str) -> Estimate | None:
    return Estimate(float(seconds) * NS_PER_S) if seconds else None
