from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_prof.analyze.root_cause import RootCause
from ddp_prof.present.headlines import Headline, root_cause_headline

TAIL = RootCause(
    exposed_ns=100, cause="tail", cause_ns=82, wait_ns=0, collectives_a_step=8, bucket=7, index=7, is_last=True,
    bucket_ns=82, bytes=61 * 2**20, parameters=("embedding", "norm"), lead_ns=300_000,
)  # fmt: skip


def test_the_headline_names_cause_bucket_size_parameters_and_time() -> None:
    assert root_cause_headline(TAIL, has_collectives=True).text == (
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
    assert words in root_cause_headline(replace(TAIL, **change), has_collectives=True).text


def test_nothing_exposed_and_nothing_at_all_are_told_apart() -> None:
    assert root_cause_headline(None, has_collectives=True).text == "Compute hides all communication."
    assert root_cause_headline(None, has_collectives=False).text == "No communication was recorded."


@pytest.mark.parametrize("change", [{}, {"wait_ns": 41}, {"cause": "synchronous"}, {"cause": "queued"}])
def test_the_claim_can_stand_alone(change: dict[str, object]) -> None:
    headline = root_cause_headline(replace(TAIL, **change), has_collectives=True)
    assert headline.claim.startswith("82 % of exposed time is ")
    assert headline.claim[-1] not in ".,:"
    assert len(headline.claim) < 80
    assert headline.text == headline.claim + headline.joint + headline.detail


def test_a_claim_without_detail_ends_as_a_sentence() -> None:
    assert Headline("Nothing was found").text == "Nothing was found."
