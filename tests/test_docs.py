"""What the documentation shows is what happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.cli import COMMANDS
from ddp_prof.train import MODEL_SIZES
from ddp_prof.tune.report import nothing_view, tuning_view
from tests.command_line import run
from tests.conftest import ROOT
from tests.drawing import instants, picture_of
from tests.monitor.records import record, write_log
from tests.tune.simulated import Simulated, tune


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"ddp-prof {command}" in (ROOT / "README.md").read_text()


SHOWING = {
    "docs/commands.md", "docs/doctor.md", "docs/formats.md", "docs/gpus.md", "docs/names.md", "docs/tutorial_ci.md",
    "docs/tutorial_scaling.md", "docs/what_if.md",
}  # fmt: skip


BY_NIGHT = {"docs/gpus.md"}
"""It shows the commands of other pages on many captures."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages", [sorted(SHOWING - BY_NIGHT), pytest.param(sorted(BY_NIGHT), marks=pytest.mark.nightly)]
)
def test_shown_output_is_real(pages: list[str]) -> None:
    """Rebuild with ``python -m cogapp -r -I scripts/dev README.md traces/README.md docs/*.md``."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cogapp",
            "--check",
            "--diff",
            "-I",
            "scripts/dev",
            "README.md",
            "traces/README.md",
            *pages,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_page_with_shown_output_is_checked() -> None:
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md") if "[[[cog" in page.read_text()}
    assert pages == SHOWING


@pytest.mark.nightly  # in every gate without mkdocs: test_links_within_the_repository_lead_somewhere_on_github
@pytest.mark.slow
def test_the_pages_are_built_without_a_dead_link(tmp_path: Path) -> None:
    assert built(ROOT / "mkdocs.yml", tmp_path / "site") == []
    assert (tmp_path / "site" / "metrics.html").is_file()
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert any("kappa" in entry["text"] and entry["location"].startswith("metrics.html") for entry in index["docs"])
    fetched = re.compile(r"""<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)=["']((?:https?:)?//[^"']+)""")
    for page in (tmp_path / "site").rglob("*.html"):
        assert fetched.findall(page.read_text(encoding="utf-8")) == [], page.name


@pytest.mark.slow
def test_dead_links_are_found(tmp_path: Path) -> None:
    links = ["[x](nowhere.md)", "[x](metrics.md#nowhere)", "![x](../figures/nowhere.png)"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n" + " ".join(links) + "\n")
    (tmp_path / "docs" / "metrics.md").write_text("# Metrics\n")
    configuration = re.sub(r"nav:.*", "", (ROOT / "mkdocs.yml").read_text(), flags=re.DOTALL)
    configuration = configuration.replace("scripts/dev/", f"{ROOT}/scripts/dev/")
    (tmp_path / "mkdocs.yml").write_text(configuration)
    complaints = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    for target in ("'nowhere.md'", "'metrics.md#nowhere'", "'figures/nowhere.png'"):
        assert any(target in line for line in complaints), complaints


def built(configuration: Path, site: Path) -> list[str]:
    """Build the pages; the lines of complaint."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", configuration, "-d", site]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert bool(done.returncode) == bool(lines), done.stderr
    return lines


def test_the_commands_and_keys_of_the_skill_are_real() -> None:
    text = (ROOT / "docs/skill.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    documents: dict[str, str] = {}
    for line in block.splitlines():
        _, command, *arguments = line.partition("#")[0].split()
        done = run(command, *(word.replace("TRACE", str(ROOT / "traces/overlap.sqlite")) for word in arguments))
        assert done.exit_code == 0, done.output
        json.loads(done.stdout)
        documents[command] = done.stdout
    rows = re.findall(r"^\| [^|]+\? \| `?(\w+)`? \| (.*) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 9
    for command, keys in rows:
        for key in re.findall(r"`(\w+)`", keys):
            assert all(f'"{key}"' in documents[each] for each in (documents if command == "all" else [command])), key


HERE = ROOT.resolve()
PAGES = sorted(page for folder in ("", "docs", "traces", "figures") for page in (HERE / folder).glob("*.md"))


def sections_of(page: Path) -> set[str]:
    """The names by which links on GitHub lead to the sections of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))
def test_links_within_the_repository_lead_somewhere_on_github(page: Path) -> None:
    """mkdocs names sections by rules of its own, and follows links of the file system."""
    dead = []
    for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text(encoding="utf-8")):
        path, _, section = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if not target.exists() or target.resolve() != target or (section and section not in sections_of(target)):
            dead.append(link)
    assert dead == []


def test_pictures_of_a_gpu_are_told_to_be_of_the_machine_that_made_them() -> None:
    """The captions of an older picture, of an A100, stood below them."""
    captions = [
        caption
        for page in PAGES
        for caption in re.findall(r"!\[([^]]*)\]\([^)]*gpu_\w+\.png\)", page.read_text(encoding="utf-8"))
    ]
    assert captions
    assert [caption for caption in captions if "H200" not in caption] == []


def test_the_options_of_all_commands_are_in_the_help_that_the_page_names() -> None:
    intro = (ROOT / "docs/commands.md").read_text(encoding="utf-8").partition("\n## ")[0]
    options = {
        word for row in re.findall(r"^\| (`-.*?) \|", intro, re.MULTILINE) for word in re.findall(r"`(-+[\w-]+)", row)
    }
    assert {"--format", "--one-run", "-q"} <= options
    named = re.findall(r"`(?:ddp-prof COMMAND )?(--help[\w-]*)`", intro)
    told = " ".join(run("overlap", help_option).stdout for help_option in named)
    assert {option for option in options if not re.search(rf"(^|\s){option}\b", told)} == set()


def test_documents_about_no_trace_have_the_keys_that_the_page_lists(tmp_path: Path) -> None:
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    table = page.partition("These commands read no trace:")[2].partition("\n\nGains of")[0]
    listed = {
        name: re.findall(r"`(\w+)`", keys) for name, keys in re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    }
    log = write_log(tmp_path, [record(1)])

    def about_log(*command: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(run(*command, log, "--format", "json").stdout)
        return document

    tuned = tuning_view(tune(Simulated(), "static_graph", rounds=1)).document
    documents = {
        "`tune`": tuned,
        "`tune`, each of `tries`": tuned["tries"][0],
        "`monitor`": about_log("monitor"),
        "`check` of logs of monitors, a document for each": about_log("check", "--max-exposed-ms", "20"),
        "`compare` of logs of monitors": about_log("compare"),
        "`cache`": json.loads(run("cache", "--format", "json").stdout),
    }
    assert listed == {name: list(document) for name, document in documents.items()}
    nothing = re.findall(r"`(\w+)`", page.partition("no more than ")[2].partition(". The")[0])
    assert nothing == list(nothing_view([]).document)


def test_profile_all_names_the_sizes_of_models_that_there_are() -> None:
    (names,) = re.findall(r"MODEL_SIZE \((.*?)\)", (ROOT / "profile_all.sh").read_text(encoding="utf-8"))
    assert names.split() == list(MODEL_SIZES)


def test_the_command_that_makes_shown_output_reaches_every_page_with_some() -> None:
    (arguments,) = re.findall(r"`python -m cogapp ([^`]*)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    reached = {page for word in arguments.split() if word.endswith(".md") for page in HERE.glob(word)}
    assert {page for page in PAGES if "[[[cog" in page.read_text(encoding="utf-8")} - reached == set()


def test_the_readme_is_a_tour() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


@pytest.mark.parametrize("page", ["README.md", "docs/metrics.md"])
def test_the_drawing_of_overlap_is_true(page: str) -> None:
    pictures = dict(re.findall(r"^(\w+) +([#.]{20})", (ROOT / page).read_text(), flags=re.MULTILINE)[:4])
    compute, communication = (instants(pictures[name]) for name in ("compute", "comm"))
    assert pictures["overlapped"] == picture_of(compute & communication, 20)
    assert pictures["exposed"] == picture_of(communication - compute, 20)


def drawing_of(title: str, column: int) -> dict[str, dict[str, set[int]]]:
    """The first drawing of a section of docs/metrics.md, from a column on: the places of each character by row."""
    section = (ROOT / "docs/metrics.md").read_text().partition(f"\n## {title}\n")[2]
    rows: dict[str, dict[str, set[int]]] = {}
    for line in section.split("```\n")[1].splitlines():
        row = rows[line[:column].strip()] = {}
        for at, sign in enumerate(re.split(r" {3,}(?=\w+ )", line[column:])[0]):
            row.setdefault(sign, set()).add(at)
    return rows


def test_the_drawing_of_the_critical_path_is_true() -> None:
    rows = drawing_of("The critical path", 12)
    path = rows["path"]
    assert path["k"] == rows["stream 7"]["k"]
    assert path["C"] == rows["stream 20"]["C"]
    assert path["l"] == rows["host"]["L"]


def test_the_drawing_of_the_parts_of_a_step_is_true() -> None:
    rows = drawing_of("The parts of a step", 19)
    compute, communication, copies = (rows[name]["#"] for name in ("compute", "communication", "copies"))
    work = compute | communication | copies
    window = set(range(min(work), max(work) + 1))
    assert rows["window"]["|"] | rows["window"]["-"] == window
    assert rows["compute only"]["*"] == compute - communication
    assert rows["overlapped"]["*"] == compute & communication
    assert rows["exposed"]["*"] == communication - compute
    assert copies <= compute
    assert rows["idle"]["*"] == window - work


def test_the_drawing_of_an_idle_stretch_is_true() -> None:
    rows = drawing_of("Why a device was idle", 10)
    idle = rows["device"]["."]
    (launch,) = rows["launch"]["^"]
    cause = rows["cause"]
    assert cause["|"] | cause["-"] == {at for at in idle if at >= launch}
    for phase in "fb":
        assert cause[phase] == {at for at in idle & rows["host"][phase] if at < launch}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_a_page_names_exists(page: str) -> None:
    """Every path in backquotes; ``*`` and the like stand for made files."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    paths = {
        name for name in re.findall(r"`([^`\s]+)`", text) if "/" in name or name.endswith((".py", ".toml", ".yaml"))
    }
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_architecture_names_every_folder_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path for path in (ROOT / "ddp_prof").rglob("*") if path.is_dir() and path.name != "__pycache__"}
    names = {f"`{path.relative_to(ROOT)}/`" for path in folders if any(path.iterdir())}
    assert len(names) > 10
    assert {name for name in names if name not in text} == set()


def test_the_architecture_names_every_module_of_the_ground_floor() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = {path.name for path in (ROOT / "ddp_prof").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`ddp_prof/{name}`" not in text} == set()
