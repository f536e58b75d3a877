"""Names that others write: each example of the table is taken for what the table says."""

from __future__ import annotations

import re

import pytest

from ddp_prof.analyze.core.steps import KNOWN_NAMES, KnownName, find_phases, find_steps
from ddp_prof.analyze.inventory import take_inventory
from ddp_prof.range_names import PHASES, STEP
from ddp_prof.trace import UNKNOWN
from tests.drawing import PID, draw_trace

EXAMPLES = [(known, name) for known in KNOWN_NAMES for name in known.examples]


@pytest.mark.parametrize(("known", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_an_example_is_taken_for_its_kind(known: KnownName, name: str) -> None:
    trace = draw_trace(ranges={name: "####", "setup": "######"})
    steps = find_steps(trace, PID).steps
    kinds = find_phases(trace, PID).kind.tolist()
    if known.kind == STEP:
        assert (len(steps), kinds) == (1, [])
        assert steps.number.tolist() == [3 if "3" in name else UNKNOWN]
    else:
        assert (len(steps), kinds) == (0, [PHASES.index(known.kind)])
    assert take_inventory(trace).recognized == ((known.kind, name, known.writer),)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("iteration 12, op_id = 7", STEP),
        ("train_step, op_id = 7", STEP),
        ("## forward ##, op_id = 7", "forward"),
        ("DistributedDataParallel.forward, op_id = 7, sizes = [[8, 4]]", "forward"),
        ("backward, seq = 3, op_id = 7", "backward"),
        ("Optimizer.step#AdamW.step, op_id = 7", "optimizer"),
        ("optimizer, op_id = 7, sizes = [[]], input_op_ids = [(5,0)]", "optimizer"),
    ],
)
def test_what_torch_s_emit_nvtx_appends_to_a_name_does_not_matter(name: str, kind: str) -> None:
    trace = draw_trace(ranges={name: "####"})
    found = [STEP] * len(find_steps(trace, PID).steps) + [
        PHASES[kind] for kind in find_phases(trace, PID).kind.tolist()
    ]
    assert found == [kind]


@pytest.mark.parametrize("known", KNOWN_NAMES, ids=lambda known: f"{known.kind}-{known.writer}")
def test_each_pattern_is_needed_by_its_examples(known: KnownName) -> None:
    for name in known.examples:
        matching = [other for other in KNOWN_NAMES if re.search(other.pattern, name, re.IGNORECASE)]
        assert matching == [known]


@pytest.mark.parametrize(
    "name",
    [
        "step size 3",
        "step 3 of the tutorial",
        "Step 3: load the model",
        "step_3_load",
        "step 3.5",
        "step[DECODE bs=3]",  # SGLang serves requests
        "steps 3",
        "Warmup Step 3",
        "validation step 3",
        "optimizer_step_3",
        "micro_step_3",
        "iteration_3_ga_step_0",
        "iteration_time",
        "batch_norm_1",
        "batch_idx_3",
        "batch_size_3",
        "Batch Size: 3",
        "Rank 0: Forward:3",
        "measure_forward",
        "measured_3",
        "gpu_model_runner: forward",  # vLLM serves requests
        "[Executor] _forward_step 3: 0 ctx reqs, 0 ctx tokens, 8 gen reqs",  # TensorRT-LLM
        "## op1.backward ##",  # of a torch.autograd.Function
        "backward_and_optimizer",
        "FullyShardedDataParallel._pre_backward_hook",
        "Optimizer.zero_grad#AdamW.zero_grad",
        "optimized_gemm",
        "FSDP::pre_backward (layers.3)",
        "FSDP::all_gather (layers.3)",
        "[pl][profile][Strategy]DDPStrategy.pre_backward",
        "backward_hooks_setup",
        "forwarder",
        "epoch 3",
        "batch_norm",
        "step into",
        "step",  # the optimizer's, as often as not
        "training_step",  # Lightning's forward
        "val_step",
        "DeepSpeedEngine.allreduce_gradients",
        "ncclAllReduce",
    ],
)
def test_what_is_neither_step_nor_phase_is_left(name: str) -> None:
    trace = draw_trace(ranges={name: "####"})
    assert len(find_steps(trace, PID).steps) == len(find_phases(trace, PID)) == 0


def test_ours_are_named_as_ours() -> None:
    trace = draw_trace(ranges={"step|index=7": "####", "ProfilerStep#9": "####"})
    assert take_inventory(trace).recognized == (("step", "step|index=7", "ddp_prof"),)
