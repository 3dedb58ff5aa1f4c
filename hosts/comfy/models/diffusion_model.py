"""ComfyUI's diffusion models (UNets and transformers, see `model_classes`) as an `Architecture`."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....core.placeholder import placeholder_of
from ....core.protocols import Tensors
from ....core.spec import ModelFingerprint, Precision, Role
from ...architecture import (
    Draw,
    NetworkArchitecture,
    Remembered,
    architecture_digest,
    fingerprint_of,
    inputs_unwritten,
)
from ...control_residuals import control_of
from ..process.checkout import use_checkout
from .model_classes import ModelClass, class_named, class_of
from .tracing_layers import PlainNumbers, layers_with_weights, plain_layers


def split_inputs(inputs: Tensors) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Positional and keyword arguments of a model: each class has names of its own for latent and timesteps."""
    control, plain = control_of(inputs)
    rest: dict[str, Any] = {name: tensor for name, tensor in plain.items() if name not in ("x", "timesteps")}
    if control is not None:
        rest["control"] = control
    return (inputs["x"], inputs["timesteps"]), rest


def called(model: torch.nn.Module, inputs: Tensors) -> Tensors:
    """What a model that nobody patches makes of an engine's inputs."""
    args, rest = split_inputs(inputs)
    return {"out": model(*args, **rest, transformer_options={})}


class DiffusionModelGraph(torch.nn.Module):
    """The model as exported: plain inputs, plain attention, no patches.

    Args:
        attention: see `ModelClass`.
    """

    def __init__(self, model: torch.nn.Module, attention: str | None = None) -> None:
        super().__init__()
        self.model = model
        self._attention = attention

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            inputs: x [N, C, H, W] or [N, C, frames, H, W], timesteps [N], and what else the class takes by name, such
                as context [N, tokens, dim], y [N, dim], guidance [N], c_size [N, 2], and the residuals of ControlNets.

        Raises:
            UnsupportedModel: the model writes into its inputs, which the host's own calls would see.
        """
        args, kwargs = split_inputs(inputs)
        options = {"optimized_attention_override": scaled_dot_product_attention}
        with inputs_unwritten(inputs), plain_operators(), plain_attention(self._attention):
            return (self.model(*args, **kwargs, transformer_options=options),)


def scaled_dot_product_attention(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """ComfyUI picks its attention by machine; an engine always gets the one operator that compilers know."""
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


def attention_over_a_text(
    chosen: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: Any = None, **kwargs: Any
) -> torch.Tensor:
    """The same as two products, for the few tokens of a text in fp32: the operator's kernels for a GPU want masks of
    certain lengths, and a program that is traced with one is for texts of that length alone. So CLIP and T5 have it;
    text encoders of Llama's kind, which divide queries into heads themselves, take longer texts."""
    from comfy.ldm.modules.attention import attention_basic

    is_added = mask is None or mask.is_floating_point()
    if q.dtype is not torch.float32 or not is_added or kwargs.get("skip_reshape"):
        return scaled_dot_product_attention(chosen, q, k, v, heads, mask, **kwargs)
    found: torch.Tensor = attention_basic(q, k, v, heads, mask, **kwargs)
    return found


@contextmanager
def plain_attention(module: str | None, attention: Callable[..., Any] = scaled_dot_product_attention) -> Iterator[None]:
    """The same for a class that takes no override: its module's `optimized_attention` is another one meanwhile, for
    calls in this thread.

    Args:
        attention: as overrides are.
    """
    if module is None:
        yield
        return
    names = vars(importlib.import_module(module))
    before, here = names["optimized_attention"], threading.get_ident()

    @functools.wraps(before)
    def in_its_place(*args: Any, **kwargs: Any) -> Any:
        return attention(before, *args, **kwargs) if threading.get_ident() == here else before(*args, **kwargs)

    names["optimized_attention"] = in_its_place
    try:
        yield
    finally:
        names["optimized_attention"] = before


@contextmanager
def plain_operators() -> Iterator[None]:
    """Newer ComfyUIs rotate by kernels of their own, which compilers cannot look into, except while they train."""
    import comfy.model_management as management

    before = getattr(management, "in_training", False)
    management.in_training = True
    try:
        yield
    finally:
        management.in_training = before


class ComfyDiffusionModel(NetworkArchitecture):
    """What a ComfyUI diffusion model computes, apart from the model that was loaded."""

    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, kind: ModelClass, config: dict[str, Any], name: str) -> None:
        self.kind = kind
        self.config = config
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), self.kind.name, self.config, self.name)

    @classmethod
    def of(cls, model: Any) -> ComfyDiffusionModel:
        """The architecture of a `comfy.model_base.BaseModel`.

        Raises:
            UnsupportedModel: engines cannot stand for its class.
        """
        live = getattr(model, "diffusion_model", None)
        if not isinstance(live, torch.nn.Module):
            return cls._read(model)
        return _remembered.get(live, None, lambda: cls._read(model))

    @classmethod
    def _read(cls, model: Any) -> ComfyDiffusionModel:
        live = getattr(model, "diffusion_model", None)
        name = type(model.model_config).__name__
        kind = class_of(live)
        if kind is None:
            raise UnsupportedModel(
                f"{name} models ({type(live).__name__}) have no engines yet; your model runs without an engine"
            )
        # Where and in which dtype the host holds its weights is no part of what the model computes.
        outside = ("dtype", "device", "disable_unet_model_creation")
        settings = model.model_config.unet_config  # the live model may hold parts of it
        config = copy.deepcopy({key: value for key, value in settings.items() if key not in outside})
        return cls(kind, config, name)

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self.fresh, {**self.config, **self._variant})
        return fingerprint_of(digest, self.name, self.meta_module)

    @property
    def _variant(self) -> dict[str, Any]:
        """What else tells it from other architectures of the same config."""
        return {}

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: self.graph(self._whole(plain_layers())), dtype_of(precision), device)

    def graph(self, model: torch.nn.Module) -> torch.nn.Module:
        """What is exported of `model`."""
        return DiffusionModelGraph(model, self.kind.attention)

    def caster(self) -> torch.nn.Module:
        """The model with layers that cast whatever weights they are given to their input's dtype; has no weights."""
        import comfy.ops

        return self._whole(comfy.ops.manual_cast)

    @property
    def draws(self) -> Mapping[str, Draw]:
        return {"timesteps": self.kind.timesteps, **self.kind.draws}

    def new_meta_module(self) -> torch.nn.Module:
        return self._whole()

    def whole_for_tracing(self) -> torch.nn.Module:
        """A new meta module of the whole network, whose layers compute plainly in one dtype."""
        return self._whole(plain_layers())

    def _whole(self, operations: Any = None) -> torch.nn.Module:
        import comfy.ops

        layers = operations or comfy.ops.disable_weight_init
        options = {"dtype": torch.float32, "device": "meta", "operations": layers}
        with layers_with_weights(), PlainNumbers():
            module: torch.nn.Module = self.kind.load()(**self.config, **options)
        return module.requires_grad_(False).eval()


_remembered: Remembered[ComfyDiffusionModel] = Remembered()


def input_blocks(config: Mapping[str, Any]) -> int:
    """Of a UNet: one at its beginning, those of each level, and one between levels."""
    return 1 + sum(config["num_res_blocks"]) + len(config["channel_mult"]) - 1


def checkout_in_use() -> str:
    """The folder of the ComfyUI that this process runs."""
    import comfy.ops

    return str(Path(inspect.getfile(comfy.ops)).resolve().parents[1])


def enter_for_layers(checkout: str) -> None:
    """In the build process: make ComfyUI's code importable, which itself leaves the GPU alone."""
    if "comfy" not in sys.modules:
        use_checkout(checkout)
        from comfy.cli_args import args

        args.cpu = True


def _in_another_process(checkout: str, kind: str, config: dict[str, Any], name: str) -> ComfyDiffusionModel:
    enter_for_layers(checkout)
    return ComfyDiffusionModel(class_named(kind), config, name)
