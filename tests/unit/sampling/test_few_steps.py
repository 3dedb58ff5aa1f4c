"""Models for few steps are told by the names of their files."""

from __future__ import annotations

import pytest

from slipstream.sampling.few_steps import few_step_name

FEW = (
    "sd_xl_turbo_1.0_fp16.safetensors", "dreamshaperXL_turboDPMSDE.safetensors", "z_image_turbo_bf16.safetensors",
    "sdxl_lightning_4step_lora.safetensors", "Qwen-Image-Lightning-8steps-V1.0.safetensors",
    "Hyper-SDXL-8steps-lora.safetensors", "HyperSD15.safetensors", "flux1-schnell.safetensors", "dmd2_sdxl.safetensors",
    "lcm-lora-sdxl.safetensors", "pcm_sd15_smallcfg_2step.safetensors", "ltxv-13b-0.9.7-distilled.safetensors",
)  # fmt: skip
MANY = (
    "v1-5-pruned-emaonly.safetensors", "sd_xl_base_1.0.safetensors", "flux1-dev.safetensors",
    "hyperrealism_v2.safetensors",
    "hunyuan_video_cfg_distill.safetensors", "hunyuan_video_720_cfgdistill_bf16.safetensors", "12steps_training.pt",
    "wan2.1_t2v_14B.safetensors", "film_stripes.safetensors", "calcmap.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_models_for_few_steps(name: str) -> None:
    assert few_step_name(["base.safetensors", f"loras\\fast/{name}"]) == name


@pytest.mark.parametrize("name", MANY)
def test_other_models(name: str) -> None:
    assert few_step_name([name, f"turbo/{name}"]) == "", "folders tell nothing"
