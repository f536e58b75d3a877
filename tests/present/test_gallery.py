from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_prof.manifest import Manifest
from ddp_prof.present.gallery import GalleryEntry, write_gallery
from ddp_prof.present.pictures import find_browser
from ddp_prof.present.rows import compare_sheet
from tests.present.runs import HOSTILE_TITLE, cpu_run, entry_of


def write(entries: list[GalleryEntry], folder: Path) -> list[str]:
    return write_gallery(entries, folder, compare_sheet([entry.result for entry in entries]))


@pytest.fixture
def no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))


def manifest(**changes: object) -> Manifest:
    values = {
        "variant": "overlap", "bucket_size_mb": None, "world_size": 2, "backend": "gloo", "device": "cpu",
        "model_size": "mini", "batch_size": 4, "seq_len": 128, "steps": 10, "warmup": 5, "seed": 0,
        "step_seconds": (), "communication_seconds": (), "final_loss": 1.0, "profiler": "nsys 2023.4", "key": None,
        "versions": {"torch": "2.9"}, "machine": {"cpus": 2}, "git_commit": "abc123", "created": "2026-01-01",
        "command": ("python", "-m", "ddp_prof.train", "<b>"), "parameters": (),
    }  # fmt: skip
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_a_page_and_a_picture_of_each_run(tmp_path: Path) -> None:
    assert write([entry_of(cpu_run(shift=4), "naive"), entry_of(cpu_run(), "overlap")], tmp_path) == []
    expected = {"index.html", "plotly.min.js"} | {
        f"{name}.{suffix}" for name in ("naive", "overlap", "comparison") for suffix in ("html", "png")
    }
    assert {path.name for path in tmp_path.iterdir()} == expected


@pytest.mark.usefixtures("no_browser")
class TestPages:
    def test_without_chromium_the_pages_are_written_all_the_same(self, tmp_path: Path) -> None:
        problems = write([entry_of(cpu_run())], tmp_path)
        assert len(problems) == 1
        assert "apt-get install chromium" in problems[0]
        assert {path.name for path in tmp_path.iterdir()} == {
            "index.html", "comparison.html", "overlap.html", "plotly.min.js",
        }  # fmt: skip
        assert "<img" not in (tmp_path / "index.html").read_text(encoding="utf-8")

    def test_all_that_a_page_loads_lies_beside_it(self, tmp_path: Path) -> None:
        write([entry_of(cpu_run(), "a/../b c"), entry_of(cpu_run(), "index")], tmp_path)
        for page in tmp_path.glob("*.html"):
            text = page.read_text(encoding="utf-8")
            for target in re.findall(r'(?:src|href)="([^"]*)"', text):
                assert target == "data:," or (tmp_path / target).is_file(), target
            assert len(text) < 200_000  # plotly.js lies beside the pages, once
        assert {path.stem for path in tmp_path.glob("*.html")} == {"index", "index-2", "comparison", "a-..-b-c"}

    def test_the_index_tells_device_figures_and_provenance(self, tmp_path: Path) -> None:
        entry = entry_of(cpu_run(), "overlap")
        trace = entry.sources[0].trace
        from dataclasses import replace

        sources = (entry.sources[0]._replace(trace=replace(trace, manifest=manifest())),)
        other = entry_of(cpu_run(shift=4), "naive")
        write([replace(entry, sources=sources), other], tmp_path)
        text = (tmp_path / "index.html").read_text(encoding="utf-8")
        assert '<span class="notice">device: cpu</span>' in text
        assert "100 % overlapped" in text
        assert "0 % overlapped" in text
        for part in ("abc123", "torch 2.9", "cpus 2", "python -m ddp_prof.train &lt;b&gt;", "nsys 2023.4"):
            assert part in text
        assert "how the run was made is not known" in text

    def test_labels_and_notes_are_text(self, tmp_path: Path) -> None:
        write([entry_of(cpu_run(), HOSTILE_TITLE)], tmp_path)
        for page in tmp_path.glob("*.html"):
            assert "<img src=x" not in page.read_text(encoding="utf-8"), page.name
        assert "&lt;img src=x onerror=alert(1)&gt;" in (tmp_path / "index.html").read_text(encoding="utf-8")
