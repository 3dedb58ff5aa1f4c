"""A UNet in two halves: what comes before a ControlNet's residuals are needed, and what comes after.

Between them a step can wait for the ControlNet, which so runs at the same time as the first half.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.protocols import Tensors
from ....core.spec import ModelFingerprint
from ....engine_cache import WeightsMemo
from ...architecture import PREFIX, Remembered, cast_inputs
from ...control_residuals import Control, control_of, kinds_of
from .diffusion_model import (
    ComfyDiffusionModel,
    input_blocks,
    plain_operators,
    scaled_dot_product_attention,
)
from .model_classes import ModelClass
from .unet_source import ComfyUNetSource

ENCODER, DECODER = "encoder", "decoder"
_MODULES = {
    ENCODER: ("time_embed", "label_emb", "input_blocks", "middle_block"),
    DECODER: ("output_blocks", "out"),
}
_SKIP = "skip_"


def can_be_halved(kind: ModelClass, config: Mapping[str, Any]) -> bool:
    """Whether this class and member of it is known to be what the halves compute together."""
    rare = ("heatmap_head", "n_embed", "use_temporal_attention", "use_temporal_resblock")
    return kind.name == "UNetModel" and not any(config.get(name) for name in rare)


def is_for_halves(control: Mapping[str, Any] | None) -> bool:
    """Whether a call's residuals are all for the second half, as a ControlNet's are; a T2I adapter's are not."""
    kinds = kinds_of(control)
    return bool(kinds) and kinds <= {"middle", "output"}


class _Half(torch.nn.Module):
    """One half as exported; also what computes it with the live model's own layers.

    Args:
        model: ComfyUI's `UNetModel`, of which the half's modules are used.
        one_attention: call the one operator that compilers know, not what ComfyUI picks for this machine.
    """

    def __init__(self, model: Any, one_attention: bool) -> None:
        super().__init__()
        self.model = model
        self._options = {"optimized_attention_override": scaled_dot_product_attention} if one_attention else {}

    def _block(
        self, place: tuple[str, int], layers: Any, h: torch.Tensor, emb: torch.Tensor, context: Any, shape: Any = None
    ) -> torch.Tensor:
        from comfy.ldm.modules.diffusionmodules.openaimodel import forward_timestep_embed

        options = {**self._options, "block": place}
        result: torch.Tensor = forward_timestep_embed(layers, h, emb, context, options, shape)
        return result


class EncoderGraph(_Half):
    """From the latent to the middle."""

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Args:
            inputs: x [N, C, H, W], timesteps [N], context [N, tokens, dim], y [N, dim] where the class takes it.

        Returns:
            The time embedding, what the middle gives, and what each block hands over to the second half.
        """
        from comfy.ldm.modules.diffusionmodules.openaimodel import timestep_embedding

        model, x, context = self.model, inputs["x"], inputs.get("context")
        emb = model.time_embed(timestep_embedding(inputs["timesteps"], model.model_channels).to(x.dtype))
        if model.num_classes is not None:
            emb = emb + model.label_emb(inputs["y"])
        h, skips = x, []
        with plain_operators():
            for place, block in enumerate(model.input_blocks):
                h = self._block(("input", place), block, h, emb, context)
                skips.append(h)
            if model.middle_block is not None:
                h = self._block(("middle", 0), model.middle_block, h, emb, context)
        return (emb, h, *skips)


class DecoderGraph(_Half):
    """From the middle to the prediction, with what ControlNets add."""

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            inputs: emb, middle and skip_0, … as the first half gives them, context, and residuals.
        """
        control, given = control_of(inputs)
        emb, context = given["emb"], given.get("context")
        skips = [given[f"{_SKIP}{place}"] for place in range(len(self.model.output_blocks))]
        h = _plus(given["middle"], control, "middle")
        dtype = h.dtype
        with plain_operators():
            for place, block in enumerate(self.model.output_blocks):
                h = torch.cat([h, _plus(skips.pop(), control, "output")], dim=1)
                h = self._block(("output", place), block, h, emb, context, skips[-1].shape if skips else None)
            return (self.model.out(h.type(dtype)),)


def _plus(h: torch.Tensor, control: Control | None, kind: str) -> torch.Tensor:
    """With the next residual of a kind, if there is one."""
    residual = control[kind].pop() if control and control[kind] else None
    return h if residual is None else h + residual


_GRAPHS: dict[str, type[_Half]] = {ENCODER: EncoderGraph, DECODER: DecoderGraph}


class ComfyUNetHalf(ComfyDiffusionModel):
    """What one half computes, apart from the model that was loaded."""

    def __init__(self, kind: ModelClass, config: dict[str, Any], name: str, half: str) -> None:
        super().__init__(kind, config, name)
        self.half = half
        if half == ENCODER:
            self.outputs = ("emb", "middle", *(f"{_SKIP}{place}" for place in range(input_blocks(config))))

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (super().__reduce__(), self.half)

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        return replace(super().fingerprint, architecture_name=f"{self.name} {self.half}")

    @property
    def _variant(self) -> dict[str, Any]:
        return {**super()._variant, "half": self.half}

    def graph(self, model: torch.nn.Module, one_attention: bool = True) -> _Half:
        return _GRAPHS[self.half](model, one_attention)

    def _whole(self, operations: Any = None) -> torch.nn.Module:
        model = super()._whole(operations)
        for name in list(model._modules):
            if name not in _MODULES[self.half]:
                del model._modules[name]
        return model


def _in_another_process(made: tuple[Any, Any], half: str) -> ComfyUNetHalf:
    make, given = made
    whole = make(*given)
    return ComfyUNetHalf(whole.kind, whole.config, whole.name, half)


_remembered: Remembered[ComfyUNetHalf] = Remembered()


class ComfyUNetHalfSource(ComfyUNetSource):
    """One half of a `ModelPatcher`'s UNet during one sampling run."""

    architecture: ComfyUNetHalf

    def __init__(self, patcher: Any, memo: WeightsMemo | None, half: str) -> None:
        super().__init__(patcher, memo)
        whole = self.architecture
        self.architecture = _remembered.get(
            self.unet, half, lambda: ComfyUNetHalf(whole.kind, whole.config, whole.name, half)
        )
        self.owner = half
        self._live = self.architecture.graph(self.unet, one_attention=False)

    def eager(self, inputs: Tensors) -> Tensors:
        return self._named(self._live(**cast_inputs(inputs, dtype_of(self.precision))))

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        graph = self.architecture.graph(self.architecture.caster())
        with self._host_weights() as held:
            weights = {PREFIX + name: tensor for name, tensor in held.items()}
            return self._named(torch.func.functional_call(graph, weights, (), cast_inputs(inputs, torch.float32)))

    def _named(self, results: tuple[torch.Tensor, ...]) -> Tensors:
        return dict(zip(self.architecture.outputs, results, strict=True))
