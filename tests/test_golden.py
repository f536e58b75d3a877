"""The numbers of the committed captures stay what they were; see tests/golden."""

from __future__ import annotations

import pytest

from tests.golden import DOCUMENTS, FOLDER, ROOT, document


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert document(DOCUMENTS[name]) == (FOLDER / name).read_text(encoding="utf-8")
