"""Kills parts of real runs, and prints a table with a row for each victim and signal.

    .venv/bin/python scripts/dev/kill_matrix.py [--scenes capture sweep report]
        [--victims rank launcher nsys command disk]

There are three scenes: ``profile_all.sh`` in its second capture, a sweep in its second run, a report when its first
page exists. The victim is one rank, the launcher of the ranks, nsys, or the command itself. It gets SIGINT, SIGTERM or
SIGKILL; for the command, SIGINT is sent to its process group, as by Ctrl-C. The victim ``disk`` fills the disk with the
results, a small one that is mounted for this (needs root). Then the command is started again, with room on the disk.

A row is good if the command ends with a line that says what happened, no process of it is left, finished results are
unchanged, and the next run completes the rest. Exit: 0 if all rows are good, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DISK = "disk"
VICTIMS = ("rank", "launcher", "nsys", "command", DISK)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SIGNALS_OF: dict[str, tuple[signal.Signals | None, ...]] = {DISK: (None,)}
DISK_BYTES = 60_000_000
FILLER = ".filler"
WAIT_S = 180.0
"""Time limit for a state to be reached, and for a command to end."""
SETTLE_S = 5.0
"""Time limit for processes to end after their command."""


def ask(process: psutil.Process, question: str, otherwise: Any) -> Any:
    """Call a method of a process, which may have ended."""
    try:
        return getattr(process, question)()
    except psutil.Error:
        return otherwise


def ranks_in(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are ranks: those with RANK in their environment, or forked from a server."""

    def is_server(process: psutil.Process | None) -> bool:
        return process is not None and "forkserver" in " ".join(ask(process, "cmdline", []))

    return [
        process
        for process in processes
        if "RANK" in ask(process, "environ", {}) or (is_server(process) and is_server(ask(process, "parent", None)))
    ]


def is_connected(rank: psutil.Process) -> bool:
    """Whether the rank has torch and gloo's threads."""
    try:
        maps = Path(f"/proc/{rank.pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "libtorch_cpu" in maps and ask(rank, "num_threads", 0) > 2


def nsys_in(processes: Sequence[psutil.Process]) -> psutil.Process:
    """Return the first ``nsys profile``."""
    lines = ((process, ask(process, "cmdline", [])) for process in processes)
    return next(process for process, line in lines if line and Path(line[0]).name == "nsys" and "profile" in line)


class Scene(ABC):
    """A command that is killed; ``victims`` are functions that find a process among its descendants."""

    name: ClassVar[str]
    victims: ClassVar[dict[str, Callable[[Sequence[psutil.Process]], psutil.Process]]] = {}

    @abstractmethod
    def command(self, folder: Path) -> list[str]: ...

    def settings(self, folder: Path) -> dict[str, str]:  # noqa: ARG002
        return {}

    def prepare(self, folder: Path) -> None:  # noqa: B027  # a scene may need none
        """Make the results that are finished before; called once, the folder is copied for each row."""

    def is_reached(self, processes: Sequence[psutil.Process], folder: Path) -> bool:  # noqa: ARG002
        """Whether it is time to kill."""
        ranks = ranks_in(processes)
        return len(ranks) == 2 and all(map(is_connected, ranks))

    @abstractmethod
    def is_complete(self, folder: Path) -> bool:
        """Whether the folder is complete after the next run."""


class CaptureScene(Scene):
    """``profile_all.sh`` while it records the second of its two captures."""

    name = "profile_all.sh"
    victims: ClassVar = {
        "rank": lambda processes: ranks_in(processes)[-1],
        "launcher": lambda processes: ranks_in(processes)[0].parent(),
        "nsys": nsys_in,
    }

    def command(self, folder: Path) -> list[str]:  # noqa: ARG002
        return ["bash", "profile_all.sh"]

    def settings(self, folder: Path) -> dict[str, str]:
        return {
            "TRACES_DIR": str(folder / "traces"), "FIGURES_DIR": str(folder / "figures"), "VARIANTS": "naive flat",
            "MODEL_SIZE": "tiny", "SEQ_LEN": "16", "STEPS": "300", "WARMUP": "1", "DEVICE": "cpu", "CHROMIUM": "0",
        }  # fmt: skip

    def prepare(self, folder: Path) -> None:
        run_quietly(self.command(folder), {**self.settings(folder), "VARIANTS": "naive"})
        shutil.rmtree(folder / "figures")

    def is_complete(self, folder: Path) -> bool:
        names = {path.name for path in (folder / "traces").iterdir()}
        expected = {f"{name}.{suffix}" for name in ("naive", "flat") for suffix in ("run.json", "nsys-rep", "sqlite")}
        return names == expected and (folder / "figures/index.html").exists()


class SweepScene(Scene):
    """A sweep in its second of two runs."""

    name = "sweep"
    victims: ClassVar = {"rank": lambda processes: ranks_in(processes)[-1]}

    def command(self, folder: Path) -> list[str]:
        options = "--model-size tiny --variants naive flat --seq-len 16 --batch-sizes 2 --steps 200 --repeats 1"
        program = [str(BIN / "python"), "-m", "ddp_prof.benchmark.sweep", "--database", str(folder / "r.db")]
        return [*program, *options.split()]

    def prepare(self, folder: Path) -> None:
        run_quietly([item for item in self.command(folder) if item != "flat"], {})

    def is_complete(self, folder: Path) -> bool:
        with closing(sqlite3.connect(f"file:{folder / 'r.db'}?mode=ro", uri=True)) as database:
            return database.execute("SELECT count(*) FROM runs WHERE status = 'ok'").fetchone() == (2,)


class ReportScene(Scene):
    """A report when its first page is there."""

    name = "report"

    def command(self, folder: Path) -> list[str]:
        return [str(BIN / "ddp-prof"), "report", str(ROOT / "traces"), "-o", str(folder / "report")]

    def is_reached(self, processes: Sequence[psutil.Process], folder: Path) -> bool:  # noqa: ARG002
        return (folder / "report").exists() and any((folder / "report").iterdir())

    def is_complete(self, folder: Path) -> bool:
        pages = [path.read_text(encoding="utf-8") for path in (folder / "report").rglob("*.html")]
        return all(page.rstrip().endswith("</html>") for page in pages) and (folder / "report/index.html").exists()


SCENES = {"capture": CaptureScene, "sweep": SweepScene, "report": ReportScene}


@dataclass
class Outcome:
    """The result of a kill: one row."""

    scene: str
    victim: str
    signal: str
    exit_code: int | None = None
    said: str = ""
    left: list[str] = field(default_factory=list)
    is_kept: bool = False
    next_run: int | None = None
    is_complete: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the row is good, see above; a command that is killed by SIGKILL cannot print anything."""
        speechless = self.victim == "command" and self.signal == "SIGKILL"
        ended = self.exit_code is not None and (self.exit_code != 0 or self.victim not in {"command", DISK})
        has_said = bool(self.said) or speechless
        return ended and has_said and not self.left and self.is_kept and self.next_run == 0 and self.is_complete

    def cells(self) -> tuple[str, ...]:
        return (
            self.scene, self.victim, self.signal, str(self.exit_code), self.said or "nothing",
            ", ".join(self.left) or "none", "yes" if self.is_kept else "NO",
            f"exit {self.next_run}, {'complete' if self.is_complete else 'INCOMPLETE'}",
            "good" if self.is_good else "BAD",
        )  # fmt: skip


HEADER = ("scene", "victim", "signal", "exit", "last two lines", "processes left", "finished kept", "next run", "row")


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a folder, without hidden files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def run_quietly(command: Sequence[str], settings: dict[str, str]) -> int:
    """Run a command and return its exit code; print its output if that is not 0."""
    done = subprocess.run(
        command, env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=WAIT_S * 3,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(f"the next run: {done.stdout[-300:]}{done.stderr[-600:]}\n")
    return done.returncode


def run_and_kill(scene: Scene, victim: str, number: signal.Signals | None, before: Path) -> Outcome:
    """Make one row: run, kill, check, run again."""
    outcome = Outcome(scene.name, victim, number.name if number else "full")
    with tempfile.TemporaryDirectory(prefix="kill.") as name, ExitStack() as undone:
        folder = Path(name) / "run"
        folder.mkdir()
        if victim == DISK:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
            undone.callback(subprocess.run, ["umount", folder], check=True)
        shutil.copytree(before, folder, dirs_exist_ok=True)
        finished = digests(folder)
        command, settings = scene.command(folder), scene.settings(folder)
        log = Path(name) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **settings}, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=output,
            )  # fmt: skip
        root = psutil.Process(process.pid)
        seen = {root}
        try:
            descendants = wait_until_reached(scene, process, folder)
            seen |= {*descendants}
            if victim == DISK:
                fill(folder / FILLER)
            elif victim == "command" and number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                assert number is not None
                (root if victim == "command" else scene.victims[victim](descendants)).send_signal(number)
            outcome.exit_code = wait_for_end(process, seen)
        finally:
            outcome.left = end_all(seen)
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        outcome.said = " / ".join(lines[-2:])
        now = digests(folder)
        outcome.is_kept = all(now.get(path) == digest for path, digest in finished.items() if not path.endswith(".db"))
        (folder / FILLER).unlink(missing_ok=True)
        outcome.next_run = run_quietly(command, settings)
        outcome.is_complete = scene.is_complete(folder)
    return outcome


def fill(path: Path) -> None:
    """Write to a file until its disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def descendants_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def wait_until_reached(scene: Scene, process: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """Wait until it is time to kill; return the descendants."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        descendants = descendants_of(process)
        if scene.is_reached(descendants, folder):
            return descendants
        time.sleep(0.02)
    raise SystemExit(f"kill_matrix: {scene.name}: the time to kill was not reached; exit code {process.poll()}")


def wait_for_end(process: subprocess.Popen[bytes], seen: set[psutil.Process]) -> int | None:
    """Return the exit code, ``None`` if the process does not end; add its new descendants to ``seen``."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        seen.update(descendants_of(process))
        time.sleep(0.05)
    return process.poll()


def end_all(seen: set[psutil.Process]) -> list[str]:
    """Return the names of the processes that are still there after a while, and kill them."""

    def is_left(process: psutil.Process) -> bool:
        return process.is_running() and ask(process, "status", psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE

    deadline = time.monotonic() + SETTLE_S
    while (left := [process for process in seen if is_left(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [" ".join(ask(process, "cmdline", [])[:4])[:60] for process in left]
    for process in left:
        ask(process, "kill", None)
    return names


def run_scene(scene: Scene, victims: Sequence[str]) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="kill.before.") as name:
        before = Path(name) / "before"
        before.mkdir()
        scene.prepare(before)
        for victim in (name for name in (*scene.victims, "command", DISK) if name in victims):
            for number in SIGNALS_OF.get(victim, SIGNALS):
                yield run_and_kill(scene, victim, number, before)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    arguments = parser.parse_args(argv)
    # In the background SIGINT is ignored, which the victims would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("|", " | ".join(HEADER), "|\n|", " | ".join("---" for _ in HEADER), "|", flush=True)
    is_good = True
    for name in arguments.scenes:
        for outcome in run_scene(SCENES[name](), arguments.victims):
            is_good = is_good and outcome.is_good
            print("|", " | ".join(cell.replace("|", "\\|") for cell in outcome.cells()), "|", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
