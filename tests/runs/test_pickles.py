"""Results on their way between processes: what goes in comes out."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_prof.errors import TraceError
from ddp_prof.runs.pickles import pickle_with_names, read_result, unpickle_with_names, write_result
from ddp_prof.runs.report import MEASURES, LoadOptions, load_events, measure_events
from ddp_prof.runs.workers import pack_task, run_task
from tests.night import one_of_each_kind

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.sqlite"))
FOREIGN = sorted((Path(__file__).parents[3] / "shared" / "traces").glob("*.*[ez]"))


def same(one: Any, other: Any) -> bool:
    """Equal in kind and value, all the way down."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if type(one).__module__.startswith("ddp_prof.") and not isinstance(one, (Enum, str)):
        return same(vars(one), vars(other))
    return bool(one == other or (one != one and other != other))  # an unknown share is NaN


@pytest.mark.slow
@pytest.mark.parametrize("trace", one_of_each_kind([*TRACES, *FOREIGN]), ids=lambda path: path.name)
def test_each_result_survives_the_way(trace: Path) -> None:
    options = LoadOptions(with_launches=True)
    try:
        events = load_events(trace, options)
    except TraceError:
        if trace not in FOREIGN:
            raise
        pytest.skip("a trace of another program")
    results = measure_events(events, options, tuple(MEASURES))
    assert same(unpickle_with_names(pickle_with_names(results)), results)
    file = BytesIO()
    write_result(results, file)
    file.seek(0)
    assert same(read_result(file, {}), results)


def test_a_task_survives_the_way() -> None:
    arguments = Path("/x.sqlite"), LoadOptions(comm_patterns=("a", "b")), ("overlap",)
    assert unpickle_with_names(run_task(pack_task(arguments[0], _return_arguments, *arguments))) == arguments


def _return_arguments(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def test_paths_get_the_names_that_they_have_here() -> None:
    assert unpickle_with_names(pickle_with_names((Path("/far/x"), Path("/y"))), {"/far/x": Path("x")}) == (
        Path("x"),
        Path("/y"),
    )


def test_an_error_survives_the_way() -> None:
    error = unpickle_with_names(
        pickle_with_names(TraceError(Path("/far/x"), "is empty", "record it again")), {"/far/x": Path("x")}
    )
    assert str(error) == "x: is empty: record it again"
