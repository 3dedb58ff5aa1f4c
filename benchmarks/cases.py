"""Models at real size with random weights, made by ComfyUI's own classes on the device that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import WHOLE_NUMBERS, dtype_of
from ..core.protocols import ModelSource, Tensors
from ..core.shapes import Shape
from ..hosts.architecture import cast_inputs
from ..hosts.comfy import standalone
from ..hosts.comfy.checkout import use_checkout
from ..runtime.plan import CallShape

SEED = 0


@dataclass(frozen=True)
class Subject:
    """A model on its device.

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

    def _dtypes(self) -> dict[str, torch.dtype]:
        dtype = dtype_of(self.source.precision)
        return {name: torch.float32 if name in WHOLE_NUMBERS else dtype for name in self.shapes}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        title: in plain words.
        build: makes the model; ComfyUI has been entered by then.
        needs_gpu: a call would take minutes on a CPU.
        convolutional: whether the memory format of pictures matters to it.
        usual: measured where no case is named.
    """

    name: str
    title: str
    build: Callable[[], Subject]
    needs_gpu: bool = True
    convolutional: bool = True
    usual: bool = True


def enter(checkout: Path) -> None:
    """Make ComfyUI's modules importable, with torch's attention: what it chooses by itself on NVIDIA's GPUs.

    Its attention for CPUs looks at the free memory in every call, which no compiler can look into.

    Raises:
        BackendUnavailable: this Python cannot load them.
    """
    use_checkout(str(checkout))
    from comfy.cli_args import args

    args.use_pytorch_cross_attention = True
    standalone.enter(checkout)


# Models


_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "use_temporal_attention": False, "use_checkpoint": False,
}  # fmt: skip

_SD15 = {
    **_UNET, "model_channels": 320, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 9 + [0] * 3, "context_dim": 768, "use_linear_in_transformer": False,
    "adm_in_channels": None,
}  # fmt: skip

_TINY_SD15 = {
    **_SD15, "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 0],
    "transformer_depth_middle": -1, "transformer_depth_output": [1, 0, 0, 0], "context_dim": 64,
}  # fmt: skip

_SDXL = {
    **_UNET, "model_channels": 320, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "context_dim": 2048, "use_linear_in_transformer": True,
    "num_classes": "sequential", "adm_in_channels": 2816,
}  # fmt: skip

_SD3_MEDIUM: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "patch_size": 2, "depth": 24, "input_size": None, "adm_in_channels": 2048,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536}},
    "num_patches": 192 * 192, "pos_embed_max_size": 192, "pos_embed_scaling_factor": None,
    "x_block_self_attn_layers": [],
}  # fmt: skip


def _sd15(height: int, width: int, config: Mapping[str, Any] = _SD15) -> Subject:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 4, height // 8, width // 8), "timesteps": (2,), "context": (2, 77, config["context_dim"])}
    return _diffusion_model(comfy.supported_models.SD15(dict(config)), comfy.model_base.BaseModel, shapes)


def _sdxl() -> Subject:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 4, 128, 128), "timesteps": (2,), "context": (2, 77, 2048), "y": (2, 2816)}
    return _diffusion_model(comfy.supported_models.SDXL(_SDXL), comfy.model_base.SDXL, shapes)


def _sd3() -> Subject:
    import comfy.model_base
    import comfy.supported_models

    shapes = {"x": (2, 16, 128, 128), "timesteps": (2,), "context": (2, 154, 4096), "y": (2, 2048)}
    return _diffusion_model(comfy.supported_models.SD3(_SD3_MEDIUM), comfy.model_base.SD3, shapes)


def _diffusion_model(config: Any, kind: Any, shapes: Mapping[str, Shape]) -> Subject:
    import comfy.model_management as management
    import comfy.model_patcher

    from ..hosts.comfy.diffusion_model import split_inputs
    from ..hosts.comfy.source import ComfyUNetSource

    device = management.get_torch_device()
    config.set_inference_dtype(torch.float32 if device.type == "cpu" else torch.float16, None)
    model = kind(config, device=device)
    randomise(model.diffusion_model, SEED)
    patcher = comfy.model_patcher.ModelPatcher(model, device, management.unet_offload_device())
    management.load_models_gpu([patcher])
    source = ComfyUNetSource(patcher)
    dtype = dtype_of(source.precision)

    def call(module: Any, inputs: Tensors) -> Tensors:
        args, kwargs = split_inputs(cast_inputs(inputs, dtype))
        return {"out": module(*args, **kwargs, transformer_options={})}

    return Subject(source, source.unet, call, shapes, patcher)


class _Decoder(torch.nn.Module):
    """An autoencoder whose call is its second half."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        picture: torch.Tensor = self.autoencoder.decode(z)
        return picture


def _vae(size: int) -> Subject:
    import comfy.model_management as management
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    from ..hosts.comfy.vae import open_vae

    layout = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    device = management.get_torch_device()
    with torch.device(device):
        example = AutoencoderKL(ddconfig=layout, embed_dim=4)
    randomise(example, SEED)
    vae = comfy.sd.VAE(sd=example.state_dict(), dtype=torch.bfloat16)
    source = open_vae(vae)

    def call(module: Any, inputs: Tensors) -> Tensors:
        return {"out": module(inputs["z"])}

    shapes = {"z": (1, 4, size // 8, size // 8)}
    return Subject(source, _Decoder(vae.first_stage_model), call, shapes)


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int) -> None:
    """Set every number, so that what comes out is of order 1: ComfyUI's layers leave their memory as it was."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        if not name.endswith("weight"):
            tensor.normal_(0, 0.02 if tensor.ndim == 1 else 0.5, generator=generator)  # biases; tables of positions
        elif tensor.ndim == 1:
            tensor.normal_(1, 0.1, generator=generator)  # of a norm
        else:
            tensor.normal_(0, 0.8 / tensor[0].numel() ** 0.5, generator=generator)


CASES = {
    case.name: case
    for case in (
        Case("sd15-512-b2", "SD1.5's UNet, 512×512, batch 2, fp16", lambda: _sd15(512, 512)),
        Case("sd15-768x512-b2", "SD1.5's UNet, 768×512, batch 2, fp16", lambda: _sd15(512, 768), usual=False),
        Case("sdxl-1024-b2", "SDXL's UNet, 1024×1024, batch 2, fp16", _sdxl),
        Case("vae-decode-1024", "SD's VAE decoder, 1024×1024, batch 1, bf16", lambda: _vae(1024)),
        Case("sd3-1024-b2", "SD3 medium, 1024×1024, batch 2, fp16", _sd3, convolutional=False),
        Case(
            "tiny-sd15-64-b2",
            "a tiny UNet of SD1.5's kind, 64×64, batch 2, to try this out on any machine",
            lambda: _sd15(64, 64, _TINY_SD15),
            needs_gpu=False,
            usual=False,
        ),
    )
}
