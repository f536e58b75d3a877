"""Frozen results as pandas tables; pandas is imported only when one is asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd


class Framed:
    """A result that is a table, which notebooks show as one."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        html: str = self.to_frame().to_html()
        return html


def frame_of(results: Iterable[Any]) -> pd.DataFrame:
    """A row a result and a column a field; what is nested becomes ``outer_inner``; unknown is ``NA``."""
    return frame_of_rows([asdict(result) for result in results])


def frame_of_rows(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """As :func:`frame_of`, from dictionaries; columns have pandas' own types, in which whole numbers may be unknown."""
    import pandas as pd

    frame: pd.DataFrame = pd.json_normalize(rows, sep="_").convert_dtypes()
    return frame
