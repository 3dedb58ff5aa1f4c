"""A build job on its way from the host to the worker process."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from ...core.protocols import BuildJob

JOB = "job.pickle"

_ROOT = str(Path(__file__).resolve().parents[2])
_PACKAGE = __name__.rpartition(".runtime.")[0]
"""The name of this package here: a host may have loaded the pack under the path of its folder."""


def write_job(job: BuildJob) -> None:
    """Write `job` into its folder."""
    with open(job.directory / JOB, "wb") as file:
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]  # as Python itself reads it
        pickle.dump({"package": _PACKAGE, "path": path}, file)
        pickle.dump(job, file)


def read_job(directory: Path) -> BuildJob:
    """The job of a folder, in a process that can import what its host can.

    Raises:
        Exception: whatever importing the host's modules raises.
    """
    with open(directory / JOB, "rb") as file:
        host = pickle.load(file)
        # Last, so that nothing of the host's passes for ours; without our root, whose `nodes` would pass for ComfyUI's.
        sys.path += [entry for entry in host["path"] if entry not in (*sys.path, _ROOT)]
        job = _Unpickler(file, host["package"]).load()
    assert isinstance(job, BuildJob)
    return job


class _Unpickler(pickle.Unpickler):
    """Finds the host's copy of this package in our own."""

    def __init__(self, file: Any, package: str) -> None:
        super().__init__(file)
        self._theirs = package

    def find_class(self, module: str, name: str) -> Any:
        if module == self._theirs or module.startswith(self._theirs + "."):
            module = _PACKAGE + module[len(self._theirs) :]
        return super().find_class(module, name)
