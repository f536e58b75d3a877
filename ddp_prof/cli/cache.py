"""The command ``ddp-prof cache``, which shows and clears what is kept of large traces."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ddp_prof.cli.terminal import say_lines
from ddp_prof.errors import DdpProfError, printable

if TYPE_CHECKING:
    from ddp_prof.ingest.cache_folder import CacheFolder

DAMAGED = "(damaged)"
"""The name shown for the trace of a file that cannot be read."""


@click.command("cache", epilog="Example: ddp-prof cache --clear")
@click.option("--clear", is_flag=True, help="Delete what is kept.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Form of the output.",
)
def cache(clear: bool, form: str) -> None:
    """What is kept of large traces, so that the next command need not read them again.

    It lies in the user's cache folder, or in the folder that DDP_PROF_CACHE names; DDP_PROF_CACHE=off switches it off.
    It takes at most 5 GB, and at most a tenth of the free disk: the least recently used files go first. A trace that
    has changed is read again, and nothing is ever kept beside it.
    """
    from ddp_prof.ingest.cache_folder import CacheFolder, find_cache_folder

    folder = find_cache_folder()
    cache_folder = CacheFolder(folder) if folder else None
    document = _describe(cache_folder)
    if cache_folder and clear:
        if left := cache_folder.clear():
            raise DdpProfError(f"{left[0].path}: cannot be deleted: close programs that use it, or delete it yourself")
        say_lines(f"deleted: {_count(len(document['traces']))}, {document['bytes'] / 1e6:,.1f} MB")
    elif form == "json":
        say_lines(json.dumps(document))
    elif not cache_folder:
        say_lines("the cache is switched off")
    else:
        for one in document["traces"]:
            say_lines(printable(f"{one['bytes'] / 1e6:10,.1f} MB  used {one['used']}  {one['trace']}"))
        total, most = document["bytes"] / 1e6, document["most_bytes"] / 1e6
        say_lines(printable(f"{_count(len(document['traces']))}, {total:,.1f} of at most {most:,.0f} MB, in {folder}"))


def _count(traces: int) -> str:
    return f"{traces} trace" if traces == 1 else f"{traces} traces"


def _describe(cache_folder: CacheFolder | None) -> dict[str, Any]:
    """Return what the cache holds, for JSON: its traces, most recently used first, with bytes and time of last use.

    Files that cannot be read are listed together as ``DAMAGED``. Without a cache the list is empty.
    """
    from ddp_prof.ingest.cache_folder import COLUMNS
    from ddp_prof.ingest.store import read_key
    from ddp_prof.runs.kept import read_key_of_result

    traces: dict[str, tuple[int, int]] = {}
    for file in cache_folder.files() if cache_folder else []:  # what was used last comes last
        key = (read_key if file.path.suffix == COLUMNS else read_key_of_result)(file.path)
        trace = key["path"] if key else DAMAGED
        traces[trace] = (traces.pop(trace, (0, 0))[0] + file.bytes, file.used_ns)  # now at the end
    return {
        "folder": str(cache_folder.folder) if cache_folder else None,
        "most_bytes": cache_folder.most_bytes() if cache_folder else 0,
        "bytes": sum(size for size, _ in traces.values()),
        "traces": [
            {"trace": trace, "bytes": size, "used": _local_time(used_ns)}
            for trace, (size, used_ns) in reversed(traces.items())
        ],
    }


def _local_time(used_ns: int) -> str:
    """Return a time since 1970 as date and time of the local time zone."""
    return datetime.fromtimestamp(used_ns / 1e9).astimezone().isoformat(sep=" ", timespec="seconds")
