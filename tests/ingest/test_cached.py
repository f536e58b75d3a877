"""A trace from the cache is the trace that was read; and whatever happens to the cache, the answer is right."""

from __future__ import annotations

import ast
import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions, cache_folder, cached, load, store
from ddp_prof.ingest.cache_folder import CacheFolder, find_cache_folder
from ddp_prof.ingest.load import READERS, load_trace
from ddp_prof.ingest.store import read_trace, stored_bytes, write_trace
from ddp_prof.notes import Doubt
from ddp_prof.table import Table
from ddp_prof.trace import Trace
from tests.command_line import run
from tests.conftest import ROOT
from tests.examples import IS_NIGHTLY
from tests.full_disk import ROOM, full_disk
from tests.ingest.test_nsys_export import known_truth
from tests.ingest.test_nsys_table_folder import write_tables
from tests.kineto_factory import write_kineto
from tests.night import kept_by_the_gate
from tests.nsys_factory import write_capture

LAUNCHES = ReadOptions(with_launches=True)
COMMANDS = (
    ["summary"],
    ["overlap", "--steps"],
    ["collectives"],
    ["critical"],
    ["doctor"],
    ["skew"],
    ["kernels"],
    ["info"],
    ["compare"],
)
OF_RUNS = (["summary"], ["skew"], ["compare"])
"""Those that answer about several files at once."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which keeps traces of any size."""
    folder = tmp_path / "cache of the user"
    monkeypatch.setenv("DDP_PROF_CACHE", str(folder))
    monkeypatch.setattr(cached, "LEAST_BYTES", 0)
    monkeypatch.setattr(cached, "LEAST_BYTES_PACKED", 0)
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "captures").mkdir()
    return write_capture(tmp_path / "captures" / "known.sqlite", known_truth())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that readers have read, in order; what the cache holds is not read."""
    found: list[Path] = []

    def resolve(name: str) -> Callable[[Path, ReadOptions], Trace]:
        reader = resolve_name(name)

        def reading(path: Path, options: ReadOptions) -> Trace:
            found.append(path)
            return reader(path, options)

        return reading

    resolve_name = load.resolve_name
    monkeypatch.setattr(load, "resolve_name", resolve)
    return found


def kept(folder: Path) -> list[Path]:
    """The files of columns, the one that was used last at the end."""
    return [file.path for file in CacheFolder(folder).files() if file.path.suffix == cache_folder.COLUMNS]


def assert_same(one: Any, other: Any, name: str = "") -> None:
    """Every field is equal, in value and in type."""
    if isinstance(one, Trace | Table):
        assert type(one) is type(other)
        for item in fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name), f"{name}.{item.name}")
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name
    else:
        assert type(one) is type(other), name
        assert one == other, name
        if isinstance(one, tuple):
            assert list(map(type, one)) == list(map(type, other)), name


def kinds_of_traces(folder: Path) -> list[Path]:
    """A trace of each format, real captures and made ones."""
    export = write_capture(folder / "known.sqlite", known_truth(2))
    tables = folder / "export_pqtdir"
    write_tables(ROOT / "traces" / "overlap.sqlite", tables, "parquet")
    report = folder / "flat.nsys-rep"
    for suffix in (".nsys-rep", ".run.json", ".sqlite"):
        shutil.copy(ROOT / "traces" / f"flat{suffix}", report.with_suffix(suffix))
    kineto = write_kineto(folder / "trace.json", known_truth(2))
    packed = folder / "packed.json.gz"
    packed.write_bytes(gzip.compress(kineto.read_bytes()))
    return [*sorted((ROOT / "traces").glob("*.sqlite")), export, tables, report, kineto, packed]


class TestStore:
    @pytest.mark.parametrize("options", [ReadOptions(), LAUNCHES], ids=["usual", "with launches"])
    def test_every_field_of_every_kind_of_trace_comes_back(self, options: ReadOptions, tmp_path: Path) -> None:
        for path in kinds_of_traces(tmp_path):
            trace, file = load_trace(path, options), tmp_path / "kept"
            write_trace(trace, file, {"of": str(path)})
            found = read_trace(file, {"of": str(path)}, trace.path, trace.manifest)
            assert_same(trace, found)
            assert stored_bytes(trace) >= 0.8 * file.stat().st_size
            assert read_trace(file, {"of": "another"}, trace.path, trace.manifest) is None

    @pytest.mark.slow
    def test_captures_by_others_come_back(self, shared_traces: Path, tmp_path: Path) -> None:
        read = 0
        found = sorted(shared_traces.glob("*.*[ez]"))
        for path in found if IS_NIGHTLY else kept_by_the_gate(found):
            try:
                trace = load_trace(path, LAUNCHES)
            except TraceError:
                continue  # a trace of another program
            write_trace(trace, tmp_path / "kept", {})
            assert_same(trace, read_trace(tmp_path / "kept", {}, path, trace.manifest))
            read += 1
        assert read > 10

    def test_a_doubt_comes_back_as_one(self, trace: Path, tmp_path: Path) -> None:
        told = replace(load_trace(trace), warnings=("chosen", Doubt("lost")))
        write_trace(told, tmp_path / "kept", {})
        assert_same(told, read_trace(tmp_path / "kept", {}, told.path, told.manifest))

    def test_columns_are_mapped_and_take_no_memory(self, trace: Path, folder: Path) -> None:
        load_trace(trace)
        column = load_trace(trace).activities.start_ns
        assert not column.flags.owndata
        assert not column.flags.writeable
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert str(kept(folder)[0]) in mapped

    def test_what_was_just_written_is_not_read_to_be_checked(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would come into memory beside what was written; another command checks it."""
        checked, check = list[int](), store._check
        monkeypatch.setattr(store, "_check", lambda values: checked.append(len(values)) or check(values))
        load_trace(trace)
        written = checked.copy()
        load_trace(trace)
        assert checked == written * 2

    def test_a_column_of_one_value_stays_one_value(self, trace: Path, folder: Path) -> None:
        assert load_trace(trace).calls.process.strides == (0,)
        assert load_trace(trace).calls.process.strides == (0,)

    @pytest.mark.parametrize("is_cut", [False, True], ids=["a byte is wrong", "cut off"])
    @pytest.mark.slow
    def test_a_damaged_file_is_not_used(self, is_cut: bool, trace: Path, folder: Path, read: list[Path]) -> None:
        right = load_trace(trace, ReadOptions(use_cache=False))
        load_trace(trace)
        (file,) = kept(folder)
        good = file.read_bytes()
        places = 150 if IS_NIGHTLY else 25
        for at in [*range(0, len(good), max(1, len(good) // places)), len(good) - 1]:
            wrong = good[:at] if is_cut else good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]
            file.write_bytes(wrong)
            assert_same(right, load_trace(trace))
        file.write_bytes(b"")
        read.clear()
        load_trace(trace)
        load_trace(trace)
        assert read == [trace], "it is made again"


class TestSameAnswers:
    @pytest.mark.slow
    def test_documents_are_equal_to_the_byte_without_a_cache_cold_and_warm(
        self, folder: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flat, overlap = (ROOT / "traces" / f"{name}.sqlite" for name in ("flat", "overlap"))
        (tmp_path / "k").mkdir()
        kineto = write_kineto(tmp_path / "k" / "trace.json", known_truth(3))
        for paths in ([kineto], [flat, overlap], *([[overlap]] if IS_NIGHTLY else [])):
            for command in COMMANDS if IS_NIGHTLY or paths == [kineto] else OF_RUNS:
                arguments = [*command, *paths, "--format", "json"]
                without = run(*arguments, "--no-cache")
                assert without.exit_code == 0
                assert not kept(folder), "--no-cache keeps nothing"
                cold = run(*arguments)
                assert len(kept(folder)) == len(paths)
                read.clear()
                warm = run(*arguments)
                assert read == [], "all comes from the cache"
                assert (without.stdout, without.stderr) == (cold.stdout, cold.stderr) == (warm.stdout, warm.stderr)
                shutil.rmtree(folder)

    def test_what_a_command_with_launches_has_read_serves_one_without(
        self, folder: Path, read: list[Path], own_traces: list[Path]
    ) -> None:
        path = own_traces[0]
        alone = run("collectives", path, "--format", "json", "--no-cache").stdout
        run("summary", path)
        assert read == [path, path]
        assert run("collectives", path, "--format", "json").stdout == alone
        assert len(read) == 2
        assert load_trace(path).shape_id is None
        assert load_trace(path, LAUNCHES).shape_id is not None

    def test_it_replaces_what_was_read_without_launches(self, trace: Path, folder: Path) -> None:
        load_trace(trace)
        load_trace(trace, LAUNCHES)
        assert len(kept(folder)) == 1

    def test_a_page_from_the_cache_is_the_same(self, trace: Path, folder: Path, tmp_path: Path) -> None:
        for name in ("cold.html", "warm.html"):
            assert run("timeline", trace, "-o", tmp_path / name).exit_code == 0
        assert (tmp_path / "cold.html").read_bytes() == (tmp_path / "warm.html").read_bytes()

    def test_an_error_stays_an_error(self, folder: Path, tmp_path: Path) -> None:
        damaged = tmp_path / "damaged.sqlite"
        damaged.write_bytes(b"SQLite format 3\0" + bytes(5000))
        for _ in range(2):
            with pytest.raises(TraceError):
                load_trace(damaged)
        assert not kept(folder)


class TestWhatItDependsOn:
    def test_a_trace_is_read_once(self, trace: Path, folder: Path, read: list[Path]) -> None:
        for _ in range(3):
            load_trace(trace)
        assert read == [trace]

    def test_a_trace_that_is_written_again_with_its_size_and_times_is_read_again(
        self, trace: Path, folder: Path, tmp_path: Path
    ) -> None:
        load_trace(trace)
        data, status = bytearray(trace.read_bytes()), trace.stat()
        at = data.index(b"gemm_forward")
        with trace.open("r+b") as file:  # the same file, one letter within
            file.seek(at)
            file.write(b"GEMM_forward")
        os.utime(trace, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert trace.stat().st_size == status.st_size
        assert any(name.startswith("GEMM") for name in load_trace(trace).names)
        assert len(kept(folder)) == 1, "what was kept of the former file is gone"

    def test_another_file_under_its_name_is_read(self, trace: Path, folder: Path, tmp_path: Path) -> None:
        steps = len(load_trace(trace).activities)
        other = write_capture(tmp_path / "other.sqlite", known_truth(2))
        other.replace(trace)
        assert len(load_trace(trace).activities) == steps // 2

    def test_what_lies_beside_it_counts(self, folder: Path, tmp_path: Path, read: list[Path]) -> None:
        path = tmp_path / "x.sqlite"
        shutil.copy(ROOT / "traces" / "overlap.sqlite", path)
        assert load_trace(path).manifest is None
        shutil.copy(ROOT / "traces" / "overlap.run.json", tmp_path / "x.run.json")
        assert load_trace(path).manifest is not None
        assert load_trace(path).manifest is not None
        shutil.copy(ROOT / "traces" / "overlap.nsys-rep", tmp_path / "x.nsys-rep")
        load_trace(path)
        assert read == [path, path, path]

    def test_a_file_that_changes_while_it_is_read_is_not_kept(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def reading(path: Path, options: ReadOptions) -> Trace:
            found = load_trace(path, ReadOptions(use_cache=False))
            path.write_bytes(path.read_bytes())
            return found

        cached.load_cached(reading, trace, ReadOptions())
        assert not kept(folder)

    def test_each_set_of_patterns_is_read_for_itself(self, trace: Path, folder: Path, read: list[Path]) -> None:
        patterns = ReadOptions(comm_patterns=("gemm",))
        for options in (ReadOptions(), patterns) * 2:
            load_trace(trace, options)
        assert read == [trace, trace]
        assert_same(
            load_trace(trace, patterns), load_trace(trace, ReadOptions(comm_patterns=("gemm",), use_cache=False))
        )

    def test_one_file_under_two_names_is_two_traces(self, trace: Path, folder: Path) -> None:
        link = trace.with_name("link.sqlite")
        link.symlink_to(trace)
        assert [load_trace(path).path for path in (trace, link)] == [trace, link]
        assert [load_trace(path).path for path in (trace, link)] == [trace, link]
        assert len(kept(folder)) == 2

    def test_a_report_and_its_export_share_what_is_kept(self, folder: Path, tmp_path: Path) -> None:
        report = tmp_path / "flat.nsys-rep"
        for suffix in (".nsys-rep", ".run.json", ".sqlite"):
            shutil.copy(ROOT / "traces" / f"flat{suffix}", report.with_suffix(suffix))
        for _ in range(2):
            found = load_trace(report)
            assert (found.path, found.source) == (report, "nsys-report")
        assert load_trace(report.with_suffix(".sqlite")).source == "nsys-sqlite"
        assert len(kept(folder)) == 1

    def test_whoever_changes_a_reader_need_not_say_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "ddp_prof"
        shutil.copytree(ROOT / "ddp_prof", package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
        monkeypatch.setattr(cached, "_PACKAGE", package)
        version = partial(cached.code_version.__wrapped__, cached.READERS)
        before = version()
        assert before == cached.code_version(cached.READERS)
        for name in ("ingest/enrich.py", "communication.py", "table.py"):
            (package / name).write_text((package / name).read_text(encoding="utf-8") + "\n")
            assert version() != before
            before = version()
        (package / "analyze" / "overlap.py").write_text("")
        assert version() == before, "what is measured is not kept"

    def test_the_readers_are_all_that_their_version_tells_of(self) -> None:
        """What readers import of this package lies in their folder, or on the ground floor."""
        package = ROOT / "ddp_prof"
        ground = {file.stem for file in package.glob("*.py")} | {"ingest"}
        for file in [*package.glob("*.py"), *package.glob("ingest/*.py")]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").startswith("ddp_prof.")
                    and file.stem not in {"__init__", "__main__"}
                ):
                    assert (node.module or "").split(".")[1] in ground, file


class TestRoom:
    def test_what_was_not_used_for_longest_goes_first(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paths = [write_capture(tmp_path / f"{name}.sqlite", known_truth()) for name in "abc"]
        for path in paths[:2]:
            load_trace(path)
        (size, _) = (file.stat().st_size for file in kept(folder))
        for age, file in enumerate(kept(folder)[::-1]):
            os.utime(file, (1_000 - age, 1_000 - age))
        load_trace(paths[0])  # used again
        room = size + stored_bytes(load_trace(paths[2], ReadOptions(use_cache=False))) + size // 2  # for two
        monkeypatch.setattr(cache_folder, "MOST_BYTES", room)
        load_trace(paths[2])
        listed = json.loads(run("cache", "--format", "json").stdout)
        assert [Path(file["trace"]).name for file in listed["traces"]] == ["c.sqlite", "a.sqlite"]
        assert listed["bytes"] <= listed["most_bytes"] == room

    def test_a_trace_larger_than_the_cache_is_not_kept(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache_folder, "MOST_BYTES", 1000)
        assert len(load_trace(trace).activities)
        assert not kept(folder)

    def test_a_tenth_of_the_free_disk_is_the_most(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_folder.shutil, "disk_usage", lambda _place: _Usage(10**9))
        assert CacheFolder(folder).most_bytes() == 10**8

    def test_small_traces_are_read_as_fast_as_found(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cached, "LEAST_BYTES", trace.stat().st_size + 1)
        load_trace(trace)
        assert not folder.exists()


def _closed(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of the system for a user to whom this folder is closed."""

    def refusing(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).startswith(str(folder)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return function(path, *arguments, **named)

    return refusing


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


class TestMisfortunes:
    def test_a_place_that_cannot_be_written_is_done_without(self, trace: Path, tmp_path: Path, folder: Path) -> None:
        folder.write_text("no folder")
        right = run("overlap", trace, "--no-cache", "--format", "json")
        assert run("overlap", trace, "--format", "json").stdout == right.stdout
        assert folder.read_text() == "no folder"

    def test_a_folder_that_may_not_be_looked_into_is_done_without(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after ``sudo -u`` with the variables of the first user, whose home is closed."""
        right = run("overlap", trace, "--no-cache", "--format", "json").stdout
        for name in ("stat", "mkdir", "scandir"):
            monkeypatch.setattr(os, name, _closed(folder, getattr(os, name)))
        result = run("overlap", trace, "--format", "json")
        assert (result.exit_code, result.stdout) == (0, right)
        assert run("cache").stdout.startswith("0 traces, 0.0 of at most ")

    def test_a_name_that_no_folder_can_have_is_done_without(
        self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cached, "LEAST_BYTES", 0)
        monkeypatch.setenv("DDP_PROF_CACHE", str(tmp_path / ("x" * 300)))
        assert run("overlap", trace).exit_code == 0
        assert run("cache").stdout.startswith("0 traces, 0.0 of at most ")

    def test_a_machine_without_any_folder_for_temporary_files_reads_traces(
        self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a container that is mounted read-only."""
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(folder / "none")])
        assert len(load_trace(trace).activities)

    def test_the_folder_of_a_trace_is_not_written_to(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tables = tmp_path / "export_pqtdir"
        write_tables(ROOT / "traces" / "overlap.sqlite", tables, "parquet")
        before = sorted(tables.iterdir())
        monkeypatch.setenv("DDP_PROF_CACHE", str(tables))
        assert run("overlap", tables).exit_code == 0
        assert sorted(tables.iterdir()) == before

    def test_a_full_disk_leaves_the_answer_and_nothing_else(self, trace: Path, folder: Path) -> None:
        right = run("overlap", trace, "--no-cache", "--format", "json").stdout
        with full_disk():
            result = run("overlap", trace, "--format", "json")
        assert (result.exit_code, result.stdout) == (0, right)
        assert not kept(folder)
        assert all(file.stat().st_size <= ROOM for file in folder.iterdir())
        assert set(folder.iterdir()) == {file.path for file in CacheFolder(folder).files()}, "nothing unfinished"

    def test_a_writer_that_is_killed_leaves_nothing_that_is_used(
        self, trace: Path, folder: Path, read: list[Path]
    ) -> None:
        code = (
            "import os, signal, pathlib\n"
            "from ddp_prof.ingest import cached, load, store\n"
            "cached.LEAST_BYTES, write = 0, store.write_trace\n"
            "def killed(trace, target, key):\n"
            "    write(trace, target, key)\n"
            "    os.truncate(target, target.stat().st_size // 2)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "store.write_trace = killed\n"
            f"load.load_trace(pathlib.Path({str(trace)!r}))\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert len(list(folder.iterdir())) == 1
        assert not kept(folder)
        assert_same(load_trace(trace), load_trace(trace, ReadOptions(use_cache=False)))
        assert list(folder.iterdir()) == kept(folder), "the unfinished file is deleted, the whole one is there"

    def test_two_processes_at_once_have_the_same_answer(self, trace: Path, folder: Path) -> None:
        code = (
            "import pathlib, sys\n"
            "from ddp_prof.ingest import cached, load\n"
            "cached.LEAST_BYTES = 0\n"
            "sys.stdin.read(1)\n"
            f"print([int(load.load_trace(pathlib.Path({str(trace)!r})).activities.end_ns.sum()) for _ in range(20)])\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdin
            process.stdin.write(b"x")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in processes]
        right = int(load_trace(trace, ReadOptions(use_cache=False)).activities.end_ns.sum())
        assert outputs == [f"{[right] * 20}\n".encode()] * 2
        assert list(folder.iterdir()) == kept(folder)
        assert len(kept(folder)) == 1

    def test_what_is_deleted_while_it_is_used_stays_readable(self, trace: Path, folder: Path) -> None:
        load_trace(trace)
        found = load_trace(trace)
        shutil.rmtree(folder)
        assert_same(found, load_trace(trace, ReadOptions(use_cache=False)))


class TestCommand:
    def test_it_lists_and_clears_what_it_keeps_and_nothing_else(self, trace: Path, folder: Path) -> None:
        assert run("cache").stdout.startswith("0 traces, 0.0 of at most ")
        run("overlap", trace)
        mine = folder / "notes.txt"
        mine.write_text("the user's own")
        listed = json.loads(run("cache", "--format", "json").stdout)
        assert [file["trace"] for file in listed["traces"]] == [str(trace)]
        assert listed["folder"] == str(folder)
        first, last = run("cache").stdout.splitlines()
        assert first.endswith(str(trace))
        assert last.startswith("1 trace, ")
        assert run("cache", "--clear").stdout.startswith("deleted: 1 trace, ")
        assert list(folder.iterdir()) == [mine]

    def test_it_can_be_switched_off(self, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for off in ("0", "off", "OFF"):
            monkeypatch.setenv("DDP_PROF_CACHE", off)
            assert find_cache_folder() is None
            assert run("overlap", trace).exit_code == 0
        assert run("cache").stdout == "the cache is switched off\n"
        assert json.loads(run("cache", "--format", "json").stdout)["folder"] is None
        assert not folder.exists()

    @pytest.mark.skipif(sys.platform != "linux", reason="where other systems keep such files, they say differently")
    def test_it_lies_in_the_folder_of_the_user(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("DDP_PROF_CACHE")
        monkeypatch.setenv("HOME", str(tmp_path))
        for given, place in (
            ("/x", Path("/x/ddp_prof")),
            ("relative", tmp_path / ".cache/ddp_prof"),
            ("", tmp_path / ".cache/ddp_prof"),
        ):
            monkeypatch.setenv("XDG_CACHE_HOME", given)
            assert find_cache_folder() == place

    def test_without_a_home_nothing_is_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("DDP_PROF_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "relative")  # it would lie beside the traces of each folder
        assert find_cache_folder() is None

    def test_without_a_working_directory_a_relative_folder_is_done_without(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        monkeypatch.setenv("DDP_PROF_CACHE", "relative")
        assert find_cache_folder() is None
        monkeypatch.chdir(tmp_path)

    def test_nothing_is_written_beside_a_trace(self, trace: Path, folder: Path) -> None:
        before = [(file, file.stat().st_mtime_ns, file.read_bytes()) for file in trace.parent.iterdir()]
        run("overlap", trace)
        run("overlap", trace)
        assert [(file, file.stat().st_mtime_ns, file.read_bytes()) for file in trace.parent.iterdir()] == before


@pytest.mark.parametrize("name", [".", "within/.."])
def test_a_folder_of_tables_that_one_stands_in_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = tmp_path / "overlap_pqtdir"
    write_tables(ROOT / "traces" / "overlap.sqlite", tables, "parquet")
    shutil.copy(ROOT / "traces" / "overlap.run.json", tmp_path)
    (tables / "within").mkdir()
    monkeypatch.chdir(tables)
    (here,) = json.loads(run("summary", name, "--format", "json").stdout)["runs"]
    (there,) = json.loads(run("summary", tables, "--format", "json").stdout)["runs"]
    assert here == there


def test_each_format_is_kept(folder: Path, tmp_path: Path, read: list[Path]) -> None:
    paths = kinds_of_traces(tmp_path)[-5:]
    assert {load_trace(path).source for path in paths} == {reader.source for reader in READERS}
    read.clear()
    for path in paths:
        load_trace(path)
    assert [path.suffix for path in read] == [".nsys-rep"], "a report is found by way of its export"
    assert len(kept(folder)) == len(paths)
