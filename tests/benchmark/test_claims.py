from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_prof.benchmark.claims import CLAIMS, check_claims
from ddp_prof.benchmark.settings import Timing, summarize_settings
from ddp_prof.benchmark.study import NS_PER_S, load_study
from tests.benchmark.results_factory import Sweep, study_like
from tests.conftest import ROOT

REFERENCE = ROOT.parent / "shared" / "data" / "cs336_xl_2gpu_reference.csv"


def verdicts(timings: list[Timing]) -> dict[str, str]:
    return {item.name: item.holds for item in check_claims(timings)}


def timings_of(sweep: Sweep) -> list[Timing]:
    return [summarize_setting.timing for summarize_setting in summarize_settings(sweep.results())]


class TestStudy:
    def test_it_comes_with_the_package_whole(self) -> None:
        timings = load_study("cs336").timings
        assert len(timings) == len({timing.setting for timing in timings}) == 42
        assert [timing.setting.label for timing in timings if timing.step_ns is None] == ["naive"]
        naive = timings[0]
        assert (naive.setting.label, naive.setting.workload) == ("naive", (2, 128))
        assert (naive.step_ns.value, naive.communication_ns.value) == pytest.approx((783.3e6, 418.2e6))

    @pytest.mark.skipif(not REFERENCE.is_file(), reason="the published file is not part of the repository")
    def test_its_figures_are_the_published_ones(self) -> None:
        with Path(REFERENCE).open() as file:
            published = {
                (row["variant"], row["bucket_size_mb"], row["local_batch_size"], row["sequence_length"]): (
                    row["step_time_s"], row["grad_all_reduce_s"], row["status"],
                )
                for row in csv.DictReader(file)
            }  # fmt: skip
        for timing in load_study("cs336").timings:
            size = timing.setting.bucket_size_mb
            key = timing.setting.variant, "" if size is None else f"{size:g}", *map(str, timing.setting.workload)
            step, communication, status = published.pop(key)
            assert timing.status == status
            assert (timing.step_ns and timing.step_ns.value / NS_PER_S) == (float(step) if step else None)
            expected = float(communication) if communication else None
            assert (timing.communication_ns and timing.communication_ns.value / NS_PER_S) == expected
        assert not published

    def test_what_its_own_figures_bear_out(self) -> None:
        found = verdicts(list(load_study("cs336").timings))
        open_ones = {name for name, holds in found.items() if holds == "cannot tell"}
        assert open_ones == {"buckets_beat_overlap", "inner_bucket_is_fastest"}
        assert {holds for name, holds in found.items() if name not in open_ones} == {"yes"}

    def test_its_numbers(self) -> None:
        found = {item.name: item.effect for item in check_claims(load_study("cs336").timings)}
        assert found["half_of_naive"].value == pytest.approx(0.5339, abs=1e-4)
        assert found["overlap_beats_naive"].value == pytest.approx(1 - 0.7328 / 0.8051)  # the median setting
        unsaved = sorted(
            ((naive_comm - comm) - (naive - step)) / naive
            for naive, naive_comm, step, comm in (
                (0.7833, 0.4182, 0.7245, 0.2318),
                (0.8051, 0.4425, 0.7328, 0.1831),
                (0.9033, 0.4576, 0.7731, 0.1371),
                (0.7958, 0.4395, 0.7297, 0.2001),
                (0.8811, 0.4555, 0.7574, 0.1393),
            )
        )
        hidden = found["hidden_is_not_saved"]
        assert (hidden.low, hidden.value, hidden.high) == pytest.approx((unsaved[0], unsaved[2], unsaved[4]))


class TestHere:
    def test_a_sweep_like_the_study_agrees_with_it(self) -> None:
        assert set(verdicts(timings_of(study_like())).values()) == {"yes"}

    def test_the_contrary_is_told(self) -> None:
        sweep = Sweep(noise=0.002)
        for work in ((2, 64), (2, 128)):
            sweep.add("naive", 100, 30, work=work)
            sweep.add("flat", 70, 15, work=work)
            sweep.add("overlap", 110, 29, work=work)
            for bucket, step, wait in ((1.0, 115, 20), (10.0, 130, 25), (100.0, 120, 20)):
                sweep.add("bucketed", step, wait if work[1] == 64 else wait + 30, bucket=bucket, work=work)
        found = verdicts(timings_of(sweep))
        assert found == {
            "half_of_naive": "no",
            "flat_hardly_helps": "no",
            "bytes_dominate": "no",
            "overlap_beats_naive": "no",
            "overlap_beats_flat": "no",
            "hidden_is_not_saved": "yes",  # 1 ms less communication, and a longer step
            "context_hides_more": "no",
            "buckets_beat_overlap": "no",
            "100_mb_beats_1_mb": "no",
            "inner_bucket_waits_least": "no",
            "inner_bucket_is_fastest": "no",
        }

    def test_noise_leaves_it_open(self) -> None:
        found = verdicts(timings_of(study_like(noise=0.3)))
        steps = ("overlap_beats_naive", "overlap_beats_flat", "flat_hardly_helps", "buckets_beat_overlap")
        assert {found[name] for name in steps} == {"cannot tell"}

    def test_one_run_of_each_leaves_it_open(self) -> None:
        found = check_claims(timings_of(study_like(noise=0, repeats=1)))
        assert {value.holds for value in found} == {"cannot tell"}
        assert all(value.effect and not value.effect.is_by_repeats for value in found)

    def test_what_was_not_measured_is_open(self) -> None:
        sweep = Sweep(noise=0.001)
        sweep.add("naive", 100, 80)
        found = {item.name: item for item in check_claims(timings_of(sweep))}
        assert found.pop("half_of_naive").holds == "yes"
        assert {(value.effect, value.holds) for value in found.values()} == {(None, "cannot tell")}

    def test_variants_are_compared_on_the_same_work_only(self) -> None:
        sweep = Sweep(noise=0.001)
        sweep.add("naive", 100, 80, work=(2, 64))
        sweep.add("overlap", 10, 1, work=(4, 64))
        assert {item.effect for item in check_claims(timings_of(sweep)) if item.name == "overlap_beats_naive"} == {None}

    def test_drift_between_repeats_does_not_blur_a_comparison(self) -> None:
        sweep = Sweep(noise=0.001)
        sweep.add("naive", 100, 80)
        sweep.add("overlap", 95, 60)
        sweep.add("flat", 98, 75)
        slow = {0: 1.0, 1: 1.4, 2: 0.8}
        for _, run, steps, _ in sweep.runs:
            factor = slow[run.repeat]
            steps[:] = [
                replace(
                    step, step_ns=round(step.step_ns * factor), communication_ns=round(step.communication_ns * factor)
                )
                for step in steps
            ]
        timings = timings_of(sweep)
        assert timings[0].step_ns.half_width > 0.2 * timings[0].step_ns.value
        assert verdicts(timings)["overlap_beats_naive"] == "yes"


def test_every_claim_has_a_name_of_its_own() -> None:
    assert len({item.name for item in CLAIMS}) == len(CLAIMS)
