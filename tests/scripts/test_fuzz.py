"""The fuzzer: every execution is drawn from its seed, what it damages is read by the real readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts/dev"))

import fuzz

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace


@pytest.mark.parametrize("reader", fuzz.WRITERS)
def test_the_first_seeds_find_nothing(reader: str, tmp_path: Path) -> None:
    samples, folder = fuzz.corpus(reader, tmp_path), tmp_path / "damaged"
    folder.mkdir()
    for seed in range(60):
        assert fuzz.execute(reader, seed, samples, folder) is None, f"seed {seed}"


@pytest.mark.parametrize("reader", fuzz.WRITERS)
def test_a_seed_damages_alike_each_time(reader: str, tmp_path: Path) -> None:
    samples = fuzz.corpus(reader, tmp_path)
    damaged = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        fuzz.execute(reader, 7, samples, folder)
        damaged += [path.read_bytes() for path in folder.iterdir()]
    assert len(damaged) == 2
    assert damaged[0] == damaged[1]
    assert damaged[0] not in samples


@pytest.mark.parametrize("reader", fuzz.WRITERS)
def test_the_corpus_is_sound(reader: str, tmp_path: Path) -> None:
    for index, sample in enumerate(fuzz.corpus(reader, tmp_path)):
        path = tmp_path / f"sample{index}{fuzz.SUFFIXES[reader]}"
        path.write_bytes(sample)
        fuzz.check_trace(load_trace(path, ReadOptions(with_launches=True)))


def test_a_reader_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(fuzz, "load_trace", broken)
    found = fuzz.execute("kineto", 1, [b"[[1]]"], tmp_path)
    assert found is not None
    assert found.startswith("KeyError: 'oops'")
