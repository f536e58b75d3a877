"""Base classes of results: names of ranks, and pandas tables. Pandas is imported only when such a table is made."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ddp_prof.columns import frame_names, frame_row, result_columns
from ddp_prof.manifest import distinct_names
from ddp_prof.table import NO_TIME, UNKNOWN, Brief
from ddp_prof.trace import Ints

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
else:
    DataFrame = Any  # only annotations use it, and they are not evaluated

Row = TypeVar("Row")


def none_for_unknown(column: Ints, missing: int = UNKNOWN) -> list[Any]:
    """Return the column's values as a list, with ``None`` in place of ``missing``.

    In a column of times, ``missing`` is ``NO_TIME``.
    """
    return [None if value == missing else value for value in column.tolist()]


def make_rows(kind: type[Row], columns: Mapping[str, Sequence[Any]], **shared: Any) -> list[Row]:
    """Return one result of this kind, a dataclass with slots, per row.

    ``columns`` holds the values of the rows by the name of the field; ``shared`` are fields with one value for all
    rows.
    """
    (count,) = {*map(len, columns.values())}
    if not count:
        return []
    # One row is made as usual, which checks the fields and fills in defaults. The fields of all rows are then set
    # column by column: calling the class takes five times as long, and a capture has thousands of collectives.
    first = kind(**shared, **{name: values[0] for name, values in columns.items()})
    rows = [object.__new__(kind) for _ in range(count)]
    for name in (item.name for item in fields(kind)):  # type: ignore[arg-type]
        values = columns[name] if name in columns else repeat(getattr(first, name))
        deque(map(getattr(kind, name).__set__, rows, values), maxlen=0)
    return rows


def measure_columns(kind: type, source: Any) -> dict[str, Sequence[Any]]:
    """Return by field of a result the values of all rows, for the fields whose declaration says how to measure them.

    Unknown values are ``None``. ``source`` is passed to each measurement, for example the events of a rank.
    """
    measured: dict[str, Sequence[Any]] = {}
    for one in result_columns(kind):
        if one.measure is not None:
            values = one.measure(source)
            # A column that may hold -1 as a value uses another number for unknown values.
            may_be_negative = one.is_instant or one.is_signed
            missing = NO_TIME if may_be_negative else UNKNOWN
            measured[one.name] = none_for_unknown(values, missing) if isinstance(values, np.ndarray) else values
    return measured


def measure_fields(kind: type, source: Any) -> dict[str, Any]:
    """Return by field of a result its value, for the fields whose declaration says how to measure them.

    ``source`` is passed to each measurement.
    """
    return {one.name: one.measure(source) for one in result_columns(kind) if one.measure is not None}


class FrameResult(Brief):
    """A result that notebooks show as a table, with its main columns and times in ms.

    ``to_frame`` returns a pandas table with all columns and times in ns.
    """

    __slots__ = ()
    main_columns: ClassVar[tuple[str, ...]] = ()
    """Names of the columns that notebooks show; all columns if empty."""

    def to_frame(self) -> DataFrame:
        """Return the result as a pandas table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the table that notebooks show."""
        frame = self.to_frame()
        shown = frame[[*(self.main_columns or frame.columns)]].copy()
        for column in [name for name in shown.columns if name.endswith("_ns")]:
            shown[column] = (shown[column].astype("Float64") / 1e6).round(2)
        html: str = shown.rename(columns=lambda name: re.sub("_ns$", "_ms", name)).to_html(na_rep="n/a", index=False)
        return html


def make_frame(kind: type, results: Iterable[Any]) -> DataFrame:
    """Return a table with one row per result and one column per field.

    If the kind declares columns, these are the columns of the table. A nested field becomes ``outer_inner``, ``None``
    becomes ``NA``.
    """
    if result_columns(kind):
        return make_frame_from_rows(frame_names(kind), [frame_row(result) for result in results])
    return make_frame_from_rows([field.name for field in fields(kind)], [asdict(result) for result in results])


def make_frame_from_rows(columns: Iterable[str], rows: list[dict[str, Any]]) -> DataFrame:
    """Return a table like :func:`make_frame` from rows that are dictionaries.

    Columns have pandas' own types, whose integers may be ``NA``. ``columns`` names the columns if there are no rows.
    """
    import pandas as pd

    frame = pd.json_normalize(rows, sep="_") if rows else pd.DataFrame(columns=list(columns))
    typed: DataFrame = frame.convert_dtypes()
    return typed


class RankResult:
    """A result about one rank.

    Attributes:
        qualifier: Name of the file, if ranks of several files have the same process number and no rank number, as with
            containers; else empty.
        of_several: Whether its process uses several devices; each of them is measured as a rank.
    """

    __slots__ = ()
    rank: int | None
    process: int
    device: int | None
    qualifier: str
    of_several: bool

    @property
    def name(self) -> str:
        """The rank's name in tables: its number or, if that is not known, its process and, if needed, its file."""
        which = "a device without a number" if self.device == UNKNOWN else f"device {self.device}"
        device = f"{which} of " if self.of_several else ""
        if self.rank is not None:
            return f"{device}rank {self.rank}"
        return f"{device}process {self.process}" + (f" of {self.qualifier}" if self.qualifier else "")


AnyRankResult = TypeVar("AnyRankResult", bound=RankResult)


def rank_order(number: int | None) -> tuple[bool, int]:
    """Return the key by which all results of a run sort its ranks: by number, those without a number last."""
    return number is None, number or 0


def merge_files(ranks: Iterable[tuple[Path, AnyRankResult]]) -> tuple[AnyRankResult, ...]:
    """Return the ranks of all files of a run in their order (:func:`rank_order`), each with a unique name.

    Where that is needed, the name contains the name of the file or the device. ``ranks`` are pairs of a file and a rank
    in it.
    """
    both = sorted(ranks, key=lambda pair: rank_order(pair[1].rank))
    names = distinct_names(file for file, _ in both)
    found: dict[int, set[Path]] = {}
    for file, rank in both:
        if rank.rank is None:
            found.setdefault(rank.process, set()).add(file)
    # How many devices each process has, and in `found`, in how many files each process number occurs.
    devices = Counter((rank.rank, rank.process, file) for file, rank in both)
    named: list[Any] = [rank for _, rank in both]
    for index, (file, rank) in enumerate(both):
        if rank.rank is None and len(found[rank.process]) > 1:
            named[index] = replace(named[index], qualifier=names[file])
        if devices[rank.rank, rank.process, file] > 1:
            named[index] = replace(named[index], of_several=True)
    return tuple(named)
