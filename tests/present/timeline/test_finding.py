"""Names that are searched, and what an address shows and says, without a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp_prof.ingest import ReadOptions
from ddp_prof.ingest.load import load_trace
from ddp_prof.present.timeline.build import build_timeline
from tests.ingest.test_kineto_json import event, gpu_step, write
from tests.javascript import Node
from tests.measuring import source_of
from tests.nsys_factory import US, bucket_steps, write_capture
from tests.present.runs import cpu_run
from tests.present.timelines import gpu_trace, steps_of


@pytest.fixture
def steps(node: Node, tmp_path: Path) -> Node:
    """Kernels `compute a` to `d`, one a step, from 0, 4, 12 and 17 us."""
    node.open(build_timeline([source_of("run", steps_of(4, 8, 5, 7))]), tmp_path)
    return node


def visited(node: Node, *directions: int) -> list[tuple[str, int]]:
    """The titles of matches and their positions, in the order in which they are visited."""
    found = []
    for direction in directions:
        node.ask("page.search.go(argument)", direction)
        title = node.ask("page.texts(page.search.current.track, page.search.current.at)[0]")
        found.append((title, node.ask("page.search.position")))
    return found


class TestSearch:
    def test_it_goes_to_kernels_and_counts_the_others(self, steps: Node) -> None:
        steps.ask("page.search.find('COMPUTE ')")
        goals, count = steps.ask("[page.search.goals, page.search.count]")
        assert (goals, count > 4) == (4, True), "the strip has matches, too"
        kernels = [(f"compute {letter}", at) for at, letter in enumerate("abcd", start=1)]
        assert visited(steps, 1, 1, 1, 1, 1, -1) == [*kernels, kernels[0], kernels[-1]]

    def test_it_goes_to_ranges_where_no_kernel_matches(self, steps: Node) -> None:
        steps.ask("page.search.find('step|index')")
        assert steps.ask("page.search.goals") == 4
        assert visited(steps, 1, 1) == [("step|index=0", 1), ("step|index=1", 2)]

    def test_it_goes_on_from_the_last_to_the_first(self, node: Node, tmp_path: Path) -> None:
        node.open(build_timeline([source_of("overlap", cpu_run(2))]), tmp_path)
        node.ask("page.search.find('bucket 0')")
        assert [position for _, position in visited(node, 1, 1, 1, -1)] == [1, 2, 1, 2]

    def test_what_is_not_there(self, steps: Node) -> None:
        steps.ask("page.search.find('no such thing'), page.search.go(1)")
        assert steps.ask("[page.search.goals, page.search.count, page.search.current]") == [0, 0, None]

    def test_a_lane_that_is_filtered_out_is_not_searched(self, node: Node, tmp_path: Path) -> None:
        node.open(build_timeline([source_of("run", gpu_trace())]), tmp_path)
        node.ask("page.search.find('forward')")
        assert node.ask("page.search.count") == 2, "of the host and of the ranges"
        node.ask("page.filter('host')")
        assert node.ask("page.search.count") == 1

    @pytest.mark.parametrize("name", ["nsys2022_4_ddp_unet_a100_rank0of4.sqlite", "nsys2025_3_single_gpu_t4.sqlite"])
    def test_it_finds_what_a_capture_holds(self, node: Node, tmp_path: Path, shared_traces: Path, name: str) -> None:
        trace = load_trace(shared_traces / name)
        node.open(build_timeline([source_of(name, trace)]), tmp_path)
        times = np.bincount(trace.activities.name_id, minlength=len(trace.names))
        for name_id in np.argsort(-times)[:5]:
            word = trace.names[name_id].lower()
            fits = np.array([word in text.lower() for text in trace.names])
            held = sum(int(fits[table.name_id].sum()) for table in (trace.activities, trace.spans))
            node.ask("page.search.find(argument)", word)
            assert node.ask("page.search.count") == held > 0, word


class TestAddress:
    @pytest.mark.parametrize(
        "hash_",
        [
            "",
            "#step=all",
            "#step=3",
            "#step=1&from=1000&to=6000",
            "#step=all&fold=compute%2C+stream+7&unfold=ranges",
            "#lanes=stream",
            "#search=compute",
            "#range=1000,4000",
        ],
    )
    def test_what_it_shows_is_what_is_written(self, steps: Node, hash_: str) -> None:
        steps.follow(hash_.removeprefix("#"))
        assert steps.ask("hashOf(page)") == hash_

    def test_a_box_is_named_by_its_row_and_its_start(self, steps: Node) -> None:
        row = steps.ask("page.rows.findIndex(({ kind }) => kind === 'compute')")
        steps.follow(f"step=3&search=compute&box={row}@17000")
        assert steps.facts()["name"] == "compute d"
        assert steps.ask("hashOf(page)") == f"#step=3&search=compute&box={row}@17000"

    @pytest.mark.parametrize(
        "hash_",
        ["box=0@17", "box=99@0", "box=x", "range=5,1", "range=a,b", "step=99", "from=5&to=1", "step=<img src=x>",
         "from=NaN&to=1e999"],
    )  # fmt: skip
    def test_one_that_means_nothing_opens_as_one_without(self, steps: Node, hash_: str) -> None:
        steps.follow("")
        opening = steps.ask("[page.selected, page.step, page.view.from, page.view.to]")
        steps.follow(hash_)
        assert steps.ask("[page.selected, page.step, page.view.from, page.view.to]") == opening
        assert opening[:2] == [None, 2]

    def test_the_worst_stretch_is_one_of_measured_steps(self, node: Node, tmp_path: Path) -> None:
        """Ranks often wait longest for each other in the warm-up, of which no figure is; there it blocks for 30 us."""
        capture = bucket_steps(40, 15, 30, 20)
        for index, step in enumerate(capture.ranges):
            step.name, step.domain = f"step|index={index}{'' if index else '|warmup=1'}", "ddp_prof"
        trace = load_trace(write_capture(tmp_path / "x.sqlite", capture, "2023.4"))
        node.open(build_timeline([source_of("run", trace)]), tmp_path, "worst")
        start, end = node.ask("page.selection")
        assert end - start == 20 * US
        assert node.facts()["name"] == "waiting for communication"
        assert node.ask("page.stepName(page.step)") == "step 2"

    def test_of_kernels_of_one_name_that_of_the_same_shape_and_phase(self, node: Node, tmp_path: Path) -> None:
        """A longer name that holds it is not meant."""
        more = [
            event("cuda_runtime", "cudaLaunchKernel", ts, "1", tid=2, correlation=number)
            for number, ts in ((7, "60"), (8, "5"), (9, "70"))
        ]
        for number, ts, name, grid in (
            (7, "61", "gemm", [2, 1, 1]),
            (8, "6", "gemm", [3, 1, 1]),
            (9, "71", "gemm_long", [2, 1, 1]),
        ):
            kernel = {"tid": 7, "device": 0, "stream": 7, "correlation": number, "grid": grid, "block": [32, 1, 1]}
            more.append(event("kernel", name, ts, "2", **kernel))
        trace = load_trace(write(tmp_path / "x.json", [*gpu_step(), *more]), ReadOptions(with_launches=True))
        node.open(
            build_timeline([source_of("run", trace)]), tmp_path, "kernel=gemm&shape=grid 2x1x1 block 32x1x1&phase="
        )
        known = node.facts()
        assert (known["name"], known["grid"], known["start"]) == ("gemm", "2x1x1", "61.0 µs on the axis")
        assert node.ask("[page.search.position, page.search.goals]") == [3, 3]
