"""The grammar of range names: captured programs write them, and the readers of captures understand them.

A range name is a name and fields, separated by ``|``::

    process|rank=0|world=2|variant=overlap|backend=gloo|device=cpu
    step|index=3
    step|index=0|warmup=1
    step|index=7|late_warmup=1
    step|index=9|unfinished=1
    backward
    optimizer|bucket=3
    all_reduce|bucket=3|bytes=1048576|params=2
    all_reduce|bucket=3|bytes=1048576|params=2|late=1
    reduce_scatter|bucket=3|bytes=1048576|params=2
    all_gather|bucket=3|bytes=1048576|params=2
    broadcast|bucket=0|bytes=64|params=1
    all_gather|bucket=3|bytes=1048576|params=2|group=1 [0, 2]|ranks=2
    buckets|bytes=1048576,2097152|others=0|group=0 [0, 1]|ranks=2
    buckets|bytes=1048576,2097152|others=1|other_bytes=48|group=0 [0, 1]|ranks=2

An optimizer that updates one bucket, within backward or synchronize, names the bucket. ``late=1`` marks the collective
of gradients that arrived after their bucket was sent. ``group`` is the name of the process group, the same on all its
ranks, and ``ranks`` is the number of its ranks. A step that holds a range with ``unfinished=1`` is not complete,
because the program ended in it; one that holds a range with ``late_warmup=1`` is warm-up, which was not known when it
began. If DDP's own all-reduces have no ranges, a range ``buckets`` before a backward pass
holds their sizes in bytes, in ``bytes``, the number of other all-reduces that follow them, in ``others``, and the size
of each of these, in ``other_bytes``.

A trace also holds ranges of other programs, so parsing never fails: a foreign name is a name without fields.
This module needs only Python, so that any program can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DOMAIN = "ddp_prof"
"""The NVTX domain of our ranges."""

OPERATOR_PREFIX = f"{DOMAIN}|"
"""What stands before the names of our ranges if torch.profiler records them as operators."""

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
"""Names of ranges of one collective each. Its ``bytes`` are those of the larger buffer: the input of a reduce-scatter,
the output of an all-gather."""

PHASES = (FORWARD, BACKWARD, SYNCHRONIZE, OPTIMIZER)
"""The parts of a step, in the order in which they run."""

Value = int | str


class Range(NamedTuple):
    """A parsed range name; a field is an ``int`` if it is a whole number, else text."""

    name: str
    fields: dict[str, Value]

    def number(self, key: str) -> int | None:
        """Return the value of a field as a whole number; ``None`` if the field is absent or no number."""
        value = self.fields.get(key)
        return value if isinstance(value, int) else None

    def text(self, key: str) -> str | None:
        """Return the value of a field as text; ``None`` if the field is absent."""
        value = self.fields.get(key)
        return None if value is None else str(value)


def format_range(name: str, **fields: Value) -> str:
    """Return the text of a range name with its fields; :func:`parse_range` reads it back.

    Raises:
        ValueError: A part contains ``|``, or the name or a key contains ``=``.
    """
    parts = [name, *(f"{key}={value}" for key, value in fields.items())]
    if any("|" in part for part in parts) or any("=" in part for part in (name, *fields)):
        raise ValueError(f"a range name cannot hold '|' within a part nor '=' within a name: {parts}")
    return "|".join(parts)


def parse_range(text: str) -> Range:
    """Return the name and the fields of a range name; text that is not of this grammar is a name without fields."""
    name, *pairs = text.split("|")
    fields: dict[str, Value] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            return Range(text, {})
        # A number only if format_range would write it in this way; ``007`` and numbers beyond 64 bits are text.
        digits = value.removeprefix("-")
        is_number = digits.isascii() and digits.isdigit() and len(digits) < 19 and value == str(int(value))
        fields[key] = int(value) if is_number else value
    return Range(name, fields)


def parse_ranges(names: Sequence[str], *kinds: str) -> dict[int, Range]:
    """Return the parsed names that begin with one of ``kinds`` and have fields, by their position in ``names``."""
    starts = tuple(f"{kind}|" for kind in kinds)
    return {index: parse_range(name) for index, name in enumerate(names) if name.startswith(starts)}


def works_on_device(process: Range) -> bool:
    """Return whether a ``process`` range says that its process communicates by NCCL, or computes on a device."""
    return process.text("backend") == "nccl" or (process.text("device") or "cpu") != "cpu"
