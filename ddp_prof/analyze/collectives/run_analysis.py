"""The comparison of a run's ranks: their matched collectives, a common clock, waits, transfers and exposed time.

Each file has its own clock. The clocks are aligned first by UTC, if the files contain the UTC of their time 0, and then
by matched collectives, which end on all ranks at nearly the same time (HTA's straggler analysis and NVIDIA's recipes
assume this, too): the median of the differences of their ends is the file's offset. A file that shares no collective
with the first file, as with tensor and data parallelism, is aligned through other files. In a long run whose
differences grow, a drift is fitted, too. The differences that remain are the residual: smaller differences of time
between ranks mean nothing. If two files have a single collective in common, some offset fits it exactly. UTC alone is
used then, and the difference of the ends is the residual; without UTC, the residual is not known.

A match of collectives without the name of a communicator is checked: on the common clock, their ends must not differ by
more than 1 ms and by more than a tenth of their duration; with gloo, whose threads wait for a core, by more than their
duration. If they do, the match is dropped, unless it has the number of a bucket. All matches without a name are dropped
if most of them fail and UTC does not confirm the others, or if the ends agree among some ranks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import (
    Exposure,
    PhaseParts,
    divide_by_when,
    divide_by_why,
    explain_exposure,
    wait_end_ns,
)
from ddp_prof.analyze.collectives.matching import LOOKED_AT, NEEDS_ALL, Matches, lie_outside, match_collectives
from ddp_prof.analyze.collectives.timing import RankCollectives, find_timings, trim_compute
from ddp_prof.analyze.core.attribution import last_by_step
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.steps import CLEARLY, LEAST_COMMON_STEPS, RankSteps, align_unnumbered_steps
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
from ddp_prof.trace import NO_TIME, UNKNOWN, Ints, Mask, Trace, distinct

ONE_CLOCK = "one clock"
SESSION_START = "session start"
MATCHED_ENDS = "ends of matched collectives"
NONE = "none"

LEAST_PAIRS = 2
"""Number of matched ends that two files must share to measure how well their clocks agree; one always fits exactly."""

APART_NS = 1_000_000
"""Largest plausible difference between the ends of a short collective on two ranks."""

_APART, _APART_ON_HOST = 0.1, 1.0
"""The same for a long collective, as a fraction of its shortest duration: on a device, and in threads of the host."""

_APART_IN_GROUPS_NS = 50_000
"""If the ends on two ranks scatter by more, the ranks may belong to different communicators."""

_LEAST_OF_GROUPS, _COMPARED_RANKS = 4, 16
"""Smallest number of ranks to look for several communicators, and largest number of ranks that are compared for it."""

GIVEN_UP = "the ends of what may be one collective lie further apart than it lasts"
IN_GROUPS = "the ends of what may be one collective agree among some ranks only"
"""Why collectives without the name of a communicator are not matched: one of these two reasons."""

_LONGEST = np.iinfo(np.int64).max
_DRIFT_AFTER_NS = 10_000_000_000
_DRIFT_PAIRS = 20
"""A drift is fitted if the matched ends span at least this time and make at least this number of pairs."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Converts a file's times to those of the first file: ``t + offset + drift * (t - origin)``.

    Attributes:
        offset_ns: Difference of the clocks at ``origin_ns``, including the difference of their UTC at time 0.
        clock: The file.
        beyond_epoch_ns: The part of ``offset_ns`` that the files' UTC does not explain.
        drift: Growth of the difference per time, a ratio; 0 if none was found.
        origin_ns: The time of the file from which the drift counts.
    """

    clock: Path
    offset_ns: int
    beyond_epoch_ns: int
    drift: float
    origin_ns: int

    def common_ns(self, time_ns: Ints) -> Ints:
        """Return the file's times on the clock of the first file."""
        result: Ints = time_ns + self.offset_ns
        if self.drift:
            result = result + np.rint(self.drift * (time_ns - self.origin_ns)).astype(np.int64)
        return result


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the ranks' clocks were brought together.

    Attributes:
        method: How the clocks were aligned; ``none`` if they could not be, so that times of ranks cannot be compared.
        residual_p50_ns: Median of the remaining differences between the ends of matched collectives; ``None`` if they
            could not be measured.
        residual_p95_ns: Their 95th percentile: smaller differences between ranks are not reported. 0 for a single
            clock.
        missing_ranks: Numbers of the job's ranks that are not among the traces.
        clocks: One per file.
    """

    method: str
    residual_p50_ns: int | None
    residual_p95_ns: int | None
    missing_ranks: tuple[int, ...]
    clocks: tuple[ClockOffset, ...]

    def offset_for(self, clock: Path) -> ClockOffset:
        """Return the offset of a file."""
        return next(item for item in self.clocks if item.clock == clock)


def compare_ranks(ranks: Sequence[RankCollectives]) -> tuple[Matches, Alignment]:
    """Return which collectives of the ranks are the same, and how the clocks of their files are aligned.

    Matches without the name of a communicator are checked by their ends; see the module's description.
    """
    matches = match_collectives(ranks)
    alignment = align_clocks(ranks, matches)
    if _ends_agree_in_groups(ranks, matches, alignment):
        matches = matches.drop_parts(matches.column(ranks, "group", UNKNOWN) == UNKNOWN, IN_GROUPS)
        return matches, align_clocks(ranks, matches)
    if not len(matches) or alignment.residual_p95_ns is None:
        return matches, alignment
    # `unnamed`: matches with a part that has no name of a communicator; `by_order`: with one that has no bucket number.
    absent = matches.rows == UNKNOWN
    unnamed, by_order = (
        ~((matches.column(ranks, name, UNKNOWN) != UNKNOWN) | absent).all(axis=1)[:, np.newaxis]
        for name in ("group", "bucket")
    )
    apart = _find_implausible_parts(ranks, matches, alignment) & unnamed
    if not apart.any():
        return matches, alignment
    # Align again without these parts. If most matches failed and UTC does not confirm the others, drop all unnamed
    # ones.
    kept = matches.drop_parts(apart)
    alignment = align_clocks(ranks, kept)
    is_confirmed_by_utc = False
    if alignment.method == ONE_CLOCK or SESSION_START in alignment.method:
        beyond_ns = max(abs(clock.beyond_epoch_ns) for clock in alignment.clocks)
        is_confirmed_by_utc = beyond_ns + (alignment.residual_p95_ns or 0) <= APART_NS
    if not len(kept) or (2 * len(kept) < len(matches) and not is_confirmed_by_utc):
        kept = matches.drop_parts(np.broadcast_to(unnamed, matches.rows.shape), GIVEN_UP)
    else:
        kept = matches.drop_parts(apart & by_order)
    return kept, align_clocks(ranks, kept)


def _find_implausible_parts(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> Mask:
    """Return a mask, in the shape of ``matches.rows``: the parts whose end is too far from the median of their row.

    Ends are compared on the common clock. If a row has two parts, their distance from each other counts. Only
    operations that cannot end before all ranks have begun, and unknown operations, are checked.
    """
    present = matches.rows != UNKNOWN
    start, end = (matches.column(ranks, name) for name in ("start_ns", "end_ns"))
    common = np.stack([alignment.offset_for(rank.clock).common_ns(end[:, at]) for at, rank in enumerate(ranks)], axis=1)
    shortest = np.min(end - start, axis=1, where=present, initial=_LONGEST)
    first = np.min(common, axis=1, where=present, initial=_LONGEST)
    since = np.where(present, (common - first[:, np.newaxis]).astype(np.float64), np.nan)
    distance = np.abs(since - np.nanmedian(since, axis=1, keepdims=True))
    distance[present.sum(axis=1) == 2] *= 2  # the median of two lies in the middle between them
    on_host = (matches.column(ranks, "lane", UNKNOWN) == UNKNOWN).all(axis=1)
    most = np.maximum(APART_NS, np.where(on_host, _APART_ON_HOST, _APART) * shortest)
    operation = matches.column(ranks, "operation", UNKNOWN).max(axis=1, initial=UNKNOWN)
    needs_all = np.isin(operation, [UNKNOWN, *NEEDS_ALL])
    apart: Mask = present & (distance > most[:, np.newaxis]) & needs_all[:, np.newaxis]
    return apart


def align_clocks(ranks: Sequence[RankCollectives], matches: Matches) -> Alignment:
    """Return how to convert each file's times to the clock of the first file, by UTC and by matched collectives."""
    missing, communicates = _find_missing_ranks(ranks), {rank.clock for rank in ranks if len(rank.timings)}
    # A file without collectives is compared with none, so it is not the first one.
    files = sorted(dict.fromkeys(rank.clock for rank in ranks), key=lambda file: file not in communicates)
    if len(files) < 2:
        return Alignment(ONE_CLOCK, 0, 0, missing, tuple(ClockOffset(file, 0, 0, 0.0, 0) for file in files))
    # `base` is the difference of each file's clock from the first file's by UTC; 0 if a file does not tell its UTC.
    epochs = {rank.clock: rank.epoch_ns for rank in ranks}
    has_epochs = all(epoch is not None for epoch in epochs.values())
    base = {file: (epochs[file] or 0) - (epochs[files[0]] or 0) if has_epochs else 0 for file in files}
    ends = _ends_by_file(ranks, matches, files)
    # `reference` is when each collective ended, on the clock of the first file. At first it holds the ends of the first
    # file; each file that has been aligned adds the ends of its other collectives. `waiting` are the files not aligned.
    reference, waiting = ends[:, 0].copy(), list(range(1, len(files)))
    offsets, residuals = {0: ClockOffset(files[0], 0, 0, 0.0, 0)}, []
    pairs = dict[int, int]()  # for each file, the number of ends by which it was aligned
    while waiting:
        shared = {index: (reference != NO_TIME) & (ends[:, index] != NO_TIME) for index in waiting}
        # With tensor and data parallelism, a file may share nothing with the first, but much with a third one.
        ready = [index for index in waiting if shared[index].sum() >= LEAST_PAIRS] or waiting
        for index in ready:
            file, own, others = files[index], ends[shared[index], index], reference[shared[index]]
            pairs[index] = len(own)
            # Few ends are fitted only if nothing else is known of the file's clock.
            is_fitted = len(own) >= LEAST_PAIRS or (len(own) > 0 and not has_epochs)
            offset, drift = _fit(own, others - own - base[file]) if is_fitted else (0, 0.0)
            origin_ns = int(own.min()) if len(own) else 0
            offsets[index] = ClockOffset(file, base[file] + offset, offset, drift, origin_ns)
            residuals.append(np.abs(offsets[index].common_ns(own) - others))
        for index in ready:
            is_new = (reference == NO_TIME) & (ends[:, index] != NO_TIME)
            reference[is_new] = offsets[index].common_ns(ends[is_new, index])
        waiting = [index for index in waiting if index not in ready]
    # A residual tells nothing of ends to which the clock itself was fitted, if these were few.
    counts = [count for index, count in pairs.items() if files[index] in communicates] or [0]
    is_known = all(count >= LEAST_PAIRS or (count > 0 and has_epochs) for count in counts)
    known = np.concatenate(residuals) if is_known else None
    is_by_ends = all(counts) and (not has_epochs or max(counts) >= LEAST_PAIRS)
    methods = ([SESSION_START] if has_epochs else []) + ([MATCHED_ENDS] if is_by_ends else [])
    return Alignment(
        method=", ".join(methods) or NONE,
        residual_p50_ns=None if known is None else round(float(np.percentile(known, 50))),
        residual_p95_ns=None if known is None else round(float(np.percentile(known, 95))),
        missing_ranks=missing,
        clocks=tuple(offsets[index] for index in range(len(files))),
    )


def _find_missing_ranks(ranks: Sequence[RankCollectives]) -> tuple[int, ...]:
    """Return the ranks of the job that are not among ``ranks``; none if processes of unknown rank may be these."""
    present = {rank.rank for rank in ranks if rank.rank is not None}
    world = max((rank.world_size or 0 for rank in ranks), default=0)
    missing = tuple(sorted(set(range(world)) - present)) if present else ()
    unknown = {(rank.clock, rank.process) for rank in ranks if rank.rank is None}
    return missing if len(unknown) < len(missing) else ()


def _ends_by_file(ranks: Sequence[RankCollectives], matches: Matches, files: Sequence[Path]) -> Ints:
    """Return the end of each matched collective (row) on the clock of each file (column), in ns.

    It is the latest end on the file's ranks; ``NO_TIME`` if none of these takes part.
    """
    ends = matches.column(ranks, "end_ns")
    in_file = [[rank.clock == file for rank in ranks] for file in files]
    return np.stack([ends[:, columns].max(axis=1, initial=NO_TIME) for columns in in_file], axis=1)


def _fit(time_ns: Ints, difference_ns: Ints) -> tuple[int, float]:
    """Return the offset and the drift between two clocks, by medians, which a few outliers do not change.

    The drift is the median slope of pairs that are half the run apart (after Theil and Sen). It is 0 unless its effect
    over the whole time exceeds twice the scatter around it.

    Args:
        time_ns: Times on one clock.
        difference_ns: What to add to each to get the time on the other clock.
    """
    offset = round(float(np.median(difference_ns)))
    half = len(time_ns) // 2
    if half < _DRIFT_PAIRS or int(time_ns.max() - time_ns.min()) < _DRIFT_AFTER_NS:
        return offset, 0.0
    order = np.argsort(time_ns, kind="stable")
    time, difference = time_ns[order], difference_ns[order]
    drift = float(np.median((difference[half:] - difference[:-half]) / (time[half:] - time[:-half])))
    rest = difference - drift * (time - time[0])
    scatter = np.median(np.abs(rest - np.median(rest)))
    if abs(drift) * float(time[-1] - time[0]) <= 2 * scatter:
        return offset, 0.0
    return round(float(np.median(rest))), drift


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
        shortest = np.where(present, duration, _LONGEST).min(axis=1, initial=_LONGEST)
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


def _ends_agree_in_groups(ranks: Sequence[RankCollectives], matches: Matches, alignment: Alignment) -> bool:
    """Return whether unnamed collectives end together on some pairs of ranks, but not on other pairs.

    Then the ranks belong to several communicators. An example is FSDP within nodes, where all shard groups have the
    same collectives. Each operation is looked at by itself, too: reductions to shards within nodes end apart, though
    the all-reduces between nodes, for which all ranks wait, end together. It is ``False`` for captures of few ranks.
    Operations that some ranks can end before others begin are not used. Only the first ranks and collectives are
    compared.
    """
    starts, ends, groups, lanes = (matches.column(ranks, name) for name in ("start_ns", "end_ns", "group", "lane"))
    operations = matches.column(ranks, "operation", UNKNOWN)
    tells = np.isin(operations, [UNKNOWN, *NEEDS_ALL]) & (matches.rows != UNKNOWN) & (groups == UNKNOWN)
    rows = np.flatnonzero(tells.all(axis=1))[:LOOKED_AT]
    if len(ranks) < _LEAST_OF_GROUPS or len(rows) < LEAST_COMMON_STEPS:
        return False
    clocks = [alignment.offset_for(rank.clock) for rank in ranks[:_COMPARED_RANKS]]
    common = np.stack([clock.common_ns(ends[rows, at]) for at, clock in enumerate(clocks)])
    # For each pair of ranks, how much the differences of their ends lie from their median.
    apart = (common[:, np.newaxis] - common)[np.triu_indices(len(clocks), 1)]
    apart = np.abs(apart - np.median(apart, axis=1, keepdims=True))
    lengths = np.min(ends[rows] - starts[rows], axis=1)
    apart_ns, share = (APART_NS, _APART_ON_HOST) if UNKNOWN in lanes[rows] else (_APART_IN_GROUPS_NS, _APART)

    def differ(chosen: Mask) -> bool:
        """Return whether the ends of the chosen collectives lie clearly farther apart on one pair than on another."""
        scatter = np.median(apart[:, chosen], axis=1)
        least = max(apart_ns, share * float(np.median(lengths[chosen])))
        return bool(scatter.max() > least and CLEARLY * scatter.min() < scatter.max())

    operation = operations[rows, 0]
    kinds = [operation == one for one in distinct(operation)]
    return any(map(differ, [np.ones(len(rows), np.bool_), *(one for one in kinds if one.sum() >= LEAST_COMMON_STEPS)]))


def _may_mix_communicators(run: RunAnalysis) -> bool:
    """Return whether unnamed collectives on GPUs may belong to several communicators that were not distinguished.

    In a job of two ranks, all communicators have the same members, and streams are enough to distinguish them.
    """
    streams = [{*distinct(rank.timings.lane[rank.timings.group == UNKNOWN])} - {UNKNOWN} for rank in run.ranks]
    if {rank.world_size for rank in run.ranks} == {2}:
        return max(map(len, streams), default=0) > 1 and not run.matches.by_stream
    return any(streams)
