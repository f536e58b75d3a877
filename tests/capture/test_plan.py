"""What is asked of a capture: names, numbers, devices, and what no capture can have."""

from __future__ import annotations

import pytest

from ddp_prof.capture import variant
from ddp_prof.capture.variant import Plan, clean_environment, digest_plan, read_plan
from ddp_prof.errors import UsageError, WorkloadError

NO_NUMBERS = ["root[$(touch x)]", "2x", "-1", "1e3", "2.5", "0x10", "08", " 2", "2\n", "٣", "1_0", "9" * 30]
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2"}
NUMBERS = [
    *((name, {}) for name in ("NGPU", "WORLD_SIZE", "RANKS_PER_GPU", "NODE_RANK", "LIMIT_S")),
    *((name, LAUNCHED) for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ("SLURM_JOB_ID", LAUNCHED),
]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the GPUs that there are: none, unless a test adds some."""
    found: list[str] = []
    monkeypatch.setattr(variant, "visible_gpus", lambda _: found)
    return found


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(("name", "beside"), NUMBERS)
def test_what_is_no_number_is_refused(name: str, beside: dict[str, str], value: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s)^{name}=.*: not a whole number from [01] to \d+$"):
        read_plan(["flat"], {**beside, name: value})


@pytest.mark.parametrize("name", ["NGPU", "WORLD_SIZE"])
def test_no_more_ranks_than_the_memory_holds(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}=1000000: not a whole number from 1 to "):
        read_plan(["flat"], {name: "1000000"})


@pytest.mark.parametrize("nodes", ["--nnodes 08", "--nnodes=0", "--nnodes 1:99999999999999999999"])
def test_nodes_of_torchrun_are_a_number_too(nodes: str) -> None:
    with pytest.raises(UsageError, match=r"--nnodes=\d+: not a whole number from 1 to 1000000"):
        read_plan(["flat"], {"TORCHRUN": nodes})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["naive"], "naive"),
        (["bucketed", "--bucket-size-mb", "10"], "bucketed_10mb"),
        (["--bucket-size-mb", "0.5", "bucketed"], "bucketed_0.5mb"),
        (["bucketed"], "bucketed_25mb"),
        (["sharded"], "sharded"),
        (["bucketed", "--bucket-size-mb", "none"], "bucketed_unbounded"),
        (["bucketed", "--", "--seed", "3"], "bucketed_25mb"),
        (["torch", "--", "--comm-hook", "bf16"], "torch_bf16"),
        (["torch", "--bucket-size-mb", "1", "--", "--comm-hook=powersgd"], "torch_1mb_powersgd"),
        (["torch", "--", "--no-communication-hook"], "torch_no_communication_hook"),
    ],
)
def test_the_name_says_the_bucket_size_and_options(gpus: list[str], arguments: list[str], name: str) -> None:
    assert gpus == []
    assert read_plan(arguments, {}).name == name


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: variant"),
        (["ddp5"], "variant: invalid choice: 'ddp5' (choose from "),
        (["*"], "variant: invalid choice: '*'"),
        (["naive", "flat"], "unrecognized arguments: flat"),
        (["naive", "--steps"], "unrecognized arguments: --steps"),
        (["bucketed", "--bucket-size-mb"], "--bucket-size-mb: expected one argument"),
        (["bucketed", "--bucket-size-mb", "0"], "must be positive"),
        (["bucketed", "--bucket-size-mb", "9" * 250], "must be less than 2**40, not 999"),
        (["naive", "--bucket-size-mb", "1"], "variant naive has no buckets to cap"),
        (["torch", "--", "--comm-hook", "../../x"], "--comm-hook: invalid choice"),
        (["naive", "--", "--stpes", "3"], "unrecognized arguments: --stpes 3"),
    ],
)
def test_wrong_usage_is_told_before_anything_begins(gpus: list[str], arguments: list[str], reason: str) -> None:
    assert gpus == []
    with pytest.raises(UsageError) as told:
        read_plan(arguments, {})
    assert reason in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("count", "settings", "device", "model_size"),
    [
        (0, {}, "cpu", "mini"),
        (1, {}, "cpu", "mini"),  # a rank would have none
        (2, {}, "cuda", "medium"),
        (2, {"MODEL_SIZE": "tiny"}, "cuda", "tiny"),
        (2, {"DEVICE": "cpu"}, "cpu", "mini"),
        (1, {"DEVICE": "cuda"}, "cuda", "medium"),
        (1, {"RANKS_PER_GPU": "2"}, "cuda", "medium"),
        (1, {"RANKS_PER_GPU": "2", "NGPU": "4"}, "cpu", "mini"),
        (8, {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "cuda", "medium"),
        (8, {"RANK": "3", "WORLD_SIZE": "16"}, "cpu", "mini"),
    ],
)
def test_ranks_run_on_gpus_where_each_has_one_or_its_share(
    gpus: list[str], count: int, settings: dict[str, str], device: str, model_size: str
) -> None:
    gpus += ["NVIDIA A100"] * count
    found = read_plan(["overlap"], settings)
    assert found.on_gpus == (device == "cuda")
    assert f"--device {device} --model-size {model_size} " in " ".join(found.workload)


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [
        ({}, 4),
        ({"NGPU": "8"}, 16),
        ({"NGPU": "8", "BATCH_SIZE": "32"}, 32),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 32),
        ({"NGPU": "8", "TORCHRUN": "--nnodes 2 --node-rank 0", "NODE_RANK": "0"}, 32),
        ({"NGPU": "8", "TORCHRUN": "--nnodes=1:2"}, 32),
    ],
)
def test_a_batch_is_two_sequences_per_rank(gpus: list[str], settings: dict[str, str], batch_size: int) -> None:
    assert gpus == []
    assert f"--batch-size {batch_size} " in " ".join(read_plan(["overlap"], settings).workload)


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_plan(["--help"], {})
    assert not end.value.code
    assert "Example: STEPS=5 scripts/profile_variant.sh bucketed" in capsys.readouterr().out


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70007"}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        (OPEN_MPI, {}),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x7),1(x2)"},
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29507"},
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,14", "MASTER_ADDR": "node3", "MASTER_PORT": "1234"},
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node3", "MASTER_PORT": "1234"},
        ),
    ],
)
def test_a_rank_of_any_launcher_is_told_its_place_in_torchruns_words(
    gpus: list[str], told: dict[str, str], place: dict[str, str]
) -> None:
    assert gpus == []
    found = read_plan(["overlap"], told)
    assert (found.name, found.ranks) == ("overlap.rank3", 16)
    given = {name: value for name, value in clean_environment(found).items() if name not in ("PATH", "LANG")}
    assert given == {"RANK": "3", "WORLD_SIZE": "16", **place}
    assert "--world-size" not in found.workload


@pytest.mark.parametrize(
    ("node", "beside"),
    [
        ("1", {"TORCHRUN": "--nnodes 2 --node-rank 1"}),
        ("1", {"TORCHRUN": "--nnodes 2:4 --rdzv-id 7", "NODE_RANK": "1"}),
        ("3", {"TORCHRUN": "--nnodes 16", **SLURM}),
    ],
)
def test_each_node_of_torchrun_writes_files_of_its_own(gpus: list[str], node: str, beside: dict[str, str]) -> None:
    assert gpus == []
    found = read_plan(["overlap"], {"NGPU": "8", **beside})
    assert (found.name, found.ranks, found.torchrun[-1]) == (f"overlap.node{node}", 8, "8")


def test_torchrun_on_an_unknown_node_is_refused(gpus: list[str]) -> None:
    assert gpus == []
    with pytest.raises(WorkloadError, match="set NODE_RANK=0 on the first"):
        assert read_plan(["overlap"], {"TORCHRUN": "--nnodes 2"}).name


def test_a_batch_script_of_slurm_is_no_rank(gpus: list[str]) -> None:
    assert gpus == []
    assert read_plan(["overlap"], {"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}).name == "overlap"


def _digest(settings: dict[str, str], *arguments: str) -> str:
    found: Plan = read_plan(["overlap", *arguments], settings)
    return digest_plan(found, "nsys 2022.4.2.1")


def test_what_decides_what_a_capture_holds_is_in_its_digest(gpus: list[str]) -> None:
    settings: list[dict[str, str]] = [
        {},
        {"STEPS": "7"},
        {"OMP_NUM_THREADS": "2"},
        {"NSYS_FLAGS": "-x"},
        {"LC_ALL": "C"},
    ]
    digests = [_digest(each) for each in settings]
    assert len(set(digests)) == len(digests) - 1
    assert digests[0] == digests[-1], "a run is not given it"
    gpus.append("NVIDIA A100")
    assert _digest({}) != digests[0]
    assert _digest({}, "--", "--seed", "2") != _digest({})
