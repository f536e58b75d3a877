"""Captures one variant, by the settings of ``scripts/profile_variant.sh``, which describes them and calls this."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_prof.capture.job import choose_nsys, export_reports, find_losses, installed
from ddp_prof.capture.plan import Plan, UsageError, clean_environment, digest_plan, read_plan
from ddp_prof.capture.processes import NOT_DONE, find_reason, process_namespace, run, scratch_folder
from ddp_prof.errors import DdpProfError, WorkloadError
from ddp_prof.ingest.nsys_program import Nsys
from ddp_prof.printable import printable
from ddp_prof.train.launch import Stopped, stop_on_signals


def main() -> int:
    """Run from the command line; returns the exit code."""
    try:
        with stop_on_signals():
            if sys.argv[1:] == ["--nsys"]:  # the one that would record; it is fetched where there is none
                nsys, _ = choose_nsys("nsys", os.environ, may_fetch=True)
                sys.stdout.write(f"{nsys.path if nsys else ''}\n")
            else:
                sys.stdout.write(capture(sys.argv[1:], os.environ) + "\n")
    except (DdpProfError, OSError) as error:
        say(describe_failure(error))
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stop:
        return 128 + stop.number
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"profile_variant: {text}\n")
    sys.stderr.flush()


def describe_failure(error: Exception) -> str:
    if isinstance(error, OSError):
        return printable(f"{error.filename}: {error.strerror}: set TRACES_DIR to a folder of yours, with room")
    return printable(str(error))


def capture(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Capture a variant unless the capture exists; returns one line about the result.

    Raises:
        UsageError: It cannot be captured as asked for.
        DdpProfError: It failed; what was there before is unchanged.
        OSError: The folder cannot be written.
        Stopped: By a signal; what was started is gone.
    """
    began = time.monotonic()
    plan = read_plan(argv, environ)
    plan.traces.mkdir(parents=True, exist_ok=True)
    nsys, profiler = _choose_profiler(environ)
    key = digest_plan(plan, profiler)
    if _is_done(plan, nsys, profiler, key):
        return f"{plan.name}: up to date"
    with _lock_output(plan), scratch_folder() as scratch, _partial_folder(plan) as partial:
        if _is_done(plan, nsys, profiler, key):  # by whom this has waited for
            return f"{plan.name}: up to date"
        try:
            _check_torch_sees_gpus(plan)
            _record(plan, nsys, profiler, key, scratch, partial)
        except WorkloadError as error:
            raise WorkloadError(f"{plan.name}: {error}") from error
    return f"{plan.name}: captured by {profiler or 'no profiler'} in {time.monotonic() - began:.0f} s"


def _choose_profiler(environ: Mapping[str, str]) -> tuple[Nsys | None, str | None]:
    """The nsys that records, and what run.json says of the recorder, as nsys 2022.4.2.1 or torch.profiler 2.13.0."""
    wanted = environ.get("PROFILER") or "auto"
    if wanted not in {"auto", "nsys", "kineto", "none"}:
        raise UsageError(f"PROFILER={wanted}: there are nsys, kineto, none and auto")
    if wanted == "none":
        return None, None
    nsys, why = choose_nsys("torch" if wanted == "kineto" else wanted, environ, may_fetch=True)
    if nsys is not None:
        return nsys, f"nsys {nsys.version}"
    if wanted == "auto":
        say(f"torch.profiler records, {why}")
    return None, f"torch.profiler {installed('torch')}"


def _is_done(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str) -> bool:
    """Whether a finished capture is unchanged; of a part nobody knows the others."""
    if plan.part or plan.is_set("FORCE"):
        return False
    with suppress(OSError, ValueError, AttributeError):
        made_from = json.loads((plan.traces / f"{plan.name}.run.json").read_bytes()).get("key")
        suffixes = [".nsys-rep", ".sqlite"] if nsys else [".rank0.json.gz"] if profiler else []
        sizes = [(plan.traces / f"{plan.name}{suffix}").stat().st_size for suffix in suffixes]
        return made_from == key and all(sizes)
    return False


@contextmanager
def _lock_output(plan: Plan) -> Iterator[None]:
    """Hold the folder: two captures at once would measure each other. Parts of a capture are made at the same time."""
    if plan.part:
        yield
        return
    descriptor = os.open(plan.traces, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another capture into {plan.traces}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in plan.traces.glob(".*.partial"):  # of captures that were killed
            if not re.search(r"\.(rank|node)[0-9]+\.partial$", left.name):  # others may be making these
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _partial_folder(plan: Plan) -> Iterator[Path]:
    """Files are made here and moved when all are there; what nsys could not make a report of is kept in any case."""
    partial = plan.traces / f".{plan.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        for recorded in partial.glob("*.qdstrm"):
            recorded.replace(plan.traces / recorded.name)
        shutil.rmtree(partial, ignore_errors=True)


def _check_torch_sees_gpus(plan: Plan) -> None:
    """On a GPU machine whose torch cannot use it a CUDA capture would stay empty."""
    question = "import sys, torch; sys.exit(torch.cuda.device_count() == 0)"
    if not plan.on_gpus:
        return
    asked = subprocess.run([plan.python, "-c", question], env=plan.environ, capture_output=True, check=False)  # noqa: S603
    if asked.returncode:
        hint = "install a CUDA build of torch, or say DEVICE=cpu"
        raise WorkloadError(f"there is a GPU, but the torch of {plan.python} cannot use it: {hint}")


def _record(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str, scratch: Path, partial: Path) -> None:
    """Make the files, and put them in their places when all has arrived; run.json last: where it is, all is there."""
    job = plan.job(partial, nsys, profiler, key)
    log = scratch / "log"
    log.touch()
    # nsys opens sockets in TMPDIR, whose paths must be short.
    environ = {**clean_environment(plan), "HOME": str(scratch), "TMPDIR": str(scratch)}
    with _follow_log(log, is_wanted=plan.is_set("VERBOSE")):
        namespace = _namespace(plan) if nsys else []
        code = run(job.command, environ, scratch, log=log, namespace=namespace, limit_s=plan.limit_s)
    reason = find_reason(log, code, profiler or "the launcher")
    if plan.limit_s is not None and code == NOT_DONE:
        raise WorkloadError(f"the run was not done after {plan.limit_s} s: {reason}")
    # Rank 0 writes run.json, on its node; it tells better than the exit code, which nsys has its own of.
    if not (partial / f"{plan.base}.run.json").is_file() and not (plan.part and code == 0):
        raise WorkloadError(f"the workload failed (exit code {code}): {reason} [all that was said: VERBOSE=1]")
    if profiler:
        hint = "; try CAPTURE_RANGE=none, or ISOLATE=0" if plan.on_gpus else ""
        export_reports(job, plan.environ, find_reason(log, 0, "nsys") + hint)
        for loss in find_losses(job):
            hint = ", with CAPTURE_RANGE=none, another nsys, or PROFILER=kineto" if plan.on_gpus and nsys else ""
            raise WorkloadError(f"{loss}: capture again{hint}")
    job.remove_old(plan.traces, plan.ranks)
    for file in sorted(partial.iterdir(), key=lambda file: file.name.endswith(".run.json")):
        file.chmod(0o644)
        file.replace(plan.traces / file.name)


def _namespace(plan: Plan) -> list[str]:
    """Prefix for a process namespace; ranks of a launcher, and CUDA's multi-process service, need the common one."""
    pipe = Path(plan.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")  # noqa: S108
    if not plan.is_set("ISOLATE", "1") or plan.place or (plan.on_gpus and pipe.exists()):
        return []
    words = process_namespace()
    if not words:
        say("no process namespace here, so the report holds the environments of other processes, too")
    return words


@contextmanager
def _follow_log(log: Path, *, is_wanted: bool) -> Iterator[None]:
    """Print the output of nsys and the workload while it is written."""
    if not is_wanted:
        yield
        return
    with subprocess.Popen(["tail", "-f", str(log)], stdout=sys.stderr) as tail:  # noqa: S603, S607
        try:
            yield
        finally:
            time.sleep(0.2)  # for its last lines
            tail.terminate()
