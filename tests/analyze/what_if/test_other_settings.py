"""The U-Net as other settings would have recorded it: with views, without bytes of copies, without names."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddp_prof import load_runs
from ddp_prof.analyze.what_if import questions as ask
from ddp_prof.analyze.what_if.prediction import REFUSED, RunPrediction
from ddp_prof.analyze.what_if.questions import Question

NO_COPIES_OUT = "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 8"
NO_BYTES = "UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET bytes = 0"
RECENT_TORCH = "UPDATE StringIds SET value = replace(value, 'at::detail::Array<', 'std::array<')"
NO_STEPS = "DELETE FROM NVTX_EVENTS WHERE domainId = 0"
FIVE_STEPS = (
    "DELETE FROM NVTX_EVENTS WHERE start >= (SELECT start FROM NVTX_EVENTS WHERE coalesce(text, (SELECT value FROM "
    "StringIds WHERE id = textId)) = 'step 6')"
)
ASKED = [*(Question(ask.BUCKET_SIZE, mb) for mb in (25, 100)), Question(ask.VIEWS)]


@pytest.fixture
def unet(shared_traces: Path) -> Path:
    return shared_traces / "nsys2022_4_ddp_unet_a100_rank0of4.sqlite"


def predict(unet: Path, folder: Path, *statements: str, parameters: list[int] | None = None) -> RunPrediction:
    edited = Path(shutil.copy(unet, folder / "edited.sqlite"))
    with closing(sqlite3.connect(edited)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    (run,) = load_runs(edited)
    return run.what_if(ASKED, parameters)


def copies(unet: Path) -> list[int]:
    with closing(sqlite3.connect(f"file:{unet}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 8 ORDER BY start")
        sizes = [size for (size,) in rows]
    first = sizes.index(163840)  # the first gradient that is ready
    return sizes[first : first + 24]


@pytest.mark.parametrize("edit", [NO_COPIES_OUT, NO_BYTES])
def test_without_copies_out_of_buckets_grids_tell_the_gradients(unet: Path, tmp_path: Path, edit: str) -> None:
    found = predict(unet, tmp_path, edit)
    assert (found.reason, found.sizes_from, found.gradients) == (None, "grids of kernels", 24)
    today, larger, views = found.predictions
    assert (today.change_ns, today.calls, larger.calls) == (0, 8, 5)
    assert abs(larger.change_ns or 0) < 300_000
    assert views.verdict == REFUSED, "nothing is known to be copied"


def test_where_no_source_is_left_the_parameters_are_asked_for(unet: Path, tmp_path: Path) -> None:
    found = predict(unet, tmp_path, NO_COPIES_OUT, RECENT_TORCH)
    assert "give --parameters FILE" in str(found.reason)
    given = predict(unet, tmp_path, NO_COPIES_OUT, RECENT_TORCH, parameters=copies(unet)[::-1])
    assert (given.reason, given.sizes_from) == (None, "--parameters")
    assert [one.calls for one in given.predictions[:2]] == [8, 5]


def test_what_is_missing_is_the_reason(unet: Path, tmp_path: Path) -> None:
    """Without steps it was said that no collective reduces gradients."""
    assert "--step-range" in str(predict(unet, tmp_path, NO_STEPS).reason)


def test_few_steps_are_an_answer_or_more_are_asked_for(unet: Path, tmp_path: Path) -> None:
    found = predict(unet, tmp_path, FIVE_STEPS)
    assert found.predictions or "more steps" in str(found.reason)
