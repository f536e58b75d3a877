"""scripts/dev/nsys_screenshot.sh and nsys_ui.sh: what they say, how they work the GUI, and that nothing stays.

The GUI, its display and what looks at it are stand-ins: a folder of theirs holds what the screen would show.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scripts.conftest import ROOT
from tests.waiting import wait_until

if TYPE_CHECKING:
    from conftest import Checkout

SCRIPT, FINDER = "scripts/dev/nsys_screenshot.sh", "scripts/dev/nsys_ui.sh"
BASICS = (
    *(
        "awk",
        "basename",
        "bash",
        "cat",
        "chmod",
        "cp",
        "cut",
        "dirname",
        "env",
        "find",
        "flock",
        "grep",
        "head",
        "ldd",
        "mkdir",
    ),
    *("mktemp", "od", "readlink", "rm", "sed", "seq", "setsid", "sort", "tail", "touch", "tr", "wc"),
)
MARK = """
case "$1" in
  *mark_unhidden.py) echo "mark $3" >>"$CALLS"; [ -z "${UNMARKED:-}" ] || exit 1; echo marked >>"$2"; exit ;;
esac
"""
FOR_EVER = "while :; do sleep; done"
DISPLAY = f"""trap 'echo display ended >>"$CALLS"; exit' TERM; echo 42; {FOR_EVER}"""
GUI = f"""
trap 'echo gui ended >>"$CALLS"; exit' TERM
echo "gui $DISPLAY $HOME ${{!#}}" >>"$CALLS"
cp "$HOME/.config/NVIDIA Corporation/NVIDIA Nsight Systems.ini" "$SCREEN/settings"
echo started >"$SCREEN/state"
{FOR_EVER}
"""
# A window, over it a menu once the right button was pressed, and a view that is zoomed by the keys for its third entry.
XDOTOOL = """
echo "xdotool $*" >>"$CALLS"
case "$*" in
  search*) printf '1\\n7\\n'; ! grep -q menu "$SCREEN/state" || echo 9 ;;
  "getwindowname 7") echo "NVIDIA Nsight Systems 2022.4.2" ;;
  getwindowname*) echo ;;
  *"click 3"*) echo menu >"$SCREEN/state" ;;
  *"Down Down Down Return") [ "$(grep -c "click 3" "$CALLS")" -lt "${WORKS_AT:-1}" ] || echo zoomed >"$SCREEN/state" ;;
  *"click 1"*) echo clicked >"$SCREEN/state" ;;
esac
"""
IMPORT = 'for target; do :; done; [ "${target##*.}" != png ] || echo picture >"$target"'
CONVERT = """
case "$*" in
  *"%@"*) case "$(cat "$SCREEN/state")" in
      zoomed | clicked) echo "1345x349+222+91" ;;
      *) echo "${RANGES-692x370+687+91}" ;;
    esac ;;
  *unique-colors*) grep -q clicked "$SCREEN/state" || echo "#AFFFFF" ;;
  *) for _ in $(seq 61); do printf '\\377'; done ;;
esac
"""


@pytest.fixture
def machine(checkout: Checkout, tmp_path: Path) -> Checkout:
    """A machine with nothing but the basics, on which nobody may install anything."""
    basics = tmp_path / "basics"
    basics.mkdir()
    for name in BASICS:
        target = shutil.which(name)
        assert target, name
        (basics / name).symlink_to(target)
    checkout.path = str(basics)
    checkout.program("id", "echo ${USER_ID:-1000}")
    checkout.program("sleep", f"exec {shutil.which('sleep')} 0.05")
    (tmp_path / "screen").mkdir()
    (tmp_path / "temporary").mkdir()
    checkout.environment |= {
        "SCREEN": str(tmp_path / "screen"),
        "TMPDIR": str(tmp_path / "temporary"),
        "TIMEOUT": "3",
        "NSYS_UI": str(checkout.program("nsys-ui", GUI, tmp_path / "nsight")),
    }
    ours = f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} "$@"'
    checkout.program("python", ours, checkout.root / ".venv/bin")
    return checkout


@pytest.fixture
def equipped(machine: Checkout) -> Checkout:
    """As ``machine``, with all that it takes."""
    for name, body in (
        ("Xvfb", DISPLAY),
        ("xdotool", XDOTOOL),
        ("import", IMPORT),
        ("convert", CONVERT),
        ("fc-list", "echo Sans"),
    ):
        machine.program(name, body)
    driver = machine.root / "usr/lib/x86_64-linux-gnu/dri/swrast_dri.so"
    driver.parent.mkdir(parents=True)
    driver.touch()
    machine.environment["USR"] = str(machine.root / "usr")
    ours = (machine.root / ".venv/bin/python").read_text()
    machine.program("python", MARK + ours, machine.root / ".venv/bin")
    return machine


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "naive run.nsys-rep"
    path.write_bytes(b"NVIDIA Tegra Profiler Report 1\x00\xff")
    return path


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a run that failed."""
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ([], "which report?"),
            (["a.nsys-rep"], "where should the picture go?"),
            (["a.nsys-rep", "-o"], "-o needs the picture's name"),
            (["a.nsys-rep", "b.nsys-rep", "-o", "x.png"], "one report at a time: a.nsys-rep, b.nsys-rep"),
            (["--zoom", "a.nsys-rep"], "no such option: --zoom"),
        ],
    )
    def test_wrong_usage_is_exit_code_2(self, machine: Checkout, arguments: list[str], reason: str) -> None:
        done = machine.run(SCRIPT, *arguments)
        assert done.returncode == 2
        assert reason in done.stderr
        assert "usage: scripts/dev/nsys_screenshot.sh" in done.stderr

    @pytest.mark.parametrize("name", ["WIDTH", "HEIGHT", "TIMEOUT"])
    def test_what_is_no_number_is_refused_before_bash_calculates(self, machine: Checkout, name: str) -> None:
        """Of ``x[$(command)]`` it runs the command."""
        for value in ("root[$(touch canary)]", "2x", "-1", "08", " 2", "2\n3", "٣", "9" * 30):
            done = machine.run(SCRIPT, "a.nsys-rep", "-o", "x.png", **{name: value})
            assert (done.returncode, done.stdout) == (2, "")
            assert "not a whole number" in done.stderr
        assert not list(machine.root.parent.rglob("canary")), "a command in the setting has run"

    def test_help_is_its_head(self, machine: Checkout) -> None:
        done = machine.run(SCRIPT, "--help")
        assert done.returncode == 0
        assert "scripts/dev/nsys_screenshot.sh REPORT.nsys-rep -o out.png" in done.stdout
        assert "set -euo" not in done.stdout

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "no such report"), (b"", "an empty one"), (b"SQLite format 3\0", "not a report of")],
    )
    def test_what_is_no_report_is_refused(
        self, machine: Checkout, tmp_path: Path, content: bytes | None, reason: str
    ) -> None:
        path = tmp_path / "x.sqlite"
        if content is not None:
            path.write_bytes(content)
        line = complaint(machine.run(SCRIPT, str(path), "-o", "x.png"))
        assert reason in line
        assert str(path) in line


class TestWhatIsMissing:
    def test_tools_are_named_to_whom_cannot_install_them(self, machine: Checkout, report: Path) -> None:
        line = complaint(machine.run(SCRIPT, str(report), "-o", "x.png"))
        assert line.endswith("apt-get install xvfb xdotool imagemagick fontconfig (as root)")

    def test_fonts_too(self, equipped: Checkout) -> None:
        equipped.program("fc-list", "true")
        assert "apt-get install fonts-dejavu-core (as root)" in complaint(equipped.run(FINDER))

    def test_root_gets_them_installed(self, equipped: Checkout) -> None:
        (equipped.programs / "xdotool").rename(equipped.root / "xdotool")
        equipped.program("apt-get", f'echo "apt-get $*" >>"$CALLS"; cp "{equipped.root}/xdotool" "{equipped.programs}"')
        done = equipped.run(FINDER, USER_ID="0")
        assert (done.returncode, done.stdout.strip()) == (0, equipped.environment["NSYS_UI"])
        assert equipped.calls == ["apt-get install -y -q --no-install-recommends xdotool"]

    def test_an_installation_that_fails_says_why(self, machine: Checkout) -> None:
        machine.program("apt-get", 'echo "E: Unable to locate package"; exit 100')
        done = machine.run(FINDER, USER_ID="0")
        assert done.returncode == 1
        assert "cannot be installed (E: Unable to locate package): install them by hand" in done.stderr

    def test_libraries_are_named_by_package(self, equipped: Checkout, tmp_path: Path) -> None:
        (tmp_path / "nsight" / "nsys-ui.bin").touch()
        lacking = ("libxcb-icccm.so.4", "libX11.so.6", "libsmime3.so", "libxkbcommon-x11.so.0")
        (Path(equipped.path) / "ldd").unlink()
        equipped.program("ldd", f"printf '%s => not found\\n' {' '.join(lacking)}; echo 'libc.so.6 => /lib/libc.so.6'")
        line = complaint(equipped.run(FINDER))
        for package in ("libxcb-icccm4", "libx11-6", "libnss3", "libxkbcommon-x11-0"):
            assert f" {package} " in line
        assert "libc" not in line.replace("libxcb", "")

    def test_a_gui_that_does_not_run(self, equipped: Checkout) -> None:
        assert "NSYS_UI=/nowhere does not run" in complaint(equipped.run(FINDER, NSYS_UI="/nowhere"))

    def test_an_nsys_without_a_gui(self, equipped: Checkout, tmp_path: Path) -> None:
        nsys = equipped.program(
            "nsys", "echo NVIDIA Nsight Systems version 2024.1", tmp_path / "cli" / "target-linux-x64"
        )
        line = complaint(equipped.run(FINDER, NSYS_UI="", NSYS=str(nsys)))
        assert "the command line alone" in line

    def test_the_driver_that_draws_without_a_gpu(self, equipped: Checkout, tmp_path: Path) -> None:
        """Which Chromium brings, so that tests passed on machines that have one only."""
        line = complaint(equipped.run(FINDER, USR=str(tmp_path / "bare")))
        assert line.endswith("the GUI lacks swrast_dri.so: apt-get install libgl1-mesa-dri (as root)")

    def test_the_gui_beside_the_nsys_that_is_there(self, equipped: Checkout, tmp_path: Path) -> None:
        nsys = equipped.program(
            "nsys", "echo NVIDIA Nsight Systems version 2024.1", tmp_path / "cli" / "target-linux-x64"
        )
        gui = equipped.program("nsys-ui", "", tmp_path / "cli" / "host-linux-x64")
        assert equipped.run(FINDER, NSYS_UI="", NSYS=str(nsys)).stdout.strip() == str(gui)


class TestPicture:
    def test_a_step_is_zoomed_to_and_what_was_started_ends(
        self, equipped: Checkout, report: Path, tmp_path: Path
    ) -> None:
        picture = tmp_path / "new folder" / "naive.png"
        done = equipped.run(SCRIPT, str(report), "-o", str(picture))
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(picture), "")
        assert picture.read_text() == "picture\nmarked\n"
        assert f"mark {report}" in equipped.calls
        # The middle of the ranges, in the row below the topmost: its top is 105 + 91, a row is 21 high.
        (click,) = [call for call in equipped.calls if "click 3" in call]
        assert click.startswith(f"xdotool mousemove {687 + 692 // 2} {105 + 91 + 21 + 10} ")
        assert "gui ended" in equipped.calls
        assert "display ended" in equipped.calls
        assert list((tmp_path / "temporary").iterdir()) == []

    def test_the_export_beside_the_report_says_what_is_marked(
        self, equipped: Checkout, report: Path, tmp_path: Path
    ) -> None:
        report.with_suffix(".sqlite").touch()
        assert equipped.run(SCRIPT, str(report), "-o", str(tmp_path / "x.png")).returncode == 0
        assert f"mark {report.with_suffix('.sqlite')}" in equipped.calls

    def test_a_picture_in_which_nothing_can_be_marked_is_kept(
        self, equipped: Checkout, report: Path, tmp_path: Path
    ) -> None:
        done = equipped.run(SCRIPT, str(report), "-o", str(tmp_path / "x.png"), UNMARKED="1")
        assert (done.returncode, (tmp_path / "x.png").read_text()) == (0, "picture\n")
        assert "nothing is marked in" in done.stderr

    def test_the_users_settings_and_report_are_not_touched(
        self, equipped: Checkout, report: Path, tmp_path: Path
    ) -> None:
        assert equipped.run(SCRIPT, str(report), "-o", str(tmp_path / "x.png")).returncode == 0
        (call,) = [call for call in equipped.calls if call.startswith("gui :")]
        display, home, opened = call.split(f" {tmp_path / 'temporary'}")  # a path may have blanks
        assert display == "gui :42"
        assert home.startswith("/")
        assert opened.endswith("/naive run.nsys-rep")
        assert "AllowAnalytics=false" in (tmp_path / "screen" / "settings").read_text()
        assert list((tmp_path / "home").iterdir()) == []

    @pytest.mark.nightly
    def test_a_gui_that_was_too_slow_gets_another_chance(
        self, equipped: Checkout, report: Path, tmp_path: Path
    ) -> None:
        done = equipped.run(SCRIPT, str(report), "-o", str(tmp_path / "x.png"), WORKS_AT="2")
        assert done.returncode == 0
        assert "attempt 1 of 3" in done.stderr
        assert equipped.calls.count("gui ended") == 2

    def test_a_report_without_ranges(self, equipped: Checkout, report: Path, tmp_path: Path) -> None:
        line = complaint(equipped.run(SCRIPT, str(report), "-o", str(tmp_path / "x.png"), RANGES="", TIMEOUT="1"))
        assert "shows no ranges" in line
        assert not (tmp_path / "x.png").exists()

    def test_a_gui_that_ends_by_itself(self, equipped: Checkout, report: Path, tmp_path: Path) -> None:
        equipped.program("nsys-ui", "echo cannot connect; exit 1", tmp_path / "nsight")
        equipped.program("xdotool", "true")
        line = complaint(equipped.run(SCRIPT, str(report), "-o", "x.png"))
        assert "the GUI ended by itself: cannot connect" in line

    def test_interrupted_it_leaves_nothing_behind(self, equipped: Checkout, report: Path, tmp_path: Path) -> None:
        command = [shutil.which("bash") or "/bin/bash", str(equipped.root / SCRIPT), str(report), "-o", "x.png"]
        environment = equipped.full_environment(RANGES="", TIMEOUT="600")
        with subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True) as process:
            wait_until(lambda: any(call.startswith("gui :") for call in equipped.calls))
            # bash drops a Ctrl-C at which the program that it waits for ends by itself: one presses it again.
            wait_until(lambda: process.poll() is not None or os.killpg(process.pid, signal.SIGINT))
        assert process.returncode == 130
        assert {"gui ended", "display ended"} <= set(equipped.calls)
        assert list((tmp_path / "temporary").iterdir()) == []
