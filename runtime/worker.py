"""The build process: reads a job from a folder, makes the artifact there, reports on its standard output.

Protocol: one JSON object a line on stdout (`{"phase", "fraction", "message"}`), then `result.json` in the job's
folder: either the artifact's files or the error. Standard input is held open by the host: its end means that the host
is gone, and the worker ends too, with everything that it started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from ..core.progress import Progress
from ..core.protocols import BuildJob

JOB = "job.json"
RESULT = "result.json"
_PR_SET_PDEATHSIG = 1


def write_job(job: BuildJob) -> None:
    data = {"backend": job.backend, "options": dict(job.options)}
    (job.directory / JOB).write_text(json.dumps(data), encoding="utf-8")


def main(directory: str) -> int:
    """Build the job in `directory`; 0 on success, 1 on failure."""
    faulthandler.enable()  # a compiler that crashes leaves the place in the log
    _end_with_host()
    _be_nice()
    report = _claim_stdout()
    folder = Path(directory)
    try:
        result = _build(folder, report)
    except Exception as error:  # whatever a compiler raises becomes the build's result
        traceback.print_exc()
        result = {"error": type(error).__name__, "message": _summary(error)}
    _write_result(folder, result)
    return 0 if "files" in result else 1


def _build(folder: Path, report: IO[str]) -> dict[str, Any]:
    # Compilers leave their intermediate files here, so that nothing outlives the job, unless the user keeps a cache.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    from .backends import backend_named

    def progress(update: Progress) -> None:
        line = {"phase": update.phase, "fraction": update.fraction, "message": update.message}
        print(json.dumps(line), file=report, flush=True)

    data = json.loads((folder / JOB).read_text(encoding="utf-8"))
    artifact = backend_named(data["backend"]).build(BuildJob(data["backend"], folder, data["options"]), progress)
    return {"files": list(artifact.files), "details": dict(artifact.details)}


def _write_result(folder: Path, result: dict[str, Any]) -> None:
    partial = folder / (RESULT + ".part")
    partial.write_text(json.dumps(result), encoding="utf-8")
    os.replace(partial, folder / RESULT)


def _summary(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


def _claim_stdout() -> IO[str]:
    """Keep the real stdout for reports; what libraries print goes to stderr, which is the log."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return report


def _be_nice() -> None:
    """Pictures that are being made meanwhile go first."""
    if hasattr(os, "nice"):
        os.nice(10)


def _end_with_host() -> None:
    if sys.platform == "linux":
        # A paused process notices nothing; this wakes it when its parent dies, so that the thread below can end it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_wait_for_host, daemon=True).start()


def _wait_for_host() -> None:
    sys.stdin.buffer.read()
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():  # never the group of somebody else
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os._exit(1)
