"""What ``info`` advises follows from what the trace holds."""

from __future__ import annotations

import pytest

from ddp_prof.analyze.inventory import take_inventory
from tests.drawing import draw_trace


@pytest.mark.parametrize(
    ("thread", "said"),
    [
        ("pt_autograd_0", "it is inferred from autograd's threads"),
        ("main", "and no thread is known to be autograd's"),
    ],
)
def test_backward_is_said_to_be_inferred_only_where_it_is(thread: str, said: str) -> None:
    trace = draw_trace(ranges={"step 0": "####"}, launches={thread: "aN"}, streams={7: ".aa.", 9: "..NN"})
    (advice,) = [text for text in take_inventory(trace).advice if text.startswith("backward")]
    assert said in advice
