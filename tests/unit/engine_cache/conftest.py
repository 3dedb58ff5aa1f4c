"""Engines to store, and other processes to store them with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.core import errors
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry
from slipstream.tests.unit.engine_cache.support import make_key

_PRELUDE = """
import importlib.util, os, pathlib, signal, sys, time
root = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "slipstream", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
)
module = sys.modules["slipstream"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import *
from slipstream.tests.unit.engine_cache.support import *
"""


@pytest.fixture(autouse=True)
def warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "store")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """Two files of a build: 4000 bytes in all."""
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "model.pt2").write_bytes(bytes(range(250)) * 12)
    (folder / "constants.json").write_bytes(b"x" * 1000)
    return Artifact(folder, ("model.pt2", "constants.json"), {"nodes": 12})


@pytest.fixture
def put(store: EngineStore, artifact: Artifact) -> Callable[..., Entry]:
    """Stores the artifact under `make_key(height)`."""

    def run(height: int = 64, into: EngineStore | None = None) -> Entry:
        return (into or store).put(
            make_key(height), artifact, label=f"SD15 {height}", build=BuildRecord(3.5, {"compile": 3.0})
        )

    return run


@pytest.fixture
def python(root: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts another Python with `slipstream.engine_cache` imported; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + code, str(root), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def unprivileged(artifact: Artifact) -> Iterator[Artifact]:
    """A build in a folder of a user whom permissions bind: root passes them all by."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        with _as_nobody():
            (folder / "build").mkdir()
            for file in artifact.files:
                (folder / "build" / file).write_bytes(b"y" * 2000)
            yield Artifact(folder / "build", artifact.files)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    if os.name == "nt":
        pytest.skip("Windows has no permission bits")
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
