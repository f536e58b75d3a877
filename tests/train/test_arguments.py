"""The command line of the workload: mistakes are answered at once, and cost no import of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_prof.errors import TraceError
from ddp_prof.train.__main__ import clear_outputs
from ddp_prof.train.arguments import make_parser, parse_arguments


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--variant"),
        (["--variant", "fast"], "invalid choice: 'fast'"),
        (["--variant", "flat", "--steps", "0"], "must be at least 1, not 0"),
        (["--variant", "flat", "--warmup", "-1"], "must be at least 0, not -1"),
        (["--variant", "flat", "--world-size", "two"], "invalid"),
        (["--variant", "flat", "--bucket-size-mb", "25"], "variant flat has no buckets to cap"),
        (["--variant", "bucketed", "--bucket-size-mb", "0"], "must be positive, not 0"),
        (["--variant", "bucketed", "--bucket-size-mb", "nan"], "must be positive, not nan"),
        (["--variant", "torch", "--bucket-size-mb", "none"], "torch needs a number"),
        (["--variant", "torch", "--comm-hook", "zip"], "invalid choice: 'zip'"),
        (["--variant", "flat", "--comm-hook", "bf16"], "--comm-hook: only variant torch has one"),
        (["--variant", "torch", "--comm-hook", "bf16", "--no-communication-hook"], "not with --no-communication-hook"),
        (["--variant", "bucketed", "--gradient-as-bucket-view"], "only torch's DDP copies out of buckets"),
        (["--variant", "flat", "--kineto", "trace.txt"], "must end in .json or .json.gz"),
        (["--variant", "flat", "--model-size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_mistakes_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "cap"),
    [
        (["--variant", "bucketed"], 25.0),
        (["--variant", "bucketed", "--bucket-size-mb", "0.5"], 0.5),
        (["--variant", "bucketed", "--bucket-size-mb", "none"], None),
        (["--variant", "torch"], None),
        (["--variant", "torch", "--bucket-size-mb", "10"], 10.0),
    ],
)
def test_bucket_size(argv: list[str], cap: float | None) -> None:
    assert parse_arguments(argv).bucket_size_mb == cap


def test_the_help_says_whose_batch_it_is() -> None:
    text = " ".join(make_parser().format_help().split())
    assert "of all ranks together; must be a multiple of the number of ranks" in text


def test_of_outputs_of_an_earlier_run_only_a_run_json_is_removed(tmp_path: Path) -> None:
    """``--run-json /dev/null`` deleted the device, as root, and a database of that name went like an old run.json."""
    old, pipe, capture = (tmp_path / name for name in ("old.run.json", "pipe", "capture.sqlite"))
    old.write_text("{}")
    os.mkfifo(pipe)
    capture.write_bytes(b"SQLite format 3\0")
    for path in (old, pipe):
        clear_outputs(parse_arguments(["--variant", "flat", "--run-json", str(path)]))
    with pytest.raises(TraceError, match="a capture or a database is there"):
        clear_outputs(parse_arguments(["--variant", "flat", "--run-json", str(capture)]))
    assert [path.exists() for path in (old, pipe, capture)] == [False, True, True]
