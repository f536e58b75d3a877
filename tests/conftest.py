"""Shared fixtures: the traces of this repository, and real captures by others where they are present."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePath
from shutil import which
from typing import Any

import pytest

from ddp_prof.present.charts.static_images import find_browser
from tests.examples import load_profile
from tests.night import is_left_to_the_night

# Started in the background, or by nohup, the tests would hand on signals that no script can trap.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

gc.set_threshold(20_000, 50, 100)  # what is imported is searched for cycles of references less often, too

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it
os.environ["DDP_PROF_CACHE"] = "off"  # the user's own cache is not for tests; those of the cache have theirs

load_profile()

# What says where a git hook's repository is (into which a test that makes one of its own would write), where ranks of a
# launcher meet (for which those of tests would wait), and that no terminal, too, has colours.
_OF_OTHERS = re.compile(
    r"GIT_(?!SSL).*|(GROUP_|LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|PMI|OMPI|TORCHELASTIC)_.*"
    r"|(CLICOLOR_)?FORCE(_COLOR)?|NO_COLOR"
)
for _name in [name for name in os.environ if _OF_OTHERS.fullmatch(name)]:
    del os.environ[_name]
# The checkout may be another user's, as one that is mounted into a container.
os.environ |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# What the tests of a folder or file need, said once; single tests say it by pytest.mark.
MARKERS_OF = {
    "browser": "browser",
    "annotate": "torch",
    "ddp": "torch",
    "train": "torch",
    "scripts": "slow",
    "capture/test_variant.py": "slow",
    "cli/test_mcp.py": "slow",
    "cli/test_names.py": "slow",
    "cli/test_one_file.py": "slow",
    "cli/test_terminal.py": "slow",
    "ingest/test_hostile.py": "slow",
    "ingest/test_hostile_tables.py": "slow",
    "ingest/test_hostile_writers.py": "slow",
    "ingest/test_nsys_raw_report.py": "slow",
    "ingest/test_row_order.py": "slow",
    "ingest/test_transformed.py": "slow",
    "runs/test_kept.py": "slow",
    "test_own_traces.py": "slow",
}
WAITING = {"capture/test_job.py", "train/test_workload.py", "benchmark/test_sweep_command.py"}
IS_WHOLE_GATE = os.environ.get("DDP_PROF_GATE") == "whole"  # scripts/test.sh: nothing may be left out
SHARED_TRACES = ROOT.parent / "shared" / "traces"
STATM = Path("/proc/self/statm")
MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
MUCH_BYTES = 1 << 26
_kept_bytes = [0]


def _is_missing(marker: str) -> bool:
    return (marker == "torch" and find_spec("torch") is None) or (marker == "browser" and find_browser() is None)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch its folders are not even imported: what they test cannot be."""
    marker = MARKERS_OF.get(collection_path.relative_to(TESTS).as_posix())
    return (marker == "torch" and _is_missing(marker) and not IS_WHOLE_GATE) or None


def pytest_report_header() -> list[str]:
    missing = [marker for marker in ("torch", "browser") if _is_missing(marker)]
    return [f"missing, so the tests that need it are left out: {', '.join(missing)}"] if missing else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.option.markexpr
    of_now, of_night, places = [], [], dict[Path, str]()
    for item in items:
        if item.path not in places:  # a file has up to 900 tests
            places[item.path] = item.path.relative_to(TESTS).as_posix()
        path = PurePath(places[item.path])
        for place in (path, *path.parents):
            if marker := MARKERS_OF.get(place.as_posix()):
                item.add_marker(marker)
        is_left = is_left_to_the_night((one.name for one in item.iter_markers()), asked)
        (of_night if is_left else of_now).append(item)
    config.hook.pytest_deselected(items=of_night)
    # Files of many seconds come first, those that wait longest for their programs before all: others compute meanwhile,
    # and no process ends long after the others.
    long = {"slow", "browser", "torch"}
    items[:] = sorted(of_now, key=lambda item: (places[item.path] not in WAITING, long.isdisjoint(item.keywords)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process visits all pages: another one would start a Chromium, too, which compiles plotly.js for seconds."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneBrowser(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/browser" if nodeid.startswith("tests/browser/") else str(super()._split_scope(nodeid))

    return OneBrowser(config, log)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no search for cycles of references need pass through it."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """What is left ends with its process: pytest would search all of it twice, and Python once more."""
    gc.collect(1)  # a cycle of the last tests that complains when it goes does so yet
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of two nsys that start at once one may fail, so one test at a time records."""
    if not item.get_closest_marker("nsys"):
        return (yield)
    held = os.open(TESTS, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        return (yield)
    finally:
        os.close(held)


def pytest_runtest_logfinish() -> None:
    """What a hostile input took goes back to the system: a process kept 1.8 GB, in cycles and in what glibc freed."""
    if _resident_bytes() > _kept_bytes[-1] + MUCH_BYTES:
        gc.collect()
        if MALLOC_TRIM:
            MALLOC_TRIM(0)
        _kept_bytes.append(_resident_bytes())


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test is left out where its program is missing, but in the whole gate; a test of nsys never is."""
    missing = [marker.name for marker in item.iter_markers() if _is_missing(marker.name)]
    if missing:
        (pytest.fail if IS_WHOLE_GATE else pytest.skip)(f"needs {', '.join(missing)}")


@pytest.fixture
def clone() -> Path:
    """This checkout, where git knows it; one that was downloaded as an archive is no clone."""
    if not (ROOT / ".git").exists() or which("git") is None:
        pytest.skip("not a clone, or no git")
    return ROOT


@pytest.fixture
def no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no picture can be drawn."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """A folder of real captures by others, with the figures an independent program measured on them."""
    if not SHARED_TRACES.is_dir():
        pytest.skip("the captures by others are not part of the repository")
    return SHARED_TRACES


@pytest.fixture(scope="session")
def own_traces() -> list[Path]:
    """The real captures that come with the repository; those of one's own runs go to traces/local."""
    found = sorted((ROOT / "traces").glob("*.sqlite"))
    assert found, "traces/ holds no capture"
    return found
