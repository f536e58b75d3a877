"""One script of a page is made of modules: what they import comes first and once, and no name means two things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_prof.present.html import scripts

PRESENT = Path(scripts.__file__).parents[1]
ENTRIES = [
    ("html/assets/draw.js", "html/assets/sideways.js", "timeline/assets/view/start.js"),
    ("html/assets/draw.js", "html/assets/sideways.js", "html/assets/tables.js", "html/assets/why.js"),
    ("html/assets/draw.js", "html/assets/sideways.js", "html/assets/tables.js", "html/assets/kernels.js"),
]
DECLARED = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def declared(source: str) -> list[str]:
    return DECLARED.findall(re.sub(r"^export ", "", source, flags=re.MULTILINE))


@pytest.mark.parametrize("entries", ENTRIES)
def test_no_two_modules_of_a_page_declare_a_name(entries: tuple[str, ...]) -> None:
    names = declared(scripts.page_script(*entries))
    assert len(names) > 5
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("entries", ENTRIES)
def test_nothing_is_left_to_be_imported(entries: tuple[str, ...]) -> None:
    script = scripts.page_script(*entries)
    assert re.findall(r"^(?:import|export)\b.*", script, re.MULTILINE) == []
    assert "//# " not in script


def test_every_script_is_part_of_a_page() -> None:
    written = "".join(scripts.page_script(*entries) for entries in ENTRIES)
    lost = [
        path.name
        for path in PRESENT.rglob("assets/**/*.js")
        if not set(declared(path.read_text(encoding="utf-8"))) <= set(declared(written))
    ]
    assert lost == []


def test_what_is_imported_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "base.js").write_text("export const ONE = 1;\n")
    (tmp_path / "middle.js").write_text('import { ONE } from "./low/base.js";\nexport const TWO = ONE + ONE;\n')
    (tmp_path / "top.js").write_text(
        'import {\n  ONE,\n} from "./low/base.js";\nimport { TWO } from "./middle.js";\nconsole.log(ONE + TWO);\n'
    )
    monkeypatch.setattr(scripts, "files", lambda _package: tmp_path)
    lines = scripts.page_script("top.js").splitlines()
    assert [line for line in lines[2:-1] if line] == [
        "const ONE = 1;", "const TWO = ONE + ONE;", "console.log(ONE + TWO);",
    ]  # fmt: skip
