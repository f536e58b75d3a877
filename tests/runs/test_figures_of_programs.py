"""Every figure of simulated programs, as the commands print it, against what their devices did (tests/oracle).

The gate asks two programs, a nightly sixty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.analyze.contended_device import draw_larger_program, run
from tests.analyze.simulated_captures import NAMES, capture_of, write
from tests.command_line import each_read_once
from tests.command_line import run as run_command
from tests.examples import IS_NIGHTLY
from tests.oracle.paths import gain_without, paths_of_step
from tests.oracle.programs import Truth

COMMANDS = ("overlap", "collectives", "critical", "skew", "compare", "summary", "kernels")
LIMITS = ("--min-overlap", "0.5", "--max-exposed-ms", "1", "--max-tail-ms", "1", "--max-blocking-ms", "1")
MOST_GAINS = 5
"""Of a program, as each is another simulation."""


class Case:
    """A program, what is true of its ranks, and what the commands say."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.program = draw_larger_program(seed)
        self.ranks = run(self.program)
        self.truths = [Truth(rank) for rank in self.ranks]
        self.files = write(folder, [capture_of(rank, at, len(self.ranks)) for at, rank in enumerate(self.ranks)])
        self.said = {name: self.ask(name, "--one-run") for name in COMMANDS}

    def ask(self, command: str, *arguments: str) -> dict[str, Any]:
        with each_read_once():
            said = run_command(command, *self.files, *arguments, "--format", "json").stdout
        found: dict[str, Any] = json.loads(said)
        return found

    @cached_property
    def steps(self) -> list[list[dict[str, Any]]]:
        """What is true of the steps of each rank."""
        return [
            [truth.step_figures(step) | {"length": truth.length_figures(step)["ns"]} for step in truth.steps]
            for truth in self.truths
        ]

    @property
    def sending(self) -> list[list[dict[str, Any]]]:
        """Those that reduce gradients."""
        return [[step for step in of_rank if step["in_backward"]] for of_rank in self.steps]


@pytest.fixture(scope="module", params=range(60) if IS_NIGHTLY else (2, 11))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("program"))


def chosen(row: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in names}


def test_steps(case: Case) -> None:
    for rank, truth in zip(case.said["overlap"]["ranks"], case.truths, strict=True):
        for found, step in zip(rank["steps"], truth.steps, strict=True):
            expected, length = truth.step_figures(step), truth.length_figures(step)
            assert chosen(found, expected) == expected
            assert chosen(found["length"], length) == length
            parts, standstill = found["cost"], found["cost"]["standstill_by_ns"]
            assert parts["blocking_ns"] == truth.standstill_ns(step)
            assert standstill is None or sum(standstill.values()) == parts["standstill_ns"]


def test_collectives(case: Case) -> None:
    every = case.said["collectives"]["collectives"]
    for rank, truth in enumerate(case.truths):
        rows = iter([row for row in every if row["rank"] == rank])
        for step in truth.steps:
            for op in step.collectives:
                found = next(rows)
                expected = truth.collective_figures(step, [each.by_match[op.match] for each in case.ranks], op)
                found["consumer"] = found["consumer"] and found["consumer"]["start_ns"]
                assert chosen(found, expected) == expected
        assert not [*rows]


def test_critical_paths(case: Case) -> None:
    gains = 0
    for place, found in enumerate(case.said["critical"]["steps"]):
        rank = int(found["rank"].removeprefix("rank "))
        expected = paths_of_step(case.truths, place)[rank]
        parts = frozenset((part, ns) for part, ns in found["parts_ns"].items() if ns)
        assert (found["path_ns"], parts in expected.ways) == (expected.path_ns, True), (parts, expected.ways)
        assert found["host_delay_ns"] in expected.host_delays_ns
        for one in found["collectives"] if case.program.kappas == (1.0, 1.0) else []:
            match = case.truths[one["rank"]].steps[place].collectives[one["index"]].match
            if match is not None and match[1] >= 0 and gains < MOST_GAINS:
                gains += 1
                assert one["gain_ns"] == pytest.approx(gain_without(case.program, case.ranks, place, match), abs=3)


def test_lateness(case: Case) -> None:
    times_last: Counter[int] = Counter()
    for found in case.said["skew"]["steps"]:
        steps = [truth.steps[found["step"]] for truth in case.truths]
        begins = [[round(op.start) for op in step.collectives] for step in steps]
        lags = [
            max(at - median(others) for at, *others in zip(own, *begins[:rank], *begins[rank + 1 :], strict=True))
            for rank, own in enumerate(begins)
        ]
        last = lags.index(max(lags)) if max(lags) > 0 else None
        assert (found["lags_ns"], found["last"]) == ([pytest.approx(lag, abs=1) for lag in lags], last)
        times_last.update([] if last is None else [last])
        for rank, step in enumerate(steps):
            parts = [
                (op, [each.by_match[op.match] for each in case.ranks]) for op in step.collectives
            ]  # fmt: skip
            waits = [case.truths[rank].collective_figures(step, peers, op)["exposed_wait_ns"] for op, peers in parts]
            assert found["waits_ns"][rank] == sum(waits)
    if len(case.ranks) > 1:
        assert {rank["rank"]: rank["last_steps"] for rank in case.said["skew"]["ranks"]} == {
            rank: times_last[rank] for rank in range(len(case.ranks))
        }


def test_runs(case: Case) -> None:
    """Medians over the steps of all ranks, sums over all communication, and the parts of one step."""
    every, sending = ([step for of in steps for step in of] for steps in (case.steps, case.sending))
    lengths = [step["length"] for step in every if step["length"] is not None]
    of_sending = [step["length"] for step in sending if step["length"] is not None]
    names = ("comm_ns", "exposed_ns", "tail_ns", "blocking_ns", "window_ns", "collectives")
    expected = {name: median(step[name] for step in sending) for name in names}
    expected |= {"step_ns": median(lengths), "communicating_step_ns": median(of_sending)}
    (found,), (summary,) = case.said["compare"]["variants"], case.said["summary"]["runs"]
    assert chosen(found, expected) == pytest.approx(expected, abs=1)
    assert all(summary[name] == found[name] for name in expected if name in summary)
    for name in ("overlapped", "backward_overlapped"):
        share = sum(step[f"{name}_ns"] for step in every) / sum(step["comm_ns"] for step in every)
        assert found[name.replace("lapped", "lap_ratio")] == pytest.approx(share)
    assert found["blocked_steps"] == sum(step["blocking_ns"] > 0 for step in sending)


@pytest.mark.parametrize(("percentile", "of_steps"), [("50", median), ("100", max)])
def test_limits(case: Case, percentile: str, of_steps: Callable[[list[int]], float]) -> None:
    """The worst rank decides."""
    (found,) = case.ask("check", *LIMITS, "--percentile", percentile)["runs"]
    for verdict in found["verdicts"]:
        name = verdict["requirement"].split()[1].strip(",")
        if name == "overlap":
            ratios = [[sum(step[key] for step in of) for key in ("overlapped_ns", "comm_ns")] for of in case.steps]
            assert verdict["measured"] == pytest.approx(min(hidden / whole for hidden, whole in ratios))
        else:
            expected = max(of_steps([step[f"{name}_ns"] for step in of]) for of in case.sending)
            assert verdict["measured"] == pytest.approx(expected, abs=1)


def test_kernels(case: Case) -> None:
    """How often each runs, how long, and how often beside communication and alone."""
    expected: Counter[tuple[str, str]] = Counter()
    for rank in case.ranks:
        for op in rank.ops:
            begin, end = round(op.start), round(op.end)
            beside = [
                (max(begin, round(one.start)), min(end, round(one.end)))
                for one in rank.ops
                if one.stream != op.stream and one.start < op.end and one.end > op.start
            ]
            covered = len(set().union(*(range(start, stop) for start, stop in beside)))
            name = NAMES.get(op.name, op.name)
            expected[name, "count"] += 1
            expected[name, "total_ns"] += end - begin
            expected[name, "beside"] += 2 * covered > end - begin
            expected[name, "alone"] += not covered
    found: Counter[tuple[str, str]] = Counter()
    for kernel in case.said["kernels"]["kernels"]:
        for key in ("count", "total_ns", "beside", "alone"):
            found[kernel["name"], key] += kernel[key] or 0
            if kernel[key] is None:
                expected[kernel["name"], key] = 0
    assert {key: found[key] for key in found} == {key: expected[key] for key in found}
    for rank, of_rank in zip(case.said["kernels"]["ranks"], case.steps, strict=True):
        assert rank["idle_ns"] == sum(step["idle_ns"] for step in of_rank)
        assert sum(one["overlapped_ns"] for one in rank["hidden"]) == sum(step["overlapped_ns"] for step in of_rank)
