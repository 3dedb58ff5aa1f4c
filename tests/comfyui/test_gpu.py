"""Engines on a CUDA GPU, at SD1.5's real size with random weights. Run with SLIPSTREAM_TEST_DEVICE=cuda."""

from __future__ import annotations

import time
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import pytest
import torch
from comfy.cli_args import args

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support import tiny
from slipstream.tests.comfyui.support.weights import randomise_unet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(args.cpu, reason="SLIPSTREAM_TEST_DEVICE is not cuda")]

SD15 = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 9 + [0] * 3, "context_dim": 768, "use_spatial_transformer": True,
    "use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False, "legacy": False,
    "use_checkpoint": False, "num_heads": 8, "num_head_channels": -1,
}  # fmt: skip


def sd15_at_real_size() -> Any:
    config = comfy.supported_models.SD15({**SD15, "dtype": torch.float16})
    config.unet_config.update(SD15)
    model = comfy.model_base.BaseModel(config, device=torch.device("cuda"))
    randomise_unet(model.diffusion_model.cpu(), seed=1)
    device = comfy.model_management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(model, device, comfy.model_management.unet_offload_device())


def prompt(seed: int) -> list[Any]:
    return [[torch.randn(1, 77, 768, generator=torch.Generator().manual_seed(seed)), {}]]


def picture(patcher: Any, steps: int = 8) -> tuple[torch.Tensor, float]:
    """The latent, and seconds for one step."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    latent = tiny.sample(patcher, steps=steps, size=512, positive=prompt(1), negative=prompt(2))
    torch.cuda.synchronize()
    return latent.float().cpu(), (time.perf_counter() - started) / steps


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def test_sd15_in_half_precision_through_the_sampler(tmp_path: Any, capsys: Any) -> None:
    model = sd15_at_real_size()
    wanted, _ = picture(model)
    _, plain_seconds = picture(model)
    store = EngineStore(tmp_path)
    module = AcceleratedModule(EngineProvider(store), Settings(policy=BuildPolicy.FIRST_USE))
    fast = accelerate_model(model, module)
    found, _ = picture(fast)
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    _, engine_seconds = picture(fast)
    (entry,) = store.list()
    (checked,) = entry.manifest.verifications.values()
    with capsys.disabled():
        print(f"\nplain {plain_seconds * 1e3:.1f} ms a step, engine {engine_seconds * 1e3:.1f} ms a step")
        print(f"built in {entry.manifest.build.seconds:.0f} s by {entry.manifest.backend}, error {checked}")
        print(f"difference of the latents {difference(found, wanted):.1e}")
    assert difference(found, wanted) < 2e-2
    started = time.perf_counter()
    warm = AcceleratedModule(EngineProvider(store), Settings(policy=BuildPolicy.FIRST_USE))
    again, _ = picture(accelerate_model(model, warm))
    with capsys.disabled():
        print(f"second provider, from disk: {time.perf_counter() - started:.2f} s for the whole picture")
    assert warm.status.engine_calls == 8 and difference(again, found) < 1e-3
