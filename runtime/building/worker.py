"""The build process: reads a job from a folder, makes the artifact there, reports on its standard output.

Protocol: one JSON object a line on stdout (`{"phase", "message", "operations"}`), then `result.json` in the job's
folder: either the artifact's files or the error. Standard input is held open by the host: its end means that the host
is gone, and the worker ends too, with everything that it started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from ...core.errors import UnsupportedModel
from ...core.progress import Progress

if TYPE_CHECKING:
    from ...core.protocols import Backend, BuildJob

RESULT = "result.json"
LOG = "worker.log"
SERVE = "serve"
"""The word by which a process takes its jobs from standard input."""
DONE = "done"
"""In a line of a process that serves: a job is done, with this code."""
OUT_OF_MEMORY = "out_of_memory"
"""In the result: whether the error comes of that."""

_TOLD_BY = {"OutOfMemoryError", "MemoryError"}
_TOLD_BY_CUDA = "CUDA error: out of memory"
_PR_SET_PDEATHSIG = 1


def main(directory: str) -> int:
    """Build the job in `directory`; 0 on success, 1 on failure. What came of it stands in its `result.json`."""
    faulthandler.enable()  # a compiler that crashes leaves the place in the log
    _end_with_host()
    be_nice()
    return _built(Path(directory), _claim_stdout())


def serve(is_nice: bool = False) -> int:
    """Build the jobs that standard input names one after another, see `worker_pool`; it never returns by itself.

    Args:
        is_nice: pictures go first already.
    """
    faulthandler.enable()
    jobs: SimpleQueue[bytes] = SimpleQueue()
    _end_with_host(jobs.put)
    if not is_nice:
        be_nice()
    report = _claim_stdout()
    while True:
        job = json.loads(jobs.get())
        folder = Path(job["folder"])
        os.environ.update(job["environment"])
        tempfile.tempdir = None  # by the environment as it is now
        os.chdir(folder)
        with open(folder / LOG, "ab") as log:
            os.dup2(log.fileno(), 2)
        code = _built(folder, report)
        _leave(folder)
        _give_memory_back()
        print(json.dumps({DONE: code}), file=report, flush=True)


def _leave(folder: Path) -> None:
    """The folder goes with its job: on Windows only where nobody is in it or holds a file of it open."""
    os.chdir(folder.anchor)
    with open(os.devnull, "ab") as nothing:
        os.dup2(nothing.fileno(), 2)


def _give_memory_back() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _built(folder: Path, report: IO[str]) -> int:
    try:
        result = _build(folder, report)
    except Exception as error:  # whatever a compiler raises becomes the build's result
        traceback.print_exc()
        result = {"error": type(error).__name__, "message": _summary(error), OUT_OF_MEMORY: ran_out(error)}
    _write_result(folder, result)
    return 0 if "files" in result else 1


def compile_capture_library(folder: str) -> int:
    """Compile the library behind CUDA graphs into `folder`; 0 on success, 1 with the reason on stderr."""
    be_nice()
    from ..capture.compiling import compile_library

    try:
        compile_library(Path(folder))
    except Exception as error:  # compilers, and torch's code around them, raise whatever they like
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _build(folder: Path, report: IO[str]) -> dict[str, Any]:
    def progress(update: Progress) -> None:
        line = {"phase": update.phase, "message": update.message, "operations": update.operations}
        print(json.dumps(line), file=report, flush=True)

    # The host may pause this process from now on: it would notice now if the host died meanwhile.
    progress(Progress("start", None, "starting the compiler"))
    from ..planning.backends import backend_named
    from .job_file import read_job

    job = read_job(folder)
    backend = backend_named(job.spec.backend.name)
    _take_environment(job, backend)
    _check_architecture(job)
    artifact = backend.build(job, progress)
    return {"files": list(artifact.files), "details": dict(artifact.details)}


def _take_environment(job: BuildJob, backend: Backend) -> None:
    """Another torch than the host's, say, would make an engine that is stored under the wrong name."""
    import torch

    if job.environment.threads:
        torch.set_num_threads(job.environment.threads)
    found = backend.environment(job.device)
    here, there = (replace(environment, driver=None) for environment in (found, job.environment))
    if here != there:
        names = [field.name for field in fields(here) if getattr(here, field.name) != getattr(there, field.name)]
        differences = ", ".join(f"{name} is {getattr(here, name)}, not {getattr(there, name)}" for name in names)
        raise UnsupportedModel(f"The build process finds another environment than the host's: {differences}")


def _check_architecture(job: BuildJob) -> None:
    """What the host computes with, and what this process has just imported."""
    wanted = job.spec.fingerprint
    if job.architecture.fingerprint.architecture != wanted.architecture:
        raise UnsupportedModel(
            f"The code of {wanted.architecture_name or 'the model'} on disk is not what is running: it was changed, "
            "or an extension changes it. Restart, without that extension, to use engines"
        )


def _write_result(folder: Path, result: dict[str, Any]) -> None:
    partial = folder / (RESULT + ".part")
    partial.write_text(json.dumps(result), encoding="utf-8")
    os.replace(partial, folder / RESULT)


def ran_out(error: BaseException | None) -> bool:
    """Whether an error is torch's, Python's or CUDA's of too little memory, or was raised because of one."""
    while error is not None:
        if type(error).__name__ in _TOLD_BY or (isinstance(error, RuntimeError) and _TOLD_BY_CUDA in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines[1:] if "error:" in line), None)  # a compiler's own words
    return " ".join(line[:500] for line in (*lines[:1], telling) if line) or type(error).__name__


def _claim_stdout() -> IO[str]:
    """Keep the real stdout for reports; what libraries print goes to stderr, which is the log."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return report


def be_nice() -> None:
    """Pictures that are being made meanwhile go first."""
    if hasattr(os, "nice"):
        os.nice(10)


def _end_with_host(hear: Callable[[bytes], None] = lambda line: None) -> None:
    """
    Args:
        hear: told each line of standard input.
    """
    if sys.platform == "linux":
        # A paused process notices nothing; this wakes it when its parent dies, so that the thread below can end it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_wait_for_host, args=(hear,), daemon=True).start()


def _wait_for_host(hear: Callable[[bytes], None]) -> None:
    text = b""
    while more := os.read(0, 4096):  # not by sys.stdin, whose lock would be found taken when this process ends
        *lines, text = (text + more).split(b"\n")
        for line in lines:
            hear(line)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # never the group of somebody else
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os._exit(1)
