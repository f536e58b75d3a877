"""How far predicted changes are off where both settings were measured; see ``scripts/validate_whatif.sh``.

A rank is a thread that sleeps for each gradient, as backward, and one that reduces buckets, one after the other. What a
capture would tell of its steps is noted; each setting is then predicted from each other one, as by ``ddp-prof whatif``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_prof.analyze.step_cost import Slowed
from ddp_prof.analyze.what_if.captured import Captured
from ddp_prof.analyze.what_if.link import LinkFit, fit_link
from ddp_prof.analyze.what_if.prediction import MOST_OFF, Predictor
from ddp_prof.analyze.what_if.questions import BUCKET_SIZE, Question
from ddp_prof.analyze.what_if.rules import fill_until_reached
from ddp_prof.analyze.what_if.structure import Copied, RankStructure
from ddp_prof.train import MODEL_SIZES
from ddp_prof.variants import BYTES_PER_MB

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.whatif_table import table_lines

SETTINGS_MB = (1, 4, 8, 16, 24, 32, 48)
SIZES = np.array([2, 1, 1, 4, 1, 8, 1, 2, 4, 1, 16, 1, 2, 1, 4, 1, 8, 1, 2, 1, 4, 1, 2, 4]) * BYTES_PER_MB
"""Bytes of the gradients, in the order in which they become ready."""
FORWARD_S, PER_GRADIENT_S, PER_MB_S, REST_S = 0.03, 0.004, 0.001, 0.02
WARMUP = 2
SLEEPING = Slowed(0.0, 0.0, 0.0, None)
"""Compute that sleeps is not slowed."""
OVERHEAD_S, PER_BYTE_S = 0.004, 1.2e-9
"""Of a collective that sleeps."""

LINKS = {
    "gloo": ("two ranks of gloo, whose compute sleeps", 5, 12),
    "sleep": ("one rank, whose compute and transfers sleep", 3, 8),
}
"""What reduces: its words, and how many rounds and steps are measured by default."""

Times = dict[str, list[list[float]]]
Reduce = Callable[[int, int], None]
"""Reduces a bucket (its position) of a setting."""


def buckets_of(mb: int) -> list[list[int]]:
    return fill_until_reached(SIZES, BYTES_PER_MB, mb * BYTES_PER_MB)


class Communicator:
    """A thread that reduces buckets, one after the other, and notes when each began and ended."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce, self._waiting = reduce, queue.Queue[tuple[int, int] | None]()
        self._thread = threading.Thread(target=self._work)
        self.started: list[float] = []
        self.ended: list[float] = []

    def __enter__(self) -> Communicator:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def send(self, mb: int, bucket: int) -> None:
        self._waiting.put((mb, bucket))

    def wait(self) -> tuple[list[float], list[float]]:
        self._waiting.join()
        found = [*self.started], [*self.ended]
        self.started.clear()
        self.ended.clear()
        return found

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            self.started.append(time.perf_counter())
            self._reduce(*asked)
            self.ended.append(time.perf_counter())
            self._waiting.task_done()


def train(steps: int, reduce: Reduce, meet: Callable[[], None]) -> dict[int, Times]:
    """Run steps of all settings in turns; return for each setting what a capture of it would tell."""
    names = ("begin", "ready", "start", "end", "backward", "resume", "stop")
    found: dict[int, Times] = {mb: {name: [] for name in names} for mb in SETTINGS_MB}
    with Communicator(reduce) as communicator:
        for turn, mb in itertools.product(range(WARMUP + steps), SETTINGS_MB):
            last_of = {bucket[-1]: number for number, bucket in enumerate(buckets_of(mb))}
            meet()
            begin = time.perf_counter()
            time.sleep(FORWARD_S)
            ready = []
            for gradient, size in enumerate(SIZES.tolist()):
                time.sleep(PER_GRADIENT_S + PER_MB_S * size / BYTES_PER_MB)
                ready.append(time.perf_counter())
                if gradient in last_of:
                    communicator.send(mb, last_of[gradient])
            start, end = communicator.wait()
            resume = time.perf_counter()
            time.sleep(REST_S)
            row = [[begin], ready, start, end, [ready[-1]], [resume], [time.perf_counter()]]
            if turn >= WARMUP:
                for name, values in zip(names, row, strict=True):
                    found[mb][name].append(values)
    return found


def bytes_of(mb: int, bucket: int) -> int:
    return int(SIZES[buckets_of(mb)[bucket]].sum())


def sleep_for(steps: int) -> list[dict[int, Times]]:
    def reduce(mb: int, bucket: int) -> None:
        time.sleep(OVERHEAD_S + PER_BYTE_S * bytes_of(mb, bucket))

    return [train(steps, reduce, lambda: None)]


def _rank(rank: int, steps: int, folder: str, results: multiprocessing.Queue[tuple[int, dict[int, Times]]]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    buffers = {
        (mb, bucket): torch.zeros(bytes_of(mb, bucket) // 4)
        for mb in SETTINGS_MB
        for bucket in range(len(buckets_of(mb)))
    }
    results.put((rank, train(steps, lambda mb, bucket: dist.all_reduce(buffers[mb, bucket]), dist.barrier)))
    dist.barrier()
    dist.destroy_process_group()


def gloo_for(steps: int) -> list[dict[int, Times]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, steps, folder, results)) for rank in range(2)]
        for one in ranks:
            one.start()
        found = dict(results.get(timeout=300) for _ in ranks)
        for one in ranks:
            one.join()
    return [found[rank] for rank in sorted(found)]


def structure_of(times: Times, mb: int) -> RankStructure:
    """What a capture would tell of these steps."""
    column = {name: np.round(np.array(rows) * 1e9).astype(np.int64) for name, rows in times.items()}
    buckets = buckets_of(mb)
    bucket = np.repeat(np.arange(len(buckets)), [len(members) for members in buckets])
    last = [members[-1] for members in buckets]
    ready = column["ready"]
    nothing = np.zeros_like(ready)
    return RankStructure(
        reason=None,
        on_host=True,
        keys=np.arange(len(ready)),
        begins_ns=column["begin"][:, 0],
        ends_ns=column["stop"][:, 0],
        backward_end_ns=column["backward"][:, 0],
        resumes_ns=column["resume"][:, 0],
        launch_ns=ready[:, last],
        ready_ns=ready[:, last],
        start_ns=column["start"],
        end_ns=column["end"],
        bytes=np.array([SIZES[members].sum() for members in buckets]),
        sizes_from="ranges",
        beside_ns={
            "start": nothing[:, last],
            "ready": nothing[:, last],
            "backward_end": nothing[:, 0],
            "into": nothing,
        },
        into=Copied(SIZES, bucket, ready, ready, nothing, nothing),
    )


def predictor_of(times: list[Times], mb: int) -> Predictor | str:
    captured = Captured(tuple(structure_of(one, mb) for one in times), parameters=tuple(SIZES[::-1].tolist()))
    structure, gradients = captured.least_waiting, captured.gradients()
    assert not isinstance(gradients, str), gradients
    link = fit_link(structure.took_ns.astype(float), gradients.bucket_bytes)
    return link if isinstance(link, str) else Predictor(structure, gradients, link, SLEEPING)


def closed_form_ns(link: LinkFit, mb: int) -> float:
    """What the course's formula leaves after backward: s / (n w) + n o."""
    calls = len(buckets_of(mb))
    return float(SIZES.sum()) * link.times.ns_per_byte / calls + calls * link.times.overhead_ns


@dataclass(frozen=True)
class Rounds:
    """What was measured: for each round and each of its ranks, the times of each setting."""

    turns: list[list[dict[int, Times]]]

    @cached_property
    def lengths_ns(self) -> list[dict[int, float]]:
        """For each round, the mean step of each setting."""
        return [{mb: self._mean_ns(ranks, mb) for mb in SETTINGS_MB} for ranks in self.turns]

    @cached_property
    def typical_ns(self) -> dict[int, float]:
        """The median of these over the rounds."""
        return {mb: float(np.median([one[mb] for one in self.lengths_ns])) for mb in SETTINGS_MB}

    def changes_ns(self, before: int, after: int) -> list[float]:
        """How much longer a step is with another setting, in each round."""
        return [one[after] - one[before] for one in self.lengths_ns]

    @staticmethod
    def _mean_ns(ranks: list[dict[int, Times]], mb: int) -> float:
        return float(np.mean([np.subtract(one[mb]["stop"], one[mb]["begin"]).mean() for one in ranks])) * 1e9


class Predicted(NamedTuple):
    """The step of the setting ``after``, as a capture of ``before`` predicts it, and what the same round measured.

    Attributes:
        before_ns, after_ns: The measured steps of both.
        change_ns, low_ns, high_ns: The predicted change, with its interval.
        formula_ns: The change that the course's formula gives.
        changes_ns: The measured changes of all rounds.
    """

    before: int
    after: int
    before_ns: float
    after_ns: float
    change_ns: int
    low_ns: int
    high_ns: int
    formula_ns: float
    changes_ns: list[float]

    @property
    def true_change_ns(self) -> float:
        return float(np.median(self.changes_ns))

    def error(self, change_ns: float) -> float:
        """How far the step is off, as a part of it, if it changes so."""
        return (self.before_ns + change_ns) / self.after_ns - 1


class Source(NamedTuple):
    """What a capture of one setting in one round predicts of all settings, those aside that are far beyond.

    The command refuses where there are none. ``off`` is how far today's step, built again, is off, if that is known.
    """

    off: float | None
    predictions: list[Predicted]

    def chooses_best(self, rounds: Rounds) -> bool:
        """Return whether the setting with the shortest predicted step is the best of those predicted, within 1 %."""
        choice = min(self.predictions, key=lambda one: one.before_ns + one.change_ns)
        best_ns = min(rounds.typical_ns[one.after] for one in self.predictions)
        return rounds.typical_ns[choice.after] <= 1.01 * best_ns


def predict_from(rounds: Rounds, turn: int, mb: int) -> Source:
    """Predict all settings from what a capture of ``mb`` in this round would tell."""
    ranks, measured_ns = rounds.turns[turn], rounds.lengths_ns[turn]
    predictor = predictor_of([one[mb] for one in ranks], mb)
    if isinstance(predictor, str):
        return Source(None, [])
    predictions = []
    for other in SETTINGS_MB if predictor.off <= MOST_OFF else ():  # else the command predicts nothing
        answer = predictor.answer(Question(BUCKET_SIZE, other), len(ranks))
        if answer.change_ns is None or answer.low_ns is None or answer.high_ns is None:
            continue
        change = answer.change_ns, answer.low_ns, answer.high_ns
        formula_ns = closed_form_ns(predictor.link, other) - closed_form_ns(predictor.link, mb)
        steps_ns, changes_ns = (measured_ns[mb], measured_ns[other]), rounds.changes_ns(mb, other)
        predictions.append(Predicted(mb, other, *steps_ns, *change, formula_ns, changes_ns))
    return Source(predictor.off, predictions)


def validate(link: str, rounds: int, steps: int) -> list[str]:
    measure = {"gloo": gloo_for, "sleep": sleep_for}[link]
    turns = []
    for turn in range(rounds):
        sys.stderr.write(f"round {turn + 1} of {rounds}\n")
        turns.append(measure(steps))
    measured = Rounds(turns)
    sources = [predict_from(measured, turn, mb) for turn in range(rounds) for mb in SETTINGS_MB]
    every = [one for source in sources for one in source.predictions]
    errors = {pair: list[float]() for pair in itertools.product(SETTINGS_MB, SETTINGS_MB)}
    for one in every:
        errors[one.before, one.after].append(one.error(one.change_ns))
    return [*matrix_lines(errors, measured), "", *error_lines(errors, sources, measured)]


def matrix_lines(errors: Mapping[tuple[int, int], list[float]], measured: Rounds) -> list[str]:
    """Return the table of what each setting predicts of each, in parts of what was measured."""
    rounds = len(measured.turns)
    lines = [f"{'from':>6} | predicted over measured step, for buckets of ... MB (median of {rounds} rounds)"]
    lines.append(f"{'MB':>6} | " + "".join(f"{mb:8}" for mb in SETTINGS_MB))
    for mb in SETTINGS_MB:
        found = (errors[mb, other] for other in SETTINGS_MB)
        cells = (f"{1 + float(np.median(one)):8.3f}" if one else f"{'n/a':>8}" for one in found)
        lines.append(f"{mb:6} | " + "".join(cells))
    lengths = "".join(f"{measured.typical_ns[mb] / 1e6:8.1f}" for mb in SETTINGS_MB)
    return [*lines, f"{'ms':>6} | {lengths}   measured"]


def error_lines(
    errors: Mapping[tuple[int, int], list[float]], sources: Sequence[Source], measured: Rounds
) -> list[str]:
    """Return how far predictions of other settings are off, beside simpler ones, and how often they decide right."""
    others = [one for source in sources for one in source.predictions if one.before != one.after]
    of_pairs = {pair: found for pair, found in errors.items() if pair[0] != pair[1] and found}
    medians = [float(np.median(found)) for found in of_pairs.values()]
    between = [one[mb] / measured.typical_ns[mb] - 1 for one in measured.lengths_ns for mb in SETTINGS_MB]
    missed_ns, true_ns = [one.change_ns - one.true_change_ns for one in others], [one.true_change_ns for one in others]
    covered = sum(one.low_ns <= one.true_change_ns <= one.high_ns for one in others)
    clear = [one for one in others if is_clear(one)]
    signs = sum(np.sign(one.change_ns) == np.sign(one.true_change_ns) for one in clear)
    answered = [source for source in sources if source.predictions]
    chosen = sum(source.chooses_best(measured) for source in answered)
    refused = len(sources) - len(answered)
    beyond = sum(len(SETTINGS_MB) - len(source.predictions) for source in answered)
    mean_ns = float(np.mean(list(measured.typical_ns.values())))
    return [
        errors_text("predicted", [error for found in of_pairs.values() for error in found]),
        errors_text("  median of rounds", medians),
        errors_text("nothing changes", [one.error(0) for one in others]),
        errors_text("the course's formula", [one.error(one.formula_ns) for one in others]),
        errors_text("from run to run", between),
        errors_text("today, built again", [source.off for source in sources if source.off is not None]),
        "",
        (
            f"rms error of the change: {rms(missed_ns) / 1e6:.2f} ms, {rms(missed_ns) / rms(true_ns):.2f} of the rms "
            f"change, {rms(missed_ns) / mean_ns:.2%} of a step"
        ),
        f"rms error of the matrix above: {rms(medians):.2%} of a step",
        f"90 % intervals that hold the measured change: {covered} of {len(others)}",
        f"signs right where the change exceeds two standard deviations: {signs} of {len(clear)}",
        f"captures from which the best of those predicted is chosen, within 1 %: {chosen} of {len(answered)}",
        f"refused: {refused} of {len(sources)} captures; of the others {beyond} sizes far beyond",
    ]


def is_clear(one: Predicted) -> bool:
    """Return whether the measured change exceeds two standard deviations of the rounds."""
    return len(one.changes_ns) > 1 and abs(one.true_change_ns) > 2 * float(np.std(one.changes_ns, ddof=1))


def rms(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def errors_text(name: str, errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{name:<24} median {np.median(sizes):6.2%}   at most {sizes.max():6.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how far predicted changes of a step are off.")
    parser.add_argument("--link", choices=LINKS, help="what reduces (default: each, as in docs/what_if.md)")
    parser.add_argument("--rounds", type=int, help="rounds, each with new ranks (default: 5, of --link sleep 3)")
    parser.add_argument("--steps", type=int, help="measured steps of each setting in a round (default: 12 and 8)")
    parser.add_argument("-o", "--output", type=Path, help="also write this file")
    parser.add_argument("--table", type=Path, help="instead: predict the bucket sizes of a table of step times")
    parser.add_argument("--model", choices=MODEL_SIZES, default="xl", help="the table's model (default: %(default)s)")
    asked = parser.parse_args()
    if asked.table:
        counts = MODEL_SIZES[asked.model].parameter_counts
        write("".join(f"{line}\n" for line in table_lines(asked.table, 4 * np.array(counts[::-1]))), asked.output)
        return
    if (asked.rounds or 1) < 1 or (asked.steps or 3) < 3:
        parser.error("at least 1 round of 3 steps")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    parts = []
    for link in [asked.link] if asked.link else LINKS:
        words, rounds, steps = LINKS[link]
        rounds, steps = asked.rounds or rounds, asked.steps or steps
        when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        head = [
            f"{words}; {rounds} rounds of {steps} steps",
            f"{when}, {where}, commit {commit.stdout.strip() or 'unknown'}",
            "",
        ]
        parts.append("".join(f"{line}\n" for line in [*head, *validate(link, rounds, steps)]))
    text = "\n".join(parts)
    write(text, asked.output)


def write(text: str, file: Path | None) -> None:
    sys.stdout.write(text)
    if file:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
