"""The sweep from its command line to its database, on real ranks."""

from __future__ import annotations

import io
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_prof.benchmark import sweep
from ddp_prof.benchmark.store import FAILED, OK, OUT_OF_MEMORY, Results, StoredRun, load_results
from ddp_prof.benchmark.sweep import Machine, probe_machine, read_figures
from ddp_prof.errors import WorkloadError
from tests.benchmark.test_sweep import MACHINE
from tests.forked_python import run_python
from tests.waiting import is_running, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# The sweep as a program that is told what machine this is: another process would import torch to tell.
PROGRAM = """
import sys
from ddp_prof.benchmark import sweep
from ddp_prof.benchmark.store import Environment
from ddp_prof.benchmark.sweep import Machine
from ddp_prof.train.launch import FORKING
sweep.probe_machine = lambda: {machine!r}
{first}
sys.exit(sweep.main())
"""
# Nothing is imported before there are ranks: each imports torch, which they do not live to see.
STARTING = PROGRAM.format(machine=MACHINE, first="FORKING.set_forkserver_preload([])")
TINY = [
    "--batch-sizes",
    "1",
    "--seq-len",
    "16",
    "--steps",
    "3",
    "--warmup",
    "1",
    "--repeats",
    "1",
    "--device",
    "cpu",
]
GIB = 2**30
Bench = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def monkey() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This machine, by a process that is forked, which need not import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "subprocess", SimpleNamespace(run=lambda command, **_options: run_python(command[2])))
        return sweep.probe_machine()


def test_a_torch_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(WorkloadError, match=r"torch does not work in .*: exit code 1: run scripts/env\.sh train"):
        probe_machine()  # that of the module may be a stand-in already


@pytest.fixture(scope="module")
def bench(monkey: pytest.MonkeyPatch, machine: Machine) -> Bench:
    """Runs the sweep in this process, whose server has imported torch.

    Returns the exit code, what was said on stdout, and the lines on stderr.
    """
    monkey.setattr(sweep, "probe_machine", lambda: machine)

    def run(database: Path, *argv: str) -> tuple[int, str, list[str]]:
        monkey.setattr(sys, "argv", ["sweep", "--database", str(database), *TINY, *argv])
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as complained:
            code = sweep.main()
        return code, said.getvalue(), complained.getvalue().splitlines()

    return run


def ranks_of(process: int) -> list[int]:
    """The server that the sweep started forks them."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        servers = [int(child) for child in children if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
        found = [Path(f"/proc/{server}/task/{server}/children").read_text().split() for server in servers]
    except FileNotFoundError:
        return []
    return [int(rank) for of_server in found for rank in of_server]


def wait_for_end(processes: list[int]) -> None:
    """A rank that was just being started notices by itself, a moment later."""
    wait_until(lambda: not any(map(is_running, processes)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Path:
    """The database of a sweep with too little memory for the first of two sizes, killed in the last of four runs."""
    database = tmp_path_factory.mktemp("sweep") / "new" / "results.db"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))

    argv = ["--model-size", "large", "tiny", "--variants", "naive", "torch"]
    command = [sys.executable, "-c", PROGRAM.format(machine=machine, first=""), "--database", str(database), *TINY]
    process = subprocess.Popen([*command, *argv], stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    try:
        assert process.stderr is not None
        *_, third = (process.stderr.readline() for _ in range(3))
        assert third.startswith("[3/4] naive, tiny, 2 ranks, 1 x 16 tokens each, repeat 1: step "), third
        wait_until(lambda: len(ranks_of(process.pid)) == 2)
        ranks = ranks_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.wait()
    wait_for_end(ranks)
    return database


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> Path:
    """The database of a sweep that is done."""
    database = tmp_path_factory.mktemp("swept") / "new" / "results.db"
    code, said, lines = bench(database, "--model-size", "tiny", "--variants", "naive", "torch")
    assert code == 0, lines
    assert said.startswith("2 runs measured: ")
    return database


def tiny_runs(database: Path) -> list[StoredRun]:
    return [run for run in load_results(database).runs if run.model_size == "tiny"]


@pytest.mark.nightly
def test_a_killed_sweep_goes_on_where_it_stopped(killed: Path, bench: Bench) -> None:
    (before,) = tiny_runs(killed)
    code, said, lines = bench(killed, "--model-size", "tiny", "--variants", "naive", "torch")
    assert code == 0, lines
    runs = tiny_runs(killed)
    assert runs[0] == before
    assert [(item.variant, item.status) for item in runs] == [("naive", OK), ("torch", OK)]
    assert lines[-1].startswith("[1/1] torch")
    assert "1 runs measured, 1 there before" in said


def test_everything_is_measured(swept: Path) -> None:
    results = load_results(swept)
    (environment,) = results.environments
    naive, torch = tiny_runs(swept)
    assert {naive.environment, torch.environment} == {environment.id}
    assert (naive.device, naive.backend, naive.world_size) == ("cpu", "gloo", 2)
    assert (naive.steps, naive.tokens, naive.local_batch_size) == (3, 2 * 1 * 16, 1)
    assert naive.gradient_bytes == naive.communicated_bytes == torch.communicated_bytes == 4 * naive.parameters
    assert naive.collectives == 2 * 9 + 3  # one a parameter
    assert torch.collectives is not None
    assert torch.collectives < naive.collectives
    assert naive.peak_memory_bytes is not None
    assert 100 * 2**20 < naive.peak_memory_bytes < 4 * GIB
    for run in (naive, torch):
        check_steps(results, run)


def check_steps(results: Results, run: StoredRun) -> None:
    steps = [step for step in results.steps if step.run == run.id]
    assert [(step.is_synchronized, step.step) for step in steps] == [
        (is_synchronized, step) for is_synchronized in (False, True) for step in range(3)
    ]
    for item in steps:
        phases = (item.forward_ns, item.backward_ns, item.optimizer_ns, item.communication_ns)
        assert all(phase is not None and phase > 0 for phase in phases)
        assert sum(filter(None, phases[:3])) < item.step_ns
        own = sum(filter(None, phases)) - (item.communication_ns if run.variant == "torch" else 0)
        assert own < item.step_ns  # torch's communication is a part of its backward


def test_messages_are_timed_where_each_is_waited_for(swept: Path) -> None:
    results = load_results(swept)
    naive, _ = tiny_runs(swept)
    assert {message.run for message in results.messages} == {naive.id}
    assert sum(message.calls for message in results.messages) == 3 * (naive.collectives or 0)
    assert sum(message.calls * message.bytes for message in results.messages) == 3 * (naive.communicated_bytes or 0)
    assert all(0 < message.shortest_ns <= message.median_ns for message in results.messages)
    synchronized = [step for step in results.steps if step.run == naive.id and step.is_synchronized]
    shortest = sum(message.calls * message.shortest_ns for message in results.messages)
    assert shortest < sum(item.communication_ns for item in synchronized)


@pytest.mark.nightly
def test_a_capture_is_added_to_a_run_that_is_there(swept: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    database, run = swept, tiny_runs(swept)[0]
    monkeypatch.setenv("PROFILER", "kineto")
    code, said, lines = bench(database, "--model-size", "tiny", "--variants", "naive", "--profile")
    assert code == 0, lines
    assert "0 runs measured, 1 there before, 1 captured" in said
    captured = tiny_runs(database)[0]
    assert captured.id == run.id
    assert captured.created == run.created
    assert captured.trace == "results/tiny_2ranks_1x16/naive.rank0.json.gz"
    files = sorted((database.parent / captured.trace).parent.glob("naive.rank*.json.gz"))
    figures = read_figures(files)
    assert (captured.trace_comm_ns, captured.trace_exposed_ns) == (
        figures["trace_comm_ns"],
        figures["trace_exposed_ns"],
    )
    assert captured.trace_comm_ns is not None
    assert captured.trace_overlapped_ns == 0  # naive hides nothing
    assert captured.trace_comm_ns == captured.trace_exposed_ns


def test_a_busy_port_fails_the_run(tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "results.db"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        code, said, lines = bench(database, "--model-size", "tiny", "--variants", "flat")
    assert (code, said) == (1, f"0 runs measured, 1 failed: {database}\n")
    (failed,) = load_results(database).runs
    assert failed.status == FAILED
    reason = f"rank 0: MASTER_PORT {port} of 127.0.0.1 is another program's: choose another, or unset it"
    assert failed.reason == reason
    (line,) = lines
    assert line.endswith(f": failed: {reason} (0 s left)")


@pytest.mark.nightly
def test_out_of_memory_is_a_row_and_the_sweep_goes_on(killed: Path, bench: Bench) -> None:
    code, said, lines = bench(killed, "--model-size", "large", "--variants", "naive", "torch")
    assert (code, said, lines) == (0, f"0 runs measured, 2 there before: {killed}\n", [])
    large, other, *tiny = load_results(killed).runs
    assert {(run.model_size, run.status) for run in (large, other)} == {("large", OUT_OF_MEMORY)}
    assert {(run.model_size, run.status) for run in tiny} == {("tiny", OK)}
    assert large.reason is not None
    assert large.reason.startswith("out of memory: --model-size large needs ")
    assert large.reason.endswith("per rank, ulimit -v allows a process 8: choose a smaller one")
    assert (large.device, large.collectives, large.peak_memory_bytes) == (None, None, None)
    assert (large.d_model, large.gradient_bytes) == (1280, 4 * 969_411_840)


@pytest.mark.parametrize("stop", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_stopped_sweep_leaves_nothing_running(tmp_path: Path, stop: signal.Signals) -> None:
    argv = ["--database", str(tmp_path / "r.db"), *TINY, "--model-size", "tiny", "--variants", "flat"]
    command = [sys.executable, "-c", STARTING, *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(ranks_of(process.pid)) == 2)
        ranks = ranks_of(process.pid)
        process.send_signal(stop)
        _, said = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + stop
    assert said == f"stopped: the finished runs, if any, are in {tmp_path}/r.db; the same command continues\n"
    wait_for_end(ranks)
    assert load_results(tmp_path / "r.db").runs == ()
