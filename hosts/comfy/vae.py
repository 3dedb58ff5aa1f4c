"""The decoder of ComfyUI's image VAEs (SD1.x, SDXL, SD3, Flux) in the words of the runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ...core.dtypes import dtype_of, precision_of
from ...core.errors import UnsupportedModel
from ...core.protocols import Tensors
from ...core.skeleton import hollow
from ...core.spec import ModelFingerprint, Precision, Role
from ...engine_cache import digest_tensors
from ...runtime.plan import CallShape
from ...runtime.settings import Resolution
from ..architecture import architecture_digest, cast_inputs, random_inputs
from ..source_code import why_replaced
from .diffusion_model import checkout_in_use, enter_for_layers
from .layers import layers_with_weights
from .weights import current_weights

PREFIX = "model."
"""Of every weight's name in the exported program."""

_DECODER = "comfy.ldm.modules.diffusionmodules.model.Decoder"
_REGULARIZER = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"


class DecoderGraph(torch.nn.Module):
    """The decoder as exported, with the one attention operator that compilers know."""

    def __init__(self, model: Any) -> None:
        from comfy.ldm.modules.diffusionmodules.model import AttnBlock, pytorch_attention

        super().__init__()
        self.model = model
        for layer in model.modules():
            if isinstance(layer, AttnBlock):
                layer.optimized_attention = pytorch_attention

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            z: latents [N, C, H, W].

        Returns:
            Pictures [N, 3, 8H, 8W], from -1 to 1.
        """
        return (self.model.decode(z),)


class ComfyVaeDecoder:
    """What a VAE's decoder computes, apart from the model that was loaded.

    Args:
        config: of ComfyUI's `Decoder`.
        embed_dim: channels of latents that pass a convolution before the decoder; None where there is none.
    """

    role: Role = Role.VAE_DECODE
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, config: dict[str, Any], embed_dim: int | None) -> None:
        self.config = config
        self.embed_dim = embed_dim

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), self.config, self.embed_dim)

    @classmethod
    def of(cls, model: Any) -> ComfyVaeDecoder:
        """The architecture of a live `first_stage_model`.

        Raises:
            UnsupportedModel: engines cannot stand for it.
        """
        from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
        from comfy.ldm.modules.diffusionmodules.model import Decoder

        decoder: Any = getattr(model, "decoder", None)
        plain = type(decoder) is Decoder and decoder.conv_in.weight.ndim == 4
        if (
            type(model) not in (AutoencoderKL, AutoencodingEngine)
            or not plain
            or getattr(model, "bn", None) is not None
        ):
            kind = f"{type(model).__name__} with {type(decoder).__name__}"
            raise UnsupportedModel(f"VAEs of this kind ({kind}) have no engines yet; the plain model is used")
        embedding = getattr(model, "post_quant_conv", None)
        found = cls(_config_of(decoder), None if embedding is None else embedding.weight.shape[1])
        live = model.state_dict()
        if any(name not in live or live[name].shape != shape for name, shape in found.weight_shapes.items()):
            raise UnsupportedModel("The VAE's layers are not those of ComfyUI's decoder; the plain model is used")
        return found

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        config = {**self.config, "embed_dim": self.embed_dim}
        digest = architecture_digest(self._without_numbers, config)
        shapes = self.weight_shapes.values()
        parameters = sum(shape.numel() for shape in shapes)
        return ModelFingerprint(digest, "VAE decoder", layers=len(shapes), parameters=parameters)

    @functools.cached_property
    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """By name, without `PREFIX`."""
        return {name: tensor.shape for name, tensor in self._without_numbers.state_dict().items()}

    @functools.cached_property
    def _without_numbers(self) -> torch.nn.Module:
        return self.build()

    def skeleton(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return hollow(lambda: DecoderGraph(self.build()), dtype_of(precision), device)

    random_inputs = staticmethod(random_inputs)

    def build(self) -> torch.nn.Module:
        """The VAE without encoder and without numbers."""
        from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

        with torch.device("meta"), layers_with_weights():
            if self.embed_dim is None:
                parts = {
                    "encoder_config": {"target": "torch.nn.Identity"},
                    "regularizer_config": {"target": _REGULARIZER},
                }
                model = AutoencodingEngine(decoder_config={"target": _DECODER, "params": self.config}, **parts)
            else:
                model = AutoencoderKL(ddconfig={"double_z": True, **self.config}, embed_dim=self.embed_dim)
                del model.quant_conv
        del model.encoder
        result: torch.nn.Module = model.requires_grad_(False).eval()
        return result


def _config_of(decoder: Any) -> dict[str, Any]:
    """The arguments that made a live `Decoder`, which keeps some of them only in its layers."""
    levels = range(decoder.num_resolutions)
    upsamples = [decoder.up[level].upsample for level in levels if level > 0]
    return {
        "ch": decoder.ch,
        "ch_mult": [decoder.up[level].block[0].out_channels // decoder.ch for level in levels],
        "num_res_blocks": decoder.num_res_blocks,
        "attn_resolutions": [decoder.resolution // 2**level for level in levels if len(decoder.up[level].attn)],
        "in_channels": decoder.in_channels,
        "resolution": decoder.resolution,
        "z_channels": decoder.conv_in.weight.shape[1],
        "out_ch": decoder.conv_out.weight.shape[0],
        "resamp_with_conv": all(layer.with_conv for layer in upsamples),
        "tanh_out": decoder.tanh_out,
    }


def _in_another_process(checkout: str, config: dict[str, Any], embed_dim: int | None) -> ComfyVaeDecoder:
    enter_for_layers(checkout)
    return ComfyVaeDecoder(config, embed_dim)


class ComfyVaeSource:
    """The decoder of a `comfy.sd.VAE`.

    Args:
        vae: loaded on its device for as long as this is used, see `open_vae`.

    Raises:
        UnsupportedModel: engines cannot stand for it.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self._model: torch.nn.Module = vae.first_stage_model
        self.architecture = ComfyVaeDecoder.of(self._model)
        if reason := why_replaced(self._model):
            raise UnsupportedModel(f"An engine would not be used: {reason}")
        self._digest: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self._vae.patcher.load_device)

    @property
    def precision(self) -> Precision:
        return precision_of(self._vae.vae_dtype)

    @property
    def is_patched(self) -> bool:
        return bool(self._vae.patcher.patches)

    def weights_digest(self) -> str:
        if self._digest is None:
            names = self.architecture.weight_shapes
            self._digest = digest_tensors({name: self._model.state_dict()[name] for name in names})
        return self._digest

    def weights(self, precision: Precision) -> Mapping[str, torch.Tensor]:
        return {PREFIX + name: tensor for name, tensor in self._weights(dtype_of(precision)).items()}

    def eager(self, inputs: Tensors) -> Tensors:
        return {"out": self._vae.first_stage_model.decode(cast_inputs(inputs, dtype_of(self.precision))["z"])}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32, with a copy of the weights: decoders are small."""
        graph = DecoderGraph(self.architecture.build())
        weights = {PREFIX + name: tensor for name, tensor in self._weights(torch.float32).items()}
        return {"out": torch.func.functional_call(graph, weights, (), cast_inputs(inputs, torch.float32))[0]}

    def _weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return current_weights(self._model, self.architecture.weight_shapes, dtype, self.device)


def open_vae(vae: Any) -> ComfyVaeSource:
    """Load a `comfy.sd.VAE` onto its device, where it stays, ready to be measured and checked.

    Raises:
        UnsupportedModel: it can have no engine.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([vae.patcher])
    return ComfyVaeSource(vae)


def vae_call(source: ComfyVaeSource, resolution: Resolution, batch: int) -> CallShape:
    """The call that decoding pictures of this resolution will make."""
    channels = source.architecture.embed_dim or source.architecture.config["z_channels"]
    scale = 2 ** (len(source.architecture.config["ch_mult"]) - 1)
    z = (batch, channels, resolution.height // scale, resolution.width // scale)
    return CallShape((("z", z, dtype_of(source.precision)),))
