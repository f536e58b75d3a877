"""Which reader a file gets, and which files of a folder are traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.errors import TraceError
from ddp_prof.ingest.load import READERS, find_traces, load_trace
from ddp_prof.trace import SOURCE_NAMES
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7, "args": {}}


def write_json(path: Path, document: Any) -> Path:
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def names_of(traces: list[Path]) -> list[str]:
    return [trace.name for trace in traces]


def test_names_that_are_shown_are_of_formats_that_can_be_read() -> None:
    assert set(SOURCE_NAMES) <= {reader.source for reader in READERS}
    assert SOURCE_NAMES["kineto"] == "torch.profiler"


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_folder_gives_every_form_of_json_that_can_be_read(suffix: str, tmp_path: Path) -> None:
    write_json(tmp_path / f"a{suffix}", {"schemaVersion": 1, "traceEvents": [KERNEL]})
    write_json(tmp_path / f"b{suffix}", [KERNEL])
    write_json(tmp_path / f"other{suffix}", {"schema": 1, "ranks": []})
    write_json(tmp_path / f"others{suffix}", [{"step": 1}])
    (tmp_path / "empty.json").touch()
    found = find_traces(tmp_path)
    assert names_of(found) == [f"a{suffix}", f"b{suffix}"]
    assert [len(load_trace(path).activities) for path in found] == [1, 1]


def test_a_trace_that_begins_with_a_long_description_of_groups_is_found(tmp_path: Path) -> None:
    groups = [{"pg_name": str(group), "ranks": list(range(1024))} for group in range(400)]
    write_json(tmp_path / "a.json", {"distributedInfo": {"pg_config": groups}, "traceEvents": [KERNEL]})
    assert names_of(find_traces(tmp_path)) == ["a.json"]


def test_json_is_not_read_whole_to_be_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", [KERNEL])
    monkeypatch.setattr(Path, "read_bytes", lambda _path: pytest.fail("read whole"))
    assert names_of(find_traces(tmp_path)) == ["a.json"]


def test_a_report_whose_export_lies_beside_it_is_named_once(tmp_path: Path) -> None:
    write_capture(tmp_path / "a.sqlite", known_truth(1))
    for name in ("a.nsys-rep", "b.qdrep"):
        (tmp_path / name).write_bytes(b"NVIDIA Tegra Profiler Report")
    assert names_of(find_traces(tmp_path)) == ["a.sqlite", "b.qdrep"]


def test_a_folder_without_traces_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a folder without traces: it should hold files named \*\.sqlite, .*\.json"):
        find_traces(tmp_path)


def test_of_a_folder_of_folders_one_is_named(tmp_path: Path) -> None:
    """As those that torchtitan writes: profile_traces/iteration_10/rank0_trace.json."""
    for step in (20, 10):
        (tmp_path / f"iteration_{step}").mkdir()
        (tmp_path / f"iteration_{step}" / "rank0_trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(TraceError, match=r"a folder without traces: give the folders in it, such as .+/iteration_10$"):
        find_traces(tmp_path)


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a regular file"):
        load_trace(tmp_path)
