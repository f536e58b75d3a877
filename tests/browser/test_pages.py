from __future__ import annotations

from itertools import pairwise
from math import pi, sin
from pathlib import Path

import pytest

from ddp_prof.analyze.variants.waterfall import measure_waterfall
from ddp_prof.present import theme
from ddp_prof.present.charts import make_chart
from ddp_prof.present.charts.comparison import draw_waterfall
from ddp_prof.present.html.page import write_figure
from ddp_prof.present.html.report import ReportRun, write_report
from tests.browser.conftest import Once, Visit
from tests.command_line import run
from tests.present.runs import HOSTILE_TITLE, cpu_run, run_of


def write_two_runs(folder: Path) -> None:
    write_runs(folder, run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap", HOSTILE_TITLE))


def write_runs(folder: Path, *runs: ReportRun) -> None:
    """A report without pictures, which are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", str(folder / "none"))
        write_report([*runs], folder)


@pytest.fixture
def two_runs(once: Once) -> Path:
    return once(write_two_runs)


def test_a_report_opens_from_disk_and_its_pages_lead_to_each_other(visit: Visit, two_runs: Path) -> None:
    visit.open(two_runs / "index.html")
    assert "device: cpu" in visit.text()
    assert visit.count("tbody tr") == 6, "two runs side by side, why each is exposed, what took the time"
    assert has_one_title_and_smaller_headings_of_sections(visit)
    visit.click('a[href="naive-why.html"] >> nth=0')
    assert visit.count("#collectives .bars .point") > 0
    assert has_one_title_and_smaller_headings_of_sections(visit)
    visit.click('nav a[rel="next"]')
    assert visit.is_at("*/overlap-why.html*")
    assert visit.count('nav a[rel="next"]') == 0
    visit.select("#steps", "1")
    assert visit.url.endswith("#step=1")
    assert "step 1" in visit.text(".chart:has(#collectives) .title")
    visit.click("role=link[name='timeline']")
    assert visit.ask("page.step") == 1
    assert has_one_title(visit)
    visit.click("role=link[name='← all runs']")
    assert visit.is_at("*/index.html")
    assert visit.complaints == []
    assert {url.rpartition("/")[0] for url in visit.requests} == {two_runs.as_uri()}


def test_on_paper_a_page_is_as_wide_as_on_the_screen_and_has_no_controls(visit: Visit, two_runs: Path) -> None:
    """Figures and tables were cut at the right edge of the sheet, below 'scroll sideways to see all'."""
    for name, controls, kept in (
        ("index", "nav a >> nth=0", "td >> nth=0"),
        ("naive", "#zoom-in", "#in-view"),
        ("naive-why", ".pages a >> nth=0", "td >> nth=0"),
    ):
        visit.go((two_runs / f"{name}.html").as_uri())
        assert (visit.is_seen(controls), visit.is_seen(kept)) == (True, True)
        visit.put_on_paper()
        assert (visit.is_seen(controls), visit.is_seen(kept)) == (False, True)
        assert 1400 * float(visit.ask("getComputedStyle(document.body).zoom")) == pytest.approx(975), "of 1400 pixels"
        scrolls = ".scroll, .wide, .below"
        assert set(visit.each(scrolls, "(each) => getComputedStyle(each).overflowX")) <= {"visible"}
        assert set(visit.each(scrolls, "(each) => getComputedStyle(each, '::before').display")) <= {"none"}
        visit.leave_paper()


def test_only_what_is_wider_than_a_narrow_page_says_that_one_can_scroll(visit: Visit, two_runs: Path) -> None:
    """'scroll sideways to see all' was above each table, however narrow."""
    visit.resize(768, 1024)
    for name, kinds in (("naive-kernels", {True, False}), ("index", {True, False}), ("naive", {False})):
        visit.go((two_runs / f"{name}.html").as_uri())
        places = ".scroll, .wide, .below"
        overflow = visit.each(places, "(each) => each.scrollWidth > each.clientWidth")
        hint = visit.each(places, "(each) => getComputedStyle(each, '::before').content.includes('scroll')")
        assert hint == overflow
        assert set(hint) == kinds, name


def has_one_title(visit: Visit) -> bool:
    """One, that a tab of the browser can show."""
    return visit.count("h1") == 1 and len(visit.title) < 80


def has_one_title_and_smaller_headings_of_sections(visit: Visit) -> bool:
    title, *sections = (
        float(size.removesuffix("px")) for size in visit.each("h1, h2", "(each) => getComputedStyle(each).fontSize")
    )
    return has_one_title(visit) and title > 18 and set(sections) <= {18.0}


def test_the_page_of_kernels_has_one_title_too(visit: Visit, two_runs: Path) -> None:
    visit.go((two_runs / "naive-kernels.html").as_uri())
    assert has_one_title_and_smaller_headings_of_sections(visit)


def test_labels_below_a_waterfall_do_not_touch_each_other(visit: Visit, tmp_path: Path) -> None:
    """A name of two lines lay on the name beside it, and on a narrow page each name did."""
    runs = [run_of(cpu_run(shift=2 * (at % 2)), f"{at} torch + gradient as bucket view") for at in range(12)]
    waterfall = measure_waterfall([(run.explanation.run, ()) for run in runs])
    write_figure(draw_waterfall(waterfall), title="", page=tmp_path / "figure.html")
    visit.go((tmp_path / "figure.html").as_uri())
    for width in (1280, 768):
        visit.resize(width, 900)
        labels = ".xtick text"
        ends = visit.each(labels, "(each) => each.getBoundingClientRect().right")
        heights = visit.each(labels, "(each) => each.getBBox().height")
        apart = min(after - before for before, after in pairwise(ends)) * sin(pi / 4)
        assert apart > max(heights), width


BY_NIGHT = [pytest.param(steps, marks=pytest.mark.nightly) for steps in (2, 12)]


@pytest.mark.parametrize("steps", [4, *BY_NIGHT])
def test_the_axis_of_steps_names_each_step_once(steps: int, visit: Visit, tmp_path: Path) -> None:
    """Of few steps there were labels at halves, too, which were rounded: 1 2 2 3 3 4."""
    write_runs(tmp_path, run_of(cpu_run(steps=steps), "overlap"))
    visit.open(tmp_path / "index.html")
    labels = visit.texts("#chart-overlap-by-step .xtick text")
    assert 1 < len(labels) == len(set(labels))


def test_a_page_of_one_figure_is_repainted_with_the_readers_look_and_says_its_title_once(
    visit: Visit, tmp_path: Path
) -> None:
    palette = theme.LIGHT
    bars = {
        "type": "bar",
        "x": [1],
        "y": [1],
        "marker": {"color": palette.colors[theme.COMMUNICATION]},
        "error_x": {"array": [1], "color": palette.notice},
    }
    figure = make_chart([bars], title="once", subtitle="below<br>in two lines", height=120, t=100, b=80, l=80, r=80)
    write_figure(figure, title="once", page=tmp_path / "figure.html")
    visit.open(tmp_path / "figure.html")
    assert visit.count("text=once") == 1
    assert visit.seen_text(".title") == "below\nin two lines"
    assert visit.each(".title p", "(line) => getComputedStyle(line).fontSize") == ["13px"]
    for scheme, palette in (("light", theme.LIGHT), ("dark", theme.DARK), ("light", theme.LIGHT)):
        visit.prefer(scheme)
        painted = {
            "path.xerror": ("stroke", palette.notice),
            ".bars path": ("fill", palette.colors[theme.COMMUNICATION]),
        }
        for selector, (kind, color) in painted.items():
            red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
            painted_in = visit.each(selector, "(each, kind) => getComputedStyle(each)[kind]", kind)
            assert painted_in[0] == f"rgb({red}, {green}, {blue})"


def test_of_two_runs_a_laptop_and_a_phone_show_all_without_scrolling(visit: Visit, two_runs: Path) -> None:
    """Of a comparison the last column, the speedup, was cut, and nothing said so; on a phone titles wrap."""
    visit.resize(1280, 800)
    visit.open(two_runs / "index.html")
    assert visit.texts(".sortable thead th")[-1].strip() == "speedup"
    assert visit.each(".wide", "(box) => [box.clientWidth, box.scrollWidth]")[0] == [1232, 1232]
    visit.resize(390, 844)
    boxes = visit.each(
        ".title p, .words",
        "(each) => [each.textContent.trim(), each.getBoundingClientRect().right, each.scrollWidth]",
    )
    assert [text for text, right, width in boxes if right > 390 or width > 390] == []
    titles = [text for text, _, _ in boxes]
    assert f"naive hides 0 %, {HOSTILE_TITLE} 100 % of their communication behind compute" in titles
    assert visit.count(".gtitle") == 0, "the chart does not repeat it"
    assert visit.complaints == []


TRACES = Path(__file__).parents[2] / "traces"


def test_the_first_screen_of_the_one_file_has_what_the_course_asks_for(visit: Visit, tmp_path: Path) -> None:
    """Sentences, table, curve over bucket sizes and both screenshots begin above the fold, without a network."""
    files = [TRACES / f"{name}.sqlite" for name in ("naive", "overlap", "bucketed_1mb", "bucketed_10mb")]
    assert run("report", *files, "--one-file", tmp_path / "mail.html").exit_code == 0
    visit.resize(1400, 900)
    visit.open(tmp_path / "mail.html")
    for selector in ("h1", ".story >> nth=0", ".sortable", "#chart-sizes", ".pair img"):
        assert all(box["top"] < 900 for box in visit.boxes(selector)), selector
    (curve,), shots = visit.boxes("#chart-sizes .main-svg >> nth=0"), visit.boxes(".pair img")
    assert len(shots) == 2
    assert curve["right"] <= shots[0]["left"] < shots[1]["left"] < 1400, "beside each other, and none is cut"
    assert visit.ask("[...document.images].every((image) => image.naturalWidth > 0)")
    assert visit.requests == [(tmp_path / "mail.html").as_uri()]
    assert visit.complaints == []
    visit.resize(390, 844)
    assert visit.ask("document.documentElement.scrollWidth") == 390
