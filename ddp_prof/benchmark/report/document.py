"""The JSON document of ``ddp-prof results``: integers and floats of nanoseconds, keys may be added, never renamed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ddp_prof.benchmark.conclusions import judge
from ddp_prof.benchmark.report.views import PLACES, place_notes
from ddp_prof.benchmark.report.words import CONCLUSIONS, HEADINGS, sentence
from ddp_prof.present.json_documents import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddp_prof.benchmark.places import PlaceResults
    from ddp_prof.benchmark.settings import SettingSummary
    from ddp_prof.benchmark.study import Study


def results_document(database: Path, places: Sequence[PlaceResults], study: Study | None) -> dict[str, Any]:
    """The JSON document, times in nanoseconds: keys may be added, never renamed."""
    return {
        "schema": SCHEMA,
        "database": str(database),
        "places": [_place_document(place) for place in places],
        "study": study and _study_document(study),
        "warnings": [PLACES.format(len(places))] if len(places) > 1 else [],
    }


def _place_document(place: PlaceResults) -> dict[str, Any]:
    link, model = place.link, place.model
    return {
        **asdict(place.place),
        "environment": asdict(place.environment) if place.environment else {"id": place.place.environment},
        "settings": [_setting_document(summary) for summary in place.summaries],
        "link": None if isinstance(link, str) else asdict(link),
        "best_bucket_bytes": model and model.best_bytes,
        "facts": [
            {**asdict(fact), "heading": HEADINGS[fact.topic], "text": sentence(fact) if fact.is_supported else None}
            for fact in place.facts
        ],
        "conclusions": [{**asdict(judgement), "text": CONCLUSIONS[judgement.name]} for judgement in place.judgements],
        "warnings": place_notes(place),
    }


def _setting_document(summary: SettingSummary) -> dict[str, Any]:
    values = asdict(summary)
    del values["place"]
    timing, run = values.pop("timing"), values.pop("first")
    shared = (
        "d_model", "num_layers", "parameters", "gradient_bytes", "backend", "steps", "collectives",
        "communicated_bytes", "tokens", "git_commit",
    )  # fmt: skip
    return {
        **timing["setting"],
        "status": timing["status"],
        **{key: run[key] for key in shared},
        "step_ns": timing["step_ns"],
        "communication_ns": timing["communication_ns"],
        **values,
    }


def _study_document(study: Study) -> dict[str, Any]:
    return {
        "name": study.name,
        "about": study.about,
        "settings": [
            {**asdict(timing.setting), "status": timing.status, "step_ns": timing.step_ns and timing.step_ns.value,
             "communication_ns": timing.communication_ns and timing.communication_ns.value}
            for timing in study.timings
        ],
        "conclusions": [{**asdict(item), "text": CONCLUSIONS[item.name]} for item in judge(study.timings)],
    }  # fmt: skip
