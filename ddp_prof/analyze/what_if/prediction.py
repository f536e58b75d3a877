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

from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.step_cost import ON_CPU, Slowed
from ddp_prof.analyze.what_if.blocks import half_of_blocks
from ddp_prof.analyze.what_if.calibration import calibrate
from ddp_prof.analyze.what_if.captured import Captured
from ddp_prof.analyze.what_if.link import LinkFit, fit_means
from ddp_prof.analyze.what_if.questions import (
    BUCKET_SIZE,
    COMMUNICATION,
    HALF_BYTES,
    ONE_BUCKET,
    RANKS,
    TIME_PER_BYTE,
    WAITS,
    Question,
)
from ddp_prof.analyze.what_if.rules import fill_at_most, fill_until_reached, mebibytes
from ddp_prof.analyze.what_if.simulate import Buckets, Floats, LinkTimes, StepModel, simulate
from ddp_prof.analyze.what_if.sizes import Gradients
from ddp_prof.analyze.what_if.structure import LEAST_STEPS, RankStructure
from ddp_prof.analyze.what_if.today import divide_today

GAIN, LOSS, NO_CHANGE = "gain", "loss", "no change"
CANNOT_BE_TOLD, REFUSED = "cannot be told", "not predicted"

MOST_FILES = 8
"""``runs.run.MOST_FILES_OF_KERNELS``: of so many files the structure of steps is known."""
MOST_OFF = 0.02
"""If the simulation of today is off by a larger share of the step, nothing is predicted."""
MODEL_ERROR = 0.0053
"""The root of the mean square of what predicted changes were off by, as a share of the step.

One round predicts one round (``docs/what_if.md``); of medians of five rounds it is three quarters of that.
"""
MODEL_ERROR_FROM = (
    "what predictions were off by for ranks of gloo on a CPU (docs/what_if.md); on GPUs that was not measured"
)
SIGMAS = 1.645
"""Half of a 90 % interval in standard deviations."""
_OF_95 = 1.645 / 1.96

NO_KAPPA = (
    "by how much communication slows compute is not known ({why}): capture it with more steps, or with several "
    "collectives in a step, some of them beside compute"
)
NO_KAPPA_ON_CPU = (
    "by how much communication slows compute is not known ({why}): give a second capture of the same job that hides "
    "more of its communication, or less, to 'ddp-prof whatif --calibrate'"
)
OFF = (
    "a simulation of today's step is off by {off:.1f} %, and at most {most:.0f} % is allowed: something else than "
    "backward and its collectives decides how long the step is (on a GPU, 'ddp-prof critical' shows what)"
)
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
OTHER_RANKS = (
    "a link between {ranks} ranks says nothing of one between {asked}, nor of other nodes: "
    "capture it with {asked} ranks"
)
SAME = "the same buckets as today"
SAME_TIME = "the time per byte of today"
FEW_SHARED = (
    "only {shared} steps are in the captures of all ranks, and {least} are needed: record all ranks at the same time"
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one change would make of a step; times in nanoseconds, a gain is negative.

    Attributes:
        change: Words for it.
        calls, largest_bytes: Collectives of a step, and the bytes of the largest; ``None`` if not predicted.
        change_ns, low_ns, high_ns: With a 90 % interval; ``None`` for ``reason``.
        verdict: ``gain``, ``loss``, ``no change`` of what is so today, ``cannot be told``, or ``not predicted``.
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
        kappa: How many times as long compute takes beside communication, over all time beside it (``cost.kappa`` is
            that of the kernels that could be compared: ``docs/metrics.md``).
        bucket_bytes: Of today's buckets.
        sizes_from, doubts: Where the bytes of gradients are from, and what is assumed.
        notes: Which ranks are left out, and why.
        shared_steps: Of how many steps it is known what the ranks wait for; ``None`` for one rank.
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
    notes: tuple[str, ...] = ()
    shared_steps: int | None = None

    def to_frame(self) -> DataFrame:
        """One row per change; times in nanoseconds."""
        return make_frame(Prediction, self.predictions)


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
    if reason:
        return RunPrediction(reason)
    notes = tuple(own.left_out) + tuple(
        f"--calibrate: {line}" for line in (calibration.left_out if calibration else ())
    )
    sources = _sources_of_link(own, calibration)
    reason = sources if isinstance(sources, str) else own.other_job(calibration) if calibration else None
    if reason or isinstance(sources, str):
        return RunPrediction(reason, notes=notes)
    structure = own.least_waiting
    slowed = _find_slowed(structure, find_slowed, calibration)
    if slowed.share is None:
        return RunPrediction(slowed.reason, notes=notes)
    gradients = own.gradients(parameters)
    if isinstance(gradients, str):
        return RunPrediction(gradients, notes=notes)
    link = _fit_link(sources, own, gradients, parameters)
    if isinstance(link, str):
        return RunPrediction(link, sizes_from=gradients.source, doubts=gradients.doubts, notes=notes)
    predictor = Predictor(
        structure,
        gradients,
        link,
        slowed,
        holds_at_most=own.holds_at_most,
        transfers=own.transfers(gradients),
        shared_steps=len(own.shared_keys) if len(own.usable) > 1 else None,
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
        notes=notes,
        shared_steps=predictor.shared_steps,
    )
    if predictor.off > MOST_OFF:
        return replace(answer, reason=OFF.format(off=100 * predictor.off, most=100 * MOST_OFF))
    ranks = len(own.usable)
    return replace(answer, predictions=tuple(predictor.answer(one, ranks) for one in questions))


def _sources_of_link(own: Captured, calibration: Captured | None) -> list[Captured] | str:
    """The runs whose collectives tell what one takes alone; a text says why none does."""
    runs = [own, calibration] if calibration else [own]
    found = [one for one in runs if not one.queued]
    return found or runs[-1].queued or ""


def _find_slowed(structure: RankStructure, find: Callable[[], Slowed], calibration: Captured | None) -> Slowed:
    """How much communication slows: by kernels, or by two runs; of both the one that is known better."""
    by_kernels = find()
    by_runs = calibrate(structure, calibration.least_waiting) if calibration else None
    known = [one for one in (by_kernels, by_runs) if one is not None and one.share is not None]
    if known:
        return min(known, key=_width)
    if by_runs is not None:
        return by_runs
    words = NO_KAPPA_ON_CPU if structure.on_host else NO_KAPPA
    return Slowed(None, None, None, words.format(why=by_kernels.reason or ON_CPU))


def _width(slowed: Slowed) -> float:
    return 1.0 if slowed.low is None or slowed.high is None else slowed.high - slowed.low


def _fit_link(
    sources: Sequence[Captured], own: Captured, gradients: Gradients, parameters: Sequence[int] | None
) -> LinkFit | str:
    """A line through the collectives of these runs."""
    means_ns, sizes = [], []
    for source in sources:
        found = gradients if source is own else source.gradients(parameters)
        if isinstance(found, str):
            return found
        means_ns.append(source.least_waiting.took_ns.mean(axis=0))
        sizes.append(found.bucket_bytes)
    return fit_means(np.concatenate(means_ns), np.concatenate(sizes))


class Predictor:
    """Answers questions about the steps of one rank.

    Attributes:
        holds_at_most: Whether a bucket holds at most its cap, as ours do, instead of being closed when it reaches it.
        transfers: What a collective takes that waits for no rank, by ``shared_steps`` steps; ``None`` if not known.
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
        shared_steps: int | None = None,
    ) -> None:
        self.structure, self.gradients, self.link, self.slowed = structure, gradients, link, slowed
        self.holds_at_most, self.transfers, self.shared_steps = holds_at_most, transfers, shared_steps
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
        transfers: LinkTimes | None = None,
    ) -> Floats:
        before = simulate(model, self.gradients.buckets, link, share)
        changed = model.without_copies() if question.saves_copies else model
        wire, times = 1.0, link
        if question.kind == HALF_BYTES:
            wire = 0.5
        elif question.kind == TIME_PER_BYTE:
            times = replace(link, ns_per_byte=link.ns_per_byte * (question.value or 1.0))
        elif question.kind == COMMUNICATION:
            times = LinkTimes(0.0, 0.0)
        elif question.kind == WAITS and self.transfers is not None:
            times = transfers or self.transfers.times
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
        if same := self._why_same(question, buckets):
            return Prediction(question.text, len(buckets), largest, 0, 0, 0, NO_CHANGE, same)
        change_ns = self.change_ns(question, buckets)
        mean_ns = float(change_ns.mean())
        if question.kind in (BUCKET_SIZE, ONE_BUCKET) and not self.link.reaches(largest):
            measured = mebibytes(self.link.largest_bytes)
            reason = BEYOND.format(size=mebibytes(largest), largest=measured, needed=mebibytes(-(-largest // 2)))
            return replace(
                _refused(question, reason), calls=len(buckets), largest_bytes=largest, beyond_ns=round(mean_ns)
            )
        parts = dict(self._doubts(question, buckets, change_ns))
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

    def _why_same(self, question: Question, buckets: Buckets) -> str | None:
        """Why nothing changes: it is so today; ``None`` if it is not."""
        if question.saves_copies:
            return None
        if question.kind in (BUCKET_SIZE, ONE_BUCKET) and [list(one) for one in buckets] == self.gradients.buckets:
            return SAME
        return SAME_TIME if question.kind == TIME_PER_BYTE and question.value == 1 else None

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
                shared = self.shared_steps or 0
                return FEW_SHARED.format(shared=shared, least=LEAST_STEPS) if shared < LEAST_STEPS else NO_TRANSFERS
        if question.kind == HALF_BYTES and self.structure.are_half:
            return IS_HALF
        if question.saves_copies and not self.today.model.copy_ns.any():
            return NO_COPIES
        return None

    def _doubts(self, question: Question, buckets: Buckets, change_ns: Floats) -> Iterator[tuple[str, float]]:
        """Half of a 90 % interval, by each doubt alone."""
        model, link, share = self.today.model, self.link, self.share

        def moved(at: StepModel, times: LinkTimes, slowed: float) -> float:
            changed = self._changed(question, buckets, at, times, slowed)
            return abs(float(changed.mean() - change_ns.mean()))

        yield "steps", half_of_blocks(change_ns)
        low, high = self.slowed.low, self.slowed.high
        shares = (min(0.95, max(0.0, end)) for end in (0.0 if low is None else low, 1.0 if high is None else high))
        by_share = [(end, divide_today(self.structure, self.gradients, end)) for end in shares]
        yield "kappa", _OF_95 * max(moved(today.model, link.times, end) for end, today in by_share)
        yield "time per byte", max(moved(model, link.turned(sign), share) for sign in (-1.0, 1.0))
        yield "overhead", max(moved(model, link.raised(sign), share) for sign in (-1.0, 1.0))
        if question.kind == WAITS and self.transfers is not None:
            lines = self.transfers
            ends = [of(sign) for of in (lines.turned, lines.raised) for sign in (-1.0, 1.0)]
            offs = [float(self._changed(question, buckets, model, link.times, share, end).mean()) for end in ends]
            yield "transfers", max(abs(off - float(change_ns.mean())) for off in offs)
        if not self.today.knows_ready:
            at = (self.today.early, self.today.late)
            yield "ready", max(moved(one, link.times, share) for one in at)
        rule = self.gradients.rule
        if question.kind == BUCKET_SIZE and rule is not None and rule.is_either and not self.holds_at_most:
            others = fill_until_reached(self.gradients.bytes, question.cap_bytes, question.cap_bytes)
            yield "first bucket", abs(float(self.change_ns(question, others).mean() - change_ns.mean()))
        yield "model", SIGMAS * MODEL_ERROR * float(self.today.measured_ns.mean())


def _refused(question: Question, reason: str) -> Prediction:
    return Prediction(question.text, None, None, None, None, None, REFUSED, reason)
