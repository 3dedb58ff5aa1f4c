"""Nothing that torch unpacked stays behind, however a process ends."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipstream.compile_backend.unpacked import MARK, _marks, marked
from slipstream.tests.unit.compile_backend.support import Built

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no system to tell what is unpacked")

_LOADS = """
import ctypes, os, pathlib, runpy, shutil, sys
root, folder = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.tests.unit.compile_backend.support import *
from slipstream.compile_backend import AOTInductorBackend, aot_inductor, packages

def load():
    engine = Built(AOTInductorBackend(), Artifact(pathlib.Path(folder), tuple(os.listdir(folder)))).load()
    engine.update_weights(make_weights(2))
    engine(**make_inputs(2))
    return engine

temporary = pathlib.Path(os.environ["TMPDIR"])
first = load()
before = set(temporary.iterdir())
second = aot_inductor.load_package(pathlib.Path(folder) / aot_inductor.PACKAGE, CPU)
(unpacked,) = set(temporary.iterdir()) - before
del second
packages._waiting._let_go.get()
assert not unpacked.exists(), "a mark keeps torch from removing it"
kept = [load(), first]
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # so that nothing is closed when the process ends
print("loaded", flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        sys.exit()
    os.wait()
    assert any(temporary.glob("*/" + MARK)), "the end of a process that was forked off removes nothing"
    if line == "clean\\n":
        for each in temporary.iterdir():
            shutil.rmtree(each)
        kept.append(load())
"""


class Process:
    """One that has loaded two packages and does not close them."""

    def __init__(self, root: Path, packaged: Built, temporary: Path, ending: ExitStack) -> None:
        program = f"MARK = {MARK!r}\n{_LOADS}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(root), str(packaged.artifact.directory)],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ending.callback(self._process.kill)
        before = unpacked(temporary)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "loaded\n", said + self._process.communicate()[1]
        self.folders = unpacked(temporary) - before

    def end(self, order: str = "fork") -> None:
        """As a host that is closed."""
        _, complaints = self._process.communicate(f"{order}\n", timeout=120)
        assert self._process.returncode == 0 and "Error" not in complaints, complaints

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def unpacked(temporary: Path) -> set[Path]:
    return {path for path in temporary.iterdir() if (path / MARK).exists()}


def test_what_dead_processes_left_is_removed(root: Path, packaged: Built, tmp_path: Path, ending: ExitStack) -> None:
    first, second = (Process(root, packaged, tmp_path, ending) for _ in range(2))
    assert unpacked(tmp_path) == first.folders | second.folders, "those of a living process stay"
    assert len(first.folders) == len(second.folders) == 2
    first.kill()
    assert unpacked(tmp_path) == first.folders | second.folders
    third = Process(root, packaged, tmp_path, ending)
    assert unpacked(tmp_path) == second.folders | third.folders
    second.end()
    third.end()
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_stays(root: Path, packaged: Built, tmp_path: Path, ending: ExitStack) -> None:
    others = tmp_path / "aotinductor_others" / "package" / "data" / "aotinductor" / "model"
    others.mkdir(parents=True)
    (tmp_path / "no_package").mkdir()
    (tmp_path / "no_package" / MARK).touch()
    Process(root, packaged, tmp_path, ending).end()
    assert {path.name for path in tmp_path.iterdir()} == {"aotinductor_others", "no_package"} and others.is_dir()


def test_a_folder_that_was_cleaned_meanwhile(root: Path, packaged: Built, tmp_path: Path, ending: ExitStack) -> None:
    Process(root, packaged, tmp_path, ending).end("clean")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["kept/theirs/model", "temporary/theirs/model", "temporary"])
def test_packages_of_others_that_are_loaded_meanwhile_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    code = tmp_path / place / "data" / "aotinductor" / "model" / "code.so"
    code.parent.mkdir(parents=True)
    shutil.copy(_ctypes.__file__, code)
    for folder in code.parents:
        if folder.is_relative_to(tmp_path):
            os.utime(folder, (0, 0))
    with marked():
        ctypes.CDLL(str(code))
    assert not list(tmp_path.rglob(f"{MARK}*")) and str(tmp_path) not in str(_marks)


def test_threads_that_load_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each marks what is its own, and nobody fails while others' are gone already."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def load(number: int) -> bool:
        folder = tmp_path / str(number)
        code = folder / "package" / "data" / "aotinductor" / "model" / "code.so"
        with marked():
            code.parent.mkdir(parents=True)
            shutil.copy(_ctypes.__file__, code)
            ctypes.CDLL(str(code))
        was_marked = (folder / MARK).is_file()
        shutil.rmtree(folder)
        return was_marked

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(40)))
