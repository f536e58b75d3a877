"""All that is said of each place: its settings, what a message costs there, facts, and the study's conclusions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_prof.benchmark.alpha_beta import BucketModel, fit_link, message_times
from ddp_prof.benchmark.conclusions import judge
from ddp_prof.benchmark.facts import find_all
from ddp_prof.benchmark.settings import environments_of, places_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_prof.benchmark.alpha_beta import LinkModel, MessageTimes
    from ddp_prof.benchmark.conclusions import Judgement
    from ddp_prof.benchmark.facts import Fact
    from ddp_prof.benchmark.settings import Place, SettingSummary
    from ddp_prof.benchmark.store import Environment, Results


@dataclass(frozen=True, slots=True)
class PlaceResults:
    """All that is said of one place.

    Attributes:
        link: What a message costs by its size, or why that is not known.
        model: The course's model of bucketing, where a message's cost is known.
        judgements: Of the published study's conclusions.
    """

    place: Place
    environment: Environment | None
    summaries: tuple[SettingSummary, ...]
    messages: tuple[MessageTimes, ...]
    link: LinkModel | str
    model: BucketModel | None
    facts: tuple[Fact, ...]
    judgements: tuple[Judgement, ...]


def gather_places(results: Results, summaries: Iterable[SettingSummary]) -> list[PlaceResults]:
    """All that can be said of each place.

    Args:
        results: The database.
        summaries: Those of its settings that were asked for.
    """
    environments, messages = environments_of(results), message_times(results)
    return [
        _gather(place, environments.get(place.environment), own, messages.get(place, ()))
        for place, own in places_of(summaries).items()
    ]


def _gather(
    place: Place,
    environment: Environment | None,
    summaries: Sequence[SettingSummary],
    messages: tuple[MessageTimes, ...],
) -> PlaceResults:
    link = fit_link(messages)
    model = None if isinstance(link, str) else BucketModel(link, summaries[0].first.gradient_bytes)
    facts = find_all(summaries, model)
    judgements = judge([summary.timing for summary in summaries])
    return PlaceResults(place, environment, tuple(summaries), messages, link, model, facts, judgements)
