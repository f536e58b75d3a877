"""Bucket sizes predicted from a table of step times of the course's variants; see ``validate_whatif.sh --table``.

A table has, for each workload, a row per variant: how long a step took, and how long it waited for communication. The
rows without overlap tell how long compute takes alone; the row of one all-reduce per parameter tells how much longer
beside communication, and what a byte costs. Its times of buckets are then predicted, and compared.

A row is refused if its own times cannot be true together with those of another row of the same work: compute beside
communication takes no less than compute alone.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddp_prof.analyze.what_if.rules import fill_at_most
from ddp_prof.analyze.what_if.simulate import Buckets, LinkTimes, StepModel, simulate
from ddp_prof.table import Ints
from ddp_prof.variants import BYTES_PER_MB

ALONE, EACH, BUCKETS = ("naive", "flat"), "overlap", "bucketed"
OF_BACKWARD, OF_REST, OVERHEAD_NS = 0.6, 0.08, 45_000.0
"""The shares of compute that are backward and what follows it; of a call, by the 100 MB of the first workload."""
ERROR = 0.05
"""So far two measurements of the same work may differ."""
USUAL_KAPPA = 1.5
"""Where no row tells it."""

REFUSED = (
    "{row}: refused, its compute alone ({alone:.0f} ms, the step without its wait) is longer than compute beside "
    "communication ({beside:.0f} ms in {other}), which only adds to it: measure it again"
)


@dataclass(frozen=True)
class Row:
    """A row of the table; times in nanoseconds."""

    variant: str
    workload: tuple[str, str]
    bucket_mb: float | None
    step_ns: float
    wait_ns: float

    @property
    def compute_ns(self) -> float:
        return self.step_ns - self.wait_ns

    @property
    def text(self) -> str:
        size = "" if self.bucket_mb is None else f" {self.bucket_mb:g} MB"
        return f"({self.variant}{size}, {', '.join(self.workload)})"


def read_table(file: Path) -> list[Row]:
    """The rows that were measured.

    Columns: variant, bucket_size_mb, local_batch_size, sequence_length, step_time_s, grad_all_reduce_s.
    """
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Row(
                one["variant"],
                (one["local_batch_size"], one["sequence_length"]),
                float(one["bucket_size_mb"]) if one["bucket_size_mb"] else None,
                1e9 * float(one["step_time_s"]),
                1e9 * float(one["grad_all_reduce_s"]),
            )
            for one in csv.DictReader(lines)
            if one["step_time_s"] and one["grad_all_reduce_s"]
        ]


def find_refused(rows: Sequence[Row]) -> dict[Row, str]:
    """The rows whose times contradict those of the row with overlap, with the reason."""
    beside = {row.workload: row for row in rows if row.variant == EACH}
    found = {}
    for row in rows:
        other = beside.get(row.workload)
        if row.variant in ALONE and other and row.compute_ns > (1 + ERROR) * other.compute_ns:
            found[row] = REFUSED.format(
                row=row.text, alone=row.compute_ns / 1e6, beside=other.compute_ns / 1e6, other=other.text
            )
    return found


def predict_table(rows: Sequence[Row], sizes: Ints) -> list[tuple[Row, float, float]]:
    """Each row of buckets, its predicted step, and that of the row it is predicted from; nanoseconds.

    Args:
        rows: Of :func:`read_table`.
        sizes: Bytes of the gradients, in the order in which they become ready; the last one is that of the embedding,
            which is ready when backward ends.
    """
    refused = find_refused(rows)
    each = [[at] for at in range(len(sizes))]
    found = []
    for today in (row for row in rows if row.variant == EACH):
        own = [row for row in rows if row.workload == today.workload and row not in refused]
        alone = [row.compute_ns for row in own if row.variant in ALONE]
        usual_ns = today.compute_ns / (1 + (USUAL_KAPPA - 1) * OF_BACKWARD)
        compute_ns = float(np.median(alone)) if alone else usual_ns
        kappa = max(1.0, 1 + (today.compute_ns / compute_ns - 1) / OF_BACKWARD)
        share, model = 1 - 1 / kappa, _step_of(sizes, compute_ns)
        link = _fitted_link(model, each, today.step_ns, share)
        for row in own:
            if row.variant == BUCKETS and row.bucket_mb:
                (step_ns,) = simulate(model, fill_at_most(sizes, row.bucket_mb * BYTES_PER_MB), link, share)
                found.append((row, float(step_ns), today.step_ns))
    return found


def _step_of(sizes: Ints, compute_ns: float) -> StepModel:
    others = np.append(sizes[:-1], 0)
    backward_ns, rest_ns = OF_BACKWARD * compute_ns, OF_REST * compute_ns
    before_ns = compute_ns - backward_ns - rest_ns
    ready_ns = before_ns + backward_ns * np.cumsum(others) / others.sum()
    nothing = np.zeros((1, len(sizes)))
    return StepModel(sizes, ready_ns[None, :], np.array([before_ns + backward_ns]), nothing, np.array([rest_ns]))


def _fitted_link(model: StepModel, buckets: Buckets, step_ns: float, share: float) -> LinkTimes:
    """The time per byte with which the step is as long as it was measured: by halving."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        (found_ns,) = simulate(model, buckets, LinkTimes(OVERHEAD_NS, middle), share)
        low, high = (middle, high) if found_ns < step_ns else (low, middle)
    return LinkTimes(OVERHEAD_NS, high)


def table_lines(file: Path, sizes: Ints) -> list[str]:
    """What ``scripts/validate_whatif.sh --table`` prints."""
    rows = read_table(file)
    found = predict_table(rows, sizes)
    lines = [
        f"{row.text:<28} measured {row.step_ns / 1e6:7.1f} ms, predicted {ns / 1e6:7.1f} ({ns / row.step_ns - 1:+.1%})"
        for row, ns, _ in found
    ]
    errors = np.abs([ns / row.step_ns - 1 for row, ns, _ in found])
    nothing = np.abs([today_ns / row.step_ns - 1 for row, _, today_ns in found])
    for name, of in (("predicted", errors), ("nothing changes", nothing)):
        lines += [f"{name:<16} median {np.median(of):6.2%}   at most {of.max():6.2%}"] if len(of) else []
    return [*lines, *find_refused(rows).values()]
