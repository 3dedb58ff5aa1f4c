"""The host's side of a build, with small programs in the place of the build process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import (
    BuildCancelled,
    BuildDied,
    BuildFailed,
    BuildOutOfMemory,
    StoreError,
    UnsupportedModel,
)
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.core.protocols import Artifact, BuildJob
from slipstream.runtime.building import worker_process
from slipstream.runtime.building.worker import ran_out
from slipstream.runtime.building.worker_pool import WorkerPool
from slipstream.runtime.building.worker_process import run_build
from slipstream.tests.fakes import make_plan, wait_until
from slipstream.tests.unit.runtime.processes import Process, in_session

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")

DONE = """
def done(**result):
    result = result or {"files": ["engine.bin"], "details": {"nodes": 3}}
    open(os.path.join(job, "result.json"), "w").write(json.dumps(result))
"""
CHILD = 'child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)'
FOREVER = "time.sleep(300)"
SPEAK = 'print(json.dumps({"phase": "compile", "message": "compiling 3 operations", "operations": 3}), flush=True)'

Program = Callable[..., BuildJob]


@pytest.fixture
def job(tmp_path: Path) -> BuildJob:
    folder = tmp_path / "job"
    folder.mkdir()
    plan = make_plan()
    return BuildJob(folder, plan.spec, plan.architecture, plan.device, plan.key.environment)


@pytest.fixture
def program(tmp_path: Path, job: BuildJob, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes the build process run these lines, with the job's folder as `job`."""

    python = sys.executable

    def make(*lines: str) -> BuildJob:
        path = tmp_path / "worker.py"
        head = "import json, os, signal, subprocess, sys, time\njob = sys.argv[3]\nopen(job + '/pid', 'w').write('x')\n"
        body = "\n".join(textwrap.dedent(line) for line in lines)
        path.write_text(f"#!{python} -IS\n{head}{DONE}{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return job

    return make


def run(job: BuildJob, **options: object) -> Artifact:
    return run_build(job, ignore_progress, CancelToken(), **options).artifact  # type: ignore[arg-type]


class Session:
    """The processes of one build, caught while it runs."""

    def __init__(self, job: BuildJob, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = job
        self.pid = 0
        start = worker_process._start

        def remember(*args: object) -> object:
            process = start(*args)  # type: ignore[arg-type]
            self.pid = process.pid
            return process

        monkeypatch.setattr(worker_process, "_start", remember)

    @property
    def processes(self) -> list[Process]:
        return in_session(self.pid) if self.pid else []

    def has_child(self) -> bool:
        return any("sleep" in process.command for process in self.processes)

    def states(self) -> set[str]:
        return {process.state for process in self.processes}


@pytest.fixture
def session(job: BuildJob, monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(job, monkeypatch)


# ---------------------------------------------------------------------------------------------- results


def test_the_result_is_what_the_worker_left(program: Program) -> None:
    job = program("done()")
    assert run(job) == Artifact(job.directory, ("engine.bin",), {"nodes": 3})


def test_the_job_is_all_that_the_worker_is_given(program: Program) -> None:
    artifact = run(program("done(files=sorted(os.listdir(job)), details={})"))
    assert set(artifact.files) == {"job.json", "pid", "worker.log"}


@pytest.mark.parametrize(
    ("error", "told"),
    [("OutOfMemoryError", "The build ran out of GPU memory"), ("MemoryError", "The build ran out of memory")],
)
def test_a_worker_that_ran_out_of_memory(program: Program, error: str, told: str) -> None:
    with pytest.raises(BuildOutOfMemory) as caught:
        run(program(f'done(error="{error}", message="20 GiB", out_of_memory=True)', "sys.exit(1)"))
    assert str(caught.value).startswith(told + ", and your model goes on without its engine. Unload other models")
    assert str(caught.value).endswith(f"({error}: 20 GiB)")


def test_the_workers_error_is_the_builds(program: Program) -> None:
    with pytest.raises(BuildFailed, match="could not be built: CompileError: no such op") as caught:
        run(program('done(error="CompileError", message="no such op")', "sys.exit(1)"))
    assert not isinstance(caught.value, BuildDied)


def test_a_model_that_cannot_be_traced_is_said_as_such(program: Program) -> None:
    with pytest.raises(UnsupportedModel, match="^it branches on its data$"):
        run(program('done(error="UnsupportedModel", message="it branches on its data")', "sys.exit(1)"))


def test_garbage_on_stdout_does_no_harm(program: Program) -> None:
    garbage = r"""
        out = sys.stdout.buffer
        for junk in (b"warning: old driver\n", b"\xff\xfe\x00\n", b"[1, 2]\n", b"null\n", b"\n", b'{"message": 3}\n',
                     b'{"fraction": "much"}\n', b"[" * 100000 + b"\n",
                     b'{"phase": "compile", "message": "no number", "operations": "many"}\n',
                     b'{"phase": "compile", "message": "fine", "operations": 3}\n'):
            out.write(junk)
        out.flush()
        time.sleep(1)
        done()
        out.write(b"no newline at the end")
    """
    shown: list[Progress] = []
    run_build(program(garbage), shown.append, CancelToken())
    assert {update.message for update in shown} <= {"starting the build process", "fine"}
    assert shown[-1] == Progress("compile", shown[-1].fraction, "fine")


def test_a_flood_on_stdout_does_not_block_the_worker(program: Program) -> None:
    run(program('print("x" * 100 + "\\n", end="") or [print("x" * 99) for _ in range(50000)]', "done()"), timeout=60)


MALFORMED = [
    "",
    "{",
    "null",
    "[]",
    "3",
    '"files"',
    "{}",
    '{"files": ["a"]}',
    '{"details": {}}',
    '{"files": 3, "details": {}}',
    '{"files": null, "details": {}}',
    '{"files": ["a"], "details": 3}',
    '{"files": ["a"], "details": [1]}',
    '{"error": "X"}',
    '{"files": ["\\ud800"], "details": {}',
    "\x00\xff",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_result_is_a_failed_build(program: Program, text: str) -> None:
    with pytest.raises(BuildFailed, match="before it was done"):
        run(program(f"open(job + '/result.json', 'w', encoding='latin1').write({text!r})"))


def test_a_worker_that_says_nothing(program: Program) -> None:
    with pytest.raises(BuildFailed, match=r"ended with code 3 before it was done.*the \wrror is here"):
        run(program("print('the error is here', file=sys.stderr)", "sys.exit(3)"))


def test_last_words_are_kept_short(program: Program) -> None:
    with pytest.raises(BuildFailed) as caught:
        run(program("print('Error ' + 'x' * 10**6, file=sys.stderr)", "sys.exit(3)"))
    assert len(str(caught.value)) < 2000


def test_a_worker_that_cannot_be_started(job: BuildJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BuildFailed, match="/nowhere/python"):
        run(job)


# ---------------------------------------------------------------------------------------------- progress


def test_progress_moves_and_never_arrives(program: Program) -> None:
    shown: list[Progress] = []
    job = program(SPEAK, "time.sleep(1.5)", "done()")
    run_build(job, shown.append, CancelToken(), expected=lambda operations: operations / 3)
    fractions = [update.fraction for update in shown if update.fraction is not None]
    assert fractions == sorted(fractions) and 0.5 < fractions[-1] < 1
    assert shown[-1].message == "compiling 3 operations" and shown[-1].phase == "compile"


def test_each_phase_is_timed(program: Program) -> None:
    job = program("time.sleep(0.5)", SPEAK, "time.sleep(1.5)", "done()")
    phases = run_build(job, ignore_progress, CancelToken()).phases
    assert list(phases) == ["start", "compile"]
    assert 0.2 < phases["start"] < phases["compile"] and 1.0 < phases["compile"] < 3.0


@pytest.mark.parametrize("years", [-20, 20])
def test_a_wall_clock_that_jumps_amid_a_build_changes_nothing(
    program: Program, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Neither its times nor its limit, nor how far it is said to be."""
    now, shown = time.time, list[Progress]()

    def progress(update: Progress) -> None:
        shown.append(update)
        if update.phase == "compile":
            monkeypatch.setattr(time, "time", lambda: now() + years * 365 * 24 * 3600.0)

    job = program(SPEAK, "time.sleep(1.5)", "done()")
    built = run_build(job, progress, CancelToken(), timeout=60.0, expected=lambda operations: operations / 3)
    assert abs(time.time() - now()) > 1e8, "it did not jump"
    assert 1.0 < built.phases["compile"] < 10.0
    assert all(0 <= update.fraction < 1 for update in shown if update.fraction is not None)


def test_progress_that_raises_ends_the_build(program: Program, session: Session) -> None:
    def fail(_: Progress) -> None:
        raise ConnectionError("the page was closed")

    with pytest.raises(ConnectionError):
        run_build(program(CHILD, FOREVER), fail, CancelToken())
    wait_until(lambda: session.processes == [], 2)


# --------------------------------------------------------------------------------------------- its end


def test_cancelling_ends_all_processes(program: Program, session: Session) -> None:
    cancel = CancelToken()
    cancelled: list[float] = []

    def watch() -> None:
        wait_until(session.has_child)
        cancelled.append(time.monotonic())
        cancel.cancel("the user pressed cancel")

    program(CHILD, FOREVER)
    threading.Thread(target=watch).start()
    with pytest.raises(BuildCancelled, match="the user pressed cancel"):
        run_build(session.job, ignore_progress, cancel)
    wait_until(lambda: session.processes == [], 2)
    assert time.monotonic() - cancelled[0] < 2


def test_time_is_limited(program: Program, session: Session) -> None:
    with pytest.raises(BuildDied, match="did not end within 1 s and was stopped"):
        run(program(CHILD, FOREVER), timeout=1.0)
    wait_until(lambda: session.processes == [], 2)


def test_a_killed_worker_takes_its_children_along(program: Program, session: Session) -> None:
    program(CHILD, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BuildDied, match="killed from outside.* queue again"):
        run(session.job)
    wait_until(lambda: session.processes == [], 2)


def test_a_finished_worker_leaves_no_children(program: Program, session: Session) -> None:
    program(CHILD, "done()")
    run(session.job)
    wait_until(lambda: session.processes == [], 2)


def test_a_child_that_holds_the_workers_stdout_holds_nobody_up(program: Program, session: Session) -> None:
    """One that left the session, too: it outlives the worker, but the host goes on."""
    stays = 'subprocess.Popen(["sleep", "5"], start_new_session=True)'
    program(stays, "done()")
    begun = time.monotonic()
    run(session.job)
    assert time.monotonic() - begun < 4


# ---------------------------------------------------------------------------------------------- pauses


def test_a_busy_host_pauses_the_worker_and_all_its_children(program: Program, session: Session) -> None:
    may_run = threading.Event()
    may_run.set()
    shown: list[Progress] = []
    program(SPEAK, CHILD, "while not os.path.exists(job + '/go'): time.sleep(0.05)", "child.kill()", "done()")
    worker = threading.Thread(
        target=run_build, args=(session.job, shown.append, CancelToken()), kwargs={"may_run": may_run.is_set}
    )
    worker.start()
    wait_until(session.has_child)
    may_run.clear()
    wait_until(lambda: session.states() == {"T"})
    (session.job.directory / "go").touch()
    wait_until(lambda: shown[-1].message == "paused while pictures are made")
    fraction = shown[-1].fraction
    time.sleep(0.5)
    assert session.states() == {"T"} and shown[-1].fraction == fraction
    may_run.set()
    worker.join(30)
    assert (session.job.directory / "result.json").exists()


def test_a_worker_is_not_paused_before_its_first_word(program: Program) -> None:
    """It could not yet notice the end of the host, and would stay stopped for ever."""
    run(program("time.sleep(1)", "done()"), may_run=lambda: False)


def test_pauses_do_not_count_as_running_time(program: Program) -> None:
    begun = time.monotonic()
    job = program(SPEAK, "time.sleep(0.5)", "done()")
    run(job, timeout=5.0, may_run=lambda: time.monotonic() - begun > 6)
    assert time.monotonic() - begun > 6


def test_a_paused_build_can_be_cancelled(program: Program, session: Session) -> None:
    cancel = CancelToken()

    def watch() -> None:
        wait_until(lambda: session.states() == {"T"})
        cancel.cancel()

    program(SPEAK, CHILD, FOREVER)
    threading.Thread(target=watch).start()
    with pytest.raises(BuildCancelled):
        run_build(session.job, ignore_progress, cancel, may_run=lambda: not session.has_child())
    wait_until(lambda: session.processes == [], 2)


def test_a_worker_killed_in_a_pause(program: Program, session: Session) -> None:
    def watch() -> None:
        wait_until(lambda: session.states() == {"T"})
        os.kill(session.pid, signal.SIGKILL)

    program(SPEAK, CHILD, FOREVER)
    threading.Thread(target=watch).start()
    with pytest.raises(BuildDied):
        run(session.job, may_run=lambda: not session.has_child())
    wait_until(lambda: session.processes == [], 2)


# ----------------------------------------------------------------------------------------- surroundings


def test_the_worker_sees_as_many_threads_as_the_host(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled CPU code is laid out for a number of threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    artifact = run(program('done(files=[], details={"threads": os.environ["OMP_NUM_THREADS"]})'))
    assert artifact.details == {"threads": "7"}


@pytest.mark.parametrize("flags", [["-s"], ["-E"], ["-I"], ["-B"]], ids=" ".join)
def test_the_worker_finds_the_packages_that_the_host_finds(root: Path, flags: list[str]) -> None:
    """Portable ComfyUIs start without the user's own packages, among which another torch may be."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])['register']();"
        "from slipstream.runtime.building.worker_start import _flags; print(*_flags())"
    )
    command = [sys.executable, *flags, "-c", code, str(root / "__main__.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONNOUSERSITE"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert set(flags) - {"-B"} <= set(found.stdout.split())
    assert flags != ["-B"] or not found.stdout.strip()


def test_compilers_leave_their_temporary_files_in_the_job(program: Program) -> None:
    names = ("TMPDIR", "TEMP", "TMP")
    artifact = run(program(f"done(files=[], details={{name: os.environ.get(name) for name in {names!r}}})"))
    job = Path(artifact.directory)
    assert artifact.details == dict.fromkeys(names, str(job))


def test_compilers_work_where_no_blank_is_in_the_path(program: Program, tmp_path: Path) -> None:
    """They stumble over one; ComfyUI's folder may have several."""
    job = program('done(files=[], details={"folder": os.environ["TMPDIR"]})')
    folder = tmp_path / "My ComfyUI"
    folder.mkdir()
    artifact = run(replace(job, directory=folder))
    assert " " not in artifact.details["folder"] and not os.path.exists(artifact.details["folder"])


def test_a_job_that_cannot_be_written(job: BuildJob) -> None:
    shutil.rmtree(job.directory)
    with pytest.raises(StoreError, match="folder cannot be written"):
        run(job)


def test_no_descriptor_is_left_open(program: Program) -> None:
    job, threads = program("done()"), threading.active_count()
    run(job)
    wait_until(lambda: threading.active_count() <= threads)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(job)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_no_thread_is_left_behind(program: Program) -> None:
    job = program("done()")
    for _ in range(3):
        run(job)
    wait_until(lambda: not any("build-output" in thread.name for thread in threading.enumerate()))


# ----------------------------------------------------------------------------------- what the worker calls it


class CompileError(Exception):
    pass


def _because(error: Exception, by: Exception, told: bool) -> Exception:
    try:
        try:
            raise by
        except Exception:
            if told:
                raise error from by
            raise error from None
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (_because(CompileError(), torch.OutOfMemoryError("no memory"), told=True), True),
        (_because(CompileError(), torch.OutOfMemoryError("no memory"), told=False), True),
        (_because(CompileError(), KeyError("x"), told=True), False),
        (RuntimeError("out of memory, it says"), False),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might ..."), True),
    ],
)
def test_an_error_that_comes_of_too_little_memory(error: Exception, wanted: bool) -> None:
    assert ran_out(error) is wanted


def test_a_process_that_was_paused_as_its_job_ended_goes_on(
    job: BuildJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next job that it is given would never begin."""
    path = tmp_path / "serve.py"
    path.write_text(
        "import json, os, sys, time\n"
        "job = json.loads(sys.stdin.readline())['folder']\n"
        f"{SPEAK}\n"
        "while not os.path.exists(job + '/asked'):\n"
        "    time.sleep(0.01)\n"
        f"{DONE}\n"
        "done()\n"
        "print(json.dumps({'done': 0}), flush=True)\n"
        "sys.stdin.read()\n"
    )

    def start() -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, str(path)], start_new_session=True, **pipes)

    def may_run() -> bool:
        (job.directory / "asked").touch()
        wait_until((job.directory / "result.json").exists)
        time.sleep(0.2)  # until its last word is read
        return False

    workers = WorkerPool(start)
    run(job, may_run=may_run, workers=workers)
    (process,) = workers._idle
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    workers.close()
    assert state in "RS" and process.returncode == 0
