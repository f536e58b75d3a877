"""Steps and phases of a process, found by the names of its ranges: those of ddp_prof, and those of other programs.

If the recordings of two ranks began some steps apart, and the steps have no unique numbers, the steps are aligned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.intervals import Intervals, innermost, innermost_of, union
from ddp_prof.growing_column import in_parts
from ddp_prof.notes import Doubt
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, STEP, SYNCHRONIZE, parse_ranges
from ddp_prof.table import count_before, is_in
from ddp_prof.trace import (
    NEVER,
    NO_TIME,
    UNKNOWN,
    Ints,
    Mask,
    Spans,
    Table,
    Trace,
    distinct,
    distinct_rows,
    select,
    take_or_unknown,
)

_LOOPS = "training loops"
_OURS = "ddp_prof, training loops"
_BEFORE = (
    r"^(?:#{1,9} ?)?(?:(?:epoch|rank)[ _:=#-]*\d+[ ,_/|:;-]+)?(?:training|train|global|measure(?:d|ment)?)?[ _/-]?"
)
_NUMBER = r"[ _#:=/\[-]{0,2}(\d+)(?:[/,]\d+)?[\])]?(?:[ _]?\(?rank[ _]?\d+\)?)?(?: ?#+)?$"
_IN_TRAINING = r"^#{0,9} ?(?:train(?:ing)?[/:.])?"
_PHASE_END = r"(?:[ _-]?(?:pass|step))?(?:\(\)|[ _]?\[?\d+(?:/\d+)?\]?)? ?#*$"


@dataclass(frozen=True)
class KnownName:
    """The names that one kind of program gives to the ranges of its steps or of one phase.

    Attributes:
        kind: ``step`` or a phase, one of ``range_names.PHASES``.
        writer: The program or library that makes these ranges.
        usual: A regular expression for the names, ignoring case. For steps, group 1 is the step's number, if there is a
            group.
        examples: Names that the expression matches.
    """

    kind: str
    writer: str
    usual: str
    examples: tuple[str, ...]

    @property
    def pattern(self) -> str:
        """The expression, also for names to which ``torch.autograd.profiler.emit_nvtx`` has appended numbers."""
        return self.usual.replace("$", "(?:, (?:seq|op_id|sizes) = .*)?$")


KNOWN_NAMES = (
    KnownName(STEP, "torch.profiler", r"^ProfilerStep(?:#(\d+)|\*)?$", ("ProfilerStep#3", "ProfilerStep*")),
    KnownName(
        STEP, "Megatron-Bridge", r"\.training_step_(\d+)$", ("megatron.bridge.training.train.train.training_step_3",)
    ),
    KnownName(
        STEP, _LOOPS, rf"{_BEFORE}(?:step|iteration|iter){_NUMBER}",
        (
            "step 3", "Iteration 3 (rank 0)", "iter_3", "train/step/3", "step_3_rank0", "### step 3", "epoch 0 step 3",
            "rank_0_step_3", "measured_step_3", "step[3]", "iteration[3,7)", "epoch 0: step 3", "rank 0: step 3",
        ),
    ),
    KnownName(STEP, _LOOPS, rf"{_BEFORE}batch{_NUMBER}", ("batch 3", "epoch 1, batch 3/60")),
    KnownName(
        STEP, _LOOPS, r"^#{0,9} ?(?:train[ _-]?(?:step|iteration|iter|batch)|iteration) ?#*$",
        ("train_step", "train iteration", "## iteration ##"),
    ),
    KnownName(STEP, "Lightning", r"^(?:\[pl\]\[profile\])?run_training_batch$", ("[pl][profile]run_training_batch",)),
    KnownName(
        STEP, "JAX", r"^(?:TSL:)?XlaModule:#",
        ("TSL:XlaModule:#prefix=jit(train_step)/jit(main),hlo_module=jit_train_step,program_id=7#",),
    ),
    KnownName(
        FORWARD, _OURS, rf"{_IN_TRAINING}(?:model[ _.])?(?:forward|fwd){_PHASE_END}",
        ("forward", "fwd", "## forward pass ##", "forward_step", "model.forward", "Forward 3"),
    ),
    KnownName(
        FORWARD, "torch", r"^(?:Distributed|FullySharded)?DataParallel\.forward$",
        ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward", "DataParallel.forward"),
    ),
    KnownName(FORWARD, "DeepSpeed", r"^DeepSpeedEngine\.forward$", ("DeepSpeedEngine.forward",)),
    KnownName(
        FORWARD, "Lightning", r"\[Strategy\]\w+\.training_step$", ("[pl][profile][Strategy]DDPStrategy.training_step",)
    ),
    KnownName(
        BACKWARD, _OURS, rf"{_IN_TRAINING}(?:(?:loss|model)[ _.])?(?:backward|bwd){_PHASE_END}",
        ("backward", "bwd", "loss.backward()", "## backward ##", "train/backward", "Backward 3"),
    ),
    KnownName(BACKWARD, "DeepSpeed", r"^DeepSpeedEngine\.backward$", ("DeepSpeedEngine.backward",)),
    KnownName(
        BACKWARD, "Lightning", r"\[Strategy\]\w+\.backward$", ("[pl][profile][Strategy]DDPStrategy.backward",)
    ),
    KnownName(
        SYNCHRONIZE, _OURS,
        r"^(?:synchronize|(?:finish_)?grad(?:ient)?s?[ _-]?sync(?:hronization)?(?:[ _-]wait)?"
        r"|(?:sync|synchronize|reduce)[ _-]grad(?:ient)?s?)$",
        ("synchronize", "grad_sync", "gradient_sync_wait", "finish_gradient_synchronization", "sync_gradients"),
    ),
    KnownName(
        OPTIMIZER, _OURS,
        rf"{_IN_TRAINING}(?:optimizer|optim|opt)(?:[ _.-]?(?:step|update))?(?:\(\))? ?#*$|^optimizer\|bucket=\d+$",
        ("optimizer", "optim", "opt", "optimizer_step", "opt.step()"),
    ),
    KnownName(OPTIMIZER, "torch", r"^Optimizer\.step#", ("Optimizer.step#AdamW.step",)),
    KnownName(
        OPTIMIZER, "DeepSpeed", r"^(?:DeepSpeedEngine|DeepSpeedZeroOptimizer\w*)\.step$",
        ("DeepSpeedEngine.step", "DeepSpeedZeroOptimizer_Stage3.step"),
    ),
    KnownName(
        OPTIMIZER, "Lightning", r"\[(?:Strategy|LightningModule)\]\w+\.optimizer_step$",
        ("[pl][profile][LightningModule]MyModel.optimizer_step",),
    ),
    KnownName(
        OPTIMIZER, "Megatron-Bridge", r"\.train_step\.optimizer_step$",
        ("megatron.bridge.training.train.train_step.optimizer_step",),
    ),
)  # fmt: skip
"""A phase may match any of these. Steps use only the first pattern that occurs, and only if there are no ranges of
ddp_prof. docs/names.md is generated from this table."""

STEP_PATTERNS = tuple(known.pattern for known in KNOWN_NAMES if known.kind == STEP)


_NAMED_RANGES = 8
_STEP_NUMBER = re.compile(r"\d{1,18}$")


@dataclass(frozen=True)
class Steps(Table):
    """The steps of one process, ordered by start; ``number`` is ``UNKNOWN`` if the range's name has none."""

    number: Ints
    start_ns: Ints
    end_ns: Ints
    warmup: Mask

    @property
    def keys(self) -> Ints:
        """A unique number for each measured step; ``UNKNOWN`` for warm-up steps.

        It is the step's own number, or its position if it has none. If numbers repeat, for example because each epoch
        counts from 0, all keys are positions.
        """
        measured = select(self, ~self.warmup)
        keys = measured.display_number
        # Two equal numbers: the keys become positions. The last line puts the keys at the rows of measured steps.
        known = measured.number[measured.number != UNKNOWN]
        if np.any(np.diff(np.sort(known)) == 0):
            keys = np.arange(len(measured), dtype=np.int64)
        return take_or_unknown(keys, np.where(self.warmup, UNKNOWN, np.cumsum(~self.warmup) - 1))

    @property
    def display_number(self) -> Ints:
        """The number of each step; if it has none, its position among the measured or the warm-up steps."""
        position = np.where(self.warmup, np.cumsum(self.warmup), np.cumsum(~self.warmup)) - 1
        return np.where(self.number == UNKNOWN, position, self.number)

    @property
    def occurrence(self) -> tuple[Ints, Ints]:
        """For each step: its position, from 1, among the steps with the same number, and how many such steps there are.

        Warm-up steps and measured steps are counted separately.
        """
        _, same_number = distinct_rows(self.display_number, self.warmup.astype(np.int64))
        return count_before(same_number) + 1, np.bincount(same_number)[same_number]

    @property
    def names(self) -> list[str]:
        """The name of each step: ``step 3``, ``step 0 (2 of 4)`` if numbers repeat, ``warm-up step 1``."""
        columns = (self.display_number, self.warmup, *self.occurrence)
        return [
            ("warm-up " if is_warmup else "") + f"step {number}" + (f" ({which} of {times})" if times > 1 else "")
            for number, is_warmup, which, times in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def index_at(self, time_ns: Ints) -> Ints:
        """Return the index of the step that contains each time, ``UNKNOWN`` outside of all steps."""
        return innermost(self.start_ns, self.end_ns, time_ns)

    def count_at(self, time_ns: Ints) -> Ints:
        """Return how many of these times each step contains."""
        step = self.index_at(time_ns)
        return np.bincount(step[step != UNKNOWN], minlength=len(self)).astype(np.int64)

    @classmethod
    def from_numbers(cls, number: Ints) -> Steps:
        """Return measured steps with these numbers, whose times mean nothing."""
        return cls(number, number, number, np.zeros(len(number), np.bool_))


class FoundSteps(NamedTuple):
    """The steps of a process, and what was not taken for one.

    Attributes:
        steps: The steps.
        notes: A line for each kind of range that was left out or cut.
        left_out: Number of ranges that have the name of a step and are left out.
        unfinished: When the program was in a step behind the others that did not end: in a range that was still open
            when the recording ended, or that is marked as unfinished.
    """

    steps: Steps
    notes: tuple[str, ...]
    left_out: int
    unfinished: Intervals


def find_steps(trace: Trace, process: int, pattern: str | None = None) -> FoundSteps:
    """Return the steps of a process.

    ``pattern`` is the user's regular expression for the names of steps. Without it, the ranges of ddp_prof are used or,
    if there are none, the first of :data:`STEP_PATTERNS` that occurs. Steps never overlap. If the matching ranges do:

    - Ranges on several threads: the ranges of the process's first thread count, which is no data loader's. If it has
      none, the ranges of the thread with most ranges count.
    - Nested ranges: the inner ranges count. If most ranges of one name contain others, none of that name counts.
    - Two programs that each number the steps, such as two profilers of torch: the ranges of one of them count.
    - Otherwise each range ends where the next one starts.
    """
    mine = trace.spans.process == process
    if pattern is not None:
        found = _steps_from_names(trace, mine, _match_step_names(trace, pattern, re.RegexFlag(0)))
        return found._replace(notes=(*found.notes, *_hint_at_end(trace, mine, pattern)))
    ours = parse_ranges(trace.names, STEP).items()
    named = {index: (name.number("index"), bool(name.number("warmup"))) for index, name in ours}
    unfinished, late_warmup = (
        {index for index, name in ours if name.number(field)} for field in ("unfinished", "late_warmup")
    )
    found = _steps_from_names(trace, mine, named, unfinished, late_warmup)
    for usual in STEP_PATTERNS:
        if len(found.steps) or found.left_out:
            break
        found = _steps_from_names(trace, mine, _match_step_names(trace, usual, re.IGNORECASE))
    return found


def describe_ranges(trace: Trace) -> str:
    """Return the most frequent names of ranges as part of a sentence; ``N`` replaces the numbers in names."""
    count = Counter[str]()
    ids, times = np.unique(trace.spans.name_id, return_counts=True)
    for name_id, often in zip(ids.tolist(), times.tolist(), strict=True):
        count[re.sub(r"\d+", "N", trace.names[name_id])[:60]] += often
    names = [f"'{name}'" for name, _ in count.most_common(_NAMED_RANGES)]
    more = len(count) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "") if names else "none"


def _match_step_names(trace: Trace, pattern: str, flags: re.RegexFlag) -> dict[int, tuple[int | None, bool]]:
    """Return the names of the trace that the pattern matches, as :func:`_steps_from_names` takes them.

    The keys are indices into ``trace.names``. The values are the step's number, the text of the pattern's group 1
    (``None`` if it has no group, or the text is no number), and whether the step is warm-up, which these names never
    tell.
    """
    match, found = re.compile(pattern, flags).search, dict[int, tuple[int | None, bool]]()
    for index, name in enumerate(trace.names):
        if hit := match(name):
            text = hit.group(1) if hit.re.groups else None
            found[index] = (int(text) if text is not None and _STEP_NUMBER.match(text) else None), False
    return found


def _hint_at_end(trace: Trace, mine: Mask, pattern: str) -> tuple[str, ...]:
    """Return a hint if the user's pattern matches some names up to their end, but only the beginning of other names.

    For example, a pattern for ``sample_0`` also matches ``sample_0.conv``. The result is empty if there is no hint.
    """
    match, names = re.compile(pattern).search, map(trace.names.__getitem__, distinct(trace.spans.name_id[mine]))
    fitting = {name: hit.end() for name in names if (hit := match(name))}
    going_on = sorted(name for name, end in fitting.items() if end < len(name))
    if not 0 < len(going_on) < len(fitting):
        return ()
    longer = f"--step-range also fits names that go on, such as '{going_on[0][:60]}'"
    return (f"{longer}: end the pattern with $ to leave these out",)


def _steps_from_names(
    trace: Trace,
    mine: Mask,
    named: dict[int, tuple[int | None, bool]],
    unfinished: Collection[int] = (),
    late_warmup: Collection[int] = (),
) -> FoundSteps:
    """Return the steps among the ranges with these names.

    - ``mine``: Mask of the spans of the process.
    - ``named``: By index into ``trace.names``: the step's number, ``None`` if the name has none, and whether the step
      is warm-up.
    - ``unfinished``: Indices of names that mark a step as unfinished: a step that contains such a range is left out.
    - ``late_warmup``: Indices of names that mark a step as warm-up: a step that contains such a range is.
    """
    rows = rows_named(trace.spans, mine, named)
    is_mark = np.isin(trace.spans.name_id[rows], list(late_warmup))
    marks, rows = rows[is_mark], rows[~is_mark]
    number_of = {index: UNKNOWN if number is None else number for index, (number, _) in named.items()}
    candidates = rows
    rows, notes, left_out = _select_steps(trace, rows, unfinished, number_of)
    found = [named[name_id] for name_id in trace.spans.name_id[rows].tolist()]
    number = np.array([UNKNOWN if number is None else number for number, _ in found], np.int64)
    warmup = np.array([is_warmup for _, is_warmup in found], np.bool_)
    start, end = trace.spans.start_ns[rows], trace.spans.end_ns[rows]
    end[:-1] = np.minimum(end[:-1], start[1:])
    marked = innermost(start, end, trace.spans.start_ns[marks])
    warmup[marked[marked != UNKNOWN]] = True
    return FoundSteps(
        Steps(number, start, end, warmup), notes, left_out, _behind_steps(trace, candidates, rows, unfinished)
    )


def _select_steps(
    trace: Trace, rows: Ints, unfinished: Collection[int], number_of: Mapping[int, int]
) -> tuple[Ints, tuple[str, ...], int]:
    """Return the spans that are steps, notes on the spans that were left out or will be cut, and how many are left out.

    ``rows`` are the spans that could be steps, and the result is a part of them; both are rows ordered by start.
    ``number_of`` is the number of a step by the index of its name.
    """
    spans, notes, left_out = trace.spans, [], 0

    def leave_out(kept: Ints, why: str, kind: type[str] = str, *, why_one: str = "") -> Ints:
        """Return ``kept``, and note how many of ``rows`` it lacks; ``kind`` is the class of the note.

        ``why_one`` is why if it lacks one, where that is worded otherwise.
        """
        nonlocal left_out
        if count := len(rows) - len(kept):
            ranges = "1 range that could be a step" if count == 1 else f"{count} ranges that could be steps"
            notes.append(kind(f"{ranges} left out: {(count == 1 and why_one) or why}"))
            left_out += count
        return kept

    # Leave out each step that contains a mark that it was not finished: torch.profiler leaves its range open, too.
    is_mark = np.isin(spans.name_id[rows], list(unfinished))
    if is_mark.any():
        marks, rows = rows[is_mark], rows[~is_mark]
        at = innermost(spans.start_ns[rows], spans.end_ns[rows], spans.start_ns[marks])
        rows = leave_out(np.delete(rows, at[at != UNKNOWN]), "the program ended in it")
    rows = leave_out(rows[spans.is_open[rows] == 0], "still open when the recording ended", Doubt)
    rows = leave_out(
        rows[spans.end_ns[rows] > spans.start_ns[rows]], "no time was recorded between begin and end", Doubt
    )
    # If ranges overlap, keep those of one thread, then the inner ones; what still overlaps is cut by the caller.
    if not np.any(spans.start_ns[rows][1:] < np.maximum.accumulate(spans.end_ns[rows])[:-1]):
        return rows, tuple(notes), left_out
    lanes, times = np.unique(spans.lane[rows], return_counts=True)
    first = int(spans.process[rows[0]])  # the first thread of a process has the process's number
    chosen, why = (
        (first, "the first of the process") if first in lanes else (lanes[times.argmax()], "no thread has more")
    )
    of_thread = f"those of thread {chosen} ({why})"
    rows = leave_out(rows[spans.lane[rows] == chosen], f"they overlap {of_thread}", why_one=f"it overlaps {of_thread}")
    rows = leave_out(
        rows[~_are_outer(trace, rows)],
        "they, or most ranges of their name, contain others",
        why_one="it, or most ranges of its name, contain others",
    )
    rows = leave_out(rows[~_are_numbered_again(spans, rows, number_of)], "another range marks the same step")
    if cut := int((spans.start_ns[rows][1:] < spans.end_ns[rows][:-1]).sum()):
        notes.append(f"ranges of steps that end after the next step begins: {cut}; each is taken to end there")
    return rows, tuple(notes), left_out


def _are_numbered_again(spans: Spans, rows: Ints, number_of: Mapping[int, int]) -> Mask:
    """Return which ranges lie for most of their length in one that began before, and have no larger number than it.

    Steps of one program follow each other, so a later one has a larger number, unless an epoch begins anew::

        one profiler   |  5  |  6  |  7  |
        another one     |  5  |  6  |  7  |      or 4, 5, 6, if it began to count later

    Args:
        spans: The ranges of the trace.
        rows: Those that could be steps, ordered by start.
        number_of: The number of a step by the index of its name; ``UNKNOWN`` if it has none.
    """
    is_again = np.zeros(len(rows), np.bool_)
    until_ns, last = NO_TIME, UNKNOWN  # of the steps so far
    for place, row in enumerate(rows.tolist()):
        start_ns, end_ns = int(spans.start_ns[row]), int(spans.end_ns[row])
        number = number_of[int(spans.name_id[row])]
        in_former_ns = min(until_ns, end_ns) - start_ns
        is_again[place] = UNKNOWN < number <= last and 2 * in_former_ns > end_ns - start_ns
        if not is_again[place]:
            until_ns, last = end_ns, number
    return is_again


def _behind_steps(trace: Trace, candidates: Ints, rows: Ints, unfinished: Collection[int]) -> Intervals:
    """Return when ranges were open that did not end, began behind the steps (``rows``), and are of their thread.

    ``candidates`` are the spans that could be steps, and ``unfinished`` indices of names that mark one as unfinished.
    """
    spans = trace.spans
    is_mark = np.isin(spans.name_id[candidates], list(unfinished))
    marks, others = candidates[is_mark], candidates[~is_mark]
    at = innermost(spans.start_ns[others], spans.end_ns[others], spans.start_ns[marks])
    ended = np.union1d(others[at[at != UNKNOWN]], others[spans.is_open[others] == 1])
    ended = ended[is_in(spans.lane[ended], spans.lane[rows]) & ~is_in(ended, rows)]
    ended = ended[spans.start_ns[ended] >= spans.end_ns[rows].max(initial=NO_TIME)]
    return union(spans.start_ns[ended], spans.end_ns[ended])


def _are_outer(trace: Trace, rows: Ints) -> Mask:
    """Return which ranges contain another range, or have a name (ignoring numbers) of which most ranges do.

    If that would be all ranges, only those that contain another one.
    """
    holds = _holds_another(trace.spans, rows)
    ids, which = np.unique(trace.spans.name_id[rows], return_inverse=True)
    _, kind = np.unique([re.sub(r"\d+", "", trace.names[name_id]) for name_id in ids.tolist()], return_inverse=True)
    kind = kind[which]
    is_outer: Mask = holds | (2 * np.bincount(kind, holds) > np.bincount(kind))[kind]
    return holds if is_outer.all() else is_outer


def _holds_another(spans: Spans, rows: Ints) -> Mask:
    """Return whether each range contains another one completely; of two equal ranges, the first contains the second."""
    order = np.lexsort((-spans.end_ns[rows], spans.start_ns[rows]))
    end = spans.end_ns[rows][order]
    # A range contains another one if the earliest end among the ranges that start later is not after its own end.
    later = np.minimum.accumulate(np.append(end[1:], NEVER)[::-1])[::-1]
    holds = np.zeros(len(rows), np.bool_)
    holds[order] = later <= end
    return holds


def rows_named(spans: Spans, mine: Mask, ids: Collection[int]) -> Ints:
    """Return the rows of the spans in ``mine`` that have one of these names (``ids``), ordered by start."""
    rows = np.flatnonzero(mine & is_in(spans.name_id, ids))
    return rows[np.argsort(spans.start_ns[rows], kind="stable")]


@dataclass(frozen=True)
class Phases(Table):
    """The ranges of a process's phases; ``kind`` is an index into ``range_names.PHASES``, ``lane`` is the thread."""

    start_ns: Ints
    end_ns: Ints
    kind: Ints
    lane: Ints

    def union_of(self, kind: int) -> Intervals:
        """Return when any range of this phase is open."""
        return union(self.start_ns[self.kind == kind], self.end_ns[self.kind == kind])

    def innermost_of(self, kind: int) -> Intervals:
        """Return when the innermost open range is of this phase; the times of two phases never overlap."""
        # The innermost range can only change where a range starts or ends, and none is open at the last edge.
        edges = np.sort(np.concatenate([self.start_ns, self.end_ns]))
        rows = np.flatnonzero(self.kind_at(edges) == kind)
        return union(edges[rows], edges[rows + 1])

    def kind_at(self, time_ns: Ints) -> Ints:
        """Return the phase of the innermost range at each time, ``UNKNOWN`` outside of all ranges."""
        find = innermost_of(self.start_ns, self.end_ns)
        return in_parts(len(time_ns), lambda rows: take_or_unknown(self.kind, find(time_ns[rows])))

    def row_at(self, time_ns: Ints) -> Ints:
        """Return the row of the innermost range at each time, ``UNKNOWN`` outside of all ranges."""
        return innermost(self.start_ns, self.end_ns, time_ns)


def find_phases(trace: Trace, process: int, backward_pattern: str | None = None) -> Phases:
    """Return the ranges of a process whose names are those of phases (:data:`KNOWN_NAMES`), phase by phase.

    ``backward_pattern``, the user's regular expression, replaces the known names of backward.
    """
    mine = trace.spans.process == process
    named = [(index, trace.names[index]) for index in distinct(trace.spans.name_id[mine]) if index >= 0]
    rows, kinds = [], []
    for kind, phase in enumerate(PHASES):
        usual = "|".join(known.pattern for known in KNOWN_NAMES if known.kind == phase)
        own = backward_pattern if phase == BACKWARD else None
        matches = re.compile(own or usual, re.IGNORECASE).search
        rows.append(rows_named(trace.spans, mine, [index for index, name in named if matches(name)]))
        kinds.append(np.full(len(rows[-1]), kind, np.int64))
    row = np.concatenate(rows)
    spans = trace.spans
    phases = Phases(spans.start_ns[row], spans.end_ns[row], np.concatenate(kinds), spans.lane[row])
    # A forward inside backward recomputes activations (checkpointing): it counts as backward.
    in_backward = phases.union_of(PHASES.index(BACKWARD)).holds(phases.start_ns)
    return select(phases, ~(in_backward & (phases.kind == PHASES.index(FORWARD))))


LEAST_COMMON_STEPS = 3
"""Two ranks must share at least this number of steps before a shift between them is looked for."""

CLEARLY = 3
"""A shift of steps, or another pairing of streams, is accepted if it reduces the scatter of ends by this factor."""

CHANCE = 0.01
"""Largest accepted probability that a wrong shift reduces it so by chance; with few steps, the factor is larger."""


class RankSteps(NamedTuple):
    """The steps of a rank, as far as alignment needs them.

    Attributes:
        clock: The clock of the rank's times: a file; the times of one file are on one clock.
        numbers: Number of each step, ``UNKNOWN`` if it has none.
        ends_ns: End of each step's last collective, ``NO_TIME`` if it has none.
    """

    clock: Path
    numbers: Ints
    ends_ns: Ints


def align_unnumbered_steps(ranks: Sequence[RankSteps]) -> tuple[list[int], tuple[str, ...]]:
    """Return how much to add to each rank's step keys, so that a key means the same step on all ranks; and notes on it.

    Only ranks whose steps have no unique numbers need this, if their recordings may begin some steps apart. Each is
    shifted against the first of them. With the right shift, the differences between the ends of two ranks' collectives
    are nearly constant, as two clocks differ by a constant; with a wrong shift they vary as the lengths of steps do.
    The right shift also gives both ranks the same numbers, if their steps have any.
    """
    raised = [0] * len(ranks)
    unnumbered = [at for at, rank in enumerate(ranks) if len(rank.numbers) and not _are_unique(rank.numbers)]
    for at in unnumbered[1:]:
        raised[at] = _find_shift(ranks[unnumbered[0]], ranks[at])
    if not (shifted := np.count_nonzero(raised)):
        return raised, ()
    least = min(raised)  # no key may be negative
    raised = [by - least if at in unnumbered else 0 for at, by in enumerate(raised)]
    began = f"{shifted} of {len(ranks)} ranks began to record some steps earlier or later than the first"
    return raised, (f"steps have no numbers of their own and were aligned by the ends of collectives: {began}",)


def _find_shift(first: RankSteps, rank: RankSteps) -> int:
    """Return the index of the first rank's step that is the other rank's first step, which may be negative.

    It is 0 if no other shift is clearly better, and if both ranks' times come from one file.
    """
    if rank.clock == first.clock:
        return 0
    shifts = range(-len(rank.numbers) // 2, len(first.numbers) // 2 + 1)
    scatter = {shift: _end_scatter(first, rank, shift) for shift in shifts}
    best = min(scatter, key=scatter.__getitem__)
    return best if scatter[best] < scatter[0] else 0


def _are_unique(numbers: Ints) -> bool:
    """Return whether some numbers are known, and no known number repeats."""
    known = numbers[numbers != UNKNOWN]
    return 0 < len(known) == len(np.unique(known))


def _end_scatter(first: RankSteps, rank: RankSteps, shift: int) -> float:
    """Return how much the differences between the two ranks' ends vary with this shift, in nanoseconds.

    This is their median absolute deviation, times a factor for every shift but 0. It is infinite if the ranks share too
    few steps, or if two steps that would be one have different numbers.

    Among many wrong shifts, one may look right by chance. Therefore a larger shift needs more common steps, and the
    factor is larger for fewer common steps. Times are whole nanoseconds, so a scatter below 1 ns counts as 1 ns.
    """
    # With the shift, step `from_first` of the first rank is step `from_other` of the other rank.
    from_first, from_other = max(0, shift), max(0, -shift)
    common = min(len(first.numbers) - from_first, len(rank.numbers) - from_other)
    of_first, of_other = slice(from_first, from_first + common), slice(from_other, from_other + common)
    ends_ns, other_ns = first.ends_ns[of_first], rank.ends_ns[of_other]
    both = (ends_ns != NO_TIME) & (other_ns != NO_TIME)
    steps = np.count_nonzero(both)
    has_other_numbers = np.any(first.numbers[of_first] != rank.numbers[of_other])
    if has_other_numbers or steps < LEAST_COMMON_STEPS or steps <= 2 * abs(shift):
        return float("inf")
    difference = (ends_ns - other_ns)[both]
    scatter = float(np.median(np.abs(difference - np.median(difference))))
    return max(scatter, 1) * max(CLEARLY, CHANCE ** (-1 / (steps // 2))) if shift else scatter
