"""Which size of buckets to advise: many remain to begin while backward computes, and so few that latency is small.

How long a collective of another size takes is not known, so the advice is a number of buckets. In 32 simulated jobs
with a collective per parameter, buckets of 25 MiB made the step 0.9 % longer (mean; 37 % at worst), as they often leave
one bucket; a size that leaves sixteen made it 13 % shorter (0.2 % longer at worst). In 30 jobs with one bucket, 25 MiB
made the step 6 % shorter, and a size that leaves six 16 % (1.8 % at worst).
"""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.doctor.evidence import Gradients, median_or_zero
from ddp_prof.analyze.what_if.rules import DEFAULT_MB
from ddp_prof.table import UNKNOWN
from ddp_prof.variants import BYTES_PER_MB

OF_MANY, OF_ONE = 16, 6
"""How many buckets to leave of a collective for each parameter, and of a single one."""


def bucket_cap_mb(gradients: Gradients, buckets: int) -> int | float | None:
    """Return the ``bucket_cap_mb`` that divides the gradients of a typical unit into so many buckets, at most torch's.

    ``None`` if the sizes of collectives are not known.
    """
    if np.any(gradients.bytes == UNKNOWN):
        return None
    whole = median_or_zero(gradients.by_unit(np.add, gradients.bytes)) / BYTES_PER_MB
    cap = float(f"{min(DEFAULT_MB, whole / buckets):.2g}")
    return int(cap) if cap.is_integer() else cap
