"""Medians of a run's steps."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap
from ddp_prof.analyze.variants import comparison
from ddp_prof.analyze.variants.comparison import PARTS, VariantSummary, _with_speedup, compare_variants
from ddp_prof.analyze.why_unknown import LOST
from ddp_prof.manifest import load_manifest
from ddp_prof.present.comparison_headlines import describe_changes
from ddp_prof.present.headlines import communicating_steps_text
from tests.drawing import draw_trace

STEPS = {"step 0": "######..............", "step 1": ".......######.......", "step 2": "..............######"}


def test_a_tail_that_some_steps_only_tell_is_not_put_beside_all_steps_exposed_time() -> None:
    """Two steps without backward hide all; the third exposes 4: a median tail of 4 stood beside an exposed 0."""
    trace = draw_trace(
        ranges={**STEPS, "forward": "######.######.......", "backward": "..............######"},
        launches={"main": "aM.....bN.....c.O..."},
        streams={7: ".aaa....bbb....c....", 9: ".MM.....NN......OOOO"},
    )
    result = measure_overlap(trace)
    assert [step.tail_ns for step in result.ranks[0].steps] == [None, None, 4]
    (summary,) = compare_variants([result])
    assert (summary.exposed_ns, summary.tail_ns) == (0, None)


def test_a_run_on_another_device_has_no_speedup_over_the_baseline() -> None:
    trace = draw_trace(ranges=STEPS, launches={"main": "a......b......c"}, streams={7: ".aaa....bbb....c...."})
    run = measure_overlap(trace)
    naive, here, elsewhere = (replace(run, label=label) for label in ("naive", "here", "elsewhere"))
    summaries = compare_variants([naive, here, replace(elsewhere, device="cpu")])
    assert [summary.speedup for summary in summaries] == [1, 1, None]


def test_a_run_of_another_job_has_no_speedup_over_the_baseline() -> None:
    """Of bucketed on 8 ranks it was said that it is faster than naive on 2: the ranks differ, and not the variant."""
    run = measure_overlap(
        draw_trace(
            ranges=STEPS,
            launches={"main": "aA.....bB.....cC...."},
            streams={7: ".aaa....bbb....ccc..", 9: "...AA.....BB.....CC."},
        )
    )
    naive, same, more = (
        replace(run, label=label, world_size=world) for label, world in (("naive", 2), ("flat", 2), ("bucketed", 8))
    )
    summaries = compare_variants([naive, same, more])
    assert [(one.speedup, one.other_job) for one in summaries] == [(1, None), (1, None), (None, "ranks 8 and 2")]
    assert "No speed-up of bucketed is reported: naive is another job (ranks 8 and 2)." in describe_changes(summaries)
    turns = {run.trace: {"1": 5.0, "2": 4.0, "3": 6.0}}
    assert [one.speedup for one in compare_variants([naive, same, more], turns)] == [1, 1, None]
    told = load_manifest(Path(__file__).parents[3] / "traces" / "overlap.run.json")
    assert told is not None
    of_model = compare_variants([naive, same], manifests=[told, replace(told, model_size="xl")])
    assert [one.other_job for one in of_model] == [None, f"model xl and {told.model_size}"]


def test_a_speedup_that_the_machine_made_is_not_told() -> None:
    """The machine got three times as fast between two captures: "bucketed 100 MB is fastest: 73 % shorter"."""

    def summary(label: str, step_ns: int, compute_ns: int) -> VariantSummary:
        (found,) = compare_variants([measure_overlap(draw_trace(ranges={"step 0": "####"}, path=f"{label}.sqlite"))])
        parts = dict.fromkeys(PARTS, 0) | {"compute_only": compute_ns, "exposed": step_ns - compute_ns}
        return replace(
            found,
            label=label,
            step_ns=step_ns,
            compute_only_ns=compute_ns,
            parts_ns=parts,
            find_step_half_width=lambda: 10,
        )

    naive = summary("naive", 4000, 3000)
    slower_machine = _with_speedup(summary("bucketed", 1200, 900), naive)
    assert (slower_machine.speedup, slower_machine.supported, slower_machine.confounded_by) == (None, False, "compute")
    beside = summary("bucketed", 4200, 2900)
    beside = replace(beside, parts_ns={**beside.parts_ns, "overlapped": 400})
    slowed = _with_speedup(beside, naive)
    assert (slowed.speedup, slowed.confounded_by) == (None, "compute beside communication"), "kappa may be the cause"
    sharded = _with_speedup(summary("fsdp", 6000, 5500), naive)
    assert (sharded.speedup, sharded.confounded_by) == (4000 / 6000, None), "its steps compute something else"
    less_communication = _with_speedup(summary("bucketed", 3200, 2990), naive)
    assert less_communication.speedup == 1.25
    assert (less_communication.supported, less_communication.confounded_by) == (True, None)
    within_the_spread = _with_speedup(summary("bucketed", 3990, 3000), naive)
    assert (within_the_spread.supported, within_the_spread.confounded_by) == (False, None)


def test_collectives_that_were_not_recorded_are_not_none_of_them() -> None:
    """A step on a CPU without ranges of what it did: a table said 0 collectives of a job of 300 ranks."""
    (unseen,) = compare_variants([measure_overlap(draw_trace(ranges={"step 0": "####", "step 1": "....####"}))])
    assert (unseen.comm_ns, unseen.collectives) == (None, None)
    assert unseen.reason is not None
    trace = draw_trace(
        ranges={"step 0": "####....", "step 1": "....####"},
        launches={"main": "aM..b..."},
        streams={7: "aa..bb..", 9: "..MM...."},
    )
    (seen,) = compare_variants([measure_overlap(trace)])
    assert seen.collectives == 1


def test_intervals_are_measured_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing steps takes longer than all other figures of a run, and a summary shows none of the intervals."""
    asked: list[int] = []
    comparison._measure_half_width.cache_clear()
    measure = comparison.half_width_of_steps
    monkeypatch.setattr(
        comparison, "half_width_of_steps", lambda ranks, keys: asked.append(len(ranks)) or measure(ranks, keys=keys)
    )
    ranges = {"step 0": "###", "step 1": "...####", "step 2": ".......#####", "step 3": "............###"}
    (found,) = compare_variants([measure_overlap(draw_trace(ranges=ranges))])
    assert (found.step_ns, asked) == (4, []), "steps of 3, 4, 5 and 3: the median is 3.5"
    assert (found.step_half_width_ns, found.step_half_width_ns, asked) == (2, 2, [1])
    assert pickle.loads(pickle.dumps(found)).step_half_width_ns == 2, "a result goes to other processes"


def of_unequal_steps() -> TraceOverlap:
    """A run of five steps, of 2, 3, 4, 5 and 10, in each of which 1 of communication is exposed."""
    return measure_overlap(
        draw_trace(
            ranges={"step 0": "##", "step 1": "..###", "step 2": "." * 5 + "####", "step 3": "." * 9 + "#####",
                    "step 4": "." * 14 + "#" * 10},
            launches={"main": "aMbN.cO..dP...eQ........"},
            streams={7: "a.b..c...d....e.........", 9: ".M.N..O...P....Q........"},
        )
    )  # fmt: skip


def test_the_spread_of_steps_is_the_range_of_their_middle_half() -> None:
    (summary,) = compare_variants([of_unequal_steps()])
    assert (summary.step_ns, summary.step_spread_ns) == (4, 2)


def test_steps_whose_exposed_time_is_known_do_not_stand_for_the_others() -> None:
    """Steps that are not known may be all those of a rank."""
    result = of_unequal_steps()
    (before,) = compare_variants([result])
    assert (before.exposed_ns, before.overlapped_ns, before.overlap_ratio) == (1, 0, 0)
    (rank,) = result.ranks
    first, *others = rank.steps
    partly = replace(rank, steps=(replace(first, exposed_ns=None), *others))
    (summary,) = compare_variants([replace(result, ranks=(partly,))])
    assert (summary.comm_ns, summary.exposed_ns, summary.overlapped_ns) == (1, None, None)
    assert (summary.overlap_ratio, summary.exposed_half_width_ns) == (None, None)


def test_steps_of_a_rank_without_figures_are_none_that_do_not_communicate() -> None:
    """Of two ranks one lost two of five steps, the other all work: 'in the 3 of 5 steps that communicate' was said."""
    result = of_unequal_steps()
    (whole,) = result.ranks
    partly = replace(whole, steps=whole.steps[:3])
    silent = tuple(replace(step, comm_ns=None, exposed_ns=None) for step in whole.steps)
    lost = replace(whole, process=whole.process + 1, reason=LOST, comm_ns=None, exposed_ns=None, steps=silent)
    (summary,) = compare_variants([replace(result, ranks=(partly, lost))])
    assert (summary.steps, summary.communicating_steps, communicating_steps_text(summary)) == (3, 3, "")
