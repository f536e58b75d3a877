"""Speed-ups in turns: which rounds are trained, which captures they belong to, and what is said by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import ddp_prof as dp
from ddp_prof.analyze.cost import measure_run_cost
from ddp_prof.analyze.kernels.contention import Contention
from ddp_prof.analyze.overlap import TraceOverlap, measure_overlap
from ddp_prof.analyze.statistics import ratio_of_repeats
from ddp_prof.analyze.variants.comparison import compare_variants
from ddp_prof.benchmark import sweep as sweep_module
from ddp_prof.benchmark import turns as turns_module
from ddp_prof.benchmark.store import Environment, load_results
from ddp_prof.benchmark.sweep import Machine, measure_in_turns
from ddp_prof.benchmark.turns import TURNS, add_captures, load_turns, measure_turns
from ddp_prof.errors import TraceError, WorkloadError
from ddp_prof.manifest import HostTimes, Manifest, manifest_path, write_manifest
from ddp_prof.present.charts.comparison import _waterfall_headline
from ddp_prof.present.comparison_headlines import describe_changes
from ddp_prof.present.tables.compare import compare_rows, how_to_read
from ddp_prof.run_config import RunConfig
from ddp_prof.runs.run import Run, compare_steps
from tests.drawing import draw_trace
from tests.test_manifest import MANIFEST

TRACES = Path(__file__).parents[2] / "traces"
MACHINE = Machine(
    Environment("e1", "some CPU", 2, 2**34, "Linux", "", "3.11", "2.13", None, None, "0.1"), 0, None, "c1"
)
NAIVE, FLAT, BUCKETED = (
    RunConfig(variant=variant, bucket_size_mb=size, model_size="tiny", world_size=2, device="cpu", seq_len=16)
    for variant, size in (("naive", None), ("flat", None), ("bucketed", 10.0))
)
MADE = replace(
    MANIFEST,
    variant="naive",
    bucket_size_mb=None,
    world_size=2,
    device="cpu",
    model_size="tiny",
    batch_size=4,
    seq_len=16,
    options={},
    machine={"cpu": "some CPU", "cores": 2, "gpus": ""},
    versions={"torch": "2.13"},
)


class Bench:
    """Stands in for the ranks: each variant's step, in ns, and the order of the blocks of each round."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, 0.0
        self.steps_ns = {"naive": 200, "flat": 100, "bucketed": 50}
        self.rounds: list[list[str]] = []
        self.fails = ""

    def measure_in_turns(self, configs: Sequence[RunConfig]) -> list[Manifest | WorkloadError]:
        self.rounds.append([config.variant for config in configs])
        self.seconds += 10
        if self.fails:
            return [WorkloadError(self.fails)] * len(configs)
        return [self.manifest(config) for config in configs]

    def manifest(self, config: RunConfig) -> Manifest:
        times = HostTimes(False, 0, self.steps_ns[config.variant], 1, 1, 1, 1)
        return replace(MADE, variant=config.variant, bucket_size_mb=config.bucket_size_mb, host_times=(times,))

    def measure(self, *configs: RunConfig, seconds: float = 25, force: bool = False) -> int:
        self.rounds = []
        return measure_turns(configs or (NAIVE, FLAT, BUCKETED), self.path, seconds, force=force)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path / TURNS)
    monkeypatch.setattr(sweep_module, "measure_in_turns", bench.measure_in_turns)
    monkeypatch.setattr(sweep_module, "probe_machine", lambda: MACHINE)
    monkeypatch.setattr(turns_module, "monotonic", lambda: bench.seconds)
    return bench


def test_every_second_round_goes_backwards(bench: Bench) -> None:
    assert bench.measure() == 3
    assert bench.rounds == [["naive", "flat", "bucketed"], ["bucketed", "flat", "naive"], ["naive", "flat", "bucketed"]]
    assert {run.repeat for run in load_results(bench.path).runs} == {0, 1, 2}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 3), (30, 3), (31, 4), (1000, turns_module.MOST_ROUNDS)])
def test_rounds_begin_until_the_time_is_over_and_there_are_three(bench: Bench, seconds: float, rounds: int) -> None:
    assert bench.measure(seconds=seconds) == rounds


def test_rounds_of_the_same_code_and_variants_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.measure()
    assert (bench.measure(), bench.rounds) == (3, [])
    assert (bench.measure(force=True), len(bench.rounds)) == (3, 3)
    assert (bench.measure(NAIVE, FLAT), len(bench.rounds)) == (3, 3), "others are trained together, too"
    monkeypatch.setattr(sweep_module, "probe_machine", lambda: replace(MACHINE, code="c2"))
    assert (bench.measure(NAIVE, FLAT), len(bench.rounds)) == (3, 3)
    assert {run.code for run in load_results(bench.path).runs} == {"c2"}


def test_a_round_that_fails_leaves_nothing_and_is_trained_again(bench: Bench) -> None:
    bench.fails = "too big"
    with pytest.raises(WorkloadError, match="too big"):
        bench.measure()
    bench.fails = ""
    assert (bench.measure(), len(bench.rounds)) == (3, 3)


def test_what_is_no_database_is_not_replaced(bench: Bench) -> None:
    bench.path.write_text("mine")
    with pytest.raises(TraceError, match="not a results database"):
        bench.measure()
    assert bench.path.read_text() == "mine"


def captured(folder: Path, **changes: object) -> Run:
    """A run whose ``run.json`` says that it is the naive one of the bench, but for the changes."""
    manifest = replace(MADE, **changes)  # type: ignore[arg-type]
    trace = folder / f"{manifest.variant}.sqlite"
    write_manifest(manifest, manifest_path(trace))
    return Run((trace,))


def test_turns_belong_to_captures_of_the_same_work_on_the_same_machine(bench: Bench, tmp_path: Path) -> None:
    bench.measure()
    naive = captured(tmp_path)
    assert [*load_turns([naive])[naive.files[0]].values()] == [200.0] * 3
    bucketed = captured(tmp_path, variant="bucketed", bucket_size_mb=10.0)
    assert [*load_turns([bucketed])[bucketed.files[0]].values()] == [50.0] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "torch"},
        {"variant": "bucketed", "bucket_size_mb": 1.0},
        {"model_size": "mini"},
        {"batch_size": 8},
        {"seq_len": 32},
        {"device": "cuda"},
        {"machine": {"cpu": "other", "cores": 2, "gpus": ""}},
        {"versions": {"torch": "2.14"}},
        {"options": {"precision": "bf16"}},
        {"variant": "torch", "options": {"comm_hook": "bf16"}},
    ],
)
def test_turns_of_other_work_are_not_taken(bench: Bench, tmp_path: Path, changes: Mapping[str, object]) -> None:
    bench.measure()
    assert load_turns([captured(tmp_path, **changes)]) == {}


def test_figures_of_the_captures_are_noted_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.measure()
    trace, read = bench.path.with_name("naive.sqlite"), []
    trace.touch()

    def read_figures(files: Sequence[Path]) -> dict[str, int]:
        read.append(files)
        return {"trace_tail_ns": 7}

    monkeypatch.setattr(sweep_module, "read_figures", read_figures)
    for _ in range(2):
        add_captures(bench.path, [(NAIVE, [trace]), (FLAT, [])])
    assert len(read) == 1
    noted = [(run.variant, run.trace, run.trace_tail_ns) for run in load_results(bench.path).runs if run.trace]
    assert noted == [("naive", "naive.sqlite", 7)]


def drawn(label: str, picture: str) -> TraceOverlap:
    """Three steps as long as the picture."""
    ranges = {f"step {index}": "." * (index * len(picture)) + picture for index in range(3)}
    return replace(measure_overlap(draw_trace(ranges=ranges, path=label)), label=label)


def rounds(*steps_ns: float) -> dict[str, float]:
    return {f"round {number}": float(ns) for number, ns in enumerate(steps_ns)}


class TestWhatIsSaid:
    """The captures say that torch is twice as fast; in turns it is 4 to 6 % faster, or not at all."""

    CLEAR = (rounds(100, 120, 110), rounds(95, 114.1, 104.4))
    UNCLEAR = (rounds(100, 120, 110), rounds(95, 126, 109))

    def summaries(self, turns: tuple[dict[str, float], dict[str, float]]):  # type: ignore[no-untyped-def]
        naive, torch = drawn("naive", "########"), drawn("torch", "####")
        return compare_variants([naive, torch], dict(zip((naive.trace, torch.trace), turns, strict=True)))

    def test_the_speedup_is_that_of_the_turns(self) -> None:
        _, torch = self.summaries(self.CLEAR)
        assert torch.speedup == pytest.approx(1.053, abs=0.001)
        assert (torch.supported, torch.speedup_from, torch.confounded_by) == (True, "turns", None)
        assert 1 < torch.speedup_low < torch.speedup < torch.speedup_high < 1.06

    def test_an_interval_with_1_supports_no_sentence(self) -> None:
        summaries = self.summaries(self.UNCLEAR)
        assert summaries[1].supported is False
        said = " ".join(describe_changes(summaries))
        assert "fast" not in said
        assert "shorter" not in said

    def test_the_shortest_of_several_that_are_as_fast_is_not_called_fastest(self) -> None:
        naive, torch, flat = drawn("naive", "########"), drawn("torch", "####"), drawn("flat", "#####")
        of = {naive.trace: self.CLEAR[0], torch.trace: self.CLEAR[1], flat.trace: rounds(95, 114, 104.6)}
        summaries = [replace(run, overlap_ratio=0.5) for run in compare_variants([naive, torch, flat], of)]
        said = " ".join(describe_changes(summaries))
        assert "has the shortest step, measured in turns, 5 % (" in said
        assert "but is not clearly faster than" in said
        assert "is fastest" not in said

    def test_a_run_that_was_not_trained_in_turns_has_no_speedup(self) -> None:
        _, torch = self.summaries((self.CLEAR[0], {}))
        assert (torch.speedup, torch.supported) == (None, None)

    def test_the_table_says_where_it_comes_from(self) -> None:
        summaries = self.summaries(self.CLEAR)
        assert "in turns" in how_to_read(summaries)
        assert "3 rounds" in how_to_read(summaries)
        _, row = compare_rows(
            summaries, [measure_run_cost(run, Contention) for run in (drawn("naive", "#"), drawn("torch", "#"))]
        )
        assert row["speedup_±"] == pytest.approx((summaries[1].speedup_high - summaries[1].speedup_low) / 2)
        assert "one after another" in how_to_read(
            compare_variants([drawn("naive", "########"), drawn("torch", "####")])
        )


def test_the_title_of_the_waterfall_names_no_run_that_the_turns_do_not_support() -> None:
    runs = [run for name in ("naive", "flat") for run in dp.load_runs(TRACES / f"{name}.sqlite")]
    results, waterfall = [run.overlap() for run in runs], compare_steps(runs)
    files = [run.files[0] for run in runs]
    unclear, clear = (
        compare_variants(results, dict(zip(files, (rounds(100, 100, 100), of_flat), strict=True)))
        for of_flat in (rounds(80, 120, 99), rounds(80, 81, 79))
    )
    assert _waterfall_headline(waterfall, unclear) == "No run is clearly faster than naive"
    assert _waterfall_headline(waterfall, clear) == "flat takes 20 % off the step of naive, measured in turns"
    captured = [
        run for name in ("naive", "torch") for run in dp.load_runs((TRACES / "h200" / "gloo").glob(f"{name}.rank*"))
    ]
    of_captures = compare_variants([run.overlap() for run in captured])
    expected = "torch takes 29 % off the median step of naive"
    assert _waterfall_headline(compare_steps(captured), of_captures) == expected, "the bars are means: 28 % less"


@pytest.mark.torch
def test_ranks_train_configurations_one_after_another() -> None:
    """In processes of their own, as the study's runs; the memory of a process is that of all of them."""
    configs = [replace(config, steps=2, warmup=1) for config in (NAIVE, BUCKETED)]
    naive, bucketed = measure_in_turns([replace(configs[0], synchronized_steps=1), configs[1]])
    assert isinstance(naive, Manifest)
    assert isinstance(bucketed, Manifest)
    assert [(one.variant, len(one.step_seconds), one.peak_memory_bytes) for one in (naive, bucketed)] == [
        ("naive", 2, None),
        ("bucketed", 2, None),
    ]
    assert (bool(naive.messages), naive.final_loss) == (True, pytest.approx(bucketed.final_loss))


@pytest.mark.torch
def test_one_that_fails_fails_the_round() -> None:
    lost = measure_in_turns([NAIVE, replace(FLAT, batch_size=3)])
    assert [str(error).partition(":")[0] for error in lost] == ["a batch of 3 cannot be split evenly over 2 ranks"] * 2


def test_few_repeats_have_an_interval_that_covers() -> None:
    """Of three to six repeats, 95 % of the intervals contain the true ratio; the bootstrap's would be 76 to 90 %."""
    import random

    generator = random.Random(7)
    for repeats in (3, 4, 6):
        hits = 0
        for _ in range(1000):
            found = ratio_of_repeats([1.2 * generator.lognormvariate(0, 0.05) for _ in range(repeats)])
            assert found is not None
            hits += found.low <= 1.2 <= found.high
        assert 930 <= hits <= 970
    assert ratio_of_repeats([1.0, 1.1]) is None
