"""Capturing a variant, with stand-ins for nsys and the workload: what is skipped, replaced, refused and left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ddp_prof.capture import processes, variant
from ddp_prof.capture.variant import NSYS_STARTS
from tests.capture.conftest import NSYS, Machine, exported, is_sleeping, needs_namespace, written_by_torch
from tests.waiting import ignores, is_running, wait_until

THREE = ["overlap.nsys-rep", "overlap.run.json", "overlap.sqlite"]


def test_what_is_there_is_not_captured_again(machine: Machine) -> None:
    assert machine.done("overlap").startswith("overlap: captured by nsys 2022.4.2.1 in ")
    assert machine.traces == THREE
    assert machine.done("overlap") == "overlap: up to date\n"
    assert len(machine.runs) == 1
    machine.done("overlap", FORCE="1")
    assert len(machine.runs) == 2


def test_changed_settings_are_captured_anew(machine: Machine) -> None:
    settings: list[dict[str, str]] = [{}, {"STEPS": "7"}, {"STEPS": "7", "OMP_NUM_THREADS": "2"}, {}]
    settings += [{"NSYS_FLAGS": "--nvtx-domain-include=ddp_prof"}, {"FI_PROVIDER": "efa"}, {"FI_PROVIDER": "tcp"}]
    for more in settings:
        assert "captured" in machine.done("overlap", **more)
    assert "captured" in machine.done("overlap", "--", "--seed", "1")
    assert machine.done("overlap", "--", "--seed", "1") == "overlap: up to date\n"


def test_changed_code_is_captured_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.done("overlap")
    monkeypatch.setattr("ddp_prof.capture.variant.digest_code", lambda: "other code")
    assert "captured" in machine.done("overlap")


@pytest.mark.parametrize("name", THREE)
def test_missing_files_are_captured_anew(machine: Machine, name: str) -> None:
    machine.done("overlap")
    (machine.folder / "traces" / name).unlink()
    machine.done("overlap")
    assert (machine.traces, len(machine.runs)) == (THREE, 2)


def test_captures_of_elsewhere_are_replaced(machine: Machine) -> None:
    """The repository's own captures, made on another machine, give way to one's own."""
    traces = machine.folder / "traces"
    traces.mkdir()
    (traces / "overlap.run.json").write_text(json.dumps({"key": "0" * 64}, indent=1))
    written_by_torch(traces / "overlap.rank0.json.gz", 0)
    for name in ("overlap.sqlite", "overlap.rank12.sqlite", "flat.sqlite", "overlap_2.sqlite"):
        exported(traces / name, {0: 7})
    theirs = (traces / "overlap.sqlite").read_bytes()
    machine.done("overlap")
    assert machine.traces == ["flat.sqlite", *THREE, "overlap_2.sqlite"]
    assert (traces / "overlap.sqlite").read_bytes() != theirs


def test_settings_reach_the_workload(machine: Machine) -> None:
    machine.done("flat", "--", "--seed", "3", STEPS="4", WARMUP="1", NGPU="2", MODEL_SIZE="tiny", SEQ_LEN="64")
    (run,) = machine.runs
    parts = ("--variant flat", "--world-size 2", "--device cpu", "--model-size tiny", "--batch-size 4", "--seq-len 64")
    for part in (*parts, "--steps 4 --warmup 1 --seed 3", "--profiler nsys 2022.4.2.1"):
        assert part in run


def test_a_failure_leaves_what_was_there(machine: Machine) -> None:
    machine.done("overlap")
    before = {path.name: path.read_bytes() for path in (machine.folder / "traces").iterdir()}
    machine.workload('echo "noise"; echo "ddp_prof.train: error: out of memory: choose a smaller one" >&2; exit 1')
    code, said, complaint = machine.capture("overlap", STEPS="3")
    assert (code, said) == (1, "")
    assert complaint.startswith(
        "profile_variant: error: overlap: the workload failed (exit code 1): out of memory: choose"
    )
    assert len(complaint.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in (machine.folder / "traces").iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "code", "reason"),
    [
        ({"DEVICE": "tpu"}, 2, "--device: invalid choice: 'tpu'"),
        ({"BACKEND": "mpi"}, 2, "--backend: invalid choice: 'mpi'"),
        ({"MODEL_SIZE": "huge"}, 2, "--model-size: invalid choice: 'huge'"),
        ({"PROFILER": "perf"}, 2, "PROFILER=perf: choose nsys, kineto, none or auto"),
        ({"NSYS_FLAGS": "'"}, 2, "NSYS_FLAGS: No closing quotation"),
        ({"LIMIT_S": "abc"}, 2, "LIMIT_S=abc: not a whole number from 1 to"),
        ({"TRACES_DIR": "/proc/nowhere"}, 1, "/proc/nowhere: No such file or directory: set TRACES_DIR"),
        ({"NSYS": "/nowhere", "PROFILER": "nsys"}, 1, "NSYS=/nowhere does not run: correct it or unset it"),
    ],
)
def test_a_wrong_setting_is_one_line(machine: Machine, settings: dict[str, str], code: int, reason: str) -> None:
    found, said, complaint = machine.capture("overlap", **settings)
    assert (found, said, len(complaint.splitlines())) == (code, "", 1)
    assert reason in complaint
    assert not machine.runs


def test_flags_that_nsys_refuses_are_told(machine: Machine) -> None:
    refusal = (
        "printf \"unrecognised option '--bogus'\\n\\nusage: nsys profile [<args>]\\nTry 'nsys --help'\\n\"; exit 1"
    )
    machine.program("nsys", NSYS.replace("    shift\n", f"    {refusal}\n", 1))
    code, _, complaint = machine.capture("overlap", NSYS_FLAGS="--bogus")
    assert (code, len(complaint.splitlines())) == (1, 1)
    assert "unrecognised option '--bogus' (see NSYS_FLAGS)" in complaint


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("[boost::errinfo_api_function_*] = sem_open", 1),
        ("The proxy is not started.", 1),
        ("[QuadDCommon::tag_message*] = Local Endpoint is not available.", 1),
        ("End of file", 1),
        ("Connection reset by peer", 1),
        ("Connection to the Agent lost.", 0),
    ],
)
def test_an_nsys_that_lost_a_race_with_itself_is_started_again(machine: Machine, words: str, status: int) -> None:
    """Also if it ends as if all had gone well."""
    lost = f"echo '{words}' >&2; exit {status}"
    once = f'    [ -e "$FOLDER/lost" ] || {{ touch "$FOLDER/lost"; {lost}; }}\n    shift\n'
    machine.program("nsys", NSYS.replace("    shift\n", once))
    assert machine.done("overlap").startswith("overlap: captured by nsys")
    assert len(machine.runs) == 1
    machine.program("nsys", NSYS.replace("    shift\n", f"    {lost}\n"))
    code, _, complaint = machine.capture("overlap", FORCE="1")
    assert (code, len(complaint.splitlines())) == (1, 1)
    assert f"the workload failed (exit code {status}): {words}" in complaint
    assert len([call for call in machine.calls if call.startswith("nsys profile")]) == 2 + NSYS_STARTS


def test_what_an_nsys_that_fails_is_replaced_by_is_told(machine: Machine) -> None:
    """Only that the workload had failed was told, of an nsys that is there and does not record."""
    machine.program("nsys", NSYS.replace("    shift\n", "    echo 'Unrecognized license' >&2; exit 1\n"))
    _, _, complaint = machine.capture("overlap")
    expected = (
        "the workload failed (exit code 1): Unrecognized license [all output: VERBOSE=1; without nsys: PROFILER=kineto]"
    )
    assert expected in complaint
    machine.workload("echo 'ddp_prof.train: error: too big' >&2; exit 1")
    machine.program("nsys", NSYS)
    assert machine.capture("overlap")[2].endswith("too big [all output: VERBOSE=1]\n")


def _is(folder: str, path: Path) -> bool:
    return str(path) == folder


def test_a_full_disk_is_told_whatever_nsys_says(machine: Machine) -> None:
    """Where /tmp was full, 'Invalid truncate size' was told."""
    machine.program("nsys", NSYS.replace("    shift\n", "    echo 'Invalid truncate size.' >&2; exit 1\n"))
    for folder in ("/tmp", machine.environment["TRACES_DIR"]):
        machine.monkeypatch.setattr(variant, "_is_full", partial(_is, folder))
        _, _, complaint = machine.capture("overlap")
        assert f"overlap: {folder} is full, make room there: the workload failed" in complaint


def test_an_export_that_is_cut_is_told_with_a_way_out(machine: Machine) -> None:
    """Its path was told, of a folder that is removed, and to export the report again, which is removed, too."""
    machine.program(
        "nsys", NSYS.replace('"$FOLDER/export.sqlite" "$5"', '"$FOLDER/export.sqlite" "$5"; truncate -s 5000 "$5"')
    )
    code, _, complaint = machine.capture("overlap")
    assert (code, len(complaint.splitlines())) == (1, 1)
    assert "overlap: what nsys 2022.4.2.1 wrote cannot be read (overlap.sqlite: " in complaint
    assert complaint.endswith("): capture again, with another nsys (NSYS), or with PROFILER=kineto\n")
    assert machine.traces == []


def test_what_did_not_arrive_is_missed(machine: Machine) -> None:
    exported(machine.folder / "export.sqlite", {0: 1})
    code, _, complaint = machine.capture("overlap")
    why = "it may have been killed, have called os._exit, have trained nothing, or have run elsewhere"
    reason = f"rank 1 is not in the capture: {why}"
    assert (code, complaint) == (1, f"profile_variant: error: overlap: {reason}: capture again\n")
    exported(machine.folder / "export.sqlite", {})
    code, _, complaint = machine.capture("overlap")
    assert (
        "no range arrived: the program's Python needs the package nvtx (with nsys up to 2023.4, nvtx older than 0.2.12)"
        in complaint
    )
    assert machine.traces == []


def test_the_report_is_given_no_secrets(machine: Machine) -> None:
    wanted = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CXX": "g++"}
    wanted |= dict.fromkeys(["FI_PROVIDER", "OFI_NCCL_PROTOCOL", "UCX_TLS", "NVIDIA_TF32_OVERRIDE"], "1")
    machine.done("overlap", API_TOKEN="secret", CXX_TOKEN="secret", NVIDIA_API_KEY="secret", **wanted)
    names = {line.partition("=")[0] for line in (machine.folder / "workload.env").read_text().splitlines()}
    expected = {*wanted, "PATH", "HOME", "LANG"}
    assert expected <= names
    assert names - expected <= {"TMPDIR", "DDP_PROF_CAPTURE", "PWD", "SHLVL", "_"}


def test_torch_profiler_records_where_nsys_cannot(machine: Machine) -> None:
    (machine.folder / "programs/nsys").unlink()
    more = {"NSYS_SEARCH": "", "NSYS_FETCH": "0", "NSYS_PREFIX": str(machine.folder / "none")}
    code, said, complaint = machine.capture("overlap", **more)
    assert code == 0
    assert said.startswith("overlap: captured by torch.profiler")
    reason = "there is no nsys here: set NSYS=/path/to/nsys"
    assert complaint.splitlines()[1:] == [f"profile_variant: torch.profiler records, {reason}"]
    assert machine.traces == ["overlap.rank0.json.gz", "overlap.rank1.json.gz", "overlap.run.json"]
    assert "--profiler torch.profiler" in machine.runs[0]
    assert machine.capture("overlap", **more)[1] == "overlap: up to date\n"
    code, _, complaint = machine.capture("overlap", PROFILER="nsys", **more)
    assert (code, len(complaint.splitlines())) == (1, 2)  # why none can be fetched, and the way out


def test_what_torch_profiler_lost_is_missed(machine: Machine) -> None:
    written_by_torch(machine.folder / "rank1.json.gz", 0)
    code, _, complaint = machine.capture("overlap", PROFILER="kineto")
    assert (code, machine.traces) == (1, [])
    assert "overlap: rank 1 is not in the capture" in complaint


def test_unprofiled_it_leaves_the_run_json_alone(machine: Machine) -> None:
    assert machine.done("overlap", PROFILER="none").startswith("overlap: captured by no profiler in ")
    assert machine.traces == ["overlap.run.json"]
    (run,) = machine.runs
    assert "--profiler" not in run
    assert "--kineto" not in run
    assert not [call for call in machine.calls if call.startswith("nsys")]
    assert machine.done("overlap", PROFILER="none") == "overlap: up to date\n"


def test_a_limit_counts_the_run_and_nothing_else(machine: Machine) -> None:
    machine.workload("echo 'step 1 of many'; echo '[1/1] [100%] x.nsys-rep'; exec sleep 3333")
    machine.program("nvidia-smi", "sleep 4; exit 9")  # what comes before takes its time
    code, said, complaint = machine.capture("overlap", LIMIT_S="3")
    assert (code, said) == (1, "")
    assert complaint == "profile_variant: error: overlap: the run was not done after 3 s: step 1 of many\n"
    assert machine.traces == []


@pytest.mark.parametrize("name", ["TERM", "KILL"])
@pytest.mark.parametrize("isolate", ["0", "1"])
def test_who_was_ended_by_a_signal_is_told(machine: Machine, isolate: str, name: str) -> None:
    if isolate == "1":
        needs_namespace()
    machine.workload(f"echo noise; kill -{name} $$; sleep 60")
    code, _, complaint = machine.capture("overlap", ISOLATE=isolate)
    assert (code, len(complaint.splitlines())) == (1, 1)
    assert f"nsys 2022.4.2.1 or the ranks were ended by SIG{name}" in complaint
    assert machine.traces == []


def _gpus(machine: Machine, count: int) -> None:
    """GPUs, which the torch of the stand-in sees."""
    machine.program("nvidia-smi", f"yes 'NVIDIA H100' | head -n {count}")


def test_on_gpus_the_way_out_of_a_loss_is_told(machine: Machine) -> None:
    _gpus(machine, 2)
    exported(machine.folder / "export.sqlite", {0: 1, 1: 1}, lost_kernels=1)
    code, _, complaint = machine.capture("overlap")
    assert code == 1
    assert "overlap: no kernels arrived of rank 1: did the program use the GPUs" in complaint
    assert "capture again, with CAPTURE_RANGE=none, another nsys" in complaint


@pytest.mark.parametrize(("has_mps", "is_isolated"), [(True, False), (False, True)])
def test_no_namespace_of_its_own_where_mps_is_in_use(machine: Machine, has_mps: bool, is_isolated: bool) -> None:
    _gpus(machine, 2)
    machine.program("unshare", 'echo unshare >>"$FOLDER/calls"; exit 1')
    (machine.folder / "mps").mkdir()
    if has_mps:
        os.mkfifo(machine.folder / "mps" / "control")
    machine.capture("overlap", ISOLATE="1", CUDA_MPS_PIPE_DIRECTORY=str(machine.folder / "mps"))
    assert ("unshare" in machine.calls) == is_isolated
    assert machine.runs, "without a namespace it is recorded, too"


def _as_rank(rank: int, world: int = 2) -> dict[str, str]:
    """What srun's script, mpirun's or torchrun tells a rank."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return {**place, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_a_launchers_ranks_have_a_report_each(machine: Machine) -> None:
    traces = machine.folder / "traces"
    traces.mkdir()
    for old in ("overlap.sqlite", "overlap.rank7.sqlite", "overlap.rank1.json.gz", "flat.rank7.sqlite"):
        (traces / old).touch()
    machine.workload('case "$*" in *--world-size*) exit 1 ;; esac\n[ "$RANK" = 0 ] || exit 0')
    for rank in (1, 0):
        assert machine.done("overlap", **_as_rank(rank)).startswith(f"overlap.rank{rank}: captured by nsys")
    assert machine.traces == [
        "flat.rank7.sqlite",
        *("overlap.rank0.nsys-rep", "overlap.rank0.sqlite", "overlap.rank1.nsys-rep", "overlap.rank1.sqlite"),
        "overlap.run.json",
    ]
    names = {line.partition("=")[0] for line in (machine.folder / "workload.env").read_text().splitlines()}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= names


def test_data_of_the_user_is_not_replaced(machine: Machine) -> None:
    (traces := machine.folder / "traces").mkdir()
    (traces / "overlap.sqlite").write_text("data")
    code, _, complaint = machine.capture("overlap")
    assert code == 1
    assert "would be replaced, and it is no file of a capture" in complaint
    assert (traces / "overlap.sqlite").read_text() == "data"
    assert not machine.runs


def test_a_rank_that_fails_leaves_nothing(machine: Machine) -> None:
    machine.workload('echo "ddp_prof.train: error: rank 0 is gone" >&2; exit 1')
    code, _, complaint = machine.capture("overlap", **_as_rank(1))
    assert code == 1
    assert "overlap.rank1: the workload failed (exit code 1): rank 0 is gone" in complaint
    assert machine.traces == []


def test_a_rank_misses_its_own_ranges(machine: Machine) -> None:
    exported(machine.folder / "export.sqlite", {0: 1})
    assert "rank 1 is not in the capture" in machine.capture("overlap", **_as_rank(1))[2]


def test_torchrun_starts_the_ranks_of_a_node(machine: Machine) -> None:
    machine.workload("exit 0")  # rank 0, which writes run.json, is on the other node
    more = {"TORCHRUN": "--nnodes 2 --node-rank 1 --master-addr node0", "NODE_RANK": "1", "NGPU": "8"}
    machine.done("overlap", **more)
    (run,) = machine.runs
    start = (
        "workload -m torch.distributed.run --nnodes 2 --node-rank 1 --master-addr node0 --nproc-per-node 8 -m ddp_prof"
    )
    assert run.startswith(start)
    assert "--world-size" not in run
    assert "--batch-size 32 " in run
    assert machine.traces == ["overlap.node1.nsys-rep", "overlap.node1.sqlite"]


def test_one_rank_per_node_samples_the_gpus(machine: Machine) -> None:
    _gpus(machine, 2)
    for rank in (0, 1):
        machine.done("overlap", GPU_METRICS="1", **_as_rank(rank))
    first, second = (call for call in machine.calls if call.startswith("nsys profile --") and "--help" not in call)
    assert "--gpu-metrics-device=all" in first
    assert "--gpu-metrics-device" not in second


def test_without_an_importer_what_was_recorded_is_kept(machine: Machine) -> None:
    machine.program("nsys", f"SUFFIX=qdstrm\n{NSYS}")
    code, _, complaint = machine.capture("overlap")
    assert code == 1
    assert "overlap.qdstrm but has no importer here: give the one of the same version" in complaint
    assert machine.traces == ["overlap.qdstrm"]


def test_an_importer_of_elsewhere_makes_the_report(machine: Machine) -> None:
    machine.program("nsys", f"SUFFIX=qdstrm\n{NSYS}")
    importer = machine.program("importer", '[ "$1" = -i ] && cp "$2" "${2%.qdstrm}.nsys-rep"')
    machine.done("overlap", QDSTRM_IMPORTER=str(importer))
    assert machine.traces == THREE


# What needs a process of its own: signals, and waiting for another.


def _start(machine: Machine, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_prof.capture", "overlap"],
        env={**machine.environment, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_captures_wait_for_each_other(machine: Machine) -> None:
    machine.workload('touch "$FOLDER/began"; until [ -e "$FOLDER/go" ]; do sleep 0.05; done')
    first = _start(machine)
    wait_until((machine.folder / "began").exists)
    second = _start(machine)
    assert second.stderr is not None
    assert second.stderr.readline() == f"profile_variant: waiting for another capture into {machine.folder}/traces\n"
    (machine.folder / "go").touch()
    assert [process.communicate()[0][:15] for process in (first, second)] == [
        "overlap: captur",
        "overlap: up to ",
    ]


@pytest.mark.parametrize("isolate", ["0", "1"])
def test_signals_end_all_of_it_and_nothing_is_left(machine: Machine, isolate: str) -> None:
    """Not even a process that has left the family, as nsys's daemon does; and a second signal cuts nothing off."""
    if isolate == "1":
        needs_namespace()
    marker = 500_000 + os.getpid() + 100_000 * int(isolate)
    machine.workload(f'trap "" TERM; setsid sleep {marker} & touch "$FOLDER/began"; sleep {marker}; sleep {marker}')
    process = _start(machine, ISOLATE=isolate)
    wait_until((machine.folder / "began").exists)
    wait_until(lambda: is_sleeping(marker))
    (scratch,) = _scratch_folders(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    wait_until(lambda: not is_running(process.pid) or ignores(process.pid, signal.SIGHUP))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    assert process.communicate() == ("", "")
    assert process.returncode == 143
    assert not is_sleeping(marker)
    assert not scratch.exists()
    assert list((machine.folder / "traces").iterdir()) == []


@pytest.mark.parametrize("isolate", ["0", "1"])
def test_the_next_capture_removes_what_a_killed_one_left(machine: Machine, isolate: str) -> None:
    marker = 700_000 + os.getpid() + 100_000 * int(isolate)
    config = f"/tmp/injection_config_{os.getpid():x}{isolate}"
    machine.workload(
        f"export QUADD_INJECTION_CONFIG={config}; touch {config}; setsid sleep {marker} &\n"
        f'touch "$FOLDER/began"; exec sleep {marker}'
    )
    process = _start(machine, ISOLATE=isolate)
    wait_until((machine.folder / "began").exists)
    (scratch,) = _scratch_folders(process.pid)
    wait_until((scratch / processes.OUTSIDE).exists)
    wait_until(lambda: config in (scratch / processes.OUTSIDE).read_text())  # it is noted within half a second
    process.kill()
    process.communicate()
    assert {path.name for path in (machine.folder / "traces").iterdir()} == {".overlap.partial"}
    (machine.folder / "workload").unlink()
    machine.done("flat")
    assert not is_sleeping(marker)
    assert not scratch.exists()
    assert not Path(config).exists()
    assert machine.traces == ["flat.nsys-rep", "flat.run.json", "flat.sqlite"]


def _scratch_folders(process: int) -> list[Path]:
    """Those that a process holds open; meanwhile it closes others."""
    folders = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            folders.append(link.readlink())
    return [folder for folder in folders if folder.name.startswith(processes.PREFIX)]
