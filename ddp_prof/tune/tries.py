"""What can be tried, how it is asked for on the command line, and the line to write for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ddp_prof.errors import UsageError, printable, shell_quote

Value = bool | int | float | None
DDP, FSDP = "ddp", "fsdp"
ARGUMENTS: dict[str, tuple[str, type]] = {
    "bucket_cap_mb": (DDP, float),
    "gradient_as_bucket_view": (DDP, bool),
    "static_graph": (DDP, bool),
    "find_unused_parameters": (DDP, bool),
    "broadcast_buffers": (DDP, bool),
    "reshard_after_forward": (FSDP, bool),
}
"""Arguments of torch that change when gradients are communicated, not what they are: whose they are, and their type."""
CALLS = {DDP: "DistributedDataParallel(model, {})", FSDP: "fully_shard(module, {})"}
MOST_TRIES = 50
"""Each try gets a part of the error: with more of them no number of rounds would tell anything."""
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*")
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument of torch, or a variable of the environment, and its value."""

    name: str
    value: Value | str

    @property
    def of(self) -> str:
        """Whose argument it is, ``ddp`` or ``fsdp``; empty for the environment."""
        return ARGUMENTS[self.name][0] if self.name in ARGUMENTS else ""

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}" if type(self.value) is float else f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class Try:
    """Settings that are tried together; without any: today's."""

    settings: tuple[Setting, ...] = ()

    @property
    def label(self) -> str:
        return " + ".join(map(str, self.settings)) or "today"

    def arguments(self, of: Literal["ddp", "fsdp"]) -> dict[str, Value | str]:
        return {one.name: one.value for one in self.settings if one.of == of}

    @property
    def environment(self) -> dict[str, str]:
        return {one.name: str(one.value) for one in self.settings if not one.of}

    @property
    def line(self) -> str:
        """What to write to have it."""
        parts = []
        for of, call in CALLS.items():
            if own := ", ".join(str(one) for one in self.settings if one.of == of):
                parts.append(call.format(own))
        if self.environment:
            parts.append("export " + " ".join(f"{name}={shell_quote(text)}" for name, text in self.environment.items()))
        return " and ".join(parts)


TODAY = Try()


def parse_tries(texts: Sequence[str]) -> tuple[Try, ...]:
    """Parse ``bucket_cap_mb=5,25`` (two tries), ``static_graph`` (true), ``NAME=value``, and ``+`` between settings.

    Raises UsageError for what cannot be tried.
    """
    tries = [
        Try(settings) for text in texts for settings in product(*(_parse_setting(part) for part in text.split("+")))
    ]
    for one in tries:
        if len({setting.name for setting in one.settings}) < len(one.settings):
            raise UsageError(f"--try {one.label}: it sets one name twice")
    found = tuple(dict.fromkeys(tries))
    if len(found) > MOST_TRIES:
        raise UsageError(f"--try: {len(found)} tries are too many to tell apart: give at most {MOST_TRIES}")
    return found


def _parse_setting(text: str) -> list[Setting]:
    name, equals, values = text.strip().partition("=")
    if name in ARGUMENTS:
        return [Setting(name, _parse_value(name, value)) for value in (values.split(",") if equals else ["true"])]
    if _ENVIRONMENT.fullmatch(name) and equals:
        return [Setting(name, value) for value in values.split(",")]
    known = ", ".join(ARGUMENTS)
    raise UsageError(f"--try {printable(text)}: give one of {known}, or a variable of the environment as NAME=value")


def _parse_value(name: str, text: str) -> Value:
    _, kind = ARGUMENTS[name]
    word = text.strip().lower()
    if kind is bool and _WORDS.get(word) in (True, False) and word in _WORDS:
        return _WORDS[word]
    if kind is float:
        try:
            number = float(word)
        except ValueError:
            number = 0.0
        if 0 < number < 1e6:
            return int(number) if number == int(number) else number
    wanted = "true or false" if kind is bool else "a number of MiB above 0"
    raise UsageError(f"--try {name}={printable(text)}: {wanted} is needed")
