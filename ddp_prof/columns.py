"""Columns: a result declares each of its figures once; tables, JSON documents, data frames and docs are made from that.

A result is a dataclass. :func:`column` declares a field of it as a column, and :func:`derived` a property::

    @dataclass(frozen=True)
    class Step:
        window_ns: int | None = column("from the first to the last work of the step", measure=..., stays=WITH_ROOM)

        @property
        @derived("share of communication that is overlapped", key="overlap_%", after="window_ns")
        def overlap_ratio(self) -> float | None: ...

Results hold nanoseconds, bytes, and ratios from 0 to 1; tables show milliseconds and per cent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Flag, auto
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, Literal, TypeVar

Value = str | int | float | None
Row = dict[str, Value]
Getter = TypeVar("Getter", bound=Callable[..., Any])

MISSING = "n/a"
"""What tables show for a value that is not known."""

ALWAYS, USUALLY, WITH_ROOM, WITH_MUCH_ROOM = range(4)
"""Values of ``Column.stays``: a narrow terminal drops the columns with the highest numbers first, never ``ALWAYS``."""


def percent(ratio: float | None) -> str:
    """Format a ratio in per cent; near 0 and 1 with a decimal, so that ``0 %`` and ``100 %`` are exact."""
    if ratio is None:
        return MISSING
    percent = ratio * 100
    size = abs(percent)
    is_whole = size in (0, 100) or 1 <= size <= 99 or size >= 101
    return f"{percent:.0f} %" if is_whole else f"{percent:.1f} %"


def milliseconds(ns: float) -> str:
    """Return a time as text in µs or ms with about three digits; from 10 s on in seconds."""
    if abs(ns) >= 10_000_000_000:
        return f"{ns / 1e9:,.2f} s"
    if abs(ns) >= 9_995_000 or ns == 0:
        return f"{ns / 1e6:,.1f} ms"
    return f"{ns / 1e6:.2f} ms" if abs(ns) >= 100_000 else f"{ns / 1e3:.1f} µs"


def with_article(number: str) -> str:
    """Put ``a`` or ``an`` before a number in digits, as it is spoken: ``an 8.44 ms``, ``an 18.0 ms``, ``a 180 ms``."""
    return f"{'an' if re.match(r'8|1[18](?![0-9])', number) else 'a'} {number}"


def signed(ns: int) -> str:
    """Return a difference of times with its sign: ``+4.00 ms``, ``-0.5 µs``."""
    return f"{'+' if ns > 0 else ''}{milliseconds(ns)}"


def size(number: int) -> str:
    """Return a number of bytes as text: in bytes below a KiB, else in KiB, MiB or GiB with about three digits."""
    if number < 2**10:
        return f"{number:,} byte{'' if number == 1 else 's'}"
    for unit, power in (("KiB", 10), ("MiB", 20)):
        if number < 999.5 * 2**power:  # above, three digits would round it to 1,000
            return f"{digits(number / 2**power)} {unit}"
    return f"{digits(number / 2**30)} GiB"


def count_noun(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural if it is not 1: ``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}{by_number(number, '', 's')}"


def by_number(number: int, singular: str, plural: str) -> str:
    """Return the form of a word for a number of things: ``1 of 8 kernels has``, ``2 of 8 kernels have``."""
    return singular if number == 1 else plural


def listed(names: Sequence[str], joint: str = "and") -> str:
    """Join names as a sentence does: ``a``, ``a and b``, ``a, b and c``; empty without names."""
    return f" {joint} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def capitalized(text: str) -> str:
    """Return the text with a capital as its first letter, as at the beginning of a sentence; all others stay."""
    return text[:1].upper() + text[1:]


def digits(value: float, count: int = 3) -> str:
    """Return a number as text with ``count`` significant digits; a large one gets zeros, and no power of ten."""
    return f"{float(f'{value:.{count}g}'):,.15g}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: Key of the column in a row, and heading in a CSV file; it ends with the unit.
        meaning: A description without a period.
        stays: How important it is: one of ``ALWAYS`` to ``WITH_MUCH_ROOM``.
        decimals: Decimals of a ``float``.
        align: ``left`` if the column may hold text; a column of numbers only is still aligned to the right.
        called: Heading for people; empty: it is made from the key.
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
        """Return a value of this column as a table shows it; what rounds to zero has no sign."""
        if value is None:
            return MISSING
        if not isinstance(value, float):
            return str(value)
        text = f"{value:.{self.decimals}f}"
        return text if text.strip("-0.") else text.lstrip("-")

    def is_right(self, rows: Sequence[Row]) -> bool:
        """Whether the column is aligned to the right: ``align`` says so, or no row holds text."""
        return self.align == "right" or not any(isinstance(row[self.key], str) for row in rows)


class Hidden(Flag):
    """What a capture may lack; figures that need it are then not known (null)."""

    NOTHING = 0
    LAUNCHES = auto()
    """Most communication has no recorded launch, so its step is not known."""
    WORK = auto()
    """No times of work were recorded."""
    DURATIONS = auto()
    """Communication was recorded without its durations."""
    NAMES = auto()
    """Kernels have no names, or no range names a phase in which a host computes."""
    GRAPHS = auto()
    """CUDA graphs were recorded as a whole, without the kernels in them, or kernels that compute take no time."""
    WAITS = auto()
    """A host that communicates may have waited meanwhile."""
    COMMUNICATION = auto()
    """No communication was recorded, although there may have been some."""
    COPIES = auto()
    """Copies, or memory sets, were launched, and none of them was recorded."""
    CALLS = auto()
    """Much compute has no recorded launch, so what a step launched is not known."""
    STEPS = auto()
    """All steps were left out, and what their work hid with them."""
    KERNELS = auto()
    """It is not known which kernels a step launched, with or without names."""


WHY_HIDDEN = {
    Hidden.LAUNCHES: "no launches",
    Hidden.WORK: "no times",
    Hidden.DURATIONS: "no durations",
    Hidden.NAMES: "no names",
    Hidden.GRAPHS: "whole graphs",
    Hidden.WAITS: "host waits",
    Hidden.COMMUNICATION: "not seen",
    Hidden.COPIES: "no copies",
    Hidden.CALLS: "lost calls",
    Hidden.STEPS: "no steps",
    Hidden.KERNELS: "no launches",
}
"""For each of these, the words for what the capture lacks; docs/formats.md explains them."""


@dataclass(frozen=True)
class ResultColumn:
    """A field or a property of a result that is declared as a column.

    Attributes:
        name: Name of the field or property; its ending tells the unit (``_ns``, ``_ratio``, ...).
        meaning: A description without a period.
        null: When the value is null, apart from what ``needs`` says.
        needs: If a capture lacks one of these, the value is null.
        measure: Returns the values of all rows of a rank; ``None`` if the function that makes the result sets them.
        adds_up: Whether a table may sum the values over rows.
        skips_unknown: Whether the sum leaves unknown values out; otherwise one unknown value makes the sum null.
        key: Its key in tables, with the unit that tables show; empty: it is made from the name.
        stays: How important it is in a table, see :class:`Column`; ``None`` if no table shows it.
        shown_above: Tables have the column only if a value is larger than this; ``None``: always.
        in_document: Whether JSON documents have it.
        is_instant: Whether the value is a time of the file's clock, which may be negative. Tables show it as the time
            since an origin.
        is_signed: Whether the value is a length of time that may be negative.
        holds: The class of the value if the value is a result itself, whose columns are shown instead.
        parts: Columns that tables and frames show instead of this one.
        get: Returns the value for a result; ``None``: the value is the attribute ``name``.
        describes: Whether the value says what a row is about.
        called: Heading for people; empty: it is made from the key.
        decimals: Decimals in tables; ``None``: as usual for the unit.
        on_page: Whether the page about a step of a run, which lists its collectives, has the column.
        after: For a property, the name of the column that it follows; empty: it is the last one.
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
    is_signed: bool = False
    holds: type | None = None
    parts: tuple[ResultColumn, ...] = ()
    get: Callable[[Any], Any] | None = None
    describes: bool = False
    called: str = ""
    decimals: int | None = None
    on_page: bool = False
    after: str = ""

    @cached_property
    def unit(self) -> str:
        """The unit of the values, as the ending of the name tells it; empty for text and plain numbers."""
        if self.name == "ns" or self.name.endswith("_ns"):
            return "ns"
        if self.name.endswith("_ratio"):
            return "0 to 1"
        if self.name.endswith("bytes_per_s"):
            return "bytes/s"
        return "bytes" if self.name == "bytes" else ""

    @property
    def why_null(self) -> str:
        """When the figure is null, as a list of conditions; empty if it never is."""
        return "; ".join(filter(None, [self.null, *(text for part, text in WHY_HIDDEN.items() if part & self.needs)]))

    @cached_property
    def table_key(self) -> str:
        """The key in tables: :attr:`key`, else the name, with ``_ms`` for a time."""
        return self.key or (f"{self.name.removesuffix('_ns')}_ms" if self.unit == "ns" else self.name)

    @property
    def table_column(self) -> Column:
        """The column of a table that shows this column; ``stays`` must not be ``None``."""
        of_unit = {"ns": 2, "bytes/s": 2, "0 to 1": 1}.get(self.unit, 0)
        decimals = of_unit if self.decimals is None else self.decimals
        assert self.stays is not None
        align: Literal["left", "right"] = "right" if self.unit else "left"
        return Column(self.table_key, self.meaning, self.stays, decimals, align, self.called)

    def of(self, result: Any) -> Any:
        """Return the value of this column for a result."""
        return self.get(result) if self.get else getattr(result, self.name)

    def add_up(self, values: Sequence[int | None]) -> int | None:
        """Return the sum of the values of rows; ``None`` if it is not known, see ``skips_unknown``."""
        known = [value for value in values if value is not None]
        is_known = known and (self.skips_unknown or len(known) == len(values))
        return sum(known) if is_known else None

    def table_value(self, value: Any, origin_ns: int = 0) -> Value:
        """Return a value in the unit of tables: ms (or us by its key), per cent, GB/s; empty text becomes ``None``.

        An instant becomes the time since ``origin_ns``.
        """
        if value is None or isinstance(value, str):
            return value or None
        if self.unit == "ns":
            of_table = 1e3 if self.table_key.endswith("_us") else 1e6
            return float((value - origin_ns if self.is_instant else value) / of_table)
        # Functions, as only the conversion of this unit is to be computed; a value of another unit stays as it is.
        shown: Value = {"0 to 1": lambda: value * 100, "bytes/s": lambda: value / 1e9}.get(self.unit, lambda: value)()
        return shown


def column(meaning: str, *, default: Any = NO_DEFAULT, default_factory: Any = NO_DEFAULT, **rules: Any) -> Any:
    """Declare a field of a result as a column; ``rules`` are attributes of :class:`ResultColumn`.

    ``default`` and ``default_factory`` are those of the dataclass field.
    """
    declared = {"column": ResultColumn("", meaning, **rules)}
    return field(default=default, default_factory=default_factory, metadata=declared)


def derived(meaning: str, **rules: Any) -> Callable[[Getter], Getter]:
    """Declare a property of a result as a column; ``rules`` are attributes of :class:`ResultColumn`."""

    def declare(getter: Getter) -> Getter:
        getter.column = ResultColumn(getter.__name__, meaning, **rules)  # type: ignore[attr-defined]
        return getter

    return declare


@cache
def result_columns(kind: type) -> tuple[ResultColumn, ...]:
    """Return the columns that a class of results declares, in the order in which they are shown everywhere."""
    found = [replace(item.metadata["column"], name=item.name) for item in fields(kind) if "column" in item.metadata]
    # Properties: each goes behind the column that it names with ``after``, else to the end.
    for value in vars(kind).values():
        declared = getattr(value.fget, "column", None) if isinstance(value, property) else None
        if declared is not None:
            names = [one.name for one in found]
            found.insert(names.index(declared.after) + 1 if declared.after else len(found), declared)
    return tuple(found)


def table_columns(kind: type) -> list[ResultColumn]:
    """Return the columns of a class of results that tables show, with those of the results that it holds."""
    shown: list[ResultColumn] = []
    for one in result_columns(kind):
        if one.holds is not None:
            shown += table_columns(one.holds)
        else:
            shown += [part for part in one.parts or [one] if part.stays is not None]
    return shown


def table_rows(results: Sequence[Any], most: int | None = None) -> list[Row]:
    """Return a table row for each result, or for the first ``most`` results; all results are of one class.

    A column of this class with ``shown_above`` is left out if no value of any result is larger than that.
    """
    if not results:
        return []
    kind: type = type(results[0])
    rows = [table_row(result) for result in results[:most]]
    for one in result_columns(kind):
        least = one.shown_above
        if least is not None and all(_number(one.table_value(one.of(result))) <= least for result in results):
            rows = [{key: value for key, value in row.items() if key != one.table_key} for row in rows]
    return rows


def table_row(result: Any, kind: type | None = None, origin_ns: int = 0) -> Row:
    """Return the table row of a result: its values by the keys and in the units of tables.

    If ``result`` is ``None``, all values of the row are ``None``, and ``kind`` is the class of the result. Instants are
    shown as times since ``origin_ns``.
    """
    row: Row = {}
    for one in result_columns(kind or type(result)):
        if one.holds is not None:
            row |= table_row(None if result is None else one.of(result), one.holds, origin_ns)
        for part in one.parts or [one]:
            if part.stays is not None:
                row[part.table_key] = part.table_value(None if result is None else part.of(result), origin_ns)
    return row


def _number(value: Value) -> float:
    """Return a value if it is a number, else 0."""
    return value if isinstance(value, (int, float)) else 0


def document_of(result: Any, **instead: Any) -> dict[str, Any]:
    """Return the values of a result that JSON has, by column name; ``instead`` replaces values of the result."""
    kind: type = type(result)
    # Captures have thousands of steps: what is a number or text already is not looked at twice.
    return {
        name: instead[name]
        if name in instead
        else (value if (value := get(result)).__class__ in _PLAIN else _plain(value))
        for name, get in _document_getters(kind)
    }


_PLAIN = frozenset({int, float, str, bool, type(None)})
"""Types of values that JSON takes as they are."""


@cache
def _document_getters(kind: type) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return name and getter of each column of a class of results that JSON has."""
    return tuple((one.name, one.get or attrgetter(one.name)) for one in result_columns(kind) if one.in_document)


def _plain(value: Any) -> Any:
    """Return a value as JSON takes it: tuples become lists, and results or other dataclasses dictionaries."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind: type = type(value)
    if result_columns(kind):
        return document_of(value)
    names, get = _field_getters(kind)
    found = dict(zip(names, get(value), strict=True))
    # As ``asdict`` does, which copies even numbers by a function in Python.
    return found if all(one.__class__ in _PLAIN for one in found.values()) else asdict(value)


@cache
def _field_getters(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the names of the fields of a dataclass, and the function that returns their values."""
    names = tuple(item.name for item in fields(kind))
    return names, attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)


def frame_row(result: Any, kind: type | None = None) -> dict[str, Any]:
    """Return all values of a result, by the names of the columns of a data frame.

    The values of a result that it holds get names that begin with the name of that column. If ``result`` is ``None``,
    all values are ``None``, and ``kind`` is the class of the result.
    """
    row: dict[str, Any] = {}
    for one in result_columns(kind or type(result)):
        if one.holds is not None:
            inner = frame_row(None if result is None else one.of(result), one.holds)
            row |= {f"{one.name}_{name}": value for name, value in inner.items()}
            continue
        for part in one.parts or [one]:
            row[part.name] = None if result is None else part.of(result)
    return row


def frame_names(kind: type) -> list[str]:
    """Return the names of the columns of a data frame of such results."""
    return list(frame_row(None, kind))


def hidden_fields(kind: type, hidden: Hidden) -> dict[str, Any]:
    """Return the fields of a class of results that need what a capture lacks, each with the value ``None``."""
    names = {item.name for item in fields(kind)}
    return dict.fromkeys(one.name for one in result_columns(kind) if one.needs & hidden and one.name in names)
