"""Readers that turn files into traces, one per format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read from a file.

    Attributes:
        comm_patterns: Regular expressions for names of kernels that communicate, besides the known ones.
        with_launches: Also read shapes and registers of kernels, names and ends of calls. They are always read when
            single kernels are measured.
        use_cache: Take a trace from the cache, or keep it there; it is the same as if it was read.
    """

    comm_patterns: tuple[str, ...] = ()
    with_launches: bool = False
    use_cache: bool = True
