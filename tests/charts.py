"""Charts as Plotly's own objects, which refuse what plotly.js does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import plotly.graph_objects as go

from ddp_prof.present.charts import Chart


def validated(draw: Callable[..., Chart]) -> Callable[..., go.Figure]:
    """The function with its chart as a figure."""

    @wraps(draw)
    def drawn(*args: Any, **options: Any) -> go.Figure:
        return go.Figure(draw(*args, **options))

    return drawn
