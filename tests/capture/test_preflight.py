"""What a program lacks is known before it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddp_prof.capture import job, preflight
from ddp_prof.capture.preflight import Interpreter, find_doubts, find_interpreter, why_no_ranges, why_not_startable
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest.nsys_program import Nsys
from tests.command_line import run

OLD, NEW = Nsys("nsys", "2022.4.2.1"), Nsys("nsys", "2024.2.3.38")


def python(nvtx: str = "0.2.11", *, torch: str = "2.13.0+cpu", has_nvtx: bool = False) -> Interpreter:
    return Interpreter("/env/bin/python", torch, has_nvtx, nvtx)


@pytest.mark.parametrize(
    ("nsys", "has", "reason"),
    [
        (OLD, python("0.2.11"), None),
        (OLD, python("0.2.12"), "nsys 2022.4.2.1 sees no range of nvtx 0.2.12 in the program's Python"),
        (Nsys("nsys", "2023.4.1"), python("0.3"), "nsys 2023.4.1 sees no range of nvtx 0.3 in the program's Python"),
        (NEW, python("0.2.12"), None),
        (NEW, python(""), "the program's Python lacks the package nvtx, by which nsys 2024.2.3.38 sees steps"),
        (OLD, python("", has_nvtx=True), None),  # torch's own
    ],
)
def test_without_ranges_the_way_out_is_said(nsys: Nsys, has: Interpreter, reason: str | None) -> None:
    way_out = ": /env/bin/python -m pip install 'nvtx<0.2.12'"
    assert why_no_ranges(nsys, has) == (reason and reason + way_out)


@pytest.mark.parametrize(
    ("first_lines", "folder"),
    [
        ("#!{python}", "env"),
        ("#!{python} -u", "env"),
        ("#!/usr/bin/env python3", "env"),
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''", "my env"),  # as pip and uv write it
    ],
)
def test_the_python_of_a_launcher_is_asked(first_lines: str, folder: str, tmp_path: Path) -> None:
    python, launcher = tmp_path / folder / "python3", tmp_path / folder / "torchrun"
    if " " in str(python) and first_lines.startswith("#!{python}"):
        pytest.skip("no script begins so where the path has a blank")
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    launcher.write_text(first_lines.format(python=python) + "\n")
    launcher.chmod(0o755)
    found = find_interpreter(["torchrun", "train.py"], {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"})
    assert found is not None
    assert found.path == str(python)


@pytest.mark.parametrize("second", ["'''exec' \"/a/python", "exec python", ""])
def test_a_launcher_whose_python_is_not_told_is_not_asked(second: str, tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text(f"#!/bin/sh\n{second}\n")
    launcher.chmod(0o755)
    assert find_interpreter(["torchrun", "train.py"], {**os.environ, "PATH": str(tmp_path)}) is None


def test_a_python_says_what_it_has() -> None:
    found = find_interpreter([sys.executable, "train.py"], os.environ)
    assert found is not None
    assert found.path == sys.executable
    assert found.nvtx == job.installed("nvtx")
    assert found.torch == job.installed("torch")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (["true"], None),
        (["A=1", "b_2=", "true", "x"], None),
        (["./job"], None),
        (["no-such-program", "x"], "there is no program 'no-such-program': give the command line that starts"),
        (["-m", "train"], "there is no program '-m': give the command line that starts"),
        ([""], "there is no program to start"),
        (["A=1"], "there is no program to start"),
        (["folder"], "folder is a folder: give the command line"),
        (["train.py"], "train.py is a script, not a program: start it as 'python train.py'"),
        (["job"], "job is not on PATH: give ./job"),
        (["./notes"], "./notes is not executable: chmod +x makes it so"),
    ],
)
def test_what_cannot_be_started_is_said(
    program: list[str], reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, mode in (("train.py", 0o644), ("job", 0o755), ("notes", 0o644)):
        (tmp_path / name).touch(mode)
    said = why_not_startable(program, os.environ)
    assert said == reason or (said and reason and said.startswith(reason)), said


def test_a_program_that_is_not_there_replaces_no_capture(tmp_path: Path) -> None:
    """The files of the last capture of this script were gone before env said that there is no such program."""
    kept = tmp_path / "train.rank0.json.gz"
    kept.touch()
    done = run("capture", "-o", tmp_path, "--", "pythn", "train.py")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: there is no program 'pythn'")
    assert kept.exists()
    done = run("tune", "--try", "static_graph", "--store", tmp_path / "x.db", "--", "pythn", "train.py")
    assert done.stderr.splitlines()[-1].startswith("Error: there is no program 'pythn'")


def test_a_program_that_failed_says_so_first(tmp_path: Path) -> None:
    for ends, said in (("exit 3", "the program ended with exit code 3,"), ("kill -9 $$", "was ended by SIGKILL,")):
        done = run("capture", "-o", tmp_path, "--", "sh", "-c", ends)
        assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("program", [["true"], ["no-such-program"], ["sh", "-c", "python train.py"]])
def test_of_another_program_nothing_is_claimed(program: list[str]) -> None:
    assert find_interpreter(program, os.environ) is None


def test_a_folder_without_room_and_a_python_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LEAST_FREE_BYTES", 2**62)
    no_torch, full = find_doubts(python(torch=""), tmp_path / "new" / "folder")
    assert no_torch == "the program's Python (/env/bin/python) has no torch, so no step can be marked"
    assert full.endswith(f"MiB are free in {tmp_path}: a recording may need more")


@pytest.fixture
def without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "visible_gpus", lambda environ: ["NVIDIA H200"])
    monkeypatch.setattr(job, "find_nsys", lambda environ: NEW)
    monkeypatch.setattr(job, "find_interpreter", lambda *_: python(""))


@pytest.mark.usefixtures("without_nvtx")
def test_nothing_runs_if_no_range_could_arrive(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = [sys.executable, "-c", f"open({str(ran)!r}, 'w')"]
    done = run("capture", "-o", tmp_path / "out", "--profiler", "nsys", "--", *program)
    assert (done.exit_code, ran.exists()) == (1, False)
    assert done.stderr.startswith("Error: the program's Python lacks the package nvtx, by which nsys 2024.2.3.38 sees")
    with pytest.raises(WorkloadError, match="or choose --profiler torch"):
        job.plan_job(program, tmp_path, "nsys", None, os.environ)


@pytest.mark.usefixtures("without_nvtx")
def test_if_the_recorder_is_not_chosen_torch_profiler_records(tmp_path: Path) -> None:
    planned, why = job.plan_job([sys.executable, "train.py"], tmp_path, "auto", None, os.environ)
    assert planned.nsys is None
    assert why.startswith("the program's Python lacks the package nvtx")
