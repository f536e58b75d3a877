from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.analyze.work import rank_work
from ddp_prof.present import style
from ddp_prof.present.page import write_figure_page
from ddp_prof.present.report import write_report
from ddp_prof.present.timeline import draw_timeline
from ddp_prof.present.timeline_build import build_timeline
from ddp_prof.present.timeline_model import Source, Timeline
from tests.browser.conftest import Visit
from tests.drawing import draw_trace
from tests.present.runs import HOSTILE_TITLE, cpu_run, run_of

HOSTILE_KERNELS = {
    "<script>document.title='owned'</script>": "as it is",
    "<b>bold</b> \"quoted\" 'too' & more": "as it is",
    "x" * 10_000: "shortened",
    "\N{FIRE} \N{HEBREW LETTER ALEF}\u202ecod.exe": "without control characters",
}


def gpu_run() -> Source:
    """A kernel for each hostile name, and a collective."""
    trace = draw_trace(
        ranges={"step|index=0": "#" * 20},
        launches={"main": "abcd", "pt_autograd_0": "....A"},
        streams={7: "..aaaabbbbccccdddd..", 9: "........AAAAAAAAAA.."},
    )
    kernels = iter(HOSTILE_KERNELS)
    names = tuple(next(kernels) if name.startswith("compute ") else name for name in trace.names)
    trace = replace(trace, names=names)
    return Source(HOSTILE_TITLE, trace, rank_work(trace))


def write(model: Timeline, path: Path) -> Path:
    write_figure_page(draw_timeline(model), path, title="a <title>")
    return path


def test_a_timeline_draws_each_box_and_needs_nothing_but_its_file(visit: Visit, tmp_path: Path) -> None:
    model = build_timeline([*run_of(cpu_run(3)).sources, gpu_run()])
    page = write(model, tmp_path / "timeline.html")
    visit.open(page)
    assert visit.count(".point path") == model.boxes
    assert visit.page.title() == "a <title>"
    assert visit.complaints == []
    assert visit.requests == [page.as_uri()]


def test_names_appear_as_text_and_no_script_of_theirs_runs(visit: Visit, tmp_path: Path) -> None:
    visit.open(write(build_timeline([gpu_run()]), tmp_path / "timeline.html"))
    # Shown as it is, where plotly.js knows no <img>, and where it knows <b>.
    assert '<img src=x onerror=alert(1)> & "run" \N{FIRE}' in visit.text()
    bars = visit.page.locator(".point path")
    hovers = []
    for at in range(bars.count()):
        bars.nth(at).hover(force=True)
        visit.page.wait_for_timeout(120)
        hovers.append(visit.page.evaluate("document.querySelector('.hoverlayer').textContent"))
    told = "\n".join(hovers)
    assert "<script>document.title='owned'</script>" in told
    assert "<b>bold</b> \"quoted\" 'too' & more" in told
    assert "x" * 100 in told
    assert "x" * 200 not in told
    assert "\N{FIRE} \N{HEBREW LETTER ALEF} cod.exe" in told
    assert visit.page.title() == "a <title>"
    assert visit.count("img") == 0
    assert visit.complaints == []


def test_no_script_but_ours_could_run(visit: Visit, tmp_path: Path) -> None:
    visit.open(write(build_timeline([gpu_run()]), tmp_path / "timeline.html"))
    visit.page.evaluate(
        "const script = document.createElement('script'); script.textContent = 'document.title = \"owned\"';"
        "document.body.append(script)"
    )
    assert visit.page.title() == "a <title>"
    assert any("Content Security Policy" in complaint for complaint in visit.complaints)


@pytest.mark.parametrize("visit", ["light", "dark"], indirect=True)
def test_the_look_follows_the_system(visit: Visit, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    look = style.DARK if "dark" in request.node.name else style.LIGHT
    visit.open(write(build_timeline(run_of(cpu_run()).sources), tmp_path / "timeline.html"))
    layout = visit.page.evaluate("({...document.getElementById('figure').layout})")
    assert layout["paper_bgcolor"] == look.paper
    fills = visit.page.evaluate("[...document.querySelectorAll('.point path')].map((each) => each.style.fill)")
    drawn = {tuple(int(part) for part in fill[4:-1].split(",")) for fill in fills}
    assert drawn <= {tuple(bytes.fromhex(color[1:])) for color in look.colors.values()}


def test_the_step_menu_zooms_to_a_step(visit: Visit, tmp_path: Path) -> None:
    visit.open(write(build_timeline(run_of(cpu_run(3)).sources), tmp_path / "timeline.html"))
    visit.page.locator(".updatemenu-header").click()
    visit.page.locator(".updatemenu-dropdown-button", has_text="step 1").click()
    visit.page.wait_for_timeout(200)
    start, end = visit.page.evaluate("document.getElementById('figure').layout.xaxis.range")
    assert (start * 1e6, end * 1e6) == pytest.approx((20, 40), abs=1)
    assert visit.complaints == []


def test_a_report_opens_from_disk(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))  # pictures are tested elsewhere
    runs = [run_of(cpu_run(shift=4), "naive"), run_of(cpu_run(), "overlap", HOSTILE_TITLE)]
    write_report(runs, tmp_path)
    visit.open(tmp_path / "index.html")
    assert "device: cpu" in visit.text()
    assert visit.count("tbody tr") == 2
    visit.page.get_by_role("link", name="naive").click()
    visit.page.wait_for_selector(".figure .point path", state="attached")
    assert visit.page.url == (tmp_path / "naive.html").as_uri()
    assert visit.complaints == []
    assert {url.rpartition("/")[0] for url in visit.requests} == {tmp_path.as_uri()}
