"""Which files a sampled model is made of, by the prompt that is running."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.hosts.comfy.process.running_prompts import RunningPrompt
from slipstream.hosts.comfy.skip import model_files as found_by
from slipstream.hosts.comfy.skip.model_files import files_before, model_files

NODES: dict[str, Any] = {
    "1": {"inputs": {"ckpt_name": "base.safetensors"}},
    "2": {"inputs": {"model": ["1", 0], "clip": ["1", 1], "lora_name": "fast\\Lightning_8steps.SAFETENSORS"}},
    "3": {"inputs": {"model": ["2", 0], "preset": "balanced"}},
    "4": {"inputs": {"model": ["3", 0], "positive": ["5", 0], "latent_image": ["6", 0], "steps": 20}},
    "5": {"inputs": {"text": "a turbo engine", "clip": ["7", 0]}},
    "6": {"inputs": {"model": ["8", 0]}},
    "7": {"inputs": {"clip_name": "clip.safetensors"}},
    "8": {"inputs": {"unet_name": "another_turbo.safetensors", "model": ["8", 0]}},
    "9": {"inputs": {"guider": ["10", 0], "sampler": ["11", 0]}},
    "10": {"inputs": {"model": ["8", 0]}},
}


def test_files_on_the_way_to_a_sampler() -> None:
    assert sorted(files_before(NODES, "4")) == ["base.safetensors", "fast\\Lightning_8steps.SAFETENSORS"]
    assert list(files_before(NODES, "9")) == ["another_turbo.safetensors"], "by a guider; circles end"
    assert list(files_before(NODES, None)) == list(files_before(NODES, "of a subgraph:4")) == []


class Patcher:
    cached_patcher_init = (print, ("/models/sdxl_turbo.safetensors", True))


def test_the_checkpoint_and_what_the_running_prompt_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_by, "running_prompts", lambda: [RunningPrompt(NODES, {})])
    monkeypatch.setattr(found_by, "_sampling_node", lambda: "9")
    assert model_files(Patcher()) == ["/models/sdxl_turbo.safetensors", "another_turbo.safetensors"]
    assert model_files(object()) == ["another_turbo.safetensors"], "of a ComfyUI that does not say"
