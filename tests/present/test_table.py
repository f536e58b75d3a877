from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_prof.columns import ALWAYS, Row
from ddp_prof.errors import DdpProfError
from ddp_prof.present import table
from ddp_prof.present.columns import catalogue
from ddp_prof.present.table import (
    FIRST_ROWS,
    MOST_ROWS,
    Digest,
    TableOptions,
    TableView,
    fit_columns,
    select_columns,
    shorten,
    show,
)

ROW: Row = {
    "run": "overlap", "rank": 0, "process": 4242, "device": "cpu", "steps": 10, "kernels": None, "collectives": 39,
    "comm_ms": 103.25, "overlapped_ms": 70.5, "exposed_ms": 32.75, "overlap_%": 68.3,
}  # fmt: skip
VIEW = TableView("a title of more than forty characters, in words", [ROW], ["a note, too, has more than forty"], {})


def keys(columns) -> list[str]:
    return [column.key for column in columns]


def test_where_there_is_room_only_what_nobody_knows_is_left_out() -> None:
    columns, notes = fit_columns([ROW, {**ROW, "run": "other"}], 200)
    assert keys(columns) == [key for key in ROW if key != "kernels"]
    assert notes == ["not shown: kernels (n/a); all columns: --wide"]


def test_what_matters_least_goes_first() -> None:
    columns, notes = fit_columns([ROW], 40)
    assert keys(columns) == ["rank", "comm_ms", "exposed_ms", "overlap_%"]
    assert notes == [
        "not shown: kernels (n/a), process, device, steps, collectives, overlapped ms; all columns: --wide"
    ]


def test_a_run_is_named_where_there_are_several() -> None:
    assert "run" not in keys(fit_columns([ROW, ROW], 200)[0])
    assert "run" in keys(fit_columns([ROW, {**ROW, "run": "other"}], 200)[0])


def test_what_is_alike_in_all_rows_goes_before_what_differs() -> None:
    rows: list[Row] = [{"rank": rank, "steps": 10, "collectives": 30 + rank} for rank in range(3)]
    assert keys(fit_columns(rows, 20)[0]) == ["rank", "collectives"]


def test_of_times_that_matter_alike_the_largest_sum_stays() -> None:
    rows: list[Row] = [{"rank": 0, "when_forward_ms": 9.0, "when_backward_ms": 1.0, "when_optimizer_ms": 5.0}]
    assert keys(fit_columns(rows, 26)[0]) == ["rank", "when_forward_ms", "when_optimizer_ms"]
    assert keys(fit_columns(rows, 14)[0]) == ["rank", "when_forward_ms"]


def test_many_columns_that_say_nothing_are_counted() -> None:
    row: Row = {"rank": 1, **dict.fromkeys(("wait_ms", "transfer_ms", "ready_ms", "launch_ms"))}
    assert fit_columns([row], 80)[1] == ["not shown: 4 columns without a value; all columns: --wide"]


def test_zeros_go_before_what_says_something() -> None:
    row: Row = {**ROW, "kernels": 0, "overlapped_ms": 0.0, "exposed_ms": 0.0}
    _, notes = fit_columns([row], 68)
    assert notes == ["not shown: kernels (0), overlapped ms (0), process; all columns: --wide"]


@given(st.lists(st.sampled_from(sorted(catalogue())), min_size=1, max_size=20, unique=True), st.integers(20, 300))
def test_no_column_that_matters_goes_for_one_that_matters_less(names: list[str], width: int) -> None:
    shown, notes = fit_columns([dict.fromkeys(names, 1.0)], width)
    left_out = {"run"} if len(names) > 1 else set()
    narrow = [catalogue()[key] for key in names if key not in {*keys(shown), *left_out}]
    assert notes == (
        [f"not shown: {', '.join(column.heading for column in narrow)}; all columns: --wide"] if narrow else []
    )
    assert all(column.stays > ALWAYS for column in narrow)
    assert max((c.stays for c in shown), default=0) <= min((c.stays for c in narrow), default=9)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_no_line_is_longer_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: width)
    table.show(TableOptions(), [VIEW])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("103.25" in line for line in lines) or width == 30


@pytest.mark.parametrize("is_text", [True, False])
def test_a_number_and_its_unit_stay_on_one_line(
    is_text: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "90 % of 24.8 ms or 2.00 µs (3.1 %, 4 GB/s) in 12 of 16 steps; 9.3 s of 1,024 MiB, 7 sends"
    view = TableView(f"what waits  {told}", () if is_text else (ROW,), [f"also {told}"], {}, is_text=is_text)
    for width in range(24, 120):
        monkeypatch.setattr(table, "terminal_width", lambda width=width: width)
        table.show(TableOptions(), [view])
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= width
        assert not re.search(r"\d *\n *(%|[mµ]?s\b|GB|MiB)", said)
        assert " ".join(said.split()).count(told) == 2, "as it is piped"


def test_a_name_that_fills_the_terminal_keeps_its_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = [{**ROW, "run": f"{'a-long-name-' * 9}rank{rank}.sqlite", "why": "w" * 60} for rank in range(2)]
    for width, wide in ((80, False), (80, True), (None, False)):
        monkeypatch.setattr(table, "terminal_width", lambda width=width: width)
        table.show(TableOptions(wide=wide, columns=() if wide else ("run", "rank")), [TableView("", rows, [], {})])
        said = capsys.readouterr().out
        names = re.findall(r"a-long\S*", said)
        assert [name.endswith(f"rank{rank}.sqlite") for rank, name in enumerate(names)] == [True, True]
        is_cut = width is not None and not wide
        assert [name == row["run"] for name, row in zip(names, rows, strict=True)] == [not is_cut] * 2
        assert ("long names without their middle; whole: --wide" in said) == is_cut


def test_what_is_piped_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table.show(TableOptions(), [VIEW])
    title, *_, row, note = capsys.readouterr().out.splitlines()
    assert (title, note) == (VIEW.title, f"note: {VIEW.notes[0]}")
    assert row.split() == ["overlap", "0", "4242", "cpu", "10", "n/a", "39", "103.25", "70.50", "32.75", "68.3"]


@pytest.mark.parametrize(
    ("options", "heading"),
    [
        (TableOptions(wide=True), "run rank process device steps kernels collectives ms ms ms %"),
        (TableOptions(columns=("exposed_ms", "kernels", "rank")), "ms kernels rank"),
    ],
)
def test_columns_are_brought_back(
    options: TableOptions, heading: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: 40)
    table.show(options, [VIEW])
    assert heading.split() in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DdpProfError, match="no column 'steps_ms' in this table: choose from run,rank,process"):
        select_columns([ROW], ["rank", "steps_ms"])


def test_a_title_of_two_sentences_has_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table.show(TableOptions(), [TableView("first\nsecond \x1b[2J", [], [], {})])
    assert capsys.readouterr().out.splitlines() == ["first", r"second \x1b[2J"]


@pytest.mark.parametrize("form", ["csv", "markdown"])
def test_a_table_without_rows_says_why_on_stderr(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason stood in the title only, which these forms leave out: the output was empty, and nothing said why."""
    table.show(
        TableOptions(form), [TableView("x.sqlite\nThe critical path is not known: no waits.", [], ["of all"], {})]
    )
    said = capsys.readouterr().err.splitlines()
    assert said == ["note: x.sqlite: The critical path is not known: no waits.", "note: of all"]


def test_notes_on_the_rows_for_people_are_not_told_of_a_csv_file(capsys: pytest.CaptureFixture[str]) -> None:
    """'One row per bucket' was said of a file with a row per collective."""
    of_shown = "one row per bucket; all 2 collectives: --by collective"
    view = TableView("t", [{"rank": 1}, {"rank": 2}], [of_shown, "b"], {}, [{"rank": 3}], notes_of_shown=[of_shown])
    table.show(TableOptions("csv"), [view])
    assert capsys.readouterr() == ("rank\n1\n2\n", "note: b\n")
    table.show(TableOptions("markdown"), [view])
    assert capsys.readouterr().err == f"note: {of_shown}\nnote: b\n"


@pytest.mark.parametrize("form", ["csv", "markdown"])
def test_tables_of_which_one_has_a_column_more_are_one_table(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a run on two nodes beside one on a single node: a traceback."""
    views = [TableView("", [row], [], {}) for row in (ROW, {"run": "x", "node": "n1", **ROW})]
    texts = []
    for order in (views, views[::-1]):
        table.show(TableOptions(form), order)
        head, *lines = [re.split(r" ?[|,] ?", line.strip("| ")) for line in capsys.readouterr().out.splitlines()]
        texts.append((head, sorted(line[head.index("node")] for line in lines if "---" not in line)))
    assert texts[0] == texts[1]
    assert texts[0][1] == sorted(["" if form == "csv" else "n/a", "n1"])


class TestManyRows:
    ROWS: tuple[Row, ...] = tuple(
        {**ROW, "rank": rank, "exposed_ms": float(rank % 50), "kernels": 2, "overlap_%": 50.0} for rank in range(100)
    )
    DIGEST = Digest("exposed_ms", ("kernels", "exposed_ms"))

    def test_the_largest_come_first_and_the_rest_is_one_line(self) -> None:
        *first, rest = shorten(self.ROWS, self.DIGEST)
        assert [row["exposed_ms"] for row in first] == [49, 49, 48, 48, 47, 47, 46, 46]
        assert (rest["rank"], rest["kernels"]) == ("92 others", 2 * 92)
        assert rest["overlap_%"] is None, "a share of the others is not their sum"

    @given(st.lists(st.one_of(st.none(), st.integers(0, 10**6).map(float)), max_size=60))
    def test_nothing_is_lost(self, values: list[float | None]) -> None:
        rows: list[Row] = [{"rank": rank, "exposed_ms": value} for rank, value in enumerate(values)]
        short = shorten(rows, self.DIGEST)
        assert len(short) == (len(rows) if len(rows) <= MOST_ROWS else FIRST_ROWS + 1)
        assert sum(row["exposed_ms"] or 0 for row in short) == sum(value or 0 for value in values)

    def test_only_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        view = TableView("", self.ROWS, [], {}, digest=self.DIGEST)
        lines = {}
        for width, wide in ((120, False), (120, True), (None, False)):
            monkeypatch.setattr(table, "terminal_width", lambda width=width: width)
            table.show(TableOptions(wide=wide), [view])
            lines[width, wide] = capsys.readouterr().out.splitlines()
        assert len(lines[120, False]) < 20
        assert any("8 of 100 rows, and the others summed; all rows: --wide" in line for line in lines[120, False])
        assert len(lines[120, True]) == len(lines[None, False]) > 100


def test_a_note_is_not_what_the_sentence_above_says(capsys: pytest.CaptureFixture[str]) -> None:
    """'The critical path is not known: calls that ...', and below 'note: calls that ...'."""
    view = TableView("The path is not known: calls were lost.", [], ["calls were lost", "calls were late"], {})
    show(TableOptions(), [view])
    assert capsys.readouterr().out == "The path is not known: calls were lost.\nnote: calls were late\n"


def test_a_name_is_not_broken_for_its_last_few_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """'kineto_a100_ddp_rank0of' stood above '2', where a less important column could be left out."""
    rows: list[Row] = [{**ROW, "run": f"kineto_a100_ddp_rank{rank}of2"} for rank in range(2)]
    for width in range(52, 100):
        monkeypatch.setattr(table, "terminal_width", lambda width=width: width)
        show(TableOptions(), [TableView("", rows, [], {})])
        assert capsys.readouterr().out.count("of2 ") == 2, width
