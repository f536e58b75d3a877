"""Which files may be the ranks of one run, told by their names alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NAMED_RANK = re.compile(
    r"(?<![A-Za-z])(?:rank|r|proc|procid|task|gpu|worker)[._-]?(\d+)(?:[._-]?of[._-]?\d+)?(?!\d)", re.I
)
_BARE_NUMBER = re.compile(r"(?<=[._-])(\d+)(?=(?:\.[A-Za-z][\w-]*)+$)")
"""``report.3.sqlite``, ``trace_3.json.gz``: a rank only where the numbers of all files are 0, 1, 2 and so on."""


def groups_alike_but_for_a_rank(files: Sequence[Path]) -> list[list[Path]]:
    """Files of one folder whose names differ in a rank number only: ``rank3``, ``_r3of8``, ``report.3.sqlite``.

    Returns:
        Groups of at least two files, each by rank.
    """
    by_name: dict[tuple[Path, str], dict[int, Path]] = {}
    by_number: dict[tuple[Path, str], dict[int, Path]] = {}
    for file in files:
        if hits := list(_NAMED_RANK.finditer(file.name)):
            hit = hits[-1]
            key = file.parent, f"{file.name[: hit.start()]}*{file.name[hit.end() :]}"
            by_name.setdefault(key, {})[int(hit.group(1))] = file
        elif bare := _BARE_NUMBER.search(file.name):
            key = file.parent, f"{file.name[: bare.start()]}*{file.name[bare.end() :]}"
            by_number.setdefault(key, {})[int(bare.group(1))] = file
    groups = [ranks for ranks in by_name.values() if len(ranks) > 1]
    groups += [ranks for ranks in by_number.values() if len(ranks) > 1 and set(ranks) == set(range(len(ranks)))]
    return [[ranks[rank] for rank in sorted(ranks)] for ranks in groups]
