"""The results database of the study: the sweep writes it, and ``ddp-prof results`` reads it.

It has four tables, and a class here for the rows of each: environments; runs; the times of each step of a run; the
times of the messages of a run by size. Times are nanoseconds, sizes are bytes, and ``None`` (null) stands for what was
not measured.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from msgspec import Meta, ValidationError, convert

from ddp_prof.atomic_file import is_file
from ddp_prof.bounded_file import held_bytes
from ddp_prof.errors import TraceError
from ddp_prof.manifest import HostTimes, MessageTimes

if TYPE_CHECKING:
    from sqlite_utils import Database

OK, OUT_OF_MEMORY, FAILED = "ok", "out_of_memory", "failed"

Divisor = Annotated[int, Meta(gt=0)]  # a number by which others are divided, so it must be positive


@dataclass(frozen=True, slots=True)
class Environment:
    """A machine and the versions of its software; ``id`` is a digest of all other fields."""

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

    @property
    def title(self) -> str:
        return " · ".join(filter(None, (f"{self.cpu}, {self.cores} cores", self.gpus, f"torch {self.torch}")))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run of one setting, in processes of its own; fields of a ``Manifest`` mean what they mean there.

    Attributes:
        id: Digest of setting, repeat and environment; a run whose id is in the database is not repeated.
        steps: Measured steps, and as many synchronized ones.
        reason: Why ``status`` is not ``ok``; then there are no measurements.
        caveat: What restricts the meaning of the figures, as for ranks that share a GPU.
        trace: File of the capture of the same setting, relative to the folder of the database. The fields ``trace_...``
            are medians over the steps of all ranks in this capture.
        code: Digest of the code that was measured; if the code changes, the run is made again, under the same id.
        definitions: ``DEFINITIONS`` of :mod:`ddp_prof.analyze`; if it changes, the run is made again, too. ``None`` in
            older databases, which do not hold it.
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
    gradient_bytes: Divisor
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
    definitions: int | None = None


@dataclass(frozen=True, slots=True)
class StoredStep(HostTimes):
    """The times of one step of a run, on rank 0 by the host's clock; ``run`` is the id of the run."""

    run: str = field(kw_only=True)
    step_ns: Divisor


@dataclass(frozen=True, slots=True)
class StoredMessages(MessageTimes):
    """The times of a run's messages of one size; ``run`` is the id of the run."""

    run: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Results:
    """All rows of a results database."""

    environments: tuple[Environment, ...]
    runs: tuple[StoredRun, ...]
    steps: tuple[StoredStep, ...]
    messages: tuple[StoredMessages, ...]


Tables = Mapping[str, tuple[type[Any], tuple[str, ...], str | None]]
"""For each table, by its name: the class of its rows, the columns of its primary key, and its foreign key.

The foreign key is the column that holds the id of a row of another table, or ``None``.
"""

TABLES: Tables = {
    "environments": (Environment, ("id",), None),
    "runs": (StoredRun, ("id",), "environment"),
    "measurements": (StoredStep, ("run", "is_synchronized", "step"), "run"),
    "messages": (StoredMessages, ("run", "bytes"), "run"),
}
MOST_S, OPERATIONS_PER_CHECK, LEAST_BYTES_PER_ROW = 60, 1_000_000, 6
"""Limits for databases that are not ours: the most seconds that reading may take, the number of operations of SQLite
between two looks at the clock, and the least bytes that a row takes in a file."""


def open_database(path: Path, layout: Tables = TABLES) -> Database:
    """Open a database for writing; create its folder, tables and new columns if they are missing.

    Raises TraceError if it cannot be used, or if it has tables but none of ``layout``.
    """
    from sqlite_utils import Database

    with _translate_errors(path, layout):
        path.parent.mkdir(parents=True, exist_ok=True)
        database = Database(path)
        if (tables := database.table_names()) and not layout.keys() & {*tables}:
            raise sqlite3.DatabaseError(f"it holds {', '.join(tables[:3])}")
        for name, (row, key, owner) in layout.items():
            # The types of each column: (str,), or (str, NoneType) if it may be null.
            types = {column: get_args(hint) or (hint,) for column, hint in get_type_hints(row).items()}
            table = database.table(name)
            table.create(
                {column: options[0] for column, options in types.items()},
                pk=key if len(key) > 1 else key[0],
                not_null={column for column, options in types.items() if type(None) not in options},
                foreign_keys=[(owner, f"{owner}s", "id")] if owner else [],
                if_not_exists=True,
            )
            for added in types.keys() - {column.name for column in table.columns}:  # an earlier version made the table
                table.add_column(added, types[added][0])
    return database


def write_run(
    database: Database,
    environment: Environment,
    run: StoredRun,
    steps: Sequence[StoredStep] = (),
    messages: Sequence[StoredMessages] = (),
) -> None:
    """Write a run and its measurements in one transaction; they replace those of an earlier run with the same id.

    Raises TraceError if another program is writing to the file, or the disk is full.
    """
    with writing(database):
        for name in ("measurements", "messages"):
            database.table(name).delete_where("run = ?", [run.id])
        upsert(database, TABLES, environments=[environment], runs=[run], measurements=steps, messages=messages)


def update_run(database: Database, run: StoredRun) -> None:
    """Replace the row of a run, but not its measurements; raises TraceError as :func:`write_run`."""
    with writing(database):
        upsert(database, TABLES, runs=[run])


@contextmanager
def writing(database: Database) -> Iterator[None]:
    """Make the block one transaction of the database; raise TraceError if SQLite fails in it."""
    files = {name: file for _, name, file in database.execute("pragma database_list").fetchall()}
    with _translate_errors(Path(files["main"])), database.atomic():
        yield


def load_results(path: Path) -> Results:
    """Read a results database without changing it; raise TraceError if it is missing or something else."""
    if path.is_dir():
        raise TraceError(path, "a folder", "name a database in it, such as results.db")
    if not path.is_file():
        raise TraceError(path, "no such file", "make it with scripts/run_comparison.sh")
    return Results(*load_tables(path, TABLES))


def load_tables(path: Path, layout: Tables) -> list[tuple[Any, ...]]:
    """Return all rows of each table of an existing file, in the order of ``layout``, as instances of their classes.

    Raises TraceError if the file is no database with these tables, or cannot be read in :data:`MOST_S` seconds.
    """
    # Without sqlite-utils: it would load pandas, which takes longer than the reading.
    address = f"{path.absolute().as_uri()}?mode=ro"
    with _translate_errors(path, layout), closing(sqlite3.connect(address, uri=True)) as connection:
        until = monotonic() + MOST_S
        connection.set_progress_handler(lambda: monotonic() > until, OPERATIONS_PER_CHECK)  # true ends the query
        connection.row_factory = sqlite3.Row
        log = path.with_name(path.name + "-wal")
        room = held_bytes(path) + (held_bytes(log) if is_file(log) else 0)
        return [_load(connection, name, row, room) for name, (row, *_) in layout.items()]


def upsert(database: Database, layout: Tables, /, **rows: Sequence[Any]) -> None:
    """Insert rows into tables, given by the tables' names; rows with the same primary key are replaced.

    ``upsert_all`` is not used because it hides an error on a full disk: SQLite would then undo the rest of the
    transaction silently.
    """
    for name, of_table in rows.items():
        row, key, _ = layout[name]
        columns = [column.name for column in fields(row)]
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in key)
        database.conn.executemany(
            f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(f':{column}' for column in columns)}) "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}",
            [asdict(each) for each in of_table],
        )


def _load(connection: sqlite3.Connection, name: str, row: type[Any], room: int) -> tuple[Any, ...]:
    """Return all rows of table ``name`` as instances of ``row``.

    Columns that a later version added are ignored, and missing columns get their default. Raises
    sqlite3.DatabaseError if there is no such table, a value is invalid, or the rows hold more bytes than the file
    (``room``): in a broken file pages may be shared, and a table may never end.
    """
    tables = "select 1 from sqlite_master where type = 'table' and rootpage > 0 and name = ?"
    if not connection.execute(tables, (name,)).fetchone():
        raise sqlite3.DatabaseError(f"no table {name}")
    rows, held = [], 0
    for values in connection.execute(f"select * from {name} order by rowid"):
        held += LEAST_BYTES_PER_ROW + sum(len(value) for value in values if isinstance(value, (str, bytes)))
        if held > room:
            raise sqlite3.DatabaseError(f"{name} holds more than it has room for")
        try:  # not strict: SQLite has no bool, and keeps values of any type in a column
            rows.append(convert(dict(values), row, strict=False))
        except ValidationError as error:
            raise sqlite3.DatabaseError(f"{name}: {error}") from error
    return tuple(rows)


@contextmanager
def _translate_errors(path: Path, layout: Tables = TABLES) -> Iterator[None]:
    """Raise TraceError, with what to do, for errors of SQLite or the system about the database in the block."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        hint = "see that no other program holds it, that it and its folder can be written, or name another file"
        if "full" in str(error):
            hint = "what was written before is kept: make room there, and run the same command again to continue"
        raise TraceError(path, f"cannot be used ({error})", hint) from error
    except sqlite3.IntegrityError:  # a row that we made wrong
        raise
    except sqlite3.DatabaseError as error:
        hint = "name another file, or move this one away"
        kind = "a results database" if layout is TABLES else f"a database of {next(iter(layout))}"
        raise TraceError(path, f"not {kind} ({error})", hint) from error
