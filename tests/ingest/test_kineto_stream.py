"""A torch.profiler document that is read in parts gives what the whole one gives: events, the rest, and errors."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_prof.errors import TraceError
from ddp_prof.ingest import ReadOptions, kineto_stream
from ddp_prof.ingest.kineto_document import Event, Header, read_document
from ddp_prof.ingest.kineto_json import load_kineto_json
from tests.ingest.test_kineto_json import gpu_step

PART_BYTES = 200
IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class Taken:
    """The events that were handed over, and in how many parts."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.parts = 0

    def add(self, events: Sequence[Event]) -> None:
        self.events += events
        self.parts += 1


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_stream, "PART_BYTES", PART_BYTES)


def told(header: Header) -> str:
    return repr([getattr(header, name) for name in Header.__struct_fields__])


def in_parts(path: Path) -> tuple[str, bytes] | str:
    try:
        header, taken = kineto_stream.read_events(path, Taken)
    except TraceError as error:
        return str(error)
    return told(header), msgspec.json.encode(taken.events)


def whole(path: Path) -> tuple[str, bytes] | str:
    try:
        document = read_document(path)
    except TraceError as error:
        return str(error)
    return told(document), msgspec.json.encode(document.traceEvents)


def parts_of(path: Path) -> int:
    return kineto_stream.read_events(path, Taken)[1].parts


def write(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def numbered(count: int, **about: Any) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "kernel", "name": f"k{number}", "ts": number, "dur": 1, **about} for number in range(count)
    ]


TRICKY = [
    '}, {"ph": "X"',
    '"}, {"',
    "\\",
    '\\"',
    "]}",
    "},\n{",
    '"traceEvents": [',
    "\u20ac\U0001f600",
    "\n\t",
    "",
    "x" * 300,
]


def _as_torch_writes(event: dict[str, Any]) -> bytes:
    name, times = json.dumps(event["name"]), f'"ts": {event["ts"]}, "dur": 1, "args": {{}}'
    return f'{{\n    "ph": "X", "cat": "kernel", "name": {name}, "pid": 0, {times}}}'.encode()


TEXTS = st.sampled_from(TRICKY) | st.text(st.sampled_from('{}[],:"\\ \nphX\u00e9'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXMi")},
    optional={
        "cat": st.sampled_from(["kernel", "cpu_op", "Kernel"]) | TEXTS,
        "name": VALUES,
        "ts": st.sampled_from([0, 1.5, 1682725898236567.25, 1682725898236567, 10**400, 4458676522690.655]),
        "dur": st.integers(-1, 9) | st.just("7"),
        "args": st.dictionaries(TEXTS | st.sampled_from(["stream", "grid", "name"]), VALUES, max_size=3),
        "tid": VALUES,
        "more": VALUES,
    },
).flatmap(lambda event: st.permutations(list(event.items())).map(dict))
TOP = st.dictionaries(
    TEXTS.filter(lambda text: "traceEvents" not in text)
    | st.sampled_from(["deviceProperties", "distributedInfo", "ERROR", "schemaVersion"]),
    VALUES,
    max_size=3,
)
DOCUMENTS = st.builds(
    lambda before, events, after, **layout: json.dumps({**before, "traceEvents": events, **after}, **layout).encode(),
    TOP,
    st.lists(EVENTS, max_size=12),
    TOP,
    indent=st.sampled_from([None, 0, 2]),
    ensure_ascii=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
)
NOT_JSON = st.sampled_from(
    [(b'"name": "k', b'"name": "\x01k'), (b'"dur": 1', b'"dur": Infinity'), (b'"dur": 1', b'"dur": nan'),
     (b'"name": "k', b'"name": "C:\\q'), (b'"name": "k', b'"name": "\xff'), (b'"name": "k', b'"name": "\\ud83d'),
     (b'"name": "k', b'"name": "a"b')]
)  # fmt: skip
"""What some releases of torch write although JSON does not allow it."""


class TestPropertyEqual:
    @IN_FOLDER
    @given(DOCUMENTS, st.sampled_from(["x.json", "x.json.gz"]))
    def test_a_document(self, tmp_path: Path, text: bytes, name: str) -> None:
        path = write(tmp_path / name, text)
        assert in_parts(path) == whole(path)

    @IN_FOLDER
    @given(DOCUMENTS, st.floats(0, 1), st.sampled_from([b"", b"}", b"]", b",", b'"', b"{", b"NaN", b"\\"]))
    def test_a_damaged_document(self, tmp_path: Path, text: bytes, place: float, added: bytes) -> None:
        at = int(place * len(text))
        path = write(tmp_path / "x.json", text[:at] + added + (text[at:] if added else b""))
        assert in_parts(path) == whole(path)

    @IN_FOLDER
    @given(NOT_JSON, st.integers(0, 19), st.booleans())
    def test_a_document_that_is_almost_json(
        self, tmp_path: Path, change: tuple[bytes, bytes], row: int, is_cut: bool
    ) -> None:
        events = [_as_torch_writes(event) for event in numbered(20)]
        events[row] = events[row].replace(*change)
        text = b'{"traceEvents": [' + b",\n  ".join(events) + b"]}"
        path = write(tmp_path / "x.json", text[:-30] if is_cut else text)
        assert in_parts(path) == whole(path)


class TestRead:
    def test_in_parts(self, tmp_path: Path) -> None:
        path = write(tmp_path / "x.json", json.dumps({"traceEvents": numbered(40)}).encode())
        assert parts_of(path) > 5

    def test_every_order_of_keys_in_parts(self, tmp_path: Path) -> None:
        event = {"args": {"a": [{"b": 1}, {"b": 2}]}, "name": '}, {"ph"', "ph": "X", "cat": "x" * 90, "ts": 1}
        path = write(tmp_path / "x.json", json.dumps({"a": [{}, {}], "traceEvents": [event] * 40}).encode())
        assert parts_of(path) > 1
        assert in_parts(path) == whole(path)

    def test_times_of_which_one_needs_more_than_a_float_from_the_start_again(self, tmp_path: Path) -> None:
        events = [*numbered(40), {"ph": "i", "ts": 1682725898236567.123}]
        path = write(tmp_path / "x.json", json.dumps({"traceEvents": events}).encode())
        assert in_parts(path) == whole(path)

    def test_the_rest_before_and_behind_the_events(self, tmp_path: Path) -> None:
        text = json.dumps({"baseTimeNanoseconds": 1, "ERROR": 2, "traceEvents": numbered(40), "ERROR ": 3}).encode()
        path = write(tmp_path / "x.json", text.replace(b'"ERROR "', b'"ERROR"'))
        header, _ = kineto_stream.read_events(path, Taken)
        assert (header.baseTimeNanoseconds, header.ERROR) == (1, 3)

    @pytest.mark.parametrize("cut", [*range(20, 300, 7)])
    def test_a_document_that_is_cut_off(self, tmp_path: Path, cut: int) -> None:
        text = json.dumps({"traceEvents": numbered(40)}).encode()
        path = write(tmp_path / "x.json", text[:-cut])
        assert "x.json: damaged or cut off (" in str(in_parts(path))
        assert in_parts(path) == whole(path)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b'{"traceEvents": [%s], "traceEvents": [%s]}', "it holds 'traceEvents' more than once"),
            (b'{"traceEvents": [%s, {"traceEvents": [%s]}]}', "it holds 'traceEvents' more than once"),
            (b'{"traceEvents": [%s]}{"traceEvents": [%s]}', "damaged or cut off"),
            (b'[%s], [%s]', "damaged or cut off"),
            (b'{"traceEvents": [%s,%s,]}', "damaged or cut off"),
        ],
    )  # fmt: skip
    def test_documents_that_were_put_together(self, tmp_path: Path, text: bytes, reason: str) -> None:
        events = json.dumps(numbered(40)).encode()[1:-1]
        path = write(tmp_path / "x.json", text % (events, events))
        assert reason in str(in_parts(path))
        assert in_parts(path) == whole(path)

    def test_a_key_that_is_written_in_another_way(self, tmp_path: Path) -> None:
        events = json.dumps(numbered(40)).encode()
        path = write(tmp_path / "x.json", b'{"traceEvents": %s, "trace\\u0045vents": []}' % events)
        assert in_parts(path) == whole(path)


def test_a_trace_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns, too, are the same."""
    path = write(tmp_path / "x.json", b'{"traceEvents": [%s]}' % ",".join(gpu_step() * 9).encode())
    found = load_kineto_json(path, ReadOptions(with_launches=True))
    assert parts_of(path) > 5
    monkeypatch.setattr(kineto_stream, "PART_BYTES", 1 << 20)
    expected = load_kineto_json(path, ReadOptions(with_launches=True))
    assert found.names == expected.names
    for name in ("activities", "spans", "calls", "synchronizations", "call_details"):
        one, other = getattr(found, name), getattr(expected, name)
        assert [*map(list, vars(one).values())] == [*map(list, vars(other).values())]
