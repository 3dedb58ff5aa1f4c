"""Build processes that are made ready when a prompt is queued."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import folder_paths
import pytest

from slipstream.engine_cache import EngineStore, file_identity
from slipstream.hosts.comfy.process import early_workers, shared_provider
from slipstream.hosts.comfy.process.early_workers import prepare
from slipstream.runtime.blocks import block_engines
from slipstream.runtime.provider import EngineProvider


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", ([str(folder)], {".safetensors"}))
    monkeypatch.setattr(early_workers, "_met", set())
    made = folder / "some.safetensors"
    made.touch()
    return made


@pytest.fixture
def warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each time that processes were made ready."""
    provider = EngineProvider(EngineStore(tmp_path / "store"))
    calls: list[bool] = []
    monkeypatch.setattr(provider.blocks.workers, "warm", lambda: calls.append(True))
    monkeypatch.setattr(shared_provider, "provider", lambda: provider)
    monkeypatch.setattr(block_engines, "builds_at_once", lambda: 4)
    return calls


def prompt(build: str = "background", ours: str = "SlipstreamAccelerateModel") -> dict[str, Any]:
    return {
        "prompt": {
            "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "some.safetensors"}},
            "2": {"class_type": ours, "inputs": {"model": ["1", 0], "build": build}},
            "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a lighthouse"}},
        }
    }


def queue(json_data: dict[str, Any]) -> None:
    assert prepare(json_data) is json_data
    for thread in threading.enumerate():
        if thread.name == "slipstream-early":
            thread.join(20)


def test_a_file_that_was_not_met_makes_them_ready_once(checkpoint: Path, warmed: list[bool]) -> None:
    queue(prompt())
    assert warmed == [True]
    queue(prompt())
    assert warmed == [True]


def test_a_small_machine_does_not(checkpoint: Path, warmed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_engines, "builds_at_once", lambda: 1)
    queue(prompt())
    assert not warmed


def test_a_file_that_was_met_does_not(checkpoint: Path, warmed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine_cache.memos.SETTLED_SECONDS", -1.0)
    memo = shared_provider.provider().weights_memo
    assert memo.put(checkpoint, "digest", file_identity(checkpoint), "unet")
    queue(prompt())
    assert not warmed


@pytest.mark.parametrize(
    "json_data",
    [
        prompt(build="manual"),
        prompt(ours="SlipstreamStepSkip"),
        {"prompt": {"1": {"class_type": "SlipstreamAccelerateModel", "inputs": {"model": ["9", 0]}}}},
        {"prompt": {"1": {"class_type": "SlipstreamAccelerateModel", "inputs": "damaged"}}},
        {"prompt": ["damaged"]},
        {},
    ],
)
def test_a_prompt_that_builds_nothing_does_not(checkpoint: Path, warmed: list[bool], json_data: dict[str, Any]) -> None:
    queue(json_data)
    assert not warmed
