"""scripts/capture_gpu.sh with stand-ins for the machine: what is missing, what would run, what is recorded by what."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_prof.manifest import write_manifest
from ddp_prof.variants import VARIANT_NAMES
from tests.test_manifest import MANIFEST

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_preflight
from gpu_preflight import run_for

if TYPE_CHECKING:
    from conftest import Checkout

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/capture_gpu.sh"
BUCKETED = [f"bucketed --bucket-size-mb {size}" for size in (1, 10, 100)]
TORCH = ["torch", "torch -- --no-communication-hook", "torch -- --gradient-as-bucket-view"]
VARIANTS = ["naive", "flat", "overlap", *BUCKETED, *TORCH, "sharded", "fsdp"]
# Answers for torch, and runs our scripts but the race.
PYTHON = f"""
case "$*" in
  *"print(torch.cuda.device_count())") echo "${{TORCH_GPUS:-1}}" ;;
  "-c "*) echo "${{TORCH-2.11.0+cu130|13.0|1|2.28.9}}"; [ -n "${{TORCH-x}}" ] ;;
  *benchmark.py* | *check_variants.py*)
    echo "python $*" >>"$CALLS"
    case "$*" in *"${{HANGS:-none}}"*) exec sleep 600 ;; esac
    echo "ratio 1.0100" ;;
  *) PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""
# Captures kernels where the recorder is one that can; says why not where it is another.
PROFILE_VARIANT = """
case "$TRACES_DIR" in *probe*) what=probe ;; *) what="$DEVICE $*" ;; esac
[ "$what" != probe ] || [ -n "${LIMIT_S:-}" ] || exit 1
echo "$PROFILER ${NSYS:-} $BACKEND$NGPU${RANKS_PER_GPU:+ shared by $RANKS_PER_GPU} $what" >>"$CALLS"
[ "$BATCH_SIZE" = $((2 * NGPU)) ] || [ $what = probe ] || exit 1
name="$1${3:+_$3mb}"
failed="profile_variant: error: naive:"
case "${NSYS:-}" in
  *nsight-compute*) echo "$failed it recorded x.qdstrm but has no importer here" >&2; exit 1 ;;
  *blind*) echo "$failed no kernels arrived: capture again, with CAPTURE_RANGE=none" >&2; exit 1 ;;
  *forgetful*)
    if [ "${CAPTURE_RANGE:-}" != none ]; then
      echo "$failed lost: CAPTURE_RANGE=none" >&2
      exit 1
    fi ;;
esac
case "${BROKEN:-none}" in "$1$BACKEND" | "$BACKEND") echo "profile_variant: error: $1: refused" >&2; exit 1 ;; esac
mkdir -p "$TRACES_DIR"
cp "${CALLS%/*}/run.json" "$TRACES_DIR/$name.run.json"
[ "$PROFILER" != none ] || exit 0
suffix=sqlite
[ "$PROFILER" != kineto ] || suffix=rank0.json.gz
touch "$TRACES_DIR/$name.$suffix"
"""
NSYS = 'echo "NVIDIA Nsight Systems version 2025.3.1.1"'


@pytest.fixture
def bare(checkout: Checkout, tmp_path: Path) -> Checkout:
    """No GPU, a torch without CUDA, no nsys."""
    checkout.program("nvidia-smi", "exit 9")
    checkout.program("python", PYTHON, checkout.root / ".venv/bin")
    checkout.environment |= {
        "PYTHONPATH": str(ROOT),  # the copy has the scripts alone
        "TORCH": "2.13.0+cpu|none|0|none",
        "NSYS_SEARCH": "",
        "NSYS_FETCH": "0",
        "NSYS_PREFIX": str(tmp_path / "none"),
        "NSIGHT_COMPUTE_SEARCH": str(tmp_path / "opt/nsight-compute/*/nsys"),
    }
    return checkout


@pytest.fixture
def machine(bare: Checkout, tmp_path: Path) -> Checkout:
    """One GPU, a torch that sees it, an nsys that records it."""
    write_manifest(MANIFEST, tmp_path / "run.json")
    del bare.environment["TORCH"]
    gpu = "case \"$*\" in *driver*) echo 'NVIDIA H100, 580.1' ;; *) echo 'NVIDIA H100' ;; esac"
    bare.program("nvidia-smi", gpu)
    bare.program("nsys", NSYS)
    bare.program("ddp-prof", 'echo "ddp-prof $*" >>"$CALLS"; echo "the table"', bare.root / ".venv/bin")
    bare.program("profile_variant.sh", PROFILE_VARIANT, bare.root / "scripts")
    return bare


def packed(machine: Checkout, number: int) -> set[str]:
    """What is in the first file of a slice; nothing where the slice made nothing."""
    path = machine.root / f"gpu_capture.slice{number}.tar.gz"
    if not path.exists():
        return set()
    with tarfile.open(path) as archive:
        return {name.removeprefix("gpu_capture/") for name in archive.getnames()}


def _captures(machine: Checkout, setup: str) -> list[str]:
    """The arguments of the captures of a setup, without those of the cost."""
    return [call.partition(" cuda ")[2] for call in machine.calls if f" {setup} cuda " in call and "none " not in call]


def test_without_a_gpu_it_says_what_is_missing_and_exits_1(bare: Checkout) -> None:
    done = bare.run(SCRIPT)
    assert done.returncode == 1
    table = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if not line.startswith("+")}
    assert table == {"GPU": "missing", "torch": "missing", "NCCL": "missing", "recorder": "untried"}
    assert "run this on a machine with an NVIDIA GPU and its driver" in done.stdout
    assert "2.13.0+cpu is built without CUDA: install a CUDA build of torch" in done.stdout
    assert done.stderr == "gpu_preflight: missing: GPU, torch\n"


def test_without_an_environment_it_says_how_to_make_one(bare: Checkout) -> None:
    (bare.root / ".venv/bin/python").unlink()
    done = bare.run(SCRIPT)
    assert done.returncode == 1
    assert "scripts/env.sh train makes the environment, offline with WHEELS=FOLDER" in done.stdout


def test_a_torch_that_sees_no_gpu_is_missing(machine: Checkout) -> None:
    done = machine.run(SCRIPT, TORCH="2.11.0+cu130|13.0|0|2.28.9")
    assert done.returncode == 1
    assert "sees no GPU: install a build for this driver" in done.stdout
    assert done.stderr == "gpu_preflight: missing: torch\n"


def test_a_dry_run_prints_every_command_in_order_and_runs_none(bare: Checkout) -> None:
    done = bare.run(SCRIPT, "--dry-run", "--wheels", "my wheels", "--nsys", "nsys.tar.xz", "--max-mb", "9")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("+ ") for line in done.stdout.splitlines())
    commands = [shlex.split(line[2:]) for line in done.stdout.splitlines()]
    assert commands[0] == ["env", "WHEELS=my wheels", "scripts/env.sh", "train"]
    assert commands[1] == ["env", "NSYS_ARCHIVE=nsys.tar.xz", "scripts/install_nsys.sh"]
    assert "scripts/gpu_preflight.py" in commands[2]
    checks = [command for command in commands if "scripts/dev/check_variants.py" in command]
    last_first = ["fsdp", "sharded", "torch", "bucketed", "overlap", "flat", "naive"]
    assert [check[check.index("--variants") + 1] for check in checks] == last_first * 2
    assert [check[check.index("--backend") + 1] for check in checks] == ["gloo"] * 7 + ["nccl"] * 7
    for setup, ranks in (("nccl", 2), ("gloo", 2), ("single", 1)):
        captures = [command for command in commands if f"TRACES_DIR=gpu_capture/{setup}" in command]
        assert [
            " ".join(capture[capture.index("scripts/profile_variant.sh") + 1 :]) for capture in captures
        ] == VARIANTS
        assert all(f"NGPU={ranks}" in capture and "DEVICE=cuda" in capture for capture in captures)
        assert all(("RANKS_PER_GPU=2" in capture) == (ranks == 2) for capture in captures)
        tables = [
            command for command in commands if command[0].endswith("ddp-prof") and f"gpu_capture/{setup}" in command
        ]
        assert {table[1] for table in tables} == {"overlap", "compare", "collectives", "skew"}
        cost = [
            command[1] for command in commands if command[:2] == ["env", command[1]] and f"/cost/{setup}/" in command[1]
        ]
        rounds = [f"{kind}.{number}" for number in (1, 2, 3) for kind in ("without", "with")]
        assert [item.rpartition("/")[2] for item in cost] == rounds
    races = [command for command in commands if "scripts/dev/benchmark.py" in command]
    assert [race[race.index("--backend") + 1] for race in races] == ["gloo", "nccl", "nccl"]
    order = [
        "gpu_preflight.py",
        "check_variants.py",
        "profile_variant.sh",
        "ddp-prof",
        "benchmark.py",
        "profiling_cost.py",
    ]
    first = [next(at for at, command in enumerate(commands) if name in " ".join(command)) for name in order]
    assert first == sorted(first)
    assert commands[-1][1:3] == ["scripts/dev/pack_captures.py", "gpu_capture"]
    assert commands[-1][-4:] == ["--max-mb", "9", "--max-files", "8"]
    for script in {word for command in commands for word in command if word.startswith("scripts/")}:
        assert (bare.root / script).is_file()
    assert bare.calls == []
    assert not (bare.root / "gpu_capture").exists()


def test_a_dry_run_needs_no_environment_to_know_the_variants(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / SCRIPT, "--dry-run", "--out", tmp_path / "out"],
        env={**os.environ, "VENV": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=True,
    )
    for variant in VARIANT_NAMES:
        assert f"--variants {variant} >" in done.stdout
        assert f"scripts/profile_variant.sh {variant}" in done.stdout


def test_several_gpus_have_a_rank_each(bare: Checkout) -> None:
    bare.program("nvidia-smi", "yes 'NVIDIA H100, 580.1' | head -n 4")
    commands = bare.run(SCRIPT, "--dry-run").stdout
    assert "RANKS_PER_GPU" not in commands
    assert "--ranks-per-gpu" not in commands
    assert "BACKEND=nccl NGPU=4 DEVICE=cuda" in commands


def test_all_of_it_on_a_machine_with_one_gpu(machine: Checkout) -> None:
    done = machine.run(SCRIPT, ROUNDS="1")
    assert done.returncode == 0, done.stderr
    nsys = f"nsys {machine.programs}/nsys"
    assert f"recorder  ok       {nsys} records CUDA" in done.stdout
    assert "GPU       ok       1 x NVIDIA H100, driver 580.1" in done.stdout
    assert "NCCL      ok       2.28.9" in done.stdout
    assert _captures(machine, "nccl2 shared by 2") == [*VARIANTS, "bucketed --bucket-size-mb 10"]
    assert _captures(machine, "gloo2 shared by 2") == [*VARIANTS, "bucketed --bucket-size-mb 10"]
    assert all(
        call.startswith(f"nsys {machine.programs}/nsys ")
        for call in machine.calls
        if " nccl2 shared" in call and "none" not in call
    )
    race = "ddp --device cuda --backend nccl --world-size 2 --ranks-per-gpu 2 --model-size medium --batch-size 4"
    assert any(call.startswith(f"python scripts/dev/benchmark.py {race}") for call in machine.calls)
    out = machine.root / "gpu_capture"
    assert (out / "tables/nccl/compare_waterfall.txt").read_text() == "the table\n"
    assert (out / "tables/gloo/against_ddp.txt").read_text() == "ratio 1.0100\n"
    alone = "ddp --device cuda --backend nccl --world-size 1 --model-size medium --batch-size 2"
    assert any(call.startswith(f"python scripts/dev/benchmark.py {alone}") for call in machine.calls)
    assert "cost +0.0%" in (out / "tables/nccl/cost_of_recording.txt").read_text()
    names = packed(machine, 1)
    assert {"nccl/naive.sqlite", "preflight.log", "tables/nccl/skew.json", "done/race/nccl"} <= names
    assert "tables/gloo/equals_one_process.overlap.txt" in names
    kinds = ["cost" if call.startswith("none") else "capture" for call in machine.calls if " cuda " in call]
    assert kinds.index("cost") > 3 * len(VARIANTS), "all captures come before all costs"
    assert machine.run(SCRIPT, ROUNDS="1").returncode == 0, "all is done"
    assert packed(machine, 2) <= {"LEFT_OUT.txt"}


def test_each_nsys_is_tried_and_its_error_kept(machine: Checkout, tmp_path: Path) -> None:
    machine.program("nsys", "exit 1")
    blind = machine.program("nsys", NSYS, tmp_path / "opt/blind/bin")
    compute = machine.program("nsys", NSYS, tmp_path / "opt/nsight-compute/2025.3.1")
    done = machine.run(SCRIPT, NSYS_SEARCH=f"{tmp_path}/opt/blind/bin/nsys", SETUPS="single", ROUNDS="0")
    recorders = [line for line in done.stdout.splitlines() if line.startswith("recorder")]
    lost = "no kernels arrived: capture again, with CAPTURE_RANGE=none"
    assert recorders == [
        f"recorder  missing  nsys {blind}: {lost}",
        f"recorder  missing  nsys {blind}, whole run: {lost}",
        f"recorder  missing  nsys {compute}: it recorded x.qdstrm but has no importer here",
        "recorder  ok       torch.profiler records CUDA",
    ]
    log = (machine.root / "gpu_capture/preflight.log").read_text()
    assert f"== nsys {blind}: exit code 1" in log
    assert "profile_variant: error: naive: it recorded x.qdstrm but has no importer here" in log
    assert all(call.startswith("kineto ") for call in machine.calls if " nccl1 cuda " in call)
    assert (machine.root / "gpu_capture/single/torch.rank0.json.gz").is_file()


def test_an_nsys_whose_range_loses_a_rank_records_whole_runs(machine: Checkout, tmp_path: Path) -> None:
    machine.program("nsys", "exit 1")
    nsys = machine.program("nsys", NSYS, tmp_path / "opt/forgetful/bin")
    done = machine.run(SCRIPT, NSYS_SEARCH=str(nsys), SETUPS="gloo", ROUNDS="0", DDP_STEPS="0")
    recorders = [line for line in done.stdout.splitlines() if line.startswith("recorder")]
    assert recorders == [
        f"recorder  missing  nsys {nsys}: lost: CAPTURE_RANGE=none",
        f"recorder  ok       nsys {nsys}, whole run records CUDA",
    ]
    assert done.returncode == 0, done.stderr
    assert machine.calls[:2] == [f"nsys {nsys} gloo2 shared by 2 probe"] * 2
    assert _captures(machine, "gloo2 shared by 2") == VARIANTS


def test_gpus_that_torch_may_not_see_are_not_counted(machine: Checkout) -> None:
    machine.program("nvidia-smi", "yes 'NVIDIA H100, 580.1' | head -n 8")
    done = machine.run(SCRIPT, SETUPS="nccl", ROUNDS="0", DDP_STEPS="0", TORCH_GPUS="4")
    assert done.returncode == 0, done.stderr
    assert _captures(machine, "nccl4") == VARIANTS


def test_where_nothing_records_it_stops(machine: Checkout) -> None:
    machine.program(
        "profile_variant.sh",
        'echo "profile_variant: error: naive: CUPTI is broken" >&2; exit 1',
        machine.root / "scripts",
    )
    done = machine.run(SCRIPT)
    assert done.returncode == 1
    assert "recorder  missing  torch.profiler: CUPTI is broken" in done.stdout
    assert done.stderr == "gpu_preflight: missing: recorder\n"


def test_a_failed_capture_does_not_stop_the_others(machine: Checkout) -> None:
    done = machine.run(SCRIPT, BROKEN="overlapgloo", ROUNDS="0", DDP_STEPS="0", SETUPS="gloo")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("capture_gpu: 1 of the steps above or before failed: RETRY=1")
    assert _captures(machine, "gloo2 shared by 2") == VARIANTS
    assert "gloo/naive.sqlite" in packed(machine, 1)


def test_what_failed_is_done_again_only_when_asked_for(machine: Checkout) -> None:
    quick = {"ROUNDS": "0", "DDP_STEPS": "0", "SETUPS": "gloo"}
    machine.run(SCRIPT, BROKEN="overlapgloo", **quick)
    before = len(machine.calls)
    assert machine.run(SCRIPT, **quick).returncode == 1
    assert machine.calls[before:] == []
    assert machine.run(SCRIPT, RETRY="1", **quick).returncode == 0
    assert [call.partition(" cuda ")[2] for call in machine.calls[before:] if " cuda " in call] == ["overlap"]
    assert sum("ddp-prof overlap --steps" in call for call in machine.calls[before:]) == 1, "the tables have it now"


def test_a_slice_ends_in_time_and_the_next_goes_on(machine: Checkout) -> None:
    quick = {"ROUNDS": "0", "SETUPS": "gloo"}
    late = _with_limits(machine, {"PACKING_S": 540 - 1, "LEAST_S": 2}, **quick)  # too late to begin anything
    assert late.returncode == 75
    assert late.stdout.splitlines()[-1] == "capture_gpu: the time of this slice is over: call it again to go on"
    assert _captures(machine, "gloo2 shared by 2") == []
    cut = _with_limits(machine, {"PACKING_S": 540 - 10, "LEAST_S": 2}, HANGS="--variants overlap", **quick)
    assert cut.returncode == 75
    assert "capture_gpu: left to the next slice: " in cut.stderr
    assert (machine.root / "gpu_capture/done/check/gloo/bucketed").read_text() == "ok\n"
    assert (machine.root / "gpu_capture/done/check/gloo/overlap").read_text() == "cut\n"
    assert _captures(machine, "gloo2 shared by 2") == []
    rest = machine.run(SCRIPT, **quick)
    assert rest.returncode == 0, rest.stderr
    assert _captures(machine, "gloo2 shared by 2") == VARIANTS
    checks = [call.rpartition(" ")[2] for call in machine.calls if "check_variants" in call]
    assert checks == ["fsdp", "sharded", "torch", "bucketed", "overlap", "overlap", "flat", "naive"]
    last = sum(bool(packed(machine, number)) for number in (1, 2, 3))  # on a slow machine the first one makes nothing
    assert "done/check/gloo/overlap" in packed(machine, last)


def _with_limits(machine: Checkout, limits: dict[str, int], **settings: str) -> subprocess.CompletedProcess[str]:
    """A slice of nine minutes with other limits."""
    code = f"import capture_gpu; vars(capture_gpu).update({limits}); raise SystemExit(capture_gpu.main())"
    return subprocess.run(
        ["python3", "-c", code],
        env=machine.full_environment(**settings),
        cwd=machine.root / "scripts",
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_hangs_fails_and_does_not_take_the_others_time(machine: Checkout) -> None:
    quick = {"ROUNDS": "0", "SETUPS": "gloo", "DDP_STEPS": "0", "VARIANTS": "naive overlap"}
    done = _with_limits(machine, {"MOST_S": 2}, HANGS="--variants overlap", **quick)
    assert done.returncode == 1
    assert "capture_gpu: failed: .venv/bin/python scripts/dev/check_variants.py" in done.stderr
    assert _captures(machine, "gloo2 shared by 2") == ["naive", "overlap"]


def test_variants_can_be_chosen(machine: Checkout) -> None:
    quick = {"ROUNDS": "0", "SETUPS": "single"}
    machine.run(SCRIPT, VARIANTS="naive torch sharded", **quick)
    assert [call.rpartition(" ")[2] for call in machine.calls if " nccl1 cuda " in call] == [
        "naive",
        "torch",
        "--no-communication-hook",
        "--gradient-as-bucket-view",
        "sharded",
    ]


def test_a_preflight_that_was_cut_off_goes_on_with_the_next_recorder(machine: Checkout, tmp_path: Path) -> None:
    folder = machine.root / "gpu_capture"
    folder.mkdir()
    name = f"nsys {machine.programs}/nsys"
    (folder / "recorder.tried").write_text(json.dumps({name: "it was interrupted"}))
    done = machine.run(SCRIPT, ROUNDS="0", SETUPS="single")
    recorders = [line for line in done.stdout.splitlines() if line.startswith("recorder")]
    assert recorders == [
        f"recorder  missing  {name}: it was interrupted",
        "recorder  ok       torch.profiler records CUDA",
    ]


def test_a_download_that_outlasts_a_slice_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that drops packets cut off each slice in the same place: "call it again", for ever."""
    monkeypatch.setattr(gpu_preflight, "list_nsys", list)
    asked: list[str] = []

    def cut_off(_log: Path) -> str:
        asked.append("download")
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_preflight, "download", cut_off)
    monkeypatch.setattr(gpu_preflight, "try_recorder", lambda *_: "")
    environment = {"NSIGHT_COMPUTE_SEARCH": ""}
    monkeypatch.setattr(gpu_preflight.os, "environ", environment)
    log, chosen = tmp_path / "log", tmp_path / "recorder"
    with pytest.raises(KeyboardInterrupt):
        list(gpu_preflight.find_recorder(log, chosen))
    found = [str(finding) for finding in gpu_preflight.find_recorder(log, chosen)]
    assert found == [
        "recorder  missing  nsys by download: it was interrupted",
        "recorder  ok       torch.profiler records CUDA",
    ]
    assert asked == ["download"]


def test_a_setup_that_is_refused_is_left_out_of_the_tables(machine: Checkout) -> None:
    done = machine.run(SCRIPT, SETUPS="gloo nccl", BROKEN="nccl", ROUNDS="0", DDP_STEPS="0")
    assert done.returncode == 1
    assert "capture_gpu: nccl is left out, because none of its captures could be made (see above)" in done.stderr
    assert (machine.root / "gpu_capture/tables/gloo").is_dir()
    assert not (machine.root / "gpu_capture/tables/nccl/overlap.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        *((arguments, {}) for arguments in (["--fast"], ["--max-mb"], ["--max-mb", "2x"], ["--minutes", "٣"])),
        *((["--dry-run"], {name: value}) for name, value in (("SETUPS", "mpi"), ("ROUNDS", "1e3"))),
    ],
)
def test_wrong_usage(bare: Checkout, arguments: list[str], more: dict[str, str]) -> None:
    done = bare.run(SCRIPT, *arguments, **more)
    assert done.returncode == 2
    assert "usage: capture_gpu.sh" in done.stderr


def test_a_recorder_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """By a signal that it can answer, which the script that records does."""
    script = f"""
trap 'kill $child; echo ended >"{tmp_path}/ended"; exit 143' TERM
sleep 600 & child=$!
echo began
wait $child
"""
    assert run_for(["bash", "-c", script], dict(os.environ), 1) == (143, "began\nnot done after 1 s\n")
    assert (tmp_path / "ended").exists()
