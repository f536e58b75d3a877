"""A stranger's program: recorded without a line added, its output, exit code and end its own."""

from __future__ import annotations

import gzip
import json
import multiprocessing.util
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddp_prof as dp
from ddp_prof.capture import job
from ddp_prof.capture.job import Job, choose_nsys, export_reports
from ddp_prof.capture.losses import find_losses
from ddp_prof.capture.processes import _find_marked_processes, claim, scratch_folder
from ddp_prof.capture.variant import LOST_RACE
from ddp_prof.cli.capture import _why_nothing
from ddp_prof.errors import WorkloadError
from ddp_prof.ingest import load
from ddp_prof.ingest.load import load_trace
from ddp_prof.ingest.nsys_program import Nsys
from ddp_prof.manifest import write_manifest
from tests.capture.conftest import exported, written_by_torch
from tests.command_line import run
from tests.examples import IS_NIGHTLY
from tests.forked_torchrun import forked_torchrun
from tests.test_manifest import MANIFEST
from tests.waiting import wait_until

DDP_PROF = Path(sys.executable).with_name("ddp-prof")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
FORKED = ["torchrun", "--nproc-per-node", "2"]
STEPS, LAYERS = 5, 3
# As others write it: torch's DDP, a plain loop, nothing of ours.
TRAIN = f"""
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range({LAYERS})])
model = DistributedDataParallel(model, bucket_cap_mb=64 * 64 * 4 / 2**20)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(float(sys.argv[2]))
if not dist.get_rank():
    print("trained on", dist.get_world_size())
"""

# A rank that no launcher names, and that has no process group any more at the end.
STARTED = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ddp_prof import annotate

def start(rank):
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    train()
    dist.destroy_process_group()
"""
# The same as a whole program; it imports torch in its ranks alone.
SPAWNED = """
import multiprocessing, sys

def start(rank):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    globals().update(locals())
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=int(sys.argv[2]))
    train()
    dist.destroy_process_group()
    sys.exit(int(sys.argv[3]))

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    ranks = [spawning.Process(target=start, args=(rank,)) for rank in range(int(sys.argv[2]))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(rank.exitcode for rank in ranks))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``torchrun`` forks its ranks."""
    with forked_torchrun(tmp_path_factory.mktemp("job") / "programs") as folder:
        yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def capture_spawned(
    folder: Path, train: str, profiler: str, ranks: int, exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Capture ranks that the program spawns itself."""
    script = folder / "train.py"
    script.write_text(train + SPAWNED)
    command = [DDP_PROF, "capture", "-o", folder, "--profiler", profiler, "--"]
    return run_nsys([*command, sys.executable, script, meeting_place(folder), str(ranks), str(exit_code)])


def meeting_place(folder: Path) -> str:
    """Where ranks find each other: a file. A port that was free when a test asked may be taken when they do."""
    return f"file://{folder / 'store'}"  # torch does not decode what as_uri() writes for a blank


def record(program: str, folder: Path, *arguments: str, world: int) -> dp.Run:
    """The run that a program leaves which is marked as under capture."""
    record_ranks(program, folder, *arguments, world=world)
    (run,) = dp.load_runs([folder])
    return run


def record_ranks(program: str, folder: Path, *arguments: str, world: int) -> None:
    """Let a program run as ranks that are marked as under capture.

    They are forked from a server that has imported torch. How capture starts the marks, other programs show.
    """
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    argv = ["train.py", meeting_place(folder), *arguments]
    assert fork_ranks(partial(_record, program, str(folder / "train"), argv), world) == [True] * world


def _record(program: str, trace: str, argv: list[str], rank: int, world: int, directory: str) -> bool:
    from ddp_prof.annotate import unattended

    os.environ[unattended.TRACE_VARIABLE], sys.argv = trace, argv
    unattended.start()
    exec(program, {"__name__": "train", "rank": rank})
    multiprocessing.util._exit_function()  # as at the end of any process of multiprocessing
    return True


def run_nsys(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with nsys in it, again where nsys has lost a race with itself before the program began."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return run_nsys(command, **options) if LOST_RACE.search(done.stderr.encode()) else done


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "profiler", [pytest.param("torch", marks=pytest.mark.nightly), pytest.param("nsys", marks=pytest.mark.nsys)]
)
def test_a_program_that_knows_nothing_of_us_is_measured(tmp_path: Path, profiler: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [DDP_PROF, "capture", "-o", tmp_path / "out", "--profiler", profiler, "--", *TORCHRUN, script]
    done = run_nsys([*command, str(STEPS), "0"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained on 2\n")
    assert "communication" in done.stdout
    (run,) = dp.load_runs(tmp_path / "out")
    overlap = run.overlap()
    collectives = run.collectives().collectives
    assert [rank.rank for rank in overlap.ranks] == [0, 1]
    for rank in overlap.ranks:
        # The first is warm-up, and the second, in which ranks agree on new buckets, too.
        assert len(rank.steps) == STEPS - 2
        reduced = [each for each in collectives if each.rank == rank.rank and each.op == "all_reduce"]
        assert len(reduced) == (STEPS - 2) * LAYERS
        assert rank.collectives == len(reduced)
        assert [each.bucket for each in reduced][-LAYERS:] == [*range(LAYERS)]
        assert None not in [each.blocking_ns for each in reduced]
        assert rank.comm_ns > 0
        assert rank.overlapped_ns + rank.exposed_ns == rank.comm_ns


SHARDED = """
def train():
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
"""


def _mark(program: str, argv: list[str], rank: int, world: int, directory: str) -> list[tuple[str, int, int]]:
    """The ranges that nsys would record of a program under capture, with their start and end."""
    from ddp_prof import annotate
    from ddp_prof.annotate import unattended

    sys.argv = argv
    with annotate.only_sink(recorder := annotate.Recorder()):
        unattended.start()
        exec(program, {"__name__": "train", "rank": rank})
    return [(each.text, each.start_ns, each.end_ns) for each in recorder.ranges]


@pytest.mark.torch
@pytest.mark.slow
def test_ranks_without_ddp_are_marked_from_the_first_forward_pass(tmp_path: Path) -> None:
    """Which is warm-up, too. What comes of it in nsys is tested in a nightly."""
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    argv = ["train.py", meeting_place(tmp_path)]
    for rank, ranges in enumerate(fork_ranks(partial(_mark, SHARDED + STARTED + "start(rank)", argv), 2)):
        of_process = {text for text, *_ in ranges if text.startswith("process|")}
        assert of_process == {f"process|rank={rank}|world=2|variant=SGD|backend=gloo|device=cpu"}
        steps = [each for each in ranges if each[0].startswith("step|")]
        assert [text for text, *_ in steps] == ["step|index=0|warmup=1", "step|index=1", "step|index=2"]
        for op in ("all_gather|", "reduce_scatter|"):
            at = [(start, end) for text, start, end in ranges if text.startswith(op)]
            assert len(at) == 3
            assert all(
                begun <= start <= end <= ended for (start, end), (_, begun, ended) in zip(at, steps, strict=True)
            )


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.nsys
@pytest.mark.slow
def test_nightly_ranks_without_ddp_are_known_to_nsys(tmp_path: Path) -> None:
    done = capture_spawned(tmp_path, SHARDED, "nsys", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "belongs to no step" not in " ".join(done.stdout.split()), "the first forward pass is warm-up, too"
    (run,) = dp.load_runs(tmp_path / "train.sqlite")
    assert run.overlap().world_size == 2
    assert sorted(rank.rank for rank in run.overlap().ranks) == [0, 1]


@pytest.mark.torch
@pytest.mark.slow
def test_a_program_that_profiles_itself_is_left_to_it(tmp_path: Path) -> None:
    """Of two torch profilers in one process one ends by a segmentation fault."""
    own, errors = tmp_path / "own.json", tmp_path / "errors"
    program = (
        "import os, sys, torch\n"
        f"os.dup2(os.open({str(errors)!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model(torch.ones(4)).sum().backward()\n"
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:\n"
        "    model(torch.ones(4)).sum().backward()\n"
        f"recorded.export_chrome_trace({str(own)!r})\n"
    )
    record_ranks(program, tmp_path, world=1)
    assert "the program starts its own torch.profiler, so ddp-prof records nothing" in errors.read_text()
    assert b"AddmmBackward0" in own.read_bytes() or b"backward" in own.read_bytes()
    assert not [*tmp_path.glob("train*")]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("closing", ["sys.stderr = None", "sys.stderr = open(os.devnull, 'w'); sys.stderr.close()"])
def test_a_program_without_stderr_goes_on_where_capture_has_something_to_say(tmp_path: Path, closing: str) -> None:
    own = tmp_path / "own.json"
    program = (
        "import os, sys, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model(torch.ones(4)).sum().backward()\n"
        f"{closing}\n"
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:\n"
        "    model(torch.ones(4)).sum().backward()\n"
        f"recorded.export_chrome_trace({str(own)!r})\n"
    )
    record_ranks(program, tmp_path, world=1)
    assert own.exists()


@pytest.mark.torch
@pytest.mark.slow
def test_steps_that_the_program_marks_hold(tmp_path: Path) -> None:
    run = record(
        "import torch\n"
        "from ddp_prof import annotate\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for index in range(10, 14):\n"
        "    with annotate.step(index):\n"
        "        model(torch.ones(4)).sum().backward()\n"
        "        optimizer.step()\n",
        tmp_path,
        world=1,
    )
    (file,) = run.inventory()
    assert (file.processes[0].steps, file.processes[0].warmup_steps) == (4, 0)


# An optimizer per epoch, over the same parameters; beside it one over others, which steps more often.
OPTIMIZER_PER_EPOCH = """
import torch
model, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
of_critic, kept = torch.optim.SGD(critic.parameters(), lr=0.1), []
for epoch in range(3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept += [optimizer] if KEEPS else []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        for _ in range(3):
            critic(torch.ones(4)).sum().backward()
            of_critic.step()
    scheduler.step()
"""


@pytest.mark.torch
@pytest.mark.slow
# While the program keeps an optimizer, the first step of the next one cannot be told from one of a second optimizer.
@pytest.mark.parametrize(("keeps", "steps"), [(False, [*range(1, 12)]), (True, [1, 2, 3, 5, 6, 8, 9])])
def test_steps_go_on_where_another_optimizer_takes_over_the_parameters(
    keeps: bool, steps: list[int], tmp_path: Path
) -> None:
    """Of twelve steps two counted as one each time: a step that took twice as long, and communicated twice."""
    (rank,) = record(f"KEEPS = {keeps}\n{OPTIMIZER_PER_EPOCH}", tmp_path, world=1).overlap().ranks
    assert [step.step for step in rank.marked_steps] == steps


# Two models, one after the other, as a teacher and its student, of which the first one's optimizer may be kept; and a
# model that is copied and trained a little within each step.
ONE_AFTER_ANOTHER = """
import torch

def train(steps):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return {kept}

first = train(4)
train(15)
"""
WITHIN = """
import copy, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(15):
    own = copy.deepcopy(model)
    of_own = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(3):
        own(torch.ones(4)).sum().backward()
        of_own.step()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "steps"),
    [
        (ONE_AFTER_ANOTHER.format(kept="optimizer"), [1, 2, 3, 5, 6, 7, 8, 9]),  # in step 4 it trains ten times
        (ONE_AFTER_ANOTHER.format(kept="model"), [1, 2, 3, *range(5, 18)]),  # in step 4 twice
        (WITHIN, [1, 2, 4, 5, 6, 7, 8]),
    ],
)
def test_steps_go_on_where_another_optimizer_takes_over_the_training(
    program: str, steps: list[int], tmp_path: Path
) -> None:
    """Nothing of the second model was in a step: 94 % of the communication belonged to none."""
    (rank,) = record(program, tmp_path, world=1).overlap().ranks
    assert [step.step for step in rank.marked_steps] == steps


DDP_PER_EPOCH = """
def train():
    base = torch.nn.Linear(64, 64)
    for _ in range(3):
        model = DistributedDataParallel(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_step_in_which_a_ddp_is_made_is_warm_up(tmp_path: Path) -> None:
    """It holds what the construction sends, too, which counted as communication of a step."""
    for rank in record(DDP_PER_EPOCH + STARTED + "start(rank)", tmp_path, world=2).overlap().ranks:
        assert [step.step for step in rank.marked_steps] == [2, 3, 6, 7, 10, 11]
        assert {step.collectives for step in rank.marked_steps} == {1}


STATIC_GRAPH = """
def train():
    model = DistributedDataParallel(torch.nn.Linear(64, 64), static_graph=sys.argv[2] == "from the start")
    if sys.argv[2] == "later":
        model._set_static_graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("when", ["from the start", pytest.param("later", marks=pytest.mark.nightly)])
def test_of_a_static_graph_the_third_step_is_warm_up_too(when: str, tmp_path: Path) -> None:
    """Ranks agree on the order of buckets in it: its two broadcasts more counted as communication of a step."""
    for rank in record(STATIC_GRAPH + STARTED + "start(rank)", tmp_path, when, world=2).overlap().ranks:
        assert [(step.step, step.collectives) for step in rank.marked_steps] == [(3, 1), (4, 1), (5, 1)]


THREE_LINES = """
def train():
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    if sys.argv[2] == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.25)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    annotate.instrument(model, optimizer)
    for index in range(6):
        with annotate.step(index):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("how", "collectives"), [("ddp", 4), ("fsdp", 12)])
def test_three_lines_in_a_program_under_capture(how: str, collectives: int, tmp_path: Path) -> None:
    """Each bucket was marked twice, once by capture; capture's step ended within the program's, or began too late."""
    result = record(THREE_LINES + STARTED + "start(rank)", tmp_path, how, world=2).overlap()
    assert (result.attribution.activities or 0) > 0.99
    assert (result.attribution.device_time or 0) > 0.99
    assert [[step.step for step in rank.steps] for rank in result.ranks] == [[*range(6)]] * 2
    # In the second step DDP's ranks agree on new buckets.
    assert [[step.collectives for step in rank.steps[2:]] for rank in result.ranks] == [[collectives] * 4] * 2
    assert [warning for warning in result.warnings if "ranges of steps" in warning] == []


TWO_OPTIMIZERS = """
def train():
    models = [DistributedDataParallel(torch.nn.Linear(64, 64)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(5):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.slow
def test_what_follows_the_last_step_of_the_first_optimizer_is_no_step(tmp_path: Path) -> None:
    """It holds phases, of the second optimizer, and lasts until the program ends."""
    result = record(TWO_OPTIMIZERS + STARTED + "start(rank)", tmp_path, world=2).overlap()
    ranks = result.ranks
    assert [rank.rank for rank in ranks] == [0, 1], "no launcher names them"
    for rank in ranks:
        # In the second pass of a DDP ranks agree on new buckets, those of the second model after the first one's step.
        assert [step.step for step in rank.marked_steps] == [3, 4]
        assert [step.collectives for step in rank.marked_steps] == [2, 2]
    assert "1 range that could be a step left out: the program ended in it" in result.warnings, "no doubt of the others"


ONE_LAYER = """
def train():
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
"""


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_the_program_spawns_itself_keep_apart_and_its_exit_code_is_told(tmp_path: Path, ranks: int) -> None:
    """No launcher names them, and at the end they have no process group any more; other tests fork several."""
    done = capture_spawned(tmp_path, ONE_LAYER, "torch", ranks, exit_code=3)
    assert done.returncode == 3, done.stderr
    (run,) = dp.load_runs([tmp_path])  # recorded nevertheless
    assert [(rank.rank, len(rank.marked_steps)) for rank in run.overlap().ranks] == [(each, 2) for each in range(ranks)]


# The recorded window opens and closes with a range, as it does with CUDA's calls on a GPU.
LATER_S = 2
WINDOW = f"""
def train():
    import nvtx, os, time

    window, opened = [], sys.argv[4]
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda: None
    def start():
        while dist.get_rank() and not os.path.exists(opened):  # nsys heeds the range that was opened first
            time.sleep(0.01)
        window.append(nvtx.start_range("window", domain="cap"))
        open(opened, "w").close()
    torch.cuda.profiler.start = start
    torch.cuda.profiler.stop = lambda: window and nvtx.end_range(window.pop())
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    # A torch built with CUDA would ask the GPU in each step of AdamW whether a graph is being captured.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        model(torch.randn(8, 64)).sum().backward()
        if dist.get_rank() and step == 4:
            time.sleep({LATER_S})
        optimizer.step()
"""


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.nsys
@pytest.mark.slow
def test_the_first_rank_that_is_done_does_not_cut_off_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "visible_gpus", lambda environ: ["NVIDIA H200"])
    (script := tmp_path / "train.py").write_text(WINDOW + SPAWNED)
    program = [sys.executable, str(script), meeting_place(tmp_path), "2", "0", str(tmp_path / "opened")]
    planned, _ = job.plan_job(program, tmp_path, "nsys", "2:5", os.environ)
    ours = {"--capture-range=cudaProfilerApi": "--capture-range=nvtx", "--trace=cuda,nvtx": "--trace=nvtx"}
    words = [ours.get(word, word) for word in planned.command]
    words.insert(words.index("--capture-range=nvtx"), "--nvtx-capture=window@cap")
    environment = {**os.environ, "NSYS_NVTX_PROFILER_REGISTER_ONLY": "0", "LOCAL_WORLD_SIZE": "2"}
    run_nsys(words, env=environment).check_returncode()
    recorded = replace(planned, on_gpus=False)
    export_reports(recorded, {}, "")
    assert find_losses(recorded) == []
    (run,) = dp.load_runs(tmp_path / "train.sqlite")
    first, second = run.overlap().ranks
    assert [[step.step for step in rank.steps] for rank in (first, second)] == [[2, 3, 4]] * 2
    assert second.steps[-1].host_ns > LATER_S * 10**9  # of what is cut off nsys shows the beginning as if it were all


STOPS = """
import time
torch.cuda.is_available = lambda: True
torch.cuda.synchronize = lambda: None
torch.cuda.profiler.start = lambda: times.append(time.monotonic_ns())
torch.cuda.profiler.stop = lambda: times.append(time.monotonic_ns())
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(7):
    parameter.grad = torch.ones(1)
    if rank and step == 4:
        time.sleep(0.3)
        times.append(time.monotonic_ns())
    optimizer.step()
"""


def _stop(folder: Path, rank: int, world: int, directory: str) -> list[int]:
    """When nsys was to start, when the last step began that is recorded, of rank 1 alone, and when nsys was to stop."""
    from ddp_prof.annotate import unattended

    os.environ |= {unattended.STEPS_VARIABLE: "2:5", unattended.SHARED_VARIABLE: "1", "LOCAL_WORLD_SIZE": str(world)}
    sys.argv, times = ["train.py", meeting_place(folder)], list[int]()
    unattended.MEETING = timedelta(hours=1)
    unattended.start()
    exec("import sys, torch\nimport torch.distributed as dist\n" + STOPS, {"rank": rank, "times": times})
    return times


@pytest.mark.torch
@pytest.mark.slow
def test_no_rank_stops_the_nsys_of_all_before_the_last_one_is_done(tmp_path: Path) -> None:
    """What nsys makes of it is tested in a nightly."""
    from tests.ddp.gloo_ranks import fork_ranks  # imports torch

    (_, stopped), (_, began, _) = fork_ranks(partial(_stop, tmp_path), 2)
    assert began < stopped


# A launcher whose ranks, as torchrun's, have sessions of their own; it does not end them.
LAUNCHES = """
import subprocess, sys
rank = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"
words = [[sys.executable, "-c", rank, sys.argv[1] + number] for number in "01"]
for process in [subprocess.Popen(each, start_new_session=True) for each in words]:
    process.wait()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_program_and_every_rank(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(LAUNCHES)
    command = [DDP_PROF, "capture", "-o", tmp_path / "out", "--profiler", "torch", "--", sys.executable, script]
    with subprocess.Popen(
        [*command, tmp_path / "trains"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "JOB_UNDER_TEST": str(tmp_path)},
    ) as process:  # fmt: skip
        wait_until(lambda: len(list(tmp_path.glob("trains*"))) == 2)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode != 0
    assert _find_marked_processes(f"JOB_UNDER_TEST={tmp_path}") == {}


# Ends with a given code a second after it is asked to, as a program that saves a checkpoint first.
ASKED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(int(sys.argv[2]))))
time.sleep(2)
getattr(os, sys.argv[1])(int(os.environ["CAPTURE"]), signal.SIGTERM)
time.sleep(600)
"""


@pytest.mark.nsys
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "code", "ours"),
    [
        ("killpg", 0, {143}),
        pytest.param("kill", 9, {9}, marks=pytest.mark.nightly),
        pytest.param("killpg", 9, {9, 143}, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_does_not_lose_what_nsys_recorded(kill: str, code: int, ours: set[int], tmp_path: Path) -> None:
    """SLURM and timeout send it to nsys, too, which drops its recording if it gets a second one from us.

    After a signal of its own nsys may end with 0, whatever the program ended with, so a 0 is no success then.
    """
    shell = ["sh", "-c", 'CAPTURE=$$ exec "$0" "$@"']
    command = [DDP_PROF, "capture", "-o", tmp_path, "--profiler", "nsys", "--", sys.executable, "-c", ASKED]
    done = run_nsys([*shell, *command, kill, str(code)], start_new_session=True)
    assert done.returncode in ours, done.stderr
    assert (tmp_path / "python.sqlite").is_file()


def test_an_nsys_that_fails_is_not_taken_for_the_program(tmp_path: Path) -> None:
    """'The program ended with exit code 1, and no rank wrote a trace' was said of a program that nsys never started."""
    (nsys := tmp_path / "nsys").write_text(
        '#!/bin/sh\ncase "$*" in --version) echo NVIDIA Nsight Systems version 2024.4.2.1;; *--help) ;; *) exit 1; esac'
    )
    nsys.chmod(0o755)
    command = [DDP_PROF, "capture", "--profiler", "nsys", "-o", tmp_path / "out", "--", "sh", "-c", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NSYS": str(nsys)})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nothing to read: nsys wrote no report: see its output above"), done.stderr
    assert "the program ended" not in last


@pytest.mark.parametrize(("code", "said"), [(1, "exit code 1"), (137, "SIGKILL")])
def test_of_ranks_that_were_killed_the_advice_is_steps_whatever_code_the_launcher_has(code: int, said: str) -> None:
    """Of ranks under torchrun, which ends with 1 where a rank was killed or called os._exit, only 'see above' was."""
    why = _why_nothing(code, Path("out"))
    assert f"was ended by {said}" in why or f"ended with {said}" in why
    assert ("see its output above" in why) == (code == 1)
    assert why.endswith("a program that is killed, or calls os._exit, needs --steps, as 1:10")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans a job on a machine with a GPU and an nsys."""
    monkeypatch.setattr(job, "visible_gpus", lambda environ: ["NVIDIA H200"])
    monkeypatch.setattr(job, "find_nsys", lambda environ: Nsys("/opt/nsys", "2025.1.1.1"))
    monkeypatch.setattr(Nsys, "supports", lambda *_: True)
    monkeypatch.setattr(job, "find_interpreter", lambda *_: None)
    monkeypatch.setattr(
        job.shutil, "which", lambda word: word if word in ("python", "torchrun", "test", "sh") else None
    )

    def planned(words: str, profiler: str = "auto", steps: str | None = None, **environ: str) -> Job:
        return job.plan_job(shlex.split(words), tmp_path, profiler, steps, environ)[0]

    return planned


@pytest.mark.parametrize(
    ("words", "environ", "before", "report"),
    [
        ("torchrun --nproc-per-node 8 train.py", {}, [], "train"),
        ("python -m torch.distributed.run --nnodes=1 train.py", {}, [], "train"),
        ("torchrun --nnodes 2 --node-rank 1 train.py", {}, [], "train.node1"),
        ("torchrun --nnodes 2 train.py", {"NODE_RANK": "0"}, [], "train.node0"),
        ("accelerate launch --num_machines 2 --machine_rank 1 train.py", {}, [], "train.node1"),
        ("accelerate launch --num_machines=1 --num_processes 8 train.py", {}, [], "train"),
        ("torchrun --nnodes 2 train.py", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, [], "train.node1"),
        ("python train.py", {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, [], "train.rank3"),
        ("python train.py", {"SLURM_PROCID": "0"}, [], "train"),  # a batch script
        ("python train.py", {"RANK": "5", "WORLD_SIZE": "8"}, [], "train.rank5"),
        ("srun -n 4 --gpus 4 python train.py", {}, ["srun", "-n", "4", "--gpus", "4"], "train.rank%q{SLURM_PROCID}"),
        ("srun -N 2 torchrun train.py", {}, ["srun", "-N", "2"], "train.node%q{SLURM_NODEID}"),
        ("srun -J test --qos sh python t.py", {}, ["srun", "-J", "test", "--qos", "sh"], "t.rank%q{SLURM_PROCID}"),
        ("mpirun -np 2 -H a,b python t.py", {}, ["mpirun", "-np", "2", "-H", "a,b"], "t.rank%q{OMPI_COMM_WORLD_RANK}"),
        ("mpirun -np 2 torchrun t.py", {}, ["mpirun", "-np", "2"], "t.node%q{OMPI_COMM_WORLD_RANK}"),
        ("mpiexec -n 2 python t.py", {}, ["mpiexec", "-n", "2"], "t.rank%q{PMI_RANK}"),
        ("mpiexec -n 2 torchrun t.py", {}, ["mpiexec", "-n", "2"], "t.node%q{PMI_RANK}"),
        ("python -m pkg.main --lr 1", {}, [], "main"),
        ("python -m torch.distributed.run -m pkg.main", {}, [], "main"),
        ("bash jobs/pretrain.sh --lr 1", {}, [], "pretrain"),
    ],
)
def test_nsys_stands_where_it_sees_the_ranks_and_names_its_report(
    plan: Any, tmp_path: Path, words: str, environ: dict[str, str], before: list[str], report: str
) -> None:
    command = list(plan(words, **environ).command)
    assert command[: len(before)] == before
    assert command[len(before)] == "env"
    assert command[command.index("/opt/nsys") + 1] == "profile"
    assert f"--output={tmp_path / report}" in command
    assert "--trace=cuda,nvtx" in command
    program = shlex.split(words)[len(before) :]
    assert command[-len(program) :] == program


@pytest.mark.parametrize("profiler", ["nsys", "torch"])
def test_each_program_of_a_launcher_is_recorded(plan: Any, profiler: str) -> None:
    """Only the first one was."""
    words = list(plan("mpirun -np 1 python a.py : -np 2 python b.py --ratio 1:2", profiler).command)
    first, second = words[: words.index(":")], words[words.index(":") :]
    assert (first[:3], first[-2:]) == (["mpirun", "-np", "1"], ["python", "a.py"])
    assert (second[:3], second[-4:]) == ([":", "-np", "2"], ["python", "b.py", "--ratio", "1:2"])
    assert first[3:-2] == second[3:-4]
    assert first[3] == "env"


def test_a_launcher_without_a_program_is_refused(plan: Any) -> None:
    with pytest.raises(WorkloadError, match=r"no program in ': -np 2 b\.py': give its path"):
        plan("mpirun -np 1 python a.py : -np 2 b.py")
    with pytest.raises(WorkloadError, match="no program in 'srun -n 2 no-such-program': give its path"):
        plan("srun -n 2 no-such-program")


def test_nodes_that_cannot_be_told_apart_are_refused(plan: Any) -> None:
    with pytest.raises(WorkloadError, match="set NODE_RANK=0 on the first"):
        plan("torchrun --nnodes 2 train.py")


def test_steps_bound_the_recording(plan: Any) -> None:
    command = plan("torchrun train.py", steps="10:20").command
    assert "DDP_PROF_STEPS=10:20" in command
    assert "--capture-range=cudaProfilerApi" in command
    assert "--capture-range=cudaProfilerApi" not in plan("torchrun train.py").command


def test_print_runs_nothing(tmp_path: Path) -> None:
    done = run("capture", "-o", tmp_path / "out", "--profiler", "torch", "--print", "--", "touch", "x y")
    assert done.exit_code == 0
    words = shlex.split(done.stdout)
    assert words[0] == "env"
    assert words[-2:] == ["touch", "x y"]
    assert f"DDP_PROF_TRACE={tmp_path / 'out' / 'touch'}" in words
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_monitor_measures_a_program_that_knows_nothing_of_us(tmp_path: Path, forked: dict[str, str]) -> None:
    """Into a log, and nothing else is recorded; in a nightly again and again, and after a restart."""
    (script := tmp_path / "train.py").write_text(TRAIN)
    measured: list[int] = []
    for launcher, steps, due in ((TORCHRUN, 16, [6, 12]),) * IS_NIGHTLY + ((FORKED, 10, [6]),):
        command = [DDP_PROF, "capture", "--every", "6:2", "-o", tmp_path / "out", "--", *launcher, script]
        done = subprocess.run([*command, str(steps), "0"], capture_output=True, text=True, check=False, env=forked)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("trained on 2\n")
        log = tmp_path / "out" / "train.monitor" / "monitor.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        measured.extend(due)
        assert [record["step"] for record in records] == measured
        assert {(record["ranks"], record["steps"]) for record in records} == {(2, 2)}
        assert f"{len(measured)} measurement" in done.stdout
        assert "rarely show one" in done.stdout, "of a change"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.monitor"]


def test_a_monitor_that_measured_nothing_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [DDP_PROF, "capture", "--every", "6:2", "-o", tmp_path, "--", sys.executable, "-c", "print(7)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "7\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nothing was measured: the program made fewer than the 9 optimizer steps"), "6, 1 and 2"


@pytest.mark.parametrize(
    "options", [["4"], ["x"], ["10:0"], ["6:5"], ["10", "--steps", "1:5"], ["10", "--profiler", "nsys"]]
)
def test_wrong_measurements_are_wrong_usage(options: list[str]) -> None:
    assert run("capture", "--every", *options, "--", "true").exit_code == 2


@pytest.mark.parametrize("steps", ["3", "5:5", "a:b", "9:2"])
def test_wrong_steps_are_wrong_usage(steps: str) -> None:
    assert run("capture", "--steps", steps, "--", "true").exit_code == 2


def test_each_trace_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First for what is lost, and again for the summary, 5 s each for 2,000 steps.

    Its files are one run, although rank 0 has waited once more, as for a rank that failed: they were two.
    """
    for rank in range(2):
        written_by_torch(tmp_path / f"{rank}.json.gz", rank, collectives=2 - rank)
    read: list[Path] = []
    monkeypatch.setattr(load, "load_trace", lambda file, *options: [read.append(file), load_trace(file, *options)][1])
    move = f'for rank in 0 1; do mv "{tmp_path}/$rank.json.gz" "{tmp_path}/out/sh.rank$rank.json.gz"; done'
    done = run("capture", "-o", tmp_path / "out", "--profiler", "torch", "--", "sh", "-c", move)
    assert done.exit_code == 0
    assert "warning" not in done.stderr
    assert "2 ranks" in done.stdout
    assert sorted(file.name for file in read) == ["sh.rank0.json.gz", "sh.rank1.json.gz"]


def test_a_capture_that_brought_back_nothing_ends_as_a_failure(tmp_path: Path) -> None:
    """The program itself ended well."""
    (tmp_path / "out").mkdir()
    for rank in (0, 1):
        document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": []}
        (tmp_path / f"{rank}.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    move = f'for rank in 0 1; do mv "{tmp_path}/$rank.json.gz" "{tmp_path}/out/sh.rank$rank.json.gz"; done'
    done = run("capture", "-o", tmp_path / "out", "--profiler", "torch", "--", "sh", "-c", move)
    assert done.exit_code == 1
    assert "nothing was recorded that tells what the program computed or communicated" in done.stderr
    assert "missing  this capture is empty: " in done.stdout


def test_a_program_that_trains_nothing_says_so(tmp_path: Path) -> None:
    command = [DDP_PROF, "capture", "-o", tmp_path, "--profiler", "torch", "--", sys.executable, "-c", "print(7)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "7\n")
    (last,) = done.stderr.splitlines()[-1:]
    assert "no rank wrote a trace" in last
    assert "starts its ranks without its own variables, or by python -I" in last


# Ends all of its threads at once, as programs do that would otherwise hang when NCCL is torn down.
EXITS_AT_ONCE = """
import os, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_program_that_does_not_end_by_itself_is_recorded_until_a_step(
    tmp_path: Path, forked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script := tmp_path / "at_once.py").write_text(EXITS_AT_ONCE)
    monkeypatch.setenv("PATH", forked["PATH"])
    command = ["capture", "-o", tmp_path / "out", "--profiler", "torch"]
    program = ["--", "torchrun", "--nproc-per-node", "1", script]
    done = run(*command, *program)
    assert done.exit_code == 1
    assert "a program that is killed, or calls os._exit or exec, needs --steps" in done.stderr
    done = run(*command, "--steps", "1:3", *program)
    assert done.exit_code == 0, done.stderr
    (recorded,) = dp.load_runs(tmp_path / "out")
    assert [file.processes[0].steps for file in recorded.inventory()] == [2]


NSYS = Nsys("/opt/nsys", "2022.4.2.1")
WHY_LOST = "may have been killed, have called os._exit, have trained nothing, or have run elsewhere"
LOST = f"ranks 2, 3 are not in the capture: they {WHY_LOST}"


@pytest.mark.parametrize(
    ("steps", "expected", "losses"),
    [
        ({0: 2, 1: 2}, {0, 1}, []),
        ({0: 2, 1: 2}, {0, 1, 2, 3}, [LOST]),
        ({0: 2, 1: 2}, set(), []),
        ({0: 2}, None, [f"rank 1 is not in the capture: it {WHY_LOST}"]),  # of the two it speaks of
        ({0: 2, 1: 1, 2: 2}, {0, 1, 2}, ["steps of rank 1 are missing"]),
        ({0: 2, 1: 1, 2: 2}, None, ["steps of rank 1 are missing, or it made fewer than the other ranks"]),
        ({0: 2, 1: 1, 2: 0}, None, ["steps of ranks 1, 2 are missing, or they made fewer than the other ranks"]),
    ],
)
def test_ranks_and_steps_that_did_not_arrive_are_missed(
    tmp_path: Path, steps: dict[int, int], expected: set[int] | None, losses: list[str]
) -> None:
    exported(tmp_path / "x.sqlite", steps)
    assert find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False, ranks=expected)) == losses


@pytest.mark.parametrize(
    ("asked", "said"), [("10:12", []), ("10:", []), ("10:13", ["3, and 2"]), ("0:20", ["20, and 2"])]
)
def test_fewer_steps_than_were_asked_for_are_missed(tmp_path: Path, asked: str, said: list[str]) -> None:
    """Of a program that ends after 12 steps, ``--steps 10:20`` recorded two, and nothing said so."""
    exported(tmp_path / "x.sqlite", {0: 2, 1: 2})
    end = asked.partition(":")[2]
    losses = [f"--steps {asked} asks for {few} arrived: did the program end before step {end}?" for few in said]
    assert find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False, steps=asked)) == losses


@pytest.mark.parametrize(
    ("world", "said"),
    [
        (1, "the only rank has no other to communicate with (world size 1): start several, as by 'torchrun "),
        (0, "only one process was recorded: does the launcher start several that train "),
    ],
)
def test_a_process_alone_is_told_from_a_run_without_communication(tmp_path: Path, world: int, said: str) -> None:
    """A job of one rank was asked what its launcher does."""
    exported(tmp_path / "x.sqlite", {0: 2}, world=world)
    (loss,) = find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False))
    assert loss.startswith(said)
    assert find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False, ranks={0})) == [], "it was asked for"


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_records_itself_does_not_miss_the_others(tmp_path: Path, world: int) -> None:
    exported(tmp_path / "x.rank0.sqlite", {0: 2}, world=world)
    assert find_losses(Job((), tmp_path, "x", ".rank0", NSYS, on_gpus=False)) == []


def test_collectives_that_nsys_does_not_see_are_missed(tmp_path: Path) -> None:
    exported(tmp_path / "x.sqlite", {0: 2}, lost_kernels=0)
    *_, loss = find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False))
    assert loss.startswith("no collective was recorded: on a CPU nsys sees those of DistributedDataParallel and FSDP2")


def test_kernels_are_missed_on_gpus_alone(tmp_path: Path) -> None:
    exported(tmp_path / "x.sqlite", {0: 1, 1: 1}, lost_kernels=1)
    assert find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False)) == []
    (loss,) = find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=True))
    assert loss.startswith("no kernels arrived of rank 1:")


def test_without_a_range_the_loss_names_the_package(tmp_path: Path) -> None:
    exported(tmp_path / "x.sqlite", {})
    (loss,) = find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False, ranks={0}))
    package = "the program's Python needs the package nvtx (with nsys up to 2023.4, nvtx older than 0.2.12)"
    assert loss == f"no range arrived: {package}, or torch with CUDA; nsys here is 2022.4.2.1"
    # Any program may also have trained nothing: that was left out, and the nvtx of another Python was named as its own.
    (loss,) = find_losses(Job((), tmp_path, "x", "", NSYS, on_gpus=False))
    assert loss.startswith("no range arrived: did the program train with torch's DDP, FSDP2 or optimizers")
    assert package in loss
    assert loss.endswith("; --profiler torch needs neither")


def test_a_missing_nsys_names_the_way_that_the_command_has(tmp_path: Path) -> None:
    """``capture`` has --profiler torch, ``profile_variant.sh`` has PROFILER=kineto."""
    nowhere = {"PATH": str(tmp_path), "NSYS_SEARCH": "", "NSYS_PREFIX": str(tmp_path)}
    with pytest.raises(WorkloadError, match=r"set NSYS=/path/to/nsys, or choose --profiler torch$"):
        choose_nsys("nsys", nowhere)
    with pytest.raises(WorkloadError, match=r"or choose PROFILER=kineto$"):
        choose_nsys("nsys", nowhere, instead="PROFILER=kineto")


def test_who_records_is_told_before_the_program_starts(tmp_path: Path) -> None:
    """It was told as if the recording were over."""
    done = run(
        "capture", "-o", tmp_path / "out", "--profiler", "torch", "--", sys.executable, "-c", "raise SystemExit(3)"
    )
    assert done.exit_code == 3, "that of the program"
    assert done.stderr.splitlines()[0] == "recording by torch.profiler (as requested):"


@pytest.mark.parametrize(
    ("part", "recorded"),
    [("RANK", "rank 1: when the other ranks"), ("NODE", "the ranks of node 1: when the other nodes")],
)
def test_a_part_says_what_it_holds_and_when_to_read_all(
    part: str, recorded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by_torch(tmp_path / "1.json.gz", 1)
    launcher = "torchrun" if part == "NODE" else "train"  # which torchrun starts on each node, and srun for each rank
    script = tmp_path / launcher
    script.write_text(f'#!/bin/sh\nmv "{tmp_path}/1.json.gz" "{tmp_path}/out/{launcher}.rank1.json.gz"\n')
    script.chmod(0o755)
    nodes = ["--nnodes", "2", "--node-rank", "1"] if part == "NODE" else []
    if part == "RANK":
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("capture", "-o", tmp_path / "out", "--profiler", "torch", "--", script, *nodes)
    assert done.exit_code == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    read_all = f"ddp-prof overlap {shlex.quote(str(tmp_path / 'out'))}"
    assert last == f"recorded {recorded} have ended, too, read all files with '{read_all}'"


@pytest.mark.parametrize("name", ["train.sqlite", "train.rank1.sqlite", "train.run.json", "train.rank0.json.gz"])
def test_data_of_the_user_is_not_replaced(tmp_path: Path, name: str) -> None:
    (script := tmp_path / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if name == "train.sqlite":
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute("CREATE TABLE samples (text)")
    else:
        sample = b'{"text": "a sample"}\n'
        (tmp_path / name).write_bytes(gzip.compress(sample) if name.endswith("gz") else sample)
    before = (tmp_path / name).read_bytes()
    done = run("capture", "-o", tmp_path, "--profiler", "torch", "--", sys.executable, script)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].endswith(
        f"{tmp_path / name} would be replaced, and it is no file of a capture: move it away, or capture into another "
        "folder"
    )
    assert (tmp_path / name).read_bytes() == before
    assert not (tmp_path / "ran").exists()


def test_two_captures_at_once_do_not_write_the_same_files(tmp_path: Path) -> None:
    """Each replaced the files of the other, so a summary could be of ranks of two runs."""
    (script := tmp_path / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    written_by_torch(trace := tmp_path / "train.rank0.json.gz", 0)
    command = ("capture", "-o", tmp_path, "--profiler", "torch", "--", sys.executable, script)
    with scratch_folder() as scratch, scratch_folder() as of_rank:
        assert claim(scratch, tmp_path / "train")
        assert claim(of_rank, tmp_path / "train.rank1"), "a part of another job"
        done = run(*command)
        assert (done.exit_code, trace.exists(), (tmp_path / "ran").exists()) == (1, True, False)
        where = f"another capture writes the files train.* in {tmp_path}"
        assert done.stderr.splitlines()[-1] == f"Error: {where}: wait for it, or capture into another folder"
    run(*command)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", [["--profiler", "torch"], ["--every", "10"]])
def test_a_folder_that_cannot_be_written_is_told_before_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    monkeypatch.setattr(job.os, "access", lambda path, _mode: path != tmp_path)  # root may write everywhere
    script = f"touch {shlex.quote(str(tmp_path / 'ran'))}"
    done = run("capture", "-o", tmp_path, *how, "--", "sh", "-c", script)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"Error: {tmp_path} cannot be written: capture into another folder"
    assert not (tmp_path / "ran").exists()


def test_what_a_program_leaves_in_the_background_goes_on(tmp_path: Path) -> None:
    """It was ended as soon as the program had started it."""
    os.mkfifo(go := tmp_path / "go")
    script = f"(read line < {shlex.quote(str(go))}; touch {shlex.quote(str(tmp_path / 'done'))}) &"
    done = run("capture", "-o", tmp_path / "out", "--profiler", "torch", "--", "sh", "-c", script)
    assert done.exit_code == 1
    assert "what goes on in the background is read by 'ddp-prof overlap' when it has ended" in done.stderr
    go.write_text("\n")  # waits for its reader
    wait_until((tmp_path / "done").exists)


def test_data_of_a_name_that_no_capture_writes_stays(tmp_path: Path) -> None:
    (data := tmp_path / "train.json.gz").write_bytes(gzip.compress(b'{"text": "a sample"}\n'))
    job = Job((), tmp_path, "train", "", None, on_gpus=False)
    job.refuse_to_replace(tmp_path)
    job.remove_old(tmp_path)
    assert data.exists()


def test_what_captures_leave_is_replaced(tmp_path: Path) -> None:
    exported(tmp_path / "train.sqlite", {0: 1})
    (tmp_path / "train.nsys-rep").write_text("report")
    written_by_torch(tmp_path / "train.rank1.json.gz", 1)
    write_manifest(MANIFEST, tmp_path / "train.run.json")
    whole = (tmp_path / "train.sqlite").read_bytes()
    (tmp_path / "train.rank2.sqlite").write_bytes(whole[: len(whole) // 2])  # cut off
    (tmp_path / "train.rank3.json.gz").touch()
    job = Job((), tmp_path, "train", "", None, on_gpus=False)
    job.refuse_to_replace(tmp_path)
    job.remove_old(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("part", "world", "nsys", "stays"),
    [
        ("", None, NSYS, []),
        (".rank1", 4, NSYS, ["x.run.json", "x.rank0.sqlite", "x.rank3.json.gz"]),
        (".node1", None, NSYS, ["x.run.json", "x.node0.sqlite"]),
        (".node1", None, None, ["x.run.json", "x.node0.sqlite", "x.rank3.json.gz"]),
    ],
)
def test_a_part_replaces_itself_and_what_cannot_belong_to_it(
    tmp_path: Path, part: str, world: int | None, nsys: Nsys | None, stays: list[str]
) -> None:
    old = ["x.run.json", "x.sqlite", "x.rank0.sqlite", "x.rank1.nsys-rep", "x.rank7.sqlite", "x.rank3.json.gz"]
    old += ["x.node0.sqlite", "x.node1.sqlite"]
    others = ["x_2.sqlite", "xy.rank0.sqlite", "x.rank0.csv"]
    for name in (*old, *others):
        (tmp_path / name).touch()
    Job((), tmp_path, "x", part, nsys, on_gpus=False).remove_old(tmp_path, world)
    assert {path.name for path in tmp_path.iterdir()} == {*stays, *others}
