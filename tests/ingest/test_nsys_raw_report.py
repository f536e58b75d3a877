"""Raw reports. The nsys here is a stand-in that copies a prepared export; tests/scripts runs the real one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_prof.errors import TraceError
from ddp_prof.ingest import cached
from ddp_prof.ingest import nsys_program as program
from ddp_prof.ingest.load import load_trace
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture
from tests.waiting import has_ended, wait_until

STAND_IN = """#!/bin/sh
case "$1 $2" in
  --version*) echo "NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0" ;;
  "export --help") echo "--include-json" ;;
  *) echo "$*" >>"{log}"; {action} ;;
esac
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "reports" / "x.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n" + bytes(300))
    return path


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str = 'cp "{export}" "$5"') -> Path:
    """An nsys whose calls are logged; returns the log."""
    export = write_capture(tmp_path / "prepared", known_truth())
    nsys, log = tmp_path / "nsys", tmp_path / "log"
    nsys.write_text(STAND_IN.format(log=log, action=action.format(export=export)))
    nsys.chmod(0o755)
    monkeypatch.setenv("NSYS", str(nsys))
    return log


def test_a_report_is_exported_once(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stand_in(tmp_path, monkeypatch)
    before = report.read_bytes()
    for is_first in (True, False):
        trace = load_trace(report)
        assert any("exported to x.sqlite" in warning for warning in trace.warnings) == is_first
        assert (trace.source, trace.path, len(trace.activities)) == ("nsys-report", report, 60)
    assert len(log.read_text().splitlines()) == 1
    assert "--include-json true" in log.read_text()
    assert report.read_bytes() == before
    assert sorted(path.name for path in report.parent.iterdir()) == ["x.nsys-rep", "x.sqlite"]


def test_an_export_older_than_its_report_is_made_anew(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_in(tmp_path, monkeypatch)
    load_trace(report)
    shutil.copy(report, report.with_suffix(".new"))
    report.with_suffix(".new").replace(report)
    load_trace(report)
    assert len(log.read_text().splitlines()) == 2


def test_a_newer_report_names_both_versions(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, action="echo 'unsupported version' >&2; exit 1")
    report.write_bytes(report.read_bytes().replace(b"2023@4@4@54", b"2026@1@2@11"))
    with pytest.raises(
        TraceError, match=r"x\.nsys-rep: made by nsys 2026\.1\.2, and the nsys found here is 2023\.4\.4"
    ):
        load_trace(report)
    assert [path.name for path in report.parent.iterdir()] == ["x.nsys-rep"], "nothing half-made is left"


def test_without_nsys_the_way_out_is_told(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "none"))
    with pytest.raises(TraceError, match=r"there is no nsys here to export it.*NSYS=/path/to/nsys"):
        load_trace(report)


def test_a_name_that_looks_like_an_option_is_a_name(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_in(tmp_path, monkeypatch)
    report.rename(report.with_name("--help.nsys-rep"))
    monkeypatch.chdir(report.parent)
    assert load_trace(Path("--help.nsys-rep")).source == "nsys-report"
    (call,) = log.read_text().splitlines()
    assert call.endswith(f" {report.parent}/--help.nsys-rep")
    assert "--output /" in call


def test_an_nsys_that_hangs_is_ended(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, action="exec sleep 600")
    monkeypatch.setattr(program, "EXPORT_LIMIT_S", 1)
    with pytest.raises(
        TraceError, match=r"x\.nsys-rep: nsys 2023\.4\.4\.54 cannot export it \(error: not done after 1 s"
    ):
        load_trace(report)
    assert [path.name for path in report.parent.iterdir()] == ["x.nsys-rep"]


def test_an_nsys_that_finds_the_disk_full_leaves_nothing_and_that_is_told(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns 0 and leaves an empty file, of which 'an empty file: capture or export it again' was said."""
    stand_in(tmp_path, monkeypatch, action=': >"$5"; echo "[tag_message] = database or disk is full"')
    with pytest.raises(TraceError, match=r"x\.nsys-rep: nsys .* cannot export it \(.*database or disk is full\)"):
        load_trace(report)
    assert [path.name for path in report.parent.iterdir()] == ["x.nsys-rep"]


def test_what_an_nsys_started_ends_with_it(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, action=f"sleep 600 & echo $! >{tmp_path}/child; wait")
    monkeypatch.setattr(program, "EXPORT_LIMIT_S", 1)
    with pytest.raises(TraceError, match="not done after 1 s"):
        load_trace(report)
    wait_until(lambda: has_ended(tmp_path / "child"))


def test_an_nsys_that_does_not_answer_is_none(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    Path(os.environ["NSYS"]).write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(program, "ANSWER_LIMIT_S", 0.5)
    with pytest.raises(TraceError, match="there is no nsys here to export it"):
        load_trace(report)


def test_where_there_is_no_room_nothing_is_exported(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = stand_in(tmp_path, monkeypatch)
    report.write_bytes(report.read_bytes() + bytes(1_000_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_999_999))
    with pytest.raises(TraceError, match=r"x\.nsys-rep: reading it takes about 4 MB in .*, where 4 MB are free"):
        load_trace(report)
    assert not log.exists() or "export --type" not in log.read_text()


def test_another_nsys_exports_a_report_anew_that_has_no_export(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that cannot be written, what is kept is of the nsys that exported it."""
    log = stand_in(tmp_path, monkeypatch)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and access(path, mode, **more))
    monkeypatch.setattr(cached, "LEAST_BYTES_PACKED", 0)
    monkeypatch.setenv("DDP_PROF_CACHE", str(tmp_path / "cache"))
    old = Path(os.environ["NSYS"])
    new = tmp_path / "new_nsys"
    new.write_text(old.read_text().replace("2023.4.4.54", "2025.1.1.103"))
    new.chmod(0o755)
    exports = []
    for nsys in (old, old, new, new):
        monkeypatch.setenv("NSYS", str(nsys))
        load_trace(report)
        exports.append(len(log.read_text().splitlines()))
    assert exports == [1, 1, 2, 2]
    assert [path.name for path in report.parent.iterdir()] == ["x.nsys-rep"]
