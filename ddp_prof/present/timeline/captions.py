"""What a timeline says: its headline, the title of its axis, and what is known of a box in words."""

from __future__ import annotations

import numpy as np

from ddp_prof.analyze.collectives.exposed_time import BLOCKING_CALL, PEER_WAIT, TAIL, UNKNOWN_WHEN, WHENS, WHYS
from ddp_prof.present import theme
from ddp_prof.present.headlines import WHEN, WHY
from ddp_prof.present.text import MAX_NAME, percent, plain_name
from ddp_prof.present.timeline.boxes import CODE
from ddp_prof.present.timeline.model import COMMUNICATION, COMPUTE, HOST, STRIP, WAITING, Lane, Timeline
from ddp_prof.range_names import parse_range
from ddp_prof.trace import UNKNOWN

_WHEN = WHEN | {TAIL: "in the tail, after backward's last compute", UNKNOWN_WHEN: "in no known phase"}
_WHY = WHY | {BLOCKING_CALL: "the program waits for it", PEER_WAIT: "a peer had not arrived"}
EXPOSED_PARTS = tuple((_WHEN[when], _WHY[why]) for when in WHENS for why in WHYS)
"""When and why a part of a collective is exposed, in the order of ``Exposure.pairs_ns``."""


def headline(model: Timeline) -> str:
    """What the figure shows, in a sentence of plain text."""
    titles = [plain_name(panel.title) for panel in model.panels]
    if all(panel.overlap_ratio is None for panel in model.panels):
        return f"{', '.join(titles)}: how much communication hides is not known"
    shares = [percent(panel.overlap_ratio) for panel in model.panels]
    first, *others = zip(titles, shares, strict=True)
    rest = "".join(f", {title} {share}" for title, share in others)
    return f"{first[0]} hides {first[1]}{rest} of {'their' if others else 'its'} communication behind compute"


def page_headline(model: Timeline) -> str:
    """Of one run what hiding all its communication would gain, of several how much each hides."""
    if len(model.panels) > 1 or not model.panels[0].gain:
        return headline(model)
    return f"{plain_name(model.panels[0].title)}: {model.panels[0].gain}"


def axis_title(model: Timeline) -> str:
    """What time 0 is."""
    marks = [panel.step_names[panel.steps[0].key] for panel in model.panels if panel.steps]
    if not marks:
        return "time since the first compute, communication or copy"
    return f"time since the start of {marks[0]}" if len(set(marks)) == 1 else "time since the first step shown"


def box_title(lane: Lane, category: str, name_id: int, bucket: int, longest: int = MAX_NAME) -> str:
    """What a box is, as plain text."""
    name = plain_name(lane.names[name_id], longest) if name_id != UNKNOWN else theme.LEGEND[category]
    if bucket == UNKNOWN:
        return name
    if lane.from_launch:  # the host's range says no more than that; a kernel has a name of its own
        return f"{parse_range(lane.names[name_id]).name.replace('_', '-')} of bucket {bucket}"
    return f"collective of bucket {bucket}: {name}"


def box_label(lane: Lane, category: str, name_id: int, bucket: int) -> str:
    """What is written in a box of a picture where there is room."""
    if category == theme.STEP:
        return lane.names[name_id].partition(":")[0]
    if lane.kind == COMMUNICATION:
        return f"bucket {bucket}" if bucket != UNKNOWN else ""
    # Kernels are many and narrow; phases and what a CPU computes in them are few and wide.
    if lane.kind == HOST and name_id != UNKNOWN:
        return f"{theme.LABELS[category]} (inferred)"
    wide = lane.kind in (STRIP, WAITING) or (lane.kind in (HOST, COMPUTE) and name_id == UNKNOWN)
    return theme.LABELS[category] if wide else ""


def explanation(model: Timeline) -> tuple[tuple[str, str | None], ...]:
    """What the colours of communication mean, in parts of plain text, some of a category's colour."""
    if all(panel.overlap_ratio is None for panel in model.panels):
        return ()
    lanes = [lane for panel in model.panels for rank in panel.ranks for lane in rank.lanes]
    waits = any(lane.kind == WAITING and np.any(lane.boxes.category == CODE[theme.BLOCKING]) for lane in lanes)
    blocking = ("; ", None), (theme.LEGEND[theme.BLOCKING], theme.BLOCKING), (": something stands still for it", None)
    return (
        (theme.LEGEND[theme.OVERLAPPED], theme.OVERLAPPED),
        (" runs while the rank computes, ", None),
        (theme.LEGEND[theme.EXPOSED], theme.EXPOSED),
        (" while it computes nothing", None),
        *(blocking if waits else ()),
    )
