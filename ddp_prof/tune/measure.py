"""One run of the unchanged program with the settings of a try, and what its ranks wrote."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from msgspec import ValidationError, convert

from ddp_prof.capture.job import file_suffix, injection
from ddp_prof.capture.processes import NOT_DONE, find_reason, run, scratch_folder
from ddp_prof.errors import OutOfMemoryError, WorkloadError, printable
from ddp_prof.tune.tries import DDP, TODAY, Setting, Try, Value

TRIAL_VARIABLE = "DDP_PROF_TRIAL"
TUNE_VARIABLE = "DDP_PROF_TUNE"
"""Set in the program's environment, so that it can leave out what a run of some steps should not do."""
SETTLING = 3
"""Steps at the beginning of a block that are not measured."""
WORDS_FOR_MEMORY = ("out of memory", "OutOfMemoryError", "ENOMEM", "can't allocate memory")


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar on which a rank called ``backward``.

    Attributes:
        step: How many steps of the optimizer were done before.
        value: ``None`` if it is not finite.
        precision: Distance from 1 to the next number of its type.
    """

    step: int
    value: float | None
    precision: float


@dataclass(frozen=True, slots=True)
class Made:
    """A ``DistributedDataParallel`` or ``fully_shard`` as the program made it, without what the try changes."""

    what: str
    arguments: dict[str, Value]


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank wrote; times in nanoseconds, of the steps after warm-up.

    Attributes:
        done: Steps of the optimizer from the first sign of training to the end.
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
    """A run that ended in order. ``step_ns`` are means over the ranks; ``ranks`` are in the order of their numbers."""

    step_ns: tuple[float, ...]
    ranks: tuple[RankFile, ...]

    @property
    def median_ns(self) -> float:
        return median(self.step_ns)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A run in which settings changed between blocks of steps: the measured steps of each block, as in Measured."""

    ranks: tuple[RankFile, ...]
    step_ns: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The program and how long it runs in a try.

    Attributes:
        warmup: Steps of the optimizer before the first that is measured, at least 1.
        steps: Measured steps.
        is_recorded: Whether ``command`` records it, so that it is marked as well.
        in_process: Whether tries are blocks of steps of one run, instead of a run each.
    """

    command: tuple[str, ...]
    warmup: int
    steps: int
    is_recorded: bool = False
    in_process: bool = False

    def variables(
        self, tried: Try, folder: Path, environ: Mapping[str, str], blocks: Sequence[Mapping[str, Value]] = ()
    ) -> dict[str, str]:
        """Return what the environment of a run has beside ``environ``; the ranks' files go into ``folder``."""
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
        """Return the command line of a try as one would write it, for people."""
        arguments = " and ".join(filter(None, (Try(tuple(s for s in tried.settings if s.of)).line,)))
        words = [f"{name}={value}" for name, value in tried.environment.items()]
        line = shlex.join([*words, *self.command])
        return f"{line}  # with {arguments}" if arguments else line

    def refuse_parts(self, environ: Mapping[str, str]) -> None:
        """Raise WorkloadError where this process would start only a part of the job."""
        if file_suffix(self.command, environ):
            raise WorkloadError(
                "tune starts all ranks itself, on one machine: run it outside of other launchers, without --nnodes"
            )

    def measure(self, tried: Try, environ: Mapping[str, str], limit_s: int | None = None) -> Measured:
        """Run it once, for at most ``limit_s`` seconds.

        Raises WorkloadError, which says why, if it fails, hangs, or ends before its last step; OutOfMemoryError if it
        is known to lack memory.
        """
        return self.check(self._run(tried, (), environ, limit_s), tried)

    def measure_blocks(self, tries: Sequence[Try], environ: Mapping[str, str], limit_s: int | None = None) -> Blocks:
        """Run it once, with a block of steps for each of ``tries``; raises as :meth:`measure`.

        A block begins with :data:`SETTLING` steps that are not measured: a new reducer orders its buckets in the first.
        """
        length = SETTLING + self.steps
        whole = replace(self, steps=length * len(tries))
        files = whole._run(TODAY, [tried.arguments("ddp") for tried in tries], environ, limit_s)
        done = min((file.done for file in files), default=0)
        if files and done < whole.warmup + whole.steps:
            raise WorkloadError(
                f"it ends by itself after {done} optimizer steps of {whole.warmup + whole.steps}, which {len(tries)} "
                "blocks in one process need: give fewer --steps or tries, or leave out --in-process"
            )
        found = whole.check(files, TODAY)
        begins = range(SETTLING, whole.steps, length)
        return Blocks(found.ranks, tuple(found.step_ns[at : at + self.steps] for at in begins))

    def _run(
        self, tried: Try, blocks: Sequence[Mapping[str, Value]], environ: Mapping[str, str], limit_s: int | None
    ) -> list[RankFile]:
        with scratch_folder() as scratch:
            folder, log = scratch / "ranks", scratch / "output"
            folder.mkdir()
            variables = self.variables(tried, folder, environ, blocks)
            code = run(self.command, {**environ, **variables}, scratch, log=log, limit_s=limit_s)
            if code == NOT_DONE:
                raise WorkloadError(f"it had not ended after {limit_s} s")
            if code:
                text = log.read_text(encoding="utf-8", errors="replace")
                lacks_memory = any(word in text for word in WORDS_FOR_MEMORY)
                reason = _error_of_rank(text) or find_reason(log, code, Path(self.command[0]).name)
                raise (OutOfMemoryError if lacks_memory else WorkloadError)(reason)
            return _read_files(folder)

    def check(self, files: Sequence[RankFile], tried: Try) -> Measured:
        """Return what the ranks measured; raise WorkloadError if that is not what was asked for."""
        if not files:
            raise WorkloadError("no rank trained: neither DistributedDataParallel, fully_shard nor backward() was seen")
        ranks = sorted(files, key=lambda file: file.rank)
        done = min(file.done for file in ranks)
        if any(len(file.step_ns) != self.steps for file in ranks):
            if not done:
                raise WorkloadError("no step of an optimizer of torch was seen")
            hint = (
                f"--warmup {min(self.warmup, max(1, done // 3))} --steps {max(1, done - max(1, done // 3))} would fit"
            )
            raise WorkloadError(f"it ends by itself after {done} optimizer steps of {self.warmup + self.steps}: {hint}")
        if [file.rank for file in ranks] != [*range(ranks[0].world)]:
            raise WorkloadError(f"{len(ranks)} of {ranks[0].world} ranks ended in order")
        for setting in tried.settings:
            if setting.of and not any(_takes(made, setting) for file in ranks for made in file.made):
                what = "DistributedDataParallel" if setting.of == DDP else "fully_shard of torch.distributed.fsdp"
                raise WorkloadError(f"the program calls no {what}, so there is nothing to set")
        return Measured(tuple(map(fmean, zip(*(file.step_ns for file in ranks), strict=True))), tuple(ranks))


def is_todays(setting: Setting, made: Sequence[Made], environ: Mapping[str, str]) -> bool:
    """Whether a program that ``made`` these, in this environment, has a setting already."""
    if not setting.of:
        return environ.get(setting.name) == setting.value
    own = [one for one in made if _takes(one, setting)]
    return bool(own) and all(
        setting.name in one.arguments and one.arguments[setting.name] == setting.value for one in own
    )


def _takes(made: Made, setting: Setting) -> bool:
    return made.what == ("DistributedDataParallel" if setting.of == DDP else "fully_shard")


def _error_of_rank(text: str) -> str | None:
    """Return what ended the first rank: a signal, which only torchrun knows, or the first line that ends an exception.

    Other ranks may raise an exception because of the signal; torchrun's own exception, which follows, says less.
    """
    killed = re.search(r"^Root Cause .*?^\s*exitcode\s*: -(\d+)\b", text, flags=re.MULTILINE | re.DOTALL)
    if killed and int(killed[1]) in set(signal.Signals):
        name = signal.Signals(int(killed[1])).name
        return f"a rank was ended by {name}" + (", as a machine does that lacks memory" if name == "SIGKILL" else "")
    lines = re.findall(r"^(?:\[\w+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", text, flags=re.MULTILINE)
    lines += re.findall(r"^.*: (can't open file .*)$", text, flags=re.MULTILINE)
    own = [line for line in lines if "ChildFailedError" not in line and "elastic" not in line]
    return printable(own[0][:300]) if own else None


def _read_files(folder: Path) -> list[RankFile]:
    try:
        return [convert(json.loads(path.read_text(encoding="utf-8")), RankFile) for path in folder.glob("*.json")]
    except (ValueError, ValidationError) as error:
        raise WorkloadError(f"a rank's file cannot be read: {error}") from error
