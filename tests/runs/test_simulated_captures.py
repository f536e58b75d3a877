"""Captures of simulated programs: what changes no figure, and what is lost of them, which is not made up for.

The gate asks one program, a nightly twelve and more commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.analyze.contended_device import draw_program, draw_queued_program, run
from tests.analyze.simulated_captures import capture_of, write
from tests.command_line import each_read_once
from tests.command_line import run as run_command
from tests.examples import IS_NIGHTLY
from tests.nsys_factory import Capture, Kernel

COMMANDS = ("overlap", "collectives", "critical", *(("doctor", "kernels", "skew", "whatif") if IS_NIGHTLY else ()))
SEEDS = range(12) if IS_NIGHTLY else (3,)
TIMES = ("start_ns", "end_ns", "launch_ns", "ready_ns", "comm_end_ns", "origin_ns")
OF_THE_FILE = ("process", "stream", "file", "trace", "clock", "producer", "source", "consumer")
TEXTS = ("evidence", "headline", "warnings", "reason", "notes")
"""They name times, and what records what is missing."""
Changed = Callable[[Capture], Capture]


def captures_of(seed: int, **more: int) -> list[Capture]:
    ranks = run((draw_queued_program if seed % 5 == 4 else draw_program)(seed))
    return [capture_of(rank, number, len(ranks), **more) for number, rank in enumerate(ranks)]


def documents(files: Sequence[Path], but: Sequence[str] = (), commands: Sequence[str] = COMMANDS) -> dict[str, Any]:
    """What commands say, but for these keys and what differs with the file."""

    def of(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if key not in (*OF_THE_FILE, *but)}

    with each_read_once():
        found = {name: run_command(name, *files, "--one-run", "--format", "json").stdout for name in commands}
    return {name: json.loads(text, object_hook=of) for name, text in found.items()}


@cache
def sound(seed: int, but: Sequence[str] = (), commands: Sequence[str] = COMMANDS) -> dict[str, Any]:
    """What commands say of the program as it was recorded."""
    with TemporaryDirectory() as folder:
        return documents(write(Path(folder), captures_of(seed)), but, commands)


def numbers(capture: Capture) -> Capture:
    kernels = [replace(one, number=3 * (one.number or 0) + 10**6) for one in capture.kernels]
    return replace(
        capture, kernels=kernels, syncs=[replace(one, number=3 * one.number + 10**6) for one in capture.syncs]
    )


def streams(capture: Capture) -> Capture:
    """The stream of collectives has the smaller number."""
    other = {7: 133, 20: 13}
    kernels = [replace(one, stream=other[one.stream]) for one in capture.kernels]
    syncs = [replace(one, stream=other.get(one.stream, one.stream)) for one in capture.syncs]
    return replace(capture, kernels=kernels, syncs=syncs)


def processes(capture: Capture) -> Capture:
    """Those of later ranks have smaller numbers."""

    def of(one: Any) -> Any:
        other = 70_000 - 5 * one.process
        return replace(one, process=other, thread=one.thread - one.process + other)

    threads = {(70_000 - 5 * one, 70_000 - 6 * one + lane): name for (one, lane), name in capture.threads.items()}
    return replace(
        capture,
        kernels=[*map(of, capture.kernels)],
        ranges=[*map(of, capture.ranges)],
        syncs=[*map(of, capture.syncs)],
        threads=threads,
    )


def rows(capture: Capture) -> Capture:
    tables: dict[str, Any] = {name: list(getattr(capture, name)) for name in ("kernels", "ranges", "syncs")}
    for table in tables.values():
        Random(1).shuffle(table)
    return replace(capture, **tables)


def domains(capture: Capture) -> Capture:
    """A domain of NVTX for each kind of range, and names that were registered."""
    ranges = [replace(one, domain=one.domain or one.name.split()[0], registered=True) for one in capture.ranges]
    return replace(capture, ranges=ranges)


@pytest.mark.parametrize("change", [numbers, streams, processes, rows, domains])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_tells_nothing_changes_nothing(seed: int, change: Changed, tmp_path: Path) -> None:
    assert documents(write(tmp_path, [change(one) for one in captures_of(seed)])) == sound(seed)


@pytest.mark.parametrize("product", ["2022.2", "2026.2", "kineto"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_format_tells_the_same(seed: int, product: str, tmp_path: Path) -> None:
    """But for the doctor, whose rule about a single queue does not trust the records that torch.profiler names."""
    commands = tuple(name for name in COMMANDS if name != "doctor")
    assert documents(write(tmp_path, captures_of(seed), product), commands=commands) == sound(seed, commands=commands)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recording_may_begin_later(seed: int, tmp_path: Path) -> None:
    assert documents(write(tmp_path, captures_of(seed, later_ns=10**12 + 137)), TIMES) == sound(seed, TIMES)


@pytest.mark.parametrize("seed", SEEDS)
def test_twice_as_long_is_twice_as_long(seed: int, tmp_path: Path) -> None:
    twice = documents(write(tmp_path, captures_of(seed, times=2)), TEXTS)
    assert [(path, value) for path, value, _ in _all(twice)] == [
        (path, pytest.approx(2 * value if is_time else value, rel=1e-6, abs=10))
        for path, value, is_time in _all(sound(seed, TEXTS))
    ]


def _all(one: Any, path: str = "", *, is_time: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """All numbers of a document, where they stand, and whether they are times."""
    if isinstance(one, dict):
        for key, value in one.items():
            yield from _all(value, f"{path}.{key}", is_time=is_time or key == "ns" or key.endswith("_ns"))
    elif isinstance(one, list):
        for place, value in enumerate(one):
            yield from _all(value, f"{path}[{place}]", is_time=is_time)
    elif isinstance(one, (int, float)) and not isinstance(one, bool):
        yield path, one, is_time


def steps_of(capture: Capture) -> list[tuple[int, int]]:
    return sorted((one.start, one.end) for one in capture.ranges if one.end and one.name.startswith("step"))


def without(capture: Capture, is_lost: Callable[[Kernel], bool], *, with_calls: bool) -> Capture:
    kernels = [one for one in capture.kernels if not (with_calls and is_lost(one))]
    return replace(capture, kernels=[replace(one, is_lost=is_lost(one)) for one in kernels])


def some_work(capture: Capture, random: Random, *, with_calls: bool) -> Capture:
    """A tenth of the work of one or two steps."""
    places = random.sample(steps_of(capture), random.randint(1, 2))
    lost = {
        one.number
        for one in capture.kernels
        if one.launch and any(begin <= one.launch < end for begin, end in places) and random.random() < 0.1
    }
    return without(capture, lambda one: one.number in lost, with_calls=with_calls)


def whole_steps(capture: Capture, random: Random) -> Capture:
    steps = steps_of(capture)
    begin = random.randrange(len(steps))
    from_ns, to_ns = steps[begin][0], steps[min(len(steps) - 1, begin + random.randint(0, 2))][1]
    lost = without(capture, lambda one: from_ns <= (one.launch or 0) < to_ns, with_calls=True)
    return replace(lost, syncs=[one for one in lost.syncs if not from_ns <= one.at < to_ns])


def a_time(capture: Capture, random: Random, *, of_ranges: bool = False) -> Capture:
    """All work of a time, or all ranges that end in it."""
    steps = steps_of(capture)
    begin = random.randrange(steps[0][0], steps[-1][1])
    until = begin + round((steps[-1][1] - steps[0][0]) * random.choice([0.02, 0.1, 0.3]))
    if of_ranges:
        ranges = [one for one in capture.ranges if "|" in one.name or not begin <= (one.end or 0) < until]
        return replace(capture, ranges=ranges)
    return without(capture, lambda one: begin <= one.start < until, with_calls=False)


def some_waits(capture: Capture, random: Random) -> Capture:
    what, share = random.choice(["Record", "StreamWait", ""]), random.choice([0.02, 0.2, 0.6])
    return replace(capture, syncs=[one for one in capture.syncs if what not in one.call or random.random() >= share])


def impossible_ends(capture: Capture, random: Random) -> Capture:
    which = set(random.sample(range(len(capture.kernels)), 2))
    by_ns = random.choice([300_000, 10**9])
    kernels = [replace(one, end=one.end + by_ns * (at in which)) for at, one in enumerate(capture.kernels)]
    return replace(capture, kernels=kernels)


DAMAGES: dict[str, Callable[[Capture, Random], Capture]] = {
    "some work": lambda capture, random: some_work(capture, random, with_calls=False),
    "some work with its calls": lambda capture, random: some_work(capture, random, with_calls=True),
    "whole steps": whole_steps,
    "the work of a time": a_time,
    "the ranges of a time": lambda capture, random: a_time(capture, random, of_ranges=True),
    "some waits": some_waits,
    "impossible ends": impossible_ends,
}
OF_A_STEP = ("kernels", "collectives", "comm_ns", "overlapped_ns", "exposed_ns", "tail_ns", "idle_ns", "blocking_ns")
OF_A_COLLECTIVE = ("overlapped_ns", "exposed_ns", "blocking_ns", "slack_ns")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_told_of_a_damaged_capture_is_true_of_the_sound_one(seed: int, damage: str, tmp_path: Path) -> None:
    """Or it is not known; steps may be left out."""
    commands = ("overlap", "collectives")
    whole = sound(seed, commands=commands)
    damaged = [DAMAGES[damage](one, Random(f"{seed} {damage} {rank}")) for rank, one in enumerate(captures_of(seed))]
    found = documents(write(tmp_path, damaged), commands=commands)
    known = {(rank["rank"], step["step"]): step for rank in whole["overlap"]["ranks"] for step in rank["steps"]}
    for rank in found["overlap"]["ranks"]:
        for step in rank["steps"]:
            _check(step, known[rank["rank"], step["step"]], OF_A_STEP)
    known = {(one["rank"], one["start_ns"]): one for one in whole["collectives"]["collectives"]}
    steps = {(rank["rank"], step["step"]) for rank in found["overlap"]["ranks"] for step in rank["steps"]}
    for one in found["collectives"]["collectives"]:
        if (one["rank"], one["step"]) in steps:
            _check(one, known[one["rank"], one["start_ns"]], OF_A_COLLECTIVE)


def _check(one: dict[str, Any], expected: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        assert one[name] in (None, expected[name]), (name, one)
