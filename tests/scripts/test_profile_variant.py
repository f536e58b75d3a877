"""scripts/profile_variant.sh with stand-ins for nsys and the workload: what is skipped, replaced and passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Checkout

SCRIPT = "scripts/profile_variant.sh"
# Writes the run.json with the key that it was given, and its environment; $WORKLOAD comes in between.
PYTHON = f"""
if [ "$2" != ddp_prof.train ]; then exec {sys.executable} "$@"; fi
env >"${{CALLS%/*}}/workload.env"
echo "workload $*" >>"$CALLS"
[ ! -e "${{CALLS%/*}}/workload" ] || . "${{CALLS%/*}}/workload"
while [ $# -gt 0 ]; do
  case "$1" in
    --run-json) out="$2" ;;
    --key) key="$2" ;;
    --kineto) echo trace >"${{2/.json.gz/.rank0.json.gz}}" ;;
  esac
  shift
done
printf '{{\\n "key": "%s"\\n}}\\n' "$key" >"$out"
"""
# Runs what follows its flags; its "report" is a list of ranges, by default those of two ranks.
NSYS = f"""
echo "nsys $*" >>"$CALLS"
case "$*" in
  --version) echo "NVIDIA Nsight Systems version 2022.4.2.1-abc" ;;
  "profile --help") printf -- '--capture-range-end=\\n--cuda-graph-trace=\\n' ;;
  profile*)
    shift
    while [[ "$1" == -* ]]; do [[ "$1" != --output=* ]] || output="${{1#--output=}}"; shift; done
    "$@" || exit
    ranges="${{CALLS%/*}}/ranges"
    if [ -e "$ranges" ]; then cp "$ranges" "$output.nsys-rep"; else
      printf '%s\\n' "1 process|rank=0|world=2" "1 step|index=0" >"$output.nsys-rep"
      printf '%s\\n' "2 process|rank=1|world=2" "2 step|index=0" >>"$output.nsys-rep"
    fi ;;
  export*) {sys.executable} - "${{@: -1}}" <<'END'
import sqlite3, sys
rows = [line.rstrip("\\n").split(" ", 1) for line in open(sys.argv[1])]
with sqlite3.connect(sys.argv[1].replace(".nsys-rep", ".sqlite")) as database:
    database.execute("CREATE TABLE StringIds (id, value)")
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (globalPid)")
    database.execute("CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid, text, textId, domainId)")
    for number, (process, text) in enumerate(rows):
        thread = (int(process) << 24) + 7
        database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
        if not database.execute("SELECT 1 FROM NVTX_EVENTS WHERE globalTid = ?", (thread,)).fetchone():
            database.execute("INSERT INTO NVTX_EVENTS VALUES (0, NULL, 75, ?, 'ddp_prof', NULL, 1)", (thread,))
            if "kernels=0" not in text:
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?)", (int(process) << 24,))
        database.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, 59, ?, NULL, ?, 1)", (thread, number))
END
  ;;
esac
"""


@pytest.fixture
def machine(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A CPU machine with an environment and an nsys."""
    for name in ("ddp_prof/ddp/naive.py", "ddp_prof/train/run.py", "ddp_prof/range_names.py", "ddp_prof/manifest.py"):
        (checkout.root / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout.root / name).write_text("# code\n")
    checkout.program("python", PYTHON, checkout.root / ".venv/bin")
    checkout.program("nsys", NSYS)
    checkout.program("nvidia-smi", "exit 9")
    checkout.environment |= {"TRACES_DIR": str(tmp_path / "traces"), "ISOLATE": "0"}
    return checkout


def _traces(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "traces").iterdir())


def _runs(machine: Checkout) -> list[str]:
    return [call for call in machine.calls if call.startswith("workload")]


def _flags(machine: Checkout) -> str:
    return next(call for call in machine.calls if call.startswith("nsys profile --") and "--help" not in call)


def _workload(tmp_path: Path, body: str) -> None:
    (tmp_path / "workload").write_text(body)


def test_captures_once(machine: Checkout, tmp_path: Path) -> None:
    for package in ("torch-2.13.0", "nvtx-0.2.11"):
        (machine.root / f".venv/lib/python3.11/site-packages/{package}.dist-info").mkdir(parents=True)
    done = machine.run(SCRIPT, "overlap")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("overlap: captured by nsys 2022.4.2.1 in ")
    assert _traces(tmp_path) == ["overlap.nsys-rep", "overlap.run.json", "overlap.sqlite"]
    assert machine.run(SCRIPT, "overlap").stdout == "overlap: up to date\n"
    assert len(_runs(machine)) == 1
    machine.program("python", 'echo "started Python" >>"$CALLS"; exit 1', machine.root / ".venv/bin")
    assert machine.run(SCRIPT, "overlap").stdout == "overlap: up to date\n"
    assert "started Python" not in machine.calls, "what is there is found out at once"
    machine.program("python", PYTHON, machine.root / ".venv/bin")
    assert machine.run(SCRIPT, "overlap", FORCE="1").returncode == 0
    assert len(_runs(machine)) == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["naive"], "naive"),
        (["bucketed", "--bucket-size-mb", "10"], "bucketed_10mb"),
        (["--bucket-size-mb", "0.5", "bucketed"], "bucketed_0.5mb"),
        (["bucketed"], "bucketed_25mb"),
        (["bucketed", "--bucket-size-mb", "none"], "bucketed_unbounded"),
        (["bucketed", "--bucket-size-mb", "none", "--", "--compression", "bf16"], "bucketed_unbounded_bf16"),
        (["bucketed", "--", "--seed", "3", "--compression=powersgd-4"], "bucketed_25mb_powersgd-4"),
        (["bucketed", "--", "--step-in-backward"], "bucketed_25mb_step_in_backward"),
        (["torch", "--", "--no-communication-hook"], "torch_no_communication_hook"),
    ],
)
def test_the_name_says_the_bucket_size_and_options(
    machine: Checkout, tmp_path: Path, arguments: list[str], name: str
) -> None:
    assert machine.run(SCRIPT, *arguments).returncode == 0
    assert _traces(tmp_path) == [f"{name}.nsys-rep", f"{name}.run.json", f"{name}.sqlite"]


def test_a_name_stays_within_the_folder(machine: Checkout, tmp_path: Path) -> None:
    done = machine.run(SCRIPT, "bucketed", "--", "--compression", "../../x")
    assert done.returncode == 2
    assert "no name for files: bucketed_25mb_../../x" in done.stderr


def test_settings_reach_the_workload(machine: Checkout) -> None:
    machine.run(SCRIPT, "flat", "--", "--seed", "3", STEPS="4", WARMUP="1", NGPU="2", MODEL_SIZE="tiny", SEQ_LEN="64")
    (run,) = _runs(machine)
    for part in (
        "--variant flat",
        "--world-size 2",
        "--device cpu",
        "--model-size tiny",
        "--seq-len 64",
        "--steps 4 --warmup 1 --seed 3",
        "--profiler nsys 2022.4.2.1",
    ):
        assert part in run


def test_changed_settings_are_captured_anew(machine: Checkout) -> None:
    for more in ({}, {"STEPS": "7"}, {"STEPS": "7", "OMP_NUM_THREADS": "2"}, {}):
        machine.run(SCRIPT, "overlap", **more)
    machine.run(SCRIPT, "overlap", "--", "--seed", "1")
    assert len(_runs(machine)) == 5


@pytest.mark.parametrize("name", ["ddp_prof/ddp/naive.py", "ddp_prof/train/run.py", "ddp_prof/range_names.py", SCRIPT])
def test_changed_code_is_captured_anew(machine: Checkout, name: str) -> None:
    machine.run(SCRIPT, "overlap")
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    machine.run(SCRIPT, "overlap")
    assert len(_runs(machine)) == 2


@pytest.mark.parametrize("name", ["overlap.sqlite", "overlap.nsys-rep", "overlap.run.json"])
def test_missing_files_are_captured_anew(machine: Checkout, tmp_path: Path, name: str) -> None:
    machine.run(SCRIPT, "overlap")
    (tmp_path / "traces" / name).unlink()
    machine.run(SCRIPT, "overlap")
    assert len(_traces(tmp_path)) == 3
    assert len(_runs(machine)) == 2


def test_captures_of_elsewhere_are_replaced(machine: Checkout, tmp_path: Path) -> None:
    """The repository's own captures, made on another machine, give way to one's own."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/overlap.run.json").write_text(json.dumps({"key": "0" * 64}, indent=1))
    for name in ("overlap.sqlite", "overlap.rank0.json.gz", "flat.sqlite"):
        (tmp_path / "traces" / name).write_text("theirs")
    machine.run(SCRIPT, "overlap")
    assert _traces(tmp_path) == ["flat.sqlite", "overlap.nsys-rep", "overlap.run.json", "overlap.sqlite"]
    assert (tmp_path / "traces/overlap.sqlite").read_bytes() != b"theirs"


def test_a_failure_leaves_what_was_there(machine: Checkout, tmp_path: Path) -> None:
    machine.run(SCRIPT, "overlap")
    before = {path.name: path.read_bytes() for path in (tmp_path / "traces").iterdir()}
    _workload(tmp_path, 'echo "noise"; echo "ddp_prof.train: error: out of memory: choose a smaller one" >&2; exit 1')
    done = machine.run(SCRIPT, "overlap", STEPS="3")
    assert done.returncode == 1
    assert done.stderr.startswith("profile_variant: overlap: the workload failed (exit code 1): out of memory: choose")
    assert len(done.stderr.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "traces").iterdir()} == before


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "no range of ours arrived"),
        (["1 process|rank=0|world=2", "1 step|index=0"], "the report lacks rank 1"),
        (["1 process|rank=0", "2 process|rank=1", "1 step|index=0"], "not all steps arrived of rank 1"),
    ],
)
def test_ranges_that_did_not_arrive_are_missed(
    machine: Checkout, tmp_path: Path, ranges: list[str], message: str
) -> None:
    (tmp_path / "ranges").write_text("".join(f"{line}\n" for line in ranges) or "")
    if not ranges:
        (tmp_path / "ranges").write_text("1 someone else's\n")
        machine.program("nsys", NSYS.replace("'ddp_prof'", "'other'"))
    done = machine.run(SCRIPT, "overlap")
    assert done.returncode == 1
    assert message in done.stderr
    assert _traces(tmp_path) == []


def test_the_report_is_given_no_secrets(machine: Checkout, tmp_path: Path) -> None:
    wanted = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CXX": "g++"}
    machine.run(SCRIPT, "overlap", API_TOKEN="secret", CXX_TOKEN="secret", **wanted)
    names = {line.partition("=")[0] for line in (tmp_path / "workload.env").read_text().splitlines()}
    expected = {*wanted, "PATH", "HOME", "LANG"}
    assert expected <= names
    assert names - expected <= {"TMPDIR", "PWD", "SHLVL", "_"}


def test_flags_on_a_cpu(machine: Checkout) -> None:
    machine.run(SCRIPT, "overlap", NSYS_FLAGS="--nvtx-domain-include=ddp_prof")
    flags = _flags(machine)
    assert "--trace=nvtx --nvtx-domain-include=ddp_prof" in flags
    assert "--sample=none --cpuctxsw=none" in flags
    assert "capture-range" not in flags


def test_flags_on_a_gpu(machine: Checkout) -> None:
    machine.program("nvidia-smi", "printf 'NVIDIA H100\\nNVIDIA H100\\n'")
    machine.program("python", PYTHON.replace("env >", '[ "$1" != -c ] || exit 0\nenv >', 1), machine.root / ".venv/bin")
    package = machine.root / "torch.py"
    package.write_text("class cuda:\n    device_count = staticmethod(lambda: 2)\n")
    machine.run(SCRIPT, "overlap", PYTHONPATH=str(machine.root))
    flags = _flags(machine)
    assert "--trace=cuda,nvtx --cuda-graph-trace=node" in flags
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in flags
    assert "--device cuda --model-size medium" in flags


def test_fewer_gpus_than_ranks_means_cpu(machine: Checkout) -> None:
    machine.program("nvidia-smi", "echo 'NVIDIA H100'")
    machine.run(SCRIPT, "overlap")
    assert "--device cpu" in _runs(machine)[0]


def test_torch_profiler_records_where_nsys_cannot(machine: Checkout, tmp_path: Path) -> None:
    (machine.programs / "nsys").unlink()
    more = {"NSYS_SEARCH": "", "NSYS_FETCH": "0", "NSYS_PREFIX": str(tmp_path / "none")}
    done = machine.run(SCRIPT, "overlap", **more)
    assert done.returncode == 0, done.stderr
    assert "overlap: captured by torch.profiler" in done.stdout
    assert "profile_variant: no nsys: torch.profiler records instead" in done.stderr
    assert _traces(tmp_path) == ["overlap.rank0.json.gz", "overlap.run.json"]
    assert machine.run(SCRIPT, "overlap", **more).stdout == "overlap: up to date\n"
    assert machine.run(SCRIPT, "overlap", PROFILER="nsys", **more).returncode == 1


def test_captures_wait_for_each_other(machine: Checkout, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    with subprocess.Popen(["flock", str(traces), "sleep", "1"]):
        time.sleep(0.3)
        done = machine.run(SCRIPT, "overlap")
    assert done.stderr == f"profile_variant: waiting for another capture into {traces}\n"
    assert done.returncode == 0


def test_wrong_usage(machine: Checkout) -> None:
    for arguments in (
        [],
        ["ddp5"],
        ["Naive!"],
        ["naive", "flat"],
        ["naive", "--steps"],
        ["bucketed", "--bucket-size-mb"],
    ):
        done = machine.run(SCRIPT, *arguments)
        assert done.returncode == 2, arguments
        assert "usage: profile_variant.sh VARIANT" in done.stderr


def test_without_an_environment_it_says_what_to_run(machine: Checkout) -> None:
    (machine.root / ".venv/bin/python").unlink()
    assert "run scripts/env.sh first" in machine.run(SCRIPT, "overlap").stderr


@pytest.mark.parametrize("isolate", ["0", "1"])
def test_an_interrupted_capture_leaves_nothing(machine: Checkout, tmp_path: Path, isolate: str) -> None:
    """Not even a process that has left the family, as nsys's daemon does."""
    marker = 5000 + os.getpid() % 1000 + int(isolate)
    _workload(tmp_path, f'setsid sleep {marker} & touch "${{CALLS%/*}}/began"; sleep {marker}')
    process = subprocess.Popen(
        ["bash", str(machine.root / SCRIPT), "overlap"],
        env=machine.full_environment(ISOLATE=isolate),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    machine.wait_until(lambda: (tmp_path / "began").exists())
    assert _sleeping(marker)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    machine.wait_until(lambda: not _sleeping(marker))
    assert _traces(tmp_path) == []


def test_killed_it_takes_what_it_records_with_it(machine: Checkout, tmp_path: Path) -> None:
    marker = 6000 + os.getpid() % 1000
    _workload(tmp_path, f'touch "${{CALLS%/*}}/began"; exec sleep {marker}')
    process = subprocess.Popen(
        ["bash", str(machine.root / SCRIPT), "overlap"], env=machine.full_environment(ISOLATE="1")
    )
    machine.wait_until((tmp_path / "began").exists)
    process.kill()
    process.wait(timeout=20)
    machine.wait_until(lambda: not _sleeping(marker))
    (tmp_path / "workload").unlink()
    assert machine.run(SCRIPT, "overlap").returncode == 0, "there is no lock, and what is half made does no harm"


@pytest.mark.parametrize("name", ["TERM", "KILL"])
@pytest.mark.parametrize("isolate", ["0", "1"])
def test_who_was_ended_by_a_signal_is_told(machine: Checkout, tmp_path: Path, isolate: str, name: str) -> None:
    _workload(tmp_path, f"echo noise; kill -{name} $$; sleep 60")
    done = machine.run(SCRIPT, "overlap", ISOLATE=isolate)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"nsys 2022.4.2.1 or the ranks were ended by SIG{name}" in done.stderr
    assert _traces(tmp_path) == []


def _sleeping(seconds: int) -> bool:
    command = f"sleep\0{seconds}\0".encode()
    return any(_read(path) == command for path in Path("/proc").glob("[0-9]*/cmdline"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


GPU_PYTHON = f'[ "$1" != -c ] || exit 0\n{PYTHON}'


def _gpus(machine: Checkout, count: int) -> None:
    """GPUs, and a torch that sees them."""
    machine.program("nvidia-smi", f"yes 'NVIDIA H100' | head -n {count}")
    machine.program("python", GPU_PYTHON, machine.root / ".venv/bin")


def test_a_rank_whose_kernels_got_lost_is_missed_on_a_gpu_only(machine: Checkout, tmp_path: Path) -> None:
    ranges = ["1 process|rank=0|world=2", "1 step|index=0", "2 process|rank=1|world=2|kernels=0", "2 step|index=0"]
    (tmp_path / "ranges").write_text("".join(f"{line}\n" for line in ranges))
    assert machine.run(SCRIPT, "overlap").returncode == 0
    _gpus(machine, 2)
    done = machine.run(SCRIPT, "overlap")
    assert done.returncode == 1
    assert (
        "overlap: nsys 2022.4.2.1 recorded no kernels of rank 1: capture again, with CAPTURE_RANGE=none" in done.stderr
    )


def test_an_nvidia_smi_without_a_driver_names_no_gpu(machine: Checkout) -> None:
    machine.program("nvidia-smi", "echo 'NVIDIA-SMI has failed'; echo 'because ...'; exit 9")
    machine.run(SCRIPT, "overlap")
    assert "--device cpu" in _runs(machine)[0]


def test_ranks_may_share_a_gpu(machine: Checkout) -> None:
    _gpus(machine, 1)
    machine.run(SCRIPT, "overlap", RANKS_PER_GPU="2", BACKEND="nccl")
    assert "--device cuda" in _runs(machine)[0]
    assert "--backend nccl --ranks-per-gpu 2" in _runs(machine)[0]
    machine.run(SCRIPT, "overlap", RANKS_PER_GPU="2", NGPU="4")
    assert "--device cpu" in _runs(machine)[1]


def test_unprofiled_it_leaves_the_run_json_alone(machine: Checkout, tmp_path: Path) -> None:
    done = machine.run(SCRIPT, "overlap", PROFILER="none")
    assert done.stdout.startswith("overlap: captured by no profiler in ")
    assert _traces(tmp_path) == ["overlap.run.json"]
    (run,) = _runs(machine)
    assert "--profiler" not in run
    assert "--kineto" not in run
    assert not [call for call in machine.calls if call.startswith("nsys")]
    assert machine.run(SCRIPT, "overlap", PROFILER="none").stdout == "overlap: up to date\n"


def _as_rank(rank: int, world: int = 2) -> dict[str, str]:
    """What srun's script, mpirun's or torchrun tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }


def test_a_launchers_ranks_have_a_report_each(machine: Checkout, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for old in ("overlap.sqlite", "overlap.rank7.sqlite", "overlap.rank1.json.gz", "flat.rank7.sqlite"):
        (traces / old).write_text("of an earlier capture")
    _workload(tmp_path, 'case "$*" in *--world-size*) exit 1 ;; esac\n[ "$RANK" = 0 ] || exit 0')
    for rank in (1, 0):
        done = machine.run(SCRIPT, "overlap", **_as_rank(rank))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"overlap.rank{rank}: captured by nsys")
    assert _traces(tmp_path) == [
        "flat.rank7.sqlite",
        *("overlap.rank0.nsys-rep", "overlap.rank0.sqlite", "overlap.rank1.nsys-rep", "overlap.rank1.sqlite"),
        "overlap.run.json",
    ]
    names = {line.partition("=")[0] for line in (tmp_path / "workload.env").read_text().splitlines()}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= names


def test_a_rank_that_fails_leaves_nothing(machine: Checkout, tmp_path: Path) -> None:
    _workload(tmp_path, 'echo "ddp_prof.train: error: rank 0 is gone" >&2; exit 1')
    done = machine.run(SCRIPT, "overlap", **_as_rank(1))
    assert done.returncode == 1
    assert "overlap.rank1: the workload failed (exit code 1): rank 0 is gone" in done.stderr
    assert _traces(tmp_path) == []


def test_a_rank_misses_its_own_ranges(machine: Checkout, tmp_path: Path) -> None:
    (tmp_path / "ranges").write_text("1 process|rank=0|world=2\n1 step|index=0\n")
    assert "the report lacks rank 1" in machine.run(SCRIPT, "overlap", **_as_rank(1)).stderr


def test_torchrun_starts_the_ranks_of_a_node(machine: Checkout, tmp_path: Path) -> None:
    machine.program("python", PYTHON.replace("ddp_prof.train ]", "torch.distributed.run ]"), machine.root / ".venv/bin")
    _workload(tmp_path, "exit 0")  # rank 0, which writes run.json, is on the other node
    more = {"TORCHRUN": "--nnodes 2 --node-rank 1 --master-addr node0", "NODE_RANK": "1", "NGPU": "8"}
    done = machine.run(SCRIPT, "overlap", **more)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = _runs(machine)
    start = (
        "workload -m torch.distributed.run --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 8 -m ddp_prof"
    )
    assert run.startswith(start)
    assert "--world-size" not in run
    assert "overlap.node1.sqlite" in _traces(tmp_path)


def test_one_rank_a_node_samples_the_gpus(machine: Checkout) -> None:
    _gpus(machine, 2)
    for rank in (0, 1):
        machine.run(SCRIPT, "overlap", GPU_METRICS="1", **_as_rank(rank))
    first, second = (call for call in machine.calls if call.startswith("nsys profile --") and "--help" not in call)
    assert "--gpu-metrics-device=all" in first
    assert "--gpu-metrics-device" not in second


QDSTRM_NSYS = NSYS.replace('"$output.nsys-rep"', '"$output.qdstrm"')


def test_without_an_importer_what_was_recorded_is_kept(machine: Checkout, tmp_path: Path) -> None:
    machine.program("nsys", QDSTRM_NSYS)
    done = machine.run(SCRIPT, "overlap")
    assert done.returncode == 1
    assert "overlap.qdstrm but has no importer here: give the one of the same version" in done.stderr
    assert _traces(tmp_path) == ["overlap.qdstrm"]


def test_an_importer_of_elsewhere_makes_the_report(machine: Checkout, tmp_path: Path) -> None:
    machine.program("nsys", QDSTRM_NSYS)
    importer = machine.program("importer", '[ "$1" = -i ] && cp "$2" "${2%.qdstrm}.nsys-rep"')
    done = machine.run(SCRIPT, "overlap", QDSTRM_IMPORTER=str(importer))
    assert (done.returncode, done.stderr) == (0, "")
    assert _traces(tmp_path) == ["overlap.nsys-rep", "overlap.run.json", "overlap.sqlite"]


SRUN = """
echo "srun $1 $2" >>"$CALLS"
while [ "$1" != bash ]; do shift; done
for SLURM_PROCID in 1 0; do
  export SLURM_PROCID SLURM_LOCALID=$((SLURM_PROCID % 1)) SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)"
  "$@" || exit
done
"""


def test_a_slurm_job_profiles_each_task_behind_the_launcher(machine: Checkout, tmp_path: Path) -> None:
    _gpus(machine, 1)
    machine.program("scontrol", "printf 'node3\\nnode4\\n'")
    machine.program("srun", SRUN)
    _workload(tmp_path, '[ "$RANK" = 0 ] || exit 0')
    done = subprocess.run(
        ["bash", str(machine.root / "scripts/slurm_profile.sbatch"), "bucketed", "--bucket-size-mb", "25"],
        env=machine.full_environment(
            SLURM_SUBMIT_DIR=str(machine.root), SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[3-4]"
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {name for name in _traces(tmp_path) if name.endswith(("sqlite", "json"))} == {
        *("bucketed_25mb.rank0.sqlite", "bucketed_25mb.rank1.sqlite", "bucketed_25mb.run.json"),
    }
    assert machine.calls[0] == "srun --kill-on-bad-exit=1 bash"
    records = [call for call in machine.calls if call.startswith("nsys profile --") and "--help" not in call]
    assert len(records) == 2
    assert all("--gpu-metrics-device" not in call for call in records), "where it may not, that would end the job"
    assert all("--device cuda" in call and "--batch-size 4 " in call for call in records)
    told = dict(line.split("=", 1) for line in (tmp_path / "workload.env").read_text().splitlines())
    assert (told["MASTER_ADDR"], told["MASTER_PORT"], told["WORLD_SIZE"]) == ("node3", "29507", "2")
    assert (told["RANK"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "0", "1")
