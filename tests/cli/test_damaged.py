"""Our captures of a GPU with damage: what the documents of all commands say of it.

A shift of the device's clock leaves no figure that rests on launches, and changes no other. Lost records change no
figure of a step that is whole, to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.core.clocks import CLOCKS
from tests.cli.test_one_value import COMMANDS, OPTIONS, Document, Entity, documents_of, entities_of
from tests.command_line import run
from tests.conftest import ROOT
from tests.night import of_which_the_gate_keeps

H200 = ROOT / "traces" / "h200" / "nccl"
CAPTURES = [H200 / "overlap.sqlite", H200 / "bucketed_10mb.sqlite", H200 / "naive.sqlite", H200 / "fsdp.rank0.json.gz"]
OURS = of_which_the_gate_keeps([CAPTURES[0], CAPTURES[3]], CAPTURES)
"""Of each profiler one in the gate, which hides something."""
OTHERS = ROOT.parent / "shared" / "traces"
FOREIGN = [
    pytest.param(path, marks=pytest.mark.nightly)  # tests/runs/test_damage.py damages the second one in every gate
    for name in ("nsys2026_2_two_processes_h100", "nsys2022_4_ddp_unet_a100_rank0of4")
    if (path := OTHERS / f"{name}.sqlite").exists()
]
TABLES = [f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET")]
OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SHIFT_NS = -140_000_000

BY_LAUNCHES = {
    "launch_ns", "queueing_ns", "ready_ns", "slack_ns", "blocking_ns", "blocking_at_most_ns", "gain_ns",
    "standstill_ns", "before_ready_ns", "host_delay_ns",
}  # fmt: skip
"""Names of figures that rest on a time between a launch and its work."""
LENGTHS = {
    "step_ns",
    "communicating_step_ns",
    "nearest_step_ns",
    "step_spread_ns",
    "step_half_width_ns",
    "compute_only_ns",
}
LENGTHS |= {
    "held_work_ns",
    "idle_ns",
    "exposed_memory_ns",
    "duration_ns",
    "start_ns",
    "end_ns",
    "comm_end_ns",
    "reason",
    "idle_reason",
}
"""Of a run they may differ: a step lasts as the device says; starts are shifted; reasons say so."""
SAYS_NOT = (
    "launched late by|host runs ahead|stands? still for communication for|starts .* before backward ends",
    "held up by|queued behind|ended at least .* before what needs it",
)


def damaged(trace: Path, folder: Path, how: str) -> tuple[Path, set[int]]:
    """A copy, and the keys of the steps that were lost in part; ``how`` is ``shift`` or ``drop``."""
    copy = folder / trace.name
    if trace.suffix == ".sqlite":
        return copy, _damage_export(trace, copy, how)
    return copy, _damage_document(trace, copy, how)


def _damage_export(trace: Path, copy: Path, how: str) -> set[int]:
    shutil.copyfile(trace, copy)
    manifest = trace.with_suffix(".run.json")
    if manifest.exists():
        shutil.copyfile(manifest, copy.with_suffix(".run.json"))
    with closing(sqlite3.connect(copy)) as database:
        if how == "shift":
            for table in TABLES:
                database.execute(f'UPDATE {table} SET start = start + {SHIFT_NS}, "end" = "end" + {SHIFT_NS}')
            database.commit()
            return set()
        name = "coalesce(n.text, (SELECT value FROM StringIds WHERE id = n.textId))"
        query = f'SELECT {name}, n.start, n."end" FROM NVTX_EVENTS n'
        steps = [(name, start, end) for name, start, end in database.execute(query) if _number(name) is not None]
        last = max(number for name, *_ in steps if (number := _number(name)) is not None)
        for _, start, end in [one for one in steps if _number(one[0]) == last]:
            calls = f"SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start BETWEEN {start} AND {end}"
            for table in TABLES:
                database.execute(f"DELETE FROM {table} WHERE correlationId IN ({calls}) AND start > {start}")
        database.commit()
    return {last}


def _number(name: str | None) -> int | None:
    found = re.match(r"(?:step\|index=|step |ProfilerStep#)(\d+)", name or "")
    return int(found[1]) if found else None


def _damage_document(trace: Path, copy: Path, how: str) -> set[int]:
    document: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    events = document["traceEvents"]
    if how == "shift":
        for event in events:
            if event.get("cat") in OF_DEVICE:
                event["ts"] += SHIFT_NS / 1000
        lost: set[int] = set()
    else:
        steps = [(number, one) for one in events if (number := _number(one.get("name"))) is not None]
        last, step = max((one for one in steps if one[1].get("cat") == "user_annotation"), key=lambda one: one[0])
        begin, end = step["ts"], step["ts"] + step["dur"]
        calls = {
            event["args"].get("correlation")
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= event["ts"] < end
        }
        is_lost = [one.get("cat") in OF_DEVICE and one["args"].get("correlation") in calls for one in events]
        document["traceEvents"] = [one for one, gone in zip(events, is_lost, strict=True) if not gone]
        lost = {last}
    copy.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return lost


def figures_of(documents: dict[str, Document]) -> Iterator[tuple[str, Entity, str, Any]]:
    for command, document in documents.items():
        for entity, figures in entities_of(command, document):
            for name, value in figures.items():
                if name.endswith(("_ns", "_ratio")) or name in ("kernels", "collectives"):
                    yield command, entity, name, value
    for one in documents["collectives"]["collectives"]:
        entity = ("collective", one["process"], one["device"], one["step_key"], one["start_ns"])
        for name, value in one.items():
            if name.endswith("_ns"):
                yield "collectives", entity, name, value


@pytest.mark.slow
@pytest.mark.parametrize("trace", [*OURS, *FOREIGN], ids=lambda path: path.name)
def test_a_shifted_clock_leaves_nothing_that_rests_on_launches(trace: Path, tmp_path: Path) -> None:
    copy, _ = damaged(trace, tmp_path, "shift")
    sound, shifted = documents_of(trace), documents_of(copy)
    texts = [run(command, *OPTIONS.get(command, ()), copy).stdout for command in COMMANDS]
    before = {(command, entity, name): value for command, entity, name, value in figures_of(sound)}
    for command, entity, name, value in figures_of(shifted):
        if name in BY_LAUNCHES and command != "critical":
            assert value is None, (command, entity, name, value)
        elif entity[0] in ("rank", "step") and name not in LENGTHS and command in ("overlap", "kernels"):
            assert value == before[command, entity, name] or value is None, (command, entity, name)
    assert not shifted["critical"]["steps"]
    check_verdicts(shifted, sound)
    check_findings(shifted)
    for text in texts:
        words = " ".join(line for line in text.splitlines() if not line.startswith("note:"))
        for said in SAYS_NOT:
            assert not re.search(said, words), words
    assert all(CLOCKS in re.sub(r"\s+", " ", text) for text in texts if text.strip())


def check_verdicts(shifted: dict[str, Document], sound: dict[str, Document]) -> None:
    """A gate measures on the device's clock what it measured before; blocking and cost rest on launches."""
    for verdict, before in zip(verdicts_of(shifted), verdicts_of(sound), strict=True):
        if verdict["requirement"] in ("max blocking", "max cost"):
            assert verdict["measured"] is None or "limit" in verdict["reason"]
            assert verdict["requirement"] == "max cost" or verdict["status"] == "unknown"
        else:
            assert verdict["measured"] in (before["measured"], None)


def check_whole_steps(dropped: dict[str, Document], sound: dict[str, Document]) -> None:
    """Medians of other steps may differ a little; what a gate cannot judge of the sound capture, it cannot here.

    The doctor finds no rule that the sound capture does not show, nor one that is about a step that was lost.
    """
    (whole,), (rest,) = sound["compare"]["variants"], dropped["compare"]["variants"]
    assert 0 < rest["steps"] < whole["steps"]
    for verdict, before in zip(verdicts_of(dropped), verdicts_of(sound), strict=True):
        if before["measured"] is None:
            assert verdict["measured"] is None
        elif verdict["measured"] is not None and verdict["unit"] == "ns":
            assert verdict["measured"] == pytest.approx(before["measured"], rel=0.25)
    rules = {one["rule"] for one in sound["doctor"]["findings"]}
    assert {one["rule"] for one in dropped["doctor"]["findings"]} <= rules
    kept = {step["step"] for rank in dropped["overlap"]["ranks"] for step in rank["steps"]}
    for one in dropped["doctor"]["findings"]:
        assert set(one["steps"]) <= kept


def verdicts_of(documents: dict[str, Document]) -> list[Document]:
    found: list[Document] = documents["check"]["runs"][0]["verdicts"]
    return found


OF_LAUNCHES = {
    "gradients reduced after backward", "gradients ready in another order than buckets", "launch-bound host",
    "host synchronization in backward", "copies out of buckets", "the last bucket is needed first",
    "single hardware queue",
}  # fmt: skip
"""Rules about when something was launched, or what waited for it."""


def check_findings(shifted: dict[str, Document]) -> None:
    found = {one["rule"] for one in shifted["doctor"]["findings"]}
    assert not found & OF_LAUNCHES, found
    assert not any(one["expected_gain_ns"] for one in shifted["doctor"]["findings"])


@pytest.mark.slow
@pytest.mark.parametrize("trace", [*OURS, *FOREIGN[1:]], ids=lambda path: path.name)
def test_lost_records_change_no_figure_of_a_whole_step(trace: Path, tmp_path: Path) -> None:
    copy, lost = damaged(trace, tmp_path, "drop")
    sound, dropped = documents_of(trace), documents_of(copy)
    before = {(command, entity, name): value for command, entity, name, value in figures_of(sound)}
    found = 0
    for command, entity, name, value in figures_of(dropped):
        if entity[0] not in ("step", "path", "collective") or entity[-1] is None:
            continue
        if entity[0] == "path" and (command, entity, name) not in before:
            continue  # steps of the sound capture end on several ranks
        key = entity[3] if entity[0] == "collective" else entity[-1]
        assert key not in lost, (command, entity)
        found += 1
        assert value == before[command, entity, name] or value is None, (command, entity, name, value)
    assert found
    check_whole_steps(dropped, sound)
    assert any("left out" in warning for warning in dropped["overlap"]["warnings"])
