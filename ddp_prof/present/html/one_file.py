"""The report as one file, to hand in or to mail: its first screen has what the course asks for; it needs no other file.

From top to bottom: conclusions that the figures support; the table of time per step, communication and their ratio;
step and tail over bucket size as expected and as measured; screenshots of a profiler's GUI, if there are any.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_prof import __version__
from ddp_prof.bounded_file import read_at_most
from ddp_prof.present.charts import Chart
from ddp_prof.present.columns import columns_of
from ddp_prof.present.html.page import asset, write_page
from ddp_prof.present.html.report import (
    ReportRun,
    charts_of,
    counts_text,
    facts_of,
    place_values,
    run_values,
    story_of,
    unknown_facts,
)
from ddp_prof.present.tables.compare import compare_rows, how_to_read
from ddp_prof.present.text import plain_name

COLUMNS = (
    "variant", "step_ms", "comm_ms", "comm_of_step_%", "exposed_ms", "blocking_ms", "tail_ms", "overlap_%", "speedup",
    "speedup_±",
)  # fmt: skip
"""Keys of the table's columns. A column without a value for any run is left out."""
MOST_SCREENSHOTS = 2
LARGEST_SCREENSHOT = 8 << 20
"""Largest size in bytes of a picture that is put into the file; mail has a limit."""


@dataclass(frozen=True, slots=True)
class Study:
    """What measurements with several bucket sizes add to the report.

    Attributes:
        figures: Figures by name.
        sentences: Conclusions that the figures support.
        expectation: What the model expected, and where measurements differ from it.
    """

    figures: Mapping[str, Chart]
    sentences: Sequence[str] = ()
    expectation: Sequence[str] = ()


def find_screenshots(folders: Sequence[Path]) -> list[Path]:
    """Return the first two pictures called ``nsys_*.png`` in the first folder that has any.

    Those with ``naive`` in their names come first.
    """
    for folder in folders:
        found = sorted(folder.glob("nsys_*.png"), key=lambda path: ("naive" not in path.stem, path.name))
        if found:
            return found[:MOST_SCREENSHOTS]
    return []


def write_one_file(
    runs: Sequence[ReportRun], path: Path, study: Study | None = None, screenshots: Sequence[Path] = ()
) -> None:
    """Write the report as one file.

    Args:
        runs: The runs, at least one.
        path: The file.
        study: What measurements over bucket sizes add; ``None`` if there are none.
        screenshots: Pictures that are shown at the end.
    """
    rows = compare_rows([run.summary for run in runs], [run.cost for run in runs])
    facts = [facts_of(run) for run in runs]
    # Facts that are the same for all runs are shown once.
    shared = set.intersection(*(set(fact.items()) for fact in facts))
    charts = charts_of(runs, None)
    of_study = study or Study({})
    values = {
        **place_values(runs),
        "story": [*story_of(runs), *([" ".join(of_study.sentences)] if of_study.sentences else [])],
        "counts": counts_text(rows),
        "version": __version__,
        "rows": rows,
        "columns": [
            one for one in columns_of(rows) if one.key in COLUMNS and any(row[one.key] is not None for row in rows)
        ],
        "how_to_read": how_to_read(run.summary for run in runs),
        "study": [*of_study.figures],
        "expectation": of_study.expectation,
        "charts": [*charts],
        "screenshots": [{"source": _as_data(file), "caption": _caption(file)} for file in screenshots],
        "unknown": unknown_facts(runs),
        "shared_facts": [pair for pair in facts[0].items() if pair in shared],
        "runs": [run_values(run, fact, shared, ()) for run, fact in zip(runs, facts, strict=True)],
    }
    write_page(
        path,
        "one_file.html",
        values,
        title=story_of(runs)[0],
        figures={**of_study.figures, **charts},
        css=asset("index.css") + asset("tables.css") + asset("one_file.css"),
        scripts=["html/assets/tables.js"],
    )


def _as_data(file: Path) -> str:
    """Return a picture as a URL that contains it."""
    data = read_at_most(file, LARGEST_SCREENSHOT, "a screenshot", "make it smaller, or move it elsewhere")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _caption(file: Path) -> str:
    return plain_name(f"{file.stem.removeprefix('nsys_').replace('_', ' ')}, in the GUI of Nsight Systems")
