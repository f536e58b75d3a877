"""What is told of a box: its launch, why it is exposed, its bandwidth, and who needs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from ddp_prof.trace import UNKNOWN
from tests.drawing import draw_trace
from tests.javascript import Node
from tests.measuring import collectives_of, source_of, sources_of
from tests.nsys_factory import NCCL, STEP_NS, US, Capture, Kernel, Sync, bucket_steps, write_capture
from tests.present.timelines import gpu_trace


def open_capture(node: Node, folder: Path, capture: Capture, product: str = "2023.4") -> None:
    trace = load_trace(write_capture(folder / "x.sqlite", capture, product))
    node.open(build_timeline([source_of("run", trace)]), folder)


def arrows(node: Node) -> list[list[float]]:
    """From when to when each arrow to a consumer leads, in us."""
    found = node.ask("needArrows(page, page.selected).map(({ x }) => x)")
    return [[round(ms * 1000, 3) for ms in arrow] for arrow in found]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("void at::native::(anonymous namespace)::reduce_kernel<512>(at::Op<x>)", "reduce_kernel<512>(at::Op<x>)"),
        ("void at::native::<unnamed>::softmax<float>(T1)", "softmax<float>(T1)"),
        ("void cutlass::Kernel<cutlass_80_s1688gemm>(T1::Params)", "cutlass::Kernel<cutlass_80_s1688gemm>(T1::Params)"),
        ("saxpy(double *)", "saxpy(double *)"),
        ("aten::linear, seq = 3", "aten::linear, seq = 3"),
        ("volta_sgemm_128x32_nn", "volta_sgemm_128x32_nn"),
    ],
)
def test_a_name_that_is_cut_begins_with_what_tells_it_from_others(node: Node, name: str, label: str) -> None:
    """Most boxes of torch's kernels were called 'void at::na…'."""
    assert node.ask("withoutNamespaces(argument)", name) == label


class TestLaunches:
    @pytest.fixture
    def drawn(self, node: Node, tmp_path: Path) -> Node:
        node.open(build_timeline([source_of("run", gpu_trace())]), tmp_path)
        return node

    def test_a_kernel_tells_its_launch(self, drawn: Node) -> None:
        known = drawn.select("compute", 9)
        assert known["name"] == "compute c"
        assert known["launched"] == "5 ns on the axis, by cudaLaunchKernel on pt_autograd_0 (4244)"
        assert known["launch delay"] == "3 ns (3 ns) from the start of the call"
        assert (known["grid"], known["block"], known["registers"]) == ("7x1x1", "128x1x1", "96 a thread")
        assert known["phase"] == "backward, inferred from the thread that launched it"

    def test_a_collective_tells_when_and_why_it_is_exposed(self, drawn: Node) -> None:
        """It runs from 8 to 16, compute until 12; no peer is known."""
        known = drawn.select("communication", 12)
        assert (known["bucket"], known["bytes"]) == ("3", "64: 64 bytes")
        assert known["algbw"] == "8 GB/s: bytes over duration, as its transfer is not known"
        assert (known["overlapped"], known["exposed"]) == ("4 ns", "4 ns")
        (tail,) = [text for name, text in known.items() if name.startswith("exposed in the tail")]
        assert tail == "4 ns: in transfer or waiting for a peer"
        assert known["grid"] == "24x1x1"

    def test_its_bandwidth_is_that_of_the_table(self, node: Node, tmp_path: Path) -> None:
        """Rank 1 waits in it for 4 of 8 ns; a second one is said to be larger than any link could move."""
        sizes = {
            "all_reduce|bucket=0|bytes=16|params=1": "###.......",
            "all_reduce|bucket=1|bytes=1048576|params=1": "....##....",
        }
        traces = {
            f"rank {rank}": draw_trace(
                ranges={"step|index=0": "#" * 40, **sizes},
                launches={"main": ".A...B"},
                streams={7: "a", 9: wait + "AAAA" + "." * 10 + "BBBBBB"},
                ranks={4242: rank},
                world_size=2,
                path=f"drawn{rank}.sqlite",
            )
            for rank, wait in enumerate(("......", "..AAAA"))
        }
        node.open(build_timeline(sources_of(traces)), tmp_path)
        told = [node.select("communication", at, panel)["algbw"] for at, panel in ((8, 0), (8, 1), (22, 0))]
        table = [one.algbw_bytes_per_s for one in collectives_of(*traces.values())]
        assert table == [4e9, None, 4e9, None]
        assert told == 2 * ["4 GB/s: bytes over transfer, 4 ns"] + ["n/a: more than any link carries"]

    def test_a_copy_tells_its_bandwidth_over_its_duration(self, node: Node, tmp_path: Path) -> None:
        trace = draw_trace(streams={7: "aaaa", 9: "1111"}, launches={"main": "a1"})
        sizes = np.where(trace.activities.lane == 9, 64, UNKNOWN)
        trace = replace(trace, activities=replace(trace.activities, bytes=sizes))
        node.open(build_timeline([source_of("run", trace)]), tmp_path)
        known = node.select("copies", 2)
        assert (known["bytes"], known["bandwidth"]) == ("64: 64 bytes", "16 GB/s: bytes over duration")

    def test_a_call_tells_what_it_launched_and_that_leads_back(self, drawn: Node) -> None:
        known = drawn.select("calls", 2.5)
        assert known["launched"] == "compute b, compute, stream 7"
        assert known["launch delay"].startswith("3 ns")
        assert drawn.ask("(({ at, to }) => [at, to])(arrowOf(page, page.selected))") == [2, 5]
        assert drawn.go_to("launched")["name"] == "compute b"
        assert drawn.go_to("launched") == known

    @pytest.mark.parametrize(("fold", "kind", "row"), [(True, "host", 1), (False, "calls", 1)])
    def test_an_arrow_leads_from_the_call_or_from_the_host_where_that_is_folded(
        self, drawn: Node, fold: bool, kind: str, row: int
    ) -> None:
        drawn.ask("page.fold('calls', argument)", fold)
        drawn.select("compute", 9)
        found = drawn.ask("arrowOf(page, page.selected)")
        middle = (
            "((row) => (row.top + row.bottom) / 2)(page.rows.filter(({ kind }) => kind === argument[0])[argument[1]])"
        )
        assert (found["at"], found["to"]) == (5, 8)
        assert found["line"] == pytest.approx([drawn.ask(middle, [kind, row]), drawn.ask(middle, ["compute", 0])])

    @pytest.mark.parametrize("name", ["nsys2022_4_ddp_unet_a100_rank0of4.sqlite", "kineto_a100_ddp_rank0of2.json.gz"])
    def test_launches_of_a_real_capture(self, node: Node, tmp_path: Path, shared_traces: Path, name: str) -> None:
        """Each box of a device has the call that the trace joins it with."""
        trace = load_trace(shared_traces / name, ReadOptions(with_launches=True))
        node.open(build_timeline([source_of("real", trace)]), tmp_path)
        delays = node.ask("""page.shownRows.filter(({ kind }) => kind === "communication").flatMap((row) =>
            row.tracks.flatMap((track) => Array.from(track.source, (source, at) => {
              const call = page.launches.call[source], calls = page.foldedRows.find(({ first, count }) =>
                first <= call && call < first + count);
              return [track.start[at], track.start[at] - calls.columns.start[call]]; })))""")
        seen, zero = trace.activities, min(int(each.steps.start_ns[0]) for each in source_of("real", trace).ranks)
        launch = trace.calls.start_ns[trace.launching_calls]
        expected = {int(start) - zero: int(start - call) for start, call, category in
                    zip(seen.start_ns, launch, seen.category, strict=True) if category == 1}  # fmt: skip
        assert len(delays) > 10
        assert all(expected[start] == delay for start, delay in delays)

    def test_ranges_are_nested(self, drawn: Node) -> None:
        rows = drawn.ask("""page.rows.filter(({ kind }) => kind === "ranges").map(({ tracks }) =>
            tracks.flatMap((track) => Array.from(track.source, (_, at) => page.texts(track, at)[0])))""")
        assert rows[:3] == [
            ["step|index=0"],
            ["forward", "load data", "all_reduce|bucket=3|bytes=64|params=1"],
            ["inner", "optimizer"],
        ]
        assert drawn.select("ranges", 9)["kind"] == "range of the program"

    def test_inferred_backward_is_a_box_of_the_host_and_says_so(self, drawn: Node) -> None:
        rows = drawn.ask("""page.rows.filter(({ kind }) => kind === "host").flatMap(({ tracks }) => tracks.flatMap(
            (track) => Array.from(track.source, (_, at) =>
              [page.texts(track, at)[0], track.start[at], track.end[at]])))""")
        assert ["backward (inferred: launched by autograd's threads)", 5, 6] in rows


class TestWaiting:
    @pytest.fixture
    def drawn(self, node: Node, tmp_path: Path) -> Node:
        """The first and the third step stand still for 10 us, the second one not at all."""
        open_capture(node, tmp_path, bucket_steps(20, 4, 20))
        return node

    def test_a_collective_tells_who_waited_for_it_and_leads_there_and_back(self, drawn: Node) -> None:
        known = drawn.select("communication", 10 * US)
        assert known["blocking"] == "10.0 µs (10,000 ns)"
        assert known["slack"] == "none: it ended 10.0 µs (10,000 ns) too late"
        assert known["needed by"] == "memcpy, stream 7, 25.0 µs on the axis"
        assert known["held back by"] == "this collective"
        assert arrows(drawn) == [[25, 25.001]]
        consumer = drawn.go_to("needed by")
        assert (consumer["lane"].endswith("copies"), consumer["needs"]) == (True, NCCL)
        assert arrows(drawn) == [[25, 25.001]]
        assert drawn.go_to("needs") == known

    def test_one_that_ended_in_time_tells_its_slack(self, drawn: Node) -> None:
        known = drawn.select("communication", STEP_NS + 7 * US)
        assert (known["blocking"], known["slack"]) == ("0.0 ms (0 ns)", "6.0 µs (6,000 ns)")
        assert known["held back by"] == "the operation before it on its stream"
        assert arrows(drawn) == [[49, 55.001]]

    @pytest.mark.parametrize("category", ["blocking", "exposed"])
    def test_one_leads_to_the_next_and_to_the_one_before(self, drawn: Node, category: str) -> None:
        told = []
        for by in (1, 1, 1, -1, -1):
            drawn.ask(
                "(([category, by]) => page.select(page.nextOf(category, by) ?? page.selected))(argument)",
                [category, by],
            )
            told.append(drawn.ask("page.selection")[0] / US)
        assert told == [15, 95, 95, 15, 15], "there is none beyond the last and before the first"

    def test_keys_go_by_length_and_pass_slivers(self, node: Node, tmp_path: Path) -> None:
        """Sixty presses did not reach the tail that held most of the exposed time: slivers of 1 us lay before it."""
        capture = bucket_steps(20, 14, 30)
        for sliver in (32 * US, STEP_NS + 32 * US):
            capture.kernels.append(Kernel(NCCL, sliver, sliver + 30, sliver - 20 * US, 100, stream=20))
        open_capture(node, tmp_path, capture)

        def pressed(*ways: int) -> list[float]:
            move = "(way => page.select(page.nextBySize('exposed', way) ?? page.selected))(argument)"
            return [(node.ask(move, way), node.ask("page.selection")[0] / US)[1] for way in ways]

        node.ask("page.showSteps()")
        assert pressed(1, 1, 1, 1, -1, -1) == [95, 15, 55, 55, 15, 95], "all steps: 20, 10, 4 us"
        node.ask("page.select(null), page.showStep(1)")
        assert pressed(1, 1, -1) == [15, 15, 15], "that step alone, from its start"

    def test_what_is_not_known_is_no_zero(self, node: Node, tmp_path: Path) -> None:
        """Of the second step a wait was not resolved, so that of its all-reduce nothing is known."""
        capture = bucket_steps(20, 20)
        capture.syncs.append(Sync("cudaStreamWaitEvent_v3020", 40 * US + 650, 20, 7, event=77))
        open_capture(node, tmp_path, capture)
        assert [rank["blocking"] for rank in node.ask("page.sums()")] == [None]
        assert [rank["blocking"] for rank in node.ask("page.sums(0, 30000)")] == [10 * US]
        known = node.select("communication", 50 * US)["blocking"]
        assert known.startswith("not known: the trace does not tell what 1 of 5 stream waits waited for")
        node.ask("page.select(null), page.show(0, 30000), page.select(page.nextOf('blocking', 1))")
        assert node.ask("page.nextOf('blocking', 1)") is None, "what is not known is no wait"

    def test_without_communication_blocking_is_not_known(self, node: Node, tmp_path: Path) -> None:
        """The table said 0, and the JSON null."""
        open_capture(node, tmp_path, Capture(kernels=[Kernel("gemm", 1_000, 9_000, launch=500, thread=1)]))
        (rank,) = node.ask("page.sums()")
        assert (rank["blocking"], rank["whyUnknown"]) == (None, "nothing in this trace is known to communicate")

    def test_the_unet_waits_for_nothing(self, node: Node, tmp_path: Path, shared_traces: Path) -> None:
        trace = load_trace(shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite")
        node.open(build_timeline([source_of("run", trace)]), tmp_path)
        assert [rank["blocking"] for rank in node.ask("page.sums()")] == [0]
        last = collectives_of(trace)[-1]
        node.ask("""(() => { const row = page.shownRows.findLast(({ kind }) => kind === "communication");
            const [track] = row.tracks;
            page.select({ row, track, at: track.length - 1 }); })()""")
        known = node.facts()
        assert known["blocking"] == "0.0 ms (0 ns)"
        assert known["slack"].endswith(f"({last.slack_ns:,} ns)")
        ((start, end),) = arrows(node)
        assert end - start == pytest.approx((last.consumer.start_ns - last.end_ns) / US, abs=0.01)
