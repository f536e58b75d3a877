"""How plotly.js gets into pages."""

from __future__ import annotations

from plotly.offline import get_plotlyjs

from ddp_prof.present.html.page import _without_loader


def test_it_is_there_without_the_function_for_module_loaders_and_with_its_licence() -> None:
    whole = get_plotlyjs()
    bare = _without_loader(whole)
    assert bare.startswith("/**\n* plotly.js v")
    assert "Licensed under the MIT license" in bare[:200]
    assert "factory" not in bare[:1000]
    assert bare.rstrip().endswith("window.Plotly = Plotly;")
    assert len(whole) - len(bare) < 400


def test_what_looks_otherwise_stays() -> None:
    assert _without_loader("window.Plotly = {};") == "window.Plotly = {};"
