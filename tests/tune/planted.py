"""Real jobs with a cause that is planted, so that the length of a step is known for each try.

A model of 24 layers sleeps 10 ms in the backward pass of each layer. A hook stands for the network: it sleeps for each
bucket and then all-reduces. So :func:`expected_ms` says how long a step takes, beside what the machine itself needs.

    backward   |--10--|--10--|--10--|--10--| ...
    network           |--call + 2 layers--| |--call + 2 layers--| ...     buckets of 2 layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LAYERS = 24
BACKWARD_MS = 10.0
BYTES_OF_LAYER = 4 * (32 * 32 + 32)
TODAY = "today"


@dataclass(frozen=True, slots=True)
class Job:
    """A program, what is tried, and what is true.

    Attributes:
        tries: Arguments of ``--try``, for six tries.
        best: The try that is the fastest; ``None`` where no try is faster.
        expected_ms: The length of a step for today and for each try, as far as it is planted; empty if it is not known.
        steps: How many a run measures, so that it takes a second or more: less is a glance at what else runs there.
    """

    text: str
    tries: Sequence[str]
    best: str | None
    expected_ms: dict[str, float] = field(default_factory=dict)
    steps: int = 5


def cap_of(layers: int) -> str:
    """The size in MiB at which DDP closes a bucket of so many layers."""
    return f"{(layers * BYTES_OF_LAYER - 64) / 2**20:.6f}"


def expected_ms(layers: int, call: float, layer: float, first: float = 0.0, *, waits: bool = False) -> float:
    """Backward and network of one step with buckets of so many layers; ``waits``: backward waits for the network."""
    done = backward = 0.0
    for bucket in range(LAYERS // layers):
        backward += layers * BACKWARD_MS
        begun = max(backward, done)
        done = begun + call + layers * layer + (first if bucket == 0 else 0.0)
        backward = done if waits else backward
    return max(done, backward)


PROGRAM = """
import os, queue, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        time.sleep({backward})
        return gradient

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
    def forward(self, x):
        return Slow.apply(self.layer(x))

def send(bucket):
    bytes_sent = bucket.buffer().numel() * 4
    time.sleep({call} + {layer} * bytes_sent / {bytes_of_layer} + ({first} if bucket.index() == 0 else 0))
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    return bucket.buffer()

work = queue.Queue()
def network():
    while True:
        bucket, sent = work.get()
        sent.set_result(send(bucket))
threading.Thread(target=network, daemon=True).start()

def hook(state, bucket):
    sent = torch.futures.Future()
    if {waits}:
        sent.set_result(send(bucket))
    else:
        work.put((bucket, sent))
    return sent

model = DistributedDataParallel(torch.nn.Sequential(*[Layer() for _ in range({layers})]), bucket_cap_mb={cap})
model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10_000):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
"""


def network_job(
    today: int, tried: Sequence[int], call: float, layer: float, first: float = 0.0, *, waits: bool, scale: float = 1.0
) -> Job:
    """A job whose buckets have so many layers ``today``; times in milliseconds, all of them multiplied by ``scale``."""
    text = PROGRAM.format(
        backward=scale * BACKWARD_MS / 1e3,
        call=scale * call / 1e3,
        layer=scale * layer / 1e3,
        first=scale * first / 1e3,
        bytes_of_layer=BYTES_OF_LAYER,
        layers=LAYERS,
        waits=waits,
        cap=cap_of(today),
    )
    labels = {layers: f"bucket_cap_mb={float(cap_of(layers)):g}" for layers in tried}
    expected = {
        label: scale * expected_ms(layers, call, layer, first, waits=waits)
        for layers, label in {today: TODAY, **labels}.items()
    }
    best = min(labels.values(), key=expected.__getitem__)
    return Job(
        text,
        ["bucket_cap_mb=" + ",".join(map(cap_of, tried))],
        best if expected[best] < 0.97 * expected[TODAY] else None,
        expected,
    )


COPIES = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)

def hook(state, bucket):
    sent = torch.futures.Future()
    sent.set_result(bucket.buffer())  # the ranks have the same data: there is nothing to send
    return sent

model = DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]), bucket_cap_mb=4
)
model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(10_000):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(1, 1024)).square().mean().backward()
    optimizer.step()
"""

PLANTED = {
    # Each bucket costs, and backward waits: one bucket wins.
    "each call waits": network_job(1, (2, 3, 4, 8, 12, 24), call=10, layer=0, waits=True),
    # What is sent costs, and backward waits: it is the same for all.
    "each byte waits": network_job(1, (2, 3, 4, 8, 12, 24), call=0, layer=4, waits=True),
    # What is sent costs beside backward: the smaller the last bucket, the better.
    "each byte beside backward": network_job(24, (2, 3, 4, 6, 8, 12), call=0, layer=8, waits=False),
    # Both: too small ones wait for each other, too large ones for backward.
    "each call and byte": network_job(1, (2, 4, 6, 8, 12, 24), call=4, layer=8, waits=False),
    "a slow first bucket": network_job(24, (1, 2, 4, 6, 8, 12), call=4, layer=5, first=60, waits=False),
    "copies that a view avoids": Job(
        COPIES,
        ["gradient_as_bucket_view", "broadcast_buffers=false", "static_graph", "bucket_cap_mb=8", "NONE=1,2"],
        "gradient_as_bucket_view=True",
        steps=60,
    ),
}
