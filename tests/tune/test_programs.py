"""Unchanged programs in a try: arguments set, steps timed, ended cleanly on all ranks, and nothing else touched."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ddp_prof.capture.processes import _find_marked_processes, hold_folder
from ddp_prof.errors import OutOfMemoryError, WorkloadError
from ddp_prof.tune.measure import SETTLING, TUNE_VARIABLE, Measured, Program, is_todays
from ddp_prof.tune.tries import TODAY, parse_tries
from tests.command_line import run
from tests.forked_torchrun import forked_torchrun
from tests.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WARMUP, STEPS = 2, 4
DDP_PROF = Path(sys.executable).with_name("ddp-prof")
# As others write it: torch's DDP, a plain loop, nothing of ours. What comes after training must not happen in a try.
SETUP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])
"""
AFTER = """
with open("after", "w") as checkpoint:
    checkpoint.write("trained")
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(os.environ.get("EPOCHS", "50"))):
    optimizer.zero_grad()
    (model(torch.randn(4, 32)).square().mean() * float(os.environ.get("SCALE", "1"))).backward()
    optimizer.step()
"""
PLAIN = SETUP + "model = DistributedDataParallel(model)\n" + LOOP + AFTER
ACCUMULATION = (
    SETUP
    + """
model = DistributedDataParallel(model, None, None, 0)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(90):
    if step % 3 < 2:
        with model.no_sync():
            model(torch.randn(4, 32)).square().mean().backward()
        continue
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    + AFTER
)
SCALER = (
    SETUP
    + """
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(50):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 32)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    + AFTER
)
# Catches everything, and would train on.
STUBBORN = (
    SETUP
    + """
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    try:
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
    except BaseException:
        pass
"""
    + AFTER
)
# What a trainer does at any end: its ranks leave together.
TIDY = (
    SETUP
    + """
model = DistributedDataParallel(model)
try:
"""
    + LOOP.replace("\n", "\n    ")
    + """
finally:
    dist.barrier()
    dist.destroy_process_group()
"""
    + AFTER
)
SHARDED = (
    SETUP
    + """
from torch.distributed.fsdp import fully_shard
for layer in model:
    fully_shard(layer)
fully_shard(model)
"""
    + LOOP
    + AFTER
)
# Its own thread would run for ever.
HELD = (
    SETUP
    + """
import threading
sys.modules["ddp_prof.annotate.trial"].PATIENCE_S = 0.5
model = DistributedDataParallel(model)
threading.Thread(target=threading.Event().wait).start()
"""
    + LOOP
    + AFTER
)
UNEVEN = (
    SETUP
    + """
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    time.sleep(0.02 * dist.get_rank())
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
"""
    + AFTER
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``torchrun`` forks its ranks."""
    with forked_torchrun(tmp_path_factory.mktemp("tune") / "programs") as folder:
        yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def measure(
    folder: Path, environ: dict[str, str], text: str, tried: str | None = None, warmup: int = WARMUP, steps: int = STEPS
) -> Measured:
    """One run, in ``folder``, where the program would leave a file after its training."""
    script = folder / "train.py"
    script.write_text(text.replace('"after"', repr(str(folder / "after"))))
    program = Program(("torchrun", "--nproc-per-node", "2", str(script)), warmup, steps)
    (wanted,) = parse_tries([tried]) if tried else (TODAY,)
    return program.measure(wanted, environ, 300)


@pytest.mark.parametrize(
    "text",
    [PLAIN, ACCUMULATION, SCALER, STUBBORN, TIDY, SHARDED, HELD, UNEVEN],
    ids=["plain", "accumulation", "scaler", "stubborn", "tidy", "sharded", "held", "uneven"],
)
def test_a_program_is_timed_and_ended_in_order(tmp_path: Path, programs: dict[str, str], text: str) -> None:
    found = measure(tmp_path, programs, text)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert [rank.done for rank in found.ranks] == [WARMUP + STEPS] * 2, "both ranks end after the same step"
    assert len(found.step_ns) == STEPS
    assert min(found.step_ns) > 0
    passes = 3 if text == ACCUMULATION else 1
    assert [len(rank.losses) for rank in found.ranks] == [passes * (WARMUP + STEPS)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing that follows training was done"


# What trainers do of their own around a loop, in their own words.
TRAINER = """
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}

arguments = TrainingArguments(
    output_dir="out", max_steps=100, use_cpu=True, report_to=[], save_strategy="no", gradient_accumulation_steps=2,
    per_device_train_batch_size=4, disable_tqdm=True, ddp_backend="gloo",
)
Trainer(Model(), arguments, train_dataset=[{"x": torch.randn(8), "labels": 0} for _ in range(1024)]).train()
"""
LIGHTNING = """
import lightning
import torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1024, 8)), batch_size=4)
lightning.Trainer(
    max_steps=100, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
    enable_checkpointing=False,
).fit(Module(), data)
"""


@pytest.mark.trainers
@pytest.mark.parametrize(("text", "passes"), [(TRAINER, 2), (LIGHTNING, 1)], ids=["transformers", "lightning"])
def test_trainers_are_ended_in_order(tmp_path: Path, programs: dict[str, str], text: str, passes: int) -> None:
    found = measure(tmp_path, programs, text.replace('"out"', repr(str(tmp_path / "out"))) + AFTER)
    assert [(rank.rank, rank.done) for rank in found.ranks] == [(0, WARMUP + STEPS), (1, WARMUP + STEPS)]
    assert [len(rank.losses) for rank in found.ranks] == [passes * (WARMUP + STEPS)] * 2
    program = Program(("torchrun", "--nproc-per-node", "2", str(tmp_path / "train.py")), WARMUP, STEPS)
    tries = parse_tries(["bucket_cap_mb=1", "gradient_as_bucket_view"])
    blocks = program.measure_blocks([TODAY, *tries], programs, 300)
    assert [len(lengths) for lengths in blocks.step_ns] == [STEPS] * 3, "its settings change in one run, too"
    assert not (tmp_path / "after").exists()


def test_a_slow_rank_is_in_the_length_of_the_step(tmp_path: Path, programs: dict[str, str]) -> None:
    assert measure(tmp_path, programs, UNEVEN).median_ns >= 20e6


def test_a_gpu_times_the_steps_by_its_events(tmp_path: Path, programs: dict[str, str]) -> None:
    """There is none here: these events say 7 ms."""
    text = PLAIN.replace(
        "optimizer = ",
        """
class Event:
    def __init__(self, enable_timing):
        self.is_recorded = False
    def record(self):
        self.is_recorded = True
    def elapsed_time(self, other):
        assert self.is_recorded and other.is_recorded
        return 7.0
torch.cuda.Event, torch.cuda.is_initialized = Event, lambda: True
torch.cuda.synchronize, torch.cuda.get_device_name = lambda: None, lambda: "a GPU"
optimizer = """,
        1,
    )
    found = measure(tmp_path, programs, text)
    assert found.step_ns == (7e6,) * STEPS
    assert found.ranks[0].device == "a GPU"


@pytest.mark.parametrize("tried", ["bucket_cap_mb=0.004", "gradient_as_bucket_view", "static_graph"])
def test_the_argument_arrives(tmp_path: Path, programs: dict[str, str], tried: str) -> None:
    """The program writes its own model's settings down."""
    text = PLAIN.replace(
        "optimizer = ",
        "import json\n"
        "seen = [model.bucket_bytes_cap / 2**20, model.gradient_as_bucket_view, model.static_graph]\n"
        f"open({str(tmp_path / 'seen')!r} + str(dist.get_rank()), 'w').write(json.dumps(seen))\n"
        "optimizer = ",
        1,
    )
    found = measure(tmp_path, programs, text, tried)
    seen = json.loads((tmp_path / "seen1").read_text())
    names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
    name, _, value = tried.partition("=")
    assert seen[names.index(name)] == (pytest.approx(float(value), rel=0.1) if value else True)
    (setting,) = parse_tries([tried])[0].settings
    assert not is_todays(setting, found.ranks[0].made, {}), "noted is what the program asks for itself"


def test_a_variable_of_the_environment_arrives_and_changes_losses(tmp_path: Path, programs: dict[str, str]) -> None:
    today, again, tried = (measure(tmp_path, programs, PLAIN, one) for one in (None, None, "SCALE=2"))
    losses = [[loss.value for loss in run.ranks[0].losses] for run in (today, again, tried)]
    assert losses[0] == losses[1]
    assert losses[2][0] == pytest.approx(2 * (losses[0][0] or 0))


def test_what_is_tried_for_fully_shard(tmp_path: Path, programs: dict[str, str]) -> None:
    found = measure(tmp_path, programs, SHARDED, "reshard_after_forward=false")
    assert {made.what for made in found.ranks[0].made} == {"fully_shard"}
    (setting,) = parse_tries(["reshard_after_forward=false"])[0].settings
    assert not is_todays(setting, found.ranks[0].made, {})


def test_how_many_modules_are_gathered_ahead(tmp_path: Path, programs: dict[str, str]) -> None:
    """The program writes down what its layers prefetch in the end."""
    text = SHARDED.replace(
        "\nfor _ in range(",
        f"""
def note(optimizer, *_):
    numbers = {{id(layer._get_fsdp_state()): at for at, layer in enumerate([model, *model])}}
    ahead = [
        [[numbers[id(state)] for state in states] for states in
         (layer._get_fsdp_state()._states_to_forward_prefetch, layer._get_fsdp_state()._states_to_backward_prefetch)]
        for layer in model
    ]
    open({str(tmp_path / "seen")!r} + str(dist.get_rank()), "w").write(str(ahead))
optimizer.register_step_pre_hook(note)
for _ in range(""",
        1,
    )
    measure(tmp_path, programs, text, "forward_prefetch=2+backward_prefetch=1")
    ahead = json.loads((tmp_path / "seen1").read_text())
    # The model as a whole is number 0; its layers follow.
    assert ahead == [[[2, 3], [0]], [[3, 4], [1]], [[4, 5], [2]], [[5, 6], [3]], [[6], [4]], [[], [5]]]


# Its own hook would make each gradient 0.
OWN_HOOK = PLAIN.replace(
    "optimizer = ",
    """
def none(state, bucket):
    sent = torch.futures.Future()
    sent.set_result(bucket.buffer().zero_())
    return sent
model.register_comm_hook(None, none)
optimizer = """,
    1,
).replace("torch.randn(4, 32)", "torch.ones(4, 32)")


@pytest.mark.parametrize("hook", ["fp16_compress", "powerSGD"])
def test_a_hook_of_torch_in_place_of_the_programs_own(tmp_path: Path, programs: dict[str, str], hook: str) -> None:
    """Gradients are sent: the loss sinks."""
    found = measure(tmp_path, programs, OWN_HOOK, f"comm_hook={hook}")
    first, *_, last = (loss.value or 0 for loss in found.ranks[0].losses)
    assert last < first


# As on a torch that was built without CUDA, whichever is installed.
WITHOUT_CUDA = PLAIN.replace("import torch\n", "import torch\ntorch.version.cuda = None\n", 1)


@pytest.mark.parametrize(
    ("text", "tried", "said"),
    [
        (PLAIN.replace('"50"', '"5"'), None, "after 5 optimizer steps, and 6 are needed: --warmup 1 --steps 4 would"),
        (SETUP, None, "no rank trained"),
        (SHARDED, "static_graph", "the program calls no DistributedDataParallel"),
        (PLAIN, "reshard_after_forward", "the program calls no fully_shard"),
        (PLAIN.replace("optimizer.step()", "raise ValueError('planted')"), None, "ValueError: planted"),
        (WITHOUT_CUDA, "comm_hook=bf16_compress", "BF16 all reduce communication hook required"),
    ],
)
def test_why_a_run_fails(tmp_path: Path, programs: dict[str, str], text: str, tried: str | None, said: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        measure(tmp_path, programs, text, tried)
    assert said in str(raised.value)


def test_want_of_memory_is_known(tmp_path: Path, programs: dict[str, str]) -> None:
    text = PLAIN.replace("optimizer.step()", "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate')")
    with pytest.raises(OutOfMemoryError, match="CUDA out of memory"):
        measure(tmp_path, programs, text)


# Each call of the hook sleeps: few large buckets win. The model has 6 layers of 4 KiB. Steps are timed by a clock of
# the program, so that a busy machine changes no verdict: it knows the hook's sleep, and about 60 ms of other work.
SLOW_CALLS = PLAIN.replace(
    "optimizer = ",
    """
import random
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
spent_ns = 0
def spend(seconds):
    global spent_ns
    spent_ns += int(seconds * 1e9)
def slow(state, bucket):
    time.sleep(0.05)
    spend(0.05)
    return allreduce_hook(None, bucket)
if "ddp_prof.annotate.trial" in sys.modules:
    time.perf_counter_ns = lambda: spent_ns
model.register_comm_hook(None, slow)
optimizer = """,
    1,
).replace("Parallel(model)", "Parallel(model, bucket_cap_mb=0.004)")
SLOW_CALLS = SLOW_CALLS.replace("optimizer.step()", "optimizer.step(); spend(random.uniform(0.058, 0.062))")


def test_a_planted_cause_is_found(tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Six buckets of 50 ms each today, one with 25 MB."""
    script = tmp_path / "train.py"
    script.write_text(SLOW_CALLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", programs["PATH"])
    command = [
        "tune",
        "--try",
        "bucket_cap_mb=0.004,25",
        "--steps",
        "5",
        "--warmup",
        "3",
        "--rounds",
        "6",
    ]
    command += ["--minutes", "30", "--store", "tune.db", "--format", "json"]
    done = run(*command, "--", "torchrun", "--nproc-per-node", "1", script)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    small, large = document["tries"]
    assert (small["outcome"], small["pairs"]) == ("set today", 0)
    assert (large["outcome"], large["losses"], large["pairs"]) == ("faster", "same", 6)
    assert 0 < large["gain_low"] < large["gain"] < large["gain_high"] < 1
    assert large["gain"] == pytest.approx(1 - (50 + 60) / (6 * 50 + 60), abs=0.01)
    assert document["write"] == "DistributedDataParallel(model, bucket_cap_mb=25)"
    assert TUNE_VARIABLE in done.stderr
    assert not (tmp_path / "after").exists()
    monkeypatch.setenv("NSYS", "none")
    again = run(*command, "--why", "--html", "tune.html", "--", "torchrun", "--nproc-per-node", "1", script)
    assert again.exit_code == 0, again.output
    known, compared = json.loads(again.stdout)
    assert known == {**document, "foreseen": known["foreseen"]}, "all of it was in the store"
    # The hook sleeps before it communicates: this is no waiting for communication, so the gain is beyond the bound.
    assert [(one["source"], one["is_bound"]) for one in known["foreseen"][:2]] == [
        ("hiding communication", True),
        ("any network", True),
    ]
    assert known["foreseen"][0]["measured"] == "beyond"
    assert "chart-waterfall" in (tmp_path / "tune.html").read_text()
    # One capture of each, beside the store.
    before, after = compared["variants"]
    assert [one["label"] for one in (before, after)] == ["today/train", "bucket_cap_mb=25/train"]
    assert before["collectives"] > after["collectives"]
    assert before["step_ns"] > after["step_ns"]
    assert not (tmp_path / "after").exists()


# Gradients stay where they are between steps, a part of the program holds the wrapper, another hooks on to it, and its
# own hook counts the buckets.
HELD_WRAPPER = """
import json
calls = []
def count(state, bucket):
    calls.append(model.training)
    sent = torch.futures.Future()
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    sent.set_result(bucket.buffer())
    return sent
model = DistributedDataParallel(torch.nn.Sequential(*model, torch.nn.BatchNorm1d(32)))
model.register_comm_hook(None, count)
held, forwards = [model], []
model.register_forward_hook(lambda *_: forwards.append(1))
model.eval()
optimizer = torch.optim.AdamW(model.parameters())
seen = []
for _ in range(int(os.environ.get("STEPS", "50"))):
    optimizer.zero_grad(set_to_none=False)
    loss = held[0](torch.randn(4, 32)).square().mean()
    loss.backward()
    seen.append([len(calls), loss.item()])
    with open("seen" + os.environ["RANK"], "w") as file:
        json.dump([seen, len(forwards), any(calls)], file)
    optimizer.step()
"""


def test_settings_change_between_blocks_of_one_run(tmp_path: Path, programs: dict[str, str]) -> None:
    """The program trains as it would: same losses, and its hooks go on; each block has the buckets of its settings."""
    script = tmp_path / "train.py"
    script.write_text((SETUP + HELD_WRAPPER).replace('"seen"', repr(str(tmp_path / "seen"))))
    program = Program(("torchrun", "--nproc-per-node", "2", str(script)), 2, 4)
    tries = parse_tries(["bucket_cap_mb=0.004", "gradient_as_bucket_view+bucket_cap_mb=0.004", "static_graph"])
    blocks = [TODAY, *tries, TODAY]
    found = program.measure_blocks(blocks, programs, 300)
    steps = 2 + len(blocks) * (SETTLING + 4)
    assert [len(lengths) for lengths in found.step_ns] == [4] * len(blocks)
    seen, forwards, is_training = json.loads((tmp_path / "seen1").read_text())
    assert (len(seen), forwards, is_training) == (steps, steps, False)
    calls = [after[0] - before[0] for before, after in pairwise(seen)]
    last = [calls[2 + (SETTLING + 4) * (at + 1) - 2] for at in range(len(blocks))]
    assert last == [1, 6, 6, 1, 1], "buckets of the last step of each block"
    alone = replace(program, steps=steps - 2).measure(TODAY, programs, 300)
    assert [loss.value for loss in alone.ranks[1].losses] == pytest.approx([loss for _, loss in seen], rel=1e-4)


def test_a_tuning_in_one_process(tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    script, starts = tmp_path / "train.py", tmp_path / "starts"
    script.write_text(
        f"open({str(starts)!r}, 'a').write('x')\n" + SLOW_CALLS.replace("50", "100").replace("(0.05)", "(0.01)")
    )
    monkeypatch.setenv("PATH", programs["PATH"])
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--in-process", "--try", "bucket_cap_mb=25", "--steps", "3", "--warmup", "1", "--rounds", "6"]
    words += ["--store", tmp_path / "tune.db", "--format", "json", "--", "torchrun", "--nproc-per-node", "1", script]
    done = run(*words)
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["tries"]
    assert (one["outcome"], one["pairs"], one["losses"]) == ("faster", 6, "same")
    assert one["gain"] == pytest.approx(1 - (10 + 60) / (6 * 10 + 60), abs=0.01)
    assert starts.read_text() == "xxx", "once for today's settings, for all rounds, and for the losses"
    assert run(*words).stdout == done.stdout
    assert starts.read_text() == "xxx"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN.replace('"50"', '"9"'), "the program ends after 9 optimizer steps, and 2 blocks in one run need 12"),
        (SETUP + LOOP, "the program calls no DistributedDataParallel"),
        (
            PLAIN.replace("optimizer = ", "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as p\n"
            "model.register_comm_hook(p.PowerSGDState(None, start_powerSGD_iter=2), p.powerSGD_hook)\noptimizer = ", 1),
            "because its communication hook has a state, perhaps of its first buckets: leave out --in-process",
        ),
    ],
)  # fmt: skip
def test_why_settings_cannot_change_in_one_run(tmp_path: Path, programs: dict[str, str], text: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text.replace('"after"', repr(str(tmp_path / "after"))))
    with pytest.raises(WorkloadError) as raised:
        Program(("torchrun", "--nproc-per-node", "1", str(script)), 2, 2).measure_blocks(
            [TODAY, *parse_tries(["static_graph"])], programs, 300
        )
    assert said in str(raised.value)


def test_one_tuning_at_a_time(tmp_path: Path) -> None:
    """Two would measure each other."""
    with hold_folder(tmp_path, lambda: None):
        done = run("tune", "--try", "static_graph", "--store", tmp_path / "tune.db", "--", sys.executable, "t.py")
    assert done.exit_code == 1
    assert "another tuning writes there" in done.stderr


# Ranks that no launcher names; torch is imported in them alone.
SPAWNED = """
import multiprocessing, os

def train(rank, world, meeting):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    meeting = f"file://{os.environ['MEETING']}.{os.getpid()}"
    spawning = multiprocessing.get_context("spawn")
    ranks = [spawning.Process(target=train, args=(rank, 2, meeting)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""
# Its ranks, of which each says that it is there, do not end by themselves.
PAUSED = """
import os, subprocess, sys
rank = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"
words = [[sys.executable, "-c", rank, os.environ["PAUSE"] + number] for number in "01"]
for process in [subprocess.Popen(each, start_new_session=True) for each in words]:
    process.wait()
"""


@pytest.mark.nightly
def test_ranks_that_the_program_spawns_itself(tmp_path: Path) -> None:
    """By the door that every program has: the sitecustomize of this package (tests/capture/test_recorder.py)."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    program = Program((sys.executable, str(script)), WARMUP, STEPS)
    environ = {**os.environ, "MEETING": str(tmp_path / "meeting")}
    (tried,) = parse_tries(["gradient_as_bucket_view"])
    found = program.measure(tried, environ, 600)
    assert [(rank.rank, rank.done) for rank in found.ranks] == [(0, WARMUP + STEPS), (1, WARMUP + STEPS)]


def test_a_stopped_tuning_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PAUSED)
    environ = {**os.environ, "PAUSE": str(tmp_path / "paused")}
    command = [DDP_PROF, "tune", "--try", "static_graph", "--store", tmp_path / "tune.db", "--", sys.executable, script]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as tuning:
        wait_until(lambda: len([*tmp_path.glob("paused*")]) == 2 or tuning.poll() is not None)
        tuning.send_signal(signal.SIGINT)
        _, said = tuning.communicate()
    assert tuning.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-1] == "stopped: no run was finished"  # and there is no database that would have it
    assert not (tmp_path / "tune.db").exists()
    assert _find_marked_processes(f"PAUSE={tmp_path / 'paused'}") == {}


def test_the_command_lines_of_a_dry_run() -> None:
    done = run("tune", "--dry-run", "--try", "bucket_cap_mb=5", "--try", "A_B=a b", "--", "torchrun", "t.py", "--x")
    assert done.stdout.splitlines() == [
        "torchrun t.py --x",
        "torchrun t.py --x  # with DistributedDataParallel(model, bucket_cap_mb=5)",
        shlex.join(["A_B=a b"]) + " torchrun t.py --x",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--try", "bucket=5", "--", "torchrun", "t.py"], "give one of bucket_cap_mb"),
        (["--try", "static_graph", "--worth", "1", "--", "torchrun", "t.py"], "as in 1% or 0.5%"),
        (["--try", "static_graph"], "Missing argument"),
        *(
            (
                [one, *other, "--try", "static_graph", "--", "torchrun", "t.py"],
                f"has no result to show: leave out {other[0]}",
            )
            for one in ("--plan", "--dry-run")
            for other in (["--html", "page.html"], ["--why"], ["--format", "json"])
        ),
        (["--plan", "--in-process", "--try", "static_graph", "--", "torchrun", "t.py"], "leave out --in-process"),
        (["--in-process", "--try", "A=1", "--", "torchrun", "t.py"], "A=1 cannot be set between two steps"),
        (["--in-process", "--try", "comm_hook=powerSGD", "--", "torchrun", "t.py"], "cannot be set between two"),
        (["--plan", "--dry-run", "--try", "static_graph", "--", "torchrun", "t.py"], "exclude each other"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = run("tune", *arguments)
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_a_part_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("tune", "--try", "static_graph", "--", "torchrun", "--nnodes", "2", "--node-rank", "0", "t.py")
    assert done.exit_code == 1
    assert "on one machine" in done.stderr
