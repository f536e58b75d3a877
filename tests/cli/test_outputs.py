"""No command writes to what it reads, by whatever name; what it prints cannot control a terminal."""

from __future__ import annotations

import ast
import errno
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest

import ddp_prof.cli
from ddp_prof.atomic_file import atomic_write
from ddp_prof.present import table
from tests.benchmark.results_factory import study_like
from tests.command_line import run
from tests.ingest.test_hostile import ESCAPE, contents, journal
from tests.ingest.test_nsys_export import known_truth
from tests.ingest.test_nsys_table_folder import write_tables
from tests.monitor.records import record, write_log
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import write_capture

pytestmark = pytest.mark.usefixtures("no_browser")

OPTIONS = (
    "timeline -o", "timeline --png", "timeline --svg", "collectives --html", "collectives --png", "skew --html",
    "skew --png", "compare --html", "compare --png", "export -o",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks with a manifest and a journal, another capture, and links of all kinds to the first."""
    first = write_capture(tmp_path / "run.rank0.sqlite", known_truth(2))
    write_capture(tmp_path / "run.rank1.sqlite", known_truth(2))
    write_capture(tmp_path / "other.sqlite", known_truth(1))
    journal(first)
    (tmp_path / "soft").symlink_to(first.name)
    (tmp_path / "soft2").symlink_to("soft")
    (tmp_path / "hard").hardlink_to(first)
    (tmp_path / "deep").symlink_to(".")
    return tmp_path


TARGETS = {
    "the trace": "run.rank0.sqlite",
    "the other rank": "run.rank1.sqlite",
    "a link": "soft",
    "a link to a link": "soft2",
    "a hard link": "hard",
    "through a folder": "deep/run.rank0.sqlite",
    "another way to write it": "deep/deep/./run.rank0.sqlite",
    "its journal": "run.rank0.sqlite-journal",
    "a log that is not there": "run.rank0.sqlite-wal",
    "a manifest that is not there": "run.run.json",
    "the manifest of another": "other.run.json",
    "a capture that is not read": "other.sqlite",
}


@pytest.mark.parametrize(
    ("option", "target"),
    of_which_the_gate_keeps(
        [*((OPTIONS[0], target) for target in TARGETS), *((option, "a link") for option in OPTIONS)],
        product(OPTIONS, TARGETS),
    ),
)
def test_what_is_read_is_never_written_to(option: str, target: str, folder: Path) -> None:
    before = contents(folder)
    command, flag = option.split()
    traces = [folder / "run.rank0.sqlite", folder / "run.rank1.sqlite"]
    result = run(command, *traces, flag, folder / TARGETS[target])
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert TARGETS[target].split("/")[-1] in result.stderr
    assert result.stdout == ""
    assert contents(folder) == before


def _as_pages(folder: Path, name: str) -> list[str]:
    """A report into a folder in which a page is a link to the trace."""
    (folder / "out").mkdir()
    (folder / "out" / name).symlink_to("../run.rank0.sqlite")
    return ["report", str(folder / "run.rank0.sqlite"), "-o", str(folder / "out")]


def _called_as_its_page(folder: Path) -> list[str]:
    (folder / "run.rank0.sqlite-journal").unlink()
    (folder / "run.rank0.sqlite").rename(folder / "x.html")
    return ["timeline", "x.html"]


def _tables(folder: Path) -> list[str]:
    write_tables(folder / "run.rank1.sqlite", folder / "x_pqtdir", "parquet")
    return ["timeline", str(folder / "x_pqtdir"), "-o", str(folder / "x_pqtdir" / "new" / "page.html")]


def _a_table(folder: Path) -> list[str]:
    write_tables(folder / "run.rank1.sqlite", folder / "x_pqtdir", "parquet")
    return ["export", str(folder / "x_pqtdir"), "-o", str(folder / "x_pqtdir" / "StringIds.parquet")]


def _report_into_tables(folder: Path) -> list[str]:
    write_tables(folder / "run.rank1.sqlite", folder / "x_pqtdir", "parquet")
    return ["report", str(folder / "x_pqtdir"), "-o", str(folder / "x_pqtdir")]


def _beside_a_report(folder: Path) -> list[str]:
    """The export that is read in the place of a raw report."""
    (folder / "x.nsys-rep").write_bytes(b"NVIDIA Tegra Profiler Report 2023@4@4@54-234433681190v0.\n")
    (folder / "run.rank1.sqlite").rename(folder / "x.sqlite")
    return ["timeline", str(folder / "x.nsys-rep"), "-o", str(folder / "x.sqlite")]


def _kineto(folder: Path) -> list[str]:
    (folder / "x.json").write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2, "pid": 0, "tid": 7}]}))  # fmt: skip
    return ["export", str(folder / "x.json"), "-o", str(folder / "x.json")]


def _results(folder: Path) -> list[str]:
    """Results whose table would be a link to them."""
    study_like().write(folder / "r.db")
    (folder / "r.csv").symlink_to("r.db")
    return ["results", str(folder / "r.db"), "-o", str(folder / "out")]


def _results_called_as_their_table(folder: Path) -> list[str]:
    study_like().write(folder / "r.csv")
    return ["results", str(folder / "r.csv"), "-o", str(folder / "out")]


def _results_report(folder: Path) -> list[str]:
    study_like().write(folder / "r.db")
    (folder / "out").mkdir()
    (folder / "out" / "results.md").symlink_to("../r.db")
    return ["results", str(folder / "r.db"), "-o", str(folder / "out")]


OTHERS: dict[str, Callable[[Path], list[str]]] = {
    "the index of a report is a link": lambda folder: _as_pages(folder, "index.html"),
    "plotly.js of a report is a link": lambda folder: _as_pages(folder, "plotly.min.js"),
    "a page of a report is a link": lambda folder: _as_pages(folder, "run.html"),
    "a trace called as its timeline": _called_as_its_page,
    "a page within a folder of tables": _tables,
    "a table": _a_table,
    "a report into a folder of tables": _report_into_tables,
    "the export of a raw report": _beside_a_report,
    "a trace in JSON": _kineto,
    "the table of results is a link": _results,
    "results called as their table": _results_called_as_their_table,
    "the text of results is a link": _results_report,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_nor_where_no_option_names_it(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = OTHERS[name](folder)
    before = contents(folder)
    result = run(*arguments)
    after = contents(folder)
    assert result.exit_code in (1, 2), result.output
    assert "only read" in result.stderr
    assert {path: after[path] for path in before} == before
    assert all(path.startswith("out/") for path in after.keys() - before.keys())


def test_what_is_written_once_is_written_again(folder: Path) -> None:
    for option in (option for option in OPTIONS if "png" not in option and "svg" not in option):
        command, flag = option.split()
        ranks = range(2 if command == "skew" else 1)  # nothing is drawn of the skew of one rank
        for _ in range(2):
            traces = (folder / f"run.rank{rank}.sqlite" for rank in ranks)
            result = run(command, *traces, flag, folder / f"{command}.html")
            assert result.exit_code == 0, result.stderr


def test_a_file_is_protected_as_long_as_it_is_read_alone(folder: Path) -> None:
    page = folder / "page.html"
    page.write_text("{}")
    assert run("overlap", folder / "run.rank0.sqlite", page).exit_code == 0  # the page is left out
    with atomic_write(page) as file:
        file.write_text("new")
    assert page.read_text() == "new"


def test_a_study_does_not_fill_a_capture(folder: Path) -> None:
    from ddp_prof.benchmark.store import open_database
    from ddp_prof.errors import TraceError

    before = contents(folder)
    with pytest.raises(TraceError, match="not a results database"):
        open_database(folder / "other.sqlite")
    assert contents(folder) == before


HOSTILE_NAMES = {"an escape": ESCAPE, "a reversal": "a\u202egnp.b", "a line": "a\nb", "a tab": "a\tb", "a bell": "\x07"}


PRINTING = (
    "overlap", "info", "collectives", "skew", "kernels", "compare", "timeline", "report -o out", "export",
    "check --max-tail-ms 0", "overlap -v", "overlap --strict none.sqlite", "timeline -o", "collectives --html",
    "timeline --png",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    of_which_the_gate_keeps(
        [*(("timeline", name) for name in HOSTILE_NAMES), *((command, "an escape") for command in PRINTING)],
        product(PRINTING, HOSTILE_NAMES),
    ),
)
def test_no_name_of_a_file_controls_a_terminal(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = write_capture(Path(f"{HOSTILE_NAMES[name].replace('/', '')}.sqlite"), known_truth(1))
    arguments = command.split()
    if arguments[-1] in ("-o", "--html", "--png"):
        arguments.append(f"{trace.stem}.page.png")
    result = run(arguments[0], trace, *arguments[1:])
    assert result.exit_code in (0, 1, 3), repr(result.exception)
    printed = (result.stdout + result.stderr).replace("\n", "")
    assert not [letter for letter in printed if not letter.isprintable()]
    made = [entry.name for entry in Path().iterdir() if entry.name != trace.name and ".page" not in entry.name]
    assert all(entry.isprintable() for entry in made), "a default name is plain"


@pytest.mark.parametrize(
    "command",
    ["@", "--@", "overlap --@", "overlap @", "overlap x @ @", "overlap x --jobs @", "overlap x --format @",
     "overlap x --columns @", "overlap x --step-range (@", "overlap x --scheduler @", "timeline x --steps @",
     "timeline x --steps 1,@-2", "timeline x -o @.run.json", "report x -o @.sqlite", "check x --min-overlap @",
     "check x --baseline @", "results @", "completion @"],
)  # fmt: skip
def test_nor_does_any_argument(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a name that the shell puts for a ``*``."""
    monkeypatch.chdir(tmp_path)
    write_capture(Path("x"), known_truth(1))
    write_capture(Path(f"{ESCAPE}.sqlite"), known_truth(1))
    result = run(*(argument.replace("@", ESCAPE) for argument in command.split()))
    assert result.exit_code in (1, 2)
    assert not [letter for letter in result.output.replace("\n", "") if not letter.isprintable()]


def test_commands_print_by_one_function_alone() -> None:
    """Else a name would be printed as it is, somewhere, some day."""
    found = [
        path.name
        for path in Path(ddp_prof.cli.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print", "click.secho")
    ]
    assert set(found) == {"terminal.py"}


@pytest.mark.parametrize("command", ["collectives", "skew", "compare", "monitor"])
def test_a_page_is_written_before_the_first_line_is_printed(command: str, folder: Path) -> None:
    """``| head -1`` closes the pipe, which ended the command before it wrote the page."""
    read = [write_log(folder, [record(1)])] if command == "monitor" else sorted(folder.glob("run.rank*.sqlite"))
    with patch.object(table, "show", side_effect=OSError(errno.EPIPE, "closed")):
        assert run(command, *read, "--html", folder / "x.html").exit_code == 1
    assert (folder / "x.html").stat().st_size > 10_000


def test_where_a_page_cannot_be_written_the_answer_is_printed_before_the_error(folder: Path) -> None:
    done = run("monitor", log := write_log(folder, [record(1)]), "--html", log)
    assert "No change found in 1 measurement" in done.stdout
    assert done.exit_code == 1
