"""What the captures of all ranks of a run tell together: which ranks can be used, and facts of the whole job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from ddp_prof.analyze.statistics import LEAST_STEPS
from ddp_prof.analyze.what_if.link import LinkFit, fit_link
from ddp_prof.analyze.what_if.rules import mebibytes
from ddp_prof.analyze.what_if.sizes import Gradients, find_gradients
from ddp_prof.analyze.what_if.structure import RankStructure
from ddp_prof.analyze.why_unknown import GRAPHS, NO_COMMUNICATION
from ddp_prof.columns import count_noun, listed
from ddp_prof.table import Ints

_PADDING = 0.01
"""Two captures are of one job if their bytes of gradients differ by at most this fraction: buckets may be padded."""

NO_RANKS = "no rank was recorded in it: capture a step of training"
QUEUED = (
    "up to {at_once} of its collectives of gloo run at once and share cores, so their times say nothing of one alone: "
    "capture the job with all-reduces that wait for each other, such as naive, and give that to "
    "'ddp-prof whatif --calibrate'"
)
SHARED = "its ranks share a GPU and take turns on it, so its times are no link's: capture it with a GPU for each rank"
ALONE = "it has one rank, which has nobody to communicate with: capture it with several ranks"
WHOLE_GRAPHS = f"{GRAPHS}: record with --cuda-graph-trace=node"
OTHER_JOB = "--calibrate has another job, {difference}: give a capture of the same job, with the same model and ranks"
LEFT_OUT = "{ranks} left out: {reason}"


@dataclass(frozen=True)
class Captured:
    """What the captures of one run tell.

    Attributes:
        structures: The steps and collectives of each captured rank.
        parameters: Bytes of each trained parameter according to ``run.json``; empty where unknown.
        holds_at_most: See :class:`ddp_prof.analyze.what_if.prediction.Predictor`.
        shares_gpu: Whether several ranks take turns on one GPU.
        is_alone: Whether the job has one rank only.
    """

    structures: tuple[RankStructure, ...]
    parameters: tuple[int, ...] = ()
    holds_at_most: bool = False
    shares_gpu: bool = False
    is_alone: bool = False

    @cached_property
    def usable(self) -> tuple[RankStructure, ...]:
        """The ranks that a prediction can use; not empty if :attr:`reason` is ``None``."""
        return tuple(one for one in self.structures if one.reason is None)

    @property
    def reason(self) -> str | None:
        """Why nothing can be predicted from this run, whatever is asked; ``None`` if predictions are possible."""
        if not self.structures:
            return NO_RANKS
        # A reason that holds for the whole job counts even if other ranks are usable, so it is looked for first. That a
        # device communicates nothing counts only if that holds for all of them.
        of_job_first = sorted(self.structures, key=lambda one: (not one.is_of_job, one.reason == NO_COMMUNICATION))
        for one in of_job_first:
            if one.reason and (one.is_of_job or not self.usable):
                return _in_words(one.reason)
        if self.is_alone:
            return ALONE
        return SHARED if self.shares_gpu else None

    @property
    def left_out(self) -> Iterator[str]:
        """One line of text for each reason why ranks are left out, which names these ranks."""
        reasons = dict.fromkeys(one.reason for one in self.structures if one.reason)
        for reason in reasons:
            which = [one.rank for one in self.structures if one.reason == reason]
            # Where others communicate, something in the trace does.
            why = "it is not known to communicate" if reason == NO_COMMUNICATION else _in_words(reason or "")
            yield LEFT_OUT.format(ranks=_ranks_text(which), reason=why)

    @property
    def queued(self) -> str | None:
        """Why the times of the collectives do not tell how fast the link is; ``None`` if they do."""
        at_once = max(one.at_once for one in self.usable)
        return QUEUED.format(at_once=at_once) if at_once > 1 and self.usable[0].is_gloo else None

    @cached_property
    def least_waiting(self) -> RankStructure:
        """The usable rank whose collectives take the least time on average: it waits least for the other ranks."""
        return min(self.usable, key=lambda one: float(one.took_ns.mean()))

    @cached_property
    def shared_keys(self) -> Ints:
        """The keys (``RankStructure.keys``) of the steps that were chosen for every usable rank."""
        return reduce(np.intersect1d, [one.keys for one in self.usable])

    def gradients(self, parameters: Sequence[int] | None = None) -> Gradients | str:
        """Return the gradients of the job, or a text that says why they are unknown; see :func:`find_gradients`."""
        return find_gradients(self.least_waiting, self.parameters, parameters)

    def transfers(self, gradients: Gradients) -> LinkFit | None:
        """Return the line of time by size for collectives that wait for no rank.

        For each collective of a step, the rank that arrives last waits for no other rank, so the shortest duration over
        the ranks is the transfer. ``None`` for one rank, for too few steps that all ranks have, if the ranks have
        unequal collectives, or if no line fits.
        """
        ranks, keys = self.usable, self.shared_keys
        if len(ranks) < 2 or len(keys) < LEAST_STEPS or len({one.calls for one in ranks}) > 1:
            return None
        parts = [one.took_ns[np.isin(one.keys, keys)] for one in ranks]
        if len({part.shape for part in parts}) > 1:
            return None
        found = fit_link(np.minimum.reduce(parts).astype(float), gradients.bucket_bytes)
        return None if isinstance(found, str) else found

    def other_job(self, calibration: Captured) -> str | None:
        """Return why ``calibration`` is a capture of another job; ``None`` if nothing shows that it is."""
        one, other = self.least_waiting, calibration.least_waiting
        if one.on_host != other.on_host:
            difference = "on a CPU" if other.on_host else "on a GPU"
        elif one.world_size and other.world_size and one.world_size != other.world_size:
            difference = f"of {count_noun(other.world_size, 'rank')} and not of {one.world_size}"
        elif (
            one.sizes_from
            and other.sizes_from
            and abs(one.bytes.sum() - other.bytes.sum()) > _PADDING * one.bytes.sum()
        ):
            sizes = [mebibytes(int(structure.bytes.sum())) for structure in (other, one)]
            difference = "whose gradients have {} and not {}".format(*sizes)
        else:
            return None
        return OTHER_JOB.format(difference=difference)


def _in_words(reason: str) -> str:
    return WHOLE_GRAPHS if reason == GRAPHS else reason


def _ranks_text(ranks: Sequence[int | None]) -> str:
    """Return the beginning of a sentence, such as "ranks 0, 3 and 2 more are"; ``None`` is a rank without a number."""
    known = [str(rank) for rank in sorted(rank for rank in ranks if rank is not None)]
    unknown = len(ranks) - len(known)
    if not known:
        return "one rank is" if unknown == 1 else f"{unknown} ranks are"
    text = listed([*known, *([f"{unknown} more"] if unknown else [])])
    return f"rank {text} is" if len(ranks) == 1 else f"ranks {text} are"
