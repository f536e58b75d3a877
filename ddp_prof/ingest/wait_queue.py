"""The order-of-launches rule for one stream that computes: which recorded operation each of its waits is for.

The rule, and what contradicts it, are described in :mod:`.call_order`. Calls are given in their order; a *place* is the
number of a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Ask(NamedTuple):
    """A wait whose record is to be found.

    Attributes:
        not_before: Place of the last wait for its event: a new record of it comes later.
        repeats: The stream's last wait for its event, if the host has not waited for the device since.
    """

    wait: int
    place: int
    not_before: int = 0
    repeats: int | None = None


class Recorded(NamedTuple):
    """The record of an operation's end, and its place."""

    record: int
    place: int


@dataclass
class WaitQueue:
    """What one stream has still to wait for.

    Attributes:
        outstanding: By stream: the operations whose end was recorded, by the places of their launches.
        taken: By stream: the place before which the stream has waited for all that was launched.
        asked: Waits in a row, with no launch on the waiting stream between.
        told: Waits since the last certain point.
        is_lost: Whether something contradicted the rule while operations were outstanding; it tells nothing from then
            on, until nothing is outstanding for certain.
        found: The record of each wait that the rule tells; waits are taken out again if something contradicts it.
    """

    found: dict[int, int]
    outstanding: dict[int, dict[int, Recorded]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)
    told: list[Ask] = field(default_factory=list)
    is_lost: bool = False

    @property
    def is_empty(self) -> bool:
        return not any(self.outstanding.values())

    def holds(self, stream: int, launch: int) -> bool:
        return launch in self.outstanding.get(stream, {})

    def record(self, stream: int, launch: int, record: Recorded) -> None:
        """The end of what was launched on another stream was recorded; only the first record of it counts."""
        if launch >= self.taken.get(stream, 0) and launch not in self.outstanding.get(stream, {}):
            self._answer()
            self.outstanding.setdefault(stream, {})[launch] = record

    def take(self, stream: int, place: int) -> None:
        """The stream waits for what was launched on another one before a place, as is known."""
        self._answer()
        self.taken[stream] = max(place, self.taken.get(stream, 0))
        operations = self.outstanding.get(stream, {})
        self.outstanding[stream] = {launch: record for launch, record in operations.items() if launch > place}
        self._rest()

    def ask(self, ask: Ask, *, follows_launch: bool) -> None:
        """The stream waits for something; ``follows_launch``: it got work since its last wait."""
        if follows_launch:
            self._answer()
        self.asked.append(ask)

    def settle(self) -> None:
        """Nothing is outstanding from now on, as the host has waited for all."""
        self._answer()
        left = [record.place for operations in self.outstanding.values() for record in operations.values()]
        if self.told and left and min(left) < self.told[-1].place:
            self._doubt()
        self.outstanding, self.told, self.is_lost = {}, [], False

    def _answer(self) -> None:
        """Find the records of the waits in a row: all that is outstanding or, if it is of one stream, the oldest."""
        if not self.asked:
            return
        streams = [stream for stream, operations in self.outstanding.items() if operations]
        records = sorted(
            (record.place, stream, launch, record.record)
            for stream in streams
            for launch, record in self.outstanding[stream].items()
        )
        asked, self.asked = self.asked, []
        again: list[Ask] = []
        if len(asked) > len(records):  # the program waits for some once more
            known = {*self.found, *(ask.wait for ask in asked)}
            again = [ask for ask in asked if ask.repeats in known]
            asked = [ask for ask in asked if ask.repeats not in known]
        is_told = len(asked) == len(records) or (len(streams) == 1 and len(asked) < len(records))
        is_early = any(ask.not_before > place for ask, (place, *_) in zip(asked, records, strict=False))
        if self.is_lost or is_early or not is_told:
            self._doubt()
            self.is_lost |= bool(records)
            return
        for ask, (_, stream, launch, record) in zip(asked, records, strict=False):
            self.found[ask.wait] = record
            del self.outstanding[stream][launch]
            self.taken[stream] = max(launch + 1, self.taken.get(stream, 0))
        self.found.update((ask.wait, self.found[ask.repeats]) for ask in again if ask.repeats is not None)
        asked += again
        self.told += asked
        self._rest()

    def _rest(self) -> None:
        if self.is_empty:
            self.told, self.is_lost = [], False

    def _doubt(self) -> None:
        for ask in self.told:
            del self.found[ask.wait]
        self.told = []
