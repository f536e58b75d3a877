"""Files to traces: one reader per format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What is read of a file.

    Attributes:
        comm_patterns: Regular expressions for kernels that communicate, beside those that are known.
        with_launches: Read more of launches: kernels' shapes and registers, names and ends of calls, which timelines
            show.
        with_shapes: Read shapes alone. What is measured of each kernel is measured with them, whatever is said here.
    """

    comm_patterns: tuple[str, ...] = ()
    with_launches: bool = False
    with_shapes: bool = False
