"""A run's ranks compared: which collectives are one and the same, on one clock, and what of each was exposed.

Everything is computed when it is first asked for, and once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.clock_alignment import APART_NS, SESSION_START, Alignment, compare_ranks
from ddp_prof.analyze.collectives.exposed_time import Exposure, explain_exposure
from ddp_prof.analyze.collectives.matching import Matches, shift_unnumbered_steps
from ddp_prof.analyze.collectives.timing import RankCollectives, find_timings, trim_compute
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.quality.diagnostics import diagnose, find_caveats, merge_file_warnings
from ddp_prof.analyze.result_bases import disambiguate
from ddp_prof.manifest import Caveat, Manifest, format_ranges, label_of, label_of_ranks
from ddp_prof.table import Brief
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Trace

_CLOCKS_APART_NS = 10_000_000_000
"""Usual difference between clocks of machines; a step is seldom longer."""


@dataclass(frozen=True)
class RunAnalysis(Brief):
    """The collectives of a run's ranks, and what follows from comparing them.

    Attributes:
        trace: The file, of several the first.
        files: Their number.
        device: ``cuda`` or ``cpu``, as of ``TraceOverlap``.
        ranks: By rank, then process and device.
        trace_warnings: What the traces do not let one say.
        caveats: Why the run is not representative; warnings say so, too.
    """

    trace: Path
    label: str
    device: str
    manifest: Manifest | None
    ranks: tuple[RankCollectives, ...]
    trace_warnings: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    files: int = 1

    @property
    def has_steps(self) -> bool:
        """Whether the traces mark steps; else the whole capture stands for one."""
        return any(len(rank.times) for rank in self.ranks)

    @property
    def step_names(self) -> dict[int, str]:
        """What each step is called, by its key."""
        return {key: name for rank in reversed(self.ranks) for key, name in rank.step_names.items()}

    @cached_property
    def _compared(self) -> tuple[Matches, Alignment]:
        return compare_ranks(self.ranks)

    @property
    def matches(self) -> Matches:
        """The collectives that several ranks took part in."""
        return self._compared[0]

    @property
    def alignment(self) -> Alignment:
        """How the ranks' clocks were brought together."""
        return self._compared[1]

    @cached_property
    def transfers_ns(self) -> tuple[Ints, ...]:
        """For each rank's collectives the shortest duration over the ranks, which needs no common clock.

        ``UNKNOWN`` for a collective without a match.
        """
        duration = self.matches.column(self.ranks, "end_ns") - self.matches.column(self.ranks, "start_ns")
        present = self.matches.rows != UNKNOWN
        longest = np.iinfo(np.int64).max
        shortest = np.where(present, duration, longest).min(axis=1, initial=longest)
        transfers = []
        for column, rank in enumerate(self.ranks):
            transfer = np.full(len(rank.timings), UNKNOWN, np.int64)
            transfer[self.matches.rows[present[:, column], column]] = shortest[present[:, column]]
            transfers.append(transfer)
        return tuple(transfers)

    @cached_property
    def waits_ns(self) -> tuple[Ints, ...]:
        """What of each rank's durations is not transfer; ``UNKNOWN`` where transfer is."""
        return tuple(
            np.where(transfer == UNKNOWN, UNKNOWN, rank.timings.end_ns - rank.timings.start_ns - transfer)
            for rank, transfer in zip(self.ranks, self.transfers_ns, strict=True)
        )

    @cached_property
    def exposures(self) -> tuple[Exposure, ...]:
        """What of each rank's collectives was exposed, and why."""
        return tuple(explain_exposure(rank, wait) for rank, wait in zip(self.ranks, self.waits_ns, strict=True))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What the traces, and comparing them, do not let one say."""
        return (*self.trace_warnings, *_find_warnings(self))

    def has_same_workload(self, other: RunAnalysis) -> bool:
        """Whether another run, by its run.json, has ranks that compute the same: same model, same share of a batch."""
        if self is other or self.manifest is None or other.manifest is None:
            return False
        return _workload_key(self.manifest) == _workload_key(other.manifest)


def analyze_trace(
    trace: Trace, ranks: Sequence[RankEvents], *, to_draw: bool = True, warnings: tuple[str, ...] | None = None
) -> RunAnalysis:
    """Analyze a single trace; keeps only the compute that exposed time needs, and pictures with ``to_draw``.

    ``warnings`` are those about its figures, where :func:`diagnose` was asked already.
    """
    return RunAnalysis(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        device=trace.device,
        manifest=trace.manifest,
        ranks=tuple(trim_compute(find_timings(rank), to_draw=to_draw) for rank in ranks),
        trace_warnings=diagnose(trace, ranks) if warnings is None else warnings,
        caveats=find_caveats(trace),
    )


def merge_analyses(parts: Sequence[RunAnalysis]) -> RunAnalysis:
    """The traces of one run as one.

    Raises:
        ValueError: There is none.
    """
    if not parts:
        raise ValueError("no traces to merge")
    ranks, shifted = shift_unnumbered_steps([rank for part in parts for rank in part.ranks])
    note = f"steps without numbers: {shifted} of {len(ranks)} ranks began to record another number of steps earlier"
    ranks = tuple(sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0)))
    return replace(
        parts[0],
        ranks=disambiguate(ranks, [rank.clock.name for rank in ranks]),
        caveats=tuple(dict.fromkeys(caveat for part in parts for caveat in part.caveats)),
        label=label_of_ranks([part.label for part in parts]),
        files=len(parts),
        trace_warnings=(
            *((note,) if shifted else ()),
            *merge_file_warnings([(part.trace.name, part.trace_warnings) for part in parts]),
        ),
    )


def _workload_key(manifest: Manifest) -> tuple[str, float, int, str]:
    return (
        manifest.model_size,
        manifest.batch_size / manifest.world_size,
        manifest.seq_len,
        manifest.device,
    )


def _find_warnings(run: RunAnalysis) -> Iterator[str]:
    ranks = run.ranks
    if (missing := run.alignment.missing_ranks) and any(len(rank.timings) for rank in ranks):
        which = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {format_ranges(missing)} are"
        effect = (
            "waiting is not told apart from transfer"
            if len(ranks) < 2
            else "transfer may be shorter, and waiting longer, than reported"
        )
        yield f"{which} not among the traces: {effect}"
    elif len(run.matches) and not any(rank.world_size for rank in ranks):
        yield (
            "how many ranks the job has is not known: if others are not among the traces, transfer is at most, and "
            "waiting at least, what is reported"
        )
    if unmatched := run.matches.unmatched:
        yield (
            f"{unmatched:,} collective{' has' if unmatched == 1 else 's have'} no match on the other ranks: waiting is "
            "not told apart from transfer there"
        )
    if run.matches.doubt:
        yield (
            f"{run.matches.doubt}: what only its order would pair is not matched, as it may be of several "
            "communicators or steps"
        )
    if (residual_ns := run.alignment.residual_p95_ns or 0) > APART_NS:
        yield (
            f"ends of matched collectives differ by up to {residual_ns / 1e6:,.2f} ms between files (95th percentile): "
            "waiting is uncertain by as much, or some of them are not the same collective"
        )
    if (apart_ns := _clock_disagreement_ns(run)) > _CLOCKS_APART_NS:
        yield (
            f"by the files' clocks what was matched ran {apart_ns / 1e9:,.0f} s apart, and steps have no numbers: if "
            "the clocks are right, it is of different steps, and waiting is not what is reported"
        )
    if len(run.matches) and _may_mix_communicators(run):
        yield (
            "collectives ran on several streams, and nothing tells their communicators apart: if these are several, "
            "collectives of different ones may be matched, and waiting is not what is reported"
        )
    if any(len(rank.timings) and not len(rank.times) for rank in ranks):
        yield "the trace marks no steps, so no tail is known: see --step-range"
    elif any(np.any(rank.backward_end_ns == NO_TIME) for rank in ranks if len(rank.timings)):
        yield "no compute of some steps is known to be backward, so their tail is not known"


def _clock_disagreement_ns(run: RunAnalysis) -> int:
    """Disagreement between the files' UTC clocks and the ends that were matched without any number; else 0."""
    ranks = [rank for rank in run.ranks if len(rank.timings)]
    by_order = any(np.all(rank.step_numbers == UNKNOWN) and UNKNOWN in rank.timings.sequence for rank in ranks)
    if not by_order or SESSION_START not in run.alignment.method:
        return 0
    beyond_ns = max(abs(clock.beyond_epoch_ns) for clock in run.alignment.clocks)
    return max(beyond_ns, run.alignment.residual_p95_ns or 0)


def _may_mix_communicators(run: RunAnalysis) -> bool:
    """Whether collectives of unknown communicators are on several streams of a rank.

    NCCL's streams are those of communicators in most frameworks, so they tell which is which of two ranks that are all.
    """
    if run.matches.by_stream and {rank.world_size for rank in run.ranks} == {2}:
        return False
    unnamed = [rank.timings.lane[rank.timings.group == UNKNOWN] for rank in run.ranks]
    return any(len(np.unique(lanes[lanes != UNKNOWN])) > 1 for lanes in unnamed)
