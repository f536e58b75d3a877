"""Defines what can be tried, how ``--try`` requests it, and which line a user then writes into the program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from ddp_prof.errors import UsageError, printable, shell_quote

Value = bool | int | float | str | None
DDP, FSDP = "ddp", "fsdp"
CALLS = {DDP: "DistributedDataParallel(model, {})", FSDP: "fully_shard(module, {})"}
"""The calls of torch that take arguments, as a user writes them; ``{}`` stands for the arguments."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What can be set in a program by a name of :data:`ARGUMENTS`.

    Attributes:
        of: ``ddp`` or ``fsdp``: what it belongs to.
        kind: Type of its value: ``bool``; ``float``, a number of MiB; ``int``, a number of modules; ``str``, a key of
            ``lines``.
        lines: What a user writes, by value; the key ``""`` is for every number. Empty if it is an argument of the call
            in :data:`CALLS`.
        changes_numerics: Whether the gradients that are sent differ, by design, from those that were computed.
    """

    of: str
    kind: type
    lines: Mapping[str, str] = field(default_factory=dict)
    changes_numerics: bool = False


_HOOK = "model.register_comm_hook(None, default_hooks.{}_hook)"
_PREFETCH = "module.set_modules_to_{}_prefetch([the {} modules that run next in {}]) for each module of fully_shard"
ARGUMENTS = {
    "bucket_cap_mb": Argument(DDP, float),
    "gradient_as_bucket_view": Argument(DDP, bool),
    "static_graph": Argument(DDP, bool),
    "find_unused_parameters": Argument(DDP, bool),
    "broadcast_buffers": Argument(DDP, bool),
    "reshard_after_forward": Argument(FSDP, bool),
    "forward_prefetch": Argument(FSDP, int, {"": _PREFETCH.format("forward", "{}", "forward")}),
    "backward_prefetch": Argument(FSDP, int, {"": _PREFETCH.format("backward", "{}", "backward")}),
    "comm_hook": Argument(
        DDP,
        str,
        {
            "fp16_compress": _HOOK.format("fp16_compress"),
            "bf16_compress": _HOOK.format("bf16_compress"),
            "powerSGD": "model.register_comm_hook(PowerSGDState(None), powerSGD_hook)",
        },
        changes_numerics=True,
    ),
}
"""What can be tried by name. One with ``changes_numerics`` changes the gradients, all others only how they are sent."""
MOST_TRIES = 50
"""The most tries. Each gets a part of the error: with more tries no number of rounds would tell anything."""
MOST_MODULES = 1000
_ALONE = {bool: "true", int: "1", float: "", str: ""}
"""The value of a name that is given without a value, by its kind; the empty text is refused."""
_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*")
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument of torch or an environment variable, and its value."""

    name: str
    value: Value

    @property
    def of(self) -> str:
        """``ddp`` or ``fsdp`` for an argument of these; empty for an environment variable."""
        return ARGUMENTS[self.name].of if self.name in ARGUMENTS else ""

    @property
    def line(self) -> str:
        """The statement that a user adds to the program for this setting.

        It is empty for an argument of a call in :data:`CALLS`, and for a variable of the environment.
        """
        # By the value, else by the key for every number, whose line has {} for the number.
        lines = ARGUMENTS[self.name].lines if self.of else {}
        return lines.get(str(self.value), lines.get("", "")).format(self.value)

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class Try:
    """Settings that are tried together; no settings at all are today's."""

    settings: tuple[Setting, ...] = ()

    @property
    def label(self) -> str:
        return " + ".join(map(str, self.settings)) or "today"

    @property
    def changes_numerics(self) -> bool:
        """Whether the gradients that are sent differ, by design, from those that were computed."""
        return any(one.of and ARGUMENTS[one.name].changes_numerics for one in self.settings)

    def arguments(self, of: Literal["ddp", "fsdp"]) -> dict[str, Value]:
        """Return the settings of DDP or FSDP2 by name."""
        return {one.name: one.value for one in self.settings if one.of == of}

    @property
    def fits_in_process(self) -> bool:
        """Whether it can be set between two steps: if all settings are arguments of ``DistributedDataParallel``."""
        return all(one.of == DDP and not one.line for one in self.settings)

    @property
    def environment(self) -> dict[str, str]:
        return {one.name: str(one.value) for one in self.settings if not one.of}

    @property
    def line(self) -> str:
        """The call, the statement or the shell command by which a user has these settings, on one line."""
        parts = []
        for of, call in CALLS.items():
            if own := ", ".join(str(one) for one in self.settings if one.of == of and not one.line):
                parts.append(call.format(own))
        parts += [one.line for one in self.settings if one.line]
        if self.environment:
            parts.append("export " + " ".join(f"{name}={shell_quote(text)}" for name, text in self.environment.items()))
        return " and ".join(parts)


TODAY = Try()


def parse_tries(texts: Sequence[str]) -> tuple[Try, ...]:
    """Return the tries that the values of ``--try`` request, without duplicates.

    A text is ``bucket_cap_mb=5,25`` (two tries), ``static_graph`` (true) or ``NAME=value`` (an environment variable);
    ``+`` joins settings that are tried together. Raises UsageError for what cannot be tried.
    """
    tries = [
        Try(settings) for text in texts for settings in product(*(_parse_setting(part) for part in text.split("+")))
    ]
    for one in tries:
        if len({setting.name for setting in one.settings}) < len(one.settings):
            raise UsageError(f"--try {one.label}: it sets one name twice")
    found = tuple({frozenset(one.settings): one for one in tries}.values())
    if len(found) > MOST_TRIES:
        raise UsageError(f"--try: {len(found)} tries are too many to tell apart: give at most {MOST_TRIES}")
    return found


def _parse_setting(text: str) -> list[Setting]:
    """Return a setting for each value that ``NAME=value,value`` names; raise UsageError for an unknown name."""
    name, equals, values = text.strip().partition("=")
    if name in ARGUMENTS:
        return [
            Setting(name, _parse_value(name, value))
            for value in (values.split(",") if equals else [_ALONE[ARGUMENTS[name].kind]])
        ]
    if _ENVIRONMENT.fullmatch(name) and equals:
        return [Setting(name, value) for value in values.split(",")]
    known = ", ".join(ARGUMENTS)
    raise UsageError(f"--try {printable(text)}: give one of {known}, or a variable of the environment as NAME=value")


def _parse_value(name: str, text: str) -> Value:
    """Return a value in the type of its argument; raise UsageError if it is none."""
    argument = ARGUMENTS[name]
    word = text.strip().lower()
    if argument.kind is bool and word in _WORDS:
        return _WORDS[word]
    if argument.kind is float:
        try:
            number = float(word)
        except ValueError:
            number = 0.0
        if 0 < number < 1e6:
            return int(number) if number == int(number) else number  # a whole number is written without a point
    if argument.kind is int and word.isdecimal() and word.isascii() and 0 < int(word) < MOST_MODULES:
        return int(word)
    names = {one.lower(): one for one in argument.lines}
    if argument.kind is str and word in names:
        return names[word]
    wanted = {
        bool: "true or false",
        float: "a number of MiB above 0",
        int: "a number of modules above 0",
        str: "one of " + ", ".join(names.values()),
    }
    raise UsageError(f"--try {name}={printable(text)}: {wanted[argument.kind]} is needed")
