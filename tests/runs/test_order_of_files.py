"""Ranks of a run have one order, whatever that of its files is: names of files need not follow the ranks'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.analyze.collectives.test_straggler import pipeline
from tests.command_line import each_read_once, run

COMMANDS = ("summary", "overlap", "doctor", "collectives", "critical", "skew", "kernels", "whatif", "compare")
OF_FILES = ("trace", "label", "clocks")
"""Keys whose value is, or is measured from, the file that comes first."""


def documents(files: Sequence[Path]) -> dict[str, Any]:
    def without_files(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if key not in OF_FILES}

    with each_read_once():
        found = {name: run(name, *files, "--one-run", "--format", "json").stdout for name in COMMANDS}
    return {name: json.loads(text, object_hook=without_files) for name, text in found.items()}


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_no_figure_and_no_name_of_a_rank_depends_on_the_order_of_files(tmp_path: Path, order: Sequence[int]) -> None:
    """The doctor named rank 1 for the slow stage 2, as it took figures in the order of files for those of ranks."""
    files = pipeline(tmp_path, [2])
    expected = documents(files)
    (finding,) = [one for one in expected["doctor"]["findings"] if one["rule"] == "uneven compute"]
    assert finding["ranks"] == ["rank 2"]
    assert documents([files[rank] for rank in order]) == expected
