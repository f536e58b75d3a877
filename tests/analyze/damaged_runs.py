"""Drawn runs of which a recording is damaged, and the ways in which they are read.

A profiler loses activities and keeps the calls that launched them, of a time or here and there, or of a whole process;
it notes times of the device on a clock that is off; it lets a kernel run over later ones of its stream; it writes 0 for
starts and durations; it ends in the middle of a range.

``recorded`` is what the file holds, with all of that. The package reads it by its own functions: a run of one process a
file as torch.profiler writes it, for half of those that could be such; of others the tables are there already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ddp_prof.analyze import quality, why_unknown
from ddp_prof.analyze.core import attribution, clocks, counted_steps, lost_calls, rank_events, recording
from ddp_prof.analyze.core.call_numbers import StepNumbers
from ddp_prof.analyze.core.rank_events import RankEvents
from ddp_prof.analyze.core.unlaunched import Unlaunched
from ddp_prof.ingest import collectives, enrich, kineto_columns, kineto_json
from ddp_prof.ingest.load import load_trace
from ddp_prof.table import Ints, Mask, Table, empty, select
from ddp_prof.trace import UNKNOWN, Category, Kind, Trace
from tests.analyze.random_runs import COPY_WITHIN, runs, small
from tests.oracle.recorded import MOST_EARLY, MOST_LATE

LATER_NS = 5_000
"""No event of a file of torch.profiler begins at 0, but those that lost their times."""


NOT_IN_THE_ORACLE = (
    "to record some steps earlier or later",  # core/test_step_alignment.py
    "nothing that its host did was recorded",  # test_overlap.py
    "have the correlation number of another one's launch",  # ../cli/test_reported.py
)
"""What is said of captures by rules of which the oracle does not know, and where these are tested."""


@contextmanager
def known_to_the_oracle() -> Iterator[pytest.MonkeyPatch]:
    """The package with the oracle's rules alone, at the scale of what is drawn, which lasts tens of ns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrich, "_ROUNDING_NS", MOST_LATE)
        patch.setattr(clocks, "CLOCK_ERROR_NS", MOST_EARLY)
        # Reasons why a step is no sample, of which the oracle does not know; they have tests of their own.
        patch.setattr(StepNumbers, "is_whole", lambda *_, **__: False)
        for rule in ("_are_cut_off", "_begins_with_the_capture", "_lack_calls", "_lack_nodes", "_lack_launches"):
            patch.setattr(lost_calls, rule, lambda *_: False)
        patch.setattr(
            lost_calls, "_count_silent_ranges", lambda launches: (*np.zeros((2, len(launches.steps)), np.int64), 0.0)
        )
        patch.setattr(
            recording, "_count_lost_copies", lambda _, __, steps: (np.zeros(len(steps), np.int64), True, True)
        )
        for rule in ("_hold_no_operator", "_lack_collectives", "_lack_phases"):
            patch.setattr(counted_steps, rule, lambda rank: np.zeros(len(rank.steps), np.bool_))
        patch.setattr(enrich, "_run_on_beside_the_next", lambda *_: np.empty(0, np.int64))
        # What is drawn begins in any order on a stream, and within a microsecond: ../cli/test_reported.py.
        patch.setattr(enrich, "find_disordered", lambda *_: (np.empty(0, np.int64), 0))
        patch.setattr(kineto_columns, "find_shifted_copies", lambda start_ns, *_: np.zeros(len(start_ns), np.bool_))
        patch.setattr(recording, "_measure_unlaunched", lambda *_: 0.0)
        # Where no copy is left of calls for copies, those may have taken any time: core/test_blocking.py has a test.
        patch.setattr(RankEvents, "lacks_copies", False)
        # Where most kernels or collectives take no time, what hides is not known: test_unknown_work.py.
        patch.setattr(why_unknown, "lacks_durations", lambda *_: False)
        # Nor where no kernel that computes is left: test_unknown_work.py.
        patch.setattr(why_unknown, "_lacks_compute", lambda _: False)
        # Where much was launched between two steps, the time until the next one is no length: core/test_step_times.py.
        patch.setattr(recording, "_precede_other_work", lambda _, __, steps: np.zeros(len(steps), np.bool_))
        # Where the clocks disagree so much that their units may differ: core/test_recording.py.
        patch.setattr(recording.Recording, "units_differ", False)
        # Numbers that come again are drawn in no order, as if several processes launched: ingest/test_kineto_json.py.
        patch.setattr(kineto_json, "refuse_shared_pids", lambda *_: None)
        # Where no range names a phase of a host: test_overlap.py.
        for module in (why_unknown, quality):
            patch.setattr(module, "lacks_phases", lambda _: False)
        # Nor does it know the steps of work whose calls were lost; core/test_unlaunched.py does.
        for module in (attribution, recording, rank_events):
            patch.setattr(module, "find_unlaunched", lambda *_: empty(Unlaunched))
        yield patch


@dataclass(frozen=True)
class DamagedRun:
    """Traces as they were recorded, by torch.profiler or as tables."""

    recorded: tuple[Trace, ...]
    is_kineto: bool

    def read(self, folder: Path) -> list[Trace]:
        """What the package makes of it."""
        if not self.is_kineto:
            return [_read_tables(trace) for trace in self.recorded]
        return [load_trace(_write_kineto(trace, folder)) for trace in self.recorded]


@st.composite
def damaged_runs(draw: st.DrawFn) -> DamagedRun:
    told = draw(runs(has_names=True))
    is_kineto = draw(st.sampled_from([True, True, True, False])) and all(map(_may_be_kineto, told))
    if is_kineto:
        told = tuple(_as_torch_orders(trace) for trace in told)

    for damage, of in ((_lose, 3), (_shift, 7), (_lengthen, 7), *([(_zero, 1)] if is_kineto else [])):
        if draw(st.integers(0, of)) == 0:
            which = draw(small(len(told) - 1))
            changed = damage(draw, told[which])
            told = (*told[:which], changed, *told[which + 1 :])

    return DamagedRun(told, is_kineto)


def _rows_of(trace: Trace, rows: Mask) -> Trace:
    return replace(
        trace,
        activities=select(trace.activities, rows),
        launching_calls=None,  # type: ignore[arg-type]
        has_ambiguous_launch=None,  # type: ignore[arg-type]
    )


def _draw_process(draw: st.DrawFn, trace: Trace) -> Mask:
    """The activities of one process."""
    processes = sorted(set(trace.activities.process.tolist())) or [0]
    mine: Mask = trace.activities.process == draw(st.sampled_from(processes))
    return mine


def _lose(draw: st.DrawFn, trace: Trace) -> Trace:
    """Activities of a process: all, what was launched in a time, or some."""
    mine, what = _draw_process(draw, trace), draw(st.sampled_from(["all", "time", "time", "time", "some"]))
    if what == "all":
        return _rows_of(trace, ~mine)
    if what == "some":
        rows = draw(st.sets(small(max(0, len(trace.activities) - 1)), max_size=3))
        return _rows_of(trace, ~np.isin(np.arange(len(trace.activities)), list(rows)))
    launch = trace.launching_calls
    at = np.where(launch == UNKNOWN, trace.activities.start_ns, np.append(trace.calls.start_ns, 0)[launch])
    begin = int(at.min(initial=0)) + draw(small(60))
    return _rows_of(trace, ~(mine & (at >= begin) & (at < begin + draw(st.sampled_from([6, 20, 40, 400])))))


def _shift(draw: st.DrawFn, trace: Trace) -> Trace:
    """The clock of a process's devices."""
    by = np.where(_draw_process(draw, trace), draw(st.sampled_from([-300, -300, 300, 300, -8, -2, 8])), 0)
    table = trace.activities
    moved = replace(table, start_ns=table.start_ns + by, end_ns=table.end_ns + by)
    return _rows_of(replace(trace, activities=moved, launching_calls=trace.launching_calls), np.ones(len(by), np.bool_))


def _lengthen(draw: st.DrawFn, trace: Trace) -> Trace:
    """One or two activities."""
    ends = trace.activities.end_ns.copy()
    for _ in range(draw(st.integers(1, 2)) if len(ends) else 0):
        ends[draw(small(len(ends) - 1))] += draw(st.integers(70, 150))
    return replace(trace, activities=replace(trace.activities, end_ns=ends))


def _zero(draw: st.DrawFn, trace: Trace) -> Trace:
    """Times of all that begins from some time on, of a kind of event or of all; not of the range of the process."""
    kinds = draw(st.sampled_from([("activities", "calls", "spans"), ("activities",), ("calls",), ("spans",)]))
    # A file is refused if no event of a kind has a time.
    first = max(int(of.start_ns.min(initial=2 * LATER_NS)) for of in (trace.activities, trace.calls))
    begin = first + 1 + draw(small(120))
    tables: dict[str, Any] = {}
    for kind in kinds:
        table = getattr(trace, kind)
        late = table.start_ns >= begin
        if kind == "spans":
            late &= np.array([not trace.names[name_id].startswith("process|") for name_id in table.name_id], np.bool_)
        times = ("start_ns",) if kind == "calls" else ("start_ns", "end_ns")
        tables[kind] = replace(table, **{time: np.where(late, 0, getattr(table, time)) for time in times})
    return replace(trace, **tables, launching_calls=None, has_ambiguous_launch=None)


def _read_tables(trace: Trace) -> Trace:
    within = _named(trace, COPY_WITHIN)
    return collectives.name_operations(
        collectives.mark_copies_that_communicate(enrich.cut_overlong_activities(trace), within)
    )


def _named(trace: Trace, name: str) -> Mask:
    found: Mask = trace.activities.name_id == (trace.names.index(name) if name in trace.names else -2)
    return found


def _may_be_kineto(trace: Trace) -> bool:
    """One process, that is on a GPU, without what torch.profiler does not write."""
    processes = {*trace.spans.process.tolist(), *trace.activities.process.tolist()}
    has_others = np.isin(trace.activities.category, (Category.OTHER, Category.UNKNOWN)).any()
    is_nccl = any("backend=nccl" in name for name in trace.names)
    return len(processes) == 1 and is_nccl and not has_others and len(trace.activities) > 0


def _as_torch_orders(trace: Trace) -> Trace:
    """Later, with kernels before copies, and open ranges that end with the recording, when no other event does."""
    kind = trace.activities.kind
    order = np.argsort(np.where(kind == Kind.KERNEL, 0, 1), kind="stable")
    shifted = {
        name: _moved(getattr(trace, name), LATER_NS) for name in ("activities", "spans", "calls", "synchronizations")
    }
    later = replace(trace, **shifted, epoch_ns=None if trace.epoch_ns is None else trace.epoch_ns + 10_000)
    spans, is_open = later.spans, later.spans.is_open == 1
    last = max(int(spans.end_ns.max(initial=0)), int(later.activities.end_ns.max(initial=0))) + 7
    later = replace(later, spans=replace(spans, end_ns=np.where(is_open, last, spans.end_ns)))
    # Waits of the host have rows of their own there, which are not drawn.
    return replace(
        later,
        source="kineto",
        activities=select(later.activities, order),
        synchronizations=select(later.synchronizations, np.zeros(0, np.int64)),
        launching_calls=None,
        has_ambiguous_launch=None,
    )


def _moved(table: Table, by: int) -> Table:
    times = [name for name in ("start_ns", "end_ns") if hasattr(table, name)]
    return replace(table, **{name: getattr(table, name) + by for name in times})


def _write_kineto(trace: Trace, folder: Path) -> Path:
    names, threads = trace.names, trace.threads
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "ts": 0, "args": {"name": name}}
        for (_, lane), name in threads.items()
    ]
    events += [_event("user_annotation", names[row["name_id"]], row, 1, row["lane"]) for row in _rows(trace.spans)]
    ends = trace.spans.end_ns[trace.spans.is_open == 1].tolist()
    events += [{"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": end / 1000} for end in ends[:1]]
    is_launch = np.ones(len(trace.calls), np.bool_) if trace.is_launch is None else trace.is_launch
    for row, launches in zip(_rows(trace.calls), is_launch.tolist(), strict=True):
        name = "cudaLaunchKernel" if launches else "cudaMemcpyAsync"
        times = {"start_ns": row["start_ns"], "end_ns": row["start_ns"]}
        events.append(_event("cuda_runtime", name, times, 1, row["lane"], correlation=row["correlation"]))
    for row in _rows(trace.activities):
        category = "kernel" if row["kind"] == Kind.KERNEL else "gpu_memcpy"
        about = {"correlation": row["correlation"], "device": row["device"], "stream": row["lane"]}
        name = names[row["name_id"]].replace("MEMORY", "Memcpy HtoD (Pageable -> Device)")
        events.append(_event(category, name, row, row["device"], row["lane"], **about))
    (rank,) = trace.ranks.values()
    document = {
        "baseTimeNanoseconds": trace.epoch_ns or 0,
        "distributedInfo": {"rank": rank, "world_size": trace.world_size},
        "traceEvents": events,
    }
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def _rows(table: Table) -> list[dict[str, int]]:
    columns: dict[str, Ints] = {name: getattr(table, name) for name in table.__dataclass_fields__}
    values: Sequence[list[int]] = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _event(category: str, name: str, row: dict[str, int], pid: int, tid: int, **about: int) -> dict[str, Any]:
    times = {"ts": row["start_ns"] / 1000, "dur": (row["end_ns"] - row["start_ns"]) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": about}
