"""What a sweep runs, in which order, under which names: functions of nothing but their arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from itertools import groupby

import pytest

from ddp_prof.benchmark.sweep import Grid, Job, choose_grid, default_grid, format_time, make_parser
from ddp_prof.run_config import RunConfig
from ddp_prof.variants import VARIANT_NAMES

GRID = Grid(
    variants=("naive", "bucketed", "torch"),
    bucket_sizes_mb=(1, None),
    model_sizes=("tiny",),
    local_batch_sizes=(2, 4),
    seq_lens=(16,),
    steps=4,
    warmup=2,
)
CONFIG = RunConfig(
    variant="bucketed", bucket_size_mb=2.5, model_size="tiny", world_size=2, batch_size=6, seq_len=16, steps=4, warmup=2
)


def parse(*argv: str) -> Namespace:
    return make_parser().parse_args(argv)


def test_variants_are_interleaved_and_repeats_are_rounds() -> None:
    jobs = GRID.jobs()
    names = [(job.repeat, job.config.local_batch_size, job.config.label) for job in jobs]
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


def test_variants_other_than_bucketed_run_with_their_default_bucket_size() -> None:
    found = {
        job.config.variant: job.config.bucket_size_mb for job in replace(GRID, variants=("naive", "sharded")).jobs()
    }
    assert found == {"naive": None, "sharded": 25.0}


def test_two_gpus_run_the_grid_of_the_course() -> None:
    grid = choose_grid(parse(), default_grid(2))
    assert (grid.model_sizes, grid.world_sizes, grid.variants) == (("xl",), (2,), VARIANT_NAMES)
    assert (grid.local_batch_sizes, grid.seq_lens) == ((2, 4), (128, 256, 512))
    assert grid.bucket_sizes_mb == (1, 10, 100, 1000)
    assert (grid.steps, grid.warmup) == (10, 5)
    assert default_grid(8) == default_grid(2) == grid


@pytest.mark.parametrize("gpus", [0, 1])
def test_elsewhere_a_small_grid_is_run_three_times(gpus: int) -> None:
    grid = default_grid(gpus)
    assert grid.model_sizes == ("mini",)
    assert grid.variants == VARIANT_NAMES
    assert grid.repeats >= 3
    assert len(grid.jobs()) <= 90  # some seconds each: minutes


def test_what_is_asked_for_takes_the_place_of_defaults() -> None:
    asked = parse(
        *("--variants", "flat", "naive", "flat", "--model-size", "tiny", "--world-size", "1", "4", "--steps", "7"),
        *("--seq-len", "8", "16", "--bucket-sizes-mb", "0.5", "none", "--warmup", "0", "--batch-sizes", "3"),
    )
    assert choose_grid(asked, default_grid(0)) == Grid(
        variants=("flat", "naive"),
        bucket_sizes_mb=(0.5, None),
        model_sizes=("tiny",),
        world_sizes=(1, 4),
        local_batch_sizes=(3,),
        seq_lens=(8, 16),
        steps=7,
        warmup=0,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--variants", "fast"], "invalid choice: 'fast' (choose from"),
        (["--seq-len", "128", "x"], "--seq-len: invalid"),
        (["--seq-len", "0"], "must be at least 1, not 0"),
        (["--batch-sizes"], "expected at least one argument"),
        (["--bucket-sizes-mb", "-1"], "must be positive"),
        (["--model-size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_mistakes_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_job_takes_as_many_synchronized_steps_as_measured_ones() -> None:
    config = GRID.jobs()[0].config
    assert (config.steps, config.synchronized_steps, config.warmup) == (4, 4, 2)
    assert (config.world_size, config.batch_size, config.local_batch_size) == (2, 4, 2)


def test_ids_are_stable_and_differ_with_whatever_is_run() -> None:
    assert Job(CONFIG, 0).run_id("e1") == "d331dddfcb73b3af"  # of databases that exist
    configs = [
        replace(config, **change)
        for config in (CONFIG, replace(CONFIG, bucket_size_mb=None))
        for change in ({}, {"steps": 5}, {"device": "cpu"}, {"seq_len": 8})
    ]
    ids = {
        Job(config, repeat).run_id(environment)
        for config in configs
        for repeat in (0, 1)
        for environment in ("e1", "e2")
    }
    assert len(ids) == len(configs) * 2 * 2


def test_a_default_and_the_same_value_asked_for_are_the_same_run() -> None:
    asked = ("--bucket-sizes-mb", "1", "10", "100")
    grids = [choose_grid(parse(*argv), default_grid(0)) for argv in ((), asked)]
    ids = [[job.run_id("e1") for job in grid.jobs()] for grid in grids]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (99, "99 s"), (300, "5 min"), (7500, "2 h 05 min")])
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
