"""ComfyUI's classes of ControlNets as `Architecture` and `ModelSource`: one row of `CONTROLNET_CLASSES` each.

An engine of a UNet's ControlNet begins behind the embedding of the hint, which is the same in every step of a picture:
the plain model makes it once. The same goes for what a Union adds to the time embedding, so that one engine serves all
its types. ControlNets of transformers have engines of their blocks alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ....core.dtypes import dtype_of, precision_of
from ....core.errors import SlipstreamError, UnsupportedModel
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

log = logging.getLogger(__name__)

HINT, TYPE = "guided_hint", "type_embedding"
"""Inputs that stay the same in every step: the embedded hint [1 or N, channels, h, w], and that of a Union's types."""

_OTHER_LAYERS = "The ControlNet's layers are not those of ComfyUI's; the plain ControlNet is used"


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


def residuals_by_name(control: Mapping[str, Sequence[torch.Tensor]]) -> Tensors:
    """Return a network's residuals by kind and place: `input_0` is the first one for a model's input blocks."""
    return {f"{kind}_{place}": tensor for kind in control for place, tensor in enumerate(control[kind])}


def residuals_by_kind(tensors: Tensors) -> dict[str, list[torch.Tensor]]:
    """Return residuals as ComfyUI's networks give them, in the order of their numbers: the inverse of
    `residuals_by_name`, and of the names of `ComfyControlNet.outputs`."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, place = name.partition("_")
        found.setdefault(kind, {})[int(place)] = tensor
    return {kind: [placed[place] for place in sorted(placed)] for kind, placed in found.items()}


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
        kind: of ComfyUI's classes.
        config: the arguments that make one.
    """

    role: Role = Role.CONTROLNET

    def __init__(self, kind: ControlNetClass, config: dict[str, Any]) -> None:
        self.kind = kind
        self.config = config
        self.outputs: tuple[str, ...] = ()
        if not kind.has_blocks_alone:
            self.outputs = (*(f"output_{place}" for place in range(input_blocks(config))), "middle_0")

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), *self.kind.place, self.config)

    @classmethod
    def of(cls, network: Any) -> ComfyControlNet:
        """The architecture of a live `control_model`.

        Raises:
            UnsupportedModel: engines cannot stand for it.
        """
        return _remembered.get(network, None, lambda: cls._read(network))

    @classmethod
    def _read(cls, network: Any) -> ComfyControlNet:
        kind = _BY_PLACE.get(_place_of(network))
        if kind is None:
            raise UnsupportedModel(
                f"ControlNets of this kind ({type(network).__name__}) have no engines yet; the plain ControlNet is used"
            )
        try:
            found = cls(kind, kind.config(network))
            live = {name: tensor.shape for name, tensor in network.state_dict().items()}
            same_heads = _heads(network) == _heads(found.meta_module)
            is_alike = same_heads and all(live.get(name) == shape for name, shape in found.weight_shapes.items())
            found.fingerprint  # noqa: B018  code that cannot be read is a reason too
        except SlipstreamError:
            raise
        except Exception as error:  # whatever layers raise that another extension put into the network
            log.debug("Slipstream: a ControlNet could not be read", exc_info=True)
            raise UnsupportedModel(_OTHER_LAYERS) from error
        if not is_alike:
            raise UnsupportedModel(_OTHER_LAYERS)
        return found

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self.fresh, self.config)
        return fingerprint_of(digest, self.kind.title(self.config), self.meta_module)

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
        """The network as a meta module, without the layers that embed hint and types where an engine is of it all."""
        network = self._whole(operations)
        if self.kind.has_blocks_alone:
            return network
        _put_stand_ins(network)
        for name in ("transformer_layes", "spatial_ch_projs"):  # of a Union; they too embed
            network._modules.pop(name, None)
        network._parameters.pop("task_embedding", None)
        return network

    def called(self, network: torch.nn.Module, inputs: Tensors) -> Tensors:
        """Return a network's residuals for a call's tensors.

        Args:
            inputs: an engine's, and the residuals are named by `outputs`. Where the class has engines of blocks alone,
                all tensors that ComfyUI passes, and they are named as `residuals_by_name` does.
        """
        if self.kind.has_blocks_alone:
            return residuals_by_name(network(**inputs))
        before = _put_stand_ins(network)
        try:
            return dict(zip(self.outputs, _call(network, inputs), strict=True))
        finally:
            network._modules.update(before)

    def whole_for_tracing(self) -> torch.nn.Module:
        """A new meta module of the whole network, whose layers compute plainly in one dtype."""
        return self._whole(plain_layers())

    def _whole(self, operations: Any = None) -> torch.nn.Module:
        import comfy.ops

        layers = operations or comfy.ops.disable_weight_init
        with layers_with_weights():
            network: torch.nn.Module = self.kind.load()(
                **self.config, dtype=torch.float32, device="meta", operations=layers
            )
        return network.requires_grad_(False).eval()


def _in_another_process(checkout: str, module: str, name: str, config: dict[str, Any]) -> ComfyControlNet:
    enter_for_layers(checkout)
    return ComfyControlNet(_BY_PLACE[module, name], config)


def _place_of(network: Any) -> tuple[str, str]:
    kind = type(network)
    return kind.__module__, kind.__qualname__


@dataclass(frozen=True)
class ControlNetClass:
    """One of ComfyUI's classes of ControlNets.

    Attributes:
        module, name: where the class is; it is made as `name(**config, dtype, device, operations)`.
        title: for people, by the config.
        config: the arguments that made a live one, which keeps some of them only in its layers.
        has_blocks_alone: engines stand for its blocks, see `block_classes`, and none for the whole network.
    """

    module: str
    name: str
    title: Callable[[Mapping[str, Any]], str]
    config: Callable[[Any], dict[str, Any]]
    has_blocks_alone: bool = True

    @property
    def place(self) -> tuple[str, str]:
        return self.module, self.name

    def load(self) -> Any:
        """The class itself."""
        return getattr(importlib.import_module(self.module), self.name)


def _config_of_unet(network: Any) -> dict[str, Any]:
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


def _title_of_unet(config: Mapping[str, Any]) -> str:
    return "ControlNet Union" if "union_controlnet_num_control_type" in config else "ControlNet"


def _detected(network: Any) -> dict[str, Any]:
    """What ComfyUI finds out about a transformer by its weights when it loads one."""
    from comfy.model_detection import model_config_from_unet

    return dict(model_config_from_unet(network.state_dict(), "", True).unet_config)


def _config_of_sd3(network: Any) -> dict[str, Any]:
    return {
        **_detected(network),
        "num_blocks": len(network.joint_blocks),
        "control_latent_channels": network.pos_embed_input.proj.in_channels,
    }


def _config_of_sd35(network: Any) -> dict[str, Any]:
    heads = network.transformer_blocks[0].attn.num_heads
    pooled = network.orig_y_embedder if network.double_y_emb else network.y_embedder
    return {
        "img_size": None,
        "patch_size": network.patch_size,
        "in_chans": network.x_embedder.proj.in_channels,
        "attention_head_dim": network.hidden_size // heads,
        "num_attention_heads": heads,
        "adm_in_channels": pooled.mlp[0].in_features,
        "num_layers": len(network.transformer_blocks),
        "main_model_double": network.main_model_double,
        "double_y_emb": network.double_y_emb,
    }


def _config_of_flux(network: Any) -> dict[str, Any]:
    return {
        **dataclasses.asdict(network.params),
        "latent_input": network.latent_input,
        "num_union_modes": network.num_union_modes,
        "mistoline": network.mistoline,
        "control_latent_channels": network.pos_embed_input.in_features // 4,  # of patches of 2×2
    }


def _config_of_qwen_image(network: Any) -> dict[str, Any]:
    extra = network.controlnet_x_embedder.in_features - network.in_channels
    return {**_detected(network), "extra_condition_channels": extra}


CONTROLNET_CLASSES = (
    # SD1.x, SD2, SDXL, Union
    ControlNetClass("comfy.cldm.cldm", "ControlNet", _title_of_unet, _config_of_unet, has_blocks_alone=False),
    # SD3 in diffusers' format
    ControlNetClass("comfy.cldm.mmdit", "ControlNet", lambda _: "SD3 ControlNet", _config_of_sd3),
    # SD3.5
    ControlNetClass("comfy.cldm.dit_embedder", "ControlNetEmbedder", lambda _: "SD3.5 ControlNet", _config_of_sd35),
    # Flux.1: XLabs, MistoLine, InstantX and its Unions
    ControlNetClass("comfy.ldm.flux.controlnet", "ControlNetFlux", lambda _: "Flux ControlNet", _config_of_flux),
    # Qwen-Image: InstantX
    ControlNetClass(
        "comfy.ldm.qwen_image.controlnet",
        "QwenImageControlNetModel",
        lambda _: "Qwen-Image ControlNet",
        _config_of_qwen_image,
    ),
)
_BY_PLACE = {row.place: row for row in CONTROLNET_CLASSES}


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
        return self.architecture.called(self.network, cast_inputs(inputs, dtype_of(self.precision)))

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
