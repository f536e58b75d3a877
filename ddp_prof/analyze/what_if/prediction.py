"""What a change would make of a step: measured, plus what a simulation of it says, less what one of today says.

What the simulation has wrong about today it has wrong about the change, too, so most of it cancels. The interval holds
how steps differ, how well the slowdown of compute and the time per byte are known, when gradients are ready where that
is not known, and what predictions were off by where both sides were measured (:data:`MODEL_ERROR`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot

import numpy as np

from ddp_prof.analyze.quality import GRAPHS
from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.step_cost import ON_CPU, Slowed
from ddp_prof.analyze.what_if.calibration import calibrate
from ddp_prof.analyze.what_if.link import LinkFit, fit_link, t_95
from ddp_prof.analyze.what_if.questions import (
    BUCKET_SIZE,
    COMMUNICATION,
    HALF_BYTES,
    ONE_BUCKET,
    RANKS,
    TIME_PER_BYTE,
    VIEWS,
    WAITS,
    Question,
)
from ddp_prof.analyze.what_if.rules import fill_at_most, fill_until_reached, mebibytes
from ddp_prof.analyze.what_if.simulate import Buckets, Floats, LinkTimes, StepModel, simulate
from ddp_prof.analyze.what_if.sizes import Gradients, find_gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.analyze.what_if.today import divide_today

GAIN, LOSS, CANNOT_BE_TOLD, REFUSED = "gain", "loss", "cannot be told", "not predicted"

MOST_FILES = 8
"""``runs.run.MOST_FILES_OF_KERNELS``: of so many files the structure of steps is known."""
MOST_OFF = 0.02
"""If the simulation of today is off by a larger share of the step, nothing is predicted."""
MODEL_ERROR = 0.0115
"""The root of the mean square of what predicted changes were off by, as a share of the step: ``docs/what_if.md``."""
_SIGMAS = 1.645
"""Half of a 90 % interval in standard deviations."""
_PADDING = 0.01
"""By so large a share gradients of one job may differ, as buckets may be padded."""
_OF_95 = 1.645 / 1.96
_DRAWS = 1000

NO_RANKS = "no rank was recorded in it: capture a step of training"
NO_KAPPA = (
    "by how much communication slows compute is not known ({why}): capture it with several collectives in a step, "
    "some of them beside compute"
)
NO_KAPPA_ON_CPU = (
    "by how much communication slows compute is not known ({why}): give a second capture of the same job that hides "
    "more of its communication, or less, to 'ddp-prof whatif --calibrate'"
)
QUEUED = (
    "up to {at_once} of its collectives of gloo run at once and share cores, so their times say nothing of one alone: "
    "capture one that waits for each, such as naive, and give it to 'ddp-prof whatif --calibrate'"
)
OFF = (
    "a simulation of today's step is off by {off:.1f} %, and at most {most:.0f} % is allowed: something else than "
    "backward and its collectives decides how long the step is (on a GPU, 'ddp-prof critical' shows what)"
)
SHARED = "its ranks share a GPU and take turns on it, so its times are no link's: capture it with a GPU for each rank"
ALONE = "it has one rank, which has nobody to communicate with: capture it with several ranks"
WHOLE_GRAPHS = f"{GRAPHS}: record with --cuda-graph-trace=node"
BEYOND = (
    "its largest collective, {size}, is more than twice the largest measured one, {largest}: "
    "capture it with buckets of {needed}"
)
NOT_DIVIDED = "single gradients are not known, and today's buckets are larger: give --parameters FILE"
NO_COPIES = "nothing is copied out of buckets, as with gradient_as_bucket_view: capture it without that to compare"
ONE_RANK = "one rank does not tell what its collectives wait for and what they transfer: give the captures of all ranks"
SOME_RANKS = (
    "{ranks} of {world} ranks do not tell how long their collectives wait for the others: give the captures of all "
    "ranks (of many files the first {files} are looked at, so of at most so many)"
)
NO_TRANSFERS = (
    "the shortest parts of its collectives, which wait for no rank, are on no line by their size: give captures of all "
    "ranks that were recorded at the same time"
)
SAME_RANKS = "it has that many ranks today, so nothing changes"
IS_HALF = "its gradients are sent with two bytes a number today, as the names of NCCL's kernels say"
OTHER_JOB = "--calibrate has another job, {difference}: give a capture of the same job, with the same model and ranks"
OTHER_RANKS = (
    "a link between {ranks} ranks says nothing of one between {asked}, nor of other nodes: "
    "capture it with {asked} ranks"
)
SAME = "the same buckets as today"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one change would make of a step; times in nanoseconds, a gain is negative.

    Attributes:
        change: Words for it.
        calls, largest_bytes: Collectives of a step, and the bytes of the largest; ``None`` if not predicted.
        change_ns, low_ns, high_ns: With a 90 % interval; ``None`` for ``reason``.
        verdict: ``gain``, ``loss``, ``cannot be told``, or ``not predicted``.
        beyond_ns: What the line says where it was not measured, which is no prediction.
        parts_ns: Half of the interval by each doubt alone.
    """

    change: str
    calls: int | None
    largest_bytes: int | None
    change_ns: int | None
    low_ns: int | None
    high_ns: int | None
    verdict: str
    reason: str | None = None
    beyond_ns: int | None = None
    parts_ns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunPrediction(FrameResult):
    """What changes would make of a run's step.

    Attributes:
        reason: Why nothing is predicted.
        rank: The rank whose steps were simulated: of several, the one whose collectives take least, as it waits least.
        steps: How many steps were simulated; ``measured_ns`` is their mean length, ``simulated_ns`` that of today.
        kappa: How many times as long compute takes beside communication.
        bucket_bytes: Of today's buckets.
        sizes_from, doubts: Where the bytes of gradients are from, and what is assumed.
    """

    reason: str | None
    predictions: tuple[Prediction, ...] = ()
    rank: int | None = None
    steps: int = 0
    measured_ns: int | None = None
    simulated_ns: int | None = None
    kappa: float | None = None
    link: LinkFit | None = None
    bucket_bytes: tuple[int, ...] = ()
    gradients: int = 0
    sizes_from: str | None = None
    doubts: tuple[str, ...] = ()

    def to_frame(self) -> DataFrame:
        """One row per change; times in nanoseconds."""
        return make_frame(Prediction, self.predictions)


@dataclass(frozen=True)
class Captured:
    """What captures of a run tell.

    Attributes:
        structures: Of the captured ranks.
        parameters: Bytes of the trained parameters by ``run.json``; empty where unknown.
        holds_at_most: See :class:`Predictor`.
        shares_gpu: Whether ranks take turns on a GPU; ``is_alone``: whether the job has one rank only.
    """

    structures: tuple[RankStructure, ...]
    parameters: tuple[int, ...] = ()
    holds_at_most: bool = False
    shares_gpu: bool = False
    is_alone: bool = False

    @property
    def reason(self) -> str | None:
        """Why nothing can be predicted from them, whatever is asked."""
        reason = next((one.reason for one in self.structures if one.reason), None if self.structures else NO_RANKS)
        if reason:
            return WHOLE_GRAPHS if reason == GRAPHS else reason
        if self.is_alone:
            return ALONE
        return SHARED if self.shares_gpu else None

    @property
    def queued(self) -> str | None:
        """Why the times of its collectives are those of no link."""
        at_once = max(one.at_once for one in self.structures)
        return QUEUED.format(at_once=at_once) if at_once > 1 and self.structures[0].is_gloo else None

    @property
    def least_waiting(self) -> int:
        """The rank whose collectives take least, as it waits least for the others."""
        return int(np.argmin([float(one.took_ns.mean()) for one in self.structures]))

    def gradients(self, parameters: Sequence[int] | None = None) -> Gradients | str:
        return find_gradients(self.structures[self.least_waiting], self.parameters, parameters)


def predict_run(
    own: Captured,
    questions: Sequence[Question],
    find_slowed: Callable[[], Slowed],
    parameters: Sequence[int] | None = None,
    calibration: Captured | None = None,
) -> RunPrediction:
    """Answer questions about a run, or say why nothing can be predicted.

    Args:
        own: The run.
        questions: What is asked.
        find_slowed: Called for how much communication slows compute, where no other run tells.
        parameters: Bytes of the trained parameters, in their order, from the user.
        calibration: Another run of the same job, which hides more or less: it tells what communication slows and, if
            collectives of this run share cores, what one takes.
    """
    reason = own.reason or (calibration.reason if calibration else None)
    source = calibration if calibration and own.reason is None and own.queued else own
    reason = reason or source.queued or (_other_job(own, calibration) if calibration else None)
    if reason:
        return RunPrediction(reason)
    at = own.least_waiting
    structure = own.structures[at]
    slowed = calibrate(structure, calibration.structures[calibration.least_waiting]) if calibration else find_slowed()
    if slowed.share is None:
        words = NO_KAPPA_ON_CPU if structure.on_host else NO_KAPPA
        why = slowed.reason or ON_CPU
        return RunPrediction(why if calibration else words.format(why=why))
    gradients, of_link = own.gradients(parameters), source.gradients(parameters)
    for found in (gradients, of_link):
        if isinstance(found, str):
            return RunPrediction(found)
    assert not isinstance(gradients, str)
    assert not isinstance(of_link, str)
    link = fit_link(source.structures[source.least_waiting].took_ns.astype(float), of_link.bucket_bytes)
    if isinstance(link, str):
        return RunPrediction(link, sizes_from=gradients.source, doubts=gradients.doubts)
    predictor = Predictor(
        structure,
        gradients,
        link,
        slowed,
        holds_at_most=own.holds_at_most,
        transfers=_fit_transfers(own.structures, gradients),
    )
    answer = RunPrediction(
        None,
        rank=structure.rank,
        steps=len(structure.keys),
        measured_ns=round(float(predictor.today.measured_ns.mean())),
        simulated_ns=round(float(predictor.simulated_ns.mean())),
        kappa=1 / (1 - predictor.share),
        link=link,
        bucket_bytes=tuple(gradients.bucket_bytes.tolist()),
        gradients=len(gradients.bytes) if gradients.are_single else 0,
        sizes_from=gradients.source,
        doubts=gradients.doubts,
    )
    if predictor.off > MOST_OFF:
        return replace(answer, reason=OFF.format(off=100 * predictor.off, most=100 * MOST_OFF))
    ranks = len(own.structures)
    return replace(answer, predictions=tuple(predictor.answer(one, ranks) for one in questions))


def _other_job(own: Captured, calibration: Captured) -> str | None:
    """Why a capture is none of the same job; ``None`` if nothing tells that."""
    one, other = own.structures[own.least_waiting], calibration.structures[calibration.least_waiting]
    if one.on_host != other.on_host:
        difference = "on a CPU" if other.on_host else "on a GPU"
    elif one.world_size and other.world_size and one.world_size != other.world_size:
        difference = f"of {other.world_size} ranks and not of {one.world_size}"
    elif one.sizes_from and other.sizes_from and abs(one.bytes.sum() - other.bytes.sum()) > _PADDING * one.bytes.sum():
        sizes = [mebibytes(int(structure.bytes.sum())) for structure in (other, one)]
        difference = "whose gradients have {} and not {}".format(*sizes)
    else:
        return None
    return OTHER_JOB.format(difference=difference)


class Predictor:
    """Answers questions about the steps of one rank.

    Attributes:
        holds_at_most: Whether a bucket holds at most its cap, as ours do, instead of being closed when it reaches it.
    """

    def __init__(
        self,
        structure: RankStructure,
        gradients: Gradients,
        link: LinkFit,
        slowed: Slowed,
        *,
        holds_at_most: bool = False,
        transfers: LinkFit | None = None,
    ) -> None:
        self.structure, self.gradients, self.link, self.slowed = structure, gradients, link, slowed
        self.holds_at_most, self.transfers = holds_at_most, transfers
        self.share = min(0.95, max(0.0, slowed.share or 0.0))
        self.today = divide_today(structure, gradients, self.share)

    @cached_property
    def simulated_ns(self) -> Floats:
        return simulate(self.today.model, self.gradients.buckets, self.link.times, self.share)

    @property
    def off(self) -> float:
        """How far the simulation of today is off, as a share of the measured step."""
        measured = float(self.today.measured_ns.mean())
        return abs(float(self.simulated_ns.mean()) - measured) / measured

    def buckets(self, question: Question) -> Buckets | None:
        """The buckets of a question; ``None`` if gradients are not known singly, and it needs them."""
        sizes = self.gradients.bytes
        if question.kind == ONE_BUCKET:
            return [list(range(len(sizes)))]
        if question.kind != BUCKET_SIZE:
            return self.gradients.buckets
        cap = question.cap_bytes
        if not self.gradients.are_single and cap < self.gradients.bucket_bytes.max():
            return None
        if self.holds_at_most:
            return fill_at_most(sizes, cap)
        rule = self.gradients.rule
        return rule.buckets(sizes, cap) if rule else fill_until_reached(sizes, cap, cap)

    def change_ns(self, question: Question, buckets: Buckets) -> Floats:
        """The change of each step that is simulated; shape (steps)."""
        return self._changed(question, buckets, self.today.model, self.link.times, self.share)

    def _changed(
        self,
        question: Question,
        buckets: Buckets,
        model: StepModel,
        link: LinkTimes,
        share: float,
    ) -> Floats:
        before = simulate(model, self.gradients.buckets, link, share)
        wire, changed, times = 1.0, model, link
        if question.kind == VIEWS:
            changed = model.without_copies()
        elif question.kind == HALF_BYTES:
            wire = 0.5
        elif question.kind == TIME_PER_BYTE:
            times = replace(link, ns_per_byte=link.ns_per_byte * (question.value or 1.0))
        elif question.kind == COMMUNICATION:
            times = LinkTimes(0.0, 0.0)
        elif question.kind == WAITS and self.transfers is not None:
            times = self.transfers.times
        return simulate(changed, buckets, times, share, wire) - before

    def answer(self, question: Question, ranks: int) -> Prediction:
        """The prediction, or why there is none; ``ranks`` is the number of captured ranks."""
        if reason := self._refuse(question, ranks):
            return _refused(question, reason)
        buckets = self.buckets(question)
        if buckets is None:
            return _refused(question, NOT_DIVIDED)
        sizes = self.gradients.bytes
        largest = max(int(sizes[list(bucket)].sum()) for bucket in buckets)
        change_ns = self.change_ns(question, buckets)
        mean_ns = float(change_ns.mean())
        if question.kind in (BUCKET_SIZE, ONE_BUCKET) and not self.link.reaches(largest):
            measured = mebibytes(self.link.largest_bytes)
            reason = BEYOND.format(size=mebibytes(largest), largest=measured, needed=mebibytes(-(-largest // 2)))
            return replace(
                _refused(question, reason), calls=len(buckets), largest_bytes=largest, beyond_ns=round(mean_ns)
            )
        parts = dict(self._doubts(question, buckets, change_ns))
        if not np.any(change_ns) and question.kind in (BUCKET_SIZE, ONE_BUCKET):
            return Prediction(question.text, len(buckets), largest, 0, 0, 0, CANNOT_BE_TOLD, SAME)
        half = hypot(*parts.values())
        low, high = mean_ns - half, mean_ns + half
        verdict = GAIN if high < 0 else LOSS if low > 0 else CANNOT_BE_TOLD
        return Prediction(
            question.text,
            len(buckets),
            largest,
            round(mean_ns),
            round(low),
            round(high),
            verdict,
            parts_ns={name: round(ns) for name, ns in parts.items()},
        )

    def _refuse(self, question: Question, ranks: int) -> str | None:
        if question.kind == RANKS:
            if self.structure.world_size == question.value:
                return SAME_RANKS
            known = self.structure.world_size or "its"
            return OTHER_RANKS.format(ranks=known, asked=f"{question.value:g}")
        if question.kind in (COMMUNICATION, WAITS):
            world = self.structure.world_size or 2
            if ranks < 2:
                return ONE_RANK
            if ranks < world:
                return SOME_RANKS.format(ranks=ranks, world=world, files=MOST_FILES)
            if question.kind == WAITS and self.transfers is None:
                return NO_TRANSFERS
        if question.kind == HALF_BYTES and self.structure.are_half:
            return IS_HALF
        if question.kind == VIEWS and not self.today.model.copy_ns.any():
            return NO_COPIES
        return None

    def _doubts(self, question: Question, buckets: Buckets, change_ns: Floats) -> Iterator[tuple[str, float]]:
        """Half of a 90 % interval, by each doubt alone."""
        model, link, share = self.today.model, self.link, self.share

        def moved(at: StepModel, times: LinkTimes, slowed: float) -> float:
            changed = self._changed(question, buckets, at, times, slowed)
            return abs(float(changed.mean() - change_ns.mean()))

        yield "steps", _half_of_blocks(change_ns)
        low, high = self.slowed.low, self.slowed.high
        ends = (min(0.95, max(0.0, end)) for end in (0.0 if low is None else low, 1.0 if high is None else high))
        by_share = [(end, divide_today(self.structure, self.gradients, end)) for end in ends]
        yield "kappa", _OF_95 * max(moved(today.model, link.times, end) for end, today in by_share)
        yield "time per byte", max(moved(model, link.turned(sign), share) for sign in (-1.0, 1.0))
        yield "overhead", max(moved(model, link.raised(sign), share) for sign in (-1.0, 1.0))
        if not self.today.knows_ready:
            at = (self.today.early, self.today.late)
            yield "ready", max(moved(one, link.times, share) for one in at)
        rule = self.gradients.rule
        if question.kind == BUCKET_SIZE and rule is not None and rule.is_either and not self.holds_at_most:
            others = fill_until_reached(self.gradients.bytes, question.cap_bytes, question.cap_bytes)
            yield "first bucket", abs(float(self.change_ns(question, others).mean() - change_ns.mean()))
        yield "model", _SIGMAS * MODEL_ERROR * float(self.today.measured_ns.mean())


def _refused(question: Question, reason: str) -> Prediction:
    return Prediction(question.text, None, None, None, None, None, REFUSED, reason)


def _half_of_blocks(values: Floats) -> float:
    """Half of the 90 % interval of the mean, by drawing blocks of following steps (H. Künsch, 1989).

    Steps near each other are alike; a block has the cube root of their number. Few blocks differ less than all would:
    Student's t for their number makes up for that.
    """
    count = len(values)
    length = max(1, int(count ** (1 / 3) + 1e-9))
    blocks = count / length
    generator = np.random.default_rng(0)
    starts = generator.integers(0, count - length + 1, (_DRAWS, -(-count // length)))
    rows = (starts[..., None] + np.arange(length)).reshape(_DRAWS, -1)[:, :count]
    deviation = float(values[rows].mean(axis=1).std())
    return float(t_95(blocks - 1) * deviation * np.sqrt(blocks / (blocks - 1)))


def _fit_transfers(structures: Sequence[RankStructure], gradients: Gradients) -> LinkFit | None:
    """What collectives take without waits: the shortest part of the ranks; ``None`` for one rank."""
    keys = structures[0].keys
    for one in structures[1:]:
        keys = np.intersect1d(keys, one.keys)
    if len(structures) < 2 or not len(keys) or len({one.calls for one in structures}) > 1:
        return None
    parts = [one.took_ns[np.isin(one.keys, keys)] for one in structures]
    if len({part.shape for part in parts}) > 1:
        return None
    found = fit_link(np.minimum.reduce(parts).astype(float), gradients.bucket_bytes)
    return None if isinstance(found, str) else found
