"""Captures in which nothing happened, or only a part: every command answers, or says in one line why it cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp_prof.cli import COMMANDS
from tests.command_line import run
from tests.examples import IS_NIGHTLY
from tests.nsys_factory import Capture, Kernel, Range, write_capture

MS = 1_000_000
OURS = "ddp_prof"
PROCESS = Range("process|rank=0|world=1|variant=naive|backend=nccl|device=cuda", 0, 90 * MS, 1, domain=OURS)
STEPS = [Range(f"step|index={index}", index * 40 * MS, (index + 1) * 40 * MS, 1, domain=OURS) for index in (0, 1)]
GEMM = Kernel("ampere_sgemm_128x64_nn", 2 * MS, 8 * MS, launch=MS, thread=1)
ALL_REDUCE = Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(void)", 9 * MS, 12 * MS, launch=8 * MS, thread=1, stream=9)
KINETO = {"schemaVersion": 1, "traceEvents": []}

CAPTURES = {
    "nothing": Capture(),
    "one range": Capture(ranges=[Range("warm-up", 0, MS, 1)]),
    "a process without steps": Capture(ranges=[PROCESS]),
    "steps without kernels": Capture(ranges=[PROCESS, *STEPS]),
    "one kernel": Capture(kernels=[GEMM]),
    "one collective": Capture(kernels=[ALL_REDUCE]),
    "kernels before the first step": Capture(
        kernels=[GEMM, ALL_REDUCE],
        ranges=[Range("step|index=0", 60 * MS, 80 * MS, 1, domain=OURS)],
    ),
    "a step of no length": Capture(kernels=[GEMM], ranges=[Range("step|index=0", MS, MS, 1, domain=OURS)]),
    "a kernel of no length": Capture(kernels=[Kernel("ncclKernel", MS, MS, launch=MS, thread=1)], ranges=STEPS),
}
READING = [
    ["info"],
    ["summary"],
    ["overlap"],
    ["overlap", "--steps"],
    ["collectives"],
    ["collectives", "--by", "step"],
    ["collectives", "--by", "bucket"],
    ["skew"],
    ["critical"],
    ["doctor"],
    ["kernels"],
    ["compare"],
    ["compare", "--waterfall"],
    ["whatif"],
    ["check", "--min-overlap", "0.5"],
    ["check", "--max-tail-ms", "1", "--max-exposed-ms", "1"],
]
WRITING = [
    ["timeline", "-o", "page.html"],
    ["report", "-o", "pages"],
    ["export", "-o", "trace.pftrace"],
    ["collectives", "--html", "page.html"],
    ["skew", "--html", "page.html"],
    ["compare", "--html", "page.html"],
]


NAMES = [*CAPTURES, "kineto"]


def written(name: str, folder: Path) -> Path:
    if name == "kineto":
        path = folder / "empty.json"
        path.write_text(json.dumps(KINETO))
        return path
    return write_capture(folder / "empty.sqlite", CAPTURES[name])


def answer(*arguments: str | Path) -> str:
    """What a command prints; where it cannot answer, its one line on stderr, which names the file."""
    result = run(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {0, 1, 3}
    assert "Traceback" not in result.stderr
    if result.exit_code == 1:
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert "empty." in line, "it names the file"
    return result.output


def test_every_command_is_tried() -> None:
    assert {command[0] for command in (*READING, *WRITING)} == set(COMMANDS) - {
        "capture",
        "tune",
        "monitor",
        "results",
        "cache",
        "mcp",
        "completion",
    }


PRINTED = [
    pytest.param(
        command, form, name, id=f"{name}-{' '.join(command)}-{form}", marks=[] if asked else pytest.mark.nightly
    )
    for row, command in enumerate(READING)
    for column, name in enumerate(NAMES)
    for form, asked in (("table", (row + column) % 4 == 0), ("json", (row + column) % 4 == 2))
]
"""Each command on each trace: in the gate each second one, in one form, and in another one for the trace after next."""


WRITTEN = [
    pytest.param(
        command, name, id=f"{name}-{' '.join(command)}", marks=[] if (row + column) % 3 == 0 else pytest.mark.nightly
    )
    for row, command in enumerate(WRITING)
    for column, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("command", "form", "name"), PRINTED)
@pytest.mark.slow
def test_commands_that_print(command: list[str], form: str, name: str, tmp_path: Path) -> None:
    said = answer(*command, "--format", form, written(name, tmp_path))
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", said), "what is unknown is said to be unknown"


@pytest.mark.slow
@pytest.mark.usefixtures("no_browser")
@pytest.mark.parametrize(("command", "name"), WRITTEN)
def test_commands_that_write(command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer(*command, written(name, tmp_path))


@pytest.mark.nightly
@pytest.mark.browser
def test_a_report_of_all_has_their_pictures(tmp_path: Path) -> None:
    """All by one browser, which takes more time to start than to draw."""
    files = [write_capture(tmp_path / f"{number}.empty.sqlite", each) for number, each in enumerate(CAPTURES.values())]
    (tmp_path / "kineto.empty.json").write_text(json.dumps(KINETO))
    answer("report", "--separate", *files, tmp_path / "kineto.empty.json", "-o", tmp_path / "pages")
    of_each = {f"{name}.empty.png" for name in (*range(len(files)), "kineto")}
    pictures = {path.name for path in (tmp_path / "pages").glob("*.png")}
    assert pictures == of_each | {"comparison.png", "step-times.png"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_at_once(name: str, tmp_path: Path) -> None:
    trace = written(name, tmp_path)
    (tmp_path / "more").mkdir()
    other = write_capture(tmp_path / "more" / "empty.sqlite", Capture())
    reading = READING[:-2]
    for command in reading if IS_NIGHTLY else reading[NAMES.index(name) % 4 :: 4]:
        answer(*command, trace, other)
    answer("check", "--max-regression", "0.1", "--baseline", other, trace)
