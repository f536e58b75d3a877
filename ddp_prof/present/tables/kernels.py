"""Makes three tables: which kernels took the time, what hid communication, and why devices were idle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ddp_prof.analyze.kernels.device_use import CAUSES, NOT_BEGUN, DeviceUse
from ddp_prof.analyze.kernels.kernel_times import LEAST_EXECUTIONS, NO_TIMES_OF_COMMUNICATION, KernelTime
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.why_unknown import NO_COMMUNICATION, NOTHING_LEFT
from ddp_prof.columns import Row, count_noun, document_of, table_columns, table_row
from ddp_prof.present.columns import in_percent, ms, values_of
from ddp_prof.present.recorders import profiler_name
from ddp_prof.present.table import TableView, run_document
from ddp_prof.present.text import join_lines, plain_name, source_name
from ddp_prof.table import UNKNOWN

_LONGEST_NAME = 60
"""Most characters of a kernel's short name."""
_LONGEST_TYPE = 4000
"""Characters of a name within which the parameters must begin; otherwise no return type is cut off."""
_DURATIONS_ADD_UP = "durations are summed over ranks, steps and streams, so they may exceed the time that passed"
_SLOWDOWN = (
    "slowdown: duration beside communication over that alone, of one kernel, launch shape and phase at the same "
    f"position of the step (median); n/a with fewer than {LEAST_EXECUTIONS} executions of either"
)
_NO_SLOWDOWN = (
    "slowdown beside communication is not known of these kernels: it takes "
    f"{LEAST_EXECUTIONS} executions of one beside it and as many alone, some at the same position of the step"
)
_NO_SHAPES = "no launch shapes in this trace: kernels of one name and phase count as the same"
_IDLE = (
    "idle time from the first to the last work of a step, or of a capture that marks none, summed over ranks; "
    f"'host ...': where the host was before it launched the next work; '{NOT_BEGUN}': from the "
    "beginning of the call that launched the next work to that of the work"
)
NO_KERNELS = "no kernels were recorded: a job on a CPU has none"


def kernels_views(result: TraceOverlap, use: DeviceUse, top: int | None = None) -> dict[str, TableView]:
    """Return the tables ``kernels``, ``hidden`` (what hid communication) and ``idle`` (why devices were idle), by name.

    Args:
        result: The overlap of the run.
        use: How its devices spent their time.
        top: Number of kernels in the table, those with most time; ``None`` for all.
    """
    title = f"{source_name(result.trace, result.files)} · {profiler_name(result)} · device: {result.device}"
    notes = _kernel_notes(use, top) or [
        next((rank.reason for rank in result.ranks if rank.reason in NOTHING_LEFT), NO_KERNELS)
    ]
    ranks = [
        {
            **values_of(rank, "process", "device", "rank", "overlapped_ns"),
            "device": None if rank.device == UNKNOWN else rank.device,
            "hidden": [asdict(part) for part in rank.hidden],
            "idle_ns": rank.idle.idle_ns,
            "idle": [{"cause": cause, "idle_ns": idle_ns} for cause, idle_ns in rank.idle.causes],
            "idle_reason": rank.idle.reason,
        }
        for rank in use.ranks
    ]
    document = run_document(
        result,
        kernels=[document_of(kernel) for kernel in use.kernels],
        ranks=ranks,
        warnings=[*notes, *result.warnings],
    )
    kernels = use.kernels[:top]
    run: Row = {"run": result.label}
    rows: list[Row] = [{**run, **table_row(kernel)} for kernel in kernels]
    shown: list[Row] = [{**row, "kernel": short_name(kernel.name)} for row, kernel in zip(rows, kernels, strict=True)]
    hidden: list[Row] = [{**run, **row} for row in hidden_rows(use)]
    idle: list[Row] = [{**run, **row} for row in idle_rows(use)]
    return {
        "kernels": TableView(
            join_lines([title, "kernels by time"]),
            rows,
            notes,
            document,
            shown,
            keys=("run", *(one.table_key for one in table_columns(KernelTime))),
        ),
        "hidden": TableView(
            "what hid communication",
            hidden,
            _hidden_notes(result.ranks, use),
            document,
            keys=("run", "phase", "kind", "overlapped_ms", "of_overlapped_%"),
        ),
        "idle": TableView(
            "why devices were idle",
            idle,
            [*_idle_notes(use), *result.warnings],
            document,
            keys=("run", "cause", "idle_ms", "of_idle_%"),
        ),
    }


SHARES = {"kernels": "of_kernel_time_%", "hidden": "of_overlapped_%", "idle": "of_idle_%"}
"""The column of each table of :func:`kernels_views` that holds shares of the whole."""


def most_of(views: Mapping[str, TableView]) -> list[str]:
    """Return for each table of :func:`kernels_views` the name of the row with the largest share, and that share.

    For a table without rows, that is its first note.
    """
    return [_most_of(views[name], share) for name, share in SHARES.items()]


def _most_of(view: TableView, share: str) -> str:
    if not view.rows:
        return view.notes[0]
    row = max(view.readable_rows, key=lambda row: row[share] or 0)
    names = [str(row[name]) for name in ("kernel", "phase", "kind", "cause") if row.get(name) is not None]
    of_all = f": {row[share]:.0f} %" if row[share] is not None else ""  # none if all kernels have length 0
    return f"{', '.join(names)}{of_all}"


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces and parameters, cut to ``_LONGEST_NAME`` characters.

    A class is kept if the function itself is only called ``kernel``. A name that is cut ends in ``…``.
    """
    # Remove anonymous namespaces, casts before numbers, and the return type void.
    plain = re.sub(r"\((?:anonymous namespace|unnamed)\)::|<unnamed>::|\([A-Za-z_][\w ]*\)(?=-?\d)|^void ", "", name)
    plain = _without_return_type(plain)
    # The name with its namespaces, and the template arguments, whose types lose their namespaces below.
    outer, bracket, inner = plain.partition("(")[0].partition("<")
    *_, folder, last = ("", *outer.split("::"))
    short = f"{folder}::{last}" if last.lower() == "kernel" else last
    types = re.sub(r"\b(?:[A-Za-z_]\w*::)+", "", inner)
    named = plain_name(f"{short}{bracket}{types}", _LONGEST_NAME).rstrip("<, ")
    return f"{named}…" if named.count("<") > named.count(">") and not named.endswith("…") else named


def _without_return_type(name: str) -> str:
    """Return the name of a function template without its return type.

    For example, ``enable_if<(n > 0), void>::type f<n>(int)`` becomes ``f<n>(int)``.
    """
    # How deep the letter is in parentheses, and outside of these in angle brackets; where the name begins.
    inside = in_types = begin = 0
    for found in re.finditer("[()<> ]", name[:_LONGEST_TYPE]):
        letter = found[0]
        if letter == "(" and not inside and not in_types:
            return name[begin:]
        inside += (letter == "(") - (letter == ")")
        if not inside:
            in_types = max(0, in_types + (letter == "<") - (letter == ">"))
        if letter == " " and not inside and not in_types:
            begin = found.end()
    return name


def hidden_rows(use: DeviceUse) -> list[Row]:
    """Return a row for each phase and kind of compute that ran beside communication.

    Times are summed over ranks; the longest comes first.
    """
    parts: Counter[tuple[str | None, str]] = Counter()
    for rank in use.ranks:
        for part in rank.hidden:
            parts[part.phase, part.kind] += part.overlapped_ns
    whole = parts.total()
    return [
        {"phase": phase, "kind": kind, "overlapped_ms": ms(ns), "of_overlapped_%": in_percent(ns / whole)}
        for (phase, kind), ns in parts.most_common()
    ]


def idle_rows(use: DeviceUse) -> list[Row]:
    """Return a row for each cause of idle time that occurs, summed over ranks."""
    causes: Counter[str] = Counter()
    for rank in use.ranks:
        causes.update(dict(rank.idle.causes))
    whole = causes.total()
    return [
        {"cause": cause, "idle_ms": ms(causes[cause]), "of_idle_%": in_percent(causes[cause] / whole)}
        for cause in CAUSES
        if causes[cause]
    ]


def _kernel_notes(use: DeviceUse, top: int | None) -> list[str]:
    """Return how to read the table of kernels, and how many it leaves out; empty without kernels."""
    if not use.kernels:
        return []
    left_out = len(use.kernels) - len(use.kernels[:top])
    more = [f"{count_noun(left_out, 'more kernel')}; all of them: --top 0"] if left_out else []
    shapes = [] if any(kernel.shape for kernel in use.kernels) else [_NO_SHAPES]
    # Tables leave out a column without any value.
    shown = use.kernels[:top]
    slowdown = _SLOWDOWN if any(kernel.slowdown is not None for kernel in shown) else _NO_SLOWDOWN
    if all(kernel.reason == NO_TIMES_OF_COMMUNICATION for kernel in shown):
        slowdown = f"slowdown beside communication is not known: {NO_TIMES_OF_COMMUNICATION}"
    return [_DURATIONS_ADD_UP, slowdown, *shapes, *more]


def _hidden_notes(ranks: Sequence[RankOverlap], use: DeviceUse) -> list[str]:
    """Return how to read the table of what hid communication, or why it is empty."""
    reasons = dict.fromkeys(filter(None, (of.reason for of in ranks if of.reason != NO_COMMUNICATION)))
    notes = [f"overlapped time not known: {reason}" for reason in reasons]
    if not any(rank.overlapped_ns for rank in use.ranks):
        return notes or ["no communication was overlapped"]
    summed = "overlapped communication, summed over ranks; where several kernels run at once, one of them counts"
    return [summed, *notes]


def _idle_notes(use: DeviceUse) -> list[str]:
    """Return how to read the table of idle time, or why it is empty."""
    reasons: Mapping[str, None] = dict.fromkeys(rank.idle.reason for rank in use.ranks if rank.idle.reason)
    notes = [f"idle time not known: {reason}" for reason in reasons]
    if not any(rank.idle.causes for rank in use.ranks):
        return notes or ["no device was idle from the first to the last work of a step"]
    return [_IDLE, *notes]
