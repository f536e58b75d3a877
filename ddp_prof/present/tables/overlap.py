"""Tables of one run: its overlap by rank or step, how its devices spent their time, and what its trace holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median

from ddp_prof.analyze.cost import RankCost, RunCost
from ddp_prof.analyze.inventory import TraceInventory
from ddp_prof.analyze.kernels.device_use import CAUSES, NOT_BEGUN, DeviceUse
from ddp_prof.analyze.kernels.kernel_times import LEAST_EXECUTIONS, KernelTime
from ddp_prof.analyze.overlap import RankOverlap, TraceOverlap
from ddp_prof.analyze.quality import NO_COMMUNICATION, NOTHING_LEFT
from ddp_prof.analyze.step_columns import StepOverlap
from ddp_prof.analyze.step_cost import PARTS, StepCost
from ddp_prof.columns import Row, document_of, table_columns, table_rows
from ddp_prof.errors import printable
from ddp_prof.manifest import Manifest
from ddp_prof.present.columns import in_percent, ms, values_of
from ddp_prof.present.headlines import outliers_text
from ddp_prof.present.table import SCHEMA, Digest, Document, TableView, run_document
from ddp_prof.present.text import count_noun, join_lines, milliseconds, plain_name, source_name
from ddp_prof.trace import SOURCE_NAMES
from ddp_prof.variants import variant_extras

_LARGE_DIFFERENCE = 0.05
"""Share of a step by which ranks, or steps, must differ in exposed time before a note says so."""
MOST_STEPS = 200
"""Rows of the table of steps on a page."""
DIGEST = Digest(
    "exposed_ms",
    tuple({one.table_key for kind in (RankOverlap, StepOverlap) for one in table_columns(kind) if one.adds_up}),
)


def overlap_view(result: TraceOverlap, headline: str = "", cost: RunCost | None = None, *, by_step: bool) -> TableView:
    notes = overlap_notes(result, headline)
    if by_step:
        notes += _window_notes(result)
    if not by_step and any(len(rank.steps) > 1 for rank in result.ranks):
        notes.append("times of a rank are in all, over its steps and what lies outside of them; of each step: --steps")
    if by_step and (twice_ns := sum(rank.overlapping_windows_ns for rank in result.ranks)):
        notes.append(
            f"windows of steps overlap: sums of them, and of their parts, count {milliseconds(twice_ns)} more than once"
        )
    title = join_lines(filter(None, (headline, _title(result))))
    document = {
        "schema": SCHEMA,
        "trace": str(result.trace),
        **values_of(result, "label", "source", "producer", "device"),
        "recorder": result.recorder,
        "attribution": values_of(result.attribution, "activities", "device_time", "method"),
        "ranks": [_rank_document(rank, cost.ranks[at] if cost else None) for at, rank in enumerate(result.ranks)],
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
        "outliers": asdict(result.outliers) if result.outliers else None,
        "warnings": list(result.warnings),
        "headline": headline,
        "missing": result.missing,
    }
    return TableView(title, _rows(result, by_step=by_step), notes, document, digest=DIGEST)


def steps_view(result: TraceOverlap) -> TableView:
    """Return the table of the first steps, for a page."""
    rows = _rows(result, by_step=True)
    more = [f"{count_noun(len(rows) - MOST_STEPS, 'more row')}; all of them: ddp-prof overlap --steps"]
    notes = [*_window_notes(result), *(more if len(rows) > MOST_STEPS else [])]
    return TableView("the steps", rows[:MOST_STEPS], notes, {})


def _rows(result: TraceOverlap, *, by_step: bool) -> list[Row]:
    """Return a row for each rank, or for each step of each rank."""
    rows: list[Row] = []
    has_nodes = len({rank.node for rank in result.ranks}) > 1
    figures = iter(table_rows([of for rank in result.ranks for of in (rank.steps if by_step else [rank])]))
    for rank in result.ranks:
        identity: Row = {
            "run": f"{result.label} ({rank.qualifier})" if rank.qualifier else result.label,
            **({"node": rank.node} if has_nodes else {}),
            "rank": rank.rank,
            "process": rank.process,
            "device": "cpu" if rank.device is None else rank.device,
        }
        for of in rank.steps if by_step else [rank]:
            of_step: Row = {"step": of.step} if isinstance(of, StepOverlap) else {}
            rows.append({**identity, **of_step, **next(figures), **_communication_not_recorded(rank, of)})
    return rows


def _window_notes(result: TraceOverlap) -> list[str]:
    if all(step.window_ns == step.length.ns for rank in result.ranks for step in rank.marked_steps):
        return []
    note = (
        "window: from a step's first device work to its last; the times after it, up to idle, are its parts; "
        "step: how long the step took"
    )
    return [note]


def _rank_document(rank: RankOverlap, cost: RankCost | None) -> Document:
    of_steps = cost.steps if cost else (None,) * len(rank.steps)
    return {
        **document_of(rank),
        "dependencies": asdict(rank.dependencies) if rank.dependencies else None,
        "cost": asdict(cost.cost) if cost else None,
        "bounds": asdict(cost.bounds) if cost else None,
        "steps": [
            {**document_of(step), "cost": of_step and _step_cost_document(of_step)}
            for step, of_step in zip(rank.steps, of_steps, strict=True)
        ],
    }


def _step_cost_document(cost: StepCost) -> Document:
    """The parts of a step; ``limits_ns`` are those of each part that is estimated, or not known."""
    limits: dict[str, tuple[int | None, int | None]] = {
        part: (getattr(cost, f"{part}_low_ns"), getattr(cost, f"{part}_high_ns")) for part in PARTS
    }
    return {
        **values_of(cost, *(f"{part}_ns" for part in PARTS), "standstill_by_ns"),
        "limits_ns": {part: ends for part, ends in limits.items() if None not in ends and ends[0] != ends[1]},
        "reasons": cost.reasons,
    }


def _title(result: TraceOverlap) -> str:
    parts = [source_name(result.trace, result.files), profiler_name(result), f"device: {result.device}"]
    attribution = result.attribution
    if attribution.device_time:
        kind = "device time" if result.device != "cpu" else "time"
        parts.append(
            f"assigned to a step: {attribution.device_time:.1%} of {kind}, {attribution.activities:.1%} of events"
        )
    return " · ".join(parts)


def profiler_name(result: TraceOverlap) -> str:
    """Name the profiler, with the versions of the nsys that recorded and of the one that exported, where known."""
    name, recorder, exporter = SOURCE_NAMES.get(result.source, result.source), result.recorder, result.producer
    if name != "nsys" or not (recorder or exporter):
        return name
    if recorder and exporter and (recorder == exporter or exporter.startswith(f"{recorder}.")):
        return f"nsys {exporter}"
    by = ((recorder, "recorded by"), (exporter, "exported by"))
    return ", ".join(f"{verb} nsys {version}" for version, verb in by if version)


def overlap_notes(result: TraceOverlap, headline: str = "") -> list[str]:
    """Return what is unknown or assumed, one line each, without reasons that the headline gives."""
    first = [f"missing: {result.missing}"] if result.missing else []
    reasons = [
        f"{rank.name}: no overlap figure: {rank.reason}"
        for rank in result.ranks
        if rank.reason and rank.reason.lower() not in headline.lower()
    ]
    unknown = {}
    for rank in result.ranks:
        if not rank.reason and rank.dependencies and rank.dependencies.reason:
            is_known = rank.blocking_ns is not None or any(step.blocking_ns is not None for step in rank.steps)
            unknown[rank.dependencies.reason] = " for some steps" if is_known else ""
    reasons += [f"blocking is not known{which}: {reason}" for reason, which in unknown.items()]
    if hosts := sum(rank.dependencies.host_waits for rank in result.ranks if rank.dependencies):
        reasons.append(f"blocking is that of streams; the host waited for a collective {count_noun(hosts, 'time')}")
    outliers = [outliers_text(result.outliers)] if result.outliers else []
    return [*first, *reasons, *outliers, *_differences(result), *result.step_notes, *result.warnings]


def _differences(result: TraceOverlap) -> Iterator[str]:
    """Yield notes if ranks or steps expose such different times that a median over steps stands for few of them."""
    exposed: dict[str, list[int]] = {}
    for rank in (rank for rank in result.ranks if not rank.reason):
        if known := [step.exposed_ns for step in rank.communicating_steps if step.exposed_ns is not None]:
            exposed[rank.name] = known
    typical = {name: round(median(values)) for name, values in exposed.items()}
    lengths_ns = [ns for rank in result.ranks for ns in rank.lengths_ns]
    if not typical or not lengths_ns:
        return
    least_ns = _LARGE_DIFFERENCE * median(lengths_ns)
    low, high = (choose(typical, key=typical.__getitem__) for choose in (min, max))
    if typical[high] - typical[low] > max(typical[low], least_ns):
        yield (
            f"ranks differ: {high} exposes {milliseconds(typical[high])} per step, {low} {milliseconds(typical[low])}; "
            "figures per step are medians over the steps of all ranks"
        )
    mean = {name: round(fmean(values)) for name, values in exposed.items()}
    name = max(mean, key=lambda name: mean[name] - typical[name])
    if not result.outliers and mean[name] - typical[name] > max(typical[name], least_ns):
        yield (
            f"steps differ: {name} exposes {milliseconds(mean[name])} in the mean step, {milliseconds(typical[name])} "
            "in the median one; hiding all of it may gain more than in a typical step"
        )


def notes_of_runs(results: Sequence[TraceOverlap]) -> list[str]:
    """Return each note once; if it does not hold for all runs, with their labels."""
    warnings = warnings_by_run(results).items()
    return [text if len(labels) == len(results) else f"{', '.join(labels)}: {text}" for text, labels in warnings]


def warnings_by_run(results: Sequence[TraceOverlap]) -> dict[str, list[str]]:
    """Return what is unknown or assumed, with the labels of the runs for which that holds."""
    labels: dict[str, list[str]] = {}
    for result in results:
        for warning in overlap_notes(result):
            labels.setdefault(warning, []).append(result.label)
    return labels


def _communication_not_recorded(rank: RankOverlap, of: RankOverlap | StepOverlap) -> Row:
    """Return unknown times of communication if what communicated was not recorded: none is no zero then."""
    if rank.reason not in (None, NO_COMMUNICATION) and not of.comm_ns:
        return {"comm_ms": None, "overlapped_ms": None, "exposed_ms": None}
    return {}


def info_view(inventory: TraceInventory) -> TableView:
    producer = f" {inventory.producer}" if inventory.producer else ""
    title = (
        f"{source_name(inventory.trace, 1)} · {inventory.source}{producer} · device: {inventory.device} · "
        f"{inventory.duration_ns / 1e9:.3f} s"
    )
    rows: list[Row] = [
        {
            **values_of(process, "rank", "process"),
            "devices": ", ".join(map(str, process.devices)) or "cpu",
            "kernels": process.kernels,
            "comm_kernels": process.collectives,
            "copies": process.copies,
            "CUDA_calls": process.calls,
            **values_of(process, "ranges", "steps"),
            "warm-up_steps": process.warmup_steps,
            "backward_ranges": process.backward_ranges,
        }
        for process in inventory.processes
    ]
    made = [_how_made(inventory.manifest)] if inventory.manifest else []
    names = ", ".join(f"{kind} as '{printable(name[:60])}' ({writer})" for kind, name, writer in inventory.recognized)
    named = [f"recognized: {names}"] if names else []
    document = {"schema": SCHEMA, **asdict(inventory), "trace": str(inventory.trace)}
    return TableView(title, rows, [*made, *named, *inventory.advice, *inventory.warnings], document)


def _how_made(run: Manifest) -> str:
    bucket = "" if run.bucket_size_mb is None else f", buckets of at most {run.bucket_size_mb:g} MiB"
    bucket += "".join(f", {extra}" for extra in variant_extras(run.options))
    parameters = sum(parameter.numel for parameter in run.parameters)
    return (
        f"run: {run.variant}{bucket}, {run.world_size} ranks, {run.backend}, {run.model_size} model "
        f"({parameters:,} parameters), batch {run.batch_size} x {run.seq_len} tokens, "
        f"{run.steps} steps after {run.warmup} of warm-up, recorded by {run.profiler or 'no profiler'}, {run.created}"
    )


_LONGEST_NAME = 60
_LONGEST_TYPE = 4000
"""Characters in which a function's parameters begin, else its name counts as it is."""
_DURATIONS_ADD_UP = "durations are summed over ranks, steps and streams, so they may exceed the time that passed"
_SLOWDOWN = (
    f"slowdown: median duration beside communication over that alone, of one kernel, launch shape and phase; n/a with "
    f"fewer than {LEAST_EXECUTIONS} executions of either"
)
_NO_SHAPES = "no launch shapes in this trace: kernels of one name and phase count as the same"
_IDLE = (
    "idle time from the first to the last work of a step, or of a capture that marks none, summed over ranks; "
    f"'host ...': where the host was before it launched the next work; '{NOT_BEGUN}': from the "
    "beginning of the call that launched the next work to that of the work"
)
NO_KERNELS = "no kernels were recorded: on a CPU only the program's ranges are known"


def kernels_views(result: TraceOverlap, use: DeviceUse, top: int | None = None) -> dict[str, TableView]:
    """Return the tables ``kernels`` (the first ``top`` kernels, or all), ``hidden`` and ``idle``."""
    title = f"{source_name(result.trace, result.files)} · {profiler_name(result)} · device: {result.device}"
    notes = _kernel_notes(use, top) or [
        next((rank.reason for rank in result.ranks if rank.reason in NOTHING_LEFT), NO_KERNELS)
    ]
    ranks = [
        {
            **values_of(rank, "process", "device", "rank", "overlapped_ns"),
            "hidden": [asdict(part) for part in rank.hidden],
            "idle_ns": rank.idle.idle_ns,
            "idle": [{"cause": cause, "idle_ns": idle_ns} for cause, idle_ns in rank.idle.causes],
            "idle_reason": rank.idle.reason,
        }
        for rank in use.ranks
    ]
    times = [asdict(kernel) for kernel in use.kernels]
    document = run_document(result, kernels=times, ranks=ranks, warnings=[*notes, *result.warnings])
    kernels = use.kernels[:top]
    whole = sum(kernel.total_ns for kernel in use.kernels)
    run: Row = {"run": result.label}
    rows: list[Row] = [{**run, **_kernel_row(kernel, whole)} for kernel in kernels]
    shown: list[Row] = [{**row, "kernel": short_name(kernel.name)} for row, kernel in zip(rows, kernels, strict=True)]
    hidden: list[Row] = [{**run, **row} for row in hidden_rows(use)]
    idle: list[Row] = [{**run, **row} for row in idle_rows(use)]
    return {
        "kernels": TableView(join_lines([title, "kernels by time"]), rows, notes, document, shown),
        "hidden": TableView("what hid communication", hidden, _hidden_notes(result.ranks, use), document),
        "idle": TableView("why devices were idle", idle, [*_idle_notes(use), *result.warnings], document),
    }


def most_of(view: TableView) -> str:
    if not view.rows:
        return view.notes[0]
    key = next(key for key in view.rows[0] if key.startswith("of_"))
    row = max(view.readable_rows, key=lambda row: row[key] or 0)
    names = [str(row[name]) for name in ("kernel", "phase", "kind", "cause") if row.get(name) is not None]
    share = f": {row[key]:.0f} %" if row[key] is not None else ""  # there is none if all kernels have length 0
    return f"{', '.join(names)}{share}"


def short_name(name: str) -> str:
    plain = re.sub(r"\((?:anonymous namespace|unnamed)\)::|<unnamed>::|\([A-Za-z_][\w ]*\)(?=-?\d)|^void ", "", name)
    plain = _without_return_type(plain)
    outer, bracket, inner = plain.partition("(")[0].partition("<")
    *_, folder, last = ("", *outer.split("::"))
    short = f"{folder}::{last}" if last.lower() == "kernel" else last
    types = re.sub(r"\b(?:[A-Za-z_]\w*::)+", "", inner)
    named = plain_name(f"{short}{bracket}{types}", _LONGEST_NAME).rstrip("<, ")
    return f"{named}…" if named.count("<") > named.count(">") and not named.endswith("…") else named


def _without_return_type(name: str) -> str:
    """Cut what stands before the name of a function template: ``enable_if<(n > 0), void>::type f<n>(int)``."""
    inside = in_types = begin = 0  # of parentheses, of angle brackets outside of them; where the name begins
    for at, letter in enumerate(name[:_LONGEST_TYPE]):
        if letter == "(" and not inside and not in_types:
            return name[begin:]
        inside += (letter == "(") - (letter == ")")
        if not inside:
            in_types = max(0, in_types + (letter == "<") - (letter == ">"))
        if letter == " " and not inside and not in_types:
            begin = at + 1
    return name


def _kernel_row(kernel: KernelTime, whole_ns: int) -> Row:
    return {
        "kernel": kernel.name,
        "shape": kernel.shape or None,
        **values_of(kernel, "phase", "kind", "count"),
        "total_ms": ms(kernel.total_ns),
        "of_kernel_time_%": in_percent(kernel.total_ns / whole_ns if whole_ns else None),
        "median_us": kernel.median_ns / 1e3,
        **values_of(kernel, "beside", "alone", "slowdown"),
    }


def hidden_rows(use: DeviceUse) -> list[Row]:
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
    if not use.kernels:
        return []
    left_out = len(use.kernels) - len(use.kernels[:top])
    more = [f"{count_noun(left_out, 'more kernel')}; all of them: --top 0"] if left_out else []
    shapes = [] if any(kernel.shape for kernel in use.kernels) else [_NO_SHAPES]
    return [_DURATIONS_ADD_UP, _SLOWDOWN, *shapes, *more]


def _hidden_notes(ranks: Sequence[RankOverlap], use: DeviceUse) -> list[str]:
    reasons = dict.fromkeys(filter(None, (of.reason for of in ranks if of.reason != NO_COMMUNICATION)))
    notes = [f"overlapped time not known: {reason}" for reason in reasons]
    if not any(rank.overlapped_ns for rank in use.ranks):
        return notes or ["no communication was overlapped"]
    summed = "overlapped communication, summed over ranks; where several kernels run at once, one of them counts"
    return [summed, *notes]


def _idle_notes(use: DeviceUse) -> list[str]:
    reasons: Mapping[str, None] = dict.fromkeys(rank.idle.reason for rank in use.ranks if rank.idle.reason)
    notes = [f"idle time not known: {reason}" for reason in reasons]
    if not any(rank.idle.causes for rank in use.ranks):
        return notes or ["no device was idle from the first to the last work of a step"]
    return [_IDLE, *notes]
