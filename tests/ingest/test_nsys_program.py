"""Which nsys is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.ingest.nsys_program import find_nsys, list_nsys

NSYS = "#!/bin/sh\necho NVIDIA Nsight Systems version 2022.4.2.1-abc\n"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Two of three in a usual place run; nothing on PATH nor where one would be fetched to."""
    for version, text in (("2024.6.1", NSYS), ("2025.3.1", NSYS), ("2025.10.1", "#!/bin/sh\nexit 1\n")):
        _put(tmp_path / "opt" / version / "bin", text)
    return {
        "PATH": str(tmp_path / "path"),
        "NSYS_PREFIX": str(tmp_path / "prefix"),
        "NSYS_SEARCH": f"{tmp_path}/nothing/*/nsys {tmp_path}/opt/*/bin/nsys",
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


def test_none(environ: dict[str, str]) -> None:
    assert find_nsys({**environ, "NSYS_SEARCH": ""}) is None
