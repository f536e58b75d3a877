"""``python -m tests.ingest`` prints what each hostile input gives: input, exit code and the line that is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.command_line import run
from tests.ingest import test_hostile, test_hostile_tables
from tests.ingest.test_nsys_export import known_truth
from tests.ingest.test_nsys_table_folder import write_tables
from tests.nsys_factory import write_capture


def inputs() -> Iterator[tuple[str, test_hostile.Make]]:
    for name, (make, _, _) in test_hostile.HOSTILE.items():
        yield name, make
    for name, (change, _, _) in test_hostile_tables.HOSTILE.items():
        for kind in ("parquet", "arrow"):

            def make(folder: Path, change: test_hostile_tables.Change = change, kind: str = kind) -> Path:
                export = write_capture(folder / "x.sqlite", known_truth(2))
                tables = write_tables(export, folder / "x_pqtdir", kind)
                change(tables)
                return tables

            yield f"tables as {kind}: {name}", make


def main() -> None:
    sys.stdout.write("| input | exit | what `ddp-prof overlap` says |\n| --- | --- | --- |\n")
    for name, make in inputs():
        with TemporaryDirectory() as folder:
            result = run("overlap", make(Path(folder)), "--format", "json")
            said = result.stderr.strip().replace(folder, "").replace("|", "\\|")
        row = f"| {name} | {result.exit_code} | {said or 'its figures'} |\n"
        sys.stdout.write(row.encode("ascii", "backslashreplace").decode())


if __name__ == "__main__":
    main()
