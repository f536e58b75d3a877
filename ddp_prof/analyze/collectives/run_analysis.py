"""The comparison of a run's ranks: their matched collectives, waits, transfers, exposed time, and what is doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.alignment import APART_NS, SESSION_START, Alignment, compare_ranks
from ddp_prof.analyze.collectives.exposed_time import (
    Exposure,
    PhaseParts,
    divide_by_when,
    divide_by_why,
    explain_exposure,
    wait_end_ns,
)
from ddp_prof.analyze.collectives.matching import Matches, lie_outside
from ddp_prof.analyze.collectives.timing import RankCollectives, find_timings, trim_compute
from ddp_prof.analyze.core.attribution import last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.steps import RankSteps, align_unnumbered_steps
from ddp_prof.analyze.quality import (
    Diagnostics,
    gather_diagnostics,
    merge_file_warnings,
    warn_world_sizes,
)
from ddp_prof.analyze.result_bases import merge_files
from ddp_prof.columns import by_number, count_noun, milliseconds
from ddp_prof.manifest import Caveat, Manifest, device_of, distinct_names, format_ranges, label_of, label_of_ranks
from ddp_prof.notes import Doubt
from ddp_prof.table import Brief
from ddp_prof.trace import NEVER, NO_TIME, UNKNOWN, Ints, Trace, distinct

_CLOCKS_APART_NS = 10_000_000_000
"""Largest plausible difference between the UTC of two machines; steps are seldom longer, too."""


@dataclass(frozen=True)
class RunAnalysis(Brief):
    """The collectives of a run's ranks, and the results of comparing them, each computed once at its first use.

    Attributes:
        trace: The first of the run's files.
        label: Name of the run for tables and figures.
        device: ``cuda``, ``rocm`` or ``cpu``.
        manifest: Content of the run's ``run.json``; ``None`` if there is none.
        ranks: Ordered by rank, process and device.
        files: Number of files.
        unrecorded: Number of processes that seem to train though nothing of their work was recorded.
    """

    trace: Path
    label: str
    device: str
    manifest: Manifest | None
    ranks: tuple[RankCollectives, ...]
    trace_warnings: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    files: int = 1
    unrecorded: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the run is that of the only rank of a job, which waits for no other one."""
        return {rank.world_size for rank in self.ranks} == {1}

    @property
    def has_steps(self) -> bool:
        return any(len(rank.times) for rank in self.ranks)

    @cached_property
    def step_names(self) -> dict[int, str]:
        """The name of each step by its key; if ranks have different names for it, that of the first rank."""
        return {key: name for rank in reversed(self.ranks) for key, name in rank.step_names.items() if key != UNKNOWN}

    @cached_property
    def _compared(self) -> tuple[Matches, Alignment]:
        return compare_ranks(self.ranks)

    @property
    def matches(self) -> Matches:
        return self._compared[0]

    @property
    def alignment(self) -> Alignment:
        return self._compared[1]

    @cached_property
    def transfers_ns(self) -> tuple[Ints, ...]:
        """For each rank, the transfer time of each of its collectives: the collective's shortest duration on any rank.

        This needs no common clock. It is ``UNKNOWN`` for a collective without a match.
        """
        duration = self.matches.column(self.ranks, "end_ns") - self.matches.column(self.ranks, "start_ns")
        present = self.matches.rows != UNKNOWN
        shortest = np.where(present, duration, NEVER).min(axis=1, initial=NEVER)
        transfers = []
        for column, rank in enumerate(self.ranks):
            transfer = np.full(len(rank.timings), UNKNOWN, np.int64)
            transfer[self.matches.rows[present[:, column], column]] = shortest[present[:, column]]
            transfers.append(transfer)
        return tuple(transfers)

    @cached_property
    def waits_ns(self) -> tuple[Ints, ...]:
        """For each rank, how long each of its collectives waited for peers; ``UNKNOWN`` without a match.

        That is its duration minus its transfer time.
        """
        return tuple(
            np.where(transfer == UNKNOWN, UNKNOWN, rank.timings.end_ns - rank.timings.start_ns - transfer)
            for rank, transfer in zip(self.ranks, self.transfers_ns, strict=True)
        )

    @cached_property
    def wait_ends_ns(self) -> tuple[Ints, ...]:
        """For each rank, the end of each collective's wait for peers; see :func:`.wait_end_ns`."""
        return tuple(
            wait_end_ns(rank.timings, wait_ns) for rank, wait_ns in zip(self.ranks, self.waits_ns, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[dict[str, PhaseParts], ...]:
        """For each rank and why (one of ``exposed_time.WHYS``), the time of each collective that it explains, by when.

        This is all time that belongs to a collective, overlapped time included.
        """
        return tuple(
            {
                why: divide_by_when(rank, part)
                for why, part in divide_by_why(rank.timings, wait_ns, clocks_disagree=rank.clocks_disagree).items()
            }
            for rank, wait_ns in zip(self.ranks, self.waits_ns, strict=True)
        )

    @cached_property
    def exposures(self) -> tuple[Exposure, ...]:
        """For each rank, the exposed time of its collectives."""
        return tuple(map(explain_exposure, self.ranks, self.waits_ns, self.parts))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is uncertain about the figures: warnings about the traces, and about their comparison."""
        return (*self.trace_warnings, *_find_warnings(self))

    @property
    def doubts(self) -> tuple[str, ...]:
        """The warnings that change how figures are to be read, such as what the profiler lost."""
        return tuple(note for note in self.warnings if isinstance(note, Doubt))

    @cached_property
    def match_doubts(self) -> tuple[str, ...]:
        """Why waits and transfers may be wrong, or are not known, a line each."""
        return tuple(_find_doubts(self))

    def has_same_workload(self, other: RunAnalysis) -> bool:
        """Return whether a rank of another run computes the same in a step as a rank of this run.

        That is the same model, device, sequence length and number of samples, by the ``run.json`` of both runs;
        ``False`` if one is missing, and for the run itself.
        """
        if self is other or self.manifest is None or other.manifest is None:
            return False
        own, others = (
            (one.model_size, one.batch_size / one.world_size, one.seq_len, one.device)
            for one in (self.manifest, other.manifest)
        )
        return own == others


def analyze_trace(
    trace: Trace, ranks: Sequence[RankEvents], *, to_draw: bool = True, diagnostics: Diagnostics | None = None
) -> RunAnalysis:
    """Return the analysis of a single trace.

    ``ranks`` are all ranks of the trace. Only compute that is needed for exposed time is kept; with ``to_draw``, also
    compute that pictures show.
    """
    diagnostics = diagnostics or gather_diagnostics(trace, ranks)
    return RunAnalysis(
        trace=trace.path,
        label=label_of(trace.path, trace.manifest),
        device=trace.device,
        manifest=trace.manifest,
        ranks=tuple(trim_compute(find_timings(rank), to_draw=to_draw) for rank in ranks),
        trace_warnings=diagnostics.warnings(),
        caveats=diagnostics.all_caveats,
        unrecorded=diagnostics.unrecorded,
    )


def merge_analyses(parts: Sequence[RunAnalysis]) -> RunAnalysis:
    """Return one analysis of the files of a run, from the analyses of the single files."""
    every = [rank for part in parts for rank in part.ranks]
    if any(len(rank.times) for rank in every):  # then a capture without steps is none of these steps
        every = [rank if rank.marks_steps else replace(rank, step_keys=0 * rank.step_keys + UNKNOWN) for rank in every]
    raised, notes = align_unnumbered_steps(list(map(_last_ends, every)))
    moved = [
        replace(rank, step_keys=rank.step_keys + by) if by else rank for rank, by in zip(every, raised, strict=True)
    ]
    names = distinct_names(part.trace for part in parts)
    return replace(
        parts[0],
        device=device_of(part.device for part in parts),
        ranks=merge_files((rank.clock, rank) for rank in moved),
        caveats=tuple(dict.fromkeys(caveat for part in parts for caveat in part.caveats)),
        label=label_of_ranks([part.label for part in parts]),
        files=len(parts),
        unrecorded=sum(part.unrecorded for part in parts),
        trace_warnings=(
            *notes,
            *warn_world_sizes(rank.world_size for rank in every),
            *merge_file_warnings([(names[part.trace], part.trace_warnings) for part in parts]),
        ),
    )


def _last_ends(rank: RankCollectives) -> RankSteps:
    """Return the numbers of a rank's steps and the end of each step's last collective; no steps if none are marked."""
    steps = len(rank.times)
    return RankSteps(rank.clock, rank.step_numbers[:steps], last_by_step(rank.timings.end_ns, rank.timings.step, steps))


def _find_warnings(run: RunAnalysis) -> Iterator[str]:
    """Yield a line for each reason why waits, transfers or tails are uncertain or not known."""
    ranks = run.ranks
    if (missing := run.alignment.missing_ranks) and any(len(rank.timings) for rank in ranks):
        which = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {format_ranges(missing)} are"
        effect = "waiting cannot be distinguished from transfer"
        if len(ranks) > 1:
            who = "it" if len(missing) == 1 else "one of them"
            effect = f"transfer may be shorter, and waiting longer, than reported, and {who} may be the last rank"
        yield f"{which} not among the traces of this run: {effect}"
    elif len(run.matches) and not any(rank.world_size for rank in ranks):
        yield (
            "the number of ranks in the job is not known: if some are not among the traces, transfer may be shorter, "
            "and waiting longer, than reported"
        )
    silent = [rank.name for rank in ranks if not len(rank.timings) and not run.alignment.missing_ranks]
    if len(run.matches) and silent and all(rank.rank is not None for rank in ranks):
        yield (
            f"no collective of {', '.join(silent)} was recorded: transfer may be shorter, and waiting longer, than "
            "reported"
        )
    yield from _warn_unmatched(run)
    yield from run.match_doubts
    if unmarked := [rank.name for rank in ranks if len(rank.timings) and not rank.marks_steps]:
        where = f"the trace of {', '.join(unmarked)}" if run.has_steps else "the trace"
        yield f"{where} marks no whole step, so no tail is known: see --step-range"
    # Only steps with collectives count: others have no tail.
    ends = [rank.timings.backward_end_ns[rank.timings.step != UNKNOWN] for rank in ranks if rank.marks_steps]
    is_unknown = np.concatenate([np.empty(0, np.int64), *ends]) == NO_TIME
    if len(is_unknown) and is_unknown.all():
        yield "no compute of any step is known to be backward, so no tail is known (see --backward-range)"
    elif is_unknown.any():
        yield "no compute of some steps is known to be backward, so their tail is not known"


def _warn_unmatched(run: RunAnalysis) -> Iterator[str]:
    """Yield a line for each reason why collectives have no match."""
    # Without a number of its own, what lies between the steps, as an evaluation's, is not compared.
    outside = sum(int(lie_outside(rank).sum()) for rank in run.ranks) if len(run.ranks) > 1 and run.has_steps else 0
    unmatched = run.matches.unmatched - outside
    for count, why in (
        (unmatched, f"{by_number(unmatched, 'has', 'have')} no match on the other ranks"),
        (outside, f"{by_number(outside, 'belongs', 'belong')} to no step, so no match is looked for"),
    ):
        if count > 0:
            whose = by_number(count, "its", "their")
            yield f"{count_noun(count, 'collective')} {why}: {whose} waiting cannot be distinguished from transfer"


def _find_doubts(run: RunAnalysis) -> Iterator[str]:
    """Yield a line for each reason why matches of collectives may be wrong or are missing."""
    if run.matches.doubt:
        yield (
            f"{run.matches.doubt}: collectives without the name of a communicator are not matched, since they may "
            "belong to different communicators or steps"
        )
    if (residual_ns := run.alignment.residual_p95_ns or 0) > APART_NS:
        yield (
            f"ends of matched collectives differ by up to {milliseconds(residual_ns)} between files (95th percentile): "
            "waiting is uncertain by as much, or some of them are not the same collective"
        )
    if (apart_ns := _clock_disagreement_ns(run)) > _CLOCKS_APART_NS:
        yield (
            f"by the files' clocks, matched collectives ran {apart_ns / 1e9:,.0f} s apart, and steps have no numbers: "
            "if the clocks are right, they belong to different steps, and the reported waiting is wrong"
        )
    if len(run.matches) and _may_mix_communicators(run):
        yield (
            "the communicators of collectives have no names: if there are several, collectives of different ones may "
            "be matched, and the reported waiting may be wrong"
        )


def _clock_disagreement_ns(run: RunAnalysis) -> int:
    """Return how far the ends of matched collectives differ by the files' UTC, if step numbers did not help to match.

    It is 0 if steps or collectives have numbers, or if the files do not tell their UTC.
    """
    ranks = [rank for rank in run.ranks if len(rank.timings)]
    by_order = any(np.all(rank.step_numbers == UNKNOWN) and UNKNOWN in rank.timings.sequence for rank in ranks)
    if not by_order or SESSION_START not in run.alignment.method:
        return 0
    beyond_ns = max(abs(clock.beyond_epoch_ns) for clock in run.alignment.clocks)
    return max(beyond_ns, run.alignment.residual_p95_ns or 0)


def _may_mix_communicators(run: RunAnalysis) -> bool:
    """Return whether unnamed collectives on GPUs may belong to several communicators that were not distinguished.

    In a job of two ranks, all communicators have the same members, and streams are enough to distinguish them.
    """
    streams = [{*distinct(rank.timings.lane[rank.timings.group == UNKNOWN])} - {UNKNOWN} for rank in run.ranks]
    if {rank.world_size for rank in run.ranks} == {2}:
        return max(map(len, streams), default=0) > 1 and not run.matches.by_stream
    return any(streams)
