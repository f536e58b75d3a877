"""In which phase a rank is while it computes nothing, as pictures."""

from __future__ import annotations

from ddp_prof.analyze.core.step_breakdown import BETWEEN_STEPS, NONE, find_device_phases
from ddp_prof.analyze.core.trace_ranks import find_rank_events
from ddp_prof.range_names import PHASES
from ddp_prof.trace import UNKNOWN
from tests.drawing import draw_trace

LETTER = {index: phase[0] for index, phase in enumerate(PHASES)} | {UNKNOWN: "?", NONE: ".", BETWEEN_STEPS: "-"}


def phases_of(compute: str, launches: str, step: int = 0, **ranges: str) -> tuple[str, str]:
    """For each instant the phase of compute before it and after it; ``.`` none, ``?`` of no phase, ``-`` no step."""
    steps = {} if any(name.startswith("step") for name in ranges) else {"step 0": "#" * len(compute)}
    (rank,) = find_rank_events(draw_trace(ranges=steps | ranges, launches={"main": launches}, streams={7: compute}))
    phases = find_device_phases(rank.events, len(rank.steps))
    rows = [row for row in range(len(phases)) if phases.step[row] == step]
    pictures = []
    for column in (phases.before, phases.after):
        held = [max(row for row in rows if phases.start_ns[row] <= time) for time in range(len(compute))]
        pictures.append("".join(LETTER[int(column[row])] for row in held))
    return pictures[0], pictures[1]


def test_between_compute_of_one_phase_and_of_two() -> None:
    assert phases_of(
        compute="..aa..cc...dd..ee..",
        launches="ac......de",
        forward="####",
        backward="........##",
    ) == (
        "..fffffffffbbbbbbbb",
        "ffffffbbbbbbbbb....",
    )


def test_compute_of_no_phase_is_a_helpers_beside_named_phases() -> None:
    """A data loader's kernel between two of forward does not end forward."""
    assert phases_of(compute=".aa.xx.cc.", launches="ac..x", forward="###") == ("." + "f" * 9, "fffffff...")


def test_without_forward_compute_of_no_phase_counts() -> None:
    assert phases_of(compute=".aa.xx.cc.", launches="ac..x", backward="###") == (".bbb???bbb", "b???bbb...")


def test_compute_launched_in_synchronize_tells_no_phase() -> None:
    found = phases_of(compute=".aa.yy.oo.", launches="a.y.o", backward="##", synchronize="..##", optimizer="....#")
    assert found == (".bbbbbbooo", "boooooo...")


def test_an_optimizer_that_steps_within_backward_does_not_end_it() -> None:
    found = phases_of(
        compute=".ff.bb.oo.bb.pp..qq.",
        launches="f..b.o.b.p.q........",
        forward="##",
        backward="..#######",
        **{
            "optimizer|bucket=0": ".....##",
            "synchronize": ".........####",
            "optimizer|bucket=1": ".........##",
            "optimizer": "...........##",
        },
    )
    assert found == (".fffbbbbbbbbbooooooo", "fbbbbbbbbbooooooo...")


def test_an_optimizer_between_two_networks_of_a_step_ends_backward() -> None:
    """As of a generator and a discriminator: what the first optimizer exposes is exposed in it, not between phases."""
    found = phases_of(
        compute=".bb.oo.pp.ff.cc.qq.",
        launches="b.opf.c.q..........",
        forward="....##",
        backward="##....##",
        optimizer="..##....###",
    )
    assert found == (".bbboooooofffbbbooo", "boooooofffbbbooo...")


def test_each_step_has_stretches_of_its_own() -> None:
    steps = {"step 0": "####......", "step 1": "....######", "forward": "####", "backward": "....##"}
    assert phases_of(compute=".aa..bb...", launches="a...b", **steps) == (".fffffffff", "f.........")
    assert phases_of(compute=".aa..bb...", launches="a...b", step=1, **steps) == (".....bbbbb", "bbbbb.....")
    assert phases_of(compute=".aa..bb...", launches="a...b", step=2, **steps) == ("-" * 10, "." * 10)


def test_a_step_without_compute_is_of_no_phase() -> None:
    assert phases_of(compute=".aa.", launches="a", step=1, **{"step 0": "##..", "step 1": "..##"}) == ("....", "....")
