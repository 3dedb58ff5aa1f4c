"""ComfyUI's ControlNets of UNets (SD1.x, SD2, SDXL, Union) as `Architecture` and `ModelSource`.

An engine begins behind the embedding of the hint, which is the same in every step of a picture: the plain model makes
it once. The same goes for what a Union adds to the time embedding, so that one engine serves all its types.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ....core.dtypes import dtype_of, precision_of
from ....core.errors import UnsupportedModel
from ....core.placeholder import placeholder_of
from ....core.protocols import BoundWeights, Tensors
from ....core.spec import ModelFingerprint, Precision, Role
from ...architecture import PREFIX, NetworkArchitecture, Remembered, architecture_digest, cast_inputs, fingerprint_of
from ...live_model.account import why_changed
from ...live_model.held_weights import Hold
from ...model_patches import why_not_in_this_mode
from ..process.dynamic_vram import bind_weights
from .checkpoint_file import original_digest
from .diffusion_model import (
    checkout_in_use,
    enter_for_layers,
    input_blocks,
    plain_operators,
    scaled_dot_product_attention,
)
from .tracing_layers import layers_with_weights, plain_layers

HINT, TYPE = "guided_hint", "type_embedding"
"""Inputs that stay the same in every step: the embedded hint [1 or N, channels, h, w], and that of a Union's types."""

_CLASS = "comfy.cldm.cldm", "ControlNet"


class _Passed(torch.nn.Module):
    """Stands where the hint is embedded; it is embedded already."""

    def forward(self, hint: torch.Tensor, *_: Any) -> torch.Tensor:
        return hint


class _Types(list[int]):
    """No types to embed, in the place of a Union's list: they are embedded already."""

    def __init__(self, embedding: torch.Tensor | None) -> None:
        super().__init__()
        self.embedding = embedding


class _Given(torch.nn.Module):
    """Stands where a Union's types are embedded."""

    def forward(self, types: _Types, *_: Any) -> torch.Tensor | None:
        return types.embedding


def _put_stand_ins(network: Any) -> dict[str, torch.nn.Module]:
    """Let a network take what is embedded for what is to be embedded; what was there before, by name."""
    stand_ins = {"input_hint_block": _Passed(), "control_add_embedding": _Given()}
    before = {name: network._modules[name] for name in stand_ins if network._modules.get(name) is not None}
    network._modules.update({name: stand_ins[name] for name in before})
    return before


def _call(network: Any, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The network's own forward, with stand-ins in it; its residuals in the order of `outputs`."""
    rest = {name: tensor for name, tensor in inputs.items() if name not in (HINT, TYPE)}
    control = network(hint=inputs[HINT], control_type=_Types(inputs.get(TYPE)), **rest)
    return (*control["output"], *control["middle"])


class ControlNetGraph(torch.nn.Module):
    """The network as exported, without what embeds hint and types."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.model = network

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Args:
            inputs: x [N, C, H, W], timesteps [N], context [N, tokens, dim], guided_hint [1 or N, channels, H, W], and
                where the class takes them y [N, dim] and type_embedding [1, dim].

        Returns:
            The residuals from the first block to the middle.
        """
        from comfy.ldm.modules import attention

        with plain_operators(), _one_attention(attention):
            return _call(self.model, inputs)


@contextmanager
def _one_attention(module: Any) -> Iterator[None]:
    """ComfyUI picks its attention by machine, and ControlNets pass no choice on: an engine gets the one operator."""
    before = module.optimized_attention, module.optimized_attention_masked
    chosen = functools.partial(scaled_dot_product_attention, None)
    module.optimized_attention = module.optimized_attention_masked = chosen
    try:
        yield
    finally:
        module.optimized_attention, module.optimized_attention_masked = before


class ComfyControlNet(NetworkArchitecture):
    """What a ControlNet computes, apart from the one that was loaded.

    Args:
        config: of ComfyUI's class.
        name: for people.
    """

    role: Role = Role.CONTROLNET

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = config
        self.outputs: tuple[str, ...] = (*(f"output_{place}" for place in range(input_blocks(config))), "middle_0")
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), self.config, self._name)

    @classmethod
    def of(cls, network: Any) -> ComfyControlNet:
        """The architecture of a live `control_model`.

        Raises:
            UnsupportedModel: engines cannot stand for it.
        """
        return _remembered.get(network, None, lambda: cls._read(network))

    @classmethod
    def _read(cls, network: Any) -> ComfyControlNet:
        kind = type(network)
        if (kind.__module__, kind.__qualname__) != _CLASS:
            raise UnsupportedModel(
                f"ControlNets of this kind ({kind.__name__}) have no engines yet; the plain ControlNet is used"
            )
        name = "ControlNet Union" if network.control_add_embedding is not None else "ControlNet"
        found = cls(_config_of(network), name)
        live = {name: tensor.shape for name, tensor in network.state_dict().items()}
        same_heads = _heads(network) == _heads(found.meta_module)
        if not same_heads or any(live.get(name) != shape for name, shape in found.weight_shapes.items()):
            raise UnsupportedModel("The ControlNet's layers are not those of ComfyUI's; the plain ControlNet is used")
        return found

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self.fresh, self.config)
        return fingerprint_of(digest, self._name, self.meta_module)

    @functools.cached_property
    def fresh(self) -> torch.nn.Module:
        """The whole network as a meta module, of ComfyUI's code alone. To be looked at, not changed."""
        return self._whole()

    @functools.cached_property
    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """By name, without `PREFIX`."""
        return {name: tensor.shape for name, tensor in self.meta_module.state_dict().items()}

    def new_meta_module(self) -> torch.nn.Module:
        return self.build()

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: ControlNetGraph(self.build(plain_layers())), dtype_of(precision), device)

    def build(self, operations: Any = None) -> torch.nn.Module:
        """The network as a meta module, without the layers that embed hint and types."""
        network = self._whole(operations)
        _put_stand_ins(network)
        for name in ("transformer_layes", "spatial_ch_projs"):  # of a Union; they too embed
            network._modules.pop(name, None)
        network._parameters.pop("task_embedding", None)
        return network

    def whole_for_tracing(self) -> torch.nn.Module:
        """A new meta module of the whole network, whose layers compute plainly in one dtype."""
        network: torch.nn.Module = self._whole(plain_layers())
        return network

    def _whole(self, operations: Any = None) -> Any:
        import comfy.ops
        from comfy.cldm.cldm import ControlNet

        layers = operations or comfy.ops.disable_weight_init
        with layers_with_weights():
            network = ControlNet(**self.config, dtype=torch.float32, device="meta", operations=layers)
        return network.requires_grad_(False).eval()


def _in_another_process(checkout: str, config: dict[str, Any], name: str) -> ComfyControlNet:
    enter_for_layers(checkout)
    return ComfyControlNet(config, name)


def _config_of(network: Any) -> dict[str, Any]:
    """The arguments that made a live ControlNet, which keeps some of them only in its layers."""
    blocks = list(network.input_blocks)[1:]
    rows = [block for block in blocks if len(list(block.children())) > 0 and _is_row(block)]
    transformers = [layer for block in (*rows, network.middle_block) for layer in block if _is_transformer(layer)]
    if not transformers:
        raise UnsupportedModel("The ControlNet has no attention over the text; the plain ControlNet is used")
    text = transformers[0].transformer_blocks[0].attn2.to_k.weight
    middle = [len(layer.transformer_blocks) for layer in network.middle_block if _is_transformer(layer)]
    config = {
        "image_size": network.image_size,
        "in_channels": network.in_channels,
        "model_channels": network.model_channels,
        "hint_channels": network.input_hint_block[0].weight.shape[1],
        "num_res_blocks": list(network.num_res_blocks),
        "channel_mult": [int(multiple) for multiple in network.channel_mult],
        "conv_resample": network.conv_resample,
        "dims": network.dims,
        "num_classes": network.num_classes,
        "num_heads": network.num_heads,
        "num_head_channels": network.num_head_channels,
        "use_spatial_transformer": True,
        "legacy": False,
        "transformer_depth": [_depth(block) for block in rows],
        "transformer_depth_middle": middle[0] if middle else -1,
        "context_dim": text.shape[1],
        "use_linear_in_transformer": transformers[0].use_linear,
        "adm_in_channels": network.label_emb[0][0].weight.shape[1] if network.num_classes == "sequential" else None,
    }
    if network.control_add_embedding is not None:
        config["union_controlnet_num_control_type"] = network.num_control_type
    return config


def _is_row(block: Any) -> bool:
    """Whether it is one of a level's blocks, not the step down to the next level."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    return isinstance(block[0], ResBlock)


def _is_transformer(layer: Any) -> bool:
    from comfy.ldm.modules.attention import SpatialTransformer

    return isinstance(layer, SpatialTransformer)


def _depth(block: Any) -> int:
    return sum(len(layer.transformer_blocks) for layer in block if _is_transformer(layer))


def _heads(network: Any) -> list[int]:
    """Of each attention: no weight's shape tells."""
    from comfy.ldm.modules.attention import CrossAttention

    return [layer.heads for layer in network.modules() if isinstance(layer, CrossAttention)]


_remembered: Remembered[ComfyControlNet] = Remembered()


class ComfyControlNetSource:
    """The network of a `comfy.controlnet.ControlNet` during one sampling run.

    Args:
        control: loaded on its device for the length of the run.

    Raises:
        UnsupportedModel: engines cannot stand for it.
    """

    def __init__(self, control: Any) -> None:
        self._control = control
        self.network: Any = control.control_model
        self.architecture = ComfyControlNet.of(self.network)
        self._hold = Hold()

    @property
    def device(self) -> torch.device:
        return torch.device(self._control.control_model_wrapped.load_device)

    @property
    def precision(self) -> Precision:
        return precision_of(self._control.manual_cast_dtype or self.network.dtype)

    @property
    def is_patched(self) -> bool:
        return bool(self._control.control_model_wrapped.patches)

    def why_not(self) -> str | None:
        """What others did to the network that engines cannot honour; None where nothing."""
        if self._control.control_model_wrapped.object_patches:
            return "another node replaces parts of the ControlNet"
        return why_not_in_this_mode(self.device) or why_changed(self.network, self.architecture, hold=self._hold)

    def weights_digest(self) -> str:
        names = frozenset(self.architecture.weight_shapes)
        return original_digest(self._control.control_model_wrapped, self.network, names)

    def bind(self, precision: Precision) -> BoundWeights:
        return self._bound(dtype_of(precision))

    def embed(self, hint: torch.Tensor, types: list[int] | None) -> Tensors:
        """What stays the same in every step, by the plain model's own layers.

        Args:
            hint: as ComfyUI hands it over, [1 or N, channels, H, W] in pixels.
            types: of a Union ControlNet; None for others.
        """
        network = self.network
        if network.control_add_embedding is None:
            return {HINT: network.input_hint_block(hint, None, None)}
        embedded = network.control_add_embedding(types or [], hint.dtype, hint.device)
        if not types:
            return {HINT: network.input_hint_block(hint, None, None), TYPE: embedded}
        pictures = hint if hint.ndim == 5 else hint.unsqueeze(0)
        return {HINT: network.union_controlnet_merge(pictures, types, None, None), TYPE: embedded}

    def eager(self, inputs: Tensors) -> Tensors:
        given = cast_inputs(inputs, dtype_of(self.precision))
        before = _put_stand_ins(self.network)
        try:
            return dict(zip(self.architecture.outputs, _call(self.network, given), strict=True))
        finally:
            self.network._modules.update(before)

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        import comfy.ops

        graph = ControlNetGraph(self.architecture.build(comfy.ops.manual_cast))
        with self._bound(dtype_of(self.precision)) as held:
            found = torch.func.functional_call(graph, dict(held), (), cast_inputs(inputs, torch.float32))
        return dict(zip(self.architecture.outputs, found, strict=True))

    def _bound(self, dtype: torch.dtype) -> BoundWeights:
        patcher, names = self._control.control_model_wrapped, frozenset(self.architecture.weight_shapes)
        return bind_weights(patcher, self.network, names, dtype, prefix=PREFIX)
