"""Records the captures of tests/analyze/doctor/captures with a real nsys: one small run for each fault of --inject.

    python scripts/dev/make_faults.py [FOLDER]

It keeps only the tables that are read, so a capture has about 45 kB.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from ddp_prof.run_config import FAULTS

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests" / "analyze" / "doctor" / "captures"
KEPT = {
    *("StringIds", "NVTX_EVENTS", "ThreadNames", "PROCESSES", "TARGET_INFO_SESSION_START_TIME"),
    *("META_DATA_EXPORT", "EXPORT_META_DATA"),
}


def record(fault: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["bash", str(ROOT / "scripts" / "profile_variant.sh"), "bucketed", "--bucket-size-mb", "2"]
        environment = {**os.environ, "TRACES_DIR": folder, "STEPS": "8"}
        subprocess.run([*command, "--", "--inject", fault], env=environment, check=True)
        (export,) = Path(folder).glob("*.sqlite")
        reduce_to_what_is_read(export)
        target.write_bytes(export.read_bytes())


def reduce_to_what_is_read(export: Path) -> None:
    """Drop the tables that are not read, and texts that nothing refers to."""
    with closing(sqlite3.connect(export)) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if table not in KEPT:
                database.execute(f'DROP TABLE "{table}"')
        used = "SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL UNION SELECT nameId FROM ThreadNames"
        database.execute(f"DELETE FROM StringIds WHERE id NOT IN ({used})")
        database.commit()
        database.execute("VACUUM")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else CAPTURES
    folder.mkdir(parents=True, exist_ok=True)
    for fault in FAULTS:
        record(fault, folder / f"{fault.replace('-', '_')}.sqlite")
