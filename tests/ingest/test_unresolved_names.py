"""A kernel without a name is neither compute nor communication: nobody knows what it was."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import measure_overlap
from ddp_prof.errors import TraceError
from ddp_prof.ingest.load import load_trace
from ddp_prof.notes import Doubt
from ddp_prof.trace import Category, UnresolvedNames
from tests.command_line import run
from tests.ingest.test_nsys_export import MS, known_truth
from tests.nsys_factory import GENERATIONS, write_capture

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COLLECTIVE = "name LIKE 'nccl%'"


def damaged(path: Path, *statements: str, product: str = "2024.6") -> Path:
    write_capture(path, known_truth(1), product)
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path


@pytest.mark.parametrize("product", GENERATIONS)
@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE StringIds",
        "DELETE FROM StringIds",
        "UPDATE StringIds SET value = ''",
        "UPDATE StringIds SET id = -id",
    ],
)
def test_a_capture_whose_kernels_have_no_names_is_refused(product: str, statement: str, tmp_path: Path) -> None:
    """It was measured before: communication 0.00 ms, "no communication in this trace"."""
    path = damaged(tmp_path / "x.sqlite", statement, product=product)
    result = run("overlap", str(path))
    assert result.exit_code == 1
    assert "x.sqlite: none of its 15 kernels has a name" in result.stderr
    assert result.stdout == ""


def test_kernels_without_a_name_are_neither_compute_nor_communication(tmp_path: Path) -> None:
    """The last kernel of a step, an optimizer's of 10 of 120 ms, refers to a string that does not exist."""
    path = damaged(tmp_path / "x.sqlite", "DELETE FROM StringIds WHERE value = 'multi_tensor_adam'")
    trace = load_trace(path)
    last = trace.activities.start_ns.argmax()
    assert trace.activities.category[last] == Category.UNKNOWN
    assert trace.names[trace.activities.name_id[last]] == "unnamed kernel"
    assert trace.unresolved_names == UnresolvedNames(kernels=1, of_kernels=15, time_ns=10 * MS, of_time_ns=105 * MS)
    assert trace.unresolved_names.share == pytest.approx(10 / 105)
    (warning,) = trace.warnings
    assert isinstance(warning, Doubt)
    assert warning.startswith("1 of 15 kernels (10 % of their time) has no name in this trace: it counts neither")
    (step,) = measure_overlap(trace).ranks[0].steps
    assert (step.kernels, step.collectives, step.comm_ns) == (15, None, None)  # kernels are counted all the same


def test_nothing_is_said_where_all_names_are_known(tmp_path: Path) -> None:
    trace = load_trace(write_capture(tmp_path / "x.sqlite", known_truth(1)))
    assert trace.unresolved_names == UnresolvedNames(0, 15, 0, 105 * MS)
    assert (trace.unresolved_names.share, trace.warnings) == (0.0, ())


@pytest.mark.parametrize("lost", ["demangledName = NULL", "demangledName = 99999"])
def test_the_short_name_stands_in_for_the_long_one(lost: str, tmp_path: Path) -> None:
    trace = load_trace(damaged(tmp_path / "x.sqlite", f"UPDATE {KERNELS} SET {lost}"))
    names = {trace.names[index] for index in trace.activities.name_id}
    assert {"gemm_forward", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"} <= names
    assert (trace.activities.category == Category.COMMUNICATION).sum() == 2


def test_ranges_without_a_name_are_counted(tmp_path: Path) -> None:
    path = damaged(tmp_path / "x.sqlite", "DELETE FROM StringIds WHERE value = 'forward'")
    (warning,) = load_trace(path).warnings
    assert warning == "1 of 3 ranges has no name in this trace: it names no step or phase"
    assert isinstance(warning, Doubt)


def test_kinetos_kernels_may_lack_names_too(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "ts": 1, "dur": 2, "pid": 0, "tid": 7, "args": {}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": [event | {"name": "gemm"}, event, event | {"name": None}]}))
    trace = load_trace(path)
    assert trace.activities.category.tolist() == [Category.COMPUTE, Category.UNKNOWN, Category.UNKNOWN]
    path.write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(TraceError, match="its kernel has no name"):
        load_trace(path)
