"""The figures once more, from the raw tables of small traces, instant by instant and in the plainest words.

Nothing here is shared with the package but the tables of a ``Trace``, their codes and the names of ranges: no
intervals, no arrays, no searches. An instant is a whole number of nanoseconds, a set of instants a Python ``set``.
"""

from tests.oracle.exposure import explain, is_blocking, ready_at
from tests.oracle.ranks import Rank, ranks_of
from tests.oracle.several_ranks import PARTS, budget
from tests.oracle.skew import latest, skew_figures
from tests.oracle.steps import length_figures, rank_figures, runs_ahead, step_figures

__all__ = [
    "PARTS",
    "Rank",
    "budget",
    "explain",
    "is_blocking",
    "latest",
    "length_figures",
    "rank_figures",
    "ranks_of",
    "ready_at",
    "runs_ahead",
    "skew_figures",
    "step_figures",
]
