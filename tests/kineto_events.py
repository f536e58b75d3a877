"""The ranges in what torch.profiler wrote, whichever way they were recorded."""

from __future__ import annotations

from typing import Any

from ddp_prof.range_names import OPERATOR_PREFIX


def ranges_in(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of ranges, with the names that were given to them."""
    return [
        event | {"name": event["name"].removeprefix(OPERATOR_PREFIX)}
        for event in events
        if event.get("cat") == "user_annotation" or str(event.get("name")).startswith(OPERATOR_PREFIX)
    ]
