"""Has the measurements of a monitor analysed, gathers the results of all ranks on rank 0, and logs them."""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_prof.annotate.analysis_process import ANALYSIS_S, Analysis
from ddp_prof.annotate.kept_traces import Keep, KeptTraces
from ddp_prof.annotate.log_file import LogFile
from ddp_prof.annotate.log_targets import MlflowTarget, as_target, print_text
from ddp_prof.annotate.messenger import Messenger
from ddp_prof.annotate.monitor_format import LIMITS, LOG_NAME
from ddp_prof.annotate.tracebacks import stands_for

GATHER_S = 120.0
"""How long rank 0 waits for the results of other ranks."""
PATIENCE_S = 180.0
"""How long a program that ends waits until everything is logged: a minute is too little beside other programs."""
AFTER_SILENCE_S = 5.0
"""How long rank 0 waits for ranks from which nothing arrived the last time."""
TO_END_S = 0.1
"""How long gloo's threads get to end their work before a DDP is freed, see :func:`_let_gloo_end_first`."""
_POLL_S = 0.2
"""Time between two looks into the store."""
_MOST_WAITING = 2
"""Most measurements that wait for their analysis; if analyses take too long, later measurements are left out."""
_MOST_SENT = 4
"""Most results of a rank in the store, and most traces of it on disk, that rank 0 has not dealt with."""
_ABSENT = "absent"
"""Stands for "no value" when the store is asked for a key, see :func:`_peek`."""
NOT_MEASURED, NOT_LOGGED = "is not measured", "is not logged"
_KEPT = "kept"
"""End of the store's key under which rank 0 says which traces stay."""
_LOG = logging.getLogger("ddp_prof.monitor")
_numbers = iter(range(sys.maxsize))
"""Numbers for the readers of this process, 0, 1, ...; on all ranks the same, if all make their readers in one order."""


@dataclass(frozen=True)
class RecordedSteps:
    """A measurement of this rank whose trace is written.

    Attributes:
        step: The first recorded step.
        trace: File of the trace.
        overhead_ns: How long start, stop and export of the profiler held the training up.
        usual_ns: Median length of the unrecorded steps before, by the host's clock; ``None`` if it is not known.
        recorded_ns: Length of each recorded step after warm-up, by the host's clock; empty if it is not known.
    """

    step: int
    trace: Path
    overhead_ns: int
    usual_ns: int | None
    recorded_ns: tuple[int, ...]


@dataclass(frozen=True)
class FailedMeasurement:
    """A measurement that this rank could not make, and the reason, which a warning has told."""

    step: int
    why: str


class Group(NamedTuple):
    """Rank and number of ranks, and the store over which ranks send results; ``None`` if there is no process group."""

    rank: int
    world: int
    store: Any


class Reader:
    """Has measurements analysed and logged, one after another, in a thread of its own.

    The thread waits for processes of low priority, which do the work, so that training goes on. On rank 0 it also
    gathers the results of the other ranks and writes the log; the other ranks send their results to rank 0.

    Args:
        folder: Folder for the log and the traces.
        log: As for :class:`.Monitor`.
        keep: As for :class:`.Monitor`.
        limits: As for :class:`.Monitor`.
        alert: As for :class:`.Monitor`.

    Raises:
        ValueError: There is no such ``keep``, or no such limit.
        TypeError: ``log`` is nothing that takes records.
    """

    def __init__(
        self,
        folder: Path,
        log: Any,
        keep: Keep,
        limits: Mapping[str, float] | None,
        alert: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        """Check the arguments, which the class describes; the threads start with the first measurement."""
        if keep not in ("all", "worst and last", "none"):
            raise ValueError(f"keep={keep!r}: it is 'all', 'worst and last' or 'none'")
        if unknown := {*(limits or {})} - {*LIMITS}:
            raise ValueError(f"limits: there is no {', '.join(sorted(unknown))}, only {', '.join(LIMITS)}")
        # Each target of records gets a thread of its own, and so does the alert.
        logs = {f"log[{at}]": one for at, one in enumerate(log)} if isinstance(log, (list, tuple)) else {"log": log}
        logs = {"log": print_text} if log is None else logs
        targets = {name: as_target(one) for name, one in logs.items() if one is not None}
        self._mlflow = [target for target in targets.values() if isinstance(target, MlflowTarget)]
        self._messengers = [Messenger(target, _not_passed_on(name)) for name, target in targets.items()]
        self._alerts = Messenger(alert or _warn_of_limits, _not_passed_on("alert"))
        self._folder, self._keep, self._limits = folder, keep, dict(limits or {})
        self._traces, self._log_file = KeptTraces(folder, keep), LogFile(folder / LOG_NAME)
        self._started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        # The queue of measurements for the thread; None ends it.
        self._tasks: queue.SimpleQueue[tuple[RecordedSteps | FailedMeasurement, Group] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = f"ddp_prof/monitor/{next(_numbers)}"  # start of this reader's keys in the store
        self._sent = deque[str]()  # keys of this rank's results in the store, the oldest first
        self._silent = set[int]()  # on rank 0: ranks from which nothing arrived the last time
        self._analysis = Analysis()
        self._longest_ns = 0  # of an analysis, with what it waits for
        self._gives_up = threading.Event()  # set where the program ends before everything is logged

    def read(self, recorded: RecordedSteps) -> None:
        """Queue a measurement for analysis and log; if too many wait, delete its trace and warn.

        The active run of MLflow is looked up here, in the thread that trains, because the program may end it later.
        """
        if self._tasks.qsize() >= _MOST_WAITING:
            recorded.trace.unlink(missing_ok=True)
            why = f"analyses take longer than the steps between measurements: measure less often{self._takes(recorded)}"
            warn_of_step("late", recorded.step, f"{NOT_LOGGED}: {why}")
            self.fail(recorded.step, why)
            return
        for target in self._mlflow:
            target.find_run()
        self._add(recorded)

    def _takes(self, recorded: RecordedSteps) -> str:
        """Return how many steps the longest analysis so far took, in brackets; nothing where that is not known."""
        if not self._longest_ns or not recorded.usual_ns:
            return ""
        return (
            f" (one took {self._longest_ns / 1e9:.1f} s, as long as {-(-self._longest_ns // recorded.usual_ns)} steps)"
        )

    def fail(self, step: int, why: str, *, tells_rank_0: bool = True) -> None:
        """Tell rank 0 that this rank does not have a measurement, so that rank 0 does not wait for it.

        Args:
            step: First step of the measurement.
            why: The reason.
            tells_rank_0: Matters on rank 0 only: whether it still gathers and logs what the other ranks measured.
        """
        if tells_rank_0 or find_group().rank:
            self._add(FailedMeasurement(step, why))

    def _add(self, task: RecordedSteps | FailedMeasurement) -> None:
        """Queue a measurement for the thread, which the first call starts.

        A failed measurement is left out if there are no other ranks that would wait for its result.
        """
        group = find_group()
        if isinstance(task, FailedMeasurement) and (group.world == 1 or group.store is None):
            return
        if self._thread is None:
            self._analysis, self._gives_up = Analysis(), threading.Event()
            self._thread = threading.Thread(target=self._run, name="ddp_prof.monitor", daemon=True)
            self._thread.start()
            for messenger in [*self._messengers, self._alerts] if group.rank == 0 else ():
                messenger.start()
        self._tasks.put((task, group))

    def close(self) -> None:
        """Wait until all measurements are logged, for :data:`PATIENCE_S` at most; then end what still runs.

        The thread is ended, too: if Python ends while a thread is in a call of the store, torch aborts the program.
        """
        until = time.monotonic() + PATIENCE_S
        if self._thread is not None:
            self._tasks.put(None)  # ends the thread
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._gives_up.set()
                self._analysis.kill()
                self._thread.join(AFTER_SILENCE_S)
            self._thread = None
        group = find_group()
        if group.rank and group.store is not None:  # tell rank 0 that nothing more comes from this rank
            with suppress(Exception):  # rank 0, whose store it may be, has ended
                group.store.set(self._key_of_end(group.rank), "")
        for messenger in (*self._messengers, self._alerts):
            messenger.close(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        """Analyse and log the queued measurements, one after another, until ``None`` comes; this runs in the thread."""
        is_first = True
        while (task := self._tasks.get()) is not None:
            if is_first:  # after the first one is taken: what waits in the queue may make later ones too many
                _let_gloo_end_first()
            is_first = False
            began_ns = time.monotonic_ns()
            self._read_or_warn(*task)
            self._longest_ns = max(self._longest_ns, time.monotonic_ns() - began_ns)
            del task  # a store that is held here would outlive its process group
        self._log_file.close()

    def _read_or_warn(self, task: RecordedSteps | FailedMeasurement, group: Group) -> None:
        """Do :meth:`_read`; an exception becomes a warning, so that the thread goes on with the next measurement."""
        try:
            self._read(task, group)
        except Exception as error:  # training goes on
            if isinstance(task, RecordedSteps):  # else a warning has told already that the step is not measured
                warn_of_step("read", task.step, f"{NOT_LOGGED}: {type(error).__name__}: {error}")

    def _read(self, task: RecordedSteps | FailedMeasurement, group: Group) -> None:
        """Analyse one measurement; send the result to rank 0, or on rank 0, gather all results and log them."""
        _delete_partial(self._folder, group.rank)
        with tempfile.TemporaryDirectory(prefix="ddp_prof.") as scratch:
            part = self._measure(task, group, Path(scratch))
            if group.rank:
                try:
                    self._send(group, self._key(task.step, group.rank), part)
                finally:
                    self._delete_unkept(group)
            else:
                self._log(task, group, self._gather(group, task.step, part), Path(scratch))

    def _measure(self, task: RecordedSteps | FailedMeasurement, group: Group, scratch: Path) -> bytes:
        """Analyse the trace of this rank; return the result that rank 0 gathers.

        It is a line of JSON (rank, host, times by the host's clock, and ``error``, why there is no analysis) and what
        the analysis wrote, which is empty if there is an error.
        """
        head: dict[str, Any] = {
            "rank": group.rank, "host": socket.gethostname(), "overhead_ns": 0, "usual_ns": None, "recorded_ns": (),
        }  # fmt: skip
        out = scratch / "measured"
        if isinstance(task, FailedMeasurement):
            error: str | None = task.why
        else:
            self._traces.add(task.step, group.rank, task.trace, self._find_log(group))
            error = self._analysis.run(scratch, "measure", str(task.trace), str(out), str(os.getpid()))[1]
            head |= {"overhead_ns": task.overhead_ns, "usual_ns": task.usual_ns, "recorded_ns": task.recorded_ns}
        packed = out.read_bytes() if error is None else b""
        return json.dumps({**head, "error": error}).encode() + b"\n" + packed

    def _find_log(self, group: Group) -> Path | None:
        """Return the file of the log, which says which traces of earlier starts may be deleted.

        On rank 0 it is ``None`` if another running job writes to it, too: those traces may be that job's, so none of
        them may be deleted.
        """
        if group.rank == 0 and self._log_file.is_another_job_s():
            warn_once("shared", f"another job writes to {self._folder}, too: give each job a folder of its own")
            return None
        return self._log_file.file

    def _key(self, step: int, rank: int) -> str:
        """Return the store's key for the result of a rank for the measurement at ``step``."""
        return f"{self._name}/{step}/{rank}"

    def _send(self, group: Group, key: str, part: bytes) -> None:
        """Put ``part``, the result of this rank, into the store, and delete its oldest result if there are too many."""
        if group.store is None:
            raise RuntimeError(
                "there is no torch process group, over whose store rank 0 gathers: measure after init_process_group() "
                "and before destroy_process_group()"
            )
        group.store.set(key, part)
        self._sent.append(key)
        if len(self._sent) > _MOST_SENT:  # rank 0 may not have measured
            group.store.delete_key(self._sent.popleft())

    def _gather(self, group: Group, step: int, own: bytes) -> list[bytes]:
        """Return the results of the ranks for the measurement at ``step``: ``own``, then what arrives in the store.

        A rank from which nothing arrives in time is left out. If only such ranks are missing the next time, the wait is
        shorter.
        """
        parts, missing = [own], set(range(1, group.world) if group.store is not None else ())
        begun = time.monotonic()
        while missing:
            # Take the results that are there; a rank that has ended sends nothing more.
            for rank in sorted(missing):
                key = self._key(step, rank)
                try:
                    has_ended = _peek(group.store, self._key_of_end(rank)) is not None
                    if (part := _peek(group.store, key)) is not None:
                        parts.append(part)
                        group.store.delete_key(key)
                except RuntimeError:
                    return parts  # the store's rank has ended
                if part is not None or has_ended:
                    missing.discard(rank)
                    self._silent.discard(rank)
            # Give up after a while, soon if only ranks are missing that sent nothing the last time.
            patience_s = GATHER_S if missing - self._silent else AFTER_SILENCE_S
            if time.monotonic() > begun + patience_s or (missing and self._gives_up.wait(_POLL_S)):
                break
        self._silent |= missing
        return parts

    def _key_of_end(self, rank: int) -> str:
        """Return the store's key that a rank sets when its reader has ended."""
        return f"{self._name}/end/{rank}"

    def _log(
        self, task: RecordedSteps | FailedMeasurement, group: Group, parts: Sequence[bytes], scratch: Path
    ) -> None:
        """Merge the results of the ranks into a record, log it, and delete the traces that do not stay; on rank 0.

        Args:
            task: The measurement on this rank.
            group: The ranks.
            parts: The results of the ranks that answered, see :meth:`_measure`.
            scratch: An empty folder for temporary files.
        """
        # After the first line of a part comes the analysis; it is empty if the rank has none.
        if isinstance(task, FailedMeasurement) and not any(part.partition(b"\n")[2] for part in parts):
            return  # no rank has the measurement; warnings have said why
        # Merge the results into a record.
        files = []
        for number, part in enumerate(parts):
            (file := scratch / f"part{number}").write_bytes(part)
            files.append(str(file))
        asked = {"step": task.step, "started": self._started, "world": group.world, "limits": self._limits}
        text, error = self._analysis.run(scratch, "merge", json.dumps(asked), *files)
        if error is not None:
            warn_of_step("merge", task.step, f"{NOT_LOGGED}: {error}")
            self._keep_only(self._traces.choose(task.step, None), task.step, group)
            return
        # Decide which traces stay, write the record, delete the other traces, and pass the record on.
        record = json.loads(text)
        kept = self._traces.choose(task.step, record["worst_ns"] or 0)
        record["traces"] = [name for name in record["traces"] if task.step in kept]
        try:
            self._log_file.append(record)
        except OSError as failed:
            warn_of_step("write", task.step, f"is not in {self._log_file.file}: {failed}")
        self._keep_only(kept, task.step, group)
        for messenger in self._messengers:
            messenger.pass_on(record)
        if record["failed"]:
            self._alerts.pass_on(record)

    def _keep_only(self, kept: set[int], step: int, group: Group) -> None:
        """Delete the traces of all ranks on this disk that do not stay, and tell the other ranks which stay.

        Args:
            kept: First steps of the measurements whose traces stay.
            step: First step of the last measurement that is decided.
            group: The ranks.
        """
        if group.store is not None:
            with suppress(RuntimeError):
                group.store.set(f"{self._name}/{_KEPT}", json.dumps([step, sorted(kept)]))
        self._traces.delete(step, kept, group.rank)

    def _delete_unkept(self, group: Group) -> None:
        """Delete the traces of this rank that do not stay: rank 0 decides, but may not see the disk of this rank.

        If rank 0 has stopped deciding, the oldest traces are deleted.
        """
        with suppress(RuntimeError):
            if group.store is not None and (said := _peek(group.store, f"{self._name}/{_KEPT}")):
                last, kept = json.loads(said)
                self._traces.delete(last, {*kept}, group.rank)
        self._traces.delete_undecided(_MOST_SENT, group.rank)


_warned = set[str]()


def warn_once(kind: str, text: str) -> None:
    """Log ``text`` as a warning if this is the first warning of this ``kind`` in the process."""
    if kind not in _warned:
        _warned.add(kind)
        with suppress(Exception):  # of a handler of the program, or because stderr is closed: the training goes on
            _LOG.warning("ddp-prof monitor: %s", text)


def warn_of_step(kind: str, step: int, what: str) -> None:
    """Do :func:`warn_once` for what happened to the measurement at ``step``, and say that no later one is named."""
    warn_once(kind, f"step {step} {what} (said once: later measurements may be missing for the same reason)")


def _not_passed_on(which: str) -> Callable[[int, str], None]:
    """Return a function that warns that a record was not passed on to ``which``, an argument of :class:`.Monitor`."""
    return lambda step, why: warn_of_step(which, step, f"was not passed on to {which}: {why}")


def _warn_of_limits(record: Mapping[str, Any]) -> None:
    _LOG.warning("ddp-prof monitor: step %d: %s", record["step"], "; ".join(record["failed"]))


def _delete_partial(folder: Path, rank: int) -> None:
    """Delete old temporary files of traces: an earlier job was killed while its process of this rank wrote them."""
    for file in folder.glob(f".step*.rank{rank}.json*.partial*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > ANALYSIS_S:
                file.unlink()


def find_group() -> Group:
    """Return rank, number of ranks and store of the process group.

    If there is no process group (any more), rank and number come from the launcher's environment variables, else they
    are 0 and 1; the store is ``None``.
    """
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return Group(int(rank), int(world), None)
    return Group(0, 1, None)


def _peek(store: Any, key: str) -> bytes | None:
    """Return the value of a key in the store, ``None`` if the key does not exist; without waiting.

    ``get`` would wait for the value and keep the training thread from the store meanwhile, and torch 2.1 and 2.2 have
    no ``check``. ``compare_set`` would replace the value :data:`_ABSENT`, which no key has, so it changes nothing; for
    a key that does not exist it returns :data:`_ABSENT`.
    """
    found = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if found == _ABSENT.encode() else found


def _let_gloo_end_first() -> None:
    """Have gloo's threads end their work before a DDP is freed, and with it perhaps its process group.

    To drop what its last work holds, a thread of gloo needs Python's lock, while the thread that frees the group holds
    this lock and waits for gloo's threads: a program whose training ends with its last step can hang (torch 2.13). One
    did so in none of 20 runs without a monitor, and in 5 of 10 with the thread of a reader, which wants the lock, too.
    """
    with suppress(Exception):  # the group is destroyed already
        if not dist.is_initialized() or dist.get_backend() != dist.Backend.GLOO:
            return  # on a GPU, what the list of all objects holds meanwhile might be missed as memory
        _pause_before_new_ddps_are_freed()
        for one in [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]:
            _pause_before_freed(one)


@cache
def _pause_before_new_ddps_are_freed() -> None:
    """Do :func:`_pause_before_freed` with each DDP that is made from now on; do this once per process."""
    original: Any = DistributedDataParallel.__init__

    @stands_for(original)
    def init(made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        _pause_before_freed(made)

    setattr(DistributedDataParallel, "__init__", init)  # noqa: B010  # mypy refuses an assignment


def _pause_before_freed(ddp: Any) -> None:
    """Leave Python's lock to other threads for :data:`TO_END_S` when a DDP is about to be freed, once."""
    if ddp not in _paused:
        _paused.add(ddp)
        weakref.finalize(ddp, time.sleep, TO_END_S).atexit = False


_paused: weakref.WeakSet[Any] = weakref.WeakSet()
"""The DDPs before whose end Python's lock is left to others."""
