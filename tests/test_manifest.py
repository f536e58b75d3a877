"""run.json: written whole or not at all, read back as it was."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.errors import TraceError
from ddp_prof.manifest import (
    HostTimes,
    Manifest,
    MessageTimes,
    Parameter,
    label_of_ranks,
    load_manifest,
    manifest_path,
    write_manifest,
)

MANIFEST = Manifest(
    variant="bucketed",
    bucket_size_mb=25.0,
    world_size=2,
    backend="gloo",
    device="cpu",
    model_size="mini",
    batch_size=4,
    seq_len=128,
    steps=2,
    warmup=1,
    seed=0,
    step_seconds=(0.25, 0.125),
    communication_seconds=(0.1, 0.05),
    final_loss=9.21,
    profiler="nsys 2022.4.2.1",
    key="c0ffee",
    versions={"torch": "2.13.0"},
    machine={"cpu": "Xeon", "cores": 2},
    git_commit=None,
    command=("python", "-m", "ddp_prof.train"),
    created="2026-11-20T12:00:00+00:00",
    parameters=(Parameter("head.weight", 10, "float32", True),),
    options={"lr": 0.001},
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    write_manifest(MANIFEST, path)
    assert load_manifest(path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["a.run.json"]


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    measured = replace(
        MANIFEST,
        host_times=(HostTimes(False, 0, 100, 20, 40, 30, 10), HostTimes(True, 0, 110, 20, 40, 40, 10)),
        messages=(MessageTimes(4096, 3, 15, 12),),
        collectives=3,
        communicated_bytes=12_288,
        peak_memory_bytes=2**30,
    )
    write_manifest(measured, path)
    assert load_manifest(path) == measured


def test_manifests_from_before_it_was_measured_are_read(own_traces: list[Path]) -> None:
    for trace in own_traces:
        path = manifest_path(trace)
        if "host_times" not in path.read_text():
            manifest = load_manifest(path)
            assert manifest is not None
            assert (manifest.host_times, manifest.messages, manifest.collectives) == ((), (), None)


def test_a_manifest_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    for seed in (1, 2):
        write_manifest(replace(MANIFEST, seed=seed), path)
    loaded = load_manifest(path)
    assert loaded is not None
    assert loaded.seed == 2


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    write_manifest(MANIFEST, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_later": 1}))
    assert load_manifest(path) == MANIFEST


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert load_manifest(tmp_path / "a.run.json") is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"parameters": 3}', "\x00\x01", '{"parameters": [{"x": 1}]}']
)
def test_anything_else_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.run.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"a\.run\.json: not a run\.json of ddp_prof .*: delete it"):
        load_manifest(path)


def test_undecodable_bytes_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(TraceError, match="not a run"):
        load_manifest(path)


def record(**changes: Any) -> str:
    return json.dumps({**asdict(MANIFEST), **changes})


LIES = {
    "a word for a number": (record(world_size="two"), "world_size"),
    "a number for a word": (record(variant=3), "variant"),
    "a truth value for a number": (record(steps=True), "steps"),
    "no ranks": (record(world_size=0), "world_size is 0"),
    "more ranks than any job has": (record(world_size=2**31), r"world_size is 2\.14748e\+09"),
    "fewer than no steps": (record(steps=-1), "steps is -1"),
    "a cap below zero": (record(bucket_size_mb=-25.0), "bucket_size_mb is -25"),
    "a number beyond all bounds": (record(batch_size=10**30), "batch_size"),
    "no number": (record(bucket_size_mb=float("nan")), "JSON"),
    "infinity": (record(bucket_size_mb=float("inf")), "JSON"),
    "a float beyond all bounds": (record(final_loss=1).replace('"final_loss": 1', '"final_loss": 1e999'), "final_loss"),
    "a name without end": (record(variant="x" * 100_000), "variant is longer than"),
    "seconds that are words": (record(step_seconds=["fast"]), "step_seconds"),
    "parameters that are numbers": (record(parameters=[1]), "parameters"),
    "a bucket of a parameter that there is not": (record(options={"buckets": [[0], [1]]}), "bucket 1"),
    "a bucket of words": (record(options={"buckets": [["head"]]}), "bucket 0"),
    "a bucket within a bucket": (record(options={"buckets": [[0, [1]]]}), "bucket 0 is no list of positions"),
    "buckets that are no list": (record(options={"buckets": 7}), "buckets"),
    "one parameter in two buckets": (record(options={"buckets": [[0], [0]]}), "bucket 1"),
    "too deep": (record(options={"x": 1}).replace('"x": 1', '"x": ' + "[" * 10_000 + "]" * 10_000), "nested too deep"),
}


@pytest.mark.parametrize(("content", "told"), LIES.values(), ids=LIES)
def test_a_manifest_that_lies_is_refused(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.run.json"
    path.write_text(content)
    with pytest.raises(TraceError) as error:
        load_manifest(path)
    assert re.fullmatch(rf".*a\.run\.json: not a run\.json of ddp_prof \(.*{told}.*\): delete it .*", str(error.value))
    assert len(str(error.value)) < 500


def test_a_loss_that_is_not_finite_is_not_known(tmp_path: Path) -> None:
    """Training diverged: the capture is still a capture."""
    path = tmp_path / "a.run.json"
    write_manifest(replace(MANIFEST, final_loss=float("nan")), path)
    assert load_manifest(path) == replace(MANIFEST, final_loss=None)


@pytest.mark.parametrize(
    "trace",
    [
        "overlap.sqlite",
        "overlap.nsys-rep",
        "overlap.qdrep",
        "overlap.json",
        "overlap.json.gz",
        "overlap",
        "overlap.node1.sqlite",
    ],
)
def test_it_lies_beside_the_trace(trace: str) -> None:
    assert manifest_path(Path("traces") / trace) == Path("traces/overlap.run.json")


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        (["job", "job"], "job"),
        (["a100_rank0of128", "a100_rank4of128"], "a100_rank{0,4}of128"),
        ([f"job_r{rank}" for rank in range(12)], "job_r{0-11}"),
        (["x10", "x11", "x13"], "x{10-11,13}"),
        (["1", "12"], "{1,12}"),
        (["left", "right", "top"], "left and 2 more"),
        (["a_0", "a_0_b"], "a_0 and 1 more"),
        (["a_0", "a_0_1"], "a_0 and 1 more"),
    ],
)
def test_a_run_of_several_files_is_not_called_by_the_first(labels: list[str], label: str) -> None:
    assert label_of_ranks(labels) == label


def test_dots_in_a_name_are_part_of_it() -> None:
    assert manifest_path(Path("bucketed_2.5mb.sqlite")) == Path("bucketed_2.5mb.run.json")
