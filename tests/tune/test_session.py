"""Turns, when a try ends, and what is said then: on simulated step lengths."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.errors import OutOfMemoryError, TraceError, WorkloadError
from ddp_prof.present.table import TableOptions, show
from ddp_prof.tune.measure import Measured, OutOfTimeError
from ddp_prof.tune.report import conclusion_of, plan_lines, rows_of, sentence_of, tuning_view
from ddp_prof.tune.session import Limits, Session, Tuning
from ddp_prof.tune.store import Store
from ddp_prof.tune.tries import TODAY, Try, parse_tries
from ddp_prof.tune.verdicts import TODAYS
from tests.examples import IS_NIGHTLY
from tests.full_disk import full_disk
from tests.tune import noise
from tests.tune.simulated import PROGRAM, NoStore, Simulated, outcomes, tune

BUCKETS = "bucket_cap_mb=1,5,25,50,100"


def sentences(result: object) -> str:
    return tuning_view(result).title  # type: ignore[arg-type]


def test_the_best_of_six_is_found_in_eight_rounds() -> None:
    """A planted cause: each bucket costs, so few large ones win."""
    gains = {"bucket_cap_mb=1": -0.2, "bucket_cap_mb=5": -0.1, "bucket_cap_mb=50": 0.05, "bucket_cap_mb=100": 0.08}
    result = tune(Simulated(gains), BUCKETS, rounds=8)
    assert outcomes(result) == {
        "bucket_cap_mb=1": "slower",
        "bucket_cap_mb=5": "slower",
        "bucket_cap_mb=25": "cannot be told",
        "bucket_cap_mb=50": "faster",
        "bucket_cap_mb=100": "faster",
    }
    assert result.best is not None
    gain = result.best.gain
    assert result.best.tried.label == "bucket_cap_mb=100"
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    assert gain.low < 0.08 < gain.high
    assert conclusion_of(result)[0] == "recommended: DistributedDataParallel(model, bucket_cap_mb=100)"


def test_a_round_runs_each_open_try_once_and_a_decided_one_no_more() -> None:
    program = Simulated({"static_graph=True": 0.3})
    tune(program, "static_graph", "gradient_as_bucket_view", rounds=9, worth=0.0001)
    assert program.runs[0] == "today"
    rounds = [program.runs[1:][at : at + 3] for at in range(0, 18, 3)]
    assert all(sorted(each) == ["gradient_as_bucket_view=True", "static_graph=True", "today"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "the order is drawn"
    assert Counter(program.runs[19:]) == {"today": 3, "gradient_as_bucket_view=True": 3}


def test_no_verdict_before_six_pairs() -> None:
    few = tune(Simulated({"static_graph=True": 0.5}), "static_graph", rounds=5)
    assert outcomes(few) == {"static_graph=True": "cannot be told"}
    # Two pairs that were alike by chance promised: 6 more rounds could show a gain of 0.9 %.
    assert sentence_of(few.verdicts[0], 0.01) == "static_graph=True: cannot be told (5 pairs); a verdict needs 6"
    # One pair of equal settings on a busy machine: 59.4 %, beside an interval that was n/a.
    assert [row["gain_%"] for row in rows_of(few)] == [None, None]
    result = tune(Simulated({"static_graph=True": 0.5}), "static_graph", rounds=20)
    assert (result.rounds, outcomes(result)) == (6, {"static_graph=True": "faster"})


def test_what_cannot_be_told_says_what_more_rounds_could_show() -> None:
    result = tune(Simulated(noise=noise.spikes), "static_graph", rounds=8)
    (verdict,) = result.verdicts
    assert (verdict.outcome, verdict.more) == ("cannot be told", 8)
    assert verdict.could_show is not None
    assert verdict.gain is not None
    assert verdict.gain.high is not None
    assert 0 < verdict.could_show < verdict.gain.high - verdict.gain.value
    assert "8 more rounds could show a gain of" in sentence_of(verdict, 0.01)


def test_a_round_after_which_nothing_is_open_announces_no_verdicts() -> None:
    """'1 of 1 decided; verdicts from round 6 on' was said of a try that had failed twice."""
    program, said = Simulated(), list[str]()
    program.errors["A=1"] = WorkloadError("no")
    tries = parse_tries(["A=1"])
    store = NoStore(Path("none.db"), PROGRAM, tries, Path("/"))
    Session(PROGRAM, tries, program, store, Limits(), {}, said.append).run()
    assert [line for line in said if "decided" in line] == [
        "round 1: 0 of 1 decided; a verdict needs 6 pairs",
        "round 2: 1 of 1 decided",
    ]


def test_a_difference_below_worth_is_none() -> None:
    result = tune(Simulated({"static_graph=True": 0.001}), "static_graph", rounds=200, worth=0.02)
    assert outcomes(result) == {"static_graph=True": "no difference"}
    assert "no difference of 2.0 % or more" in sentences(result)
    assert conclusion_of(result) == ["nothing recommended: no try is known to be faster than today's settings"]


@pytest.mark.parametrize("form", ["csv", "markdown", "table", "json"])
def test_the_answer_in_every_form(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    gains = {"static_graph=True": 0.05, "bucket_cap_mb=50": -0.05}
    result = tune(Simulated(gains), "static_graph", "bucket_cap_mb=50", rounds=12)
    show(TableOptions(form), [tuning_view(result)])
    printed = capsys.readouterr()
    if form == "json":
        document = json.loads(printed.out)
        assert (document["schema"], document["recommended"]) == (1, "static_graph=True")
        assert [one["outcome"] for one in document["tries"]] == ["faster", "slower"]
    else:
        assert len([line for line in printed.out.splitlines() if re.search(r"static_graph=True\W+faster", line)]) == 1
        assert "DistributedDataParallel(model, static_graph=True)" in printed.out


REPETITIONS = 400 if IS_NIGHTLY else 25


OF_THE_GATE = (noise.drift, noise.recorded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [of if of in OF_THE_GATE else pytest.param(of, marks=pytest.mark.nightly) for of in noise.ALL],
    ids=lambda of: of.__name__,
)
def test_equal_settings_seldom_have_a_winner(of: noise.Noise) -> None:
    wrong = 0
    for seed in range(REPETITIONS):
        found = outcomes(tune(Simulated(noise=of, seed=seed), BUCKETS, seed=seed))
        wrong += bool({"faster", "slower"} & {*found.values()})
    assert wrong <= 0.05 * REPETITIONS


@pytest.mark.parametrize("of", [noise.normal, noise.drift, noise.two_speeds, noise.heavy_tails])
def test_five_per_cent_are_found(of: noise.Noise) -> None:
    found = 0
    for seed in range(20):
        result = tune(Simulated({"static_graph=True": 0.05}, of, seed), "static_graph", "bucket_cap_mb=50", seed=seed)
        assert outcomes(result)["static_graph=True"] != "slower"
        found += outcomes(result)["static_graph=True"] == "faster"
    assert found >= 18


def test_a_try_that_changes_losses_is_never_recommended() -> None:
    program = Simulated({"A=1": 0.2, "static_graph=True": 0.1})
    program.losses = {"A=1": (2.0, 1.01)}
    result = tune(program, "A=1", "static_graph")
    assert outcomes(result) == {"A=1": "faster", "static_graph=True": "faster"}
    assert result.best is not None
    assert result.best.tried.label == "static_graph=True"
    said = r"A=1: (19|20)\.\d % faster .*its losses differ by 0\.01 of their size: not recommended"
    assert re.search(said, sentences(result))
    # It was said that no try is known to be faster.
    (alone,) = conclusion_of(tune(program, "A=1"))
    assert alone.startswith("nothing recommended: no try that leaves the losses as they are is known to be faster")


def test_a_try_that_changes_gradients_by_design_is_faster_and_not_recommended() -> None:
    gains = {"comm_hook=fp16_compress": 0.2, "static_graph=True": 0.1}
    result = tune(Simulated(gains), "comm_hook=fp16_compress", "static_graph")
    assert outcomes(result) == dict.fromkeys(gains, "faster")
    recommended, numeric = conclusion_of(result)
    assert recommended == "recommended: DistributedDataParallel(model, static_graph=True)"
    assert numeric == (
        "faster, but with other gradients, so only if the training allows them: "
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
    )
    (alone,) = (one for one in result.verdicts if one.tried.changes_numerics)
    assert "same losses, but it changes the gradients" in sentence_of(alone, 0.01)
    nothing, _ = conclusion_of(tune(Simulated(gains), "comm_hook=fp16_compress"))
    assert nothing.startswith("nothing recommended: no try that leaves the gradients as they are")


def test_a_try_that_fails_twice_or_lacks_memory_ends_and_the_others_go_on() -> None:
    program = Simulated({"static_graph=True": 0.1})
    program.errors = {"A=1": WorkloadError("ValueError: no"), "A=2": OutOfMemoryError("CUDA out of memory")}
    result = tune(program, "A=1,2", "static_graph")
    assert outcomes(result) == {"A=1": "failed", "A=2": "failed", "static_graph=True": "faster"}
    assert (program.runs.count("A=1"), program.runs.count("A=2")) == (2, 1)
    assert "A=1: failed: ValueError: no" in sentences(result)


def test_a_run_that_takes_too_long_says_what_set_its_limit() -> None:
    """The first run has --minutes; a later one is compared with today's settings, and more minutes would not help."""
    late = OutOfTimeError("the program had not ended after 600 s")
    program = Simulated()
    program.errors = {"today": late}
    with pytest.raises(
        WorkloadError, match=r"^with today's settings: the program .* s: raise --minutes, or give fewer"
    ):
        tune(program, "A=1")
    program.errors = {"A=1": late}
    said = "the program had not ended after 600 s, and a run with today's settings takes 0 s: does it hang?"
    assert f"A=1: failed: {said}" in sentences(tune(program, "A=1", "static_graph"))


def test_a_program_that_fails_today_is_not_tuned() -> None:
    program = Simulated()
    program.errors = {"today": WorkloadError("ModuleNotFoundError: no module")}
    with pytest.raises(WorkloadError, match="with today's settings: ModuleNotFoundError"):
        tune(program, "static_graph")


def test_a_run_of_today_that_fails_costs_its_round_and_two_end_the_tuning(tmp_path: Path) -> None:
    """One run in which a port was taken ended a tuning without an answer."""
    tries = parse_tries(["static_graph"])
    store = Store(tmp_path / "tune.db", PROGRAM, tries, tmp_path)

    def result(*failing: int) -> Tuning:
        program = Simulated({"static_graph=True": 0.1})

        def measure(tried: Try, limit_s: int) -> Measured:
            if tried == TODAY and program.runs.count("today") in failing:
                program.runs.append("today")
                raise WorkloadError("address in use")
            return program(tried, limit_s)

        return Session(PROGRAM, tries, measure, store, Limits(), {}, clock=lambda: 0.0).run()

    of_two = result(2, 4)  # before them one of round 0 and one of round 1
    assert (of_two.rounds, of_two.ended) == (4, "2 runs with today's settings failed: address in use")
    assert sentences(of_two).startswith("static_graph=True: cannot be told (2 pairs)")
    # The same command runs those two rounds again, in the first of which one fails again.
    of_one = result(0)
    assert (of_one.rounds, outcomes(of_one)) == (7, {"static_graph=True": "faster"})
    assert of_one.verdicts[0].gain.pairs == 6  # type: ignore[union-attr]


def test_a_try_that_hangs_leaves_the_others_their_time() -> None:
    """Each run counted as one that hung, so the tuning ended after one round."""
    assert outcomes(session(10, hangs="A=1").run()) == {"static_graph=True": "faster", "A=1": "failed"}


def test_what_is_set_today_is_not_run() -> None:
    program = Simulated({"static_graph=True": 0.1})
    result = tune(program, "gradient_as_bucket_view=false", "static_graph")
    assert outcomes(result)["gradient_as_bucket_view=False"] == "set today"
    assert "gradient_as_bucket_view=False" not in program.runs
    assert "gradient_as_bucket_view=False: the program has it already" in sentences(result)


class StopError(Exception):
    pass


def test_an_interrupted_tuning_goes_on_with_whole_rounds(tmp_path: Path) -> None:
    tries = ("static_graph", "bucket_cap_mb=50")
    file = tmp_path / "tune.db"

    def store() -> Store:
        return Store(file, PROGRAM, parse_tries(tries), tmp_path)

    class Stops(Simulated):
        def __call__(self, tried: object, limit_s: int) -> object:  # type: ignore[override]
            if len(self.runs) == 12:
                raise StopError
            return super().__call__(tried, limit_s)  # type: ignore[arg-type]

    with pytest.raises(StopError):
        tune(Stops({"static_graph=True": 0.1}), *tries, store=store())
    kept = store().load()
    assert len(kept) == 12, "a run is kept as soon as it has ended"
    rest = Simulated({"static_graph=True": 0.1}, seed=1)
    result = tune(rest, *tries, store=store(), rounds=6)
    # Rounds 1 to 3 are whole; the fourth, with two of three runs, is run again.
    assert len(rest.runs) == 3 * 3
    assert [trial for trial in result.trials if trial.round <= 3] == kept[:10]
    again = Simulated()
    assert tune(again, *tries, store=store(), rounds=6).verdicts == result.verdicts
    assert again.runs == []


def test_another_program_has_runs_of_its_own(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "tune.db"
    script.write_text("first")
    tune(Simulated(), "static_graph", store=Store(file, PROGRAM, parse_tries(["static_graph"]), tmp_path), rounds=1)
    assert len(Store(file, PROGRAM, parse_tries(["static_graph"]), tmp_path).load()) == 3
    script.write_text("second")
    assert Store(file, PROGRAM, parse_tries(["static_graph"]), tmp_path).load() == []


def test_another_value_of_a_tried_variable_today_has_runs_of_its_own(tmp_path: Path) -> None:
    """Runs with OMP_NUM_THREADS=1 today were shown as those of 4, and not one was made."""
    tries, file = parse_tries(["OMP_NUM_THREADS=2"]), tmp_path / "tune.db"

    def store(**environ: str) -> Store:
        return Store(file, PROGRAM, tries, tmp_path, {"HOME": "/", **environ})

    tune(Simulated(), "OMP_NUM_THREADS=2", store=store(OMP_NUM_THREADS="1"), rounds=1)
    assert len(store(OMP_NUM_THREADS="1", HOME="/root").load()) == 3
    assert store(OMP_NUM_THREADS="4").load() == []


def test_another_setting_of_communication_today_has_runs_of_its_own(tmp_path: Path) -> None:
    """Runs with NCCL_P2P_DISABLE=1 were shown as those without it, as no try names that variable."""

    def store(**environ: str) -> Store:
        return Store(tmp_path / "tune.db", PROGRAM, parse_tries(["static_graph"]), tmp_path, {"HOME": "/", **environ})

    tune(Simulated(), "static_graph", store=store(NCCL_P2P_DISABLE="1"), rounds=1)
    assert len(store(NCCL_P2P_DISABLE="1", SHLVL="2").load()) == 3
    assert store().load() == store(NCCL_P2P_DISABLE="0").load() == []


def test_losses_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    program = Simulated()
    program.losses = {"today": (2.0, None)}
    store = Store(tmp_path / "tune.db", PROGRAM, parse_tries(["static_graph"]), tmp_path)
    tune(program, "static_graph", store=store, rounds=1)
    assert [loss.value for loss in store.load()[0].losses[1]] == [2.0, None]


def test_a_file_that_is_something_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    store = Store(file, PROGRAM, parse_tries(["static_graph"]), tmp_path)
    with pytest.raises(TraceError, match=r"not a database of tunings \(file is not a database\): name another file"):
        tune(Simulated(), "static_graph", store=store)
    assert file.read_text() == "mine"


def test_a_store_that_cannot_be_written_is_noticed_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, may = tmp_path / "tune.db", os.access

    def run(text: str) -> list[str]:
        program = Simulated()
        tune(program, text, store=Store(file, PROGRAM, parse_tries([text]), tmp_path), rounds=1)
        return program.runs

    assert len(run("static_graph")) == 3
    for read_only in (tmp_path, file):
        # permissions mean nothing to root
        monkeypatch.setattr(os, "access", lambda path, mode, at=read_only: path != at and may(path, mode))
        assert run("static_graph") == [], "what it has is shown"
        with pytest.raises(TraceError, match=r"tune\.db: cannot be written: name another file with --store"):
            run("bucket_cap_mb=5")


def test_a_full_disk_is_noticed_before_the_first_run(tmp_path: Path) -> None:
    """The program had run, for minutes, when its result could not be kept."""
    program = Simulated()
    store = Store(tmp_path / "tune.db", PROGRAM, parse_tries(["static_graph"]), tmp_path)
    with (
        full_disk(),
        pytest.raises(TraceError, match=r"tune\.db: cannot be written \(File too large\): make room there"),
    ):
        tune(program, "static_graph", store=store)
    assert program.runs == []


def session(minutes: float, store: Store | None = None, hangs: str = "") -> Session:
    """Each run takes 30 s, one of what hangs two minutes; beside what hangs there is no other work."""
    now = 0.0

    def clock() -> float:
        return now

    program = Simulated({"static_graph=True": 0.3}, noise.normal) if hangs else Simulated(noise=noise.spikes)

    def measure(tried: Try, limit_s: int) -> Measured:
        nonlocal now
        now += 120 if tried.label == hangs else 30
        program.errors = {hangs: OutOfTimeError("the program had not ended after 120 s")}
        return program(tried, limit_s)

    tries = parse_tries(["static_graph", *filter(None, [hangs])])
    kept = store or NoStore(Path("none.db"), PROGRAM, tries, Path("/"))
    return Session(PROGRAM, tries, measure, kept, Limits(minutes=minutes), {}, clock=clock)


def test_no_round_is_begun_that_would_end_too_late() -> None:
    result = session(10).run()
    # 30 s for today's first run, then 60 s a round.
    assert (result.rounds, result.ended) == (9, "the next round would not end within 10 minutes (--minutes)")


def test_the_plan_says_runs_minutes_and_what_they_can_show() -> None:
    planned = session(10)
    lines = plan_lines(planned.limits, planned.run_today(), planned.verdicts())
    assert lines[0] == "1 try and today's settings: 2 runs a round, of about 30 s each"
    assert lines[1].startswith("at most 10 rounds, 20 runs, 10 minutes")
    assert [line.partition(",")[0] for line in lines[2:]] == [
        "10 rounds can show a gain of 0.4 %",
        "10 rounds can show a gain of 1.2 %",
        "10 rounds can show a gain of 3.7 %",
    ]
    settled = [replace(verdict, outcome=TODAYS) for verdict in planned.verdicts()]
    assert plan_lines(planned.limits, planned.run_today(), settled) == [
        "the program has all of these settings already: there is nothing to run"
    ]
    assert plan(session(2.5))[1:] == [
        "at most 2 rounds, 4 runs, 2 minutes (--rounds 20, --minutes 2.5); a try that is decided ends earlier",
        "too few: a verdict needs 6 rounds; 6 take 6 minutes",
    ]
    assert plan(session(1))[1].startswith("at most 1 round, 2 runs, 60 s (")


def plan(planned: Session) -> list[str]:
    return plan_lines(planned.limits, planned.run_today(), planned.verdicts(of_all_kept=True))


def test_a_plan_goes_on_from_the_rounds_that_the_store_has(tmp_path: Path) -> None:
    """It left them out of its count, and took the spread of two pairs, which are alike by chance, for that of all."""
    store = Store(tmp_path / "tune.db", PROGRAM, parse_tries(["static_graph"]), tmp_path)
    session(2.5, store).run()
    few = plan(session(5, store))
    assert few[1].startswith("at most 5 rounds, 10 runs, 5 minutes, beside the 2 of before (")
    assert [line.rpartition(" ")[0] for line in few[2:]] == [
        "7 rounds can show a gain of 0.5 %, if pairs of runs vary by 0.3",
        "7 rounds can show a gain of 1.7 %, if pairs of runs vary by 1.0",
        "7 rounds can show a gain of 4.9 %, if pairs of runs vary by 3.0",
    ]
    result = session(5, store).run()
    assert plan(session(5, store))[-1].endswith("if pairs of runs vary as those measured so far")
    settled = [replace(each, outcome="faster") for each in result.verdicts]
    assert plan_lines(Limits(), result.today, settled) == [
        "all tries are decided already: there is nothing to run, and without --plan the answer is shown"
    ]


def test_why_a_tuning_ended_is_said_once() -> None:
    """'2 rounds: 2 rounds are done (--rounds)' was said."""
    result = tune(Simulated(), "static_graph", rounds=2)
    assert tuning_view(result).notes[1] == "2 rounds: the number of --rounds is reached"
