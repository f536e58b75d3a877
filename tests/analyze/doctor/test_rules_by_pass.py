"""Steps with several passes of backward: what a pass does is judged by pass, and what it costs told by step."""

from __future__ import annotations

import pytest

from ddp_prof.analyze.doctor.evidence import Finding
from ddp_prof.analyze.root_cause import find_root_cause
from ddp_prof.present.cause_headlines import root_cause_headline
from ddp_prof.table import UNKNOWN
from ddp_prof.trace import Trace
from tests.analyze.critical.scheduler import Device
from tests.analyze.doctor.test_gpu_rules import MS, STEPS, diagnose, with_sizes
from tests.measuring import results_of

US = 1_000
MIB = 1 << 20
LATE, VOTE = "gradients ready in another order than buckets", "vote on unused parameters"
ONE, MANY, FIRST = "one bucket for all gradients", "one collective per parameter", "the last bucket is needed first"


def accumulating(
    sizes: list[int],
    passes: int,
    *,
    late: tuple[int, ...] = (),
    bucket_ns: int = MS,
    takes: tuple[int, ...] = (),
) -> Trace:
    """Each pass reduces buckets of these sizes, spread over its backward or, in the ``late`` passes, at its end.

    Then an operation takes each bucket, in the order of ``takes``, or one takes all.
    """
    device, kernels = Device(), 12
    for step in range(STEPS):
        with device.range(f"step {step}"):
            for nth in range(passes):
                with device.range("forward"):
                    device.launch(US, 7, 2 * MS, is_collective=False)
                with device.range("backward"):
                    sent = 0
                    for kernel in range(kernels):
                        device.launch(US, 7, MS // 2, is_collective=False)
                        due = kernel == kernels - 1 if nth in late else True
                        while due and sent < len(sizes) * (kernel + 1) // kernels:
                            device.record(1, 7, 1)
                            device.wait(1, 20, 1)
                            device.launch(US, 20, bucket_ns, is_collective=True)
                            device.record(1, 20, 100 + sent)
                            sent += 1
                for bucket in takes or (len(sizes) - 1,):
                    device.wait(1, 7, 100 + bucket)
                    device.launch(US, 7, 10 * US, is_collective=False)
            with device.range("optimizer"):
                device.launch(US, 7, MS, is_collective=False)
        device.synchronize(US)
    return with_sizes(device.trace(), sizes)


def findings(trace: Trace) -> dict[str, Finding]:
    return {one.rule: one for one in diagnose(trace).findings}


@pytest.mark.parametrize(
    ("buckets", "late", "is_named"),
    [(4, (0, 1, 2), True), (4, (1, 2), True), (4, (0,), False), (2, (0, 1, 2), False)],
    ids=["all are late", "the first one is not", "only the first one", "one of two buckets is late in any order"],
)
def test_the_first_bucket_is_late_in_most_passes(buckets: int, late: tuple[int, ...], is_named: bool) -> None:
    found = findings(accumulating([8 * MIB] * buckets, 3, late=late))
    assert (LATE in found) == is_named
    if is_named:
        assert found[LATE].evidence.startswith("The first of 4 buckets was launched when")


def test_the_exposed_time_of_late_buckets_is_that_of_all_passes() -> None:
    """Of four of 1 ms, launched before the last 0.5 ms of compute, 3.5 ms are exposed, in each of three passes."""
    cost = findings(accumulating([8 * MIB] * 4, 3, late=(0, 1, 2)))[LATE].cost_ns or 0
    assert cost == pytest.approx(3 * 4 * MS, rel=0.05)


@pytest.mark.parametrize(("passes", "buckets", "is_named"), [(1, 32, True), (4, 8, False), (2, 32, True)])
def test_many_collectives_are_many_in_a_pass(passes: int, buckets: int, is_named: bool) -> None:
    found = findings(accumulating([MIB // 4] * buckets, passes, bucket_ns=10 * US))
    assert (MANY in found) == is_named
    if passes > 1 and is_named:
        assert found[MANY].evidence.startswith("A typical pass of backward reduces its gradients by 32 collectives")


def test_many_small_collectives_that_queue_do_not_ask_for_fewer_bytes() -> None:
    """The cause said that fewer bytes or a faster link would help, beside a rule that says that latency adds up."""

    def advice(count: int) -> str:
        cause = find_root_cause(results_of(accumulating([MIB // 4] * count, 1, bucket_ns=MS // 2)))
        assert cause is not None
        assert cause.why == "queued"
        return root_cause_headline(cause).text

    assert "many and small: each costs its latency, so fewer, larger ones would help" in advice(32)
    assert "fewer bytes or a faster link would help" in advice(29)


def test_one_bucket_in_each_pass() -> None:
    found = findings(accumulating([32 * MIB], 3, bucket_ns=3 * MS))
    assert found[ONE].evidence.startswith("One collective reduces all gradients of a pass of backward, and 3.00 ms")
    assert found[ONE].cost_ns == pytest.approx(9 * MS, rel=0.02)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_vote_in_each_pass(passes: int) -> None:
    """Each vote of 0.5 ms ends what its pass waits for, so a step gains all of them."""
    found = findings(accumulating([8 * MIB] * 3 + [512], passes, bucket_ns=MS // 2))
    assert found[VOTE].evidence.startswith(f"In {STEPS} of {STEPS} steps a collective of 512 bytes follows the buckets")
    assert found[VOTE].cost_ns == pytest.approx(passes * MS // 2, rel=0.02)
    assert found[VOTE].expected_gain_ns == pytest.approx(passes * MS // 2, rel=0.02)


@pytest.mark.parametrize("passes", [1, 3])
def test_the_last_bucket_of_a_pass_is_needed_first(passes: int) -> None:
    found = findings(accumulating([UNKNOWN] * 3, passes, bucket_ns=3 * MS, takes=(2, 1, 0)))
    assert found[FIRST].evidence.startswith(f"In {STEPS} of {STEPS} steps the first operation that needs a collective")
    once = findings(accumulating([UNKNOWN] * 3, 1, bucket_ns=3 * MS, takes=(2, 1, 0)))
    assert found[FIRST].cost_ns == pytest.approx(passes * (once[FIRST].cost_ns or 0), rel=0.05)
