"""Results on their way between processes: what goes in comes out, and nothing else can."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ddp_prof.runs.report import MEASURES, LoadOptions, Task, load_events, measure_events
from ddp_prof.runs.wire import decode, encode

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
    return bool(one == other)


@pytest.mark.parametrize("trace", [*TRACES, *FOREIGN], ids=lambda path: path.name)
def test_each_result_survives_the_way(trace: Path) -> None:
    options = LoadOptions(with_launches=True)
    results = measure_events(load_events(trace, options), options, tuple(MEASURES))
    assert same(decode(encode(results)), results)


def test_a_task_survives_the_way() -> None:
    task = Task(Path("/x.sqlite"), LoadOptions(comm_patterns=("a", "b")), ("overlap",))
    assert same(decode(encode(task)), task)


def test_paths_get_the_names_that_they_have_here() -> None:
    assert decode(encode((Path("/far/x"), Path("/y"))), {"/far/x": Path("x")}) == (Path("x"), Path("/y"))


@dataclass
class Manifest:
    """Named like a result, and none."""


@pytest.mark.parametrize("value", [object(), print, Manifest(), {1, 2}, np.int64(3)])
def test_what_is_no_result_is_not_handed_on(value: object) -> None:
    with pytest.raises(TypeError):
        encode((value,))


@pytest.mark.parametrize("name", ["system", "Popen", "os:system", "Trace"])
def test_bytes_name_no_other_class(name: str) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(0, msgspec.msgpack.encode([name, "echo"])))
    with pytest.raises(KeyError):
        decode(data)
