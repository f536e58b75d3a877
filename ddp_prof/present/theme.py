"""Colours and fonts: one colour per meaning everywhere, distinct for colour-blind readers, in a light and a dark theme.

The colours of measured categories are defined only here: in no other Python module, style sheet or script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddp_prof.analyze.collectives.exposed_time import (
    BLOCKING_CALL,
    LATE_INPUT,
    LAUNCHED_LATE,
    PEER_WAIT,
    QUEUED,
    TRANSFER,
    UNKNOWN_WHY,
)
from ddp_prof.manifest import Caveat
from ddp_prof.range_names import BACKWARD, FORWARD, OPTIMIZER, SYNCHRONIZE

COMPUTE = "compute"
COMMUNICATION = "communication"
MEMORY = "memory"
GRAPH = "graph"
UNNAMED = "unnamed"
STEP = "step"
CALL = "call"
RANGE = "range"

COMPUTE_ONLY = "compute_only"
OVERLAPPED = "overlapped"
EXPOSED = "exposed"
EXPOSED_MEMORY = "exposed_memory"
IDLE = "idle"

BLOCKING = "blocking"
MAYBE_BLOCKING = "maybe_blocking"

ELSEWHERE = "elsewhere"
"""Exposed time of a collective that is counted with another collective, which runs at the same time."""

STRIP = (COMPUTE_ONLY, OVERLAPPED, EXPOSED, EXPOSED_MEMORY, IDLE)
"""The parts into which a step's time is divided, in the order in which bars stack them."""

LABELS: Mapping[str, str] = {
    STEP: "step",
    FORWARD: "forward",
    BACKWARD: "backward",
    SYNCHRONIZE: "synchronize",
    OPTIMIZER: "optimizer",
    COMPUTE: "compute",
    COMMUNICATION: "communication",
    MEMORY: "copies",
    GRAPH: "CUDA graph",
    UNNAMED: "unnamed kernel",
    OVERLAPPED: "overlapped",
    EXPOSED: "exposed",
    COMPUTE_ONLY: "compute only",
    EXPOSED_MEMORY: "exposed memory",
    IDLE: "idle",
    BLOCKING: "blocking",
    MAYBE_BLOCKING: "not known",
    CALL: "CUDA call",
    RANGE: "range of the program",
}
"""Name of each category, in the order of a legend."""

LEGEND: Mapping[str, str] = {
    **LABELS,
    OVERLAPPED: "overlapped communication",
    EXPOSED: "exposed communication",
    BLOCKING: "waiting for communication",
    MAYBE_BLOCKING: "not known whether anything waits",
    GRAPH: "CUDA graph, contents not recorded",
    UNNAMED: "kernel whose name is not in the trace",
}
"""Text of each category in a legend, longer where the label alone is not clear."""

CATEGORIES = tuple(LABELS)
"""All categories; a timeline stores a category as its index here."""

_COLORS: Mapping[str, str] = {
    FORWARD: "#87c2ff",
    BACKWARD: "#2451ad",
    SYNCHRONIZE: "#edceb6",
    OPTIMIZER: "#876ae8",
    COMPUTE: "#afa1ab",
    MEMORY: "#737012",
    GRAPH: "#8d7f6f",
    UNNAMED: "#c3a6c9",
    COMPUTE_ONLY: "#afa1ab",
    EXPOSED_MEMORY: "#fe9f28",
    CALL: "#6f93a8",
    RANGE: "#8aa37b",
}

SERIES = ("#1d6996", "#e17c05", "#38a6a5", "#6b4c2a", "#9bbbe0", "#edad08")
"""Colours for series that are not categories, such as the workloads of a study."""

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
FONT_SIZE = 12


@dataclass(frozen=True)
class Palette:
    """The colours of one theme.

    Attributes:
        paper, text, quiet, line: Background, text, less important text, and thin lines.
        notice: Text that must not be overlooked, such as ``device: cpu``.
        colors: By category, and by reason why communication is exposed.
    """

    paper: str
    text: str
    quiet: str
    line: str
    notice: str
    colors: Mapping[str, str]

    @property
    def uncategorized(self) -> dict[str, str]:
        """The colours that belong to no category, by name."""
        return {name: getattr(self, name) for name in ("paper", "text", "quiet", "line", "notice")}


LIGHT = Palette(
    paper="#ffffff",
    text="#1c2128",
    quiet="#5f6875",
    line="#d6dae0",
    notice="#a84300",
    # Communication is nearly the colour of text, so that it stands out from the compute above it. Overlapped is lighter
    # than exposed, so that they differ in grey, too; both have enough contrast to be colours of text.
    colors={
        **_COLORS,
        OVERLAPPED: "#0b8484",
        EXPOSED: "#a3142f",
        BLOCKING: "#741f7a",
        MAYBE_BLOCKING: "#c6cdd6",
        STEP: "#d5dbe4",
        COMMUNICATION: "#2b1e5c",
        IDLE: "#e8ebef",
        UNKNOWN_WHY: "#727254",
        TRANSFER: "#a3142f",  # as EXPOSED: transfer is the reason if there is no other
        PEER_WAIT: "#c27836",
        QUEUED: "#8d396e",
        LATE_INPUT: "#1390c8",
        LAUNCHED_LATE: "#8dc575",
        BLOCKING_CALL: "#242cb2",
        ELSEWHERE: "#fada91",
    },
)
DARK = Palette(
    paper="#14181d",
    text="#e8ebef",
    quiet="#9aa4b1",
    line="#39414c",
    notice="#ffb26b",
    colors={
        # Compute is darker than in the light theme, so that overlapped communication stands out without being bright.
        **_COLORS,
        COMPUTE: "#544f59",
        COMPUTE_ONLY: "#544f59",
        OVERLAPPED: "#5cb9b3",
        EXPOSED: "#f04358",
        BLOCKING: "#d574dc",
        MAYBE_BLOCKING: "#3b444f",
        STEP: "#2d343e",
        COMMUNICATION: "#ece6ff",
        IDLE: "#262c34",
        UNKNOWN_WHY: "#c9c9dd",
        TRANSFER: "#f04358",
        PEER_WAIT: "#c69b48",
        QUEUED: "#912088",
        LATE_INPUT: "#199cb0",
        LAUNCHED_LATE: "#86df66",
        BLOCKING_CALL: "#711cf3",
        ELSEWHERE: "#f7e9c8",
    },
)


def recoloring() -> dict[str, str]:
    """Return the dark theme's colour for each colour of the light theme, if they differ."""
    named = dict(zip(LIGHT.uncategorized.values(), DARK.uncategorized.values(), strict=True))
    pairs = {color: DARK.colors[name] for name, color in LIGHT.colors.items()}
    return named | {light: dark for light, dark in pairs.items() if light != dark}


def device_label(devices: Iterable[str], caveats: Iterable[Caveat]) -> tuple[list[str], bool]:
    """Return where the runs ran, and whether to highlight it.

    Args:
        devices: Kind of device of each run.
        caveats: What makes the runs not representative.

    Returns:
        The words to show; and whether anything but one GPU per rank was used, which is highlighted.
    """
    names, is_shared = sorted(set(devices)), Caveat.SHARED_GPU in caveats
    words = [f"device: {', '.join(names)}", *([Caveat.SHARED_GPU.value] if is_shared else [])]
    return words, is_shared or "cpu" in names


def device_notice(devices: Iterable[str], caveats: Iterable[Caveat]) -> str:
    """Return the words of :func:`device_label` as one text for Plotly, coloured if they are to be highlighted."""
    words, stands_out = device_label(devices, caveats)
    notice = "  ·  ".join(words)
    return f'<b><span style="color:{LIGHT.notice}">{notice}</span></b>' if stands_out else notice
