"""What ``info`` advises follows from what the trace holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.analyze.why_unknown import ONLY_MPI
from tests.drawing import draw_trace


@pytest.mark.parametrize(
    ("thread", "said"),
    [
        ("pt_autograd_0", "backward is inferred from what autograd's threads launched"),
        ("main", "backward: no range names it, and no thread is known to be autograd's"),
    ],
)
def test_backward_is_said_to_be_inferred_only_where_it_is(thread: str, said: str) -> None:
    """It was said twice: in the advice and in the warnings."""
    trace = draw_trace(ranges={"step 0": "####"}, launches={thread: "aN"}, streams={7: ".aa.", 9: "..NN"})
    found = take_inventory(trace)
    (line,) = [text for text in (*found.advice, *found.warnings) if text.startswith("backward")]
    assert line.startswith(said)


def test_only_the_name_of_a_range_is_recognized() -> None:
    """A kernel that Triton compiled from a function 'backward' was, beside 'backward: no range names it'."""
    trace = draw_trace(
        ranges={"step 0": "####", "forward": "#..."}, launches={"main": "aN"}, streams={7: ".aa.", 9: "..NN"}
    )
    of_kernels = {"compute a": "backward"}
    found = take_inventory(replace(trace, names=tuple(of_kernels.get(name, name) for name in trace.names)))
    assert [(kind, name) for kind, name, _ in found.recognized] == [("step", "step 0"), ("forward", "forward")]
    assert any(line.startswith("backward: no range names it") for line in found.advice)


@pytest.mark.parametrize(
    ("name", "said"),
    [("nccl:all_reduce", "overlap: no NCCL kernel was recorded, "),
     ("MPI_Allreduce", f"overlap: {ONLY_MPI}"), ("load", None)],
)  # fmt: skip
def test_what_hides_communication_is_missing_for_overlap(name: str, said: str | None) -> None:
    """``summary`` says so and then names ``info``, which said nothing of it."""
    trace = draw_trace(
        ranges={"step 0": "####", name: ".##."}, launches={"main": "ab", "pt_autograd_0": "..c."}, streams={7: ".abc"}
    )
    found = [line for line in take_inventory(trace).advice if line.startswith("overlap")]
    assert [line.startswith(said or "-") for line in found] == ([True] if said else [])


def test_a_step_that_was_still_open_is_not_taken_off_the_steps_that_count() -> None:
    """It is none of those that were found; one step was told for two."""
    drawn = draw_trace(
        ranges=[(f"step {step}", "." * 4 * step + "####") for step in range(3)],
        launches={"main": "aN..bM..cO"},
        streams={7: ".aa..bb..cc", 9: "..NN..MM..OO"},
    )
    spans = drawn.spans
    found = take_inventory(replace(drawn, spans=replace(spans, is_open=(spans.start_ns == 8).astype(np.int64))))
    (process,) = found.processes
    assert (process.steps, process.incomplete_steps, process.collectives) == (2, 0, 3)
