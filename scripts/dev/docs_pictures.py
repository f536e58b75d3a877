"""Called by mkdocs: pages of docs/ show pictures of figures/, which lies beside docs/, outside of what mkdocs reads.

A link docs/figures to that folder would show them here, but not on GitHub, which does not follow it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PICTURES = Path(__file__).parents[2] / "figures"


def on_files(files: Files, config: Any) -> None:
    """Add the pictures to the pages' files, as if the folder was in docs/."""
    for picture in PICTURES.glob("*.png"):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page that links to the pictures there."""
    return markdown.replace("](../figures/", "](figures/")
