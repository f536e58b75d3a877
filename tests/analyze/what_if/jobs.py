"""Drawn jobs that reduce gradients of known bytes over a link of known speed: simulated with any buckets.

The device is that of :mod:`tests.analyze.contended_device`, and what is read is a capture of it. Nothing here is shared
with what predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

from tests.analyze.contended_device import US, Program, lengths_of, run
from tests.analyze.simulated_captures import capture_of, write

MIB = 2**20


@dataclass(frozen=True)
class Job:
    """Times in ns.

    Attributes:
        gradients: Bytes of the gradient of each layer of backward, 0 where it has none.
        overhead, per_mib: Of a collective.
        noise: Relative standard deviation of how long a collective takes; of compute it is a fifth of it.
        late: How much later rank 1 begins a step, at most.
        link: By which share of it a collective takes more or less in all of a step, at most.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gradients: tuple[int, ...]
    overhead: float
    per_mib: float
    kappa: float = 1.0
    copies: int = 0
    copies_in: int = 0
    noise: float = 0.02
    ranks: int = 1
    late: int = 0
    link: float = 0.3
    first_mib: float | None = None
    steps: int = 10

    def closes(self, cap_mib: float) -> tuple[int, ...]:
        """The layers that close a bucket: it has reached its cap, or nothing is left."""
        found, filled, cap = [], 0.0, min(cap_mib, self.first_mib or cap_mib)
        last = max(layer for layer, size in enumerate(self.gradients) if size)
        for layer, size in enumerate(self.gradients):
            filled += size
            if (size and filled >= cap * MIB) or layer == last:
                found.append(layer)
                filled, cap = 0.0, cap_mib
        return tuple(found)

    def program(self, cap_mib: float, seed: str, noise: float) -> Program:
        """The same steps, with buckets of this cap; how long each collective takes differs by ``noise``."""
        random, single, closes = Random(f"steps {seed}"), Random(f"{cap_mib} {seed}"), self.closes(cap_mib)
        factors = [random.uniform(1 - self.link, 1 + self.link) for _ in range(self.steps)]
        pace = tuple(random.gauss(1, self.noise / 5) for _ in range(self.steps))
        lates = tuple((0, random.randint(0, self.late), 0) for _ in range(self.steps))
        begins = (0, *(close + 1 for close in closes[:-1]))
        takes = [
            self.overhead + self.per_mib * sum(self.gradients[begin : close + 1]) / MIB
            for begin, close in zip(begins, closes, strict=True)
        ]
        return Program(
            kappas=(self.kappa, self.kappa),
            forward=self.forward,
            backward=self.backward,
            transfers=tuple(tuple(round(of * ns * single.gauss(1, noise)) for ns in takes) for of in factors),
            pace=pace,
            lates=lates,
            ranks=self.ranks,
            gradients=self.gradients,
            closes=closes,
            copies=self.copies,
            copies_in=self.copies_in,
        )

    def step_ns(self, cap_mib: float, seed: str) -> float:
        return mean(lengths_of(run(self.program(cap_mib, seed, 0.0))))

    def record(self, folder: Path, cap_mib: float, seed: str) -> list[Path]:
        ranks = run(self.program(cap_mib, seed, self.noise))
        return write(folder, [capture_of(rank, number, len(ranks)) for number, rank in enumerate(ranks)])


def draw_job(seed: int) -> Job:
    random = Random(f"what if {seed}")
    layers = random.randint(12, 30)
    return Job(
        forward=tuple(random.randint(30, 120) * US for _ in range(layers)),
        backward=tuple(random.randint(50, 200) * US for _ in range(layers)),
        gradients=tuple(4 * int(MIB / 4 * 10 ** random.uniform(-1.5, 1.2)) for _ in range(layers)),
        overhead=random.uniform(20, 150) * US,
        per_mib=random.uniform(20, 100) * US,
        kappa=random.choice([1.0, 1.25, 1.5]),
        copies=random.choice([0, 3 * US]),
        copies_in=random.choice([0, 2 * US]),
        noise=random.choice([0.005, 0.02, 0.05]),
        ranks=random.choice([1, 2]),
        late=random.choice([0, 0, 200 * US]),
        first_mib=random.choice([None, 1.0]),
        link=random.choice([0.2, 0.4]),
        steps=random.choice([8, 12, 24]),
    )
