"""The file of a torch.profiler, where it cannot be written: Kineto says nothing to the program and leaves parts."""

from __future__ import annotations

import gzip
import resource
import sys
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from ddp_prof.annotate.recording import keep_results
from tests.forked_analysis import forked_analysis
from tests.forked_python import run_python

EXPORT = """
import sys
from pathlib import Path
import torch
from ddp_prof.annotate.recording import export_trace, make_profile

for name in ("plain.json", "packed.json.gz"):
    with make_profile(on_gpu=False) as recorded:
        for _ in range(100):
            torch.ones(8).square().sum()
    target = Path(sys.argv[1]) / name
    try:
        export_trace(recorded, target, is_compressed=name.endswith(".gz"))
    except OSError as error:
        print(name, type(error).__name__, error)
"""
MONITOR = """
import logging, sys
from ddp_prof.annotate.monitor import Monitor
from tests.annotate.test_monitor import EVERY, STEPS, make_job, train_step

logging.basicConfig(format="%(message)s")
got = []
monitor = Monitor(EVERY, STEPS, folder=sys.argv[1], log=[got.append])
model, optimizer = make_job()
for _ in range(21):
    train_step(model, optimizer)
    monitor.step()
monitor.close()
print("trained to its end; logged", len(got))
"""


def run(code: str, folder: Path, size: int, **environment: str) -> CompletedProcess[str]:
    """As on a disk that is full after so many bytes of a file; Python ignores the signal that comes with it."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    return run_python(code, folder, prepare=limit, PYTHONDONTWRITEBYTECODE="1", **environment)


@pytest.mark.parametrize("name", ["two\nlines", "a\tb", "no \udcff UTF-8"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Kineto wrote beside it, and it was said that the disk may be full; of some names it raised another error."""
    from ddp_prof.annotate.recording import export_trace, make_profile

    with make_profile(on_gpu=False) as recorded:
        pass
    (tmp_path / name).mkdir()
    export_trace(recorded, tmp_path / name / "x.json.gz", is_compressed=True)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["x.json.gz"]
    assert b"traceEvents" in gzip.decompress((tmp_path / name / "x.json.gz").read_bytes())


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("what was there")
    done = run(EXPORT, tmp_path, 4096)
    assert done.returncode == 0, done.stderr
    plain, packed = done.stdout.splitlines()
    assert plain.startswith("plain.json OSError torch.profiler left no file there: is the disk full? (")
    assert packed.startswith("packed.json.gz OSError torch.profiler left no file there")
    assert [file.name for file in tmp_path.iterdir()] == ["plain.json"]
    assert (tmp_path / "plain.json").read_text() == "what was there"
    done = run(EXPORT, tmp_path, 2**30)
    assert (done.stdout, done.stderr) == ("", "")  # torch 2.13 prints two lines for each recording
    assert sorted(file.name for file in tmp_path.iterdir()) == ["packed.json.gz", "plain.json"]


@pytest.mark.parametrize(("size", "logged"), [(4096, 0), (2**30, 3)])
def test_on_a_full_disk_training_goes_on_with_one_warning(tmp_path: Path, size: int, logged: int) -> None:
    folder = tmp_path / "monitor"
    with forked_analysis(tmp_path / "programs") as python:
        done = run(MONITOR, folder, size, DDP_PROF_PYTHON=str(python))
    assert done.stdout == f"trained to its end; logged {logged}\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "ddp-prof" in line]
    if logged:
        assert said == []
    else:
        (warning,) = said
        assert "was not written: torch.profiler left no file there" in warning
        assert list(folder.iterdir()) == []


def test_results_of_a_profiler_that_are_there_at_the_end_are_not_freed() -> None:
    """Where the program's profiler had recorded after ours, its process ended in a segmentation fault, mostly."""
    of_program, results = torch.autograd.profiler.profile(), object()
    of_program.kineto_results = results  # type: ignore[assignment]
    switched_off = torch.autograd.profiler.profile(enabled=False)  # has no results, not even an attribute for them
    before = sys.getrefcount(results)
    keep_results()
    assert sys.getrefcount(results) == before + 1
    assert not hasattr(switched_off, "kineto_results")
