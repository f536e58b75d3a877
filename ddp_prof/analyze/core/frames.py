"""Frozen results as pandas tables; pandas is imported only when one is asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd


def frame_of(results: Iterable[Any]) -> pd.DataFrame:
    """A row a result and a column a field; what is nested becomes ``outer_inner``; unknown is ``NA``."""
    import pandas as pd

    frame: pd.DataFrame = pd.json_normalize([asdict(result) for result in results], sep="_").convert_dtypes()
    return frame
