"""What a sweep runs, in which order, under which names: functions of nothing but their arguments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import groupby

import pytest

from ddp_prof.benchmark.grid import Conditions, Grid, Job, Setting, choose_defaults, order_jobs, train_arguments
from ddp_prof.benchmark.sweep.arguments import Arguments, choose_conditions, choose_grid, make_parser
from ddp_prof.benchmark.sweep.identity import run_id
from ddp_prof.benchmark.sweep.progress import format_time
from ddp_prof.train.arguments import parse_arguments
from ddp_prof.variants import VARIANT_NAMES

GRID = Grid(("naive", "bucketed", "torch"), (1, None), ("tiny",), (2,), (2, 4), (16,))
CONDITIONS = Conditions(steps=4, warmup=2)
SETTING = Setting("bucketed", 2.5, "tiny", 2, 3, 16)


def parse(*argv: str) -> Arguments:
    return make_parser().parse_args(argv, Arguments())


def test_variants_are_interleaved_and_repeats_are_rounds() -> None:
    jobs = order_jobs(GRID, repeats=3)
    names = [(job.repeat, job.setting.local_batch_size, job.setting.name) for job in jobs]
    assert names[:4] == [
        (0, 2, "naive"),
        (0, 2, "bucketed 1 MB"),
        (0, 2, "bucketed no cap"),
        (0, 2, "torch"),
    ]
    assert [name[2] for name in names[8:12]] == ["bucketed 1 MB", "bucketed no cap", "torch", "naive"]
    rounds = [key for key, _ in groupby(names, key=lambda name: name[:2])]
    assert rounds == [(repeat, batch) for repeat in range(3) for batch in (2, 4)]  # no variant waits for another round
    assert len(set(jobs)) == len(jobs) == 3 * 2 * 4


def test_two_gpus_run_the_published_study() -> None:
    defaults = choose_defaults(2)
    grid = choose_grid(parse(), defaults)
    assert (grid.model_sizes, grid.world_sizes, grid.variants) == (("xl",), (2,), VARIANT_NAMES)
    assert (grid.local_batch_sizes, grid.seq_lens) == ((2, 4), (128, 256, 512))
    assert grid.bucket_sizes_mb == (1, 10, 100, 1000)
    assert choose_conditions(parse(), defaults) == Conditions(steps=10, warmup=5)
    assert choose_defaults(8) == defaults


@pytest.mark.parametrize("gpus", [0, 1])
def test_elsewhere_a_small_grid_is_run_three_times(gpus: int) -> None:
    defaults = choose_defaults(gpus)
    assert defaults.grid.model_sizes == ("mini",)
    assert defaults.grid.variants == VARIANT_NAMES
    assert defaults.repeats >= 3
    assert len(order_jobs(defaults.grid, defaults.repeats)) <= 70  # some seconds each: minutes


def test_what_is_asked_for_takes_the_place_of_defaults() -> None:
    asked = parse(
        *("--variants", "flat,naive", "flat", "--model-size", "tiny", "--world-size", "1", "4", "--num-steps", "7"),
        *("--seq-lens", "8,", "16", "--bucket-sizes-mb", "0.5", "none", "--warmup", "0", "--batch-sizes", "3"),
    )
    grid = choose_grid(asked, choose_defaults(0))
    assert grid == Grid(("flat", "naive"), (0.5, None), ("tiny",), (1, 4), (3,), (8, 16))
    assert choose_conditions(asked, choose_defaults(0)) == Conditions(steps=7, warmup=0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--variants", "fast"], "no such one: 'fast'; there are naive, flat"),
        (["--seq-lens", "128,x"], "'128,x': invalid literal"),
        (["--seq-lens", "0"], "must be at least 1, not 0"),
        (["--batch-sizes", ","], "a value is missing"),
        (["--bucket-sizes-mb", "-1"], "must be positive"),
        (["--model-size", "huge"], "no such one: 'huge'"),
    ],
)
def test_mistakes_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("variant", "cap"), [("naive", None), ("torch", None), ("bucketed", 2.5), ("bucketed", None)])
def test_the_workload_understands_its_command_line(variant: str, cap: float | None) -> None:
    setting = replace(SETTING, variant=variant, bucket_size_mb=cap)
    arguments = parse_arguments(train_arguments(setting, CONDITIONS))
    assert arguments.bucket_size_mb == cap
    assert (arguments.batch_size, arguments.world_size, arguments.seq_len) == (6, 2, 16)  # 3 a rank
    assert (arguments.steps, arguments.synchronized_steps, arguments.warmup) == (4, 4, 2)


def test_ids_are_stable_and_differ_with_whatever_is_run() -> None:
    job = Job(SETTING, 0)
    assert run_id(job, CONDITIONS, "e1") == "d331dddfcb73b3af"  # of databases that exist
    ids = {
        run_id(item, conditions, environment)
        for item in (job, Job(SETTING, 1), Job(replace(SETTING, bucket_size_mb=None), 0))
        for conditions in (CONDITIONS, replace(CONDITIONS, steps=5), replace(CONDITIONS, device="cpu"))
        for environment in ("e1", "e2")
    }
    assert len(ids) == 3 * 3 * 2


def test_a_default_and_the_same_value_asked_for_are_the_same_run() -> None:
    defaults = choose_defaults(0)
    by_default, asked = (choose_grid(parse(*argv), defaults) for argv in ((), ("--bucket-sizes-mb", "1", "10", "100")))
    ids = [[run_id(job, CONDITIONS, "e1") for job in order_jobs(grid, 1)] for grid in (by_default, asked)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (99, "99 s"), (300, "5 min"), (7500, "2 h 05 min")])
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_help_needs_no_torch() -> None:
    code = """
import sys
sys.argv = ["x", "--help"]
from ddp_prof.benchmark.sweep.__main__ import main
try:
    main()
except SystemExit:
    print([each for each in ("torch", "rich", "sqlite_utils") if each in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
