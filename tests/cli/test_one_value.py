"""What stands beside a whole sums to it, and no name has two values: of any capture, in documents of all commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given

from ddp_prof.trace import Trace
from tests.analyze.random_runs import runs
from tests.cli.test_reported import CASES, written
from tests.command_line import run
from tests.conftest import ROOT
from tests.examples import examples
from tests.night import of_which_the_gate_keeps, one_of_each_kind
from tests.nsys_factory import capture_of, write_capture

COMMANDS = ("summary", "overlap", "collectives", "critical", "skew", "kernels", "compare", "info", "check", "doctor")
OWN = [*sorted((ROOT / "traces").glob("*.sqlite")), *sorted((ROOT / "traces" / "h200").glob("*/*.json.gz"))[:4]]
PARTS = ("compute_only", "overlapped", "exposed", "exposed_memory", "idle")

LIMITS = ("overlap", "exposed", "tail", "blocking", "cost")
OPTIONS = {"check": ("--min-overlap", "0", *(word for name in LIMITS[1:] for word in (f"--max-{name}-ms", "0")))}
RUN_FIGURES = {"max exposed": "exposed_ns", "max tail": "tail_ns", "max blocking": "blocking_ns"}
"""What ``check`` measures, by its name in a run of one rank, whose medians over steps are those of the run."""

Document = dict[str, Any]
Entity = tuple[Any, ...]


def documents_of(trace: Path) -> dict[str, Document]:
    found = {}
    for command in COMMANDS:
        result = run(command, *OPTIONS.get(command, ()), "--format", "json", trace)
        assert result.exit_code in (0, 1, 3), result.stderr
        if result.exit_code != 1:
            document = json.loads(result.stdout)
            found[command] = document[0] if isinstance(document, list) else document
    return found


def check_sums(documents: dict[str, Document]) -> None:
    for whole, parts in wholes_of(documents):
        if whole is not None and None not in parts:
            assert sum(parts) == whole, (whole, parts)


def check_gate(documents: dict[str, Document]) -> None:
    """A gate measures of a run of one rank what other commands tell of it; who decides is one of its ranks."""
    ranks, (variant,) = documents["overlap"]["ranks"], documents["compare"]["variants"]
    for verdict in documents["check"]["runs"][0]["verdicts"]:
        measured, name = verdict["measured"], verdict["requirement"]
        assert verdict["process"] in {None, *(rank["process"] for rank in ranks)}
        if name == "min overlap" and measured is not None:
            assert measured == min(ratio for rank in ranks if (ratio := rank["overlap_ratio"]) is not None)
        elif name in RUN_FIGURES and len(ranks) == 1 and measured is not None and not verdict["reason"]:
            assert round(measured) == variant[RUN_FIGURES[name]]


def check_advice(documents: dict[str, Document]) -> None:
    """A summary names the doctor's first finding; each one's expected gain is in its interval, and below its cost.

    The headline of ``overlap`` lacked that communication slows compute, which that of ``summary`` said.
    """
    (summary,), findings = documents["summary"]["runs"], documents["doctor"]["findings"]
    assert documents["overlap"]["headline"] == summary["headline"]
    assert summary["advice"] == (findings[0]["advice"] if findings else None)
    for one in findings:
        told = [one[name] for name in ("gain_low_ns", "expected_gain_ns", "gain_high_ns", "cost_ns")]
        known = [ns for ns in told if ns is not None]
        assert known == sorted(known), one
        assert one["cost_ns"] is None or one["cost_ns"] >= 0
    for command in ("collectives", "critical", "doctor", "kernels", "skew", "overlap"):
        assert documents[command]["device"] == summary["device"], command
        assert documents[command]["label"] == summary["label"], command


def wholes_of(documents: dict[str, Document]) -> Iterator[tuple[int | None, list[int | None]]]:
    """Each whole with the parts beside it."""
    for one in (*documents["summary"]["runs"], *documents["compare"]["variants"]):
        yield one["nearest_step_ns"], list(one["parts_ns"].values())
        yield one["comm_ns"], [one["overlapped_ns"], one["exposed_ns"]]
    for budget in (documents["compare"]["waterfall"] or {}).get("budgets", []):
        known = [budget[f"{part}_ns"] or 0 for part in ("compute", "contention", "transfer", "tail", "wait", "calls")]
        yield budget["step_ns"], [*known, budget["rest_ns"]]
    for rank in documents["overlap"]["ranks"]:
        yield rank["comm_ns"], [rank["overlapped_ns"], rank["exposed_ns"]]
        for step in rank["steps"]:
            yield step["comm_ns"], [step["overlapped_ns"], step["exposed_ns"]]
            yield step["window_ns"], [step[f"{part}_ns"] for part in PARTS]
            yield step["length"]["ns"], [step["length"][f"{part}_ns"] for part in PARTS]
    for rank in documents["kernels"]["ranks"]:
        yield rank["overlapped_ns"], [part["overlapped_ns"] for part in rank["hidden"]]
        yield rank["idle_ns"], [part["idle_ns"] for part in rank["idle"]]
    for one in documents["collectives"]["collectives"]:
        if one["exposed_ns"] is not None:
            yield one["exposed_ns"], [part["ns"] for part in one["exposed_by"] or []]
        yield one["duration_ns"], [one["transfer_ns"], one["wait_ns"]]
    for path in documents["critical"]["steps"]:
        yield path["path_ns"], list(path["parts_ns"].values())


def check_names(documents: dict[str, Document]) -> None:
    """Figures by what they are of and their name: each command that tells one tells the same."""
    seen: dict[tuple[Entity, str], tuple[str, Any]] = {}
    for command, document in documents.items():
        for entity, figures in entities_of(command, document):
            for name, value in figures.items():
                if isinstance(value, (dict, list)) or not _is_figure(name):
                    continue
                other, before = seen.setdefault((entity, name), (command, value))
                if name == command and before is None:  # those that are known are listed
                    continue
                assert value == before, f"{name} of {entity}: {before} in {other}, {value} in {command}"


def _is_figure(name: str) -> bool:
    return name.endswith(("_ns", "_ratio")) or name in ("kernels", "collectives", "steps", "ranks", "kappa", "reason")


def entities_of(command: str, document: Document) -> Iterator[tuple[Entity, Document]]:
    if command in ("summary", "compare"):
        for one in document["runs" if command == "summary" else "variants"]:
            yield ("run", one["label"]), one
            yield from _costs(one["label"], one)
    if command == "info":
        for process in document["processes"]:
            yield ("process", process["process"]), process
    for rank in document.get("ranks", ()) if command in ("overlap", "kernels", "skew") else ():
        place = (rank["process"], rank["device"])
        yield ("rank", *place), rank
        for step in rank.get("steps", ()):
            yield ("step", *place, step["step_key"]), step
    if command == "overlap":
        yield from _costs(document["label"], document)
        for process, figures in _by_process(document["ranks"]).items():
            yield ("process", process), figures
    if command == "critical":
        yield from ((("path", path["rank"], path["step_key"]), path) for path in document["steps"])
    if command == "overlap":
        names = [_name_of(rank) for rank in document["ranks"]]
        for rank in (rank for rank in document["ranks"] if names.count(_name_of(rank)) == 1):
            for step in rank["steps"]:
                own = {name: step[name] for name in ("window_ns", "host_ns") if step[name] is not None}
                yield ("path", _name_of(rank), step["step_key"]), own
    if command == "collectives":
        yield from _sums(document["collectives"])


def _name_of(rank: Document) -> str:
    """As a path names it."""
    return f"process {rank['process']}" if rank["rank"] is None else f"rank {rank['rank']}"


def _costs(label: str, document: Document) -> Iterator[tuple[Entity, Document]]:
    for name in ("cost", "bounds"):
        if document.get(name):
            yield (name, label), document[name]


def _by_process(ranks: Iterable[Document]) -> dict[int, Document]:
    """What ``info`` tells of a process: its collectives, and steps of one of its devices."""
    found: dict[int, Document] = {}
    for rank in ranks:
        steps = sum(step["host_ns"] is not None for step in rank["steps"])
        own = found.setdefault(rank["process"], {"steps": 0})
        own["steps"] = max(own["steps"], steps)
    return found


def _sums(collectives: list[Document]) -> Iterator[tuple[Entity, Document]]:
    """The collectives of a step sum to what is exposed and overlapped of it; those of a rank, too, unless some of two
    steps, or of one and of none, run at once, whose time is that of both."""
    ends: dict[Entity, dict[int | None, int]] = {}  # by rank and step
    at_once = set()
    for one in sorted(collectives, key=lambda one: one["start_ns"]):
        place = ("rank", one["process"], one["device"])
        of_steps = ends.setdefault(place, {})
        if any(end > one["start_ns"] for step, end in of_steps.items() if step != one["step"]):
            at_once.add(place)
        of_steps[one["step"]] = max(one["end_ns"], of_steps.get(one["step"], one["end_ns"]))
    by: dict[Entity, Document] = {}
    for one in collectives:
        place = (one["process"], one["device"])
        steps = [("step", *place, one["step_key"])] if one["step"] is not None else []
        for entity in (("rank", *place), *steps):
            own = by.setdefault(entity, {"collectives": 0, "overlapped_ns": 0, "exposed_ns": 0})
            own["collectives"] += 1
            for name in ("overlapped_ns", "exposed_ns"):
                known = own[name] is not None and one[name] is not None
                own[name] = own[name] + one[name] if known else None
    for entity, own in by.items():
        yield entity, {"collectives": own["collectives"]} if entity in at_once else own


_TIME = r"(\d[\d,]*(?:\.\d+)?) (ns|µs|ms|s)\b"
_UNITS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}


def times_in(text: str) -> Iterator[tuple[float, float]]:
    """Each time in a text, and by how much it may be rounded; both in nanoseconds."""
    for number, unit in re.findall(_TIME, text):
        _, _, digits = number.partition(".")
        yield float(number.replace(",", "")) * _UNITS[unit], _UNITS[unit] * 10 ** -len(digits) / 2


def check_words(trace: Path, summary: Document) -> None:
    """The parts that a summary's line names sum to the length before them, but for what is rounded.

    They are not printed where it is not known which step launched what communicates.
    """
    text = re.sub(r"\s+", " ", run("summary", "--notes", trace).stdout)
    before, *rest = re.split(": (?=compute alone )", text)
    knows_parts = [
        one
        for one in summary["runs"]
        if None not in (*one["parts_ns"].values(), one["exposed_ns"]) and one["nearest_step_ns"]
    ]
    assert len(rest) == len(knows_parts), text
    for parts in rest:
        *_, (whole, rounded) = times_in(before)
        found = list(times_in(re.split(r"(?<=%\))(?!,)", parts)[0]))
        assert abs(sum(ns for ns, _ in found) - whole) <= rounded + sum(by for _, by in found) + 1, (text, found)
        before = parts


def check(trace: Path) -> None:
    documents = documents_of(trace)
    if "overlap" in documents:
        check_sums(documents)
        check_names(documents)
        check_gate(documents)
        check_advice(documents)
        check_words(trace, documents["summary"])


TELLING = {
    "a sound job", "first steps lost", "half of the times are 0", "durations in a wrong unit", "copies between GPUs",
    "a graph recorded whole", "a process of ranges", "two ranks in one file", "steps are micro-batches",
    "each kernel twice", "kernels without the numbers of their launches",
}  # fmt: skip
"""Situations in which other figures are not known, or which have other entities."""


@pytest.mark.slow
@pytest.mark.parametrize("trace", one_of_each_kind(OWN), ids=lambda path: path.name)
def test_of_our_captures(trace: Path) -> None:
    check(trace)


@pytest.mark.slow
@pytest.mark.parametrize("name", of_which_the_gate_keeps(TELLING, CASES))
def test_of_reported_situations(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    check(written(name, case.capture(), case.formats[-1], tmp_path))


@pytest.mark.slow
@examples(40, suppress_health_check=list(HealthCheck))
@given(runs())
def test_of_any_run(traces: tuple[Trace, ...]) -> None:
    with TemporaryDirectory() as folder:
        check(write_capture(Path(folder) / "x.sqlite", capture_of(traces[0])))
