"""Small members of the model families: real where ComfyUI's detection looks, tiny elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMMON = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "use_checkpoint": False,
    "legacy": False,
}


@dataclass(frozen=True)
class Family:
    """A UNet of one model family."""

    name: str
    context_dim: int
    pooled: int  # size of the pooled prompt, 0 where the family has none
    unet: dict[str, Any]
    heads: dict[str, int] = field(default_factory=lambda: {"num_heads": 8, "num_head_channels": -1})

    def config(self) -> dict[str, Any]:
        """Return the arguments of ComfyUI's UNet, less those of the head count."""
        adm = {"num_classes": "sequential"} if self.unet.get("adm_in_channels") else {"adm_in_channels": None}
        return {**COMMON, "context_dim": self.context_dim, **adm, **self.unet}


HEADS_OF_64 = {"num_heads": -1, "num_head_channels": 64}
HEADS_OF_8 = {"num_heads": -1, "num_head_channels": 8}
TWO_LEVELS = {
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 1],
    "transformer_depth": [1, 0],
    "transformer_depth_output": [1, 1, 0, 0],
    "transformer_depth_middle": 1,
}

# Files: what the stock loaders must recognise is fixed (width, context, adm).
SD15 = Family("sd15", 768, 0, {"model_channels": 320, "use_linear_in_transformer": False, **TWO_LEVELS})
SD2 = Family("sd2", 1024, 0, {"model_channels": 320, "use_linear_in_transformer": True, **TWO_LEVELS}, HEADS_OF_64)
SDXL = Family(
    "sdxl",
    2048,
    1280,
    {
        "model_channels": 320,
        "use_linear_in_transformer": True,
        "adm_in_channels": 2816,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 1, 1],
        "transformer_depth": [0, 0, 1, 1, 2, 2],
        "transformer_depth_output": [0] * 9,
        "transformer_depth_middle": -1,
    },
    HEADS_OF_64,
)

# In process: nothing is detected, so the width shrinks as well.
TINY_LEVELS = {
    **TWO_LEVELS,
    "channel_mult": [1, 2],
    "transformer_depth_output": [1, 0, 0, 0],
    "transformer_depth_middle": 1,
}
TINY_SD15 = Family("sd15", 64, 0, {"model_channels": 32, "use_linear_in_transformer": False, **TINY_LEVELS})
TINY_SD2 = Family("sd2", 64, 0, {"model_channels": 32, "use_linear_in_transformer": True, **TINY_LEVELS}, HEADS_OF_8)
TINY_SDXL = Family(
    "sdxl",
    64,
    1280,
    {"model_channels": 32, "use_linear_in_transformer": True, "adm_in_channels": 2816, **TINY_LEVELS},
    HEADS_OF_8,
)


@dataclass(frozen=True)
class Transformer:
    """A diffusion transformer (DiT) of one model family, in process only.

    Attributes:
        supported, base: classes of `comfy.supported_models` and `comfy.model_base`.
        channels: of its latents.
        video: whether latents have frames.
        size: of the pictures that it is tried on, in pixels.
    """

    name: str
    supported: str
    base: str
    context_dim: int
    pooled: int
    channels: int
    video: bool
    config: dict[str, Any]
    size: int = 64


TINY_SD3 = Transformer(
    "sd3", "SD3", "SD3", 32, 24, 16, False,
    {
        "in_channels": 16,
        "pos_embed_scaling_factor": None,
        "patch_size": 2,
        "depth": 2,
        "input_size": None,
        "adm_in_channels": 24,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}},
        "pos_embed_max_size": 16,
        "num_patches": 256,
        "qk_norm": "rms",
        "x_block_self_attn_layers": [0],
    },
)  # fmt: skip
TINY_FLUX = Transformer(
    "flux", "Flux", "Flux", 32, 24, 16, False,
    {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 24,
        "context_in_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [8, 12, 12],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
    },
)  # fmt: skip
TINY_WAN = Transformer(
    "wan", "WAN21_T2V", "WAN21", 32, 0, 16, True,
    {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 48,
        "out_dim": 16,
        "num_heads": 2,
        "ffn_dim": 96,
        "num_layers": 1,
        "patch_size": (1, 2, 2),
        "freq_dim": 32,
        "text_dim": 32,
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "in_dim": 16,
    },
)  # fmt: skip
TINY_QWEN = Transformer(
    "qwen", "QwenImage", "QwenImage", 32, 0, 16, True,
    {
        "image_model": "qwen_image",
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (8, 12, 12),
    },
)  # fmt: skip
TINY_LUMINA = Transformer(
    "lumina", "Lumina2", "Lumina2", 32, 0, 16, False,
    {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 48,
        "cap_feat_dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "multiple_of": 16,
        "qk_norm": True,
        "axes_dims": [8, 8, 8],
        "axes_lens": [300, 512, 512],
        "ffn_dim_multiplier": 2.0,
        "norm_eps": 1e-5,
    },
)  # fmt: skip
TINY_PIXART = Transformer(
    "pixart", "PixArtAlpha", "PixArt", 32, 0, 4, False,
    {
        "image_model": "pixart_alpha",
        "num_heads": 2,
        "patch_size": 2,
        "hidden_size": 48,
        "in_channels": 4,
        "depth": 2,
        "caption_channels": 32,
        "model_max_length": 77,
        "input_size": 64,
        "pe_interpolation": 1,
        "micro_condition": True,
    },
    size=272,  # its positions are divided by 0 in pictures below 264
)  # fmt: skip
