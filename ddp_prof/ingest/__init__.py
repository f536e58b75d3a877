"""Readers that turn files into traces, one reader per format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read from a file.

    Attributes:
        comm_patterns: Regular expressions for names of kernels that communicate, besides the known ones.
        with_launches: Whether to read also the launch shapes and registers of kernels, and the names and ends of calls.
            Commands that measure single kernels always set it.
        use_cache: Whether to take a trace from the cache, or to keep it there. A trace from the cache is the same as
            one that was read from its file.
    """

    comm_patterns: tuple[str, ...] = ()
    with_launches: bool = False
    use_cache: bool = True
