"""Divide the measured step into the parts from which a simulation builds steps that never ran.

A time in the capture becomes *work*: the time since the begin of the step, less what communication slowed compute by
until then. A gradient is ready when its copy into the bucket has ended, if such copies are known. Otherwise it became
ready at an unknown time between the last gradient of the bucket before, or the begin of backward, and the last gradient
of its own bucket::

    ready        |....................|      a gradient of bucket 2 became ready at some time between both bars
    collectives  1                    2      1, 2: the last gradient of this bucket is ready
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.core.work import BACK_TO_BACK_NS
from ddp_prof.analyze.what_if.simulate import StepModel
from ddp_prof.analyze.what_if.sizes import Gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.table import NO_TIME, Floats, Ints


@dataclass(frozen=True)
class Today:
    """The steps of a rank as models for the simulation, and their measured length.

    Attributes:
        model: The steps with the likely times at which gradients become ready.
        early, late: The same steps with the earliest and the latest times that are possible; equal to ``model`` where
            these times are known.
        measured_ns: The measured length of each step; shape (steps).
        knows_ready: Whether it is known when each gradient became ready.
    """

    model: StepModel
    early: StepModel
    late: StepModel
    measured_ns: Ints
    knows_ready: bool


def divide_today(structure: RankStructure, gradients: Gradients, slowed: float) -> Today:
    """Divide the steps of a rank into the parts of a :class:`StepModel`.

    Args:
        structure: The measured steps.
        gradients: The gradients of a step.
        slowed: The fraction of the time beside communication that compute loses.

    Returns:
        The steps with the likely, the earliest and the latest times at which gradients are ready, the measured lengths
        of the steps, and whether these times are known.
    """
    one, begins_ns = structure, structure.begins_ns

    def work(at_ns: Ints, beside: str) -> Floats:
        """Return the work that was done until each time; ``beside`` is its key in ``RankStructure.beside_ns``."""
        since_ns = at_ns - (begins_ns if at_ns.ndim == 1 else begins_ns[:, None])
        found: Floats = since_ns - slowed * one.beside_ns[beside]
        return found

    # A bucket is ready with its last gradient; where that time is not known, the begin of its collective stands for it.
    backward_ns = work(one.backward_end_ns, "backward_end")
    begun_ns = np.where(one.ready_ns == NO_TIME, one.start_ns, one.ready_ns)
    ready_of_bucket = np.minimum(work(begun_ns, "ready"), work(one.start_ns, "start"))
    # A collective begins ``begin_lag_ns`` after its last gradient is ready, and is launched ``launch_lag_ns`` after the
    # copy of that gradient. "Ready" below is when a collective of the gradient could begin: the first lag is in it.
    begin_lag_ns, launch_lag_ns = _lags(one)
    into = one.into if one.into is not None and len(one.into.bytes) == len(gradients.bytes) else None
    if into is not None:
        # Each gradient is ready when its copy has ended. But the host may launch the collective later than that.
        late_ns = np.maximum(0, into.launch_ns + launch_lag_ns - into.ends_ns - begin_lag_ns)
        ready = work(into.ends_ns, "into") + begin_lag_ns + late_ns
        early = late = np.maximum.accumulate(ready, axis=1)
        ready = early
    else:
        # It is only known when buckets were ready; ``accumulate``: none earlier than the bucket in front of it.
        # ``before`` is when the bucket in front was ready; for the first bucket, when backward began.
        late = np.maximum.accumulate(ready_of_bucket + begin_lag_ns, axis=1)
        first = work(one.backward_begin_ns, "backward_begin")[:, None] + begin_lag_ns
        before = np.concatenate([np.minimum(first, late[:, :1]), late[:, :-1]], axis=1)
        late, before = late[:, gradients.bucket], before[:, gradients.bucket]
        # The last gradient of a bucket is ready with it. The others are likely ready in proportion to the bytes of the
        # bucket up to and with each gradient: ``ends`` is the total up to the end of the bucket.
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

    return Today(
        model=model(ready),
        early=model(early),
        late=model(late),
        measured_ns=one.ends_ns - begins_ns,
        knows_ready=into is not None,
    )


def _lags(one: RankStructure) -> tuple[float, float]:
    """Return two medians in nanoseconds, 0 where not known: how much later than its last gradient a collective comes.

    1. From the time at which the last gradient is ready to the begin of the collective, over collectives that wait for
       no collective before them.
    2. From the launch of the last gradient's copy into the bucket to the launch of the collective.
    """
    # Free is a collective that begins well after the end of the one before; the first one of a step always is.
    previous = np.concatenate([np.full((len(one.keys), 1), NO_TIME), one.end_ns[:, :-1]], axis=1)
    is_free = one.start_ns > previous + BACK_TO_BACK_NS
    if one.into is not None and len(np.unique(one.into.bucket)) == one.calls:
        last = np.searchsorted(one.into.bucket, np.arange(one.calls), side="right") - 1  # last gradient of each bucket
        launches = one.launch_ns - one.into.launch_ns[:, last]
        lags = (one.start_ns - one.into.ends_ns[:, last])[is_free]
        return float(np.median(np.maximum(0, lags))) if len(lags) else 0.0, float(np.median(launches))
    lags = (one.start_ns - one.ready_ns)[is_free & (one.ready_ns != NO_TIME)]
    return float(np.median(np.maximum(0, lags))) if len(lags) else 0.0, 0.0


def _copies(one: RankStructure, gradients: Gradients, slowed: float) -> Floats:
    """Return the work of copying each gradient out of its bucket, in nanoseconds; shape (steps, gradients).

    It includes the short gap (at most :data:`BACK_TO_BACK_NS`) before each copy, and is 0 where no copies are known.
    """
    out = one.out
    if out is None:
        return np.zeros((len(one.keys), len(gradients.bytes)))
    alone: Floats = out.took_ns - slowed * out.beside_ns
    began_ns = out.ends_ns - out.took_ns
    # A longer gap between two copies is time that the second copy waited for its collective: no work.
    gap_ns = np.maximum(0, began_ns[:, 1:] - out.ends_ns[:, :-1])
    alone[:, 1:] += np.where(gap_ns <= BACK_TO_BACK_NS, gap_ns, 0)
    first_ns = began_ns[:, 0] - np.maximum(one.backward_end_ns, one.end_ns[:, 0])
    alone[:, 0] += np.clip(first_ns, 0, BACK_TO_BACK_NS)
    if alone.shape[1] == len(gradients.bytes):
        return alone
    # Copies and gradients do not match one to one: divide the sum of each step by bytes.
    share = gradients.bytes / gradients.bytes.sum()
    divided: Floats = alone.sum(axis=1)[:, None] * share
    return divided
