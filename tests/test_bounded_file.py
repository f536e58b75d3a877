"""What a file holds is known whatever its size says, and what is read of it has a bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_prof.bounded_file import copy_data, free_memory, held_bytes, read_at_most
from ddp_prof.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

TERABYTE, BLOCK = 10**12, 1 << 16


def sparse(path: Path, size: int, *blocks: tuple[int, bytes]) -> Path:
    """A file of holes but for a few blocks."""
    with path.open("wb") as file:
        file.truncate(size)
        for at, data in blocks:
            file.seek(at)
            file.write(data)
    return path


@pytest.mark.parametrize(
    ("size", "blocks", "held"),
    [
        (0, [], 0),
        (TERABYTE, [], 0),
        (TERABYTE, [(0, b"x" * BLOCK)], BLOCK),
        (TERABYTE, [(TERABYTE // BLOCK // 2 * BLOCK, b"x" * BLOCK)], BLOCK),
        (TERABYTE, [(0, b"x" * BLOCK), (10 * BLOCK, b"y" * BLOCK)], 2 * BLOCK),
        (5, [(0, b"hello")], 5),
    ],
)
def test_holes_hold_nothing(size: int, blocks: Sequence[tuple[int, bytes]], held: int, tmp_path: Path) -> None:
    path = sparse(tmp_path / "x", size, *blocks)
    assert held_bytes(path) == held
    copy_data(path, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == size
    assert held_bytes(tmp_path / "copy") == held
    for at, data in blocks:
        with (tmp_path / "copy").open("rb") as file:
            file.seek(at)
            assert file.read(len(data)) == data


@pytest.mark.parametrize(("most", "copied"), [(0, b""), (3, b"hel"), (5, b"hello"), (9, b"hello"), (None, b"hello")])
def test_a_copy_ends_where_it_is_told_to(most: int | None, copied: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    copy_data(tmp_path / "x", tmp_path / "copy", most)
    assert (tmp_path / "copy").read_bytes() == copied


def test_more_than_the_bound_is_refused(tmp_path: Path) -> None:
    assert read_at_most(sparse(tmp_path / "x", 100), 100, "such a file", "delete it") == bytes(100)
    with pytest.raises(TraceError, match="it has 1,000,000,000,000 bytes, and such a file has at most 100: delete it"):
        read_at_most(sparse(tmp_path / "x", TERABYTE), 100, "such a file", "delete it")


def test_the_free_memory_is_some_or_not_known() -> None:
    free = free_memory()
    assert free is None or free > 2**20
