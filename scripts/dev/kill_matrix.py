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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
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

Process = tuple[int, int]
"""Process id and start time, because an id can be used again."""


@dataclass(frozen=True)
class Scene:
    """A command that is killed.

    Attributes:
        name: Name in the table.
        command: Command line for a folder.
        settings: Additional environment variables.
        prepare: Makes the results that are finished before; called once, the folder is copied for each row.
        is_reached: Whether it is time to kill, from the processes and the folder of the run.
        victims: For each name, a function that finds the process.
        is_complete: Whether the folder is complete after the next run.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    settings: Callable[[Path], dict[str, str]]
    prepare: Callable[[Path], None]
    is_reached: Callable[[Sequence[int], Path], bool]
    victims: dict[str, Callable[[Sequence[int]], int]]
    is_complete: Callable[[Path], bool]


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


def children_of(process: int) -> Iterator[int]:
    """Yield all descendants, parents first."""
    try:
        found = [
            int(pid) for path in Path(f"/proc/{process}/task").iterdir() for pid in _read(path / "children").split()
        ]
    except OSError:
        return
    for child in found:
        yield child
        yield from children_of(child)


def arguments_of(process: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    return _read(Path(f"/proc/{process}/cmdline")).split("\0")[:-1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parent(process: int) -> int:
    return int(_read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[1])


def identity(process: int) -> Process | None:
    """Return the process with its start time; ``None`` if it has ended, or is a zombie."""
    fields = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return (process, int(fields[19])) if fields and fields[0] != "Z" else None


def ranks_in(processes: Sequence[int]) -> list[int]:
    """Return the processes that are ranks: those with RANK in their environment, or forked from a server."""

    def is_server(process: int) -> bool:
        return "forkserver" in _read(Path(f"/proc/{process}/cmdline"))

    return [
        process
        for process in processes
        if "\0RANK=" in "\0" + _read(Path(f"/proc/{process}/environ"))
        or (is_server(process) and is_server(_parent(process)))
    ]


def launcher_in(processes: Sequence[int]) -> int:
    """Return the parent of the ranks."""
    return _parent(ranks_in(processes)[0])


def nsys_in(processes: Sequence[int]) -> int:
    """Return the first ``nsys profile``."""
    return next(
        process for process in processes
        if (arguments := arguments_of(process)) and Path(arguments[0]).name == "nsys" and "profile" in arguments
    )  # fmt: skip


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
        seen: set[Process] = set()
        try:
            descendants = wait_until_reached(scene, process, folder)
            seen |= {known for known in map(identity, [process.pid, *descendants]) if known}
            if victim == DISK:
                fill(folder / FILLER)
            elif victim == "command" and number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                assert number is not None
                os.kill(process.pid if victim == "command" else scene.victims[victim](descendants), number)
            outcome.exit_code = wait_for_end(process, seen)
        finally:
            outcome.left = end_all(seen)
        lines = [line for line in _read(log).splitlines() if line.strip()]
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


def wait_until_reached(scene: Scene, process: subprocess.Popen[bytes], folder: Path) -> list[int]:
    """Wait until it is time to kill; return the descendants."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        descendants = list(children_of(process.pid))
        if scene.is_reached(descendants, folder):
            return descendants
        time.sleep(0.02)
    raise SystemExit(f"kill_matrix: {scene.name}: the time to kill was not reached; exit code {process.poll()}")


def wait_for_end(process: subprocess.Popen[bytes], seen: set[Process]) -> int | None:
    """Return the exit code, ``None`` if the process does not end; add its new descendants to ``seen``."""
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        seen |= {known for known in map(identity, children_of(process.pid)) if known}
        time.sleep(0.05)
    return process.poll()


def end_all(seen: set[Process]) -> list[str]:
    """Return the names of the processes that are still there after a while, and kill them."""
    deadline = time.monotonic() + SETTLE_S
    while (left := [known for known in seen if identity(known[0]) == known]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [" ".join(arguments_of(process)[:4])[:60] for process, _ in left]
    for process, _ in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return names


def capture_scene() -> Scene:
    """``profile_all.sh`` while it records the second of its two captures."""

    def settings(folder: Path) -> dict[str, str]:
        return {
            "TRACES_DIR": str(folder / "traces"), "FIGURES_DIR": str(folder / "figures"), "VARIANTS": "naive flat",
            "MODEL_SIZE": "tiny", "SEQ_LEN": "16", "STEPS": "300", "WARMUP": "1", "DEVICE": "cpu", "CHROMIUM": "0",
        }  # fmt: skip

    def prepare(folder: Path) -> None:
        run_quietly(["bash", "profile_all.sh"], {**settings(folder), "VARIANTS": "naive"})
        shutil.rmtree(folder / "figures")

    def is_complete(folder: Path) -> bool:
        names = {path.name for path in (folder / "traces").iterdir()}
        expected = {f"{name}.{suffix}" for name in ("naive", "flat") for suffix in ("run.json", "nsys-rep", "sqlite")}
        return names == expected and (folder / "figures/index.html").exists()

    return Scene(
        "profile_all.sh",
        lambda _: ["bash", "profile_all.sh"],
        settings,
        prepare,
        lambda processes, _: len(ranks_in(processes)) == 2 and all(map(has_torch, ranks_in(processes))),
        {
            "rank": lambda processes: ranks_in(processes)[-1],
            "launcher": launcher_in,
            "nsys": nsys_in,
        },
        is_complete,
    )


def has_torch(process: int) -> bool:
    """Whether the rank has torch and gloo's threads, so it is connected to its peers."""
    return (
        "libtorch_cpu" in _read(Path(f"/proc/{process}/maps"))
        and len(list(Path(f"/proc/{process}/task").iterdir())) > 2
    )


def sweep_scene() -> Scene:
    """A sweep in its second of two runs."""

    def command(folder: Path) -> list[str]:
        options = "--model-size tiny --variants naive flat --seq-len 16 --batch-sizes 2 --steps 200 --repeats 1"
        return [
            str(BIN / "python"),
            "-m",
            "ddp_prof.benchmark.sweep",
            "--database",
            str(folder / "r.db"),
            *options.split(),
        ]

    def rows(folder: Path) -> int:
        with closing(sqlite3.connect(f"file:{folder / 'r.db'}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT count(*) FROM runs WHERE status = 'ok'").fetchone()[0])

    def prepare(folder: Path) -> None:
        run_quietly([item for item in command(folder) if item != "flat"], {})

    return Scene(
        "sweep",
        command,
        lambda _: {},
        prepare,
        lambda processes, _: len(ranks_in(processes)) == 2 and all(map(has_torch, ranks_in(processes))),
        {"rank": lambda processes: ranks_in(processes)[-1]},
        lambda folder: rows(folder) == 2,
    )


def report_scene() -> Scene:
    """A report when its first page is there."""

    def command(folder: Path) -> list[str]:
        return [str(BIN / "ddp-prof"), "report", str(ROOT / "traces"), "-o", str(folder / "report")]

    return Scene(
        "report",
        command,
        lambda _: {},
        lambda _: None,
        lambda _, folder: (folder / "report").exists() and any((folder / "report").iterdir()),
        {},
        lambda folder: (
            all(
                path.read_text(encoding="utf-8").rstrip().endswith("</html>")
                for path in (folder / "report").rglob("*.html")
            )
            and (folder / "report/index.html").exists()
        ),
    )


SCENES = {"capture": capture_scene, "sweep": sweep_scene, "report": report_scene}


def run_scene(scene: Scene, victims: Sequence[str]) -> Iterator[Outcome]:
    """Yield the rows of a scene for those victims that it has."""
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
