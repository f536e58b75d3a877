"""Files are there whole or as they were."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ddp_prof.atomic_file import atomic_write


def test_the_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new/folder/x.txt"
    with atomic_write(path) as file:
        file.write_text("all")
        assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["x.txt"]
    assert path.read_text() == "all"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("x"), OSError(errno.ENOSPC, "No space left")])
def test_what_fails_leaves_what_was_there(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("before")
    with pytest.raises(type(failure)) as raised, atomic_write(path) as file:  # noqa: PT012
        file.write_text("half")
        raise failure
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.txt"]
    assert path.read_text() == "before"
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(path)


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, atomic_write(tmp_path / "x"):
        (tmp_path / "none").read_text()
    assert raised.value.filename == str(tmp_path / "none")


def test_behind_a_link_the_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x.txt")
    with atomic_write(tmp_path / "link") as file:
        file.write_text("all")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "x.txt").read_text() == "all"


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    with atomic_write(tmp_path / "pipe") as file:
        file.write_text("all")
    reader.join(20)
    assert got == ["all"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_process_of_the_same_name_has_a_file_of_its_own(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x") as file:
        if (child := os.fork()) == 0:
            with atomic_write(tmp_path / "x") as other:
                other.write_text("theirs")
            os._exit(0 if other != file else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (tmp_path / "x").read_text() == "theirs"
        file.write_text("ours")
    assert (tmp_path / "x").read_text() == "ours"


def test_a_file_system_that_cannot_be_written_to_is_told_by_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There even removing a file that does not exist is refused, and that error named the partial file."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as caught, atomic_write(tmp_path / "x.html") as partial:
        refuse(partial)
    assert caught.value.filename == str(tmp_path / "x.html")
