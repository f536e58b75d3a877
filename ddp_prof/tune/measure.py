"""Runs the unchanged program once with the settings of a try, and reads what its ranks wrote."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from msgspec import ValidationError, convert

from ddp_prof.capture.job import file_suffix, injection
from ddp_prof.capture.processes import NOT_DONE, find_reason, run, scratch_folder
from ddp_prof.errors import OutOfMemoryError, WorkloadError, printable
from ddp_prof.tune.tries import DDP, TODAY, Setting, Try, Value

TRIAL_VARIABLE = "DDP_PROF_TRIAL"
"""Environment variable with the settings and the number of steps for the ranks, as JSON."""
TUNE_VARIABLE = "DDP_PROF_TUNE"
"""Environment variable that is 1 in the program, so that it can leave out what a run of a few steps should not do."""
SETTLING = 3
"""Steps at the beginning of a block that are not measured."""
LEAST_WARMUP, LEAST_STEPS = 1, 3
"""The least values of ``--warmup`` and ``--steps``."""
TORCHRUNS = re.compile(r"^(?=[WE]\d{4} .*elastic|Traceback |torch\.distributed\.elastic)", flags=re.MULTILINE)
"""Where torchrun begins to say that a rank has failed."""
STARS = "*" * 41 + "\n"
"""The line above and below torchrun's own words at the start."""
WORDS_FOR_MEMORY = ("out of memory", "OutOfMemoryError", "ENOMEM", "can't allocate memory")
"""Words in the output of a program that lacked memory."""


class OutOfTimeError(WorkloadError):
    """The program had not ended when its time was over."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss: a scalar on which a rank called ``backward``.

    Attributes:
        step: How many steps the optimizer had made before.
        value: The loss; ``None`` if it is not finite.
        precision: Distance from 1 to the next larger number of its data type.
    """

    step: int
    value: float | None
    precision: float


@dataclass(frozen=True, slots=True)
class Made:
    """A call of ``DistributedDataParallel`` or ``fully_shard`` (``what``) by the program.

    ``arguments`` are those that the program passed, before the try changed any.
    """

    what: str
    arguments: dict[str, Value]


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank wrote at the end of its run.

    Attributes:
        done: Number of steps of the optimizer, from the first sign of training to the end.
        made: The calls of ``DistributedDataParallel`` and ``fully_shard``.
        step_ns: Length of each step after warm-up, in nanoseconds.
        losses: The losses, in the order in which the rank computed them.
    """

    rank: int
    world: int
    backend: str | None
    device: str
    torch: str
    done: int
    made: list[Made]
    step_ns: list[int]
    losses: list[Loss]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run that ended cleanly.

    ``step_ns`` is the length of each measured step, as the mean over the ranks; ``ranks`` holds what each rank wrote,
    by rank.
    """

    step_ns: tuple[float, ...]
    ranks: tuple[RankFile, ...]

    @property
    def median_ns(self) -> float:
        return median(self.step_ns)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The result of a run in which settings changed between blocks of steps.

    ``step_ns`` holds for each block the lengths of its measured steps, as in :class:`Measured`.
    """

    ranks: tuple[RankFile, ...]
    step_ns: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The program, and how many steps it makes in a run.

    Attributes:
        command: Its command line.
        warmup: Steps of the optimizer before the first step that is measured, at least 1.
        steps: Number of measured steps.
        is_recorded: Whether ``command`` contains a recorder; then the program is also marked with ranges.
        in_process: Whether all tries are blocks of steps in one run, instead of one run for each try.
        on_start: Called before each run.
    """

    command: tuple[str, ...]
    warmup: int
    steps: int
    is_recorded: bool = False
    in_process: bool = False
    on_start: Callable[[], None] = lambda: None

    def variables(
        self, tried: Try, folder: Path, environ: Mapping[str, str], blocks: Sequence[Mapping[str, Value]] = ()
    ) -> dict[str, str]:
        """Return the environment variables of a run that are to be added to ``environ``.

        Args:
            tried: The settings of the run.
            folder: Where the ranks write their files.
            environ: The environment to which the variables are added.
            blocks: For a run of blocks, the arguments of ``DistributedDataParallel`` in each block.
        """
        trial = {
            "folder": str(folder),
            "warmup": self.warmup,
            "steps": self.steps,
            "is_recorded": self.is_recorded,
            "ddp": tried.arguments("ddp"),
            "fsdp": tried.arguments("fsdp"),
            "blocks": blocks,
        }
        own = {TUNE_VARIABLE: "1", TRIAL_VARIABLE: json.dumps(trial)}
        return {**injection(environ), **own, **tried.environment}

    def shown(self, tried: Try) -> str:
        """Return the command line of the program with a try, for people to read.

        Arguments of torch, which are no part of a command line, follow in a comment.
        """
        # The line of a try with only the arguments of torch, without the environment variables; empty without any.
        arguments = " and ".join(filter(None, (Try(tuple(s for s in tried.settings if s.of)).line,)))
        words = [f"{name}={value}" for name, value in tried.environment.items()]
        line = shlex.join([*words, *self.command])
        return f"{line}  # with {arguments}" if arguments else line

    def refuse_parts(self, environ: Mapping[str, str]) -> None:
        """Raise WorkloadError if this process would start only a part of the job's ranks."""
        if file_suffix(self.command, environ):
            raise WorkloadError(
                "tune starts all ranks itself, on one machine: run it outside of other launchers, without --nnodes"
            )

    def measure(self, tried: Try, environ: Mapping[str, str], limit_s: int | None = None) -> Measured:
        """Run the program once with a try, for at most ``limit_s`` seconds, and return what was measured.

        Raises WorkloadError, with the reason, if the program fails or ends before its last step; OutOfMemoryError if
        its output says that it lacked memory; OutOfTimeError if it takes too long.
        """
        return self.check(self._run(tried, (), environ, limit_s), tried)

    def measure_blocks(self, tries: Sequence[Try], environ: Mapping[str, str], limit_s: int | None = None) -> Blocks:
        """Run the program once, with a block of steps for each of ``tries``, in this order; raises as :meth:`measure`.

        A block begins with :data:`SETTLING` steps that are not measured, because a new reducer of DDP still orders its
        buckets in the first of them.
        """
        length = SETTLING + self.steps
        whole = replace(self, steps=length * len(tries))
        files = whole._run(TODAY, [tried.arguments("ddp") for tried in tries], environ, limit_s)
        done = min((file.done for file in files), default=0)
        if files and done < whole.warmup + whole.steps:
            raise WorkloadError(
                f"the program ends after {done} optimizer steps, and {len(tries)} blocks in one run need "
                f"{whole.warmup + whole.steps}: give fewer --steps or tries, or leave out --in-process"
            )
        found = whole.check(files, TODAY)
        begins = range(SETTLING, whole.steps, length)  # the first measured step of each block
        return Blocks(found.ranks, tuple(found.step_ns[at : at + self.steps] for at in begins))

    def _run(
        self, tried: Try, blocks: Sequence[Mapping[str, Value]], environ: Mapping[str, str], limit_s: int | None
    ) -> list[RankFile]:
        """Run the program and return what its ranks wrote; raises as :meth:`measure`."""
        self.on_start()
        with scratch_folder() as scratch:
            folder, log = scratch / "ranks", scratch / "output"
            folder.mkdir()
            variables = self.variables(tried, folder, environ, blocks)
            code = run(self.command, {**environ, **variables}, scratch, log=log, limit_s=limit_s)
            if code == NOT_DONE:
                raise OutOfTimeError(f"the program had not ended after {limit_s} s")
            if code:
                text = log.read_text(encoding="utf-8", errors="replace")
                lacks_memory = any(word in text for word in WORDS_FOR_MEMORY)
                reason = _error_of_rank(text) or find_reason(log, code, Path(self.command[0]).name)
                raise (OutOfMemoryError if lacks_memory else WorkloadError)(reason)
            return _read_files(folder)

    def check(self, files: Sequence[RankFile], tried: Try) -> Measured:
        """Return what the ranks measured, from their files.

        Raises WorkloadError if steps or ranks are missing, or if the program makes no call that takes the settings of
        ``tried``.
        """
        if not files:
            seen = "neither DistributedDataParallel, fully_shard nor backward() was seen"
            raise WorkloadError(f"no rank trained: {seen}, or they left by os._exit before their last measured step")
        ranks = sorted(files, key=lambda file: file.rank)
        done = min(file.done for file in ranks)
        # Steps are missing: say which numbers of steps the program would reach.
        if any(len(file.step_ns) != self.steps for file in ranks):
            if not done:
                raise WorkloadError("no step of an optimizer of torch was seen")
            raise WorkloadError(f"the program ends after {done} optimizer steps, and {self._needed_steps(done)}")
        if [file.rank for file in ranks] != [*range(ranks[0].world)]:
            found = ", ".join(str(file.rank) for file in ranks)
            raise WorkloadError(
                f"the ranks with a result are {found}, of a world of {ranks[0].world}: each rank must train, in one "
                "process, and not leave by os._exit"
            )
        # A setting that no call takes would change nothing.
        for setting in tried.settings:
            if setting.of and not any(_takes(made, setting) for file in ranks for made in file.made):
                what = "DistributedDataParallel" if setting.of == DDP else "fully_shard of torch.distributed.fsdp"
                raise WorkloadError(f"the program calls no {what}, so there is nothing to set")
        return Measured(tuple(map(fmean, zip(*(file.step_ns for file in ranks), strict=True))), tuple(ranks))

    def _needed_steps(self, done: int) -> str:
        """Return how many steps a run needs, and the way out for a program that ends after ``done`` steps."""
        needed = f"{self.warmup + self.steps} are needed"
        if self.is_recorded:  # the length of the recording is no option
            fits = done - self.steps
            hint = f"--warmup {fits} would fit" if fits >= LEAST_WARMUP else "give --try, and leave out --why"
            return f"{needed} for a capture: {hint}"
        if done < LEAST_WARMUP + LEAST_STEPS:
            least = f"at least {LEAST_WARMUP + LEAST_STEPS}, for --warmup {LEAST_WARMUP} --steps {LEAST_STEPS}"
            return f"{needed}: let it make {least}"
        third = max(LEAST_WARMUP, done // 3)
        return f"{needed}: --warmup {min(self.warmup, third)} --steps {done - third} would fit"


def is_todays(setting: Setting, made: Sequence[Made], environ: Mapping[str, str]) -> bool:
    """Whether the program has a setting already, by its calls (``made``) and its environment."""
    if not setting.of:
        return environ.get(setting.name) == setting.value
    own = [one for one in made if _takes(one, setting)]
    return bool(own) and all(
        setting.name in one.arguments and one.arguments[setting.name] == setting.value for one in own
    )


def _takes(made: Made, setting: Setting) -> bool:
    """Whether a call is the one that takes a setting."""
    return made.what == ("DistributedDataParallel" if setting.of == DDP else "fully_shard")


def _error_of_rank(text: str) -> str | None:
    """Return why a rank failed, from the output of the program; ``None`` if the output does not say.

    If a signal ended a rank, only torchrun says so, and other ranks may raise an exception because of that. Otherwise
    it is the last line of the first traceback. Torchrun's own exception follows it and says less. Without a traceback
    it is the exit code, and what the ranks printed last.
    """
    # In torchrun's report an exit code of -9 is signal 9.
    report = re.search(r"^Root Cause .*?^\s*exitcode\s*: (-?\d+)\b", text, flags=re.MULTILINE | re.DOTALL)
    code = int(report[1]) if report else 0
    if -code in set(signal.Signals):
        name = signal.Signals(-code).name
        return f"a rank was ended by {name}" + (
            ", which often means that the machine lacks memory" if name == "SIGKILL" else ""
        )
    # Last lines of tracebacks, which may begin with ``[rank0]:``, and Python's message about a missing file.
    lines = re.findall(r"^(?:\[\w+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", text, flags=re.MULTILINE)
    lines += re.findall(r"^.*: (can't open file .*)$", text, flags=re.MULTILINE)
    own = [line for line in lines if "ChildFailedError" not in line and "elastic" not in line]
    if not own and code > 0:
        said = _last_words(text)
        ended = f"a rank ended with exit code {code} and raised no exception"
        return f"{ended}; before, the program's output ends with: {said}" if said else ended
    if own and all(re.search(r"(closed|reset) by peer|Broken pipe", line) for line in own):
        return (
            "a rank ended while the others waited for it: do all ranks make the same number of steps? "
            "If not, give so few --steps that each of them makes these"
        )
    return printable(own[0][:300]) if own else None


def _last_words(text: str) -> str:
    """Return the last line that the ranks printed before torchrun noticed that one has failed; empty if there is none.

    A rank that leaves by ``sys.exit("...")``, or whose argument parser refuses a word, says there why.
    """
    own = TORCHRUNS.split(text, maxsplit=1)[0].rpartition(STARS)[2]
    lines = [line.strip() for line in own.splitlines() if line.strip()]
    return printable(lines[-1][:300]) if lines else ""


def _read_files(folder: Path) -> list[RankFile]:
    """Return what the ranks wrote into a folder; raise WorkloadError if a file cannot be read."""
    try:
        return [convert(json.loads(path.read_text(encoding="utf-8")), RankFile) for path in folder.glob("*.json")]
    except (ValueError, ValidationError) as error:
        raise WorkloadError(f"a rank's file cannot be read: {error}") from error
