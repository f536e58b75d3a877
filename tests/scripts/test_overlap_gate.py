"""The GitHub Action round ``ddp-prof check``: what it tells where, with a stand-in for gh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

ACTION = ROOT / ".github/actions/overlap-gate"
GH = r"""#!/bin/bash
printf '%s\n' "$*" >>"$CALLS"
[ -z "${DENIED:-}" ] || exit 1
case "$*" in
  *--jq*) echo "${LAST:-}" ;;
  *body=@*) file="${*: -1}"; cp "${file#body=@}" "$BODY" ;;
esac
"""


# Answers as ddp-prof did before to the same words: the captures of the repository stay as they are.
DDP_PROF = f"""#!/bin/bash
said="$SAID/$(printf '%s\\n' "$@" | cksum | tr ' ' _)"
if [ ! -e "$said.code" ]; then
  {shlex.quote(str(Path(sys.executable).with_name("ddp-prof")))} "$@" >"$said" 2>"$said.error"
  echo $? >"$said.code"
fi
cat "$said"
cat "$said.error" >&2
exit "$(cat "$said.code")"
"""


@dataclass
class Job:
    """A step of a workflow, on a pull request; ``said`` is a folder of all jobs."""

    folder: Path
    said: Path

    def run(self, **inputs: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_REPOSITORY": "some/where",
            "CALLS": str(self.folder / "calls"),
            "SAID": str(self.said),
            "BODY": str(self.folder / "body"),
        }
        return subprocess.run(
            ["bash", ACTION / "gate.sh"], cwd=ROOT, env={**environment, **inputs}, capture_output=True, text=True
        )

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("said")


@pytest.fixture
def job(tmp_path: Path, said: Path) -> Job:
    (tmp_path / "bin").mkdir()
    for name, text in (("gh", GH), ("ddp-prof", DDP_PROF)):
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return Job(tmp_path, said)


def test_a_failed_requirement_is_told_with_its_cause(job: Job) -> None:
    done = job.run(TRACES="traces/overlap.sqlite", ARGUMENTS="--min-overlap=80%", GH_TOKEN="x", PULL_REQUEST="7")
    assert done.returncode == 3, done.stderr
    summary = job.text("summary.md")
    assert "### ddp-prof check: failed, 1 of 1 requirement not met" in summary
    assert "| min overlap | 66.27 | 80.00 |" in summary
    assert "    gain    67 % of communication is hidden" in summary
    assert re.search(r"    cause   \d+ % of the typical step's exposed time is tail", summary)
    assert job.text("body") == summary
    assert job.text("calls").splitlines()[1].startswith("api -X POST repos/some/where/issues/7/comments ")


def test_a_later_run_replaces_the_comment(job: Job) -> None:
    done = job.run(
        TRACES="traces/overlap.sqlite", ARGUMENTS="--min-overlap=50%", GH_TOKEN="x", PULL_REQUEST="7", LAST="42"
    )
    assert done.returncode == 0, done.stderr
    assert job.text("calls").splitlines()[1].startswith("api -X PATCH repos/some/where/issues/comments/42 ")


@pytest.mark.parametrize("given", [{"GH_TOKEN": "x"}, {"PULL_REQUEST": "7"}])
def test_without_a_token_or_a_pull_request_only_the_summary_is_written(job: Job, given: dict[str, str]) -> None:
    assert job.run(TRACES="traces/overlap.sqlite", ARGUMENTS="--min-overlap=50%", **given).returncode == 0
    assert "check: passed" in job.text("summary.md")
    assert job.text("calls") == ""


def test_a_token_that_may_not_write_changes_no_verdict(job: Job) -> None:
    done = job.run(
        TRACES="traces/overlap.sqlite", ARGUMENTS="--min-overlap=50%", GH_TOKEN="x", PULL_REQUEST="7", DENIED="1"
    )
    assert done.returncode == 0
    assert "::warning::overlap gate: the comment could not be written" in done.stdout


def test_a_baseline_patterns_and_options_of_several_words(job: Job) -> None:
    done = job.run(
        TRACES="traces/over*.sqlite\n",
        BASELINE="traces/naive.sqlite",
        READING="--backward-range=backward|$(touch x) name",
    )
    assert done.returncode in {0, 3}, done.stderr
    assert "| overlap | cpu | step time against baseline |" in job.text("summary.md")
    assert not (ROOT / "x").exists()


def test_traces_that_cannot_be_read_are_told_and_fail(job: Job) -> None:
    done = job.run(TRACES="nowhere/*.sqlite", ARGUMENTS="--min-overlap=50%", GH_TOKEN="x", PULL_REQUEST="7")
    assert done.returncode not in {0, 3}
    assert "could not decide" in job.text("body")
    assert "nowhere/*.sqlite" in job.text("body")
    assert job.run(TRACES="").returncode == 2


def test_no_input_is_written_into_the_text_of_the_script() -> None:
    text = (ACTION / "action.yml").read_text()
    (run,) = [line for line in text.splitlines() if line.strip().startswith("run:")]
    assert "${{" not in run
