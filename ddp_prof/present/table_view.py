"""A table with all that is shown round it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_prof.present.columns import Row
    from ddp_prof.present.json_documents import Document


@dataclass(frozen=True)
class Digest:
    """How a table of very many rows is made short.

    Attributes:
        by: Key of the figure by which rows count; those with the largest come first.
        summed: Keys of the figures of which the sum over all other rows is told.
        rest: Key under which that row says how many rows it stands for.
    """

    by: str
    summed: tuple[str, ...]
    rest: str = "rank"


@dataclass(frozen=True)
class TableView:
    """A table with what belongs to it.

    Attributes:
        title: Lines above the table.
        rows: Rows with the same keys, each of which is the key of a :class:`.columns.Column`.
        notes: Lines below the table.
        document: The JSON document, which carries the notes itself.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    document: Document
    shown: Sequence[Row] = ()
    """Rows to read, where they are worded otherwise than those for programs, which are ``rows``."""
    digest: Digest | None = None
    """What of hundreds of ranks is shown on a terminal."""
    is_text: bool = False
    """Whether the title says it all, and rows are for programs and Markdown only."""

    @property
    def rows_to_read(self) -> Sequence[Row]:
        """The rows of a table or of Markdown."""
        return self.shown or self.rows
