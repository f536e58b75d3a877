"""What was foreseen beside what was measured, and the page of a result."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_prof.analyze.cost import Bounds
from ddp_prof.present.table import TableOptions, show
from ddp_prof.runs import load_runs
from ddp_prof.tune import candidates
from ddp_prof.tune.page import draw_gains, draw_rounds, write_tuning_page
from ddp_prof.tune.report import foreseen_text, tuning_view, why_view
from ddp_prof.tune.sequential import Gain
from ddp_prof.tune.tries import parse_tries
from ddp_prof.tune.verdicts import best_of
from ddp_prof.tune.why import BEYOND, UNKNOWN, WITHIN, Foreseen, Why, bounds_of, foresee
from tests.charts import validated
from tests.command_line import run
from tests.tune.simulated import Simulated, tune

ROOT = Path(__file__).parents[2]
MEASURED = Gain(0.05, 0.03, 0.07, 8, 0.01)
UNDECIDED = Gain(0.05, None, None, 3, 0.01)


@pytest.mark.parametrize(
    ("foreseen", "measured", "expected", "said"),
    [
        # A bound says nothing of how much of it a try gains.
        (
            Foreseen("hiding communication", True, 0.2),
            MEASURED,
            WITHIN,
            "at most 20.0 %; measured 5.0 % (3.0 to 7.0): within",
        ),
        (Foreseen("hiding communication", True, 0.06), MEASURED, WITHIN, "at most 6.0 %"),
        (Foreseen("hiding communication", True, 0.02), MEASURED, BEYOND, "something else became shorter, too"),
        # An expectation agrees where both intervals have a value in common.
        (Foreseen("copies", False, 0.02, 0.01, 0.04), MEASURED, WITHIN, "copies: 2.0 % (1.0 to 4.0); measured"),
        (Foreseen("copies", False, 0.02, 0.01, 0.029), MEASURED, BEYOND, "the intervals exclude each other"),
        (Foreseen("copies", False, 0.09, 0.08, 0.10), MEASURED, BEYOND, "the intervals exclude each other"),
        (Foreseen("copies", False, 0.02), MEASURED, UNKNOWN, "copies: 2.0 %; measured 5.0 % (3.0 to 7.0)"),
        (Foreseen("any network", True, None, reason="on a CPU"), MEASURED, UNKNOWN, None),
        (Foreseen("hiding communication", True, 0.02), UNDECIDED, UNKNOWN, "at most 2.0 %"),
    ],
)
def test_what_was_foreseen_beside_what_was_measured(
    foreseen: Foreseen, measured: Gain, expected: str, said: str | None
) -> None:
    assert foreseen.compare(measured) == expected
    text = foreseen_text(foreseen, measured)
    assert (text is None) if said is None else said in (text or "")


def known_of(capture: str, tried: str) -> dict[str, tuple[float | None, float | None]]:
    """The low and high end of what is foreseen, or its bound, in tenths of a per cent of a step."""
    (run,) = load_runs(ROOT / "traces" / f"{capture}.sqlite")
    return {
        one.source: (None if one.low is None else round(1000 * one.low, 1), round(1000 * (one.high or one.gain), 1))
        for one in foresee(run, parse_tries([tried])[0])
        if one.gain is not None
    }


def test_only_findings_that_a_setting_of_the_try_answers_foresee_its_gain() -> None:
    bound = {"hiding communication": (None, 593.8)}
    copies = {"copies out of buckets": (None, 14.0), "copies out of buckets, simulated": (0.1, 0.2)}
    assert known_of("h200/nccl/torch", "gradient_as_bucket_view") == bound | copies
    assert known_of("h200/nccl/torch", "static_graph+gradient_as_bucket_view") == bound | copies
    assert known_of("h200/nccl/torch", "bucket_cap_mb=5") == bound


def test_the_bound_of_any_network_is_the_upper_end_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """'At most 20 %' was said where it may be 30."""
    run = SimpleNamespace(cost=lambda: SimpleNamespace(bounds=Bounds(10, 20, 15, 30)))
    monkeypatch.setattr("ddp_prof.tune.why._step_ns", lambda _: 100)
    assert [one.gain for one in bounds_of(run, parse_tries(["bucket_cap_mb=5"])[0])] == [0.1, 0.3]  # type: ignore[arg-type]


def test_what_is_not_known_has_a_reason() -> None:
    (today,) = load_runs(ROOT / "traces" / "bucketed_100mb.sqlite")
    found = {one.source: one for one in foresee(today, parse_tries(["bucket_cap_mb=10"])[0])}
    assert "ranks share cores" in (found["any network"].reason or "")
    assert found["one bucket for all gradients, simulated"].reason
    assert [one.reason for one in found.values() if one.gain is not None] == [None, None]


@pytest.fixture
def why() -> Why:
    runs = [load_runs(ROOT / "traces" / f"{name}.sqlite")[0] for name in ("bucketed_100mb", "bucketed_10mb")]
    (tried,) = parse_tries(["bucket_cap_mb=10"])
    return Why(tried, MEASURED, (runs[0], runs[1]), foresee(runs[0], tried))


def test_a_row_for_what_was_measured_and_for_each_source(why: Why, capsys: pytest.CaptureFixture[str]) -> None:
    show(TableOptions("csv"), [why_view(why)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("source,gain_%,gain_low_%,gain_high_%,why")
    assert printed[1].startswith('"measured, 8 pairs",5.0,3.0,7.')
    assert len(printed) == 2 + len(why.foreseen)
    assert why_view(why).title.splitlines()[:2] == [
        "why bucket_cap_mb=10 is faster:",
        "hiding communication: at most 17.6 %; measured 5.0 % (3.0 to 7.0): within that",
    ]


def test_the_page_has_the_result_and_why(why: Why, tmp_path: Path) -> None:
    gains = {"bucket_cap_mb=10": 0.05, "bucket_cap_mb=1": -0.1}
    result = tune(Simulated(gains), "bucket_cap_mb=1,10", "static_graph", rounds=8)
    best = best_of(result.verdicts)
    assert best is not None
    assert best.gain is not None
    write_tuning_page(result, tmp_path / "tune.html", Why(best.tried, best.gain, why.runs, why.foreseen))
    page = (tmp_path / "tune.html").read_text()
    for said in (
        *tuning_view(result).title.splitlines()[:-1],
        "hiding communication: at most 17.6 %",
        "torchrun train.py",
    ):
        assert said in page
    assert "<h1>Recommended: DistributedDataParallel(model, bucket_cap_mb=10)</h1>" in page
    write_tuning_page(result, tmp_path / "alone.html")
    assert '"chart-waterfall"' not in (tmp_path / "alone.html").read_text()


def test_the_charts_show_each_gain_with_its_interval_and_each_run() -> None:
    result = tune(Simulated({"A=1": 0.05}), "A=1", "static_graph", "gradient_as_bucket_view=false", rounds=8)
    (points,) = validated(draw_gains)(result).data
    known = [each for each in result.verdicts if each.gain]
    assert list(points.y) == [0, 1], "what is set today has an empty row"
    assert list(points.marker.symbol) == ["circle-open" if each.is_open else "circle" for each in known]
    for x, more, less, each in zip(points.x, points.error_x.array, points.error_x.arrayminus, known, strict=True):
        assert each.gain is not None
        assert (x - less, x + more) == pytest.approx((100 * (each.gain.low or 0), 100 * (each.gain.high or 0)))
    lines = validated(draw_rounds)(result).data
    assert [line.name for line in lines] == ["today", "A=1", "static_graph=True"]
    assert list(lines[0].x) == [*range(1, result.rounds + 1)]


def test_few_pairs_are_a_mark_without_an_interval() -> None:
    (points,) = validated(draw_gains)(tune(Simulated(), "A=1", rounds=3)).data
    assert points.error_x.array is None, "a bar of no length has ends that can be seen"
    assert list(points.marker.symbol) == ["circle-open"]


@pytest.mark.parametrize(("rounds", "every"), [(1, 1), (2, 1), (10, 1), (11, 2)])
def test_rounds_are_marked_by_whole_numbers(rounds: int, every: int) -> None:
    """Marks that lie between two rounds would repeat the number of one: 1 1 1 2 2 2."""
    drawn = draw_rounds(tune(Simulated(), "A=1", rounds=rounds))["layout"]["xaxis"]
    assert (drawn["tick0"], drawn["dtick"]) == (1, every)


@pytest.mark.parametrize("output", ["train.py", "tune.db"])
def test_a_page_overwrites_neither_the_program_nor_the_store(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(1)")
    done = run("tune", "--try", "A=1", "--store", "tune.db", "--html", output, "--", sys.executable, "train.py")
    assert done.exit_code in (1, 2)
    assert output in done.stderr
    assert Path("train.py").read_text() == "raise SystemExit(1)"
    assert not Path("tune.db").exists()


def test_without_a_try_it_says_that_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = SimpleNamespace(tries=(), reasons=("communication is hidden already",))
    monkeypatch.setattr(candidates, "find_candidates", lambda *_arguments: nothing)
    done = run("tune", "--store", "tune.db", "--html", "tune.html", "--", sys.executable, "-c", "pass")
    assert "communication is hidden already" in done.output
    assert done.stderr.splitlines()[-1] == "no page: nothing was tried, so tune.html is not written"
    assert not Path("tune.html").exists()


def test_the_page_of_one_run_speaks_of_its_blocks(tmp_path: Path) -> None:
    """'18 runs' and 'each run' were told of blocks of steps of a single run."""
    result = tune(Simulated({"bucket_cap_mb=1": 0.2}), "bucket_cap_mb=1", rounds=6)
    for in_process, said in ((False, "runs in 6 rounds"), (True, "blocks in 6 rounds")):
        one = replace(result, program=replace(result.program, in_process=in_process))
        write_tuning_page(one, tmp_path / "tune.html")
        page = (tmp_path / "tune.html").read_text(encoding="utf-8")
        assert said in page
        assert ("two blocks of steps of one run" in page) is in_process
