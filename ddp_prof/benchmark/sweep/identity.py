"""Names that stay the same: the same setting on the same machine has the same id in every sweep."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ddp_prof.variants import VARIANTS

if TYPE_CHECKING:
    from ddp_prof.benchmark.grid import Conditions, Job


def run_id(job: Job, conditions: Conditions, environment: str) -> str:
    """Id of a run: of its setting, its repeat and the environment.

    Not of the code that is measured: when that changes, the new run takes the old one's place, and a database never
    holds runs of two versions under one setting.
    """
    record = asdict(job)
    if record["setting"]["bucket_size_mb"] is None and VARIANTS[job.setting.variant].can_be_uncapped:
        record["setting"]["bucket_size_mb"] = math.inf  # no cap, as ids of existing databases have it
    return digest([record, asdict(conditions), environment])


def digest(value: Any) -> str:  # whatever JSON can hold
    """Sixteen hexadecimal digits."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
