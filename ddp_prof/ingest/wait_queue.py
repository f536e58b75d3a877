"""Applies the order-of-launches rule to one stream that computes: finds the operation that each of its waits is for.

:mod:`.call_order` describes the rule and what contradicts it. The methods are called in the order of the program's
calls. A *place* is the number of a call; a *record* is a call that records the end of an operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Ask(NamedTuple):
    """A wait whose record is to be found. Waits and records are rows of the trace's synchronizations.

    Attributes:
        wait: The wait.
        place: Place of the wait.
        not_before: Place of the last earlier wait for the same event; the record of this wait must come after it.
        repeats: The stream's last earlier wait for the same event, if the host has not waited for the device since.
    """

    wait: int
    place: int
    not_before: int = 0
    repeats: int | None = None


class Recorded(NamedTuple):
    """The record of an operation's end (a row of the synchronizations), and its place."""

    record: int
    place: int


@dataclass
class WaitQueue:
    """The operations of other streams that one stream, the *waiting stream*, has still to wait for.

    Attributes:
        found: The record of each wait that the rule has found. If something contradicts the rule, waits are removed.
        outstanding: By stream: its operations that are recorded and not waited for, by the places of their launches.
        taken: By stream: the place before which all its launched operations have been waited for.
        asked: Waits in a row whose records are still to be found, with no launch on the waiting stream in between.
        told: Waits in ``found`` since the last point at which nothing was outstanding.
        is_lost: Whether something contradicted the rule while operations were outstanding. Then the rule is not applied
            until nothing is outstanding for certain.
    """

    found: dict[int, int]
    outstanding: dict[int, dict[int, Recorded]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)
    told: list[Ask] = field(default_factory=list)
    is_lost: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is outstanding."""
        return not any(self.outstanding.values())

    def holds(self, stream: int, launch: int) -> bool:
        """Return whether the operation that was launched on ``stream`` at the place ``launch`` is outstanding."""
        return launch in self.outstanding.get(stream, {})

    def record(self, stream: int, launch: int, record: Recorded) -> None:
        """Note the record of an operation of another stream; only the first record of an operation counts.

        Args:
            stream: The other stream.
            launch: Place of the operation's launch.
            record: The record.
        """
        if launch >= self.taken.get(stream, 0) and launch not in self.outstanding.get(stream, {}):
            self._answer()
            self.outstanding.setdefault(stream, {})[launch] = record

    def take(self, stream: int, place: int) -> None:
        """Note a wait that is known to be for all operations launched on ``stream`` before ``place``."""
        self._answer()
        self.taken[stream] = max(place, self.taken.get(stream, 0))
        operations = self.outstanding.get(stream, {})
        self.outstanding[stream] = {launch: record for launch, record in operations.items() if launch > place}
        self._rest()

    def ask(self, ask: Ask, *, follows_launch: bool) -> None:
        """Note a wait whose record is to be found.

        Args:
            ask: The wait.
            follows_launch: Whether the waiting stream got work since its last wait.
        """
        if follows_launch:
            self._answer()
        self.asked.append(ask)

    def settle(self) -> None:
        """Note that nothing is outstanding any more, because the host has waited for the device or the trace ends."""
        self._answer()
        left = [record.place for operations in self.outstanding.values() for record in operations.values()]
        if self.told and left and min(left) < self.told[-1].place:
            self._doubt()
        self.outstanding, self.told, self.is_lost = {}, [], False

    def _answer(self) -> None:
        """Find the records of the waits in ``asked``, and empty it.

        The waits are for all outstanding operations, or if these are of one stream, for the oldest ones.
        """
        if not self.asked:
            return
        # All outstanding operations, in the order of their records.
        streams = [stream for stream, operations in self.outstanding.items() if operations]
        records = sorted(
            (record.place, stream, launch, record.record)
            for stream in streams
            for launch, record in self.outstanding[stream].items()
        )
        asked, self.asked = self.asked, []
        again: list[Ask] = []
        if len(asked) > len(records):  # some waits repeat earlier waits for the same event: set these apart
            known = {*self.found, *(ask.wait for ask in asked)}
            again = [ask for ask in asked if ask.repeats in known]
            asked = [ask for ask in asked if ask.repeats not in known]
        # The rule tells the records only if there are as many waits, or fewer waits and a single stream.
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
        """If nothing is outstanding, this point is certain: what was found before is not doubted any more."""
        if self.is_empty:
            self.told, self.is_lost = [], False

    def _doubt(self) -> None:
        """Make the waits that were found since the last certain point unknown again."""
        for ask in self.told:
            del self.found[ask.wait]
        self.told = []
