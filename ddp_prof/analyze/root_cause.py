"""The one finding about a run's exposed communication that says most: its main cause, and the bucket behind it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddp_prof.analyze.collectives.exposure import CAUSES, SYNCHRONOUS, TAIL, WAITING
from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.collectives.straggler import measure_skew

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.analyze.collectives.results import Collective, RunCollectives
    from ddp_prof.analyze.collectives.run_analysis import RunAnalysis
    from ddp_prof.analyze.collectives.straggler import RunSkew
    from ddp_prof.manifest import Manifest


@dataclass(frozen=True, slots=True)
class RootCause:
    """The main cause of a run's exposed time. Everything is over all steps and ranks.

    Attributes:
        exposed_ns: All exposed time.
        cause: One of ``causes.CAUSES``.
        cause_ns: The part of the exposed time that it causes.
        wait_ns: The part of ``cause_ns`` in which a peer had not arrived.
        collectives_a_step: Median.
        bucket: The bucket that has the largest part of it; ``None`` where buckets are not known.
        index: Position in the step of those collectives, most of the time.
        is_last: Whether it is the step's last collective, most of the time.
        bucket_ns: The bucket's part.
        bytes: Its size.
        parameters: Names of its parameters, in the model's order; empty where not known.
        lead_ns: Median of the time by which it starts before backward's compute ends; negative after it.
    """

    exposed_ns: int
    cause: str
    cause_ns: int
    wait_ns: int
    collectives_a_step: int
    bucket: int | None
    index: int
    is_last: bool
    bucket_ns: int
    bytes: int | None
    parameters: tuple[str, ...]
    lead_ns: int | None


def find_root_cause(collectives: Sequence[Collective], manifest: Manifest | None = None) -> RootCause | None:
    """The main finding, ``None`` where nothing is exposed."""
    by_cause = {cause: sum(getattr(collective.causes, cause) for collective in collectives) for cause in CAUSES}
    cause = max(by_cause, key=by_cause.__getitem__)
    if not by_cause[cause]:
        return None
    by_bucket: Counter[tuple[int | None, int]] = Counter()
    for item in collectives:
        by_bucket[_identity(item)] += getattr(item.causes, cause)
    (culprit, bucket_ns), *_ = by_bucket.most_common(1)
    own = [collective for collective in collectives if _identity(collective) == culprit]
    step_sizes = Counter(collective.step_identity for collective in collectives)
    leads = [summary.before_backward_end_ns for summary in own if summary.before_backward_end_ns is not None]
    last = [summary.index == step_sizes[summary.step_identity] - 1 for summary in own]
    return RootCause(
        exposed_ns=sum(by_cause.values()),
        cause=cause,
        cause_ns=by_cause[cause],
        wait_ns=sum(_wait_within(collective, cause) for collective in collectives),
        collectives_a_step=round(median(step_sizes.values())),
        bucket=culprit[0],
        index=Counter(summary.index for summary in own).most_common(1)[0][0],
        is_last=sum(last) > len(last) / 2,
        bucket_ns=bucket_ns,
        bytes=own[0].bytes,
        parameters=_parameters(manifest, culprit[0]),
        lead_ns=round(median(leads)) if leads else None,
    )


def _wait_within(collective: Collective, cause: str) -> int:
    """How long it waited for a peer in the instants of a cause: wait is ``waiting`` during backward, tail after it."""
    if cause == WAITING:
        return collective.causes.waiting
    if cause not in (TAIL, SYNCHRONOUS) or not getattr(collective.causes, cause):
        return 0
    return (collective.exposed_wait_ns or 0) - collective.causes.waiting


def _identity(collective: Collective) -> tuple[int | None, int]:
    """What makes collectives of several steps the same: the bucket, else the position in the step."""
    return (collective.bucket, -1) if collective.bucket is not None else (None, collective.index)


def _parameters(manifest: Manifest | None, bucket: int | None) -> tuple[str, ...]:
    """Names of the parameters in a bucket; a run.json lists buckets by positions among the trained parameters."""
    buckets = None if manifest is None else manifest.options.get("buckets")
    if manifest is None or bucket is None or not isinstance(buckets, list) or not 0 <= bucket < len(buckets):
        return ()
    trained = [parameter.name for parameter in manifest.parameters if parameter.requires_grad]
    return tuple(trained[item] for item in sorted(buckets[bucket]) if item < len(trained))


@dataclass(frozen=True)
class RunExplanation:
    """Why the communication of a run is exposed.

    Attributes:
        root_cause: The main reason; ``None`` where nothing is exposed.
    """

    run: RunAnalysis
    collectives: RunCollectives
    skew: RunSkew
    root_cause: RootCause | None


def explain_run(run: RunAnalysis) -> RunExplanation:
    """Measure the collectives and the skew of a run."""
    collectives = measure_collectives(run)
    root_cause = find_root_cause(collectives.collectives, run.manifest)
    return RunExplanation(run, collectives, measure_skew(run), root_cause)
