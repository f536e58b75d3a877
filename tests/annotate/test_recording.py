"""The file of a torch.profiler, where it cannot be written: Kineto says nothing to the program and leaves parts."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def with_files_of_at_most(size: int) -> Callable[[], None]:
    """As a disk that is full after so many bytes of a file; Python ignores the signal that comes with it."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run(code: str, folder: Path, size: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", code, str(folder)]
    limit = with_files_of_at_most(size)
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)


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
    assert run(EXPORT, tmp_path, 2**30).stdout == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["packed.json.gz", "plain.json"]


@pytest.mark.parametrize(("size", "logged"), [(4096, 0), (2**30, 3)])
def test_on_a_full_disk_training_goes_on_with_one_warning(tmp_path: Path, size: int, logged: int) -> None:
    folder = tmp_path / "monitor"
    done = run(MONITOR, folder, size)
    assert done.stdout == f"trained to its end; logged {logged}\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "ddp-prof" in line]
    if logged:
        assert said == []
    else:
        (warning,) = said
        assert "was not written: torch.profiler left no file there" in warning
        assert list(folder.iterdir()) == []
