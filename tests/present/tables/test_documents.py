"""A document has a row per step: it takes longer than the table that people read, and is made for JSON alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_prof.present.tables import critical, overlap, skew, summary
from tests.command_line import run
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import write_capture


@pytest.mark.parametrize("command", ["overlap", "critical", "skew", "summary"])
def test_a_table_makes_no_document(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write_capture(tmp_path / "known.sqlite", known_truth(2))
    document = run(command, trace, "--format", "json").stdout
    assert document.startswith("{")
    for module, name in (
        (overlap, "_document"),
        (critical, "document_of"),
        (skew, "document_of"),
        (summary, "_document"),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a document was made"))
    for form in ("table", "csv"):
        assert run(command, trace, "--format", form).exit_code == 0
