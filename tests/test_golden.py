"""The numbers of the committed captures stay what they were; see tests/golden."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.command_line import each_read_once
from tests.golden import DOCUMENTS, FOLDER, ROOT, document, rounded


@pytest.fixture(scope="module", autouse=True)
def _of_one_reading() -> Iterator[None]:
    with each_read_once():
        yield


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert rounded(document(DOCUMENTS[name])) == rounded((FOLDER / name).read_text(encoding="utf-8"))
