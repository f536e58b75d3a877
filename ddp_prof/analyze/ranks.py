"""What a rank is called, and by what ranks are told apart whose number is not known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ranked:
    """Of one rank.

    Attributes:
        rank: Its number in the job; ``None`` where the trace does not tell.
        process: Process id.
        device: CUDA ordinal; ``None`` on a CPU.
        qualifier: The file, where ranks of several files have one process number and no rank number, as in containers.
        of_several: Whether its process uses other devices, too, each of which is measured as a rank.
    """

    __slots__ = ()
    rank: int | None
    process: int
    device: int | None
    qualifier: str
    of_several: bool

    @property
    def name(self) -> str:
        """What a person calls it: by its process, and if need be its file, where its number is not known."""
        device = f"device {self.device} of " if self.of_several else ""
        if self.rank is not None:
            return f"{device}rank {self.rank}"
        return f"{device}process {self.process}" + (f" of {self.qualifier}" if self.qualifier else "")


AnyRanked = TypeVar("AnyRanked", bound=Ranked)


def told_apart(ranks: Sequence[AnyRanked], files: Sequence[str]) -> tuple[AnyRanked, ...]:
    """The ranks, with the name of its file, or its device, where it takes that to tell one from another.

    Args:
        ranks: Frozen dataclasses.
        files: The name of the file of each.
    """
    found: dict[int, set[str]] = {}
    for rank, file in zip(ranks, files, strict=True):
        if rank.rank is None:
            found.setdefault(rank.process, set()).add(file)
    devices = Counter((rank.rank, rank.process, file) for rank, file in zip(ranks, files, strict=True))
    named: list[Any] = list(ranks)
    for index, (rank, file) in enumerate(zip(ranks, files, strict=True)):
        if rank.rank is None and len(found[rank.process]) > 1:
            named[index] = replace(named[index], qualifier=file)
        if devices[rank.rank, rank.process, file] > 1:
            named[index] = replace(named[index], of_several=True)
    return tuple(named)
