"""One run of the workload, in processes and a process group of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_prof.benchmark.grid import train_arguments
from ddp_prof.errors import WorkloadError
from ddp_prof.manifest import load_manifest
from ddp_prof.train.launch import launch

if TYPE_CHECKING:
    from ddp_prof.benchmark.grid import Conditions, Setting
    from ddp_prof.manifest import Manifest


def measure(setting: Setting, conditions: Conditions) -> Manifest | WorkloadError:
    """Run a setting; returns what it says of itself, or why it could not run.

    Raises:
        Stopped: A signal asked this process to end; the ranks are gone.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_prof.") as directory:
        run_json = Path(directory, "run.json")
        command = ["-m", "ddp_prof.train", *train_arguments(setting, conditions), "--run-json", str(run_json)]
        try:
            launch(setting.world_size, command, log=Path(directory, "log"))
        except WorkloadError as error:
            return error
        manifest = load_manifest(run_json)
    return manifest or WorkloadError("the ranks ended well, but left no run.json")
