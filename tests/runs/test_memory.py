"""Where the memory may not do, that is said before a large export is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.bounded_file import free_memory
from ddp_prof.ingest import nsys_export
from ddp_prof.ingest.nsys_export import count_rows
from ddp_prof.runs import report
from ddp_prof.runs.report import BYTES_PER_ROW, LoadOptions, load_events
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


@pytest.mark.parametrize(("lacking", "is_told"), [(1, True), (0, False)])
def test_where_the_memory_would_not_do_a_way_out_is_told(
    lacking: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_capture(tmp_path / "x.sqlite", known_truth(1))
    monkeypatch.setattr(nsys_export, "LEAST_ROWS_COUNTED", 33)
    monkeypatch.setattr(report, "free_memory", lambda: 33 * BYTES_PER_ROW - lacking)
    load_events(path, LoadOptions())
    told = "x.sqlite: its 33 rows take up to 0.0 GB of memory, and 0.0 GB are free: leave steps out"
    assert [told in line for line in caplog.messages] == [True] * is_told
    assert (here := free_memory()) is None or here > 2**20


def test_small_exports_are_not_counted(tmp_path: Path) -> None:
    assert count_rows(write_capture(tmp_path / "x.sqlite", known_truth(5))) == 0
