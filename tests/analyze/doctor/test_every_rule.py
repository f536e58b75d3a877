"""Every rule of the doctor has its row in the documentation, a run that it names, and one on which it says nothing."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from ddp_prof.analyze import doctor
from ddp_prof.analyze.doctor import Diagnosis
from ddp_prof.runs import LoadOptions, load_runs
from ddp_prof.trace import Category, Kind, Trace
from ddp_prof.tune.candidates import tries_of
from ddp_prof.tune.tries import parse_tries
from tests.analyze.collectives.test_straggler import pipeline
from tests.analyze.doctor.test_gpu_rules import (
    MS,
    NO_CONTENTION,
    diagnose,
    fsdp,
    profiled,
    queued,
    training,
    with_another,
    with_buckets,
    with_sizes,
    without_compute,
)

ROOT = Path(__file__).parents[3]
CAPTURES = Path(__file__).parent / "captures"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(x)"


def recorded(path: Path) -> Diagnosis:
    (run,) = load_runs([path])
    return run.doctor()


def slow_stage() -> Diagnosis:
    with TemporaryDirectory() as folder:
        (run,) = load_runs(pipeline(Path(folder), [2]), LoadOptions(one_run=True))
        return run.doctor()


def with_graphs(trace: Trace) -> Trace:
    """Its forward is a replay of a graph that was recorded whole."""
    rows = np.arange(len(trace.activities)) % 5 == 0
    kind, category = trace.activities.kind.copy(), trace.activities.category.copy()
    kind[rows], category[rows] = Kind.GRAPH, Category.OTHER
    return replace(trace, activities=replace(trace.activities, kind=kind, category=category))


FAULTY: dict[str, Callable[[], Diagnosis]] = {
    "communication on the compute stream": lambda: diagnose(training(comm_stream=7).trace()),
    "gradients reduced after backward": lambda: recorded(ROOT / "traces" / "flat.sqlite"),
    "one collective per parameter": lambda: diagnose(training(buckets=40, bucket_ns=10_000).trace()),
    "one bucket for all gradients": lambda: recorded(CAPTURES / "one_bucket.sqlite"),
    "backward waits for its reductions": lambda: diagnose(training(waits_in_hooks=True).trace()),
    "large last bucket": lambda: recorded(ROOT / "traces" / "torch.sqlite"),
    "gradients ready in another order than buckets": lambda: recorded(CAPTURES / "reversed.sqlite"),
    "host synchronization in backward": lambda: recorded(CAPTURES / "host_sync.sqlite"),
    "launch-bound host": lambda: recorded(CAPTURES / "starved.sqlite"),
    "straggler": lambda: recorded(CAPTURES / "slow_rank.sqlite"),
    "uneven compute": slow_stage,
    "copies out of buckets": lambda: diagnose(training(consumer="memcpy").trace()),
    "the last bucket is needed first": lambda: diagnose(
        training(bucket_ns=3 * MS, needed=lambda bucket: 3 - bucket).trace()
    ),
    "one communicator serializes gathers and scatters": lambda: diagnose(fsdp(20)),
    "single hardware queue": lambda: diagnose(queued(0)),
    "vote on unused parameters": lambda: diagnose(with_sizes(training().trace(), [8 << 20] * 3 + [512])),
    "time does not depend on size": lambda: diagnose(
        without_compute(with_sizes(training().trace(), [1 << 20, 32 << 20]))
    ),
    "broadcast in forward": lambda: diagnose(with_another(BROADCAST, "forward")),
    "barrier in each step": lambda: diagnose(with_another("EpDeviceSync_barrier", "optimizer")),
    "buckets reduced several times": lambda: diagnose(with_buckets([0, 1, 2] * 3)),
    "overlap without gain": lambda: diagnose(training().trace(), replace(NO_CONTENTION, contention_ns=50 * MS)),
    "CUDA graphs recorded whole": lambda: diagnose(with_graphs(training().trace())),
    "overhead of the profiler": lambda: diagnose(profiled(0.2)),
}
# What `ddp-prof tune` tries for a finding; nothing where no setting removes its cause, or results would change.
TRIED = {
    "one collective per parameter": ("bucket_cap_mb=25",),
    "one bucket for all gradients": ("bucket_cap_mb=5.9",),
    "large last bucket": ("bucket_cap_mb=12",),
    "copies out of buckets": ("gradient_as_bucket_view",),
    "single hardware queue": ("CUDA_DEVICE_MAX_CONNECTIONS=8",),
    "vote on unused parameters": ("find_unused_parameters=False",),
}
# Without fault; each decides the rules on which it does not abstain.
SOUND: tuple[Callable[[], Diagnosis], ...] = (
    lambda: recorded(CAPTURES / "nothing.sqlite"),
    lambda: diagnose(with_sizes(training().trace(), [8 << 20])),
)


def rules_in_the_code() -> set[str]:
    """The names in which findings and abstentions are made: constants beside the rules."""
    found = set()
    for module in {sys.modules[rule.__module__] for rule in doctor.RULES}:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Finding", "Abstained", "_find_in_most_steps"):
                values = [getattr(module, each.id, None) for each in node.args if isinstance(each, ast.Name)]
                found |= {*[value for value in values if isinstance(value, str)][:1]}
    return found


def rules_in_the_documentation() -> list[str]:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = text.partition("| rule | looks for |\n|---|---|\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| (.*?) \|", table, re.MULTILINE)


def test_every_rule_has_its_row_and_every_row_its_rule() -> None:
    assert sorted(rules_in_the_documentation()) == sorted(rules_in_the_code())


def test_every_rule_has_a_run_with_its_fault() -> None:
    assert FAULTY.keys() == set(rules_in_the_documentation())


@pytest.mark.parametrize("rule", FAULTY)
def test_it_names_its_fault_and_its_advice_stands_alone(rule: str) -> None:
    """The line ``change`` of a summary shows the advice without the evidence: it was *Launch them with async_op*."""
    (found,) = [one for one in FAULTY[rule]().findings if one.rule == rule]
    assert not {"it", "they", "them"} & {*found.advice.lower().split()[:3]}
    for text in (found.evidence, found.advice):
        assert "  " not in text
        assert text.endswith(".")


@pytest.mark.parametrize("rule", FAULTY)
def test_its_setting_can_be_tried(rule: str) -> None:
    (found,) = [one for one in FAULTY[rule]().findings if one.rule == rule]
    tries = tries_of(found)
    assert tries == TRIED.get(rule, ())
    assert len(parse_tries(tries)) == len(tries)


def test_sound_runs_are_judged_by_every_rule_and_blamed_by_none() -> None:
    judged = set()
    for diagnose_sound in SOUND:
        found = diagnose_sound()
        assert found.findings == ()
        judged |= FAULTY.keys() - {one.rule for one in found.abstained}
    assert judged == FAULTY.keys()
