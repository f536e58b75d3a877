"""``ddp-prof cache``."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from ddp_prof.cli.terminal import say_lines
from ddp_prof.errors import DdpProfError, printable


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
    It takes at most 5 GB, and at most a tenth of the free disk: what was not used for longest goes first. A trace that
    has changed is read again, and nothing is ever kept beside it.
    """
    from ddp_prof.ingest.cache_folder import CacheFolder, find_cache_folder

    folder = find_cache_folder()
    kept = CacheFolder(folder) if folder else None
    deleted = kept.files() if kept and clear else []
    if kept and clear and (left := kept.clear()):
        raise DdpProfError(f"{left[0].path}: cannot be deleted: close programs that use it, or delete it yourself")
    document = _describe(kept)
    if form == "json":
        say_lines(json.dumps(document))
        return
    if clear:
        say_lines(f"deleted: {_count(len(deleted))}, {sum(file.bytes for file in deleted) / 1e6:,.1f} MB")
        return
    if not kept:
        say_lines("the cache is switched off")
        return
    for file in document["files"]:
        options = "".join(f", --comm-pattern {pattern}" for pattern in file["comm_patterns"])
        say_lines(printable(f"{file['bytes'] / 1e6:10,.1f} MB  used {file['used']}  {file['trace']}{options}"))
    total, most = document["bytes"] / 1e6, document["most_bytes"] / 1e6
    say_lines(printable(f"{_count(len(document['files']))}, {total:,.1f} of at most {most:,.0f} MB, in {folder}"))


def _count(traces: int) -> str:
    return f"{traces} trace" if traces == 1 else f"{traces} traces"


def _describe(kept: Any) -> dict[str, Any]:
    """Return what is kept, what was used last first; files that are damaged have no name of a trace."""
    from ddp_prof.ingest.store import read_key

    files = []
    for file in reversed(kept.files() if kept else []):
        key = read_key(file.path)
        used = datetime.fromtimestamp(file.used_ns / 1e9).astimezone()
        files.append(
            {
                "trace": key["path"] if key else "(damaged)",
                "comm_patterns": key["options"]["comm_patterns"] if key else [],
                "bytes": file.bytes,
                "used": used.isoformat(sep=" ", timespec="seconds"),
            }
        )
    return {
        "folder": str(kept.folder) if kept else None,
        "most_bytes": kept.most_bytes() if kept else 0,
        "bytes": sum(file["bytes"] for file in files),
        "files": files,
    }
