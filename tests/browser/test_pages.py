from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.gallery import write_gallery
from ddp_prof.present.rows import compare_sheet
from tests.browser.conftest import Visit
from tests.present.runs import HOSTILE_TITLE, cpu_run, entry_of


def test_a_gallery_opens_from_disk(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))  # pictures are tested elsewhere
    entries = [entry_of(cpu_run(shift=4), "naive"), entry_of(cpu_run(), "overlap", HOSTILE_TITLE)]
    write_gallery(entries, tmp_path, compare_sheet([entry.result for entry in entries]))
    visit.open(tmp_path / "index.html")
    assert "device: cpu" in visit.text()
    assert visit.count("tbody tr") == 2
    visit.page.get_by_role("link", name="naive").click()
    visit.wait_for_timeline()
    assert visit.page.url == (tmp_path / "naive.html").as_uri()
    assert visit.complaints == []
    assert {url.rpartition("/")[0] for url in visit.requests} == {tmp_path.as_uri()}
