"""A file that is written in one go is there whole, or as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ddp_prof.atomic_write import atomic_write

if TYPE_CHECKING:
    from pathlib import Path


def test_the_file_is_replaced_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    with atomic_write(path) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "after")]


@pytest.mark.parametrize("before", [[], ["a.json"]])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path, before: list[str]) -> None:
    for name in before:
        (tmp_path / name).write_text("before")
    with pytest.raises(OSError, match="disk full"):
        _write_half(tmp_path / "a.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "before") for name in before]


def _write_half(path: Path) -> None:
    with atomic_write(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")
