"""A store with engines in it, and the command line in this process and as one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.commands import run
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineKey, EngineStore, Entry
from slipstream.tests.unit.cli.support import current_key


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def no_configured_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No store and no ComfyUI but those of the test."""
    for name in ("SLIPSTREAM_HOME", "COMFYUI_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "user"))


@pytest.fixture(autouse=True)
def of_commands(logging_as_before: None) -> None:
    """Every test here runs some."""


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "store")


@pytest.fixture
def put(store: EngineStore, tmp_path: Path) -> Callable[..., Entry]:
    """Store an engine of 1000 bytes, for this machine unless `environment` says otherwise."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "engine.bin").write_bytes(bytes(250) * 4)

    def put(
        height: int = 64,
        verifications: dict[str, Any] | None = None,
        key: EngineKey | None = None,
        **environment: Any,
    ) -> Entry:
        return store.put(
            key or current_key(height, **environment),
            Artifact(folder, ("engine.bin",), {"nodes": 7}),
            label="blocks SD15 ResBlock 64" if key else f"SD15 512×{8 * height} batch 2",
            build=BuildRecord(3.5, {"export": 0.5, "compile": 3.0}),
            verifications=verifications,
        )

    return put


@pytest.fixture
def cli(store: EngineStore, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command on the store, in this process."""

    def command(*words: object) -> Done:
        capsys.readouterr()
        status = run([str(word) for word in (*words, "--home", store.root)])
        return Done(status, *capsys.readouterr())

    return command


@pytest.fixture
def process(root: Path, tmp_path: Path) -> Callable[..., Done]:
    """Run `python <folder of the pack> …` in a process of its own."""

    def command(*words: object, pack: Path = root, **environment: str) -> Done:
        done = subprocess.run(
            [sys.executable, str(pack), *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return command
