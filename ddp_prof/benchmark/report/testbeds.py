"""The results of each testbed: its settings, what a message costs, observations, and the published claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.benchmark.alpha_beta import BucketModel, Unknown, fit_link, message_costs
from ddp_prof.benchmark.claims import check_claims
from ddp_prof.benchmark.observations import find_observations
from ddp_prof.benchmark.settings import by_testbed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.benchmark.alpha_beta import MessageCost
    from ddp_prof.benchmark.claims import ClaimResult
    from ddp_prof.benchmark.observations import Observation
    from ddp_prof.benchmark.settings import SettingSummary, Testbed
    from ddp_prof.benchmark.store import Environment, Results


@dataclass(frozen=True, slots=True)
class TestbedResults:
    """The results of one testbed.

    Attributes:
        model: The course's model of bucketing, with what a message costs by its size.
        claims: Whether the published study's claims hold here.
    """

    testbed: Testbed
    environment: Environment | None
    summaries: tuple[SettingSummary, ...]
    messages: tuple[MessageCost, ...]
    model: BucketModel | Unknown
    observations: tuple[Observation, ...]
    claims: tuple[ClaimResult, ...]


def gather_testbeds(results: Results, summaries: Iterable[SettingSummary]) -> list[TestbedResults]:
    """The results of each testbed.

    Args:
        results: The database.
        summaries: Those of its settings that were asked for.
    """
    messages = message_costs(results)
    return [_gather(own, messages.get(testbed, ())) for testbed, own in by_testbed(summaries).items()]


def _gather(summaries: Sequence[SettingSummary], messages: tuple[MessageCost, ...]) -> TestbedResults:
    first = summaries[0]
    link = fit_link(messages)
    model = link if isinstance(link, Unknown) else BucketModel(link, first.first.gradient_bytes)
    observations = find_observations(summaries, model)
    claims = check_claims([summary.timing for summary in summaries])
    return TestbedResults(first.testbed, first.environment, tuple(summaries), messages, model, observations, claims)
