"""Measures how much of the communication of a data-parallel training step overlaps with computation.

::

    import ddp_prof as dp

    (run,) = dp.load_runs("traces/overlap.sqlite")
    run.overlap().to_frame()

Names are imported when they are first used, so that importing the package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_prof.errors import DdpProfError, TraceError
    from ddp_prof.runs import load_runs
    from ddp_prof.runs.report import LoadOptions
    from ddp_prof.runs.run import Run, compare_steps
    from ddp_prof.runs.workers import Workers

__version__ = "0.1.0"
__all__ = ["DdpProfError", "LoadOptions", "Run", "TraceError", "Workers", "__version__", "compare_steps", "load_runs"]

# The module of each public name.
_HOMES = {
    "DdpProfError": "ddp_prof.errors",
    "LoadOptions": "ddp_prof.runs.report",
    "Run": "ddp_prof.runs.run",
    "TraceError": "ddp_prof.errors",
    "Workers": "ddp_prof.runs.workers",
    "compare_steps": "ddp_prof.runs.run",
    "load_runs": "ddp_prof.runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name; Python calls this for names that the module does not have."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
