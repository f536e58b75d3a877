"""Without ``--try``: what the doctor's findings and the bounds leave, of programs that nobody chose anything for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

import ddp_prof as dp
from ddp_prof.analyze.cost import Bounds
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.analyze.what_if.rules import fill_until_reached
from ddp_prof.errors import WorkloadError
from ddp_prof.tune import recorded
from ddp_prof.tune.candidates import Candidates, choose_for, choose_tries, sizes_to_try
from ddp_prof.tune.measure import Program
from ddp_prof.tune.tries import TODAY, parse_tries
from tests.analyze.what_if.ticking import Job
from tests.command_line import run
from tests.conftest import ROOT
from tests.tune.test_programs import PLAIN, programs

__all__ = ["programs"]
STEP_NS = 100_000_000
SETTINGS: dict[str, tuple[str, int | bool]] = {
    "copies out of buckets": ("gradient_as_bucket_view", True),
    "vote on unused parameters": ("find_unused_parameters", False),
    "single hardware queue": ("CUDA_DEVICE_MAX_CONNECTIONS", 8),
    "broadcast in forward": ("broadcast_buffers", False),
}
FEWER = "but fewer collectives slow compute for less time, which may gain"


def chosen(
    *findings: tuple[str, int | None], schedule_ns: int | None, worth: float = 0.01, network_ns: int | None = None
) -> tuple[list[str], list[str]]:
    """The labels of what is tried, and the reasons."""
    found = tuple(
        Finding(rule, "", "", cost_ns=cost, argument=argument, value=value)
        for rule, cost in findings
        for argument, value in [SETTINGS.get(rule, (None, None))]
    )
    result = choose_tries(Diagnosis(found, ()), Bounds(schedule_ns, network_ns, network_ns, network_ns), STEP_NS, worth)
    return [tried.label for tried in result.tries], list(result.reasons)


def test_a_bound_below_worth_ends_it() -> None:
    assert chosen(schedule_ns=300_000) == ([], ["hiding communication can gain no more than 0.3 %: nothing to tune"])


def test_where_compute_is_slowed_fewer_buckets_may_gain_more_than_hiding() -> None:
    """It was said that no schedule can gain more than 0.3 %, and that there is nothing to tune."""
    job = Job((150_000,) * 39 + (1_000,), (30.0,) * 40, overhead=15, per_mb=20, slowed=0.4, forward=50, rest=50)
    today, fewer = (job.step([range(at, at + of) for at in range(0, 40, of)], default_rng(0)) for of in (1, 4))
    waits = today["resumes"][0] - today["backward_end"][0]
    gain = today["ends"][0] - fewer["ends"][0]
    assert gain > 5 * waits, "what waits is no bound"
    assert chosen(schedule_ns=300_000, network_ns=4_400_000) == (
        ["bucket_cap_mb=5", "bucket_cap_mb=50", "bucket_cap_mb=100"],
        [f"hiding communication can gain no more than 0.3 %, {FEWER} up to 4.1 % more: trying bucket_cap_mb=5,50,100"],
    )
    assert chosen(schedule_ns=300_000, network_ns=600_000)[0] == []


def test_what_waits_is_worth_other_buckets() -> None:
    tries, reasons = chosen(schedule_ns=20_000_000)
    assert tries == ["bucket_cap_mb=5", "bucket_cap_mb=50", "bucket_cap_mb=100"]
    assert reasons == ["hiding communication can gain no more than 20.0 %: trying bucket_cap_mb=5,50,100"]


@pytest.mark.parametrize(
    ("whole_mb", "sizes"),
    [
        (None, "5,50,100"),
        (4000, "5,50,100"),
        (130, "5,22,100"),
        (72, "4.5,12,72"),
        (4.02, "0.25,0.67,5"),
        (0.3, "0.019,0.05,1"),
    ],
)
def test_sizes_of_buckets_are_those_of_the_model(whole_mb: float | None, sizes: str) -> None:
    """Of 4 MiB, sizes of 5, 50 and 100 were tried: three times all gradients in one bucket."""
    assert sizes_to_try(whole_mb) == f"bucket_cap_mb={sizes}"
    gradients = np.full(96, round((whole_mb or 4000) * 2**20 / 96))
    caps = [float(size) * 2**20 for size in sizes.split(",")]
    counts = [len(fill_until_reached(gradients, cap, cap)) for cap in caps]
    assert counts == sorted(set(counts), reverse=True), "no two sizes leave the same buckets"


def test_findings_name_their_setting_if_they_cost_enough() -> None:
    copies, vote = ("copies out of buckets", 2_000_000), ("vote on unused parameters", 500_000)
    assert chosen(copies, vote, schedule_ns=300_000) == (
        ["gradient_as_bucket_view=True"],
        [
            "copies out of buckets, at most 2.0 % of a step: trying gradient_as_bucket_view",
            "hiding communication can gain no more than 0.3 %",
        ],
    )
    assert chosen(vote, schedule_ns=300_000, worth=0.001)[0][0] == "find_unused_parameters=False"
    assert chosen(("single hardware queue", None), schedule_ns=0)[0] == ["CUDA_DEVICE_MAX_CONNECTIONS=8"]
    assert chosen(("straggler", 9_000_000), schedule_ns=0)[0] == [], "no setting answers it"


def test_what_cannot_be_set_between_two_steps_is_left_out() -> None:
    found = Candidates(parse_tries(["CUDA_DEVICE_MAX_CONNECTIONS=8", "static_graph", "comm_hook=powerSGD"]), ("why",))
    fitting = found.that_fit_in_process()
    assert [tried.label for tried in fitting.tries] == ["static_graph=True"]
    assert fitting.reasons == (
        "why",
        "left out, for --in-process: CUDA_DEVICE_MAX_CONNECTIONS=8, comm_hook=powerSGD",
    )


def test_what_is_not_known_is_tried() -> None:
    tries, reasons = chosen(schedule_ns=None)
    assert len(tries) == 3
    assert reasons[0].startswith("how much of a step waits for communication is not known: trying bucket_cap_mb")


def test_the_size_that_the_doctor_advises_is_tried() -> None:
    """Its page says that a finding that a setting answers is; that of a large last bucket was not."""
    finding = Finding("large last bucket", "", "", cost_ns=9_000_000, argument="bucket_cap_mb", value=12)
    found = choose_tries(Diagnosis((finding,), ()), Bounds(0, None, None, None), STEP_NS, 0.01)
    assert [tried.label for tried in found.tries] == ["bucket_cap_mb=12"]
    assert found.reasons[0] == "large last bucket, at most 9.0 % of a step: trying bucket_cap_mb=12"


def test_what_changes_results_is_tried_only_when_asked_for() -> None:
    assert chosen(("broadcast in forward", 9_000_000), schedule_ns=0)[0] == []


def test_a_capture_of_torchs_ddp() -> None:
    (capture,) = dp.load_runs(ROOT / "traces" / "torch.sqlite")
    found = choose_for(capture, 0.01)
    assert [tried.label for tried in found.tries] == [f"bucket_cap_mb={mb}" for mb in (12, 2.2, 5.9, 36)]
    assert choose_for(capture, 0.99).tries == ()


@pytest.mark.torch
@pytest.mark.slow
def test_one_capture_ends_in_order_and_ends_the_tuning(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", programs["PATH"])
    monkeypatch.setenv("NSYS", "none")
    command = ["tune", "--worth", "99%", "--store", "out/tune.db", "--warmup", "2", "--format", "json"]
    done = run(*command, "--", "torchrun", "--nproc-per-node", "2", script)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["tries"] == []
    assert document["ended"].endswith("nothing to tune")
    files = sorted((tmp_path / "out" / "tune").rglob("*.json.gz"))
    assert len(files) == 2
    (capture,) = dp.load_runs(files)
    assert [len(rank.steps) for rank in capture.overlap().ranks] == [10, 10]
    assert not (tmp_path / "after").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.py"]
    before = [file.stat().st_mtime_ns for file in files]
    again = run(*command, "--", "torchrun", "--nproc-per-node", "2", script)
    assert json.loads(again.stdout) == document
    assert [file.stat().st_mtime_ns for file in files] == before, "the capture that is there was read"


def test_a_capture_that_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 had written its trace when rank 1 failed: the next command took that for the whole capture."""
    folders: list[Path] = []

    def plan(command: tuple[str, ...], folder: Path, *_: object) -> tuple[Any, str]:
        folders.append(folder)
        return SimpleNamespace(command=command, nsys=None, traces=[*folder.glob("*.json.gz")]), ""

    class Fails(Program):
        def measure(self, *_: object) -> Any:
            (folders[-1] / "train.rank0.json.gz").touch()
            raise WorkloadError("a rank ended")

    monkeypatch.setattr(recorded, "plan_job", plan)
    for _ in range(2):
        with pytest.raises(WorkloadError, match="a rank ended"):
            recorded.record(Fails(("torchrun", "train.py"), 5, 30), TODAY, tmp_path / "tune.db", tmp_path, {})
    assert len(folders) == 2


def test_another_setting_of_communication_has_a_capture_of_its_own(tmp_path: Path) -> None:
    """The trace of a run with NCCL_ALGO=Tree was taken for that of a run without it."""
    store, program = tmp_path / "tune.db", Program(("torchrun", "train.py"), 5, 30)
    folders: list[Path] = []

    def plan(_command: object, folder: Path, *_: object) -> Any:
        folders.append(folder)
        raise WorkloadError("not now")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorded, "plan_job", plan)
        for environ in ({}, {"NCCL_ALGO": "Tree"}, {"NCCL_ALGO": "Tree", "SHLVL": "2"}):
            with pytest.raises(WorkloadError, match="not now"):
                recorded.record(program, TODAY, store, tmp_path, environ)
    assert len(set(folders)) == 2
    assert folders[1] == folders[2]
