"""A figure of a step or a collective is declared in one place; tables, documents, frames, docs and pages follow."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

import pytest

from ddp_prof.analyze.collectives.collective import Collective, Consumer
from ddp_prof.analyze.collectives.skew import RankSkew, StepSkew
from ddp_prof.analyze.critical.critical_path import StepPath
from ddp_prof.analyze.inventory import ProcessInventory
from ddp_prof.analyze.kernels.kernel_times import KernelTime
from ddp_prof.analyze.overlap import RankOverlap
from ddp_prof.analyze.result_bases import make_rows
from ddp_prof.analyze.step_columns import StepLength, StepOverlap
from ddp_prof.analyze.variants.comparison import VariantSummary
from ddp_prof.analyze.variants.waterfall import PartChange, Parts
from ddp_prof.columns import Hidden, hidden_fields, result_columns
from tests.golden import ROOT


@dataclass(frozen=True)
class Addition:
    """A column that a test adds, half of the column ``whole``, and the commands that show it."""

    place: str
    before: str
    lines: str
    command: str
    frame: str
    docs: str
    whole: str
    page: str = ""
    trace: str = "traces/overlap.sqlite"


OF_STEP = Addition(
    place="ddp_prof/analyze/step_columns.py",
    before="    tail_ns: int | None = column(",
    lines="""\
    half_ns: int | None = column(
        "half of the window",
        measure=lambda steps: steps.rank.breakdown.window_ns // 2,
        null="nobody knows",
        stays=ALWAYS,
    )
""",
    command="overlap --steps",
    frame="overlap().to_frame(by_step=True)",
    docs="step",
    whole="window_ns",
    page="kernels",
)
OF_COLLECTIVE = Addition(
    place="ddp_prof/analyze/collectives/collective.py",
    before="    overlapped_ns: int = column(",
    lines="""\
    half_ns: int | None = column(
        "half of its duration",
        measure=lambda of: (of.timings.end_ns - of.timings.start_ns) // 2,
        null="nobody knows",
        stays=ALWAYS,
        on_page=True,
    )
""",
    command="collectives --by collective --wide",
    frame="collectives().to_frame()",
    docs="collective",
    whole="duration_ns",
    page="why",
)
OF_RANK = Addition(
    place="ddp_prof/analyze/overlap.py",
    before="    overlapped_ns: int | None = column(",
    lines="""\
    half_ns: int | None = column(
        "half of its communication",
        measure=lambda of: of.communication.length_ns // 2,
        null="nobody knows",
        stays=ALWAYS,
    )
""",
    command="overlap",
    frame="overlap().to_frame()",
    docs="rank",
    whole="comm_ns",
)
OF_KERNEL = Addition(
    place="ddp_prof/analyze/kernels/kernel_times.py",
    before="    median_ns: float = column(",
    lines="""\
    half_ns: int | None = column(
        "half of its time",
        measure=lambda of: int(of.duration_ns.sum()) // 2,
        null="nobody knows",
        stays=ALWAYS,
    )
""",
    command="kernels --top 0",
    frame="device_use().to_frame()",
    docs="kernel",
    whole="total_ns",
    page="kernels",
    trace="traces/h200/nccl/flat.sqlite",
)
OF_SKEW = Addition(
    place="ddp_prof/analyze/collectives/skew.py",
    before="    worst_lag_ns: int | None = column(",
    lines="""\
    half_ns: int | None = column(
        "half of its exposed wait",
        measure=lambda of: of.exposed_wait_ns // 2,
        null="nobody knows",
        stays=ALWAYS,
    )
""",
    command="skew --wide",
    frame="skew().to_frame()",
    docs="skew",
    whole="exposed_wait_ns",
)
ADDITIONS = {"step": OF_STEP, "collective": OF_COLLECTIVE, "rank": OF_RANK, "kernel": OF_KERNEL, "skew": OF_SKEW}

SHOW_ALL = """
import json, sys
package, report, additions = sys.argv[1:]
sys.path.insert(0, package)
from pathlib import Path
from click.testing import CliRunner
from ddp_prof.cli import main
from ddp_prof.runs import load_runs
sys.path.insert(0, "scripts/dev")
from readme import figures_of

def run(*arguments):
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert not result.exit_code, result.output
    return result.stdout

shown, pages = {}, {}
for name, added in json.loads(additions).items():
    trace, command = added["trace"], added["command"].split()
    if added["page"] and trace not in pages:
        folder = Path(report, name)
        run("report", "-o", str(folder), trace)
        pages[trace] = {page.stem.rpartition("-")[2]: page.read_text() for page in folder.glob("*.html")}
    (loaded,) = load_runs([trace])
    shown[name] = {
        "table": run(*command, trace),
        "csv": run(*command, trace, "--format", "csv"),
        "json": run(*command, trace, "--format", "json"),
        "frame": eval("loaded." + added["frame"]).to_csv(),
        "docs": figures_of(added["docs"]),
        "page": added["page"] and pages[trace][added["page"]],
    }
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def all_shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a package with all of these columns shows of each of them."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "ddp_prof", folder / "ddp_prof")  # with its compiled modules
    for added in ADDITIONS.values():
        place = folder / added.place
        before, after = place.read_text(encoding="utf-8").split(added.before)
        place.write_text(before + added.lines + added.before + after, encoding="utf-8")
    additions = json.dumps({name: asdict(added) for name, added in ADDITIONS.items()})
    command = [sys.executable, "-c", SHOW_ALL, folder, folder / "report", additions]
    variables = {"DDP_PROF_CACHE": "off", "COLUMNS": "400", "PATH": ""}
    ran = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.parametrize("name", ADDITIONS)
@pytest.mark.slow
def test_a_column_that_is_added_in_one_place_is_everywhere(all_shown: dict[str, dict[str, str]], name: str) -> None:
    added, shown = ADDITIONS[name], all_shown[name]
    document = json.loads(shown["json"])
    kinds = {"collective": "collectives", "kernel": "kernels"}
    rows = document[kinds.get(added.docs, "ranks")]
    rows = [step for rank in rows for step in rank["steps"]] if added.docs == "step" else rows
    halves_ns = [row["half_ns"] for row in rows]
    halves_ms = [f"{ns / 1e6:.2f}" for ns in halves_ns]
    assert any(halves_ns)
    assert halves_ns == [row[added.whole] // 2 for row in rows]
    assert [row["half_ms"] for row in csv.DictReader(io.StringIO(shown["csv"]))] == [str(ns / 1e6) for ns in halves_ns]
    assert [row["half_ns"] for row in csv.DictReader(io.StringIO(shown["frame"]))] == list(map(str, halves_ns))
    assert "half" in shown["table"]
    assert "| `half_ns` | ns | half of " in shown["docs"]
    assert "nobody knows |" in shown["docs"]
    if added.docs != "collective":  # a collective's table is long: it is shortened
        assert all(text in shown["table"] for text in halves_ms)
    if added.page:
        words = set(re.sub("<[^>]*>", " ", shown["page"]).split())
        is_on_page = [text in words for text in halves_ms]
        assert "half" in words
        assert any(is_on_page) if added.docs == "collective" else all(is_on_page)  # it shows the collectives of a step


RESULTS = [
    RankOverlap, StepOverlap, StepLength, Collective, Consumer, KernelTime, RankSkew, StepSkew, VariantSummary,
    StepPath, ProcessInventory, Parts, PartChange,
]  # fmt: skip


@pytest.mark.parametrize("kind", RESULTS)
def test_each_figure_has_a_unit_and_a_meaning(kind: type) -> None:
    for one in result_columns(kind):
        assert one.meaning.rstrip(".") == one.meaning != "", one.name
        if one.name.endswith("_ns"):
            assert one.unit == "ns"


def test_what_a_graph_hides_is_null_but_not_the_time_in_which_it_ran() -> None:
    hidden = hidden_fields(StepOverlap, Hidden.GRAPHS)
    assert {"overlapped_ns", "exposed_ns", "idle_ns", "tail_ns", "blocking_ns"} <= hidden.keys()
    assert not {"comm_ns", "window_ns", "kernels"} & hidden.keys()


def test_rows_made_column_by_column_are_those_that_calling_the_class_makes() -> None:
    columns = {"name": ["scale", "add"], "start_ns": [3, 1], "held_by": ["stream", "launch"]}
    made = [Consumer("scale", 7, 3, "stream"), Consumer("add", 7, 1, "launch")]
    assert make_rows(Consumer, columns, stream=7) == made
    assert make_rows(StepLength, {"ns": [5, 6]}) == [StepLength(ns=5), StepLength(ns=6)], "other fields: their defaults"
    assert make_rows(Consumer, {"name": []}, stream=7) == []
    with pytest.raises(TypeError, match="held_by"):
        make_rows(Consumer, {"name": ["scale"], "start_ns": [3]}, stream=7)
    with pytest.raises(ValueError, match="unpack"):
        make_rows(Consumer, columns | {"start_ns": [3]}, stream=7)
