"""Timings of the all-reduce alone: from the ranks' times to rows, to the fitted model, to a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from ddp_prof.analyze.core.operations import ALL_REDUCE, bus_factor
from ddp_prof.benchmark.alpha_beta import BucketModel, Unknown, cost_alone, fit_link
from ddp_prof.benchmark.statistics import median_interval
from ddp_prof.benchmark.store import StoredAllReduce
from ddp_prof.present.columns import Row, ms
from ddp_prof.present.json_documents import SCHEMA
from ddp_prof.present.table import TableView
from ddp_prof.present.text import milliseconds, percent, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_prof.benchmark.alpha_beta import LinkModel

HOW_TO_READ = (
    "latency: median over calls, each after a barrier, of the {} time of a call over the ranks (nccl-tests: the mean "
    "of calls one behind the other, averaged over the ranks); low, high: 95 % interval of the median within this "
    "launch of the ranks; algbw: bytes / latency; busbw: algbw x 2 (n - 1) / n"
)


def summarize_times(
    times_ns: Mapping[int, Sequence[int]], *, environment: str, world_size: int, backend: str, device: str, created: str
) -> list[StoredAllReduce]:
    """A row for each size.

    Args:
        times_ns: By bytes of the message, the nanoseconds of each call.
        environment: Id of the machine and its versions.
        world_size: Number of ranks.
        backend: ``gloo`` or ``nccl``.
        device: ``cpu`` or ``cuda``.
        created: When, in ISO 8601.
    """
    rows = []
    for message_bytes, times in sorted(times_ns.items()):
        low, high = median_interval(times)
        rows.append(
            StoredAllReduce(
                environment=environment,
                world_size=world_size,
                backend=backend,
                device=device,
                bytes=message_bytes,
                calls=len(times),
                median_ns=round(float(np.median(times))),
                low_ns=None if low is None else round(low),
                high_ns=None if high is None else round(high),
                created=created,
            )
        )
    return rows


def timings_view(
    rows: Sequence[StoredAllReduce], title: str, gradient_bytes: int, model_size: str, over_ranks: str = "min"
) -> TableView:
    """The table of rows with one number of ranks, and what follows for the size of buckets."""
    link = fit_link([cost_alone(row) for row in rows])
    how_to_read = HOW_TO_READ.format({"min": "shortest", "max": "longest"}[over_ranks])
    notes = [how_to_read, *_link_notes(rows, link, gradient_bytes, model_size)]
    document = {
        "schema": SCHEMA,
        "world_size": rows[0].world_size,
        "over_ranks": over_ranks,
        "messages": [{**asdict(row), **_bandwidths(row)} for row in rows],
        "link": None if isinstance(link, Unknown) else asdict(link),
        "best_bucket_bytes": None if isinstance(link, Unknown) else BucketModel(link, gradient_bytes).best_bytes,
        "warnings": notes,
    }
    return TableView(title, [_row(row, link) for row in rows], notes, document)


def _row(row: StoredAllReduce, link: LinkModel | Unknown) -> Row:
    return {
        "ranks": row.world_size,
        "size": size(row.bytes),
        "bytes": row.bytes,
        "calls": row.calls,
        "latency_ms": ms(row.median_ns),
        "low_ms": ms(row.low_ns),
        "high_ms": ms(row.high_ns),
        "fitted_ms": None if isinstance(link, Unknown) else ms(link.time_ns(row.bytes)),
        **{f"{name.removesuffix('_bytes_per_s')}_GB/s": value / 1e9 for name, value in _bandwidths(row).items()},
    }


def _bandwidths(row: StoredAllReduce) -> dict[str, float]:
    """Bytes a second; the interval is that of the latency."""
    factor = bus_factor(ALL_REDUCE, row.world_size) or 0.0
    found = {"algbw_median_bytes_per_s": row.bytes / row.median_ns * 1e9}
    if row.low_ns and row.high_ns:
        found["algbw_low_bytes_per_s"] = row.bytes / row.high_ns * 1e9
        found["algbw_high_bytes_per_s"] = row.bytes / row.low_ns * 1e9
    return found | {name.replace("algbw", "busbw"): factor * value for name, value in found.items()}


def _link_notes(
    rows: Sequence[StoredAllReduce], link: LinkModel | Unknown, gradient_bytes: int, model_size: str
) -> list[str]:
    if isinstance(link, Unknown):
        return [f"no cost model: {link.reason}"]
    best = BucketModel(link, gradient_bytes).best_bytes
    overhead, error = milliseconds(round(link.overhead_ns)), percent(link.relative_error)
    notes = [
        f"fitted: {overhead} a call plus the bytes at {link.bytes_per_ns:.3g} GB/s, median error {error}",
        f"best bucket size for {size(gradient_bytes)} of gradients ({model_size} model): {size(round(best))}",
    ]
    half = link.overhead_ns * link.bytes_per_ns
    if rows[0].bytes > half:
        notes.append(f"the overhead of a call is extrapolated: add --sizes-mb below {size(max(1, round(half)))}")
    if rows[-1].bytes < 4 * half:
        notes.append(f"the bandwidth is extrapolated: add --sizes-mb above {size(round(4 * half))}")
    return notes
