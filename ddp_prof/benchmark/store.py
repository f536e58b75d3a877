"""The results database: what the benchmark suite measured; the suite writes it and ``ddp-prof results`` reads it.

Five tables, a frozen class each: environments; runs; the times of each step of a run; the times of a run's messages by
size; the times of all-reduces measured alone. Times are nanoseconds, sizes bytes, and ``None`` (null) is what was not
measured.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from ddp_prof.errors import TraceError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from sqlite_utils import Database

OK, OUT_OF_MEMORY, FAILED = STATUSES = ("ok", "out_of_memory", "failed")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Environment:
    """A machine with the versions on it; figures of two environments are not compared without a word."""

    id: str
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    gpus: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    ddp_prof: str


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run of one setting, in processes of its own.

    Attributes:
        id: Digest of the setting, the repeat and the environment; a run that is there is not run again.
        environment: :attr:`Environment.id`.
        repeat: Which repetition of its setting, from 0.
        bucket_size_mb: Cap of a bucket in MB of 2**20 bytes; ``None`` where the variant has none, or no cap.
        parameters: Of the model.
        gradient_bytes: Of all gradients of a rank.
        local_batch_size: Sequences a step of one rank.
        steps: Measured steps of each kind, see :attr:`StoredStep.is_synchronized`.
        status: One of :data:`STATUSES`; ``reason`` says why where it is not ``ok``, and there are no measurements.
        caveat: What restricts the meaning of the figures, as for ranks that share a GPU.
        collectives: A step's, of one rank.
        communicated_bytes: A step's, of one rank: the sum of its messages.
        peak_memory_bytes: Of the rank that needed most: allocated on the GPU, on a CPU resident.
        tokens: A step's, of all ranks.
        trace: File of the capture of the same setting, where one was made; the figures from it are medians of a step
            over all ranks.
        code: Digest of the code that was measured; the run is made again, under the same id, when that changes.
    """

    id: str
    environment: str
    repeat: int
    variant: str
    bucket_size_mb: float | None
    model_size: str
    d_model: int
    num_layers: int
    parameters: int
    gradient_bytes: int
    world_size: int
    backend: str | None
    device: str | None
    local_batch_size: int
    seq_len: int
    warmup: int
    steps: int
    status: str
    reason: str | None
    caveat: str | None
    collectives: int | None
    communicated_bytes: int | None
    peak_memory_bytes: int | None
    tokens: int
    created: str
    git_commit: str | None
    command: str
    trace: str | None = None
    trace_comm_ns: int | None = None
    trace_overlapped_ns: int | None = None
    trace_exposed_ns: int | None = None
    trace_tail_ns: int | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class StoredStep:
    """What one step took on rank 0, by the host's clock.

    Attributes:
        run: :attr:`StoredRun.id`.
        is_synchronized: Whether the host waited for the device at each change of phase. Without (0) the step is as
            fast as it is, but communication is only what the host waited for. With it (1) phases are separated, and
            nothing of one hides under another but what the variant launched earlier.
        communication_ns: From the end of backward until the variant has synchronized all gradients.
    """

    run: str
    is_synchronized: bool
    step: int
    step_ns: int
    forward_ns: int | None
    backward_ns: int | None
    communication_ns: int | None
    optimizer_ns: int | None


@dataclass(frozen=True, slots=True)
class StoredMessages:
    """All-reduces of one size in a run, timed one by one by the host: only of variants that block in each.

    Attributes:
        run: :attr:`StoredRun.id`.
        bytes: Size of the message.
        calls: How many were timed.
        median_ns: Of their times on rank 0.
        shortest_ns: The shortest of them.
    """

    run: str
    bytes: int
    calls: int
    median_ns: int
    shortest_ns: int


@dataclass(frozen=True, slots=True)
class StoredAllReduce:
    """All-reduces of one size measured alone, by :mod:`ddp_prof.benchmark.allreduce`.

    Attributes:
        environment: :attr:`Environment.id`.
        calls: How many were timed.
        median_ns: Median over calls of the shortest time over the ranks.
        low_ns: Lower end of the median's 95 % interval; ``None`` for too few calls.
        high_ns: Upper end of it.
    """

    environment: str
    world_size: int
    backend: str
    device: str
    bytes: int
    calls: int
    median_ns: int
    low_ns: int | None
    high_ns: int | None
    created: str


@dataclass(frozen=True, slots=True)
class Results:
    """All that a database holds."""

    environments: tuple[Environment, ...]
    runs: tuple[StoredRun, ...]
    steps: tuple[StoredStep, ...]
    messages: tuple[StoredMessages, ...]
    all_reduces: tuple[StoredAllReduce, ...] = ()


TABLES: dict[str, tuple[type, tuple[str, ...]]] = {
    "environments": (Environment, ("id",)),
    "runs": (StoredRun, ("id",)),
    "measurements": (StoredStep, ("run", "is_synchronized", "step")),
    "messages": (StoredMessages, ("run", "bytes")),
    "all_reduces": (StoredAllReduce, ("environment", "world_size", "backend", "device", "bytes")),
}
"""Name of each table, what a row of it is, its primary key."""
LATER = {"all_reduces"}
"""Tables that databases of earlier versions do not have."""
POSITIVE = {"gradient_bytes", "step_ns"}
"""Columns that are divided by."""
FOREIGN_KEYS = {
    "runs": [("environment", "environments", "id")],
    "measurements": [("run", "runs", "id")],
    "messages": [("run", "runs", "id")],
    "all_reduces": [("environment", "environments", "id")],
}


def open_database(path: Path) -> Database:
    """Open a database for writing; makes it, with its folder and tables, where it is not there.

    Raises:
        TraceError: The file is something else, or cannot be written.
    """
    import sqlite3

    from sqlite_utils import Database

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = Database(path)
        for name, (row, key) in TABLES.items():
            database.table(name).create(
                {column: base for column, (base, _) in _columns(row).items()},
                pk=key if len(key) > 1 else key[0],
                not_null={column for column, (_, is_null) in _columns(row).items() if not is_null},
                foreign_keys=FOREIGN_KEYS.get(name, []),
                if_not_exists=True,
            )
            _add_columns(database, name, row)
    except (OSError, sqlite3.Error) as error:
        raise _error(path, error) from error
    return database


def write_run(
    database: Database,
    environment: Environment,
    run: StoredRun,
    steps: Sequence[StoredStep] = (),
    messages: Sequence[StoredMessages] = (),
) -> None:
    """Write a run with all that was measured in it, whole or not at all; an earlier one of the same id goes.

    Raises:
        TraceError: The file cannot be written: somebody else does, or the disk is full.
    """
    import sqlite3

    try:
        with database.atomic():
            for name in ("measurements", "messages"):
                database.table(name).delete_where("run = ?", [run.id])
            for name, rows in (
                ("environments", [environment]), ("runs", [run]), ("measurements", steps), ("messages", messages)
            ):  # fmt: skip
                _upsert(database, name, rows)
    except sqlite3.OperationalError as error:
        raise _error(_path_of(database), error) from error


def write_all_reduces(database: Database, environment: Environment, rows: Sequence[StoredAllReduce]) -> None:
    """Write timings of the all-reduce alone; earlier ones of the same size, ranks and backend are replaced.

    Raises:
        TraceError: The file cannot be written.
    """
    import sqlite3

    try:
        with database.atomic():
            _upsert(database, "environments", [environment])
            _upsert(database, "all_reduces", rows)
    except sqlite3.OperationalError as error:
        raise _error(_path_of(database), error) from error


def load_results(path: Path) -> Results:
    """Read a database, which stays as it is.

    Raises:
        TraceError: It is not there, something else, or cannot be read.
    """
    import sqlite3  # sqlite-utils would load pandas, which takes longer than all of the reading

    if not path.is_file():
        raise TraceError(path, "no such file", "make it with scripts/run_comparison.sh")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            rows = {name: _load(connection, name, row) for name, (row, _) in TABLES.items()}
    except (OSError, sqlite3.Error) as error:
        raise _error(path, error) from error
    return Results(rows["environments"], rows["runs"], rows["measurements"], rows["messages"], rows["all_reduces"])


def _upsert(database: Database, name: str, rows: Sequence[Any]) -> None:
    key = TABLES[name][1]
    database.table(name).upsert_all([asdict(row) for row in rows], pk=key if len(key) > 1 else key[0])


def _path_of(database: Database) -> Path:
    ((_, _, path),) = database.execute("pragma database_list").fetchall()
    return Path(path)


def _add_columns(database: Database, name: str, row: type) -> None:
    """Give a table of an earlier version the columns that came since."""
    known = database.table(name).columns_dict
    for column, (base, _) in _columns(row).items():
        if column not in known:
            database.table(name).add_column(column, base)


def _load(connection: sqlite3.Connection, name: str, row: type[Any]) -> tuple[Any, ...]:
    """All rows of a table; of a later version's columns nothing is read, of those that came since the default."""
    import sqlite3

    known = {column["name"] for column in connection.execute(f"pragma table_info({name})")}
    if not known and name in LATER:
        return ()
    if missing := [field.name for field in fields(row) if field.default is MISSING and field.name not in known]:
        raise sqlite3.DatabaseError(f"no {name}.{missing[0]}" if known else f"no table {name}")
    columns = {column: kind for column, kind in _columns(row).items() if column in known}
    return tuple(
        row(**{column: _value(f"{name}.{column}", values[column], *kind) for column, kind in columns.items()})
        for values in connection.execute(f"select {', '.join(columns)} from {name} order by rowid")
    )


def _value(name: str, value: Any, base: type, is_null: bool) -> Any:  # whatever a column holds
    """The value; SQLite keeps what it is given, whatever the column's type."""
    import sqlite3

    if value is None and is_null:
        return None
    is_right = isinstance(value, (int, float) if base is float else int if base is bool else base)
    if not is_right or (name.partition(".")[2] in POSITIVE and value <= 0):
        raise sqlite3.DatabaseError(f"{name} is {value!r}")
    return base(value)


def _columns(row: type) -> dict[str, tuple[type, bool]]:
    """Of each column its type and whether it may be null."""
    hints = get_type_hints(row)
    bases = {field.name: get_args(hints[field.name]) or (hints[field.name],) for field in fields(row)}
    return {name: (base[0], type(None) in base) for name, base in bases.items()}


def _error(path: Path, error: Exception) -> TraceError:
    import sqlite3

    if isinstance(error, (OSError, sqlite3.OperationalError)):
        way_out = "see that no other program holds it, that it and its folder can be written, or name another file"
        return TraceError(path, f"cannot be used ({error})", way_out)
    return TraceError(path, f"not a results database ({error})", "name another file, or move this one away")
