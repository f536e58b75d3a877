"""The grammar of range names: the contract between what is captured and what is read.

A name is followed by fields, all separated by ``|``::

    process|rank=0|world=2|variant=overlap|backend=gloo|device=cpu
    step|index=3
    step|index=0|warmup=1
    step|index=9|unfinished=1
    backward
    optimizer|bucket=3
    all_reduce|bucket=3|bytes=1048576|params=2
    all_reduce|bucket=3|bytes=1048576|params=2|late=1
    reduce_scatter|bucket=3|bytes=1048576|params=2
    all_gather|bucket=3|bytes=1048576|params=2
    broadcast|bucket=0|bytes=64|params=1
    buckets|bytes=1048576,2097152|others=0

An optimizer that steps on one bucket, within backward or synchronize, names the bucket. What came to a bucket after its
gradients were taken has a range with ``late=1``. A step that holds a range ``unfinished=1`` is no whole one, since the
program ended in it. Where DDP's own all-reduces have no ranges, ``buckets`` tells before a backward pass how large each
is, and how many others follow them.

Ranges made by others share the trace with ours, so parsing never fails: a foreign name is a name without fields.
This module needs nothing but Python, so that any program can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DOMAIN = "ddp_prof"
"""The NVTX domain of our ranges."""

OPERATOR_PREFIX = f"{DOMAIN}|"
"""How the names of ranges begin that torch.profiler records as operators."""

PROCESS = "process"
STEP = "step"
FORWARD = "forward"
BACKWARD = "backward"
SYNCHRONIZE = "synchronize"
OPTIMIZER = "optimizer"
ALL_REDUCE = "all_reduce"
REDUCE_SCATTER = "reduce_scatter"
ALL_GATHER = "all_gather"
BROADCAST = "broadcast"
BUCKETS = "buckets"

COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST)
"""Ranges of one collective each; ``bytes`` is the whole: a reduce-scatter's input, an all-gather's output."""

PHASES = (FORWARD, BACKWARD, SYNCHRONIZE, OPTIMIZER)
"""The parts of a step, in the order in which they run."""

Value = int | str


class Range(NamedTuple):
    """A parsed range name: ``name`` and its ``fields``; a number is an ``int``, anything else stays text."""

    name: str
    fields: dict[str, Value]

    def number(self, key: str) -> int | None:
        """The field ``key`` as a whole number, ``None`` where it is absent or no number."""
        value = self.fields.get(key)
        return value if isinstance(value, int) else None

    def text(self, key: str) -> str | None:
        """The field ``key`` as text, ``None`` where it is absent."""
        value = self.fields.get(key)
        return None if value is None else str(value)


def format_range(name: str, **fields: Value) -> str:
    """Write a range name; :func:`parse_range` reads it back.

    Raises:
        ValueError: A part holds ``|``, or a key ``=``, which would not be read back.
    """
    parts = [name, *(f"{key}={value}" for key, value in fields.items())]
    if any("|" in part for part in parts) or any("=" in part for part in (name, *fields)):
        raise ValueError(f"a range name cannot hold '|' within a part nor '=' within a name: {parts}")
    return "|".join(parts)


def parse_range(text: str) -> Range:
    """Read a range name. A name that does not follow the grammar comes back whole, without fields."""
    name, *pairs = text.split("|")
    fields: dict[str, Value] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            return Range(text, {})
        fields[key] = _value(value)
    return Range(name, fields)


def parse_ranges(names: Sequence[str], *kinds: str) -> dict[int, Range]:
    """Our ranges of these kinds among names of any origin, by their position."""
    starts = tuple(f"{kind}|" for kind in kinds)
    return {index: parse_range(name) for index, name in enumerate(names) if name.startswith(starts)}


def _value(text: str) -> Value:
    """A whole number as it would be written by :func:`format_range`, else the text itself."""
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 19 and text == str(int(text))
    return int(text) if is_number else text
