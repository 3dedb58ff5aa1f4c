"""Nothing that torch unpacked stays behind, however a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipstream.compile_backend.unpacked import PREFIX
from slipstream.tests.unit.compile_backend.support import Built

pytestmark = pytest.mark.skipif(os.name == "nt", reason="folders cannot be locked there")

_LOADS = """
import os, pathlib, runpy, sys
root, folder = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register"]()
from slipstream.tests.unit.compile_backend.support import *
from slipstream.compile_backend import AOTInductorBackend
folder = pathlib.Path(folder)
engines = [Built(AOTInductorBackend(), Artifact(folder, tuple(os.listdir(folder)))).load() for _ in range(2)]
engines.append(engines)  # a circle, so that nothing is closed when the process ends
for engine in engines[:2]:
    engine.update_weights(make_weights(2))
    engine(**make_inputs(2))
print("loaded", os.environ.get("TMPDIR"), flush=True)
sys.stdin.readline()
if os.fork() == 0:
    sys.exit()
os.wait()
assert engines[0](**make_inputs(2)) and os.listdir(os.environ["TMPDIR"])
"""


class Process:
    def __init__(self, root: Path, packaged: Built, temporary: Path, ending: ExitStack) -> None:
        command = [sys.executable, "-c", _LOADS, str(root), str(packaged.artifact.directory)]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        ending.callback(self._process.kill)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == f"loaded {temporary}\n", said + self._process.communicate()[1]

    def end(self) -> str:
        """As a host that is closed; what it complained of."""
        _, complaints = self._process.communicate("\n", timeout=120)
        assert self._process.returncode == 0, complaints
        return complaints

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def folders(temporary: Path) -> set[Path]:
    return set(temporary.glob(f"{PREFIX}*"))


def test_folders_of_dead_processes_alone_are_removed(
    root: Path, packaged: Built, tmp_path: Path, ending: ExitStack
) -> None:
    first = Process(root, packaged, tmp_path, ending)
    (folder,) = folders(tmp_path)
    assert set(tmp_path.iterdir()) == {folder} and len(list(folder.iterdir())) == 2, "one for each engine"
    second = Process(root, packaged, tmp_path, ending)
    others = folders(tmp_path)
    assert folder in others and len(others) == 2, "the first is still needed"
    first.kill()
    assert folders(tmp_path) == others
    third = Process(root, packaged, tmp_path, ending)
    assert folder not in folders(tmp_path) and len(folders(tmp_path)) == 2
    for process in (second, third):
        assert "rror" not in process.end()
    assert not list(tmp_path.iterdir())
