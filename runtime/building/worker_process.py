"""The host's side of a build: starts the worker process, follows it, and can end it at any time."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from ...core.errors import BuildDied, BuildFailed, BuildOutOfMemory, StoreError, UnsupportedModel
from ...core.programs import Program, kill_group, signal_group
from ...core.progress import CancelToken, Progress, ProgressCallback
from ...core.protocols import Artifact, BuildJob
from .job_file import write_job
from .worker import LOG, OUT_OF_MEMORY, RESULT
from .worker_pool import Turn, WorkerPool
from .worker_start import INDUCTOR, environment_of_workers, start_worker

_POLL_SECONDS = 0.2
_USUAL_SECONDS = 60.0
_AWKWARD = re.compile(r"""[\s'"]""")


@dataclass(frozen=True)
class Built:
    """What a build made, and the seconds that each of its phases ran, pauses left out."""

    artifact: Artifact
    phases: Mapping[str, float]


def run_build(
    job: BuildJob,
    progress: ProgressCallback,
    cancel: CancelToken,
    *,
    timeout: float = 3600.0,
    expected: Callable[[int], float | None] = lambda operations: None,
    may_run: Callable[[], bool] = lambda: True,
    workers: WorkerPool | None = None,
) -> Built:
    """Build `job` in a process of its own.

    Args:
        workers: processes that take several jobs; None: one is started for this job alone.
        timeout: seconds of running time after which the build is given up.
        expected: seconds that it will take, by the operations of the graph (0 until they are counted), as far as is
            known; only moves the progress bar.
        may_run: asked again and again; while it says no the worker is paused (where the system can).

    Raises:
        BuildCancelled: `cancel` was set; the worker and all that it started are gone.
        UnsupportedModel: the model cannot be traced, or the worker does not have the code that the host runs.
        BuildFailed: the worker failed; BuildOutOfMemory: for want of memory; BuildDied: it was killed or ran out of
            time.
        StoreError: the job's folder cannot be written.
    """
    with ExitStack() as ending:
        temporary = _temporary_folder(job.directory, ending)
        process = _start(job, temporary, ending, workers)
        ending.callback(_end, process, workers)
        phases = _follow(process, progress, cancel, timeout, expected, may_run)
    return Built(_result(job, process.returncode), phases)


def _temporary_folder(directory: Path, ending: ExitStack) -> Path:
    """Where compilers work: in the job's folder, so that nothing outlives it; but compilers stumble over blanks."""
    if not _AWKWARD.search(str(directory)) or _AWKWARD.search(tempfile.gettempdir()):
        return directory
    return Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True)))


Process = Program | Turn


def _end(process: Process, workers: WorkerPool | None) -> None:
    if workers is None or not isinstance(process, Turn) or not workers.give_back(process):
        kill_group(process.process if isinstance(process, Turn) else process)


def _start(job: BuildJob, temporary: Path, ending: ExitStack, workers: WorkerPool | None) -> Process:
    try:
        write_job(job)
        log = ending.enter_context(open(job.directory / LOG, "wb"))
    except OSError as error:
        raise StoreError(f"The build's folder cannot be written: {error}; free some space, then queue again") from error
    environment = _environment(temporary)
    try:
        if workers is None:
            return start_worker(str(job.directory), job.directory, environment, errors=log)
        return workers.take(job.directory, {name: environment[name] for name in _OF_JOBS})
    except OSError as error:
        raise BuildDied(f"The build process could not be started ({sys.executable}): {error}. Queue again") from error


_TRITON = "TRITON_CACHE_DIR"
_TEMPORARY = "TMPDIR", "TEMP", "TMP"
_OF_JOBS = {INDUCTOR, _TRITON, *_TEMPORARY}
"""Variables that are another folder for each job."""


def _environment(temporary: Path) -> dict[str, str]:
    environment = environment_of_workers()
    # Compilers keep their intermediate files here, unless the user has a cache for them.
    environment.setdefault(INDUCTOR, str(temporary / "inductor"))
    environment.setdefault(_TRITON, str(temporary / "triton"))
    # A compiler that is killed leaves its temporary files behind; here they go with the job.
    return environment | dict.fromkeys(_TEMPORARY, str(temporary))


def _follow(
    process: Process,
    progress: ProgressCallback,
    cancel: CancelToken,
    timeout: float,
    expected: Callable[[int], float | None],
    may_run: Callable[[], bool],
) -> dict[str, float]:
    lines = _read_lines(process)
    clock, report = _Clock(), _Report()
    phases: dict[str, float] = {}
    done = 0.0
    while process.poll() is None:
        cancel.raise_if_cancelled("The build")
        before = clock.seconds
        report.read(lines)
        # Not before its first word: a worker paused earlier would not notice if this process died.
        clock.pause(process, report.has_spoken and not may_run())
        if clock.seconds > timeout:
            raise BuildDied(f"The build did not end within {timeout:.0f} s and was stopped; nothing of it was kept")
        done = max(done, _fraction(clock.seconds, expected(report.operations)))
        progress(Progress(report.phase, done, "paused while pictures are made" if clock.paused else report.message))
        cancel.wait(_POLL_SECONDS)
        phases[report.phase] = phases.get(report.phase, 0.0) + clock.seconds - before
    clock.pause(process, False)  # it may take another job
    return phases


@dataclass
class _Report:
    """What the worker said last."""

    phase: str = "start"
    message: str = "starting the build process"
    operations: int = 0
    has_spoken: bool = field(default=False, init=False)

    def read(self, lines: SimpleQueue[str]) -> None:
        """Take in what was said since; a library may have written to the worker's stdout before it was claimed."""
        while True:
            try:
                said = json.loads(lines.get_nowait())
                told = str(said["phase"]), str(said["message"]), int(said["operations"])
            except Empty:
                return
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            self.phase, self.message, self.operations = told
            self.has_spoken = True


class _Clock:
    """Running time of a worker, pauses left out."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._paused_at: float | None = None

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def seconds(self) -> float:
        return (self._paused_at or time.monotonic()) - self._start

    def pause(self, process: Process, pause: bool) -> None:
        if pause == self.paused or not signal_group(process.pid, "SIGSTOP" if pause else "SIGCONT"):
            return
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        else:
            self._start += time.monotonic() - self._paused_at
            self._paused_at = None


def _fraction(seconds: float, expected: float | None) -> float:
    """Approaches, but never reaches, 1: half of the bar at 70 % of the expected time."""
    return min(0.99, 1.0 - math.pow(2.0, -seconds / (0.7 * (expected or _USUAL_SECONDS))))


def _read_lines(process: Process) -> SimpleQueue[str]:
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as pipe:  # closed here: closing it elsewhere waits for a stray child that holds it open
            for line in pipe:
                lines.put(line.decode("utf-8", "replace"))

    threading.Thread(target=read, daemon=True, name="slipstream-build-output").start()
    return lines


def _result(job: BuildJob, code: int | None) -> Artifact:
    try:
        data = json.loads((job.directory / RESULT).read_text(encoding="utf-8"))
        if "error" not in data:
            return Artifact(job.directory, tuple(data["files"]), dict(data["details"]))
        kind, message = data["error"], data["message"]
        ran_out = data.get(OUT_OF_MEMORY) is True
    except (OSError, ValueError, TypeError, KeyError):
        raise _died(code, _last_words(job.directory)) from None
    if kind == UnsupportedModel.__name__:
        raise UnsupportedModel(message)
    if not ran_out:
        raise BuildFailed(f"The engine could not be built: {kind}: {message}")
    memory = "memory" if kind == MemoryError.__name__ else "GPU memory"
    raise BuildOutOfMemory(
        f"The build ran out of {memory}, and your model goes on without its engine. Unload other models and close "
        f"other programs, then build it again ({kind}: {message})"
    )


def _died(code: int | None, last_words: str) -> BuildFailed:
    killed = code in (-9, -15, 137, 143)
    what = f"The build process ended with code {code} before it was done" + (", killed from outside" if killed else "")
    message = f"{what}. Nothing was kept; free some memory if it ran out, and queue again. Last words: {last_words}"
    return BuildDied(message) if killed else BuildFailed(message)


def _last_words(directory: Path) -> str:
    try:
        lines = (directory / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    telling = [line for line in lines if "rror" in line] or lines[-3:]
    return " | ".join(line[:300] for line in telling[:3]) or "none"
