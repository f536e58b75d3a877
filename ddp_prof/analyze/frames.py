"""From columns to frozen results, and from these to pandas tables; pandas is imported only when one is asked for."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ddp_prof.table import UNKNOWN, Brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pandas as pd

    from ddp_prof.trace import Ints


Row = TypeVar("Row")


def known(column: Ints, missing: int = UNKNOWN) -> list[Any]:
    """The column's values, ``None`` for what stands for nothing known: ``NO_TIME`` in a column of times."""
    return [None if value == missing else value for value in column.tolist()]


def rows_of(kind: Callable[..., Row], columns: Mapping[str, Iterable[Any]], **shared: Any) -> list[Row]:
    """A result a row.

    Args:
        kind: Makes a result of its fields.
        columns: The values of all rows, by field.
        shared: Fields that all rows have alike.
    """
    return [kind(**shared, **dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


class Framed(Brief):
    """A result that is a table, which notebooks show as one."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        html: str = self.to_frame().to_html()
        return html


def frame_of(kind: type, results: Iterable[Any]) -> pd.DataFrame:
    """A row a result of this kind, a column a field; what is nested becomes ``outer_inner``; unknown is ``NA``."""
    return frame_of_rows([field.name for field in fields(kind)], [asdict(result) for result in results])


def frame_of_rows(columns: Iterable[str], rows: list[dict[str, Any]]) -> pd.DataFrame:
    """As :func:`frame_of`, from dictionaries; columns have pandas' own types, in which whole numbers may be unknown.

    Args:
        columns: Those of a table without rows.
        rows: The rows.
    """
    import pandas as pd

    frame = pd.json_normalize(rows, sep="_") if rows else pd.DataFrame(columns=list(columns))
    typed: pd.DataFrame = frame.convert_dtypes()
    return typed
