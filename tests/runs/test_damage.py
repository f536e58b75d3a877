"""Real captures with damage of two kinds: device times that are off from the host's, and lost device records.

No figure that rests on launches may survive the first, and no figure of a whole step may change by the second.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import ddp_prof
from ddp_prof.analyze.core.clocks import CLOCKS
from ddp_prof.analyze.variants.waterfall import PartChange, compare_before_after
from tests.night import but_the_largest
from tests.runs.test_pickles import FOREIGN

TABLES = [f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")]
MS = 1_000_000
CAPTURES = [trace for trace in FOREIGN if trace.suffix == ".sqlite"]
UNET = [trace for trace in CAPTURES if "unet" in trace.name]


def change(path: Path, folder: Path, *statements: str) -> Path:
    """A copy in which the statements were executed for each table of activities that it has."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    with closing(sqlite3.connect(copy)) as database:
        known = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in known.intersection(TABLES):
            for statement in statements:
                database.execute(statement.format(table))
        database.commit()
    return copy


def shift(path: Path, folder: Path, by_ns: int) -> Path:
    return change(path, folder, f'UPDATE {{}} SET start = start + {by_ns}, "end" = "end" + {by_ns}')


@pytest.mark.slow
@pytest.mark.parametrize("by_ns", [-140 * MS, 140 * MS], ids=["back", "forth"])
@pytest.mark.parametrize("path", UNET, ids=lambda path: path.name)
def test_of_clocks_that_disagree_nothing_is_said_about_launches(path: Path, by_ns: int, tmp_path: Path) -> None:
    (sound,), (shifted,) = ddp_prof.load_runs(path), ddp_prof.load_runs(shift(path, tmp_path, by_ns))
    before, after = sound.overlap(), shifted.overlap()
    for one, other in zip(before.ranks, after.ranks, strict=True):
        kept = ("kernels", "collectives", "compute_ns", "comm_ns", "overlapped_ns", "exposed_ns", "overlap_ratio")
        assert [getattr(one, name) for name in kept] == [getattr(other, name) for name in kept]
        assert one.blocking_ns is not None
        assert (other.blocking_ns, other.clocks_disagree, other.clock) == (None, True, "device")
        for step, moved in zip(one.steps, other.steps, strict=True):
            same = ("step", "kernels", "window_ns", "comm_ns", "overlapped_ns", "exposed_ns", "tail_ns", "idle_ns")
            assert [getattr(step, name) for name in same] == [getattr(moved, name) for name in same]
            assert (moved.blocking_ns, moved.blocking_at_most_ns) == (None, None)
    warnings = [warning for warning in after.warnings if warning.startswith(CLOCKS)]
    assert len(warnings) == 1
    assert not any("runs ahead" in note for note in after.step_notes)
    for collective in shifted.collectives().collectives:
        unknown = ("launch_ns", "queueing_ns", "ready_ns", "slack_ns", "blocking_ns", "consumer")
        assert [getattr(collective, name) for name in unknown] == [None] * len(unknown)
        assert {part.why for part in collective.exposed_by} <= {"unknown", "peer_wait"}
    assert CLOCKS in (shifted.critical().reason or "")
    assert not any(rule in {"launch bound", "host synchronization in backward"} for rule in found_by(shifted))


def compare(before: ddp_prof.Run, after: ddp_prof.Run) -> Sequence[PartChange]:
    return compare_before_after((before.analysis(), before.kernels()), (after.analysis(), after.kernels()))


def found_by(run: ddp_prof.Run) -> list[str]:
    return [finding.rule for finding in run.doctor().findings]


@pytest.mark.slow
@pytest.mark.parametrize("path", but_the_largest(CAPTURES), ids=lambda path: path.name)
def test_clocks_that_disagree_are_noticed_in_any_capture(path: Path, tmp_path: Path) -> None:
    (sound,), (shifted,) = ddp_prof.load_runs(path), ddp_prof.load_runs(shift(path, tmp_path, -140 * MS))
    assert not any(rank.clocks_disagree for rank in sound.overlap().ranks)
    on_device = [rank for rank in shifted.overlap().ranks if rank.device is not None]
    assert all(rank.clocks_disagree for rank in on_device)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [range(45, 60), range(5), range(20, 25), (30,)], ids=["end", "start", "middle", "one"])
@pytest.mark.parametrize("path", UNET, ids=lambda path: path.name)
def test_of_whole_steps_no_figure_changes_where_others_were_lost(
    path: Path, lost: Sequence[int], tmp_path: Path
) -> None:
    (sound,) = ddp_prof.load_runs(path)
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as database:
        query = (
            'SELECT coalesce(n.text, s.value), n.start, n."end" FROM NVTX_EVENTS n LEFT JOIN StringIds s '
            "ON s.id = n.textId"
        )
        times = {name: (start, end) for name, start, end in database.execute(query)}
    start, end = times[f"step {lost[0]}"][0], times.get(f"step {lost[-1]}", (0, 2**62))[1]
    calls = f"SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start >= {start} AND start < {end}"
    (damaged,) = ddp_prof.load_runs(change(path, tmp_path, f"DELETE FROM {{}} WHERE correlationId IN ({calls})"))
    (one,), (other,) = sound.overlap().ranks, damaged.overlap().ranks
    whole = {step.step: step for step in one.steps if step.step not in lost}
    kept = [step.step for step in other.steps]
    # Beside the one before the lost steps, and the one after, lost work may have run.
    assert set(whole) - set(kept) <= {lost[0] - 1, lost[-1] + 1}
    for step in other.steps:
        expected = whole[step.step]
        same = ("kernels", "collectives", "comm_ns", "overlapped_ns", "exposed_ns", "tail_ns", "window_ns", "idle_ns")
        assert [getattr(step, name) for name in same] == [getattr(expected, name) for name in same], step.step
        assert step.length == expected.length or step.length.ns is None or expected.step + 1 in lost
    assert any("left out" in warning and "lost" in warning for warning in damaged.overlap().warnings)
    changed = {one.part: one for one in compare(sound, damaged)}
    assert not any(one.is_beyond_spread for one in changed.values())
