"""Names of files that differ in a rank number only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from ddp_prof.runs import group_rank_files, load_runs
from ddp_prof.runs.report import LoadOptions
from tests.command_line import run as run_command_line
from tests.ingest.test_kineto_json import event, write
from tests.ingest.test_nsys_export import known_truth
from tests.nsys_factory import NCCL, US, Capture, Kernel, Range, write_capture


@pytest.mark.parametrize(
    "names",
    [
        ["job.rank0.sqlite", "job.rank1.sqlite"],
        ["rank3_trace.json.gz", "rank7_trace.json.gz"],
        ["a_r0of8.nsys-rep", "a_r3of8.nsys-rep"],
        ["report.0.sqlite", "report.1.sqlite", "report.2.sqlite"],
        ["slurm_procid0.sqlite", "slurm_procid1.sqlite"],
        ["profile_7_node_0_rank_0_on_ip-10-1-0-4.nsys-rep", "profile_7_node_1_rank_8_on_ip-10-1-0-5.nsys-rep"],
        ["node0.rank0.sqlite", "node1.rank1.sqlite"],
        ["node_0.sqlite", "node_1.sqlite"],
        ["trace_0.json.gz", "trace_1.json.gz"],
        ["trace_rank_3_step_10.json", "trace_rank_4_step_10.json"],
        ["nsys_rank03_2024-05-01.sqlite", "nsys_rank04_2024-05-01.sqlite"],
        ["gpu0.sqlite", "gpu1.sqlite"],
        ["run_rank0.sqlite", "run_rank1.sqlite"],
        ["profile_41_8412_node0_rank0.nsys-rep", "profile_42_8412_node0_rank1.nsys-rep"],  # NeMo's, with a process id
        ["profile_141_8412_node0_rank0.nsys-rep", "profile_97_8412_node1_rank128.nsys-rep"],
        ["rank0.1700000000000.pt.trace.json.gz", "rank1.1700000000007.pt.trace.json.gz"],
        ["rank0_2024-05-01_10-15-00.json", "rank1_2024-05-01_10-15-01.json"],
        ["profile_job_99_host_gpu01_rank_0.nsys-rep", "profile_job_99_host_gpu02_rank_1.nsys-rep"],
        ["gpu01_rank0.sqlite", "gpu02_rank1.sqlite"],  # of machines
        ["x_0of4.sqlite", "x_1of4.sqlite", "x_2of4.sqlite"],
        [f"profile_99_{rank // 2}_{rank}.nsys-rep" for rank in range(4)],  # NVIDIA's recipes: job, node and rank
    ],
)
def test_ranks_are_found_by_their_numbers(names: list[str]) -> None:
    files = [Path("folder", name) for name in names]
    assert group_rank_files(files[::-1]) == [files]


@pytest.mark.parametrize(
    "names",
    [
        ["run_1.sqlite", "run_2.sqlite"],  # numbers that do not count from 0 may be of runs
        ["report.3.sqlite", "report.5.sqlite"],
        ["epoch_0.json.gz", "epoch_1.json.gz"],
        ["trace.step.0.json", "trace.step.1.json"],
        ["run-0.sqlite", "run-1.sqlite"],
        ["gpu4.sqlite", "gpu8.sqlite"],  # as many GPUs, more likely than two ranks of eight
        ["r1_25mb.sqlite", "r2_25mb.sqlite"],
        ["proc1234.nsys-rep", "proc1235.nsys-rep"],  # process ids
        ["node01_12345.1700000000000.pt.trace.json.gz", "node01_12346.1700000000100.pt.trace.json.gz"],
        ["report_2024-05-01.sqlite", "report_2024-05-02.sqlite"],
        ["nsys_rank03_2024-05-01.sqlite", "nsys_rank03_2024-05-02.sqlite"],
        ["report_gpu01_4321.nsys-rep", "report_gpu02_4322.nsys-rep"],
        ["bucketed_1mb.sqlite", "bucketed_10mb.sqlite"],
        ["before.rank0.sqlite", "after.rank1.sqlite"],
        ["25mb_rank0.sqlite", "50mb_rank1.sqlite"],
        ["h100_rank0.sqlite", "a100_rank1.sqlite"],
        ["gpu1_rank0.sqlite", "gpu2_rank0.sqlite"],
        ["part_1of2.sqlite", "part_2of2.sqlite"],
        ["x_0of2.sqlite", "x_1of4.sqlite"],
        ["rank0.41.sqlite", "rank1.42.sqlite", "rank0.51.sqlite", "rank1.52.sqlite"],  # which belong together?
        ["41.0.sqlite", "42.1.sqlite"],
        ["x_0_0.sqlite", "x_1_1.sqlite", "x_1_2.sqlite"],  # nodes have as many ranks
        ["x_1_0.sqlite", "x_2_1.sqlite"],
        ["lora_rank_4.sqlite", "lora_rank_8.sqlite"],  # sizes of matrices
        ["rank0.sqlite"],
    ],
)
def test_other_numbers_are_no_ranks(names: list[str]) -> None:
    assert group_rank_files([Path(name) for name in names]) == []


def test_a_rank_number_that_each_node_has_tells_the_ranks_of_one_node() -> None:
    """Which of the job's ranks those of the second node are is not known."""
    first, second = ([Path(f"node{node}_rank{rank}.sqlite") for rank in (0, 1)] for node in (0, 1))
    assert group_rank_files([*first, *second]) == [first, second]


@pytest.mark.parametrize("name", ["x_node_{0}_rank_{0}_on_gpu0{0}.sqlite", "x_99_{0}_{0}.sqlite"])
def test_ranks_of_several_nodes_are_one_run_and_say_so(name: str, tmp_path: Path) -> None:
    files = [write_capture(tmp_path / name.format(rank), known_truth()) for rank in (0, 1)]
    (run,) = load_runs(files)
    (note,) = [note for note in run.overlap().warnings if "--separate" in note]
    assert note.startswith("2 files are read as ranks of one run, because their names differ in rank and node only")


def test_that_process_ids_differ_is_said(tmp_path: Path) -> None:
    files = [write_capture(tmp_path / f"profile_{41 + rank}_8412_rank{rank}.sqlite", known_truth()) for rank in (0, 1)]
    (run,) = load_runs(files)
    (note,) = [note for note in run.overlap().warnings if "--separate" in note]
    assert "because their names differ in rank and process id or time only" in note


def test_a_folder_is_part_of_the_name() -> None:
    assert group_rank_files([Path("a/rank0.sqlite"), Path("b/rank1.sqlite")]) == []


def test_a_rank_that_lost_steps_is_of_the_run_of_the_others(tmp_path: Path) -> None:
    """Its recording ended earlier, or the profiler lost a step of it: two runs of one rank each were shown."""
    for rank, steps in enumerate((4, 3)):
        write_capture(tmp_path / f"x.rank{rank}.sqlite", known_truth(steps))
    (run,) = load_runs(tmp_path)
    assert [len(rank.steps) for rank in run.overlap().ranks] == [4, 3]


@pytest.mark.parametrize("names", [("x.rank0", "x.rank1", "x.rank2"), ("node", "other", "third")])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_whose_kernels_are_lost_is_of_the_run_of_the_others(
    tmp_path: Path, lost: int, names: tuple[str, ...]
) -> None:
    """Each file says which rank it is: it was three runs of one rank, and joined, no clocks could be compared.

    Where names do not tell, it was said that they differ in their collectives, though those of one rank are not known.
    """
    for rank in range(3):
        process = 100 + rank
        whole = Range(
            f"process|rank={rank}|world=3|backend=nccl|device=cuda", 0, 1000 * US, process, process, "ddp_prof"
        )
        capture = Capture(ranges=[whole])
        for step in range(8):
            begin, late = 100 * step * US + 1, 30 * (rank == 1) * US
            capture.ranges.append(Range(f"step {step}", begin, begin + 90 * US, process, process))
            if rank != lost:
                times = ("gemm", begin, begin + late + 10 * US, 7), (NCCL, begin + late + 10 * US, begin + 60 * US, 20)
                for name, start, end, stream in times:
                    capture.kernels.append(Kernel(name, start, end, begin, process, process, stream))
        write_capture(tmp_path / f"{names[rank]}.sqlite", capture)
    (run,) = load_runs(tmp_path)
    assert [rank.kernels for rank in run.overlap().ranks] == [0 if rank == lost else 16 for rank in range(3)]
    assert [rank.last_steps for rank in run.skew().ranks] == [0, 8, 0]
    assert any(note.startswith(f"no collective of rank {lost} was recorded") for note in run.skew().warnings)


def file_of_ranks(file: Path, ranks: Iterable[int], world: int) -> None:
    """A file with several ranks of a job, as nsys records those of a node; rank 2 is late."""
    capture = Capture()
    for rank in ranks:
        process = 100 + rank
        whole = f"process|rank={rank}|world={world}|backend=nccl|device=cuda"
        capture.ranges.append(Range(whole, 0, 1000 * US, process, process, "ddp_prof"))
        for step in range(8):
            begin, late = 100 * step * US + 1, 30 * (rank == 2) * US
            capture.ranges.append(Range(f"step {step}", begin, begin + 90 * US, process, process))
            times = ("gemm", begin, begin + late + 10 * US, 7), (NCCL, begin + late + 10 * US, begin + 60 * US, 20)
            for kernel, start, end, stream in times:
                capture.kernels.append(Kernel(kernel, start, end, begin, process, process, stream))
    write_capture(file, capture)


def test_of_two_recordings_of_all_ranks_no_word_is_due(tmp_path: Path) -> None:
    """``compare before.sqlite after.sqlite`` was answered with 'give the files of one recording'."""
    for name in ("before", "after"):
        file_of_ranks(tmp_path / f"{name}.sqlite", range(2), 2)
    runs = load_runs([tmp_path / "before.sqlite", tmp_path / "after.sqlite"])
    assert [len(run.overlap().ranks) for run in runs] == [2, 2]
    assert [note for run in runs for note in run.overlap().warnings if "read as" in note] == []


@pytest.mark.parametrize(("names", "runs"), [(("node0", "node1"), 1), (("a", "b"), 1), (("a", "b", "c"), 3)])
def test_files_of_nodes_are_one_run_where_each_rank_says_which_it_is(
    names: tuple[str, ...], runs: int, tmp_path: Path
) -> None:
    """Each holds all ranks of a node, as nsys records them: rank 2 was looked for among two of four ranks.

    A third file, of ranks that the others hold already, is of another job.
    """
    for node, name in enumerate(names):
        file_of_ranks(tmp_path / f"{name}.sqlite", (2 * node % 4, 2 * node % 4 + 1), 4)
    found = load_runs(tmp_path)
    assert len(found) == runs
    if runs == 1:
        assert [rank.last_steps for rank in found[0].skew().ranks] == [0, 0, 8, 0]
    else:  # nothing was said of three files that were not joined
        notes = [note for run in found for note in run.overlap().warnings if "several of them say that they" in note]
        assert len(notes) == 3
        assert notes[0].endswith("are rank 0: give the files of one recording")


def test_why_files_of_ranks_are_kept_apart_is_said(tmp_path: Path) -> None:
    """Two runs of one name, of which one has a collective less in each step, were shown, and no word why."""
    for rank in (0, 1):
        capture = known_truth()
        if rank:
            capture.kernels = [kernel for kernel in capture.kernels if "Symk" not in kernel.name]
        write_capture(tmp_path / f"x.rank{rank}.sqlite", capture)
    runs = load_runs(tmp_path)
    assert [len(run.files) for run in runs] == [1, 1]
    for run in runs:
        (note,) = [note for note in run.overlap().warnings if "--one-run" in note]
        assert note.startswith("2 files are read as runs of their own, though their names differ in a rank number only")
    assert "2 files are read as runs of their own" in run_command_line("summary", tmp_path).stdout


@pytest.mark.parametrize(
    ("communicators", "runs"),
    [
        (("0 0 emb", "0 0 emb", "0 0", "0 0 send"), 1),
        (("0 0 a", "0 0 b b", "a b b c", "c"), 1),
        (("0 0 emb", "0 0 emb", "0 0", "0"), 4),
        (("a a", "a a", "b"), 3),
        (("a a", "a a ?", "a a"), 3),
    ],
)
def test_ranks_need_not_have_the_same_communicators(tmp_path: Path, communicators: tuple[str, ...], runs: int) -> None:
    """Stages of a pipeline, or ranks with an embedding in common, were runs of their own, so nobody was late."""
    for rank, names in enumerate(communicators):
        kernels = []
        for number, name in enumerate(names.split()):
            noted: dict[str, object] = {"Collective name": "send" if name == "send" else "allreduce"}
            noted |= {} if name == "?" else {"Process Group Name": name, "Group size": 2}
            kernels.append(event("kernel", "ncclKernel", str(10 * number), "5", device=0, stream=9, **noted))
        info = {"rank": rank, "world_size": len(communicators)}
        write(tmp_path / f"x.rank{rank}.json", kernels, distributedInfo=info)
    assert len(load_runs(tmp_path)) == runs


def write_trace(folder: Path, rank: int, name: str, world: int | None = 2) -> None:
    kernel = event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "5", "1", device=0, stream=9)
    sizes = {} if world is None else {"world_size": world}
    write(folder / name, [kernel], distributedInfo={"rank": rank, **sizes})


def test_each_capture_of_torch_s_handler_is_one_run_of_all_ranks(tmp_path: Path) -> None:
    """``tensorboard_trace_handler`` writes a file per rank and cycle of the schedule: each was a run of its own."""
    for rank, process in ((1, 100), (0, 101)):
        for cycle in (17, 18):
            write_trace(tmp_path, rank, f"node1_{process}.{cycle}{rank}{'0' * 16}.pt.trace.json.gz")
    for cycle, run in zip((17, 18), load_runs(tmp_path), strict=True):
        assert [f".{cycle}" in file.name for file in run.files] == [True, True]
        assert [rank.rank for rank in run.overlap().ranks] == [0, 1]
        (note,) = [note for note in run.overlap().warnings if "--separate" in note]
        assert "because the traces say which rank of a job each is, and their names when they were written" in note


def test_captures_that_lack_a_rank_are_not_put_together(tmp_path: Path) -> None:
    for rank, cycle in ((0, 1), (1, 1), (0, 2)):
        write_trace(tmp_path, rank, f"node1_{rank}.{cycle}{'0' * 18}.pt.trace.json.gz")
    assert [len(run.files) for run in load_runs(tmp_path)] == [1, 1, 1]


@pytest.mark.parametrize(("world", "files"), [(2, [2]), (None, [2]), (1, [1, 1])])
def test_ranks_are_one_run_also_if_the_size_of_their_job_is_not_known(
    world: int | None, files: list[int], tmp_path: Path
) -> None:
    """As in traces to which the rank was added by hand, which Holistic Trace Analysis asks for."""
    for rank in (0, 1):
        write_trace(tmp_path, rank, f"node1_{100 + rank * 7}.json", world)
    assert [len(run.files) for run in load_runs(tmp_path)] == files


@pytest.mark.parametrize(("apart_s", "runs"), [(0, 1), (50, 2)])
def test_recordings_of_two_jobs_are_no_run(tmp_path: Path, apart_s: int, runs: int) -> None:
    """Rank 0 of one job and rank 1 of the next one, a minute later, were one run, with lags of one behind the other."""
    for rank in (0, 1):
        kernel = event("kernel", "ncclDevKernel_AllReduce", "10", "20", correlation=1, device=0, stream=7)
        call = event("cuda_runtime", "cudaLaunchKernel", "5", "1", correlation=1)
        base = (1_700_000_000 + apart_s * rank) * 10**9
        info = {"rank": rank, "world_size": 2}
        write(tmp_path / f"host_{4711 + 7 * rank}.json", [kernel, call], distributedInfo=info, baseTimeNanoseconds=base)
    found = load_runs(tmp_path)
    assert len(found) == runs
    (note,) = {note for run in found for note in run.notes}
    assert ("they were recorded 50.0 s apart, by UTC; --one-run joins them" in note) == (runs == 2)
    assert len(load_runs(tmp_path, LoadOptions(one_run=True))) == 1


@pytest.mark.parametrize("name", ["x.rank{}.json", "host_471{}.json"])
def test_ranks_of_two_devices_each_are_one_run_of_two_ranks(tmp_path: Path, name: str) -> None:
    """A model on two devices of each process: 'several of them say that they are rank 0', and '4 of 2 ranks', was said.

    device 0, 2   ####AA        the first half and its all-reduce
    device 1, 3   ####AA        the second half
    """
    for rank in (0, 1):
        events = []
        for device in (2 * rank, 2 * rank + 1):
            gradient, reduction = 2 * device + 1, 2 * device + 2
            where = {"device": device, "stream": 7}
            events += [
                event("cuda_runtime", "cudaLaunchKernel", str(gradient), "0.5", correlation=gradient),
                event("cuda_runtime", "cudaLaunchKernel", str(reduction), "0.5", correlation=reduction),
                event("kernel", "gemm", "20", "40", correlation=gradient, **where),
                event("kernel", "ncclDevKernel_AllReduce", "60", "20", correlation=reduction, **where),
            ]
        write(tmp_path / name.format(rank), events, distributedInfo={"rank": rank, "world_size": 2})
    (run,) = load_runs(tmp_path)
    assert [(rank.rank, rank.device) for rank in run.overlap().ranks] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert not [note for note in run.notes if "runs of their own" in note]
    assert "· 4 devices of 2 ranks ·" in run_command_line("summary", tmp_path).stdout
    assert "· 2 devices of 1 of 2 ranks ·" in run_command_line("summary", tmp_path / name.format(0)).stdout
    partial = "judged by 1 of 2 ranks"
    assert partial in run_command_line("check", tmp_path / name.format(0), "--max-exposed-ms", 1).stdout
    assert partial not in run_command_line("check", tmp_path, "--max-exposed-ms", 1).stdout
