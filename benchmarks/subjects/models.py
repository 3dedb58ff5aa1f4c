"""Models at real size with random weights, made by ComfyUI's own classes on the device that computes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.dtypes import INTEGER_INPUTS, dtype_of
from ...core.errors import UnsupportedModel
from ...core.protocols import ModelSource, Tensors
from ...core.shapes import Shape
from ...core.spec import Precision, Quantised
from ...hosts.architecture import Draw, cast_inputs, whole_numbers_below
from ...runtime.checking.measure import milliseconds
from ...runtime.checking.verify import limit_of, relative_error
from ...runtime.planning.plan import CallShape
from .plain_source import PlainSource, called
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
        least_timestep: that a sampler gives it, about.
    """

    source: ModelSource | PlainSource
    module: torch.nn.Module
    call: Callable[[Any, Tensors], Tensors]
    shapes: Mapping[str, Shape]
    patcher: Any = None
    least_timestep: float = 1.0

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
    def is_unet(self) -> bool:
        """Whether it is a UNet, as SD1.x and SDXL are."""
        return type(self.module).__name__ == "UNetModel"

    @property
    def is_decoder(self) -> bool:
        """Whether it is a VAE's."""
        return isinstance(self.module, _Decoder)

    def half_as_wide_again(self) -> Model:
        """The same model, called for pictures of another size."""
        return self._called_at({name: (*shape[:-1], shape[-1] * 3 // 2) for name, shape in self._pictures().items()})

    def of_twice_the_batch(self) -> Model:
        """The same model, called for twice as many pictures."""
        return self._called_at({name: (2 * shape[0], *shape[1:]) for name, shape in self.shapes.items()})

    def _pictures(self) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shapes.items() if len(shape) == 4}

    def _called_at(self, shapes: Mapping[str, Shape]) -> Model:
        return dataclasses.replace(self, shapes={**self.shapes, **shapes})

    @property
    def call_shape(self) -> CallShape:
        dtypes = self._dtypes()
        return CallShape(tuple((name, shape, dtypes[name]) for name, shape in self.shapes.items()))

    def inputs(self, seed: int) -> Tensors:
        """Random inputs on the device, as a sampler gives them."""
        made = self.source.architecture.random_inputs(self.shapes, self._dtypes(), self.source.device, seed)
        if "timesteps" in made:
            made["timesteps"].clamp_(min=self.least_timestep)  # a step without noise is none
        return made

    def references(self, inputs: Sequence[Tensors]) -> list[Tensors]:
        return [self.source.reference(each) for each in inputs]

    def judge(self, examples: Sequence[Example]) -> Judge:
        return _Judge()

    def milliseconds(self, compute: Callable[[], object]) -> float:
        return milliseconds(compute, self.device)

    def _dtypes(self) -> dict[str, torch.dtype]:
        dtype = dtype_of(self.source.precision)
        return {name: torch.float32 if name in INTEGER_INPUTS else dtype for name in self.shapes}


class _Judge:
    """Our engines are held to the limit that they serve under; what others compute is reported as it is."""

    def errors(self, given: Tensors, reference: Tensors) -> dict[str, float]:
        return {"out": relative_error(given, reference)}

    def limit(
        self, output: str, precision: Precision, is_ours: bool, quantised: Quantised | None = None, skips: bool = False
    ) -> float:
        return limit_of(precision, quantised) if is_ours else sys.float_info.max

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

SSD1B = {
    **SDXL, "transformer_depth": [0, 0, 2, 2, 4, 4], "transformer_depth_middle": -1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 2, 10, 4, 4],
}  # fmt: skip

VEGA = {
    **SDXL, "transformer_depth": [0, 0, 1, 1, 2, 2], "transformer_depth_middle": -1,
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
}  # fmt: skip

PIXART_ALPHA: dict[str, Any] = {
    "image_model": "pixart_alpha", "num_heads": 16, "patch_size": 2, "hidden_size": 1152, "in_channels": 4,
    "depth": 28, "model_max_length": 120, "input_size": 128, "pe_interpolation": 2, "micro_condition": True,
}  # fmt: skip

FLUX_DEV: dict[str, Any] = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 768,
    "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
    "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [],
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


def sd15(height: int, width: int, config: Mapping[str, Any] = SD15, batch: int = 2) -> Model:
    import comfy.model_base
    import comfy.supported_models

    context = (batch, 77, config["context_dim"])
    shapes = {"x": (batch, 4, height // 8, width // 8), "timesteps": (batch,), "context": context}
    return diffusion_model(comfy.supported_models.SD15(dict(config)), comfy.model_base.BaseModel, shapes)


def sdxl(size: int = 1024, batch: int = 2, config: Mapping[str, Any] = SDXL, kind: str = "SDXL") -> Model:
    """
    Args:
        kind: ComfyUI's name of SDXL or of a smaller model made from it.
    """
    import comfy.model_base
    import comfy.supported_models

    shapes = {
        "x": (batch, 4, size // 8, size // 8),
        "timesteps": (batch,),
        "context": (batch, 77, 2048),
        "y": (batch, 2816),
    }
    return diffusion_model(getattr(comfy.supported_models, kind)(dict(config)), comfy.model_base.SDXL, shapes)


def ssd1b() -> Model:
    return sdxl(config=SSD1B, kind="SSD1B")


def vega() -> Model:
    return sdxl(config=VEGA, kind="Segmind_Vega")


def sd3() -> Model:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 16, 128, 128), "timesteps": (2,), "context": (2, 154, 4096), "y": (2, 2048)}
    return diffusion_model(comfy.supported_models.SD3(SD3_MEDIUM), comfy.model_base.SD3, shapes)


def pixart(size: int = 1024, batch: int = 2, config: Mapping[str, Any] = PIXART_ALPHA) -> Model:
    """PixArt-α, which is told the picture's size and shape."""
    import comfy.model_base
    import comfy.supported_models

    shapes = {
        "x": (batch, 4, size // 8, size // 8),
        "timesteps": (batch,),
        "context": (batch, config["model_max_length"], 4096),
        "c_size": (batch, 2),
        "c_ar": (batch, 1),
    }
    draws = {"timesteps": whole_numbers_below(1000), "c_size": _always(size), "c_ar": _always(1)}
    made = comfy.supported_models.PixArtAlpha(dict(config))
    return diffusion_model(made, comfy.model_base.PixArt, shapes, draws=draws)


def _always(number: float) -> Draw:
    def draw(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
        return torch.full(shape, float(number))

    return draw


def flux(size: int = 1024, batch: int = 1, config: Mapping[str, Any] = FLUX_DEV) -> Model:
    """With the text that ComfyUI pads every shorter one to."""
    import comfy.model_base
    import comfy.supported_models

    shapes = {
        "x": (batch, 16, size // 8, size // 8),
        "timesteps": (batch,),
        "context": (batch, 256, config["context_in_dim"]),
        "guidance": (batch,),
        "y": (batch, config["vec_in_dim"]),
    }
    made = comfy.supported_models.Flux(flux_config(config))
    return diffusion_model(made, comfy.model_base.Flux, shapes, torch.bfloat16, least_timestep=1e-3)


def flux_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """As far as this ComfyUI knows it: older ones have no `txt_ids_dims`."""
    from comfy.ldm.flux.model import FluxParams

    known = {"image_model", *(field.name for field in dataclasses.fields(FluxParams))}
    return {name: value for name, value in config.items() if name in known}


def diffusion_model(
    config: Any,
    kind: Any,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype = torch.float16,
    draws: Mapping[str, Draw] | None = None,
    least_timestep: float = 1.0,
) -> Model:
    """
    Args:
        dtype: on a GPU.
        draws: how inputs are made up where engines cannot stand for the model, and so do not know it either.
    """
    import comfy.model_management as management

    patcher = make_patcher(config, kind, half(management.get_torch_device(), dtype))
    network = patcher.model.diffusion_model.to(management.get_torch_device())  # some tables are made elsewhere
    randomise(network, SEED)
    management.load_models_gpu([patcher])
    source = _source_of(patcher, draws)
    dtype = dtype_of(source.precision)

    def call(module: Any, inputs: Tensors) -> Tensors:
        return called(module, cast_inputs(inputs, dtype))

    return Model(source, source.unet, call, shapes, patcher, least_timestep)


def _source_of(patcher: Any, draws: Mapping[str, Draw] | None) -> Any:
    from ...hosts.comfy.models.unet_source import ComfyUNetSource

    try:
        return ComfyUNetSource(patcher)
    except UnsupportedModel as error:
        if draws is None:
            raise
        return PlainSource(patcher, draws, str(error))


def half(device: torch.device, dtype: torch.dtype = torch.float16) -> torch.dtype:
    """What a diffusion model computes in; CPUs are slow in halves."""
    return torch.float32 if device.type == "cpu" else dtype


def make_patcher(config: Any, kind: Any, dtype: torch.dtype) -> Any:
    """A `ModelPatcher` over a model on the device that computes, without numbers yet."""
    import comfy.model_management as management
    import comfy.model_patcher

    device = management.get_torch_device()
    config.set_inference_dtype(dtype, None)
    model = kind(config, device=device).eval()
    return comfy.model_patcher.ModelPatcher(model, device, management.unet_offload_device())


class _Decoder(torch.nn.Module):
    """An autoencoder whose call is its second half."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        picture: torch.Tensor = self.autoencoder.decode(z)
        return picture


def vae(size: int) -> Model:
    from ...hosts.comfy.models.vae import open_vae

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
