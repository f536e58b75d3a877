"""What is said of collectives, in rows, in JSON and in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ddp_prof.analyze.collectives.results import measure_collectives
from ddp_prof.analyze.root_cause import RootCause
from ddp_prof.present.tables.collectives import collectives_view, root_cause_text
from tests.analyze.collectives.test_timing import OURS
from tests.measuring import analysis_of
from tests.present.runs import cpu_run

CONTRACT = {
    "": "schema collectives alignment headline warnings",
    "collectives": "rank process device step index op bucket bytes ready_ns launch_ns start_ns end_ns duration_ns "
    "overlapped_ns exposed_ns causes transfer_ns wait_ns busbw_bytes_per_s",
    "causes": "tail launched_late queued waiting starved synchronous",
    "alignment": "method residual_p50_ns residual_p95_ns missing_ranks",
}
TAIL = RootCause(
    exposed_ns=100, cause="tail", cause_ns=82, wait_ns=0, collectives_a_step=8, bucket=7, index=7, is_last=True,
    bucket_ns=82, bytes=61 * 2**20, parameters=("embedding", "norm"), lead_ns=300_000,
)  # fmt: skip


def sheet_of(trace, by: str = "collective"):
    run = analysis_of(trace)
    return collectives_view(run, measure_collectives(run), by)


def test_the_document_keeps_the_contract() -> None:
    document = json.loads(json.dumps(sheet_of(OURS).document, allow_nan=False))
    first = document["collectives"][0]
    parts = {"": document, "collectives": first, "causes": first["causes"], "alignment": document["alignment"]}
    for part, keys in CONTRACT.items():
        assert set(keys.split()) <= parts[part].keys(), part
    assert (document["schema"], first["bytes"], first["transfer_ns"]) == (1, 4000, None)


@pytest.mark.parametrize(("by", "rows"), [("collective", 2), ("step", 1), ("bucket", 2)])
def test_rows_sum_to_the_same(by: str, rows: int) -> None:
    found = sheet_of(OURS, by).rows
    assert len(found) == rows
    assert sum(row["exposed_ms"] for row in found) * 1e6 == pytest.approx(8)
    assert sum(row["tail_ms"] for row in found) * 1e6 == pytest.approx(4)


def test_times_are_within_the_step() -> None:
    first, second = sheet_of(cpu_run(steps=2)).rows
    assert (first["ready_ms"], first["start_ms"], first["end_ms"]) == (0, 0, 4e-6)
    assert (second["ready_ms"], second["end_ms"]) == (0, 4e-6)


def test_the_headline_names_cause_bucket_size_parameters_and_time() -> None:
    assert root_cause_text(TAIL, ["one"]) == (
        "82 % of exposed time is tail: the last bucket (61 MB, embedding, norm) starts 0.30 ms before backward ends. "
        "A smaller last bucket would hide more of it."
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameters": ("embedding",)}, "It holds a single parameter"),
        ({"lead_ns": -2_000}, "starts 2.0 µs after backward ends"),
        ({"lead_ns": 0}, "starts when backward ends"),
        ({"bucket": None, "bytes": None, "parameters": ()}, "the last collective starts"),
        ({"wait_ns": 2}, "82 % of exposed time is tail: "),
        ({"wait_ns": 41}, "tail (50 % of it waiting for a peer): the last bucket (61 MB, embedding, norm) starts"),
        ({"wait_ns": 41}, "A smaller last bucket"),
        ({"wait_ns": 42}, "'ddp-prof skew' tells who arrives late."),
        ({"collectives_a_step": 1}, "Smaller buckets would start earlier"),
        ({"is_last": False, "bucket": 3}, "bucket 3 of 8 (61 MB, embedding, norm) starts"),
        ({"is_last": False, "bucket": 3}, "Smaller buckets would start earlier"),
        ({"cause": "launched_late"}, "82 % of exposed time is due to late launches by the host, "),
        ({"cause": "synchronous"}, "all 8 collectives of a step start after backward"),
        ({"cause": "waiting", "bucket_ns": 41}, "waiting for a peer, 50 % of that with the last bucket"),
        ({"cause": "queued", "is_last": False, "bucket": 3}, "with bucket 3 of 8"),
    ],
)
def test_the_headline_says_what_to_do(change: dict[str, object], words: str) -> None:
    assert words in root_cause_text(replace(TAIL, **change), ["one"])


def test_nothing_exposed_and_nothing_at_all_are_told_apart() -> None:
    assert root_cause_text(None, ["one"]) == "Compute hides all communication."
    assert root_cause_text(None, []) == "No communication was recorded."
