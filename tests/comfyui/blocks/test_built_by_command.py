"""Engines of blocks that the command line builds are those that samplers look for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import build
from slipstream.cli.commands import run
from slipstream.core.errors import BuildFailed
from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.models.demo_model import encode_demo_prompt, load_demo_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks import quick_blocks
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def command_provider(shared_provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> EngineProvider:
    """The one that the command takes, which compiles nothing."""
    monkeypatch.setattr(build, "open_provider", lambda *_: shared_provider)
    return shared_provider


def command(comfyui: Path, home: Path, *words: str) -> int:
    model = ("--model", "demo", "--resolution", "64x64", "--optimize", "blocks")
    return run(["build", *model, "--json", "--comfyui", str(comfyui), "--home", str(home), *words])


def test_they_serve_pictures_of_other_sizes(
    command_provider: EngineProvider, comfyui_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = command_provider.store.root
    for is_first in (True, False):
        assert command(comfyui_dir, home) == 0
        answer = json.loads(capsys.readouterr().out)
        assert {(row["role"], row["built"], row["state"]) for row in answer["engines"]} == {("block", is_first, "ok")}
        assert answer["host"].startswith("ComfyUI ")
    made = {row["digest"] for row in answer["engines"]}
    assert made == {entry.digest for entry in command_provider.store.list()} and len(made) > 4
    with quick_block_provider(EngineStore(home)) as another:
        module = AcceleratedModule(another, Settings(optimize=Optimize.BLOCKS, policy=BuildPolicy.MANUAL))
        model = load_demo_model()
        fast = accelerate_model(model, module)
        prompts = {name: encode_demo_prompt(text) for name, text in (("positive", "a red circle"), ("negative", ""))}
        for size in (64, 96):
            found = tiny.sample(fast, **prompts, size=size, steps=6)
            assert distance(found, tiny.sample(model, **prompts, size=size, steps=6)) < 1e-4
        assert module.status.block_calls, module.status.to_json()
        assert not another.missing()


def test_what_it_says_where_there_are_none(
    command_provider: EngineProvider, comfyui_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(comfyui_dir, command_provider.store.root, "--backend", "tensorrt") == 1
    assert "set backend and precision to auto" in json.loads(capsys.readouterr().out)["error"]


def test_builds_that_fail_are_told_and_the_others_kept(
    command_provider: EngineProvider,
    comfyui_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = quick_blocks.build_here

    def build_here(job: Any, *args: Any, **options: Any) -> Any:
        if "ResBlock" in job.architecture.fingerprint.architecture_name:
            raise BuildFailed("the compiler is not in the mood")
        return made(job, *args, **options)

    monkeypatch.setattr(quick_blocks, "build_here", build_here)
    store = command_provider.store
    for digest in store.digests():
        store.delete(digest, force=True)
    assert command(comfyui_dir, store.root) == 1
    answer = json.loads(capsys.readouterr().out)
    assert "builds failed" in answer["error"] and "not in the mood" in answer["error"]
    assert answer["engines"] and all(row["built"] for row in answer["engines"])
