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

from ddp_prof.capture.arrived import find_loss
from ddp_prof.capture.command_line import CAPTURE_RANGE, Recording, profile_command
from ddp_prof.capture.plan import CHECKOUT, Plan, UsageError, clean_environment, digest_plan, installed, read_plan
from ddp_prof.capture.processes import LOG, NOT_DONE, find_reason, process_namespace, run, scratch_folder
from ddp_prof.errors import DdpProfError, WorkloadError
from ddp_prof.ingest.nsys.program import Nsys, find_nsys
from ddp_prof.printable import printable
from ddp_prof.train.launch import Stopped, stoppable

INSTALLER = CHECKOUT / "scripts" / "install_nsys.sh"
"""Finds or fetches an nsys; not there where only the package is installed."""
SUFFIXES = ("run.json", "nsys-rep", "sqlite", "json.gz")


def main() -> int:
    """Run from the command line; returns the exit code."""
    try:
        with stoppable():
            sys.stdout.write(capture(sys.argv[1:], os.environ) + "\n")
    except DdpProfError as error:
        _say(printable(str(error)))
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        _say(printable(f"{error.filename}: {error.strerror}: set TRACES_DIR to a folder of yours, with room"))
        return 1
    except Stopped as stop:
        return 128 + stop.number
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"profile_variant: {text}\n")
    sys.stderr.flush()


def capture(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Capture a variant unless it is there; returns what came of it, in a line.

    Raises:
        UsageError: It cannot be captured as asked for.
        DdpProfError: It failed; what was there before is unchanged.
        Stopped: By a signal; what was started is gone.
    """
    began = time.monotonic()
    plan = read_plan(argv, environ)
    plan.traces.mkdir(parents=True, exist_ok=True)
    nsys, profiler = _choose_profiler(environ)
    key = digest_plan(plan, profiler)
    if _is_done(plan, nsys, profiler, key):
        return f"{plan.name}: up to date"
    with _alone(plan), scratch_folder() as scratch:
        if _is_done(plan, nsys, profiler, key):  # by whom this has waited for
            return f"{plan.name}: up to date"
        _check_torch_sees_gpus(plan)
        with _partial_folder(plan) as partial:
            _record(plan, nsys, profiler, key, scratch, partial)
            if nsys is not None:
                _make_export(plan, nsys, scratch, partial)
                _check_arrival(plan, nsys, partial)
            _publish(plan, partial)
    return f"{plan.name}: captured by {profiler or 'no profiler'} in {time.monotonic() - began:.0f} s"


def _choose_profiler(environ: Mapping[str, str]) -> tuple[Nsys | None, str | None]:
    """The nsys that records, and what run.json says of the recorder, as nsys 2022.4.2.1 or torch.profiler 2.13.0."""
    wanted = environ.get("PROFILER") or "auto"
    if wanted not in {"auto", "nsys", "kineto", "none"}:
        raise UsageError(f"PROFILER={wanted}: there are nsys, kineto, none and auto")
    if wanted == "none":
        return None, None
    if wanted != "kineto":
        nsys = find_nsys({**environ, "NSYS": path}) if (path := _ask_installer(environ)) else None
        if nsys is not None:
            return nsys, f"nsys {nsys.version}"
        if wanted == "nsys":
            raise SystemExit(1)  # why was said
    _say(f"{'PROFILER=kineto' if wanted == 'kineto' else 'no nsys'}: torch.profiler records instead")
    return None, f"torch.profiler {installed('torch')}"


def _ask_installer(environ: Mapping[str, str]) -> str | None:
    """The path of an nsys, fetched where there is none; it says on stderr itself what it does."""
    if not INSTALLER.is_file():
        if (found := find_nsys(environ)) is None:
            _say("no nsys on PATH nor in the usual places: install Nsight Systems, or set NSYS=/path/to/nsys")
        return found.path if found else None
    with subprocess.Popen([str(INSTALLER)], env=environ, stdout=subprocess.PIPE, text=True) as installer:  # noqa: S603
        try:
            said, _ = installer.communicate()
        except BaseException:
            installer.terminate()  # it tidies up
            raise
    return said.strip() if installer.returncode == 0 else None


def _is_done(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str) -> bool:
    """Whether a finished capture is unchanged; of a part nobody knows the others."""
    if plan.is_part or plan.is_set("FORCE"):
        return False
    with suppress(OSError, ValueError, AttributeError):
        made_from = json.loads((plan.traces / f"{plan.name}.run.json").read_bytes()).get("key")
        suffixes = [".nsys-rep", ".sqlite"] if nsys else [".rank0.json.gz"] if profiler else []
        sizes = [(plan.traces / f"{plan.name}{suffix}").stat().st_size for suffix in suffixes]
        return made_from == key and all(sizes)
    return False


@contextmanager
def _alone(plan: Plan) -> Iterator[None]:
    """Hold the folder: two captures at once would measure each other. Parts of a capture are made at the same time."""
    if plan.is_part:
        yield
        return
    descriptor = os.open(plan.traces, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another capture into {plan.traces}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in plan.traces.glob(".*.partial"):  # of captures that were killed
            if not re.search(r"\.(rank|node)[0-9]+\.partial$", left.name):  # others may be making these
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _partial_folder(plan: Plan) -> Iterator[Path]:
    """Files are made here and moved when all are there."""
    partial = plan.traces / f".{plan.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_torch_sees_gpus(plan: Plan) -> None:
    """On a GPU machine whose torch cannot use it a CUDA capture would stay empty."""
    question = "import sys, torch; sys.exit(torch.cuda.device_count() == 0)"
    if not plan.on_gpus:
        return
    asked = subprocess.run([plan.python, "-c", question], env=plan.environ, capture_output=True, check=False)  # noqa: S603
    if asked.returncode:
        way_out = "install a CUDA build of torch, or say DEVICE=cpu"
        raise WorkloadError(f"there is a GPU, but the torch of {plan.python} cannot use it: {way_out}")


def _record(plan: Plan, nsys: Nsys | None, profiler: str | None, key: str, scratch: Path, partial: Path) -> None:
    run_json = partial / f"{plan.base}.run.json"
    program = [plan.python, *plan.torchrun, "-m", "ddp_prof.train", *plan.workload]
    program += ["--run-json", str(run_json), "--key", key, *(["--profiler", profiler] if profiler else [])]
    if nsys is not None:
        capture_range = plan.environ.get("CAPTURE_RANGE") or CAPTURE_RANGE
        recording = Recording(
            partial / plan.name,
            traces_cuda=plan.on_gpus,
            capture_range=None if capture_range == "none" else capture_range,
            # One process per node can.
            samples_gpus=plan.is_set("GPU_METRICS") and plan.environ.get("LOCAL_RANK", "0") == "0",
            flags=plan.nsys_flags,
        )
        program = profile_command(nsys, recording, program)
    elif profiler:
        program += ["--kineto", str(partial / f"{plan.base}.json.gz")]
    with _shown(scratch / LOG, is_wanted=plan.is_set("VERBOSE")):
        environ = {**clean_environment(plan), "HOME": str(scratch)}
        namespace = _namespace(plan) if nsys else []
        code = run(program, environ, scratch, namespace=namespace, limit_s=plan.limit_s)
    reason = find_reason(scratch, code, profiler or "the launcher")
    if plan.limit_s is not None and code == NOT_DONE:
        raise WorkloadError(f"{plan.name}: the run was not done after {plan.limit_s} s: {reason}")
    # Rank 0 writes run.json, on its node; it tells better than the exit code, which nsys has its own of.
    if not run_json.is_file() and not (plan.is_part and code == 0):
        hint = "[all that was said: VERBOSE=1]"
        raise WorkloadError(f"{plan.name}: the workload failed (exit code {code}): {reason} {hint}")


def _namespace(plan: Plan) -> list[str]:
    """Ranks that a launcher started must see each other, as CUDA's multi-process service must see its clients."""
    pipe = Path(plan.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control")  # noqa: S108
    if not plan.is_set("ISOLATE", "1") or plan.rank is not None or (plan.on_gpus and pipe.exists()):
        return []
    words = process_namespace()
    if not words:
        _say("no process namespace here, so the report holds the environments of other processes, too")
    return words


@contextmanager
def _shown(log: Path, *, is_wanted: bool) -> Iterator[None]:
    """What nsys and the workload say, as they say it."""
    if not is_wanted:
        yield
        return
    log.touch()
    with subprocess.Popen(["tail", "-f", str(log)], stdout=sys.stderr) as tail:  # noqa: S603, S607
        try:
            yield
        finally:
            time.sleep(0.2)  # for its last lines
            tail.terminate()


def _make_export(plan: Plan, nsys: Nsys, scratch: Path, partial: Path) -> None:
    report, target = (partial / f"{plan.name}{suffix}" for suffix in (".nsys-rep", ".sqlite"))
    recorded = partial / f"{plan.name}.qdstrm"
    if recorded.is_file() and not report.is_file():  # an nsys without its importer leaves what it recorded as it is
        importer = plan.environ.get("QDSTRM_IMPORTER")
        if importer is None:
            shutil.move(recorded, plan.traces / recorded.name)
            way_out = "give the one of the same version, QDSTRM_IMPORTER=/path/to/QdstrmImporter, or another nsys"
            kept = plan.traces / recorded.name
            raise WorkloadError(f"{plan.name}: nsys {nsys.version} recorded {kept} but has no importer here: {way_out}")
        with (scratch / LOG).open("ab") as log:
            subprocess.run([importer, "-i", str(recorded)], stdout=log, stderr=log, check=False)  # noqa: S603
        if report.is_file():
            recorded.unlink()
    if not report.is_file():
        hint = "; try CAPTURE_RANGE=none, or ISOLATE=0" if plan.on_gpus else ""
        raise WorkloadError(f"{plan.name}: nsys wrote no report: {find_reason(scratch, 0, 'nsys')}{hint}")
    said = nsys.export(report, target)
    if not target.is_file():
        raise WorkloadError(f"{plan.name}: nsys export failed: {' '.join(said.split()[-20:])[:300]}")


def _check_arrival(plan: Plan, nsys: Nsys, partial: Path) -> None:
    """Which ranks torchrun gave this of several nodes is its own affair."""
    expected = [plan.rank] if plan.rank is not None else [] if plan.is_part else range(plan.ranks)
    loss = find_loss(partial / f"{plan.name}.sqlite", expected, on_gpus=plan.on_gpus)
    if loss is None:
        return
    if loss.startswith("no range"):
        nvtx = f"nvtx {installed('nvtx')}"
        way_out = f"nsys up to 2023.4 gets none from nvtx 0.2.12 and later (here: nsys {nsys.version}, {nvtx}): "
        way_out += "run scripts/env.sh, or use a newer nsys"
        raise WorkloadError(f"{plan.name}: {loss}. {way_out}")
    hint = ", with CAPTURE_RANGE=none, another nsys, or PROFILER=kineto" if plan.on_gpus else ""
    raise WorkloadError(f"{plan.name}: {loss}: capture again{hint}")


def _publish(plan: Plan, partial: Path) -> None:
    """The files take their places; run.json last: where it is, the capture is complete."""
    _remove_old(plan)
    for file in sorted(partial.iterdir(), key=lambda file: file.name.endswith(".run.json")):
        file.chmod(0o644)
        file.replace(plan.traces / file.name)


def _remove_old(plan: Plan) -> None:
    """What an earlier capture left: all of it, or of a part the same part and what cannot belong to this run."""
    suffixes = "|".join(map(re.escape, SUFFIXES))
    for file in plan.traces.iterdir():
        found = re.fullmatch(rf"{re.escape(plan.base)}(?:\.(rank|node)([0-9]+))?\.({suffixes})", file.name)
        if found is None:
            continue
        kind, number, suffix = found.groups()
        if not plan.is_part or file.name == f"{plan.name}.{suffix}":
            is_old = True
        elif kind is None:
            is_old = suffix != "run.json"
        else:  # nodes and ranks do not mix; of the ranks of this run each removes its own
            is_old = plan.rank is None if kind == "rank" else plan.rank is not None
            is_old |= kind == "rank" and int(number) >= plan.ranks
        if is_old:
            file.unlink(missing_ok=True)
