"""Models at real size with random weights, made by ComfyUI's own classes on the device that computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.dtypes import WHOLE_NUMBERS, dtype_of
from ..core.protocols import ModelSource, Tensors
from ..core.shapes import Shape
from ..core.spec import Precision
from ..hosts.architecture import cast_inputs
from ..runtime.measure import milliseconds
from ..runtime.plan import CallShape
from ..runtime.verify import LIMITS, relative_error
from .rows import Row
from .subject import Example, Judge
from .weights import randomise

SEED = 0


@dataclass(frozen=True)
class Model:
    """A model on its device, single calls of which are measured.

    Attributes:
        module: what torch.compile is given.
        call: `module`, or a compiled one in its place, on inputs by name.
        patcher: for ComfyUI's own nodes; None where they know no such model.
    """

    source: ModelSource
    module: torch.nn.Module
    call: Callable[[Any, Tensors], Tensors]
    shapes: Mapping[str, Shape]
    patcher: Any = None

    sets: ClassVar[int] = 3
    unseen: ClassVar[int] = 1
    engine_calls: ClassVar[int] = 1

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def precision(self) -> Precision:
        return self.source.precision

    @property
    def call_shape(self) -> CallShape:
        dtypes = self._dtypes()
        return CallShape(tuple((name, shape, dtypes[name]) for name, shape in self.shapes.items()))

    def inputs(self, seed: int) -> Tensors:
        """Random inputs on the device, as a sampler gives them."""
        made = self.source.architecture.random_inputs(self.shapes, self._dtypes(), self.source.device, seed)
        if "timesteps" in made:
            made["timesteps"].clamp_(min=1)  # a step without noise is none
        return made

    def references(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        return [self.source.reference(each) for each in inputs]

    def judge(self, examples: Sequence[Example]) -> Judge:
        return _Judge()

    def milliseconds(self, compute: Callable[[], object]) -> float:
        return milliseconds(compute, self.device)

    def _dtypes(self) -> dict[str, torch.dtype]:
        dtype = dtype_of(self.source.precision)
        return {name: torch.float32 if name in WHOLE_NUMBERS else dtype for name in self.shapes}


class _Judge:
    """Our engines are held to the limit that they serve under; what others compute is reported as it is."""

    def errors(self, given: Tensors, reference: Tensors) -> dict[str, float]:
        return {"out": relative_error(given, reference)}

    def limit(self, output: str, precision: Precision, is_ours: bool) -> float:
        return LIMITS[precision] if is_ours else sys.float_info.max

    def doubts(self, precision: Precision) -> str | None:
        return None

    def facts(self, errors: Mapping[str, float]) -> Row:
        return {}


_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "use_temporal_attention": False, "use_checkpoint": False,
}  # fmt: skip

SD15 = {
    **_UNET, "model_channels": 320, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 9 + [0] * 3, "context_dim": 768, "use_linear_in_transformer": False,
    "adm_in_channels": None,
}  # fmt: skip

TINY_SD15 = {
    **SD15, "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 0],
    "transformer_depth_middle": -1, "transformer_depth_output": [1, 0, 0, 0], "context_dim": 64,
}  # fmt: skip

SDXL = {
    **_UNET, "model_channels": 320, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "context_dim": 2048, "use_linear_in_transformer": True,
    "num_classes": "sequential", "adm_in_channels": 2816,
}  # fmt: skip

SD3_MEDIUM: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 24, "input_size": None, "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
    "num_patches": 192 * 192, "pos_embed_max_size": 192, "pos_embed_scaling_factor": None,
    "x_block_self_attn_layers": [],
}  # fmt: skip


VAE: dict[str, Any] = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip

TINY_VAE = {**VAE, "resolution": 64, "ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1}


def sd15(height: int, width: int, config: Mapping[str, Any] = SD15) -> Model:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 4, height // 8, width // 8), "timesteps": (2,), "context": (2, 77, config["context_dim"])}
    return diffusion_model(comfy.supported_models.SD15(dict(config)), comfy.model_base.BaseModel, shapes)


def sdxl() -> Model:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 4, 128, 128), "timesteps": (2,), "context": (2, 77, 2048), "y": (2, 2816)}
    return diffusion_model(comfy.supported_models.SDXL(SDXL), comfy.model_base.SDXL, shapes)


def sd3() -> Model:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 16, 128, 128), "timesteps": (2,), "context": (2, 154, 4096), "y": (2, 2048)}
    return diffusion_model(comfy.supported_models.SD3(SD3_MEDIUM), comfy.model_base.SD3, shapes)


def diffusion_model(config: Any, kind: Any, shapes: Mapping[str, Shape]) -> Model:
    import comfy.model_management as management

    from ..hosts.comfy.diffusion_model import split_inputs
    from ..hosts.comfy.source import ComfyUNetSource

    patcher = make_patcher(config, kind, half(management.get_torch_device()))
    randomise(patcher.model.diffusion_model, SEED)
    management.load_models_gpu([patcher])
    source = ComfyUNetSource(patcher)
    dtype = dtype_of(source.precision)

    def call(module: Any, inputs: Tensors) -> Tensors:
        args, kwargs = split_inputs(cast_inputs(inputs, dtype))
        return {"out": module(*args, **kwargs, transformer_options={})}

    return Model(source, source.unet, call, shapes, patcher)


def half(device: torch.device) -> torch.dtype:
    """What a diffusion model computes in; CPUs are slow in halves."""
    return torch.float32 if device.type == "cpu" else torch.float16


def make_patcher(config: Any, kind: Any, dtype: torch.dtype) -> Any:
    """A `ModelPatcher` over a model on the device that computes, without numbers yet."""
    import comfy.model_management as management
    import comfy.model_patcher

    device = management.get_torch_device()
    config.set_inference_dtype(dtype, None)
    return comfy.model_patcher.ModelPatcher(kind(config, device=device), device, management.unet_offload_device())


class _Decoder(torch.nn.Module):
    """An autoencoder whose call is its second half."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        picture: torch.Tensor = self.autoencoder.decode(z)
        return picture


def vae(size: int) -> Model:
    from ..hosts.comfy.vae import open_vae

    made = make_vae(VAE, torch.bfloat16)
    source = open_vae(made)

    def call(module: Any, inputs: Tensors) -> Tensors:
        return {"out": module(inputs["z"])}

    shapes = {"z": (1, 4, size // 8, size // 8)}
    return Model(source, _Decoder(made.first_stage_model), call, shapes)


def make_vae(layout: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A `comfy.sd.VAE` of random numbers, which are the same in each dtype but for rounding."""
    import comfy.model_management as management
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    with torch.device(management.get_torch_device()):
        example = AutoencoderKL(ddconfig=dict(layout), embed_dim=4)
    randomise(example, SEED)
    # The widths are not what ComfyUI guesses from the weights, where they are not SD's.
    config = None if layout == VAE else {"params": {"ddconfig": dict(layout), "embed_dim": 4}}
    return comfy.sd.VAE(sd=example.state_dict(), config=config, dtype=dtype)
