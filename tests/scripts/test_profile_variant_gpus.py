"""scripts/profile_variant.sh on GPU machines and clusters, with stand-ins: which GPUs count, what a run is given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.scripts.test_profile_variant import GPU_PYTHON, SCRIPT, machine

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Checkout

__all__ = ["machine"]
MIG = "\\n".join(
    [
        "GPU 0: NVIDIA A100 (UUID: GPU-1)",
        "  MIG 3g.20gb     Device  0: (UUID: MIG-2)",
        "  MIG 3g.20gb     Device  1: (UUID: MIG-3)",
    ]
)


def run_of(machine: Checkout, *arguments: str, **settings: str) -> str:
    """The workload's command line."""
    done = machine.run(SCRIPT, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return next(call for call in reversed(machine.calls) if call.startswith("workload"))


def gpus(machine: Checkout, count: int, listing: str = "") -> None:
    """GPUs, as nvidia-smi shows them, and a torch that may use them."""
    names = "NVIDIA A100\\n" * count
    machine.program("nvidia-smi", f"case $1 in -L) printf '{listing}' ;; *) printf '{names}' ;; esac")
    machine.program("python", GPU_PYTHON, machine.root / ".venv/bin")


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        (None, "cuda"),
        ("0,1", "cuda"),
        ("3,2", "cuda"),
        ("GPU-5ebe9f43,GPU-ad2367dd", "cuda"),
        ("2", "cpu"),  # a rank would have no GPU
        ("", "cpu"),
        ("-1", "cpu"),
        ("0,-1,1", "cpu"),  # what comes after one that is none does not count
        ("0,7", "cpu"),
        ("MIG-2,MIG-3", "cpu"),  # a process sees one instance
    ],
)
def test_a_gpu_that_is_hidden_is_no_gpu(machine: Checkout, visible: str | None, device: str) -> None:
    gpus(machine, 4)
    settings = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert f"--device {device} " in run_of(machine, "overlap", **settings)


def test_a_divided_gpu_is_one(machine: Checkout) -> None:
    gpus(machine, 2, MIG)
    assert "--device cpu " in run_of(machine, "overlap")
    assert "--device cuda " in run_of(machine, "overlap", NGPU="1")


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [
        ({}, 4),
        ({"NGPU": "8"}, 16),
        ({"NGPU": "8", "BATCH_SIZE": "32"}, 32),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 32),
        ({"NGPU": "8", "TORCHRUN": "--nnodes 2 --node-rank 0", "NODE_RANK": "0"}, 32),
        ({"NGPU": "8", "TORCHRUN": "--nnodes=1:2"}, 32),
    ],
)
def test_a_batch_is_two_sequences_a_rank(machine: Checkout, settings: dict[str, str], batch_size: int) -> None:
    if settings.get("TORCHRUN") or settings.get("RANK"):
        machine.program("nsys", "exit 1")  # what it records is not at stake
        settings |= {"PROFILER": "none"}
        body = (
            GPU_PYTHON.replace("ddp_prof.train ]", "torch.distributed.run ]")
            if settings.get("TORCHRUN")
            else GPU_PYTHON
        )
        machine.program("python", body, machine.root / ".venv/bin")
    machine.run(SCRIPT, "overlap", **settings)
    (run,) = [call for call in machine.calls if call.startswith("workload")]
    assert f"--batch-size {batch_size} " in run


KEPT = ["FI_PROVIDER", "OFI_NCCL_PROTOCOL", "UCX_TLS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_NET"]


def test_a_run_is_given_what_decides_how_it_communicates_and_computes(machine: Checkout, tmp_path: Path) -> None:
    run_of(machine, "overlap", A_SECRET="hush", NVIDIA_API_KEY="hush", **dict.fromkeys(KEPT, "1"))
    given = {line.partition("=")[0] for line in (tmp_path / "workload.env").read_text().splitlines()}
    assert set(KEPT) <= given
    assert not {"A_SECRET", "NVIDIA_API_KEY"} & given


def test_what_a_run_is_given_decides_whether_it_is_captured_anew(machine: Checkout) -> None:
    run_of(machine, "overlap", FI_PROVIDER="efa")
    assert machine.run(SCRIPT, "overlap", FI_PROVIDER="efa").stdout == "overlap: up to date\n"
    assert "captured" in machine.run(SCRIPT, "overlap", FI_PROVIDER="tcp").stdout


@pytest.mark.parametrize(("has_mps", "isolated"), [(True, False), (False, True)])
def test_no_namespace_of_its_own_where_mps_is_in_use(
    machine: Checkout, tmp_path: Path, has_mps: bool, isolated: bool
) -> None:
    gpus(machine, 2)
    machine.program("unshare", 'echo unshare >>"$CALLS"; exit 1')
    (tmp_path / "mps").mkdir()
    if has_mps:
        os.mkfifo(tmp_path / "mps" / "control")
    run_of(machine, "overlap", ISOLATE="1", CUDA_MPS_PIPE_DIRECTORY=str(tmp_path / "mps"))
    assert ("unshare" in machine.calls) == isolated


def test_a_limit_counts_the_run_and_nothing_else(machine: Checkout, tmp_path: Path) -> None:
    (tmp_path / "workload").write_text("echo 'step 1 of many'; exec sleep 3333")
    machine.program("nvidia-smi", "sleep 2; exit 9")  # what comes before takes its time
    done = machine.run(SCRIPT, "overlap", LIMIT_S="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("profile_variant: overlap: the run was not done after 1 s: step 1 of many\n")
    assert list((tmp_path / "traces").iterdir()) == []
