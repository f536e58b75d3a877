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
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

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


def errors_text(name: str, errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{name:<24} median {np.median(sizes):6.2%}   at most {sizes.max():6.2%}"


def validate(link: str, rounds: int, steps: int) -> list[str]:
    measure = {"gloo": gloo_for, "sleep": sleep_for}[link]
    turns = []
    for turn in range(rounds):
        sys.stderr.write(f"round {turn + 1} of {rounds}\n")
        turns.append(measure(steps))

    def length_ns(ranks: list[dict[int, Times]], mb: int) -> float:
        return float(np.mean([np.subtract(one[mb]["stop"], one[mb]["begin"]).mean() for one in ranks])) * 1e9

    lengths = [{mb: length_ns(ranks, mb) for mb in SETTINGS_MB} for ranks in turns]
    measured = {mb: float(np.median([one[mb] for one in lengths])) for mb in SETTINGS_MB}
    ours: dict[tuple[int, int], list[float]] = {pair: [] for pair in itertools.product(SETTINGS_MB, SETTINGS_MB)}
    nothing, formula, changes, off, signs = [], [], [], [], []
    covered = chosen = asked = refused = beyond = 0
    for ranks, truth, mb in ((ranks, own, mb) for ranks, own in zip(turns, lengths, strict=True) for mb in SETTINGS_MB):
        predictor = predictor_of([one[mb] for one in ranks], mb)
        if isinstance(predictor, str):
            refused += 1
            continue
        off.append(predictor.off)
        if predictor.off > MOST_OFF:  # the command predicts nothing from such a capture
            refused += 1
            continue
        predicted = {}
        for other in SETTINGS_MB:
            answer = predictor.answer(Question(BUCKET_SIZE, other), len(ranks))
            if answer.change_ns is None or answer.low_ns is None or answer.high_ns is None:
                beyond += 1
                continue
            change = answer.change_ns
            predicted[other] = truth[mb] + change
            ours[mb, other].append(predicted[other] / truth[other] - 1)
            if other == mb:
                continue
            nothing.append(truth[mb] / truth[other] - 1)
            simple = closed_form_ns(predictor.link, other) - closed_form_ns(predictor.link, mb)
            formula.append((truth[mb] + simple) / truth[other] - 1)
            of_rounds = [one[other] - one[mb] for one in lengths]
            true_change = float(np.median(of_rounds))
            changes.append((change - true_change, true_change))
            asked += 1
            covered += answer.low_ns <= true_change <= answer.high_ns
            if rounds > 1 and abs(true_change) > 2 * np.std(of_rounds, ddof=1):
                signs.append(np.sign(change) == np.sign(true_change))
        choice = min(predicted, key=lambda one: predicted[one])
        chosen += measured[choice] <= 1.01 * min(measured[one] for one in predicted)
    lines = [f"{'from':>6} | predicted over measured step, for buckets of ... MB (median of {rounds} rounds)"]
    lines.append(f"{'MB':>6} | " + "".join(f"{mb:8}" for mb in SETTINGS_MB))
    for mb in SETTINGS_MB:
        found = (ours[mb, other] for other in SETTINGS_MB)
        cells = (f"{1 + float(np.median(one)):8.3f}" if one else f"{'n/a':>8}" for one in found)
        lines.append(f"{mb:6} | " + "".join(cells))
    lines.append(f"{'ms':>6} | " + "".join(f"{measured[mb] / 1e6:8.1f}" for mb in SETTINGS_MB) + "   measured")
    others = [error for (mb, other), found in ours.items() if mb != other for error in found]
    middle = [float(np.median(found)) for (mb, other), found in ours.items() if mb != other and found]
    between = [one[mb] / measured[mb] - 1 for one in lengths for mb in SETTINGS_MB]
    of_matrix = float(np.sqrt(np.mean(np.square(middle))))
    rms = float(np.sqrt(np.mean([error**2 for error, _ in changes])))
    rms_change = float(np.sqrt(np.mean([truth**2 for _, truth in changes])))
    mean = float(np.mean(list(measured.values())))
    counted = len(SETTINGS_MB) * rounds - refused
    return [
        *lines,
        "",
        errors_text("predicted", others),
        errors_text("  median of rounds", middle),
        errors_text("nothing changes", nothing),
        errors_text("the course's formula", formula),
        errors_text("from run to run", between),
        errors_text("today, built again", off),
        "",
        (
            f"rms error of the change: {rms / 1e6:.2f} ms, {rms / rms_change:.2f} of the rms change, "
            f"{rms / mean:.2%} of a step"
        ),
        f"rms error of the matrix above: {of_matrix:.2%} of a step",
        f"90 % intervals that hold the measured change: {covered} of {asked}",
        f"signs right where the change exceeds two standard deviations: {sum(signs)} of {len(signs)}",
        f"captures from which the best of those predicted is chosen, within 1 %: {chosen} of {counted}",
        f"refused: {refused} of {len(SETTINGS_MB) * rounds} captures; of the others {beyond} sizes far beyond",
    ]


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
