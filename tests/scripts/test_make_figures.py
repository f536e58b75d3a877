"""scripts/dev/make_figures.sh: which figures it makes of what is there, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Checkout

SCRIPT = "scripts/dev/make_figures.sh"
SCREENSHOT = 'echo "screenshot $* by $NSYS_UI" >>"$CALLS"; exit "${SHOT:-0}"'


@pytest.fixture
def machine(checkout: Checkout) -> Checkout:
    """A machine with ddp-prof, the GUI and the captures that pictures are made of."""
    checkout.program("ddp-prof", 'echo "$*" >>"$CALLS"; exit "${DDP_PROF:-0}"', checkout.root / ".venv" / "bin")
    checkout.program("python", 'echo "python $*" >>"$CALLS"', checkout.root / ".venv" / "bin")
    checkout.program("nsys_ui.sh", "echo /the/gui; exit ${GUI:-0}", checkout.root / "scripts/dev")
    checkout.program("nsys_screenshot.sh", SCREENSHOT, checkout.root / "scripts/dev")
    checkout.program("chromium", "exit 0")
    traces = checkout.root / "traces"
    (traces / "h200/gloo").mkdir(parents=True)
    for name in (
        "h200/gloo/bucketed_10mb.rank0.json.gz",
        "h200/gloo/bucketed_10mb.rank1.json.gz",
        "naive.sqlite",
        "bucketed_10mb.sqlite",
        "overlap.sqlite",
        "naive.nsys-rep",
        "overlap.nsys-rep",
        "results.db",
    ):
        (traces / name).touch()
    return checkout


def expected(root: Path) -> list[str]:
    traces, figures = root / "traces", root / "figures"
    gpu = f"{traces}/h200/gloo/bucketed_10mb.rank0.json.gz {traces}/h200/gloo/bucketed_10mb.rank1.json.gz"
    pair = f"{traces}/naive.sqlite {traces}/bucketed_10mb.sqlite"
    return [
        f"report {traces} -o {figures}",
        f"timeline {pair} -o {figures}/naive_and_bucketed.html --png {figures}/naive_and_bucketed.png",
        f"collectives {traces}/bucketed_10mb.sqlite --by bucket --png {figures}/collectives.png",
        f"compare {traces} --waterfall --png {figures}/waterfall.png",
        f"collectives {gpu} --by step --png {figures}/gpu_collectives.png",
        f"timeline {gpu} -o {figures}/gpu_timeline.html --png {figures}/gpu_timeline.png",
        f"results {traces}/results.db -o {figures}",
        f"timeline {traces}/naive.sqlite -o {figures}/page_naive.html",
        f"timeline {traces}/overlap.sqlite -o {figures}/page_overlap.html",
        f"timeline {traces}/naive.sqlite {traces}/overlap.sqlite -o {figures}/page_naive_and_overlap.html",
        f"python {root}/scripts/dev/make_animation.py {traces}/overlap.sqlite {figures}/animation.png",
        f"screenshot {traces}/naive.nsys-rep -o {figures}/nsys_naive.png by /the/gui",
        f"screenshot {traces}/overlap.nsys-rep -o {figures}/nsys_overlap.png by /the/gui",
    ]


def test_all_figures_are_made(machine: Checkout) -> None:
    done = machine.run(SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls == expected(machine.root)


@pytest.mark.parametrize("browser", ["google-chrome", "chromium-headless-shell"])
def test_any_chromium_takes_the_screenshots_of_pages(machine: Checkout, tmp_path: Path, browser: str) -> None:
    (machine.programs / "chromium").rename(machine.programs / browser)
    machine.path = str(tmp_path / "system")
    (tmp_path / "system").mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("chrom", "google-chrome")):
            (tmp_path / "system" / program.name).symlink_to(program)
    done = machine.run(SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls == expected(machine.root)


def test_where_the_gui_does_not_run_its_screenshots_are_left_out(machine: Checkout) -> None:
    done = machine.run(SCRIPT, GUI="1")
    assert done.returncode == 0
    assert "screenshots are left out, the GUI does not run here" in done.stderr
    assert machine.calls == expected(machine.root)[:-2]


def test_a_screenshot_that_fails_is_left_out(machine: Checkout) -> None:
    done = machine.run(SCRIPT, SHOT="1")
    assert done.returncode == 0
    assert "the screenshot of naive is left out" in done.stderr
    assert machine.calls == expected(machine.root)


def test_screenshots_can_be_declined(machine: Checkout) -> None:
    assert machine.run(SCRIPT, SCREENSHOTS="0").returncode == 0
    assert machine.calls == expected(machine.root)[:-2]


def test_what_takes_a_capture_that_is_not_there_is_left_out(machine: Checkout) -> None:
    for name in ("bucketed_10mb.sqlite", "overlap.nsys-rep"):
        (machine.root / "traces" / name).unlink()
    done = machine.run(SCRIPT)
    assert done.returncode == 0
    assert "no picture of naive beside bucketed" in done.stderr
    assert "no screenshot of overlap" in done.stderr
    everything = expected(machine.root)
    assert machine.calls == [everything[0], *everything[4:12]], (
        "the report, the GPU, the suite, the pages, the screenshot of naive"
    )


def test_a_report_that_fails_is_a_failure_and_the_rest_is_made(machine: Checkout) -> None:
    done = machine.run(SCRIPT, DDP_PROF="1")
    assert done.returncode == 1
    assert "not all could be made" in done.stderr
    assert machine.calls == expected(machine.root)


def test_other_folders(machine: Checkout, tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir()
    done = machine.run(SCRIPT, TRACES_DIR=str(tmp_path / "captures"), FIGURES_DIR=str(tmp_path / "drawn"))
    assert done.returncode == 0
    assert machine.calls == [f"report {tmp_path}/captures -o {tmp_path}/drawn"]
