"""The halves of ComfyUI's image VAEs, decoder and encoder, as `Architecture` and `ModelSource`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ....core.dtypes import dtype_of, precision_of
from ....core.errors import UnsupportedModel
from ....core.placeholder import placeholder_of
from ....core.protocols import BoundWeights, Tensors
from ....core.shapes import Shape
from ....core.spec import ModelFingerprint, Precision, Role
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import Resolution
from ...architecture import (
    PREFIX,
    Draw,
    NetworkArchitecture,
    Remembered,
    architecture_digest,
    cast_inputs,
    fingerprint_of,
)
from ...live_model.account import why_changed
from ..process.current_weights import weights_token
from ..process.dynamic_vram import bind_weights
from .autoencoders import DECODER, HALVES, KINDS, Config, Half, Kind, build_half, kind_of, why_other_layers
from .checkpoint_file import original_digest
from .diffusion_model import checkout_in_use, enter_for_layers
from .vae_fallback_reasons import why_not_this_vae


class VaeGraph(torch.nn.Module):
    """A half as exported, with the one attention operator that compilers know."""

    def __init__(self, model: Any, half: Half) -> None:
        from comfy.ldm.modules.diffusionmodules.model import AttnBlock, pytorch_attention

        super().__init__()
        self.model = model
        self._half = half
        for layer in model.modules():
            if isinstance(layer, AttnBlock):
                layer.optimized_attention = pytorch_attention

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            inputs: latents z [N, C, H, W], or pixels [N, 3, 8H, 8W] from -1 to 1.

        Returns:
            The other of the two; for pixels the mean of what the encoder gives.
        """
        return (getattr(self.model, self._half.method)(inputs[self._half.input]),)


class ComfyVaeHalf(NetworkArchitecture):
    """What a VAE's decoder or encoder computes, apart from the model that was loaded."""

    outputs: tuple[str, ...] = ("out",)
    is_part = True

    def __init__(self, kind: Kind, half: Half, config: Config) -> None:
        self.kind = kind
        self.half = half
        self.config = config
        self.role: Role = half.role

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), self.kind.name, self.role, self.config)

    @classmethod
    def of(cls, model: Any, half: Half = DECODER) -> ComfyVaeHalf:
        """The architecture of one half of a live `first_stage_model`.

        Raises:
            UnsupportedModel: engines cannot stand for it.
        """
        kind = kind_of(model)
        if kind is None:
            raise UnsupportedModel(
                f"VAEs of this kind ({type(model).__name__}) have no engines yet; your model runs without an engine"
            )
        try:
            config = kind.read(model, half)
            return _remembered.get(model, (half.role, repr(config)), lambda: cls(kind, half, config))
        except (AttributeError, IndexError, TypeError, ZeroDivisionError) as error:
            raise UnsupportedModel(
                f"The VAE's layers cannot be read ({error}); your model runs without an engine"
            ) from error

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        config = {**self.config, "kind": self.kind.name, "half": self.half.part}
        digest = architecture_digest(self.meta_module, config)
        return fingerprint_of(digest, f"{self.kind.name} {self.half.part}", self.meta_module)

    @property
    def pixels_per_latent(self) -> int:
        """Of a picture in each direction, to one value of its latent."""
        return self.kind.pixels_per_latent(self.config)

    @property
    def channels(self) -> int:
        """Of its input."""
        return self.kind.latent_channels(self.config) if self.half is DECODER else 3

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: VaeGraph(self.new_meta_module(), self.half), dtype_of(precision), device)

    @property
    def draws(self) -> Mapping[str, Draw]:
        return {"pixels": _picture}

    def new_meta_module(self) -> torch.nn.Module:
        """The half as a meta module."""
        return build_half(self.kind, self.config, self.half)

    def whole_for_tracing(self) -> torch.nn.Module:
        """The same, with the attention that compilers know."""
        model: torch.nn.Module = VaeGraph(self.new_meta_module(), self.half).model
        return model


_remembered: Remembered[ComfyVaeHalf] = Remembered()


def _picture(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
    return 2 * torch.rand(shape, generator=generator) - 1


def _in_another_process(checkout: str, kind: str, role: Role, config: Config) -> ComfyVaeHalf:
    enter_for_layers(checkout)
    return ComfyVaeHalf(KINDS[kind], HALVES[role], config)


class ComfyVaeSource:
    """One half of a `comfy.sd.VAE`.

    Args:
        vae: loaded on its device while weights are asked for, see `open_vae`.

    Raises:
        UnsupportedModel: it is of a kind that has no engines.

    Attributes:
        network: the autoencoder, of which this is one half.
    """

    def __init__(self, vae: Any, half: Half = DECODER) -> None:
        self._vae = vae
        self.network: torch.nn.Module = vars(vae)["first_stage_model"]  # an accelerated VAE shows something else
        if self.network is None:
            raise UnsupportedModel("There is no VAE: the file that was loaded contains none")
        try:
            self.architecture = ComfyVaeHalf.of(self.network, half)
        except UnsupportedModel as error:  # what others did to it may be why
            raise UnsupportedModel(why_not_this_vae(vae.patcher, self.network) or str(error)) from error

    def why_not(self) -> str | None:
        """What others did to the VAE that an engine of the half cannot honour, in words; None where nothing."""
        if reason := why_not_this_vae(self._vae.patcher, self.network):
            return reason
        if layer := why_other_layers(self.network, self.architecture.meta_module):
            return f"the VAE's {layer} is not as ComfyUI makes it"
        return why_changed(self.network, self.architecture, self.architecture.is_part)

    @property
    def device(self) -> torch.device:
        return torch.device(self._vae.patcher.load_device)

    @property
    def precision(self) -> Precision:
        return precision_of(self._vae.vae_dtype)

    @property
    def is_patched(self) -> bool:
        """Whether a LoRA or another function changes its weights."""
        return any(getattr(self._vae.patcher, kind, None) for kind in ("patches", "weight_wrapper_patches"))

    def weights_digest(self) -> str:
        return original_digest(self._vae.patcher, self.network, self.architecture.weight_names)

    def bind(self, precision: Precision) -> BoundWeights:
        return self._bound(dtype_of(precision), weights_token(self._vae.patcher))

    def eager(self, inputs: Tensors) -> Tensors:
        half = self.architecture.half
        given = cast_inputs(inputs, dtype_of(self.precision))[half.input]
        return {"out": plain_method(self.network, half)(self.network, given)}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32, with a copy of the weights: autoencoders are small."""
        graph = VaeGraph(self.architecture.new_meta_module(), self.architecture.half)
        with self._bound(dtype_of(self.precision), None) as held:
            weights = {name: tensor.float() for name, tensor in held.items()}
        return {"out": torch.func.functional_call(graph, weights, (), cast_inputs(inputs, torch.float32))[0]}

    def call(self, shape: Shape) -> CallShape:
        """The engine's call for inputs of this shape."""
        return CallShape(((self.architecture.half.input, shape, dtype_of(self.precision)),))

    def _bound(self, dtype: torch.dtype, token: Any) -> BoundWeights:
        names, owner = self.architecture.weight_names, self.architecture.role.value
        return bind_weights(self._vae.patcher, self.network, names, dtype, token, owner, PREFIX)


def plain_method(model: Any, half: Half) -> Any:
    """How the class of `model` computes a half: what others put into the instance calls it in turn."""
    return getattr(type(model), half.method)


def source_of(vae: Any, half: Half) -> ComfyVaeSource:
    """One half of a `comfy.sd.VAE` that an engine can stand for as a whole.

    Raises:
        UnsupportedModel: it can have no engine, or none would be used.
    """
    source = ComfyVaeSource(vae, half)
    if reason := source.why_not():
        raise UnsupportedModel(f"An engine would not be used: {reason}")
    return source


def open_vae(vae: Any, half: Half = DECODER) -> ComfyVaeSource:
    """Load a `comfy.sd.VAE` onto its device, where it stays, ready to be measured and checked.

    Raises:
        UnsupportedModel: it can have no engine.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([vae.patcher])
    return source_of(vae, half)


def vae_call(source: ComfyVaeSource, resolution: Resolution, batch: int) -> CallShape:
    """The call that decoding or encoding pictures of this resolution will make."""
    architecture = source.architecture
    scale = architecture.pixels_per_latent if architecture.half is DECODER else 1
    return source.call((batch, architecture.channels, resolution.height // scale, resolution.width // scale))
