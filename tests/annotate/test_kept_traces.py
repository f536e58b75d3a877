"""Which traces of a monitor are deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ddp_prof.annotate.kept_traces import KeptTraces, name_of_trace


def write_trace(folder: Path, step: int, rank: int, second: int) -> Path:
    """A file as a monitor writes it, with the name under which it was exported at its end."""
    file = folder / name_of_trace(step, rank)
    file.write_text(f'{{"traceName": "/x/.{file.name}.1.tmp"}}')
    os.utime(file, ns=(second * 10**9,) * 2)
    return file


def test_a_step_that_a_restart_measures_again_is_kept_until_it_is_analysed(tmp_path: Path) -> None:
    """Its trace is there before that of step 6 is analysed, under the name of the one of the first start."""
    old = [write_trace(tmp_path, step, rank, second=1) for step in (12, 18) for rank in (0, 1)]
    (log := tmp_path / "monitor.jsonl").write_text("")
    traces = KeptTraces(tmp_path, "worst and last")
    traces.add(6, 0, write_trace(tmp_path, 6, 0, second=5), log)
    new = [write_trace(tmp_path, 12, rank, second=6) for rank in (0, 1)]
    traces.delete(6, traces.choose(6, 100), 0)
    assert [file.exists() for file in (*new, *old[2:])] == [True, True, False, False]
    traces.add(12, 0, new[0], log)
    traces.delete(12, traces.choose(12, 50), 0)
    assert [file.exists() for file in (tmp_path / name_of_trace(6, 0), *new)] == [True, True, True], "worst and last"


def test_a_rank_that_is_ahead_loses_no_trace(tmp_path: Path) -> None:
    """Without collectives, rank 1 may have measured step 12 before rank 0 measures its first one."""
    (log := tmp_path / "monitor.jsonl").write_text("")
    old = write_trace(tmp_path, 18, 1, second=1)
    traces = KeptTraces(tmp_path, "worst and last")
    now = int(time.time())
    ahead = write_trace(tmp_path, 12, 1, second=now + 10)
    traces.add(6, 0, write_trace(tmp_path, 6, 0, second=now + 20), log)
    traces.delete(6, traces.choose(6, 100), 0)
    assert (ahead.exists(), old.exists()) == (True, False)
