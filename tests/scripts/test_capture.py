"""Real captures of the real workload, two ranks, by real nsys; nothing here is skipped where nsys is missing."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nsys, pytest.mark.torch]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"MODEL_SIZE": "tiny", "SEQ_LEN": "16", "STEPS": "3", "WARMUP": "1"}


def capture(traces: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script with small settings."""
    return subprocess.run(
        ["bash", ROOT / "scripts/profile_variant.sh", *arguments],
        env={**os.environ, **SETTINGS, "TRACES_DIR": str(traces), **more},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of the variant ``overlap``."""
    folder = tmp_path_factory.mktemp("capture") / "traces"
    done = capture(folder, "overlap", A_SECRET="hush-hush")
    assert done.returncode == 0, done.stderr
    return folder


def _ranges(path: Path) -> dict[int, list[str]]:
    """Texts of our ranges, by process."""
    found: dict[int, list[str]] = {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        for process, text in database.execute(
            "SELECT globalTid >> 24, coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
            "WHERE eventType IN (59, 60) ORDER BY start"
        ):
            found.setdefault(process, []).append(text)
    return found


def test_both_ranks_arrive_with_steps_phases_and_collectives(traces: Path) -> None:
    ranges = _ranges(traces / "overlap.sqlite")
    heads = sorted(texts[0] for texts in ranges.values())
    assert heads == [f"process|rank={rank}|world=2|variant=overlap|backend=gloo|device=cpu" for rank in (0, 1)]
    for texts in ranges.values():
        steps = [text for text in texts if text.startswith("step|")]
        assert len(steps) == 4
        assert [text for text in steps if "warmup=1" in text] == steps[:1]
        assert sum(text == "backward" for text in texts) == 4
        assert any(text.startswith("all_reduce|bucket=0|bytes=") for text in texts)


def test_the_run_is_described(traces: Path) -> None:
    run = json.loads((traces / "overlap.run.json").read_text())
    assert (run["variant"], run["world_size"], run["device"], run["steps"]) == ("overlap", 2, "cpu", 3)
    assert run["profiler"].startswith("nsys 20")
    assert len(run["key"]) == 64


def test_a_torch_that_cannot_use_the_gpu_is_told(tmp_path: Path) -> None:
    done = capture(tmp_path / "traces", "overlap", PROFILER="none", DEVICE="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch finds no GPU here: install a CUDA build of torch, or use --device cpu (DEVICE=cpu)" in done.stderr


def test_the_capture_tells_nothing_of_the_users_environment(traces: Path) -> None:
    for name in ("overlap.sqlite", "overlap.nsys-rep"):
        content = (traces / name).read_bytes()
        assert b"hush-hush" not in content
        assert b"A_SECRET" not in content


def test_a_finished_capture_is_left_alone(traces: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in traces.iterdir()}
    assert capture(traces, "overlap").stdout == "overlap: up to date\n"
    assert {path: path.stat().st_mtime_ns for path in traces.iterdir()} == before


def test_without_nsys_torch_profiler_records(tmp_path: Path) -> None:
    done = capture(tmp_path, "bucketed", "--bucket-size-mb", "10", PROFILER="kineto")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bucketed_10mb.rank0.json.gz",
        "bucketed_10mb.rank1.json.gz",
        "bucketed_10mb.run.json",
    ]
    assert json.loads((tmp_path / "bucketed_10mb.run.json").read_text())["profiler"].startswith("torch.profiler 2")


def test_a_failing_workload_leaves_nothing(tmp_path: Path) -> None:
    done = capture(tmp_path, "naive", BATCH_SIZE="3")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "profile_variant: error: naive: the workload failed (exit code 1): a batch of 3 cannot be"
    )
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
