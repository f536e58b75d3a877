"""Columns: a result declares each of its figures once, and tables, documents, frames and docs are made from that.

A result is a dataclass, and :func:`column` declares its fields::

    @dataclass(frozen=True)
    class Step:
        window_ns: int | None = column("from the first to the last work of the step", measure=..., stays=WITH_ROOM)

        @property
        @derived("share of communication that is overlapped", key="overlap_%", after="window_ns")
        def overlap_ratio(self) -> float | None: ...

Results hold nanoseconds, bytes, and ratios from 0 to 1; tables show milliseconds and per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from typing import Any, Literal, TypeVar

Value = str | int | float | None
Row = dict[str, Value]
Getter = TypeVar("Getter", bound=Callable[..., Any])

MISSING = "n/a"

ALWAYS, USUALLY, WITH_ROOM, WITH_MUCH_ROOM = range(4)
"""Values of ``Column.stays``: a narrow terminal drops the columns with the highest numbers first, never ``ALWAYS``."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: Key of the rows, and heading in a CSV file; it ends with the unit.
        meaning: A description without a period.
        stays: One of ``ALWAYS`` to ``WITH_MUCH_ROOM``.
        decimals: Decimals of a ``float``.
        align: ``left`` if a table may hold text in this column.
        called: Heading for people, if it is not made from the key.
    """

    key: str
    meaning: str
    stays: int = USUALLY
    decimals: int = 2
    align: Literal["left", "right"] = "right"
    called: str = ""

    @property
    def heading(self) -> str:
        return self.called or self.key.replace("_", " ")

    def text(self, value: Value) -> str:
        if value is None:
            return MISSING
        return f"{value:.{self.decimals}f}" if isinstance(value, float) else str(value)

    def is_right(self, rows: Sequence[Row]) -> bool:
        """Whether the column is aligned to the right: ``align`` says so, or no row holds text."""
        return self.align == "right" or not any(isinstance(row[self.key], str) for row in rows)


class Hidden(Flag):
    """What a capture may hide, so that figures that rest on it are not known."""

    NOTHING = 0
    LAUNCHES = auto()
    """Most communication has no recorded launch, so its step is not known."""
    WORK = auto()
    """No times of work were recorded."""
    DURATIONS = auto()
    """Communication was recorded without its durations."""
    NAMES = auto()
    """Kernels have no names."""
    GRAPHS = auto()
    """CUDA graphs were recorded as a whole, without the kernels in them."""
    WAITS = auto()
    """A host that communicates may have waited meanwhile."""


WHY_HIDDEN = {
    Hidden.LAUNCHES: "no launches",
    Hidden.WORK: "no times",
    Hidden.DURATIONS: "no durations",
    Hidden.NAMES: "no names",
    Hidden.GRAPHS: "whole graphs",
    Hidden.WAITS: "host waits",
}
"""What a capture lacks if it hides this, in the words that docs/formats.md explains."""


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """A field, or a property, of a result.

    Attributes:
        name: Its name in the result; the ending tells the unit.
        meaning: A description without a period.
        null: When it is null, apart from what ``needs`` says.
        needs: If a capture hides one of these, the figure is null.
        measure: Returns the values of all rows of a rank; ``None`` if the result's own function does it.
        adds_up: Whether values of several rows, and of the parts of a capture, are summed; the first one counts if not.
        skips_unknown: Whether the sum is that of the known values; if not, it is null if one of them is.
        key: Its key in tables, with the unit that tables show.
        stays: How important it is in a table, see :class:`Column`; ``None`` if no table shows it.
        shown_above: Tables have the column only if a value is larger than this.
        in_document: Whether JSON has it.
        is_instant: Whether it is a time of the file's clock, which may be negative.
        holds: The result that it is, if it has columns itself.
        after: Name of the column before it, of a property; the last one if empty.
    """

    name: str
    meaning: str
    null: str = ""
    needs: Hidden = Hidden.NOTHING
    measure: Callable[[Any], Any] | None = None
    adds_up: bool = False
    skips_unknown: bool = False
    key: str = ""
    stays: int | None = None
    shown_above: int | None = None
    in_document: bool = True
    is_instant: bool = False
    holds: type | None = None
    after: str = ""

    @property
    def unit(self) -> str:
        if self.name == "ns" or self.name.endswith("_ns"):
            return "ns"
        if self.name.endswith("_ratio"):
            return "0 to 1"
        return "bytes" if self.name == "bytes" else ""

    @property
    def why_null(self) -> str:
        """When the figure is null, as a list of conditions; empty if it never is."""
        return "; ".join(filter(None, [self.null, *(text for part, text in WHY_HIDDEN.items() if part & self.needs)]))

    @property
    def table_key(self) -> str:
        return self.key or (f"{self.name.removesuffix('_ns')}_ms" if self.unit == "ns" else self.name)

    @property
    def table_column(self) -> Column:
        decimals = {"ns": 2, "0 to 1": 1}.get(self.unit, 0)
        assert self.stays is not None
        return Column(self.table_key, self.meaning, self.stays, decimals)

    def add_up(self, values: Sequence[int | None]) -> int | None:
        """The sum over rows or parts; ``None`` if it is not known."""
        known = [value for value in values if value is not None]
        is_known = known and (self.skips_unknown or len(known) == len(values))
        return sum(known) if is_known else None

    def table_value(self, result: Any) -> Value:
        """The value in the unit of tables."""
        value: Value = getattr(result, self.name)
        if isinstance(value, str) or value is None:
            return value
        return {"ns": value / 1e6, "0 to 1": value * 100}.get(self.unit, value)


def column(meaning: str, *, default: Any = NO_DEFAULT, **rules: Any) -> Any:
    """Declare a field of a result; ``rules`` are attributes of :class:`ResultColumn`."""
    return field(default=default, metadata={"column": ResultColumn("", meaning, **rules)})


def derived(meaning: str, **rules: Any) -> Callable[[Getter], Getter]:
    """Declare a property of a result as a column; ``rules`` are attributes of :class:`ResultColumn`."""

    def declare(getter: Getter) -> Getter:
        getter.column = ResultColumn(getter.__name__, meaning, **rules)  # type: ignore[attr-defined]
        return getter

    return declare


def result_columns(kind: type) -> tuple[ResultColumn, ...]:
    """The columns that a result declares, in the order in which everything shows them."""
    if kind not in _DECLARED:
        _DECLARED[kind] = _find_columns(kind)
    return _DECLARED[kind]


_DECLARED: dict[type, tuple[ResultColumn, ...]] = {}


def _find_columns(kind: type) -> tuple[ResultColumn, ...]:
    found = [replace(item.metadata["column"], name=item.name) for item in fields(kind) if "column" in item.metadata]
    for value in vars(kind).values():
        declared = getattr(value.fget, "column", None) if isinstance(value, property) else None
        if declared is not None:
            names = [one.name for one in found]
            found.insert(names.index(declared.after) + 1 if declared.after else len(found), declared)
    return tuple(found)


def table_columns(kind: type) -> list[ResultColumn]:
    """The columns of a result that tables show, with those of the results in it."""
    shown: list[ResultColumn] = []
    for one in result_columns(kind):
        if one.holds is not None:
            shown += table_columns(one.holds)
        elif one.stays is not None:
            shown.append(one)
    return shown


def table_rows(results: Sequence[Any]) -> list[Row]:
    """A row for each result of one kind, by the keys and in the units of tables."""
    rows = [_table_row(result) for result in results]
    for one in table_columns(type(results[0])) if results else ():
        values = [row[one.table_key] for row in rows]
        if one.shown_above is not None and all(_number(value) <= one.shown_above for value in values):
            rows = [{key: value for key, value in row.items() if key != one.table_key} for row in rows]
    return rows


def _table_row(result: Any) -> Row:
    row: Row = {}
    for one in result_columns(type(result)):
        if one.holds is not None:
            row |= _table_row(getattr(result, one.name))
        elif one.stays is not None:
            row[one.table_key] = one.table_value(result)
    return row


def _number(value: Value) -> float:
    return value if isinstance(value, (int, float)) else 0


def document_of(result: Any) -> dict[str, Any]:
    """The columns of a result that JSON has, by name; those of a result in it likewise."""
    return {
        one.name: document_of(value) if one.holds is not None else value
        for one in result_columns(type(result))
        if one.in_document
        for value in [getattr(result, one.name)]
    }


def frame_row(result: Any) -> dict[str, Any]:
    """All columns of a result, by name; those of a result in it as a dictionary."""
    return {
        one.name: frame_row(value) if one.holds is not None else value
        for one in result_columns(type(result))
        for value in [getattr(result, one.name)]
    }


def frame_names(kind: type) -> list[str]:
    """The names of all columns of a frame; those of a result in another begin with its name."""
    names: list[str] = []
    for one in result_columns(kind):
        names += [one.name] if one.holds is None else [f"{one.name}_{inner}" for inner in frame_names(one.holds)]
    return names


def hidden_fields(kind: type, hidden: Hidden) -> dict[str, Any]:
    """The fields of a result that are null if a capture hides this, each with ``None``."""
    names = {item.name for item in fields(kind)}
    return dict.fromkeys(one.name for one in result_columns(kind) if one.needs & hidden and one.name in names)
