"""Steps of known truth: computed tick by tick, which shares nothing with what predicts them.

In each tick backward works, at its speed or slower beside a collective; the collective that runs gets a tick nearer to
its end; the next one begins when its bucket is ready and none runs; after backward, reduced buckets are copied out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_prof.analyze.what_if.structure import Copied, RankStructure
from ddp_prof.table import Ints

TICK_NS = 1000


@dataclass(frozen=True)
class Job:
    """A job; times in ticks.

    Attributes:
        sizes: Bytes of each gradient, in order of readiness; ``works``: what backward works before each is ready.
        overhead, per_mb: Of a collective.
        slowed: The share of its speed that backward loses beside one.
        copy_per_mb: Of copying a gradient out of its bucket; 0 with views.
        noise: Relative standard deviation of work, and of collectives.
    """

    sizes: tuple[int, ...]
    works: tuple[float, ...]
    overhead: float = 100
    per_mb: float = 8
    slowed: float = 1 / 3
    copy_per_mb: float = 0
    forward: float = 1000
    rest: float = 500
    noise: float = 0.0

    def step(self, buckets: Sequence[Sequence[int]], random: np.random.Generator) -> dict[str, list[float]]:
        works = [work * (1 + self.noise * random.normal()) for work in self.works]
        mb = [sum(self.sizes[at] for at in bucket) / 1e6 for bucket in buckets]
        takes = [(self.overhead + self.per_mb * size) * (1 + self.noise * random.normal()) for size in mb]
        edges = np.cumsum(works).tolist()
        following = 0  # the next gradient that becomes ready
        now, done = float(self.forward), 0.0
        ready = [np.inf] * len(works)
        start, end = [np.inf] * len(buckets), [np.inf] * len(buckets)
        backward_end, copied = np.inf, [np.inf] * len(works)
        copying, left = 0, self.sizes[0] / 1e6 * self.copy_per_mb
        beside_backward = 0.0
        besides: list[float] = [0.0] * len(works)
        sent, running = 0, None
        bucket_of = {at: number for number, bucket in enumerate(buckets) for at in bucket}
        order = [at for bucket in buckets for at in bucket]
        while copying < len(works):
            if running is None and sent < len(buckets) and all(ready[at] <= now for at in buckets[sent]):
                running, start[sent], end[sent] = sent, now, now + takes[sent]
            speed = 1.0 if running is None else 1 - self.slowed
            if backward_end == np.inf:
                before, done = done, done + speed
                while following < len(edges) and edges[following] <= done:
                    after = (edges[following] - before) / speed
                    ready[following] = now + after
                    besides[following] = beside_backward + (0 if running is None else after)
                    following += 1
                beside_backward += 0 if running is None else min(1.0, (edges[-1] - before) / speed)
                if done >= edges[-1]:
                    backward_end = now + (edges[-1] - before) / speed
            elif end[bucket_of[order[copying]]] <= now:
                room = speed
                while copying < len(works) and end[bucket_of[order[copying]]] <= now and left <= room:
                    room -= left
                    copied[order[copying]] = now + (speed - room) / speed
                    copying += 1
                    left = self.sizes[order[copying]] / 1e6 * self.copy_per_mb if copying < len(works) else 0
                left -= room
            now += 1
            if running is not None and end[running] <= now:
                sent, running = running + 1, None
        ends = [*end, backward_end, *(copied if self.copy_per_mb else [])]
        return {
            "ready": ready, "start": start, "end": end, "backward_end": [backward_end], "resumes": [max(ends)],
            "copied": copied, "beside": besides, "beside_backward": [beside_backward], "ends": [max(ends) + self.rest],
        }  # fmt: skip

    def length_ns(self, buckets: Sequence[Sequence[int]]) -> float:
        """The length of a step without noise."""
        return self.step(buckets, np.random.default_rng(0))["ends"][0] * TICK_NS

    def capture(self, buckets: Sequence[Sequence[int]], steps: int = 8, seed: int = 0) -> RankStructure:
        """What a capture of some steps tells; with copies into buckets."""
        random = np.random.default_rng(seed)
        found = [self.step(buckets, random) for _ in range(steps)]
        begins = np.arange(steps) * 10**9

        def column(name: str) -> Ints:
            return begins[:, None] + np.array([[round(TICK_NS * at) for at in step[name]] for step in found])

        ready, start = column("ready"), column("start")
        bucket = np.array([number for number, members in enumerate(buckets) for _ in members], np.int64)
        sizes = np.array(self.sizes, np.int64)
        beside = column("beside") - begins[:, None]
        own_last = [list(members)[-1] for members in buckets]
        nothing = np.zeros_like(ready)
        out = None
        if self.copy_per_mb:
            work = np.broadcast_to(np.round(sizes / 1e6 * self.copy_per_mb * TICK_NS), ready.shape).astype(np.int64)
            out = Copied(sizes, bucket, column("copied"), ready, work, nothing)
        return RankStructure(
            reason=None,
            keys=np.arange(steps),
            begins_ns=begins,
            ends_ns=column("ends")[:, 0],
            backward_begin_ns=begins + round(self.forward * TICK_NS),
            backward_end_ns=column("backward_end")[:, 0],
            resumes_ns=column("resumes")[:, 0],
            launch_ns=ready[:, own_last],
            ready_ns=ready[:, own_last],
            start_ns=start,
            end_ns=column("end"),
            bytes=np.bincount(bucket, weights=sizes).astype(np.int64),
            sizes_from="ranges",
            beside_ns={
                "start": np.maximum.accumulate(beside[:, own_last], axis=1),
                "ready": beside[:, own_last],
                "backward_begin": np.zeros(steps, np.int64),
                "backward_end": column("beside_backward")[:, 0] - begins,
                "into": beside,
            },
            into=Copied(sizes, bucket, ready, ready, nothing, nothing),
            out=out,
        )
