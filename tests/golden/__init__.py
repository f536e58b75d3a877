"""Documents of the committed captures, kept so that a change of structure cannot change a number unnoticed.

``python -m tests.golden`` writes them anew; a commit that changes one says which numbers change and why.
"""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from ddp_prof.cli import main

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
CAPTURES = [f"traces/{name}.sqlite" for name in ("naive", "flat", "overlap", "bucketed_1mb", "bucketed_10mb",
                                                 "bucketed_100mb", "torch")]  # fmt: skip

DOCUMENTS = {
    "overlap.json": ["overlap", "traces/overlap.sqlite", "--format", "json"],
    "overlap_steps.csv": ["overlap", "--steps", *CAPTURES, "--format", "csv"],
    "overlap_ranks.csv": ["overlap", *CAPTURES, "--format", "csv"],
    "collectives_by_bucket.csv": ["collectives", "--by", "bucket", *CAPTURES, "--format", "csv"],
    "collectives.csv": ["collectives", "traces/bucketed_10mb.sqlite", "--format", "csv"],
    "skew.csv": ["skew", *CAPTURES, "--format", "csv"],
    "compare.csv": ["compare", *CAPTURES, "--format", "csv"],
    "waterfall.csv": ["compare", "--waterfall", *CAPTURES, "--format", "csv"],
    "info.csv": ["info", *CAPTURES, "--format", "csv"],
    "results.csv": ["results", "traces/results.db", "--format", "csv"],
}
"""File of each document, and the command that prints it in the checkout's root."""


def document(arguments: list[str]) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def rounded(text: str) -> str:
    """Without the last digits of fractions, which differ between processors."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number.group()):.12g}", text)
