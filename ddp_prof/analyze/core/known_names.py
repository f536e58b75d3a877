"""Names that other programs give to steps and phases; docs/names.md is generated from this table."""

from dataclasses import dataclass

from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, STEP, SYNCHRONIZE

_LOOPS = "training loops"
_OURS = "ddp_prof, training loops"
_EPOCH = r"^(?:#{1,9} ?)?(?:epoch[ _:=#]*\d+[ ,_/-]+)?(?:training|train|global)?[ _/-]?"
_NUMBER = r"[ _#:=/-]{0,2}(\d+)(?:[ _]?\(?rank[ _]?\d+\)?)?(?: ?#+)?$"


@dataclass(frozen=True)
class KnownName:
    """Names of one kind by one writer.

    Attributes:
        kind: ``step``, or a phase.
        writer: Who writes them.
        pattern: Regular expression, in any case; the first group of a step's is its number.
        examples: Names that it is for.
    """

    kind: str
    writer: str
    pattern: str
    examples: tuple[str, ...]


KNOWN_NAMES = (
    KnownName(STEP, "torch.profiler", r"^ProfilerStep(?:#(\d+)|\*)?$", ("ProfilerStep#3", "ProfilerStep*")),
    KnownName(
        STEP, "Megatron-Bridge", r"\.training_step_(\d+)$", ("megatron.bridge.training.train.train.training_step_3",)
    ),
    KnownName(
        STEP, _LOOPS, rf"{_EPOCH}(?:step|iteration|iter){_NUMBER}",
        ("step 3", "Iteration 3 (rank 0)", "iter_3", "train/step/3", "step_3_rank0", "### step 3", "epoch 0 step 3"),
    ),
    KnownName(STEP, _LOOPS, rf"{_EPOCH}batch{_NUMBER}", ("batch 3", "epoch 1, batch 3")),
    KnownName(STEP, "Lightning", r"^(?:\[pl\]\[profile\])?run_training_batch$", ("[pl][profile]run_training_batch",)),
    KnownName(
        STEP, "JAX", r"^(?:TSL:)?XlaModule:#",
        ("TSL:XlaModule:#prefix=jit(train_step)/jit(main),hlo_module=jit_train_step,program_id=7#",),
    ),
    KnownName(FORWARD, _OURS, r"^#{0,9} ?(?:forward|fwd)(?:[ _]?pass)? ?#*$", ("forward", "fwd", "## forward pass ##")),
    KnownName(FORWARD, "torch", r"^DistributedDataParallel\.forward$", ("DistributedDataParallel.forward",)),
    KnownName(FORWARD, "DeepSpeed", r"^DeepSpeedEngine\.forward$", ("DeepSpeedEngine.forward",)),
    KnownName(
        FORWARD, "Lightning", r"\[Strategy\]\w+\.training_step$", ("[pl][profile][Strategy]DDPStrategy.training_step",)
    ),
    KnownName(
        BACKWARD, _OURS, r"^#{0,9} ?(?:loss[._])?(?:backward|bwd)(?:[ _]?pass)? ?#*$",
        ("backward", "bwd", "loss.backward", "## backward ##"),
    ),
    KnownName(BACKWARD, "DeepSpeed", r"^DeepSpeedEngine\.backward$", ("DeepSpeedEngine.backward",)),
    KnownName(
        BACKWARD, "Lightning", r"\[Strategy\]\w+\.backward$", ("[pl][profile][Strategy]DDPStrategy.backward",)
    ),
    KnownName(SYNCHRONIZE, _OURS, r"^synchronize$", ("synchronize",)),
    KnownName(
        OPTIMIZER, _OURS, r"^#{0,9} ?(?:optimizer|opt)(?:[ _.]?step)? ?#*$|^optimizer\|bucket=\d+$",
        ("optimizer", "opt", "optimizer_step", "optimizer.step"),
    ),
    KnownName(OPTIMIZER, "torch", r"^Optimizer\.step#", ("Optimizer.step#AdamW.step",)),
    KnownName(
        OPTIMIZER, "DeepSpeed", r"^(?:DeepSpeedEngine|DeepSpeedZeroOptimizer\w*)\.step$",
        ("DeepSpeedEngine.step", "DeepSpeedZeroOptimizer_Stage3.step"),
    ),
    KnownName(
        OPTIMIZER, "Lightning", r"\[Strategy\]\w+\.optimizer_step$",
        ("[pl][profile][Strategy]FSDPStrategy.optimizer_step",),
    ),
    KnownName(
        OPTIMIZER, "Megatron-Bridge", r"\.train_step\.optimizer_step$",
        ("megatron.bridge.training.train.train_step.optimizer_step",),
    ),
)  # fmt: skip
"""Of steps the first that occurs is taken, and only where there are no ranges of ours; phases may be of several."""

STEP_PATTERNS = tuple(known.pattern for known in KNOWN_NAMES if known.kind == STEP)


def phase_pattern(phase: str) -> str:
    """Regular expression of all names of a phase."""
    return "|".join(known.pattern for known in KNOWN_NAMES if known.kind == phase)
