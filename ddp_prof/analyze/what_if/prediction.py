"""Predict how a change alters the length of a step: the simulated step with the change, less that of today.

Errors of the simulation are alike in both, so most of them cancel in the difference. The interval of a prediction
combines how much steps vary, how well the slowdown of compute and the time per byte are known, the unknown times at
which gradients become ready, and by how much predictions were off where both sides were measured
(:data:`MODEL_ERROR`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot

import numpy as np

from ddp_prof.analyze.result_bases import DataFrame, FrameResult, make_frame
from ddp_prof.analyze.statistics import LEAST_STEPS, half_width_of_mean
from ddp_prof.analyze.step_cost import ON_CPU, Slowed
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
from ddp_prof.analyze.what_if.rules import DEFAULT_MB, fill_at_most, fill_until_reached, mebibytes
from ddp_prof.analyze.what_if.simulate import Buckets, LinkTimes, StepModel, simulate
from ddp_prof.analyze.what_if.sizes import Gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.analyze.what_if.today import divide_today
from ddp_prof.table import Floats
from ddp_prof.variants import BYTES_PER_MB

GAIN, LOSS, NO_CHANGE = "gain", "loss", "no change"
CANNOT_BE_TOLD, REFUSED = "cannot be told", "not predicted"

MOST_FILES = 8
"""The structure of steps is read from this number of files at most: ``runs.run.MOST_FILES_OF_KERNELS``."""
MOST_OFF = 0.02
"""If the simulation of today's step is off by a larger fraction of the step, nothing is predicted."""
MOST_OFF_LINE = 0.15
"""If the collectives of one rank alone are off their line by a larger fraction, a part of their time is waits."""
MODEL_ERROR = 0.0053
"""The root mean square of the error of predicted changes, as a fraction of the step.

This is the error where one round of measurements predicts another single round (``docs/what_if.md``); for medians of
five rounds it is three quarters of that.
"""
MODEL_ERROR_FROM = (
    "what predictions were off by for ranks of gloo on a CPU (docs/what_if.md); on GPUs that was not measured"
)
SIGMAS = 1.645
"""Half of the width of a 90 % interval of a normal distribution, in standard deviations."""
_PIECES = 16
"""Into how many equal gradients a bucket is divided, to see what it matters where in it another bucket would end."""
_OF_95 = 1.645 / 1.96
"""The width of a 90 % interval, as a fraction of that of a 95 % interval."""

NO_KAPPA = (
    "by how much communication slows compute is not known ({why}): give a second capture of the same job that hides "
    "more of its communication, or less, as with another bucket size, to 'ddp-prof whatif --calibrate'"
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
NO_COPIES = "no copies out of buckets are known, as with gradient_as_bucket_view: capture it without that to compare"
NO_COPIES_ON_CPU = (
    "what copies out of buckets take is not recorded on a CPU: measure it, by "
    "'ddp-prof tune --try gradient_as_bucket_view'"
)
ONE_RANK = "one rank does not tell what its collectives wait for and what they transfer: give the captures of all ranks"
SOME_RANKS = (
    "how long collectives wait for other ranks is not known, as only {ranks} of {world} ranks were read: give the "
    "captures of all ranks"
)
MANY_RANKS = (
    "how long collectives wait for other ranks is not known, as only {ranks} of {world} ranks were read: with a "
    "file for each rank, at most {files} are"
)
"""Said instead of :data:`SOME_RANKS` where more files would not be read."""
SOME_WAITS = (
    "the times of its collectives are off by {off:.0f} % from what their sizes explain, as where a rank waits for "
    "others, which a faster link does not shorten: give the captures of all ranks"
)
NO_TRANSFERS = (
    "the shortest duration of its collectives over all ranks does not grow with their size, so what a transfer alone "
    "takes is not known: give captures of all ranks that were recorded at the same time"
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
    """By how much one change alters the length of a step; times in nanoseconds, negative if the step gets shorter.

    Attributes:
        change: The change in words.
        calls, largest_bytes: The collectives of a step after the change, and the bytes of the largest of them; ``None``
            if the change is not predicted.
        change_ns, low_ns, high_ns: The mean change per step, and its 90 % interval; ``None`` if not predicted.
        verdict: ``gain``, ``loss``, ``no change`` where today's step is like that already, ``cannot be told``, or
            ``not predicted``.
        reason: Why the change is not predicted, or why it changes nothing.
        beyond_ns: The simulated change where a collective is much larger than the measured ones; it is no prediction.
        parts_ns: For each source of uncertainty, half of the width of the interval if it were the only one; for ``first
            bucket`` the width, as the interval then holds both changes.
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
    """By how much each change that was asked for alters the step of a run.

    Attributes:
        reason: Why nothing is predicted; ``None`` if there are predictions.
        predictions: One for each question, in their order.
        rank: The rank whose steps were simulated. Of several ranks it is that whose collectives take least time, as it
            waits least for the others.
        steps: How many steps were simulated.
        measured_ns, simulated_ns: The mean length of these steps as measured, and as simulated without a change.
        kappa: How many times as long compute takes beside communication, over all time beside it (``cost.kappa`` is
            that of the kernels that could be compared: ``docs/metrics.md``).
        link: How long a collective takes by its size.
        bucket_bytes: The bytes of each bucket today.
        gradients: The number of gradients; 0 if single gradients are not known.
        sizes_from, doubts: Where the bytes of gradients are from, and what is assumed about them.
        notes: Which ranks are left out, and why.
        shared_steps: In how many steps it is known how long the ranks wait for each other; ``None`` for one rank.
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
        own: The run whose steps are to change.
        questions: The changes that are asked for.
        find_slowed: Returns by how much communication slows compute according to the kernels of the run.
        parameters: Bytes of each trained parameter in the order of the model, as the user gives them.
        calibration: Another run of the same job, which overlaps more of its communication, or less. It tells by how
            much communication slows compute, and how long a collective takes alone if those of ``own`` share cores.
    """
    # Each of these steps can find a reason why nothing can be predicted; the first reason is the answer.
    reason = own.reason or (calibration.reason if calibration else None)
    if reason:
        return RunPrediction(reason)
    notes = tuple(own.left_out) + tuple(
        f"--calibrate: {line}" for line in (calibration.left_out if calibration else ())
    )
    # The runs that tell the time per byte; by how much communication slows compute; the gradients; the line of times.
    sources = _sources_of_link(own, calibration)
    if isinstance(sources, str):
        return RunPrediction(sources, notes=notes)
    if calibration and (reason := own.other_job(calibration)):
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
    # Nothing is predicted if a simulation of today's step is too far from the measured one.
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
    """Return the runs whose collectives tell how long a collective takes alone, or a text that says why none does."""
    runs = [own, calibration] if calibration else [own]
    found = [one for one in runs if not one.queued]
    return found or runs[-1].queued or ""


def _find_slowed(structure: RankStructure, find: Callable[[], Slowed], calibration: Captured | None) -> Slowed:
    """Return by how much communication slows compute, or the reason why that is not known.

    It is estimated from the kernels of the run (``find``) and, if there is a second run, from both runs. The estimate
    with the narrower interval is returned.
    """
    by_kernels = find()
    by_runs = calibrate(structure, calibration.least_waiting) if calibration else None
    known = [one for one in (by_kernels, by_runs) if one is not None and one.share is not None]
    if known:
        return min(known, key=_width)
    if by_runs is not None:
        return by_runs
    return Slowed(None, None, None, NO_KAPPA.format(why=by_kernels.reason or ON_CPU))


def _width(slowed: Slowed) -> float:
    """Return the width of the interval; 1, all that is possible, where it is not known."""
    return 1.0 if slowed.low is None or slowed.high is None else slowed.high - slowed.low


def _fit_link(
    sources: Sequence[Captured], own: Captured, gradients: Gradients, parameters: Sequence[int] | None
) -> LinkFit | str:
    """Fit a line of duration (ns) against size (bytes) to the mean collectives of all ``sources``.

    Returns:
        The line, or a text that says why there is none.
    """
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
        structure: The measured steps of the rank.
        gradients: The gradients of a step, and today's buckets.
        link: How long a collective takes by its size, its waits for other ranks included.
        slowed, share: The fraction of the time beside communication that compute loses: the estimate with its interval,
            and its value limited to 0 to 0.95.
        holds_at_most: Whether a bucket holds at most its cap, as in our variants; in torch's DDP, it is closed when it
            reaches its cap.
        transfers: How long a collective takes that waits for no rank, from the steps that all ranks have; ``None`` if
            not known.
        shared_steps: The number of the steps that all ranks have; ``None`` for one rank.
        today: The measured steps, divided for the simulation.
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
        """The simulated length of each step without a change; shape (steps)."""
        return simulate(self.today.model, self.gradients.buckets, self.link.times, self.share)

    @property
    def off(self) -> float:
        """By how much the simulated mean step differs from the measured one, as a fraction of the measured one."""
        measured = float(self.today.measured_ns.mean())
        return abs(float(self.simulated_ns.mean()) - measured) / measured

    def buckets(self, question: Question) -> Buckets | None:
        """Return the buckets after the change that ``question`` asks about, as lists of positions of gradients.

        ``None`` if the change divides today's buckets and the single gradients are not known.
        """
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
        rule, explicit = self.gradients.rule, fill_until_reached(sizes, cap, cap)
        if rule is None:
            return explicit
        # A recent torch gives the first bucket a cap of its own only where ``bucket_cap_mb`` is not given, as may be
        # today's setting.
        is_default = cap == DEFAULT_MB * BYTES_PER_MB and rule.may_be_default
        return explicit if self.is_recent_torch and not is_default else rule.buckets(sizes, cap)

    @property
    def is_recent_torch(self) -> bool | None:
        """Whether torch is so recent that a cap that is given holds for the first bucket, too; ``None``: not known.

        Names of kernels tell it, or today's buckets.
        """
        told, rule = self.structure.is_recent_torch, self.gradients.rule
        return rule.is_recent_torch if told is None and rule is not None else told

    def _with_other_torch(self, question: Question) -> Buckets | None:
        """Return the buckets if torch is recent, where that is not known and matters; else ``None``."""
        rule, is_asked = self.gradients.rule, question.kind == BUCKET_SIZE and not self.holds_at_most
        if not is_asked or rule is None or self.is_recent_torch is not None:
            return None
        if question.value == DEFAULT_MB and rule.may_be_default:
            return None
        return fill_until_reached(self.gradients.bytes, question.cap_bytes, question.cap_bytes)

    def change_ns(self, question: Question, buckets: Buckets) -> Floats:
        """Return by how much the simulated length of each step changes, in nanoseconds; shape (steps)."""
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
        """Return the same as :meth:`change_ns` for other assumptions about the steps and the link.

        Args:
            question: The change.
            buckets: The buckets after the change.
            model: The steps.
            link: How long a collective takes before the change.
            share: The fraction of the time beside a collective that compute loses.
            transfers: How long a collective takes without waits, where the change removes these; by default, the fit.
        """
        # What the change alters: copies, bytes on the wire (``wire``) or the time of a collective (``times``).
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

    def _in_pieces(self) -> Predictor:
        """Return a predictor of the same steps in which each bucket holds many equal gradients, instead of one."""
        whole = self.gradients
        sizes = np.repeat(whole.bytes // _PIECES, _PIECES)
        sizes[::_PIECES] += whole.bytes % _PIECES
        in_pieces = replace(whole, bytes=sizes, bucket=np.repeat(whole.bucket, _PIECES), are_single=True)
        return Predictor(self.structure, in_pieces, self.link, self.slowed, holds_at_most=self.holds_at_most)

    def answer(self, question: Question, ranks: int) -> Prediction:
        """Return the prediction, which says why if nothing can be told; ``ranks`` is the number of captured ranks."""
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
        # The sources of uncertainty are taken as independent: the squares of their parts of the interval add up.
        parts = dict(self._doubts(question, buckets, change_ns))
        half = hypot(*parts.values())
        low, high = mean_ns - half, mean_ns + half
        # Not known is whether torch is so old that the first bucket keeps its own cap beside the one that is given. The
        # change in the other torch is no error of this one: it has the same errors, and the interval holds both.
        if others := self._with_other_torch(question):
            other_ns = float(self.change_ns(question, others).mean())
            parts["first bucket"] = abs(other_ns - mean_ns)
            low, high = min(low, other_ns - half), max(high, other_ns + half)
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
        """Return why the question changes nothing, as today's step is like that already; ``None`` if it is not."""
        if question.saves_copies:
            return None
        if question.kind in (BUCKET_SIZE, ONE_BUCKET) and [list(one) for one in buckets] == self.gradients.buckets:
            others = self._with_other_torch(question)
            return SAME if others in (None, self.gradients.buckets) else None
        return SAME_TIME if question.kind == TIME_PER_BYTE and question.value == 1 else None

    def _refuse(self, question: Question, ranks: int) -> str | None:
        """Return why the question cannot be answered from the captures of ``ranks`` ranks; ``None`` if it can."""
        if question.kind == RANKS:
            if self.structure.world_size == question.value:
                return SAME_RANKS
            known = self.structure.world_size or "its"
            return OTHER_RANKS.format(ranks=known, asked=f"{question.value:g}")
        if question.kind in (COMMUNICATION, WAITS):  # they need to know how long each rank waits for the others
            world = self.structure.world_size or 2
            if ranks < 2:
                return ONE_RANK
            if ranks < world:
                some = MANY_RANKS if ranks >= MOST_FILES else SOME_RANKS
                return some.format(ranks=ranks, world=world, files=MOST_FILES)
            if question.kind == WAITS and self.transfers is None:
                shared = self.shared_steps or 0
                return FEW_SHARED.format(shared=shared, least=LEAST_STEPS) if shared < LEAST_STEPS else NO_TRANSFERS
        off = self.link.relative_error
        if question.kind in (TIME_PER_BYTE, HALF_BYTES) and ranks < 2 and off > MOST_OFF_LINE:
            return SOME_WAITS.format(off=100 * off)
        if question.kind == HALF_BYTES and self.structure.are_half:
            return IS_HALF
        if question.saves_copies and not self.today.model.copy_ns.any():
            return NO_COPIES_ON_CPU if self.structure.on_host else NO_COPIES
        return None

    def _doubts(self, question: Question, buckets: Buckets, change_ns: Floats) -> Iterator[tuple[str, float]]:
        """Yield each source of uncertainty with half of the width of the 90 % interval that it alone would give.

        Args:
            question: The change.
            buckets: The buckets after it.
            change_ns: The predicted change of each step, in nanoseconds.

        Yields:
            The name of the source, and nanoseconds: by how much the mean change moves if an input goes to an end of its
            interval.
        """
        model, link, share = self.today.model, self.link, self.share

        def moved(at: StepModel, times: LinkTimes, slowed: float) -> float:
            """Return by how much the mean change differs with these inputs."""
            changed = self._changed(question, buckets, at, times, slowed)
            return abs(float(changed.mean() - change_ns.mean()))

        yield "steps", _OF_95 * half_width_of_mean(change_ns)
        # Slowdown of compute: 0 to 1 where its interval is not known. Its interval is one of 95 %.
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
        # Where only whole buckets are known, a bucket that is closed within one of today's is not exactly predicted.
        if question.kind == BUCKET_SIZE and not self.gradients.are_single:
            pieces = self._in_pieces()
            closed = float(pieces.change_ns(question, pieces.buckets(question) or buckets).mean())
            yield "whole buckets", abs(closed - float(change_ns.mean()))
        yield "model", SIGMAS * MODEL_ERROR * float(self.today.measured_ns.mean())


def _refused(question: Question, reason: str) -> Prediction:
    return Prediction(question.text, None, None, None, None, None, REFUSED, reason)
