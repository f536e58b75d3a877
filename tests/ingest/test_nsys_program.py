"""Which nsys is taken, and which recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_prof.ingest.nsys_program import find_nsys, list_nsys, recording_version
from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture

NSYS = "#!/bin/sh\necho NVIDIA Nsight Systems version 2022.4.2.1-abc\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Two of three in a usual place run; nothing on PATH nor where one would be fetched to."""
    for version, text in (("2024.6.1", NSYS), ("2025.3.1", NSYS), ("2025.10.1", "#!/bin/sh\nexit 1\n")):
        _put(tmp_path / "opt" / version / "bin", text)
    return {
        "PATH": str(tmp_path / "path"),
        "NSYS_PREFIX": str(tmp_path / "prefix"),
        "NSYS_SEARCH": f"{tmp_path}/nothing/*/nsys:{tmp_path}/opt/*/bin/nsys",
    }


def _put(folder: Path, text: str = NSYS) -> str:
    folder.mkdir(parents=True)
    (folder / "nsys").write_text(text)
    (folder / "nsys").chmod(0o755)
    return str(folder / "nsys")


def test_the_newest_of_a_place_that_runs(environ: dict[str, str], tmp_path: Path) -> None:
    names = [f"{tmp_path}/opt/{version}/bin/nsys" for version in ("2025.3.1", "2024.6.1")]
    assert [nsys.path for nsys in list_nsys(environ)] == names
    found = find_nsys(environ)
    assert found
    assert (found.path, found.version) == (names[0], "2022.4.2.1")
    _put(tmp_path / "opt/2025.12.1/bin")  # by its number, not by its letters
    assert [Path(nsys.path).parts[-3] for nsys in list_nsys(environ)] == ["2025.12.1", "2025.3.1", "2024.6.1"]


def test_path_comes_first_then_what_was_fetched(environ: dict[str, str], tmp_path: Path) -> None:
    fetched = _put(tmp_path / "prefix/bin")
    assert next(list_nsys(environ)).path == fetched
    on_path = _put(tmp_path / "path")
    assert [nsys.path for nsys in list_nsys(environ)][:2] == [on_path, fetched]
    Path(on_path).write_text("#!/bin/sh\nexit 127\n")
    assert next(list_nsys(environ)).path == fetched


def test_the_one_that_is_named_or_none(environ: dict[str, str], tmp_path: Path) -> None:
    mine = _put(tmp_path / "mine")
    assert [nsys.path for nsys in list_nsys({**environ, "NSYS": mine})] == [mine]
    assert find_nsys({**environ, "NSYS": "/nowhere/nsys"}) is None


def test_a_program_is_asked_again_only_if_it_changed_or_did_not_answer(tmp_path: Path) -> None:
    """Each report in the cache is one of a version of nsys, so a folder of them would ask for each."""
    program, asked = tmp_path / "bin" / "nsys", tmp_path / "asked"

    program.parent.mkdir()

    def find_with(script: str) -> str | None:
        program.write_text(script)
        program.chmod(0o755)
        os.utime(program, ns=(0, len(script)))
        found = find_nsys({"NSYS": str(program)})
        return found and found.version

    counting = f'#!/bin/sh\necho >>"{asked}"\n'
    answering = f"{counting}echo version 2024.6.1\n"
    assert [find_with(answering), find_with(answering)] == ["2024.6.1"] * 2
    assert asked.read_text() == "\n"
    assert find_with(answering.replace("2024.6.1", "2025.10.1")) == "2025.10.1"
    assert [find_with(counting), find_with(counting)] == [None] * 2
    assert asked.read_text() == "\n" * 4


def test_none(environ: dict[str, str]) -> None:
    assert find_nsys({**environ, "NSYS_SEARCH": ""}) is None


HEADS = {
    "a report of today": (".nsys-rep", b"NVIDIA Tegra Profiler Report 2024@6@2@225-246235244400v0.\n", "2024.6.2.225"),
    "a report with points": (
        ".nsys-rep",
        b"NVIDIA Tegra Profiler Report 1.\n\0\x072021.3.1.54-ee9c30a\0",
        "2021.3.1.54",
    ),
    "an old report": (".qdrep", b"NVIDIA Tegra Profiler Report 2021@3@1@54-210334234v0.\n", "2021.3.1.54"),
    "a report without a version": (".nsys-rep", b"NVIDIA Tegra Profiler Report 1.\n", None),
    "no report": (".nsys-rep", b"2021.3.1.54-ee9c30a", None),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_version_that_recorded_is_that_of_the_report(name: str, tmp_path: Path) -> None:
    suffix, head, version = HEADS[name]
    (tmp_path / f"x{suffix}").write_bytes(head)
    assert recording_version(tmp_path / f"x{suffix}") == version
    assert recording_version(tmp_path / "x.sqlite") == version, "of an export, the report beside it"
    assert recording_version(tmp_path / "y.sqlite") is None


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ("2021@3@1@54", "recorded by nsys 2021.3.1.54, exported by nsys 2024.6.0.1"),
        ("2024@6@0@1", "nsys 2024.6.0.1"),
        (None, "exported by nsys 2024.6.0.1"),
    ],
)
def test_recorded_and_exported_are_told_apart(recorded: str | None, said: str, tmp_path: Path) -> None:
    """A .qdrep of 2021 that a later nsys opened was said to be recorded by that one."""
    trace = write_capture(tmp_path / "x.sqlite", known_truth(2))
    if recorded:
        (tmp_path / "x.qdrep").write_bytes(f"NVIDIA Tegra Profiler Report {recorded}-210334234v0.\n".encode())
    (read,) = [line for line in run("summary", "--notes", trace).stdout.splitlines() if line.startswith("read ")]
    assert read.endswith(f" · {said}")
    document = json.loads(run("overlap", trace, "--format", "json").stdout)
    version = recorded.replace("@", ".") if recorded else None
    assert (document["recorder"], document["producer"]) == (version, "2024.6.0.1")
    notes = run("compare", trace, "--format", "csv").stderr
    assert f"note: {said if 'ed by' in said else f'recorded by {said}'}\n" in notes


@pytest.mark.parametrize(
    ("profiler", "version"),
    [("nsys 2022.4.2.1", "2022.4.2.1"), ("torch.profiler 2.11.0", None), ("nsys", None), (None, None)],
)
def test_without_the_report_the_manifest_tells_what_recorded(
    profiler: str | None, version: str | None, tmp_path: Path
) -> None:
    trace = write_capture(tmp_path / "x.sqlite", known_truth(2))
    manifest = json.loads((Path(__file__).parents[2] / "traces" / "naive.run.json").read_text())
    (tmp_path / "x.run.json").write_text(json.dumps(manifest | {"profiler": profiler}))
    assert json.loads(run("overlap", trace, "--format", "json").stdout)["recorder"] == version
