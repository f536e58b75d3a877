"""The command line lets all threads take memory from one heap, and ends without a search for cycles."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.heap import return_free_memory, share_one_heap
from ddp_prof.runs import report
from tests.command_line import run
from tests.conftest import ROOT
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


def test_a_c_library_without_the_setting_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Musl has no ``mallopt``."""
    path = write_capture(tmp_path / "x.sqlite", known_truth())
    right = run("overlap", path, "--format", "json").stdout
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert run("overlap", path, "--format", "json").stdout == right


@pytest.mark.parametrize(("given", "used"), [(None, "system"), ("jemalloc", "jemalloc")])
def test_what_the_user_chose_for_arrow_stays(given: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    if given:
        monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", given)
    share_one_heap()
    assert os.environ["ARROW_DEFAULT_MEMORY_POOL"] == used


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_memory_of_a_large_array_serves_the_next_one() -> None:
    """Else the system clears 48 MB for each, page by page."""
    share_one_heap()
    np.ones(6_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(6_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_between_arrays_in_use_returns_to_the_system() -> None:
    """The last array keeps the heap from getting shorter."""
    share_one_heap()
    arrays = [np.ones(1_000_000) for _ in range(20)]
    del arrays[:-1]
    before = anonymous_megabytes()
    return_free_memory()
    assert before - anonymous_megabytes() > 100
    assert arrays[0].all()


def anonymous_megabytes() -> int:
    """Return how much memory this process holds, besides pages of files."""
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(held.split()[1]) // 1024


@pytest.mark.parametrize(("least", "returned"), [(0, 1), (1 << 20, 0)])
def test_after_reading_a_large_capture_free_memory_is_returned(
    least: int, returned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(report, "MOST_BESIDE", least)
    monkeypatch.setattr(report, "return_free_memory", lambda: calls.append(1))
    run("overlap", write_capture(tmp_path / "x.sqlite", known_truth()))
    assert len(calls) == returned


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_threads_get_no_heaps_of_their_own() -> None:
    """glibc maps 64 MB of addresses for the heap of a thread."""
    program = (
        "import threading\n"
        "from ddp_prof.heap import share_one_heap\n"
        "{first}\n"
        "def held(): return sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('Size'))\n"
        "blocks, told = [], threading.Barrier(9)\n"
        "def work(): blocks.append([bytearray(900) for _ in range(99)]); told.wait(); told.wait()\n"
        "before = held()\n"
        "threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "told.wait(); print((held() - before) >> 10); told.wait()\n"
    )
    one, several = (
        int(
            subprocess.run(
                [sys.executable, "-c", program.replace("{first}", first)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for first in ("share_one_heap()", "")
    )
    assert one <= several
    assert one < 8 * 8 + 64  # the stacks of eight threads


def test_the_program_ends_without_a_search_for_cycles() -> None:
    program = (
        "import atexit, gc, sys\n"
        "from ddp_prof.__main__ import main\n"
        "sys.argv[1:] = ['--version']\n"
        "atexit.register(lambda: print(len(gc.get_objects())))\n"
        "main()\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout.splitlines()[-1]) < 100  # the objects that a search would look at


def test_a_program_that_runs_a_command_keeps_its_search_for_cycles() -> None:
    before = gc.get_freeze_count()
    run("--version")
    assert gc.get_freeze_count() == before
