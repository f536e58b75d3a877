"""Files are there whole or as they were."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_prof.atomic_file import atomic_write, is_stream
from ddp_prof.errors import TraceError


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


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_writer_that_was_killed_leaves_nothing_after_the_next_one(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to remove its file."""
    write = "import os, sys; from pathlib import Path; from ddp_prof.atomic_file import atomic_write\n"
    write += "with atomic_write(Path(sys.argv[1])) as file: file.write_text('half'); os.kill(os.getpid(), 9)"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", write, str(tmp_path / "x.html")], check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1, "the second writer removed what the first one left"
    with atomic_write(tmp_path / "x.html") as file:
        file.write_text("all")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.html"]


LEFT = {
    "of a dead process": (".x.html.DEAD.partial", True),
    "of a dead process of this host": (".x.html.DEAD@HOST.partial", True),
    "of a dead process of another host, perhaps": (".x.html.DEAD@elsewhere.partial", False),
    "of a process that lives": (".x.html.1.partial", False),
    "of a process that lives, on this host": (".x.html.1@HOST.partial", False),
    "of another file": (".y.html.DEAD.partial", False),
    "of another file whose name ends alike": (".ax.html.DEAD.partial", False),
    "of a number that no process has": (".x.html.9999999999999.partial", False),
    "of no process": (".x.html.partial", False),
    "that a user called so": ("x.html.DEAD.partial", False),
}


@pytest.mark.parametrize("name", LEFT)
def test_only_what_is_left_of_dead_writers_goes(name: str, dead: int, tmp_path: Path) -> None:
    called, goes = LEFT[name]
    left = tmp_path / called.replace("DEAD", str(dead)).replace("HOST", socket.gethostname())
    left.write_text("half")
    with atomic_write(tmp_path / "x.html") as file:
        file.write_text("all")
    assert left.exists() != goes


def test_a_folder_that_a_dead_writer_left_goes_too(dead: int, tmp_path: Path) -> None:
    left = tmp_path / f".x.sqlite.{dead}.partial"
    left.mkdir()
    (left / "export.sqlite").write_text("half")
    (tmp_path / f".x.sqlite.{dead}@{socket.gethostname()}.partial").symlink_to(tmp_path)
    with atomic_write(tmp_path / "x.sqlite") as file:
        file.write_text("all")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.sqlite"]


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "x" * 240, b"\xff".decode(errors="surrogateescape") * 255])
def test_a_name_as_long_as_it_may_be_is_written(name: str, tmp_path: Path) -> None:
    with atomic_write(tmp_path / name) as file:
        file.write_text("all")
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("way", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("target", ["a pipe", "a file that it is appended to"])
def test_the_output_of_the_shell_is_written_as_it_is(way: str, target: str, tmp_path: Path) -> None:
    if way == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        way = str(tmp_path / "link")
    write = "import sys; from pathlib import Path; from ddp_prof.atomic_file import atomic_write\n"
    write += "with atomic_write(Path(sys.argv[1])) as file: file.open('a').write('all')"
    command = [sys.executable, "-c", write, way]
    if target == "a pipe":
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"all"
    else:
        (tmp_path / "log").write_text("before, ")
        with (tmp_path / "log").open("a") as log:
            subprocess.run(command, stdout=log, check=True)
        assert (tmp_path / "log").read_text() == "before, all"


def test_the_substitution_of_a_shell_is_written_as_it_is() -> None:
    reader, writer = os.pipe()
    with atomic_write(Path(f"/dev/fd/{writer}")) as file:
        assert is_stream(file)
        file.write_text("all")
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "all"


def test_a_device_that_is_full_is_named() -> None:
    with pytest.raises(OSError, match="No space left") as caught, atomic_write(Path("/dev/full")) as file:
        file.write_text("all")
    assert caught.value.filename == "/dev/full"


@pytest.mark.parametrize("target", ["none/x.html", "none/deep/x.html", "link"])
def test_a_link_into_nothing_makes_no_folder(target: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises((TraceError, OSError)) as caught, atomic_write(tmp_path / "link") as file:
        file.write_text("all")
    assert "link" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]
