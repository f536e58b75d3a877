from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present import theme
from ddp_prof.present.charts import make_chart
from ddp_prof.present.html.page import write_figure
from ddp_prof.present.html.report import write_report
from tests.browser.conftest import Visit
from tests.present.runs import HOSTILE_TITLE, cpu_run, run_of


def test_a_report_opens_from_disk(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))  # pictures are tested elsewhere
    runs = [run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap", HOSTILE_TITLE)]
    write_report(runs, tmp_path)
    visit.open(tmp_path / "index.html")
    assert "device: cpu" in visit.text()
    assert visit.count("tbody tr") == 6, "two runs side by side, why each is exposed, what took the time"
    visit.page.locator('a[href="naive-why.html"]').first.click()
    visit.page.locator("#collectives .bars .point").first.wait_for()
    visit.page.go_back()
    visit.page.locator('a[href="naive.html"]').first.click()
    visit.wait_for_timeline()
    assert visit.page.url == (tmp_path / "naive.html").as_uri()
    assert visit.complaints == []
    assert {url.rpartition("/")[0] for url in visit.requests} == {tmp_path.as_uri()}


def test_pages_lead_to_each_other(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap")], tmp_path)
    visit.open(tmp_path / "naive-why.html")
    visit.page.locator('nav a[rel="next"]').click()
    visit.page.wait_for_url("**/overlap-why.html*")
    assert visit.page.locator('nav a[rel="next"]').count() == 0
    visit.page.select_option("#steps", "1")
    assert visit.page.url.endswith("#step=1")
    visit.page.locator(".chart:has(#collectives) .title").get_by_text("step 1").wait_for()
    visit.page.get_by_role("link", name="timeline").click()
    visit.wait_for_timeline()
    assert visit.ask("page.step") == 1
    visit.page.get_by_role("link", name="← all runs").click()
    visit.page.wait_for_url("**/index.html")
    for name in ("index", "naive", "overlap-why"):
        visit.page.goto((tmp_path / f"{name}.html").as_uri())
        assert visit.count("h1") == 1
        assert len(visit.page.title()) < 80
    assert visit.complaints == []


def test_on_a_laptop_the_comparison_needs_no_scrolling(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last column, the speedup, was cut, and nothing said so."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap")], tmp_path)
    visit.page.set_viewport_size({"width": 1280, "height": 800})
    visit.open(tmp_path / "index.html")
    assert visit.page.locator(".sortable thead th").last.text_content().strip() == "speedup"
    assert visit.page.locator(".wide").first.evaluate("(box) => [box.clientWidth, box.scrollWidth]") == [1232, 1232]


def test_sections_have_smaller_headings_than_the_page(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    write_report([run_of(cpu_run(), "overlap")], tmp_path)
    for name in ("index", "overlap-why", "overlap-kernels"):
        visit.page.goto((tmp_path / f"{name}.html").as_uri())
        sizes = visit.page.locator("h1, h2").evaluate_all("(all) => all.map((each) => getComputedStyle(each).fontSize)")
        assert [float(size.removesuffix("px")) for size in sizes[1:]] == [18.0] * (len(sizes) - 1)
        assert float(sizes[0].removesuffix("px")) > 18


@pytest.mark.parametrize("steps", [2, 4, 12])
def test_the_axis_of_steps_names_each_step_once(
    steps: int, visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few steps there were labels at halves, too, which were rounded: 1 2 2 3 3 4."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    write_report([run_of(cpu_run(steps=steps), "overlap")], tmp_path)
    visit.open(tmp_path / "index.html")
    labels = visit.page.locator("#chart-overlap-by-step .xtick text").all_text_contents()
    assert 1 < len(labels) == len(set(labels))


def test_a_figure_is_repainted_with_the_readers_look(visit: Visit, tmp_path: Path) -> None:
    palette = theme.LIGHT
    bars = {
        "type": "bar",
        "x": [1],
        "y": [1],
        "marker": {"color": palette.colors[theme.COMMUNICATION]},
        "error_x": {"array": [1], "color": palette.notice},
    }
    figure = make_chart([bars], title="figure", subtitle="below", height=120, t=100, b=80, l=80, r=80)
    write_figure(figure, title="figure", page=tmp_path / "figure.html")
    visit.open(tmp_path / "figure.html")
    for scheme, palette in (("light", theme.LIGHT), ("dark", theme.DARK), ("light", theme.LIGHT)):
        visit.page.emulate_media(color_scheme=scheme)
        painted = {
            "path.xerror": ("stroke", palette.notice),
            ".bars path": ("fill", palette.colors[theme.COMMUNICATION]),
        }
        for selector, (kind, color) in painted.items():
            red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
            visit.page.wait_for_function(
                "([selector, kind, color]) => getComputedStyle(document.querySelector(selector))[kind] === color",
                arg=[selector, kind, f"rgb({red}, {green}, {blue})"],
                timeout=5000,
            )


def test_on_a_phone_titles_wrap_and_findings_need_no_scrolling(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    write_report([run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap", HOSTILE_TITLE)], tmp_path)
    visit.page.set_viewport_size({"width": 390, "height": 844})
    visit.open(tmp_path / "index.html")
    boxes = visit.page.locator(".title p, .words").evaluate_all(
        """(found) => found.map((each) =>
            [each.textContent.trim(), each.getBoundingClientRect().right, each.scrollWidth])"""
    )
    assert [text for text, right, width in boxes if right > 390 or width > 390] == []
    titles = [text for text, _, _ in boxes]
    assert f"naive hides 0 %, {HOSTILE_TITLE} 100 % of their communication behind compute" in titles
    assert visit.count(".gtitle") == 0, "the chart does not repeat it"
    assert visit.complaints == []


def test_a_page_of_one_figure_says_its_title_once(visit: Visit, tmp_path: Path) -> None:
    bars = [{"type": "bar", "x": [1], "y": [1]}]
    figure = make_chart(bars, title="once", subtitle="below<br>in two lines", height=120, t=100, b=80, l=80, r=80)
    write_figure(figure, title="once", page=tmp_path / "figure.html")
    visit.open(tmp_path / "figure.html")
    assert visit.page.get_by_text("once").count() == 1
    assert visit.page.locator(".title").inner_text() == "below\nin two lines"
    assert visit.page.locator(".title p").evaluate("(line) => getComputedStyle(line).fontSize") == "13px"
