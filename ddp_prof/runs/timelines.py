"""Draw timelines. Of a large trace the cache keeps what was drawn, so that the next page of it is only written.

Laying out and packing all boxes takes several times as long as writing the page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

from ddp_prof.heap import return_free_memory
from ddp_prof.present.charts import Chart
from ddp_prof.present.html.timeline_page import TimelineContent, make_content
from ddp_prof.present.timeline.build import build_excerpt, build_timeline
from ddp_prof.present.timeline.figure import draw_timeline
from ddp_prof.present.timeline.model import Source
from ddp_prof.runs.kept import KeptResults
from ddp_prof.runs.report import PAGE, PICTURE
from ddp_prof.runs.run import Run


class DrawnTimeline(NamedTuple):
    """What the page of a timeline shows; and the picture of a part of it, ``None`` if none was asked for."""

    content: TimelineContent
    picture: Chart | None


def find_drawings(runs: Sequence[Run]) -> KeptResults | None:
    """Return access to what the cache keeps of the timeline of these runs; ``None`` if it keeps nothing.

    It does so for a single run of a single file, whose whole capture is drawn. The name of a folder, which tells runs
    with the same label apart, would be a part of the page.
    """
    (run, *others) = runs
    return None if others or run.folder or run.file_name else run.kept_results()


def draw_timelines(
    load: Callable[[], Sequence[Source]],
    kept: KeptResults | None,
    *,
    with_picture: bool,
    steps: Collection[int] | None = None,
) -> DrawnTimeline:
    """Return what was drawn before of the same traces, or draw them, one below the other.

    Args:
        load: Reads the traces; called only if something must be drawn.
        kept: What :func:`find_drawings` returned; ``None`` if ``steps`` are given.
        with_picture: Whether a picture is drawn, too.
        steps: Numbers of the steps to draw. By default the page shows the whole capture, the picture a part.

    Raises:
        TraceError: A trace has none of the steps asked for.
    """
    sources = cache(load)

    def find_or_make(name: str, make: Callable[[], Any]) -> Any:
        """Return the result of this name in the cache; if there is none, make it and keep it."""
        if kept and (found := kept.find(name)) is not None:
            return found
        made = make()
        if kept:
            kept.keep({name: made})
        return made

    def make_picture() -> Chart:
        return draw_timeline(build_excerpt(sources(), steps))

    def make_page() -> TimelineContent:
        model = build_timeline(sources(), steps)
        sources.cache_clear()  # the events take more memory than the boxes that are drawn
        return_free_memory()
        return make_content(model)

    picture = find_or_make(PICTURE, make_picture) if with_picture else None
    return DrawnTimeline(find_or_make(PAGE, make_page), picture)
