"""The real build process: it can be stopped at any moment, and nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slipstream.compile_backend import AOTInductorBackend
from slipstream.core.errors import BuildCancelled, BuildDied, BuildFailed, UnsupportedModel
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.core.protocols import BuildJob
from slipstream.core.spec import BackendConfig, EngineSpec, Precision
from slipstream.engine_cache import EngineStore, Entry
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.building.job_file import read_job, write_job
from slipstream.runtime.building.worker_process import run_build
from slipstream.runtime.planning.plan import CallShape, Plan, plans
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.fakes import CPU, Broken, FakeArchitecture, Untraceable, make_inputs, wait_until
from slipstream.tests.unit.runtime.processes import Process, in_session, workers_in

pytestmark = [
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]

# Answers questions about itself, and takes for ever over everything else.
_SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version* | *-dump*) exec g++ "$@" ;; esac
sleep 300
"""

_HOST = """
import os, pathlib, runpy, sys
root, folder, pause = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.compile_backend import AOTInductorBackend
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.core.protocols import BuildJob
from slipstream.runtime.building.worker_process import run_build
from slipstream.tests.fakes import make_plan
plan = make_plan(8, AOTInductorBackend())
job = BuildJob(pathlib.Path(folder), plan.spec, plan.architecture, plan.device, plan.key.environment)
run_build(job, ignore_progress, CancelToken(), may_run=lambda: not os.path.exists(pause))
"""


def make_plan() -> Plan:
    call = CallShape.of(make_inputs())
    (plan,) = plans(FakeArchitecture(), call, Precision.FP32, CPU, Settings(), [AOTInductorBackend()])
    return plan


@pytest.fixture
def slow_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds stay in the compiler until they are ended."""
    use_slow_compiler(tmp_path, monkeypatch)


def use_slow_compiler(folder: Path, patch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config  # noqa: F401  it reads CXX once: not now, for the rest of this process

    path = folder / "slow-g++"
    path.write_text(_SLOW_COMPILER)
    path.chmod(0o755)
    patch.setenv("CXX", str(path))
    patch.delenv("TORCHINDUCTOR_CACHE_DIR")  # where answers may lie for which the compiler would be needed


@pytest.fixture
def job(tmp_path: Path) -> BuildJob:
    (tmp_path / "job").mkdir()
    plan = make_plan()
    return BuildJob(tmp_path / "job", plan.spec, plan.architecture, plan.device, plan.key.environment)


def compiling(folder: Path) -> list[Process]:
    """All processes of a build in `folder` that has reached the compiler; none before."""
    for worker in workers_in(folder):
        if any("sleep 300" in process.command for process in in_session(worker.pid)):
            return in_session(worker.pid)
    return []


def when(condition: Callable[[], object], act: Callable[[], object]) -> None:
    """Do something later, as soon as something is the case."""

    def watch() -> None:
        wait_until(condition, 60)
        act()

    threading.Thread(target=watch, daemon=True).start()


def left_over(store: EngineStore) -> list[Path]:
    return [path for folder in ("tmp", "in_use") for path in (store.root / folder).iterdir()]


def gone(session: int) -> Callable[[], bool]:
    return lambda: not in_session(session)


# ------------------------------------------------------------------------------------------------- cancel


def test_cancel_ends_compilers_and_all_within_two_seconds(store: EngineStore, slow_compiler: None) -> None:
    cancel, cancelled, sessions = CancelToken(), [], []

    def stop() -> None:
        sessions.append(compiling(store.root)[0].session)
        cancelled.append(time.monotonic())
        cancel.cancel("the user pressed cancel")

    when(lambda: compiling(store.root), stop)
    with pytest.raises(BuildCancelled, match="the user pressed cancel"):
        build_engine(make_plan(), store, ignore_progress, cancel)
    wait_until(gone(sessions[0]), 2)
    assert time.monotonic() - cancelled[0] < 2
    assert left_over(store) == [] and store.list() == []


# ---------------------------------------------------------------------------------- killed, then built


@dataclass
class History:
    """A build whose worker is killed, then one that is paused in the middle and finishes."""

    store: EngineStore
    error: BaseException | None = None
    left_over: list[Path] = field(default_factory=list)
    orphans: list[Process] = field(default_factory=list)
    entry: Entry | None = None
    paused: list[set[str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    # Compilers stumble over blanks in paths; ComfyUI's folder may have some.
    found = History(EngineStore(tmp_path_factory.mktemp("killed") / "My ComfyUI" / "engines"))
    with pytest.MonkeyPatch.context() as patch:
        use_slow_compiler(tmp_path_factory.mktemp("compiler"), patch)
        _kill_a_build(found)
    _pause_a_build(found)
    yield found


def _kill_a_build(found: History) -> None:
    sessions: list[int] = []

    def kill() -> None:
        (worker,) = workers_in(found.store.root)
        sessions.append(worker.session)
        os.kill(worker.pid, signal.SIGKILL)

    when(lambda: compiling(found.store.root), kill)
    try:
        build_engine(make_plan(), found.store, ignore_progress, CancelToken())
    except Exception as error:
        found.error = error
    found.left_over = left_over(found.store)
    time.sleep(0.5)
    found.orphans = in_session(sessions[0])


def _pause_a_build(found: History) -> None:
    may_run = threading.Event()
    may_run.set()

    def progress(update: Progress) -> None:
        found.messages.append(update.message)
        if update.message.startswith("compiling") and not found.paused:
            may_run.clear()
        if update.message.startswith("paused") and len(found.paused) < 4:
            (worker,) = workers_in(found.store.root)
            found.paused.append({process.state for process in in_session(worker.pid)})
        if len(found.paused) == 4:
            may_run.set()

    found.entry = build_engine(make_plan(), found.store, progress, CancelToken(), may_run.is_set)


def test_a_killed_worker_is_a_clear_error(history: History) -> None:
    assert isinstance(history.error, BuildDied)
    assert "killed from outside" in str(history.error) and "queue again" in str(history.error)


def test_a_killed_worker_leaves_nothing(history: History) -> None:
    assert history.left_over == [] and history.orphans == []


def test_the_build_after_a_killed_one_works(history: History) -> None:
    assert history.entry is not None and history.store.lookup(history.entry.digest) is not None
    assert left_over(history.store) == []


def test_a_busy_host_pauses_the_worker_in_the_middle(history: History) -> None:
    assert history.paused[1:] == [{"T"}] * 3  # the first look may come before the signal has arrived
    assert history.messages.index("paused while pictures are made") > 0


def test_progress_says_what_is_going_on(history: History) -> None:
    wanted = ["starting the build process", "starting the compiler", "tracing the model"]
    assert [message for message in dict.fromkeys(history.messages) if message in wanted] == wanted
    assert any(message.startswith("compiling ") and message.endswith("operations") for message in history.messages)
    assert history.messages[-1] == "storing the engine"


# -------------------------------------------------------------------------------------------- host dies


@pytest.mark.parametrize(
    "paused", [pytest.param(False, id="running", marks=pytest.mark.slow), pytest.param(True, id="paused")]
)
def test_a_worker_whose_host_died_ends_with_all_it_started(
    root: Path, job: BuildJob, slow_compiler: None, tmp_path: Path, paused: bool
) -> None:
    pause = tmp_path / "pause"
    host = subprocess.Popen([sys.executable, "-c", _HOST, str(root), str(job.directory), str(pause)])
    try:
        wait_until(lambda: compiling(job.directory), 90)
        session = compiling(job.directory)[0].session
        if paused:
            pause.touch()
            wait_until(lambda: {process.state for process in in_session(session)} == {"T"})
    finally:
        host.kill()
        host.wait()
    wait_until(gone(session), 5)


# ---------------------------------------------------------------------------------------------- its errors


def test_what_breaks_in_the_worker_is_said_in_one_line(job: BuildJob) -> None:
    with pytest.raises(BuildFailed, match="The engine could not be built: .*no such layer") as caught:
        run_build(replace(job, architecture=Broken()), ignore_progress, CancelToken())
    assert not isinstance(caught.value, BuildDied) and "\n" not in str(caught.value)
    assert "Traceback" in (job.directory / "worker.log").read_text()


def test_a_model_that_cannot_be_traced(job: BuildJob) -> None:
    with pytest.raises(UnsupportedModel, match="^it branches on its data$"):
        run_build(replace(job, architecture=Untraceable()), ignore_progress, CancelToken())


def test_code_that_was_updated_under_a_running_host_is_not_compiled(job: BuildJob) -> None:
    """The host would go on computing with the old."""
    with pytest.raises(UnsupportedModel, match="code of Tiny on disk is not what is running.* Restart"):
        run_build(replace(job, architecture=FakeArchitecture("b" * 64)), ignore_progress, CancelToken())


def test_another_environment_than_the_hosts_builds_nothing(job: BuildJob) -> None:
    other = replace(job.environment, torch="1.0", driver="1")
    with pytest.raises(UnsupportedModel, match="another environment than the host's: torch is 2.*, not 1.0$"):
        run_build(replace(job, environment=other), ignore_progress, CancelToken())


def test_a_worker_says_by_its_status_how_it_ended(job: BuildJob, root: Path) -> None:
    """While its host still holds its standard input open."""
    write_job(replace(job, architecture=Untraceable()))
    command = [sys.executable, str(root), "worker", str(job.directory)]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert worker.stderr is not None
    with worker.stderr as log:
        assert b"Fatal" not in log.read()
    assert worker.wait(30) == 1
    assert worker.stdin is not None
    worker.stdin.close()


_FOREIGN = """
import importlib.util, pathlib, sys
root, folder = sys.argv[1:]
name = "/anywhere/custom_nodes/a_x_pack"  # as ComfyUI names it
spec = importlib.util.spec_from_file_location(name, root + "/__init__.py", submodule_search_locations=[root])
sys.modules[name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
part = lambda path: importlib.import_module(f"{name}.{path}")
specs, shapes, device = part("core.spec"), part("core.shapes"), part("core.protocols").torch.device("cpu")
spec = specs.EngineSpec(
    specs.Role.UNET, specs.ModelFingerprint("a" * 64), shapes.ShapeProfile.static({"x": (1, 2)}), {"x": "float32"},
    "float32", specs.Precision.FP32, specs.Optimize.BALANCED, specs.BackendConfig("null", {"a": 1}),
)
sys.path += [None, b"/bytes", pathlib.Path("/a/path"), "/somewhere/else"]  # Python itself reads strings alone
job = part("core.protocols").BuildJob(pathlib.Path(folder), spec, None, device, None)
part("runtime.building.job_file").write_job(job)
"""


def test_a_job_from_a_host_that_knows_the_pack_by_another_name(root: Path, tmp_path: Path) -> None:
    code = "import importlib\n" + _FOREIGN
    subprocess.run([sys.executable, "-c", code, str(root), str(tmp_path)], check=True)
    before = list(sys.path)
    try:
        job = read_job(tmp_path)
        assert sys.path[: len(before)] == before and sys.path[-1] == "/somewhere/else"
        assert str(root) not in sys.path and "" not in sys.path[len(before) :]
    finally:
        sys.path[:] = before
    assert type(job.spec) is EngineSpec and job.directory == tmp_path and job.device == CPU
    assert job.spec.backend == BackendConfig("null", {"a": 1}) and job.spec.dtypes == {"x": "float32"}
