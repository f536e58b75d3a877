"""A run that is not representative says so wherever it is shown: GPU-shaped captures, through every command."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.manifest import Caveat, write_manifest
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.nsys_factory import write_capture
from tests.test_manifest import MANIFEST

MEASURING = ["overlap", "overlap --steps", "collectives", "skew", "compare", "compare --waterfall", "info"]
MEASURING += ["check --max-tail-ms 100"]


def write_run(folder: Path, name: str, ranks_per_gpu: int) -> list[Path]:
    """Two ranks of NCCL, a file each, and the run.json of a run of this toolkit."""
    options = {"ranks_per_gpu": ranks_per_gpu}
    manifest = replace(MANIFEST, variant=name, bucket_size_mb=None, backend="nccl", device="cuda", options=options)
    write_manifest(manifest, folder / f"{name}.run.json")
    return [write_capture(folder / f"{name}.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)]


@pytest.fixture
def shared(tmp_path: Path) -> list[Path]:
    return write_run(tmp_path, "naive", 2)


@pytest.mark.parametrize("command", MEASURING)
def test_every_table_and_document_says_that_the_gpu_was_shared(command: str, shared: list[Path]) -> None:
    table = run(*command.split(), *shared)
    assert table.exit_code == 0, table.stderr
    assert f"note: {Caveat.SHARED_GPU.value}" in table.stdout
    document = json.loads(run(*command.split(), "--format", "json", *shared).stdout)
    documents = document if isinstance(document, list) else [document]
    assert all(any(Caveat.SHARED_GPU.value in warning for warning in document["warnings"]) for document in documents)
    assert Caveat.SHARED_GPU.value in run(*command.split(), "--format", "markdown", *shared).output


@pytest.mark.parametrize("command", MEASURING)
def test_gpus_of_their_own_need_no_caveat(command: str, tmp_path: Path) -> None:
    assert "shared GPU" not in run(*command.split(), *write_run(tmp_path, "naive", 1)).output


@pytest.mark.slow
@pytest.mark.usefixtures("no_browser")
def test_pages_and_exports_say_so_too(shared: list[Path], tmp_path: Path) -> None:
    assert run("report", *shared, "-o", tmp_path / "report").exit_code == 0
    assert Caveat.SHARED_GPU.value in (tmp_path / "report/index.html").read_text()
    assert run("timeline", shared[0], "-o", tmp_path / "timeline.html").exit_code == 0
    assert Caveat.SHARED_GPU.value in (tmp_path / "timeline.html").read_text()
    assert run("export", shared[0], "-o", tmp_path / "export.json.gz").exit_code == 0
    exported = json.loads(gzip.decompress((tmp_path / "export.json.gz").read_bytes()))
    assert exported["otherData"]["caveats"] == [Caveat.SHARED_GPU.value]


def test_run_json_says_so_itself(shared: list[Path]) -> None:
    assert json.loads((shared[0].parent / "naive.run.json").read_text())["caveats"] == [Caveat.SHARED_GPU.value]


def test_a_trace_that_lost_its_run_json_still_says_so(tmp_path: Path) -> None:
    capture = rank_capture(0)
    for range_ in capture.ranges:
        range_.name += "|ranks_per_gpu=2" if range_.name.startswith("process|") else ""
    assert f"note: {Caveat.SHARED_GPU.value}" in run("overlap", write_capture(tmp_path / "x.sqlite", capture)).stdout


def test_compared_runs_are_told_apart(tmp_path: Path) -> None:
    traces = [*write_run(tmp_path, "naive", 2), *write_run(tmp_path, "flat", 1)]
    assert f"note: naive: {Caveat.SHARED_GPU.value}" in run("compare", *traces).stdout
    warnings = json.loads(run("compare", "--format", "json", *traces).stdout)["warnings"]
    assert [text for text in warnings if Caveat.SHARED_GPU.value in text] == [f"naive: {Caveat.SHARED_GPU.value}"]


def communicated(path: Path, backend: str) -> dict[str, object]:
    """What ``overlap`` says of a rank whose all-reduces left ranges on the host and no kernels."""
    capture = rank_capture(0)
    capture.kernels = [kernel for kernel in capture.kernels if not kernel.name.startswith("nccl")]
    for range_ in capture.ranges:
        range_.name = range_.name.replace("backend=nccl", f"backend={backend}")
    document = json.loads(run("overlap", "--format", "json", write_capture(path, capture)).stdout)
    rank: dict[str, object] = document["ranks"][0]
    return rank


def test_gloo_communicates_on_the_host_and_a_single_rank_of_nccl_not_at_all(tmp_path: Path) -> None:
    gloo, nccl = (communicated(tmp_path / f"{backend}.sqlite", backend) for backend in ("gloo", "nccl"))
    assert gloo["collectives"] == 20
    assert gloo["comm_ns"] == 20 * 5_000_000, "the ranges, launch to completion"
    assert (nccl["collectives"], nccl["comm_ns"], nccl["overlap_ratio"]) == (0, 0, None)
    assert nccl["reason"] == "nothing in this trace is known to communicate"
