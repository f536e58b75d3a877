"""``ddp-prof TRACE``: the first answer about a run, whose figures are those of the other commands."""

import gzip
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_prof.analyze.why_unknown import NOTHING
from tests.analyze.collectives.test_straggler import rank_capture
from tests.command_line import run
from tests.ingest.test_kineto_json import event, write
from tests.ingest.test_nsys_export import MS, known_truth
from tests.night import is_told_by_another, of_which_the_gate_keeps
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, Sync, bucket_steps, write_capture

TRACES = Path(__file__).parents[2] / "traces"
FOREIGN = Path(__file__).parents[3] / "shared" / "traces"
VARIANTS = ("naive", "flat", "overlap", "bucketed_1mb", "torch")
UNET = FOREIGN / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"


def summary(*arguments: object) -> dict[str, Any]:
    result = run("summary", "--format", "json", *arguments)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("trace", [TRACES / "overlap.sqlite", pytest.param(TRACES, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_path_stands_for_its_summary(trace: Path) -> None:
    assert run(trace).stdout == run("summary", trace).stdout
    assert run("--format", "json", trace).stdout == run("summary", "--format", "json", trace).stdout


def test_a_path_that_is_not_there_is_an_error_about_the_path() -> None:
    result = run("nothing.sqlite")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: nothing.sqlite: No such file")


@pytest.mark.parametrize("command", ["summary", "compare", "doctor"])
def test_one_path_of_several_that_is_not_there_ends_the_command(command: str) -> None:
    """A mistyped name was left out with a warning, and exit code 0 said that two runs were compared."""
    result = run(command, TRACES / "naive.sqlite", "nothing.sqlite")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: nothing.sqlite: No such file")


def test_no_argument_shows_the_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout == run("--help").stdout
    assert "Begin with 'ddp-prof TRACE...', or" in result.stdout, "the list of commands names no way to begin"


@pytest.mark.parametrize("variant", ["naive", "overlap", "bucketed_1mb"])
def test_figures_are_those_of_compare(variant: str) -> None:
    trace = TRACES / f"{variant}.sqlite"
    (found,) = summary(trace)["runs"]
    (compared,) = json.loads(run("compare", "--format", "json", trace).stdout)["variants"]
    for name in ("label", "steps", "step_ns", "comm_ns", "overlapped_ns", "exposed_ns", "blocking_ns"):
        assert found[name] == compared[name], name
    for name in ("parts_ns", "nearest_step_ns"):
        assert found[name] == compared[name], name
    for name in ("compute_only", "exposed_memory", "idle"):
        assert found["parts_ns"][name] == compared[f"{name}_ns"]
    assert found["gain_at_most"] == pytest.approx(compared["blocking_ns"] / compared["step_ns"])


def test_its_sentence_opens_overlap() -> None:
    trace = TRACES / "overlap.sqlite"
    (found,) = summary(trace)["runs"]
    assert run("overlap", trace).stdout.splitlines()[0] == found["headline"]
    assert json.loads(run("overlap", "--format", "json", trace).stdout)["headline"] == found["headline"]


def test_the_sentence_bounds_the_gain_by_what_blocks() -> None:
    (found,) = summary(TRACES / "overlap.sqlite")["runs"]
    gain = re.search(
        r"the step stands still for communication for ([\d.]+) ms, so .* at most ([\d.]+) %", found["headline"]
    )
    assert gain, found["headline"]
    assert float(gain[1]) == pytest.approx(found["blocking_ns"] / 1e6, abs=0.05)
    assert float(gain[2]) == pytest.approx(100 * found["blocking_ns"] / found["step_ns"], abs=0.5)


def test_where_few_steps_communicate_figures_are_said_to_be_of_those(tmp_path: Path) -> None:
    """As where gradients are accumulated: the median of all steps is of one that does not communicate."""
    capture, all_steps = known_truth(6), known_truth(6)
    capture.kernels = [one for one in capture.kernels if "nccl" not in one.name or one.start // (100 * MS) % 3 == 2]
    text = run("summary", "--notes", write_capture(tmp_path / "some.sqlite", capture)).stdout
    (found,) = summary(tmp_path / "some.sqlite")["runs"]
    assert "is exposed in the 2 of 6 steps that communicate" in found["headline"]
    assert found["headline"].endswith(" of such a step."), "the typical one of all steps would gain nothing"
    assert "the median of all steps; 100.0 ms in the 2 of 6 steps that communicate: compute alone 44.0 ms" in text
    assert "35.0 ms per step that communicates" in text
    assert "that communicate" not in run("summary", write_capture(tmp_path / "all.sqlite", all_steps)).stdout


@pytest.mark.parametrize("exposed_ms", [(9, 9, 9), (0, 9, 15)])
def test_what_is_overlapped_and_exposed_sums_to_communication(exposed_ms: tuple[int, ...], tmp_path: Path) -> None:
    """Communication and its exposed part are medians; the rest is overlapped, and no third median."""
    capture, lengths_ms = known_truth(3), [15, 20, 15, 20, 15, 20]
    sent = [kernel for kernel in capture.kernels if "nccl" in kernel.name]
    assert [(kernel.end - kernel.start) // MS for kernel in sent] == lengths_ms
    for last, first, exposed in zip(sent[1::2], sent[::2], exposed_ms, strict=True):
        last.end += (exposed - 9) * MS
        first.start += (12 if exposed == 9 else 0) * MS * (exposed_ms[0] == 0)
    text = run("summary", "--notes", write_capture(tmp_path / "x.sqlite", capture)).stdout
    figures = re.search(r"comm +([\d.]+) ms per step: ([\d.]+) ms overlapped, ([\d.]+) ms exposed, ", text)
    assert figures
    comm, overlapped, exposed = map(float, figures.groups())
    assert comm == overlapped + exposed


def test_what_is_exposed_bounds_it_where_blocking_is_not_known(tmp_path: Path) -> None:
    (found,) = summary(write_capture(tmp_path / "x.sqlite", known_truth(4)))["runs"]
    assert found["blocking_ns"] is None
    assert found["gain_at_most"] == pytest.approx(found["exposed_ns"] / found["step_ns"])
    assert "stands still" not in found["headline"]
    assert f"at most {100 * found['gain_at_most']:.1f} % of a typical step" in found["headline"]


@pytest.mark.parametrize(
    ("waits", "blocking", "gain", "said"),
    [
        ("host", 0, 0.6, "the host waits for it"),
        ("host by a stream", 0, 0.6, "the host waits for it"),
        ("stream", 0, 0, "would gain nothing"),
        ("none", None, 0.6, "at most 60 %"),
    ],
)
def test_who_waits_for_a_collective_decides_what_hiding_it_gains(
    tmp_path: Path, waits: str, blocking: int | None, gain: float, said: str
) -> None:
    """No stream stands still: the optimizer is launched when the host has waited, or after the all-reduce anyway.

    us         0         10        60   66
    stream 7   .gggg                      oooooooooooo
    stream 20       AAAAAAAAAAAAAAAAAA
    host       ...wwwwwwwwwwwwwwwwwwww  o

    The host waits for the stream of the all-reduce, or for stream 7, which was made to wait for it, as in a barrier of
    torch. Where no wait for the all-reduce was recorded at all, its result may be needed in a way that no trace holds.
    """
    capture = Capture()
    for at, number in ((100 * US * step, 20 * step) for step in range(5)):
        capture.ranges.append(Range(f"step {at}", at, at + 100 * US, 100))
        capture.kernels += [
            Kernel("gradient", at + 1 * US, at + 5 * US, at, 100, number=number + 1),
            Kernel(NCCL, at + 5 * US, at + 65 * US, at + 300, 100, stream=20, number=number + 4),
            Kernel("optimizer", at + 68 * US, at + 90 * US, at + 66 * US, 100, number=number + 8),
        ]
        capture.syncs += [
            Sync("cudaEventRecord_v3020", at + 100, number + 2, 7, event=5, sync_id=41 + number),
            Sync("cudaStreamWaitEvent_v3020", at + 200, number + 3, 20, event=5, sync_id=41 + number),
        ]
        if waits == "host":
            capture.syncs.append(Sync("cudaStreamSynchronize_v3020", at + 400, number + 5, 20, lasts=65 * US))
        if waits in ("stream", "host by a stream"):
            capture.syncs += [
                Sync("cudaEventRecord_v3020", at + 400, number + 5, 20, event=6, sync_id=42 + number),
                Sync("cudaStreamWaitEvent_v3020", at + 500, number + 6, 7, event=6, sync_id=42 + number),
            ]
        if waits == "host by a stream":
            capture.syncs.append(Sync("cudaStreamSynchronize_v3020", at + 600, number + 7, 7, lasts=65 * US))
    trace = write_capture(tmp_path / "x.sqlite", capture, "2023.4")
    (found,) = summary(trace)["runs"]
    assert found["blocking_ns"] == blocking
    assert found["gain_at_most"] == pytest.approx(gain)
    assert said in found["headline"]
    (rank,) = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"]
    assert rank["dependencies"]["host_waits"] == (5 if waits.startswith("host") else 0)
    assert (rank["dependencies"]["reason"] or "").startswith("no recorded wait is for a collective") == (
        waits == "none"
    )
    text = json.loads(run("collectives", "--format", "json", trace).stdout)["headline"]
    assert text.startswith("Nothing waited for communication") == (waits == "stream")


@pytest.mark.parametrize(
    ("outside", "waiting_steps", "counted", "is_usual"),
    [
        (0, (), 0, False),
        (0, (3,), 1, False),
        (0, (1, 2), 2, False),
        (0, (1, 2, 3), 3, True),
        (1, (2, 3), 2, True),  # in two of four steps, and an all-reduce before these
        (1, (0, 2), 2, False),  # once before them
    ],
)
def test_a_host_that_waits_now_and_then_or_when_the_recording_ends_delays_no_typical_step(
    tmp_path: Path, outside: int, waiting_steps: tuple[int, ...], counted: int, is_usual: bool
) -> None:
    """In each step, a copy waits 10 us for the all-reduce; in some the host waits for it, too, and when all is done.

    us         0         10        20        30        40
    stream 7   .gggggcccccccccc..........kkk
    stream 20  ......AAAAAAAAAAAAAAAAAAAA
    host       ........wwwwwwwwwwwwwwwwww                    the last of these waits is followed by no launch
    """
    capture = bucket_steps(20, 20, 20, 20, 20)
    del capture.ranges[:outside]
    for step in (*waiting_steps, 4):
        at = step * 40 * US
        capture.syncs.append(Sync("cudaStreamSynchronize_v3020", at + 900, 10 * step + 10, 20, lasts=26 * US))
    trace = write_capture(tmp_path / "x.sqlite", capture, "2023.4")
    (found,) = summary(trace)["runs"]
    (rank,) = json.loads(run("overlap", "--format", "json", trace).stdout)["ranks"]
    assert rank["dependencies"]["host_waits"] == counted
    assert ("the host waits for it" in found["headline"]) == is_usual
    assert is_usual or "the step stands still for communication for 10.0 µs, so" in found["headline"]


def test_it_names_two_commands_that_run(tmp_path: Path) -> None:
    trace = write_capture(tmp_path / "with space.sqlite", known_truth(2))
    (found,) = summary(trace)["runs"]
    assert len(found["next"]) == 2
    for command in found["next"]:
        program, name, path = shlex.split(command)
        assert (program, Path(path)) == ("ddp-prof", trace)
        assert run(name, "--help").exit_code == 0


def test_the_next_commands_read_a_file_whose_name_begins_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'ddp-prof doctor -x.sqlite' was named, which ends with 'No such option'."""
    monkeypatch.chdir(tmp_path)
    for files in (["-x.sqlite"], ["-x.rank0.sqlite", "-x.rank1.sqlite"]):
        for file in files:
            write_capture(tmp_path / file, known_truth(2))
        (found,) = summary("--one-run", "--", *files)["runs"]
        for command in found["next"]:
            words = ["bash", "-c", f"printf '%s\\n' {command}"]
            _, _, *read = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
            read = [word for word in read if word != "--one-run"]
            assert [os.path.normpath(file) for file in read] == files
            assert run("overlap", "--one-run", *read).exit_code == 0, "the shell gives files, and no option"


def test_after_a_trace_from_stdin_the_next_commands_read_stdin(tmp_path: Path) -> None:
    """They named the temporary file, which is gone when somebody runs them."""
    trace = write_capture(tmp_path / "x.sqlite", known_truth(2))
    (found,) = json.loads(run("summary", "-", "--format", "json", stdin=trace.read_bytes()).stdout)["runs"]
    assert [command.split()[2:] for command in found["next"]] == [["-"], ["-"]]


def test_several_runs_are_compared_in_one_table() -> None:
    traces = [TRACES / f"{name}.sqlite" for name in ("naive", "overlap")]
    lines = run(*traces).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in ("naive", "overlap")] == ["naive", "overlap"]
    assert [run_["label"] for run_ in summary(*traces)["runs"]] == ["naive", "overlap"]


@pytest.mark.parametrize("variant", of_which_the_gate_keeps(["naive", "overlap"], VARIANTS))
def test_the_parts_are_those_of_one_step_and_sum_to_its_length(variant: str) -> None:
    """Medians of parts need not sum to any step: what they leave of the median step is no idle time."""
    trace = TRACES / f"{variant}.sqlite"
    (found,) = summary(trace)["runs"]
    measured = json.loads(run("overlap", "--format", "json", trace).stdout)
    lengths = [step["length"] for rank in measured["ranks"] for step in rank["steps"]]
    parts = found["parts_ns"]
    assert sum(parts.values()) == found["nearest_step_ns"]
    step = {"ns": found["nearest_step_ns"], **{f"{name}_ns": ns for name, ns in parts.items()}}
    assert any(step.items() <= length.items() for length in lengths)
    spread_ns = sorted(length["ns"] for length in lengths)
    assert spread_ns[len(lengths) // 5] <= found["nearest_step_ns"] <= spread_ns[-len(lengths) // 5]


def printed_parts(text: str) -> tuple[float, list[float]]:
    """The length that stands before the parts of a step, and the parts."""
    line = " ".join(text.partition("step  ")[2].partition("comm  ")[0].split())
    before, _, parts = line.partition(": compute alone ")
    return float(before.split()[-2]), [float(ms) for ms in re.findall(r"([\d.]+) ms \(", f"({parts}")]


@pytest.mark.parametrize("variant", of_which_the_gate_keeps(["naive", "overlap"], VARIANTS))
def test_the_printed_parts_sum_to_the_printed_length(variant: str) -> None:
    length, parts = printed_parts(run("summary", "--notes", TRACES / f"{variant}.sqlite").stdout)
    assert len(parts) == 4, "no copies alone"
    assert sum(parts) == pytest.approx(length, abs=0.3), "each is rounded"


def test_without_launches_a_step_is_not_divided_into_parts_without_communication(tmp_path: Path) -> None:
    """Compute, copies and idle time were listed alone: 83 % of a step, with no word on the rest."""
    capture = bucket_steps(20, 20, 20)
    capture.syncs = []  # their numbers would tell which step launched what
    for kernel in capture.kernels:
        kernel.launch = None
    text = run("summary", "--notes", write_capture(tmp_path / "x.sqlite", capture)).stdout
    assert re.search("step +40.0 µs, the median of all steps\n", text)
    # Of a single step there is no median.
    one = bucket_steps(20)
    one.syncs = []
    for kernel in one.kernels:
        kernel.launch = None
    text = run("summary", "--notes", write_capture(tmp_path / "one.sqlite", one)).stdout
    assert re.search("step +40.0 µs\n", text)


def test_where_some_steps_stand_still_hiding_is_not_said_to_gain_nothing(tmp_path: Path) -> None:
    """That two of five steps stood still stood in brackets behind it."""
    (found,) = summary(write_capture(tmp_path / "x.sqlite", bucket_steps(5, 25, 5, 25, 5)))["runs"]
    assert found["headline"].endswith(
        "nothing waits for it in a typical step: hiding all of it would gain nothing there, but 2 steps of all ranks "
        "stood still for it."
    )


@pytest.mark.nightly  # tests/analyze/test_cost.py has it without a command
@pytest.mark.skipif(not UNET.is_file(), reason="the shared captures are not here")
def test_a_real_job_for_whose_communication_nothing_waits() -> None:
    (found,) = summary(UNET)["runs"]
    assert found["gain_at_most"] == 0
    assert found["step_ns"] == 29_818_778
    assert found["headline"] == (
        "93 % of communication is hidden; 0.37 ms of a 29.8 ms step (1.2 %) is exposed, but nothing waits for it: "
        "hiding all of it would gain nothing. But it slows the compute that hides it: by 1.41 ms per step (4.7 %)."
    )
    assert found["advice"] == "With DistributedDataParallel, gradient_as_bucket_view=True leaves these copies out."


def test_its_sentence_opens_the_timeline_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    trace = TRACES / "overlap.sqlite"
    (found,) = summary(trace)["runs"]
    assert run("timeline", trace, "-o", tmp_path / "x.html").exit_code == 0
    assert f"<h1>overlap: {found['headline']}</h1>" in (tmp_path / "x.html").read_text(encoding="utf-8")
    assert run("report", trace, "-o", tmp_path / "report").exit_code == 0
    assert found["headline"] in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "names",
    [("job.rank1.sqlite", "job.rank11.sqlite"), ("a b0.sqlite", "a b1.sqlite"), ("n0/x0.sqlite", "n1/x1.sqlite")],
)
def test_the_next_commands_name_all_files_of_the_run(names: tuple[str, str], tmp_path: Path) -> None:
    """They named the first one alone, of which nobody can tell waiting from transfer."""
    for name in (*names, "other.sqlite"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_capture(tmp_path / name, known_truth(2))
    (found,) = summary("--one-run", *(tmp_path / name for name in names))["runs"]
    for command in found["next"]:
        words = f"printf '%s\\n' {command.partition('ddp-prof ')[2]}"
        expanded = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True).stdout.splitlines()
        assert expanded[1:] == ["--one-run", *(str(tmp_path / name) for name in names)]


def test_the_next_commands_read_the_run_as_this_one_did(tmp_path: Path) -> None:
    """Without the options, two ranks were two runs, steps were others, or a library's kernels counted as compute."""
    ranks = [write_capture(tmp_path / name, known_truth(2)) for name in ("a.sqlite", "b.sqlite")]
    reading = ("--step-range", r"step_(\d+)|it's \d", "--warmup-steps", "1")
    reading += ("--comm-pattern", "acme .*", "--comm-pattern", "other")
    (found,) = summary(*reading, "--one-run", *ranks)["runs"]
    for command in found["next"]:
        assert shlex.split(command)[2:] == [*reading, "--one-run", *map(str, ranks)]
    told = run("summary", *reading, "--separate", *ranks).stdout
    (more,) = re.findall(r"more about one of them: (.*)", told)
    assert shlex.split(more) == ["ddp-prof", *reading, str(ranks[0])]


_NOBODY = "communicates with nobody, so there is nothing to hide."
_UNKNOWN = "Whether communication is exposed is not known"
_OPTIMIZER = "Optimizer.step#SGD.step"


@pytest.mark.parametrize(
    ("world", "other", "begins", "ends"),
    [
        (1, None, "This process is the only rank of its job", _NOBODY),
        (1, _OPTIMIZER, "This process is the only rank of its job", _NOBODY),
        (None, None, "Nothing in this trace is known to communicate:", "with nobody, and there is nothing to hide."),
        (None, _OPTIMIZER, _UNKNOWN, "tell what a CPU did instead."),  # backward may communicate
        (None, "nccl:all_to_all", _UNKNOWN, "tell what a CPU did instead."),  # on a GPU, which was not recorded
        (4, None, "Nothing in this trace is known to communicate", "although its job has 4 ranks."),
    ],
)
def test_a_process_without_peers_has_nothing_to_hide(
    world: int | None, other: str | None, begins: str, ends: str, tmp_path: Path
) -> None:
    """Of a CPU recorded by torch.profiler it was said that nothing is known."""
    events = [event("cpu_op", "aten::mm", "20", "50"), event("user_annotation", "ProfilerStep#1", "0", "99")]
    events += [event("user_annotation", other, "80", "9")] if other else []
    told = {} if world is None else {"distributedInfo": {"rank": 0, "world_size": world}}
    (found,) = summary(write(tmp_path / "x.json", events, **told))["runs"]
    assert found["headline"].startswith(begins)
    assert found["headline"].endswith(ends)
    assert f"idle time not known: {NOTHING}" in run("kernels", tmp_path / "x.json").stdout
    assert f"The critical path is not known: {NOTHING}" in run("critical", tmp_path / "x.json").stdout
    straggler = run("doctor", tmp_path / "x.json").stdout
    assert ("the traces of at least two ranks" in straggler) == (world != 1)


@pytest.mark.parametrize(("world", "who"), [(None, "Nothing in this trace"), (1, "This process is the only rank of")])
def test_a_gpu_without_peers_has_nothing_to_hide_either(world: int | None, who: str, tmp_path: Path) -> None:
    ranges = [] if world is None else [Range(f"process|rank=0|world={world}|backend=nccl", 0, 99 * US, 100)]
    kernels = [Kernel("gemm", at * US, (at + 5) * US, at * US, 100) for at in (1, 11)]
    trace = write_capture(tmp_path / "x.sqlite", Capture(kernels, ranges))
    (found,) = summary(trace)["runs"]
    assert found["headline"].startswith(who)
    assert "communicates with nobody" in found["headline"]
    assert "0.0 ms per step" not in run(trace).stdout


def test_the_reason_why_there_is_no_figure_is_said_once(tmp_path: Path) -> None:
    """The headline gave the reason, and the notes below it repeated it for each process."""
    capture = Capture(kernels=[Kernel("gemm", 1 * MS, 2 * MS, 0, 100)])
    trace = write_capture(tmp_path / "alone.sqlite", capture)
    for command in ("summary", "overlap"):
        assert run(command, trace).stdout.lower().count("nothing in this trace is known to communicate") == 1
    (found,) = summary(trace)["runs"]
    assert found["not_known"] == ["process 100: no overlap figure: nothing in this trace is known to communicate"]


def test_a_report_gives_the_advice_of_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first page told what is exposed and why, but not what to change."""
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    trace = TRACES / "flat.sqlite"
    assert run("report", trace, "-o", tmp_path / "report").exit_code == 0
    (advice,) = re.findall(r"^change +(.*)", run("summary", "--notes", trace).stdout, re.MULTILINE)
    assert advice.startswith("gradients reduced after backward (at most 34.4 ms per step): Launch reductions while")
    assert advice in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_what_is_known_is_not_listed_as_not_known() -> None:
    assert re.search(
        r"^notes  +2 warm-up steps left out$", run("--notes", TRACES / "overlap.sqlite").stdout, re.MULTILINE
    )


def test_the_answer_comes_first_and_no_path_twice() -> None:
    trace = TRACES / "overlap.sqlite"
    lines = run(trace).stdout.splitlines()
    assert lines[0].split(maxsplit=1)[0] == "gain"
    assert [line.split()[0] for line in lines[-2:]] == ["read", "next"]
    assert sum(str(trace) in line for line in lines) == 1, "the next command"


def captures() -> list[Any]:
    """The files of each run of the repository, or of the shared folder of foreign captures.

    What profile_all.sh captured here is none of them: on a busy machine other figures are told, of other lengths.
    """
    runs: dict[str, list[Path]] = {}
    for file in sorted([*TRACES.rglob("*.sqlite"), *TRACES.rglob("*.json.gz"), *FOREIGN.glob("*.*")]):
        if file.name.endswith((".sqlite", ".json.gz")) and file.parent != TRACES / "local":
            runs.setdefault(re.sub(r"rank\d+", "rank", str(file)), []).append(file)
    night = [pytest.mark.nightly]
    return [
        pytest.param(files, id=files[0].name, marks=night if told or files[0].name in LONG else [])
        for files, told in ((files, is_told_by_another(files[0])) for files in runs.values())
    ]


LONG = {"naive.rank0.json.gz", "kineto_v100_dlrm_rank0of8.json.gz", "kineto_a100_rank0of128.json.gz"}


_ORDER = ("missing", "idle", "gain", "change", "cause", "step", "comm", "notes", "read", "next")


@pytest.mark.parametrize("files", captures())
@pytest.mark.slow
def test_the_answer_about_any_capture_is_twelve_lines(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns; it was up to 43, with the answer on the ninth."""
    piped = run("summary", *files)
    if piped.exit_code:
        pytest.skip("not a capture that can be read")
    (found,) = summary(*files)["runs"]
    named = dict(re.findall(r"^(\w+) +(.*)$", piped.stdout, re.MULTILINE))
    assert len(named) == len(piped.stdout.splitlines()), "a pipe has one line for each name"
    assert sorted(named.keys() - {"cause"}, key=_ORDER.index) == [name for name in named if name != "cause"]
    assert next(iter(named)) in ("missing", "idle", "gain")
    if found["gain_at_most"]:
        assert re.search(
            rf"at most {100 * found['gain_at_most']:.{int(found['gain_at_most'] < 0.0995)}f} %", named["gain"]
        )
    for name in ("comm", "exposed", "step"):
        if "comm" in named and found[f"{name}_ns"]:
            printed = re.findall(r"([\d.,]+) ([mµ]s)", piped.stdout)
            numbers = [float(ms.replace(",", "")) * (1e6 if unit == "ms" else 1e3) for ms, unit in printed]
            assert any(number == pytest.approx(found[f"{name}_ns"], rel=0.006) for number in numbers), name
    whole = run("summary", "--notes", *files).stdout
    notes = re.findall(r"^(?:notes)? +(.*)$", whole, re.MULTILINE)
    assert re.findall(r"(\d+) notes?: --notes", named["read"]) == ([str(len(notes))] if notes else [])
    assert set(notes) <= set(found["not_known"]), "folded, not lost"
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("summary", *files).stdout.splitlines()
    assert len(lines) <= 12
    assert all(len(line) <= 80 for line in lines if not line.startswith("next "))
    assert " ".join(" ".join(lines).split()) == " ".join(piped.stdout.split()), "wrapped, and nothing else"
    assert sum(str(files[0].parent) in line for line in lines) <= 1, "no path twice"


def test_of_several_runs_each_note_is_told_once_with_their_labels(tmp_path: Path) -> None:
    """A folder of 200 files told one note 200 times."""
    traces = [TRACES / f"{name}.sqlite" for name in ("naive", "overlap")]
    assert re.findall(".*warm-up.*", run("summary", "--notes", *traces).stdout) == ["note: 2 warm-up steps left out"]
    other = write_capture(tmp_path / "other.sqlite", known_truth(2))
    told = re.findall(".*warm-up.*", run("summary", "--notes", *traces, other).stdout)
    assert told == ["note: naive, overlap: 2 warm-up steps left out"]
    assert "warm-up" not in run("summary", *traces).stdout


def test_that_a_gpu_is_shared_is_told_once_where_not_all_files_tell_it(tmp_path: Path) -> None:
    """It stood there for the run, and again with the names of the files."""
    files = [tmp_path / f"bucketed_10mb.rank{number}.json.gz" for number in range(3)]
    for number, file in enumerate(files):
        document = json.loads(gzip.decompress((TRACES / "h200/gloo" / files[min(number, 1)].name).read_bytes()))
        document["distributedInfo"] |= {"rank": number, "world_size": 3}
        if number == 2:  # as if the profiler had lost kernels in each step
            events = document["traceEvents"]
            document["traceEvents"] = [
                event for event in events if not re.search("reduce|gloo", str(event.get("name")))
            ]
        file.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert run("summary", *files).stdout.count("shared GPU") == 1
    assert "bucketed_10mb.rank0.json.gz and 1 more: shared GPU" in run("summary", "--notes", *files).stdout


def test_idle_time_is_told_first_where_it_is_the_larger_loss(tmp_path: Path) -> None:
    """Of a step that idles for 76 % the first sentence spoke of the 5 % in which communication was exposed."""
    trace = write_capture(tmp_path / "x.sqlite", bucket_steps(14, 14, 14))
    first, second, *_ = run(trace).stdout.splitlines()
    assert first.startswith("idle  ")
    sentence = "The device is idle for 48 % of a typical step, longer than communication is exposed"
    assert first.endswith(f"  {sentence}: the host launches work too late.")
    assert second.split()[0] == "gain"
    (found,) = summary(trace)["runs"]
    assert found["idle"] in run("--notes", trace).stdout.splitlines()[0]
    (found,) = summary(TRACES / "overlap.sqlite")["runs"]
    assert found["idle"] is None


def test_a_timeline_tells_why_the_device_is_idle_as_the_summary_does(tmp_path: Path) -> None:
    """It told 'ddp-prof kernels shows what it waits for', also where the doctor had found the reason."""
    one = write_capture(tmp_path / "one.sqlite", bucket_steps(14, 14, 14))
    ranks = [write_capture(tmp_path / f"job.rank{rank}.sqlite", rank_capture(rank)) for rank in (0, 1)]
    for traces, why in (([one], "the host launches work too late"), (ranks, "mostly from the last work of a step to")):
        (found,) = summary(*traces)["runs"]
        assert why in found["idle"]
        assert run("timeline", *traces, "-o", tmp_path / "page.html").exit_code == 0
        assert f": {found['idle']} " in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_where_the_host_was_on_a_cpu_is_told_only_where_it_is_known(tmp_path: Path) -> None:
    """'What no phase holds' was said to take the time, 86 % of which lay in backward, between torch's operators.

    ms          0    1    2    3    4    5    6    7    8    9
    forward     ffffff
    backward          bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
    operators   oooooo...............................oooo
    gloo                                                  gg
    """
    events = []
    for step in range(4):
        at = 12_000 * step
        ranges = (
            (f"step {step}", 0, 10_000),
            ("forward", 0, 1_000),
            ("backward", 1_100, 8_900),
            ("gloo:all_reduce", 9_000, 500),
        )
        events += [event("user_annotation", name, str(at + start), str(length)) for name, start, length in ranges]
        events += [
            event("cpu_op", "aten::mm", str(at + start), str(length)) for start, length in ((0, 1_000), (8_000, 900))
        ]
    (found,) = summary(write(tmp_path / "x.json", events))["runs"]
    assert found["idle"].endswith("than communication is exposed: ddp-prof kernels shows where the host was.")
    (starved,) = summary(TRACES.parent / "tests/analyze/doctor/captures/starved.sqlite")["runs"]
    assert "such as loading data, takes that time (ddp-prof doctor)" in starved["idle"], "the doctor found that"


def test_a_reason_of_idle_time_explains_at_least_half_of_it(tmp_path: Path) -> None:
    """'The host launches work too late' was said of idle time of which more than half was launched, and had not begun.

    ms       0  1  2  3  4  5  6  7  8  9  10
    device   k  .  .  .  .  .  k  .  .  .  A
    launch   kk                            A
    """
    capture = Capture()
    for step in range(3):
        at, first = step * 12 * MS, 3 * step
        capture.ranges.append(Range(f"step {step}", at, at + 11 * MS, 100))
        capture.kernels += [
            Kernel("gemm", at + US, at + MS, at, 100, number=first + 1),
            Kernel("gemm", at + 6 * MS, at + 7 * MS, at + MS, 100, number=first + 2),
            Kernel(NCCL, at + 10 * MS, at + 11 * MS, at + 10 * MS - US, 100, number=first + 3),
        ]
    (found,) = summary(write_capture(tmp_path / "x.sqlite", capture))["runs"]
    assert found["idle"].endswith("than communication is exposed: ddp-prof kernels shows what it waits for.")
    assert "launch-bound host" in run("doctor", tmp_path / "x.sqlite").stdout, "which is a quarter of the step"


def test_advice_that_follows_from_the_cause_is_not_told_without_it(tmp_path: Path) -> None:
    """Where idle time is told first, the cause is not: "Its input ended after its launch" was said of nothing."""
    work = (("bwd_gemm", 20, 600, 7, 10, 101), ("copy", 600, 750, 20, 300, 101), ("adam", 800, 900, 7, 510, 100))
    capture = Capture(threads={(100, 101): "pt_autograd_0"})
    for begin in range(1000, 6000, 1000):
        capture.ranges.append(Range(f"step {begin // 1000}", begin * US, (begin + 1000) * US, 100))
        for name, start, end, stream, launch, thread in work:
            at = ((begin + time) * US for time in (start, end, launch))
            kind = "memcpy" if name == "copy" else "kernel"
            capture.kernels.append(Kernel(name, *at, thread, stream=stream, kind=kind, copy_kind=10))
    said = run("summary", write_capture(tmp_path / "x.sqlite", capture)).stdout
    assert said.startswith("idle  ")
    assert "Its input" not in said
    assert "Its input" in run("summary", "--notes", tmp_path / "x.sqlite").stdout


def test_advice_that_gains_little_does_not_stand_for_the_cause_of_most_exposed_time() -> None:
    """Copies out of buckets, 31 µs of a step of 255 ms, were the one change; most of 158 ms exposed is a queue."""
    capture = TRACES / "h200" / "nccl" / "torch.sqlite"
    (finding,) = json.loads(run("doctor", capture, "--format", "json").stdout)["findings"]
    assert (finding["rule"], finding["gain_high_ns"] < 0.01 * 255e6) == ("copies out of buckets", True)
    (change,) = [line for line in run(capture).stdout.splitlines() if line.startswith("change")]
    assert change.endswith("fewer bytes or a faster link would help. 1 finding below 1 % of a step.")


def test_advice_that_gains_more_comes_before_the_cause() -> None:
    """A late rank costs 323 ms of a step of 1,151 ms."""
    said = run(TRACES.parent / "tests/analyze/doctor/captures/slow_rank.sqlite").stdout.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["gain", "change", "cause"]
    assert said[1].split(None, 1)[1].startswith("straggler on rank 1")


@pytest.mark.parametrize(("slow", "is_told"), [(1, False), (4, True)])
def test_slower_first_steps_are_told_beside_one_that_stands_out_if_the_median_mixes_both(
    slow: int, is_told: bool, tmp_path: Path
) -> None:
    capture, at = Capture(), 0
    for step in range(8):
        length, exposed = (8 if step < slow else 3) * MS, 2 * MS if step == 0 else 100 * US
        capture.ranges.append(Range(f"step {step}", at, at + length, 100))
        capture.kernels += [
            Kernel("gemm", at, at + length - exposed, at, 100),
            Kernel(NCCL, at + length - exposed, at + length, at + 1, 100, stream=20),
        ]
        at += length
    said = run(write_capture(tmp_path / "x.sqlite", capture)).stdout.splitlines()
    (notes,) = [line for line in said if line.startswith("notes")]
    assert notes.split()[1:4] == ["step", "0", "alone"]
    assert ("the first 4 of 8 steps take 8.00 ms, the others 3.00 ms" in notes) == is_told
