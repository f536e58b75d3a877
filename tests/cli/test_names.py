"""Whatever bytes a file's name holds, its trace is read, and its name is shown on one line, as text."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.conftest import ROOT
from tests.examples import IS_NIGHTLY
from tests.ingest.test_hostile import contents, with_log
from tests.ingest.test_nsys_export import known_truth
from tests.ingest.test_nsys_table_folder import write_tables
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import write_capture

pytestmark = pytest.mark.usefixtures("no_browser")

NAMES = {
    # encodings
    "Latin-1": b"gr\xfc\xdfe",
    "Windows-1252": b"\x93quoted\x94",
    "KOI8-R": "обучение".encode("koi8-r"),
    "Shift JIS, with a backslash as second byte": "ソ表".encode("shift-jis"),
    "GB 18030": "训练".encode("gb18030"),
    "EUC-KR": "훈련".encode("euc-kr"),
    "MacRoman": "café".encode("mac-roman"),
    "UTF-7": "trené".encode("utf-7"),
    "UTF-8, composed": "é".encode(),
    "UTF-8, decomposed": "e\N{COMBINING ACUTE ACCENT}".encode(),
    "UTF-8 with its mark": b"\xef\xbb\xbfrun",
    "UTF-8, cut in a letter": "日本".encode()[:-1],
    "UTF-8, an overlong letter": b"\xc1\x81run",
    "UTF-8, half a pair of UTF-16": b"\xed\xa0\xbd",
    "UTF-8, both halves of a pair": b"\xed\xa0\xbd\xed\xb8\x80",
    "UTF-8, beyond Unicode": b"\xf5\x80\x80\x80",
    "no letter at all": b"\xff\xfe\xfd",
    "letters that join": "👩‍👩‍👧".encode(),
    # what controls a terminal or a reader
    "a line break": b"a\nb",
    "a return": b"a\rb",
    "a line separator": "a\u2028b".encode(),
    "a tab": b"a\tb",
    "a bell": b"a\x07b",
    "an escape sequence": b"\x1b]0;owned\x07",
    "a control sequence of Latin-1": b"a\xc2\x9b31mb",
    "a delete": b"a\x7fb",
    "a reversal": "a\u202egnp.b".encode(),
    # what a shell, SQLite, a page or a spreadsheet would read otherwise
    "a query": b"x?mode=rwc&immutable=0",
    "a fragment": b"x#y",
    "an escaped byte": b"x%00y%2e",
    "an address": b"file:x",
    "SQL": b"x'; DROP TABLE StringIds; --",
    "quotes": b"a'b\"c`d",
    "a command": b"$(touch pwned)`touch pwned`;touch pwned",
    "a pattern": b"*[ab]?{1,2}~",
    "an option": b"--format",
    "a space at both ends": b" x ",
    "a backslash": b"a\\nb\\",
    "markup": b"<script>alert(1)<", # a name has no slash
    "an attribute": b"\"onload=\"alert(1)",
    "an entity": b"&lt;b&gt;&#0;",
    "a template": b"{{7*7}}{%if 1%}",
    "markup of a table": b"[bold red]x[link=y]",
    "a column of Markdown": b"a|b*c_d",
    "a formula": b"=cmd|' C'!A0",
    "a sum": b"+1+1",
    "a difference": b"-1-1",
    "a function": b"@SUM(1)",
    "a formula behind a tab": b"\t=1",
    "an escape that is meant": rb"a\udcffb",
}  # fmt: skip


OF_EACH_KIND = {"Latin-1", "UTF-8, half a pair of UTF-16", "a line break", "markup", "an attribute", "a template"}
"""Names of which every gate asks more: a whole report, a summary, a table for Markdown."""


TELLING = OF_EACH_KIND | {
    "UTF-8, composed", "letters that join", "a line separator", "an escape sequence", "a control sequence of Latin-1",
    "a reversal", "a query", "a fragment", "an escaped byte", "SQL", "quotes", "a command", "an option",
    "a space at both ends", "markup of a table", "an escape that is meant",
}  # fmt: skip
"""Names of which every gate asks what is asked of all by night: one for each way to be misread."""
FORMULAS = {"a formula", "a sum", "a difference", "a function", "a formula behind a tab"}


IN_TMPDIR = ("Latin-1", "a query", "an escaped byte", "SQL", "a line break", "a fragment")


def named(folder: Path, name: bytes) -> Path:
    return write_capture(folder / "x.sqlite", known_truth(1)).rename(folder / os.fsdecode(name + b".sqlite"))


def assert_is_plain(text: str) -> None:
    assert not [letter for letter in text.replace("\n", "").replace("\u200d", "") if not letter.isprintable()]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """The number of lines that ``overlap`` prints of a capture of a usual name, and the ranks of its document."""
    plain = named(tmp_path_factory.mktemp("usual"), b"plain")
    document = json.loads(run("overlap", plain, "--format", "json").stdout)
    return len(run("overlap", plain).stdout.splitlines()), document["ranks"]


def without_file(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in rank.items() if key != "file"} for rank in ranks]


@pytest.mark.parametrize("name", of_which_the_gate_keeps(TELLING, NAMES))
def test_the_figures_are_those_of_any_other_name(
    name: str, usual: tuple[int, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    trace = named(folder, NAMES[name])
    before = contents(tmp_path)
    monkeypatch.chdir(folder)
    as_given = trace.name if not trace.name.startswith("-") else f"./{trace.name}"
    lines, ranks = usual
    of_kind = ("overlap", "summary") if name in OF_EACH_KIND else ("overlap",)
    for command in ("overlap", "summary", "info", "doctor", "kernels") if IS_NIGHTLY else of_kind:
        result = run(command, as_given)
        assert result.exit_code == 0, result.stderr
        assert_is_plain(result.stdout + result.stderr)
        if command == "overlap":
            assert len(result.stdout.splitlines()) == lines, "a name takes one line"
    result = run("overlap", as_given, "--format", "json")
    document = json.loads(result.stdout.encode())
    assert not re.search("[\ud800-\udfff]", json.dumps(document, ensure_ascii=False)), "strict readers refuse it"
    assert without_file(document["ranks"]) == without_file(ranks)
    if IS_NIGHTLY or name in OF_EACH_KIND:
        assert run("overlap", as_given, "--format", "markdown").exit_code == 0
    assert [path.name for path in folder.iterdir()] == [trace.name]
    assert {path: made for path, made in contents(tmp_path).items() if path in before} == before


@pytest.mark.parametrize("name", of_which_the_gate_keeps({*OF_EACH_KIND, *FORMULAS}, NAMES))
def test_no_spreadsheet_runs_it(name: str, tmp_path: Path) -> None:
    result = run("overlap", named(tmp_path, NAMES[name]), "--format", "csv")
    assert result.exit_code == 0, result.stderr
    (row,) = csv.DictReader(io.StringIO(result.stdout.encode().decode()))
    assert not row["run"].startswith(("=", "+", "-", "@", "\t", "\r", "\n"))


@pytest.mark.parametrize("name", of_which_the_gate_keeps(TELLING, NAMES))
def test_pages_show_it_as_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")
    (folder := tmp_path / "in").mkdir()
    trace = named(folder, NAMES[name])
    pages = (("timeline", "x.html"), ("export", "x.json"), ("report", "pages"))
    for command, target in pages if IS_NIGHTLY or name in OF_EACH_KIND else pages[:2]:
        result = run(command, trace, "-o", tmp_path / target)
        assert result.exit_code == 0, result.stderr
        assert_is_plain(result.stdout + result.stderr)
    for page in [tmp_path / "x.html", *(tmp_path / "pages").glob("*.html")]:
        text = page.read_bytes().decode()
        assert "<script>alert" not in text
        assert not re.search(r'<[^>]*\sonload="alert', text)
        assert "49" not in re.findall(r"<title>(.*?)</title>", text)
    json.loads((tmp_path / "x.json").read_bytes())
    assert not list(tmp_path.rglob("pwned"))
    assert [path.name for path in folder.iterdir()] == [trace.name]


@pytest.mark.parametrize("name", of_which_the_gate_keeps(OF_EACH_KIND, NAMES))
def test_a_folder_of_such_a_name_is_read_with_all_in_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(NAMES[name])
    folder.mkdir()
    write_capture(folder / "a.sqlite", known_truth(1))
    write_capture(folder / "b.sqlite", known_truth(1))
    result = run("overlap", folder, "--format", "csv")
    assert result.exit_code == 0, result.stderr
    assert "left out" not in result.stderr
    assert [row["run"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["a", "b"]


@pytest.mark.parametrize("name", of_which_the_gate_keeps(["Latin-1", "a query"], IN_TMPDIR))
def test_a_folder_of_temporary_files_may_have_such_a_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a database with a log and tables are written and read again."""
    place = tmp_path / os.fsdecode(NAMES[name])
    place.mkdir()
    (traces := tmp_path / "traces").mkdir()
    logged = with_log(traces)
    tables = write_tables(write_capture(traces / "whole.sqlite", known_truth(2)), traces / "x_pqtdir", "parquet")
    usual = [run("overlap", path, "--format", "csv").stdout for path in (logged, tables)]
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    for path, expected in zip((logged, tables), usual, strict=True):
        result = run("overlap", path, "--format", "csv")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("a b", "'a b'"),
        ("a\nb.sqlite", r"$'a\x0ab.sqlite'"),
        ("it's", "'it'\"'\"'s'"),
        ("\udcff'\\", r"$'\xff\x27\x5c'"),
    ],
)
def test_a_command_to_copy_names_the_file(path: str, written: str) -> None:
    from ddp_prof.errors import shell_quote

    assert shell_quote(path) == written
    done = subprocess.run(["bash", "-c", f"printf %s {written}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(path)


def test_a_page_goes_into_a_pipe_alone(tmp_path: Path) -> None:
    """Nothing but the page: its path is not printed behind it."""
    trace = write_capture(tmp_path / "x.sqlite", known_truth(1))
    program = [sys.executable, "-c", "from ddp_prof.cli import main; main()"]
    arguments = ["export", str(trace), "-o"]
    made = subprocess.run([*program, *arguments, "/dev/stdout"], cwd=ROOT, capture_output=True, check=True)
    usual = subprocess.run([*program, *arguments, "-"], cwd=ROOT, capture_output=True, check=True)
    assert made.stdout == usual.stdout
    json.loads(made.stdout)
