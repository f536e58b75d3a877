"""The columns of all tables: key, meaning, format and importance of each.

A row is a dictionary with the columns' keys, which are also the headings of a CSV file. Figures of steps, ranks,
collectives, kernels, skew, runs, critical paths, processes and changes are declared where they are measured; here are
the columns of everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from ddp_prof.columns import ALWAYS, USUALLY, WITH_MUCH_ROOM, WITH_ROOM, Column, ResultColumn, Row, table_columns


def ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def values_of(result: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a result by name."""
    return {name: getattr(result, name) for name in names}


def fields_of(result: Any) -> dict[str, Any]:
    """Return all fields of a dataclass by name; unlike ``asdict``, it does not copy their values."""
    return values_of(result, *(field.name for field in fields(result)))


def times_of(result: object, *names: str) -> Row:
    """Return fields of nanoseconds as columns of milliseconds.

    The name ``comm`` stands for the field ``comm_ns`` and gives the column ``comm_ms``.
    """
    return {f"{name}_ms": ms(getattr(result, f"{name}_ns")) for name in names}


def in_percent(ratio: float | None) -> float | None:
    """Return a ratio from 0 to 1 in per cent; ``None`` stays."""
    return None if ratio is None else ratio * 100


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns of some rows, which all have the same keys; no columns without rows."""
    if not rows:
        return ()
    # The smallest catalogue that has all of them is the fastest to make.
    found = next((few for few in map(catalogue, range(1, _GROUPS)) if rows[0].keys() <= few.keys()), catalogue())
    return tuple(found[key] for key in rows[0])


def _name(key: str, meaning: str, stays: int = USUALLY) -> Column:
    """Return a column of text, aligned to the left; some tables have numbers in it."""
    return Column(key, meaning, stays, align="left")


def _count(key: str, meaning: str, stays: int = WITH_ROOM) -> Column:
    """Return a column of counts without decimals; a median of counts is a float."""
    return Column(key, meaning, stays, decimals=0)


def _share(key: str, meaning: str, stays: int = USUALLY) -> Column:
    """Return a column of percentages with one decimal."""
    return Column(key, meaning, stays, decimals=1)


_COLUMNS = (
    # What a row describes.
    _name("run", "the run: its variant, or the name of its file", WITH_ROOM),
    _name("variant", "the variant of data parallelism", ALWAYS),
    _name("node", "name of the machine", WITH_ROOM),
    _name("rank", "the rank, or its process where the rank is not known", ALWAYS),
    _count("process", "number of the operating system's process", WITH_MUCH_ROOM),
    _name("device", "where it ran: a GPU's number, cuda or cpu", WITH_ROOM),
    _name("step", "number of the step", ALWAYS),
    _name("collective", "its bucket, else its position in the step", ALWAYS),
    _name("group", "communicator, by the name that the profiler noted", WITH_ROOM),
    # Counts.
    _count("ranks", "ranks of the run"),
    # Times of a step.
    _share("gain_at_most_%", "share of the step that hiding all communication would gain at most", ALWAYS),
    # The doctor.
    _name("finding", "what was found", ALWAYS),
    Column("gain_ms", "what a typical step is expected to gain without it, simulated", ALWAYS),
    Column("costs_ms", "what it costs in a typical step, at most", ALWAYS),
    _name("of_ranks", "the ranks that show it", WITH_ROOM),
    _name("evidence", "what the traces show", ALWAYS),
    _name("advice", "what to change", ALWAYS),
    # The waterfall.
    _name("from -> to", "the run, or the change from one run to the next", ALWAYS),
    # Changes between two runs of one variant.
    _name("significant", "whether the change is beyond the spread of both runs", ALWAYS),
    # Predictions.
    _name("what_if", "the change that is predicted", ALWAYS),
    _count("buckets", "collectives of gradients in a step"),
    Column("largest_MiB", "size of the largest of them", WITH_ROOM, decimals=1),
    Column("change_low_ms", "lower end of the change's 90 % interval", USUALLY),
    Column("change_high_ms", "upper end of the change's 90 % interval", USUALLY),
    Column("whole_step_ms", "the measured step and the change", WITH_ROOM),
    # Requirements.
    _name("requirement", "what was required", ALWAYS),
    Column("measured", "what was measured", ALWAYS),
    Column("limit", "what was allowed", ALWAYS),
    Column("baseline", "what was measured of the baseline"),
    Column("spread", "how far the difference may be off", WITH_ROOM),
    _name("unit", "of the figures", ALWAYS),
    _name("verdict", "passed, failed or not known; of a prediction gain, loss, no change or cannot be told", ALWAYS),
    _name("decided_by", "the rank that decided", WITH_ROOM),
    _name("why", "why nothing is known", USUALLY),
    # What hid communication, idle time.
    _share("of_overlapped_%", "share of all overlapped communication", ALWAYS),
    _name("cause", "what did it", ALWAYS),
    _share("of_idle_%", "share of all idle time", ALWAYS),
    # The study.
    _count("batch", "sequences of a rank's batch", ALWAYS),
    _count("context", "tokens of a sequence", ALWAYS),
    _name("status", "whether the runs finished", WITH_ROOM),
    _count("runs", "runs of the setting", WITH_ROOM),
    Column("step_±_ms", "how far the 95 % interval of the step time reaches from it"),
    Column("comm_±_ms", "how far the 95 % interval of the communication time reaches from it", WITH_ROOM),
    _share("comm_%", "communication in per cent of the step time, by the host's timer"),
    Column("synchronized_comm_ms", "communication after a synchronization of the device", WITH_MUCH_ROOM),
    Column("trace_exposed_ms", "exposed communication, from the trace", WITH_ROOM),
    Column("trace_tail_ms", "tail, from the trace", WITH_ROOM),
    _name("observation", "a statistically supported sentence", ALWAYS),
    Column("predicted_ms", "communication left after backward, by the model of bucketing", WITH_MUCH_ROOM),
    # Tuning.
    _name("try", "settings that were tried together", ALWAYS),
    _name("outcome", "faster, slower, no difference, or why none of these", ALWAYS),
    _name("source", "what was measured, or what tells it of the capture of today's settings", ALWAYS),
    _share("gain_%", "what it takes off today's step; measured by pairs of runs", ALWAYS),
    _share("gain_low_%", "lower end of its interval"),
    _share("gain_high_%", "upper end of its interval"),
    _count("pairs", "rounds in which it ran, and today's settings"),
    _name("losses", "whether they are those of today's settings"),
    _name("write", "what to write to have these settings", WITH_MUCH_ROOM),
    # A job that trains.
    _name("time", "when it was measured, in UTC", USUALLY),
    _name("late_rank", "the rank that arrives last in most of the measured steps", ALWAYS),
    _name("alert", "limits that were not met", USUALLY),
    _count("measurements", "measurements in the log of a monitor"),
    # All-reduces by size.
    _name("size", "size of the message", ALWAYS),
    _count("calls", "timed calls", WITH_MUCH_ROOM),
    Column("latency_ms", "time of a call: median over runs", ALWAYS),
    Column("low_ms", "lower end of the 95 % interval of the latency"),
    Column("high_ms", "upper end of the 95 % interval of the latency"),
    Column("fitted_ms", "latency by the fitted cost model", WITH_ROOM),
    # Small messages reach some hundred kB/s: two decimals would show zeros.
    Column("algbw_median_GB/s", "bytes over the latency", decimals=4),
    Column("busbw_median_GB/s", "algbw times 2 (n - 1) / n for n ranks", decimals=4),
)


_GROUPS = 3
"""Number of groups of results that declare columns, see :func:`_declared`."""


@cache
def catalogue(groups: int = _GROUPS) -> Mapping[str, Column]:
    """Return all columns by key. A key means the same in all tables, so of two declarations the first counts.

    Args:
        groups: Only results of the first so many groups are included, so that fewer modules are imported.
    """
    # The last of equal keys counts in a dictionary, so the declarations of results are reversed.
    declared = [one.table_column for one in reversed(_declared(groups))]
    return {column.key: column for column in (*declared, *_COLUMNS)}


@cache
def describing() -> frozenset[str]:
    """Return the keys of columns that say what a row is about, such as its rank or step."""
    return frozenset(_DESCRIBING) | {one.table_key for one in _declared(_GROUPS) if one.describes}


def _declared(groups: int) -> list[ResultColumn]:
    """Return the columns that results declare, of the first ``groups`` groups of results.

    They are in the order of how often tables show them: to import the second group takes a tenth of the time of a
    command that shows only the first one.
    """
    from ddp_prof.analyze.overlap import RankOverlap  # these need numpy, which --help does without
    from ddp_prof.analyze.step_columns import StepOverlap

    kinds: list[type] = [StepOverlap, RankOverlap]
    if groups > 1:
        from ddp_prof.analyze.collectives.collective import Collective
        from ddp_prof.analyze.collectives.skew import RankSkew
        from ddp_prof.analyze.kernels.kernel_times import KernelTime
        from ddp_prof.analyze.variants.comparison import VariantSummary

        kinds += [Collective, KernelTime, RankSkew, VariantSummary]
    if groups > 2:
        from ddp_prof.analyze.critical.critical_path import StepPath
        from ddp_prof.analyze.inventory import ProcessInventory
        from ddp_prof.analyze.variants.waterfall import PartChange, Parts

        kinds += [StepPath, ProcessInventory, Parts, PartChange]
    return [one for kind in kinds for one in table_columns(kind)]


_DESCRIBING = [column.key for column in _COLUMNS[: [column.key for column in _COLUMNS].index("ranks")]]
"""Keys of the columns under ``What a row describes`` above: all before ``ranks``."""
