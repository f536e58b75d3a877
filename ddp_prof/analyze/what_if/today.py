"""Today's step in parts that a simulation can put together otherwise: from the structure of a capture.

A time of the capture becomes work: without what communication slows compute by before it. A gradient is ready when its
copy into the bucket has ended, if that can be told apart; else some time between the last gradient of the bucket before
and that of its own::

    ready        |....low.........high|      of a gradient in bucket 2
    collectives  1                    2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.what_if.simulate import Floats, StepModel
from ddp_prof.analyze.what_if.sizes import Gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.table import NO_TIME, Ints

_NEXT_NS = 20_000
"""A copy that begins so soon after the one before waited for nothing else."""


@dataclass(frozen=True)
class Today:
    """The steps of a rank as models, and as measured.

    Attributes:
        model: With the likely times at which gradients are ready; ``early`` and ``late``: with the first and last ones
            that are possible, the same where these times are known.
        measured_ns: The length of each step; shape (steps).
        knows_ready: Whether it is known when each gradient is ready.
    """

    model: StepModel
    early: StepModel
    late: StepModel
    measured_ns: Ints
    knows_ready: bool


def divide_today(structure: RankStructure, gradients: Gradients, slowed: float) -> Today:
    """Divide the steps; ``slowed`` is the share of the time beside communication that compute loses."""
    one, begins_ns = structure, structure.begins_ns

    def work(at_ns: Ints, beside: str) -> Floats:
        since_ns = at_ns - (begins_ns if at_ns.ndim == 1 else begins_ns[:, None])
        found: Floats = since_ns - slowed * one.beside_ns[beside]
        return found

    backward_ns = work(one.backward_end_ns, "backward_end")
    begun_ns = np.where(one.ready_ns == NO_TIME, one.start_ns, one.ready_ns)
    ready_of_bucket = np.minimum(work(begun_ns, "ready"), work(one.start_ns, "start"))
    begin_ns, before_ns = _lags(one)
    into = one.into if one.into is not None and len(one.into.bytes) == len(gradients.bytes) else None
    if into is not None:
        # The host launches the collective after the copy: it may be what comes last.
        late_ns = np.maximum(0, into.launch_ns + before_ns - into.ends_ns - begin_ns)
        ready = work(into.ends_ns, "into") + begin_ns + late_ns
        early = late = np.maximum.accumulate(ready, axis=1)
        ready = early
    else:
        late = np.maximum.accumulate(ready_of_bucket + begin_ns, axis=1)
        before = np.concatenate([late[:, :1], late[:, :-1]], axis=1)
        late, before = late[:, gradients.bucket], before[:, gradients.bucket]
        last = np.append(gradients.bucket[1:] != gradients.bucket[:-1], True)
        upto = np.cumsum(gradients.bytes)
        ends = upto[last][np.searchsorted(gradients.bucket[last], gradients.bucket)]
        total = np.bincount(gradients.bucket, weights=gradients.bytes)[gradients.bucket]
        share = 1 - (ends - upto) / total
        early = np.where(last, late, before)
        ready = before + (late - before) * np.where(last, 1.0, share)
    copy_ns = _copies(one, gradients, slowed)
    rest_ns = (one.ends_ns - one.resumes_ns).astype(float)

    def model(at: Floats) -> StepModel:
        return StepModel(gradients.bytes, at, backward_ns, copy_ns, rest_ns)

    return Today(model(ready), model(early), model(late), one.ends_ns - begins_ns, into is not None)


def _lags(one: RankStructure) -> tuple[float, float]:
    """How much later than its last gradient a collective begins, and is launched; medians, 0 where not known.

    The first is from the end of the last gradient, of collectives that wait for no other one; the second from the
    launch of its copy into the bucket.
    """
    previous = np.concatenate([np.full((len(one.keys), 1), NO_TIME), one.end_ns[:, :-1]], axis=1)
    is_free = one.start_ns > previous + _NEXT_NS
    if one.into is not None and len(np.unique(one.into.bucket)) == one.calls:
        last = np.searchsorted(one.into.bucket, np.arange(one.calls), side="right") - 1
        launches = one.launch_ns - one.into.launch_ns[:, last]
        lags = (one.start_ns - one.into.ends_ns[:, last])[is_free]
        return float(np.median(np.maximum(0, lags))) if len(lags) else 0.0, float(np.median(launches))
    lags = (one.start_ns - one.ready_ns)[is_free & (one.ready_ns != NO_TIME)]
    return float(np.median(np.maximum(0, lags))) if len(lags) else 0.0, 0.0


def _copies(one: RankStructure, gradients: Gradients, slowed: float) -> Floats:
    """The work of copying each gradient out of its bucket, with what passes before the next copy begins."""
    out = one.out
    if out is None:
        return np.zeros((len(one.keys), len(gradients.bytes)))
    alone: Floats = out.took_ns - slowed * out.beside_ns
    began_ns = out.ends_ns - out.took_ns
    gap_ns = np.maximum(0, began_ns[:, 1:] - out.ends_ns[:, :-1])
    alone[:, 1:] += np.where(gap_ns <= _NEXT_NS, gap_ns, 0)
    first_ns = began_ns[:, 0] - np.maximum(one.backward_end_ns, one.end_ns[:, 0])
    alone[:, 0] += np.clip(first_ns, 0, _NEXT_NS)
    if alone.shape[1] == len(gradients.bytes):
        return alone
    share = gradients.bytes / gradients.bytes.sum()
    divided: Floats = alone.sum(axis=1)[:, None] * share
    return divided
