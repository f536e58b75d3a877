"""Measuring one report: kernels, dependencies, and facts of the doctor, in threads of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddp_prof.analyze.core import trace_ranks
from ddp_prof.analyze.doctor import rank_facts
from ddp_prof.analyze.kernels import kernel_times
from ddp_prof.errors import TraceError
from ddp_prof.runs import report
from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDP_PROF_CACHE", "off")
    return write_capture(tmp_path / "known.sqlite", known_truth())


@pytest.mark.parametrize(
    ("command", "module", "name"),
    [(command, kernel_times, "find_kernel_runs") for command in ("overlap", "summary", "kernels")]
    + [("summary", rank_facts, "measure_facts")]
    + [("overlap", trace_ranks, "find_dependencies")],
)
@pytest.mark.parametrize(
    ("cores", "least", "most", "is_beside"),
    [(2, 0, 99, True), (1, 0, 99, False), (2, 99, 999, False), (2, 0, 9, False)],
)
def test_much_of_a_large_report_is_measured_beside_the_rest(
    command: str,
    module: ModuleType,
    name: str,
    cores: int,
    least: int,
    most: int,
    is_beside: bool,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same result; not on one core, nor where a report has fewer or more than some events (here 30)."""
    right, used, find = run(command, trace, "--format", "json").stdout, set[Any](), getattr(module, name)
    monkeypatch.setattr(report, "count_cores", lambda: cores)
    monkeypatch.setattr(report, "LEAST_BESIDE", least)
    monkeypatch.setattr(report, "MOST_BESIDE", most)
    monkeypatch.setattr(module, name, lambda rank: used.add(threading.current_thread()) or find(rank))
    assert run(command, trace, "--format", "json").stdout == right
    assert len(used) == 1
    assert (threading.main_thread() not in used) == is_beside


def test_an_error_in_the_thread_is_that_of_the_command(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: Any) -> None:
        raise TraceError(rank.trace.path, "its kernels are odd", "look at them")

    monkeypatch.setattr(report, "count_cores", lambda: 2)
    monkeypatch.setattr(report, "LEAST_BESIDE", 0)
    monkeypatch.setattr(kernel_times, "find_kernel_runs", fail)
    failed = run("overlap", trace, "--format", "json")
    assert failed.exit_code == 1
    assert "its kernels are odd" in failed.stderr
