"""What each command prints fits the terminal; what is piped stays whole."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_prof.present import table
from tests.command_line import run, said_on
from tests.conftest import ROOT
from tests.examples import IS_NIGHTLY
from tests.ingest.test_nsys_export import known_truth
from tests.night import of_which_the_gate_keeps
from tests.nsys_factory import write_capture

UNET = ROOT.parent / "shared" / "traces" / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"

TRACES = sorted(path.name for path in (ROOT / "traces").glob("*.sqlite"))
OF_ONE = (
    "overlap", "overlap --steps", "collectives", "collectives --by step", "collectives --by bucket", "skew", "info",
    "kernels", "check --min-overlap 95% --max-tail-ms 1",
)  # fmt: skip
OF_ALL = ("compare", "compare --waterfall", "check --min-overlap 50% --baseline traces/naive.sqlite")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(arguments: list[str], width: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(table, "terminal_width", lambda: width)
    result = run(*arguments)
    assert result.exit_code in (0, 3), result.output
    return result.stdout


@pytest.mark.parametrize("trace", of_which_the_gate_keeps(["naive.sqlite"], TRACES))
@pytest.mark.parametrize("command", OF_ONE)
def test_no_line_is_longer(command: str, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 120):
        said = printed([*command.split(), f"traces/{trace}"], width, monkeypatch)
        assert max(map(len, said.splitlines())) <= width
        assert "…" not in said, "nothing is cut"


@pytest.mark.parametrize("command", [*OF_ONE, "compare"])
def test_no_line_of_a_gpu_capture_is_longer(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have names of templates, longer than any line. A path, which is copied, has a line of its own."""
    capture = known_truth()
    for kernel in capture.kernels:
        kernel.name += f"<{', '.join(['at::native::Functor<float, (int)4>'] * 9)}>(void)"
    monkeypatch.chdir(tmp_path)  # the path is the same wherever temporary files lie, and has no blanks
    folder = Path("folder_with_a_name_that_is_rather_long" * 3)
    folder.mkdir()
    trace = write_capture(folder / "a_name_that_is_rather_long_for_a_file.sqlite", capture)
    for width in (80, 120):
        said = printed([*command.split(), str(trace)], width, monkeypatch)
        assert max(len(line) for line in said.splitlines() if line != str(trace)) <= width


@pytest.mark.parametrize("command", [*OF_ALL, "results"])
def test_no_line_of_several_runs_is_longer(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [f"traces/{name}" for name in (TRACES if IS_NIGHTLY else ["naive.sqlite", "torch.sqlite"])]
    traces = traces if command in OF_ALL else []
    for width in (80, 120) if IS_NIGHTLY else (80,):
        said = printed([*command.split(), *traces], width, monkeypatch)
        assert max(map(len, said.splitlines())) <= width
        assert "…" not in said, "nothing is cut"


def test_all_columns_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = printed(["overlap", "traces/overlap.sqlite"], None, monkeypatch)
    assert "process" in piped
    assert "process" not in printed(["overlap", "traces/overlap.sqlite"], 80, monkeypatch).partition("note:")[0]
    assert printed(["overlap", "--wide", "traces/overlap.sqlite"], 80, monkeypatch) == piped


def test_columns_are_chosen_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["overlap", "traces/overlap.sqlite", "--columns", "overlap %, rank", "--format", "csv"]
    assert printed(asked, None, monkeypatch).splitlines()[0] == "overlap_%,rank"
    refused = run("overlap", "traces/overlap.sqlite", "--columns", "nothing")
    assert (refused.exit_code, refused.output.startswith("Error: no column 'nothing'")) == (2, True)


def test_a_real_terminal_is_asked_for_its_width() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from ddp_prof.cli import main; main()", "overlap", "traces/overlap.sqlite"]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment):
        os.close(theirs)
        said = said_on(ours)
    lines = said.decode().replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert "67.5" in "".join(lines), "the share of rank 0"


def test_collectives_are_shown_by_bucket_and_all_of_them_on_request() -> None:
    trace = str(ROOT / "traces" / "bucketed_10mb.sqlite")
    assert "one row per bucket; all 80 collectives: --by collective" in run("collectives", trace).stdout
    lines = [run("collectives", *how, "--format", "csv", trace).stdout.splitlines() for how in ((), ("--by", "bucket"))]
    assert [len(found) - 1 for found in lines] == [80, 8]
    assert len(run("collectives", "--by", "collective", trace).stdout.splitlines()) > 80


@pytest.mark.skipif(not UNET.is_file(), reason="the shared captures are not here")
def test_without_buckets_the_worst_collectives_are_shown() -> None:
    out = run("collectives", UNET).stdout
    assert "the 10 with most exposed time; all 472 collectives: --by collective" in out
    assert sum("process 79184" in line for line in out.splitlines()) == 10


def test_a_pipe_has_the_width_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ROOT / "traces" / "overlap.sqlite"
    whole = max(map(len, run("overlap", "--steps", trace).stdout.splitlines()))
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, run("overlap", "--steps", trace).stdout.splitlines())) <= 90 < whole
