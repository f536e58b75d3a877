"""What waited for which collective: the lane, details, arrows, the table, and keys that lead from one to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from tests.browser.conftest import Once, Visit, write_timeline
from tests.browser.test_inspecting import details, device_label
from tests.measuring import source_of
from tests.nsys_factory import NCCL, US, Capture, Kernel, bucket_steps, write_capture


def page_of(tmp_path: Path, capture: Capture, product: str = "2023.4") -> Path:
    trace = load_trace(write_capture(tmp_path / "x.sqlite", capture, product))
    return write_timeline(build_timeline([source_of("run", trace)]), tmp_path / "run.html")


def write_page(folder: Path) -> None:
    """The first and the third step stand still for 10 us, the second one not at all."""
    page_of(folder, bucket_steps(20, 4, 20))


@pytest.fixture
def page(once: Once) -> Path:
    return once(write_page) / "run.html"


def arrows(visit: Visit) -> list[list[float]]:
    """From when to when each arrow leads, in us."""
    x = visit.ask("page.element.data.find(({ marker }) => marker)?.x ?? []")
    return [[round(time * 1000, 3) for time in x[at : at + 2]] for at in range(0, len(x), 3)]


def selected(visit: Visit) -> tuple[str, float, float]:
    """The category of what is selected, and from when to when it lasts, in us."""
    name = visit.ask("page.categories.find(({ code }) => code === page.selected.track.category).name")
    start, end = visit.ask("page.selection")
    return name, start / US, end / US


def table(visit: Visit) -> dict[str, str]:
    head = visit.texts("#sums thead th")
    return dict(zip(head, visit.texts("#sums tbody tr > *"), strict=True))


def test_a_collective_tells_who_waited_for_it(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.click(device_label(visit, "communication", 10 * US))
    known = details(visit)
    assert known["blocking"] == "10.0 µs (10,000 ns)"
    assert known["slack"] == "none: it ended 10.0 µs (10,000 ns) too late"
    assert known["needed by"] == "memcpy, stream 7, 25.0 µs on the axis"
    assert known["held back by"] == "this collective"
    assert arrows(visit) == [[25, 25.001]]
    assert visit.complaints == []


def test_keys_lead_from_one_wait_to_the_next(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    visit.press("b")
    assert selected(visit) == ("blocking", 15, 25)
    assert details(visit)["waits for"] == NCCL
    assert arrows(visit) == [[25, 25.001]]
    visit.press("b")
    assert selected(visit) == ("blocking", 95, 105)
    visit.press("b")
    assert selected(visit) == ("blocking", 95, 105), "there is no further one"
    visit.press("Shift+B")
    assert selected(visit) == ("blocking", 15, 25)
    for start in (15, 95):
        visit.press("e")
        assert selected(visit) == ("exposed", start, start + 10)
    visit.press("Shift+E")
    assert selected(visit) == ("exposed", 15, 25)
    visit.press("?")
    assert "waits for communication" in visit.seen_text("#keys")
    assert visit.complaints == []


def test_the_table_tells_how_long_is_waited_in_view(visit: Visit, page: Path) -> None:
    visit.open_timeline(page)
    for step, cell in ((0, "10.0 µs 24 %"), (1, "0.0 ms 0 %")):
        visit.ask(f"page.showStep({step})")
        assert table(visit)["blocking"] == cell


def test_a_capture_without_events_has_no_lane_and_no_zero(visit: Visit, tmp_path: Path) -> None:
    visit.open_timeline(page_of(tmp_path, bucket_steps(20, has_event_records=False), "2024.6"))
    assert visit.ask("page.rows.filter(({ kind }) => kind === 'waiting').length") == 0
    assert visit.text("#sums tbody td >> nth=-1") == "n/a"
    assert "--cuda-event-trace" in str(visit.attribute("#sums tbody td >> nth=-1", "title"))
    visit.click(device_label(visit, "communication", 10 * US))
    assert details(visit)["blocking"].startswith("not known: event records were not recorded")


@pytest.mark.nightly  # in every gate without a page: tests/present/timeline/test_facts.py
def test_without_communication_blocking_is_not_known(visit: Visit, tmp_path: Path) -> None:
    """The table said 0, and the JSON null."""
    capture = Capture(kernels=[Kernel("gemm", 1_000, 9_000, launch=500, thread=1)])
    visit.open_timeline(page_of(tmp_path, capture))
    assert visit.text("#sums tbody td >> nth=-1") == "n/a"
    assert visit.attribute("#sums tbody td >> nth=-1", "title") == "nothing in this trace is known to communicate"
