"""The two code bases of the Forge family, as far as they differ: one row each.

`backend` is that of Forge and Neo, `ldm_patched` that of reForge and Classic.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Weight = torch.Tensor | None


class Family(ABC):
    """
    Attributes:
        name: of its package.
        unet: module and name of the UNet's class (SD1.x, SD2, SDXL and their kin).
        attention: module and name of the function that the UNet calls for attention; hosts pick one by machine.
        memory: module that manages it.
        options: module of the command line's, as `args`.
    """

    name: str
    unet: tuple[str, str]
    attention: tuple[str, str]
    memory: str
    options: str

    def unet_class(self) -> type:
        """The class itself."""
        found: type = getattr(importlib.import_module(self.unet[0]), self.unet[1])
        return found

    def is_unet(self, module: object) -> bool:
        """Whether a live module is that class; a subclass is not."""
        return (type(module).__module__, type(module).__qualname__) == self.unet

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What of a host's config the class is made from: hosts keep more in it."""
        known = inspect.signature(self.unet_class()).parameters
        return {name: value for name, value in config.items() if name in known and name not in ("device", "dtype")}

    def manager(self) -> Any:
        return importlib.import_module(self.memory)

    def checkout(self) -> str:
        """The folder of the WebUI that this process runs."""
        return str(Path(importlib.import_module(self.memory).__file__ or "").resolve().parents[self._depth])

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Meanwhile the UNet's attention is the one operator that compilers know."""
        module, name = importlib.import_module(self.attention[0]), self.attention[1]
        before = getattr(module, name)
        setattr(module, name, scaled_dot_product_attention)
        try:
            yield
        finally:
            setattr(module, name, before)

    @property
    @abstractmethod
    def _depth(self) -> int:
        """Of the memory manager's file in the WebUI's folder, less one."""

    @abstractmethod
    def config(self, model: Any) -> Mapping[str, Any]:
        """The UNet's config of a live model."""

    @abstractmethod
    def build(self, config: Mapping[str, Any]) -> torch.nn.Module:
        """The UNet built of torch's own layers, or of equivalent ones, on torch's default device."""

    @abstractmethod
    def dtype(self, model: Any) -> torch.dtype:
        """That a live model computes in."""

    @abstractmethod
    def loras(self, patcher: Any) -> Hashable:
        """Which LoRAs a patcher has, empty without any; and other changes of weights."""

    @abstractmethod
    def applied(self, patcher: Any) -> Hashable:
        """Differs where the loaded weights hold other LoRAs."""

    @abstractmethod
    def originals(self, patcher: Any) -> Mapping[str, torch.Tensor]:
        """Weights as they were before LoRAs changed them, of those that were changed, by their names in the model."""

    @abstractmethod
    def casts(self, layer: torch.nn.Module) -> bool:
        """Whether a layer computes with other weights than its parameters hold, such as a LoRA's applied on the fly."""

    @abstractmethod
    def cast(self, layer: torch.nn.Module, like: torch.Tensor) -> tuple[Weight, Weight]:
        """Weight and bias that a layer computes with for an input such as `like`; they may be the host's own."""

    @abstractmethod
    def why_unreadable(self, layer: torch.nn.Module) -> str | None:
        """Why a layer's weights cannot be read as plain tensors; None where they can."""

    @abstractmethod
    def predict(self) -> Callable[..., torch.Tensor]:
        """The function that gives a step's denoised latent: (model, x, timestep, uncond, cond, cond_scale,
        model_options, seed)."""

    def why_no_skipping(self) -> str | None:
        """Why this WebUI's steps are not skipped as it is set; None where they may be."""
        return None

    def use_cpu(self) -> None:
        """In the build process, before more of the WebUI is imported: leave the GPU alone."""
        args = importlib.import_module(self.options).args
        for name in ("always_cpu", "cpu"):  # Neo has the shorter one
            if hasattr(args, name):
                setattr(args, name, True)


def scaled_dot_product_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """
    Args:
        q, k, v: [N, tokens, heads * dim].
    """
    batch, _tokens, width = q.shape
    q, k, v = (part.view(batch, -1, heads, width // heads).transpose(1, 2) for part in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(batch, -1, width)


def _cloned(weight: Weight) -> Weight:
    """The host may use the same staging buffer again for the next layer."""
    return None if weight is None else weight.clone()


def _quantised(layer: torch.nn.Module) -> str:
    return f"its weights are quantised ({type(layer).__qualname__}), which engines here do not read"


class _Backend(Family):
    name = "backend"
    unet = ("backend.nn.unet", "IntegratedUNet2DConditionModel")
    attention = ("backend.nn.unet", "attention_function")
    memory = "backend.memory_management"
    options = "backend.args"
    _depth = 1

    def config(self, model: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = model.diffusion_model.config
        return found

    def build(self, config: Mapping[str, Any]) -> torch.nn.Module:
        made: torch.nn.Module = self.unet_class()(**config)
        return made

    def dtype(self, model: Any) -> torch.dtype:
        found: torch.dtype = model.computation_dtype
        return found

    def loras(self, patcher: Any) -> Hashable:
        patches = getattr(patcher, "lora_patches", None)
        if patches is None:  # Neo
            patches = {**patcher.patches, **patcher.weight_wrapper_patches}
        return tuple(str(key) for key in patches)

    def applied(self, patcher: Any) -> Hashable:
        loader = getattr(patcher, "lora_loader", None)
        if loader is not None:
            return str(loader.loaded_hash)
        return patcher.patches_uuid, getattr(patcher.model, "current_weight_patches_uuid", None)

    def originals(self, patcher: Any) -> Mapping[str, torch.Tensor]:
        holder = getattr(patcher, "lora_loader", patcher)
        return {name: getattr(kept, "weight", kept) for name, kept in holder.backup.items()}

    def casts(self, layer: Any) -> bool:
        functions = [getattr(layer, name, None) for name in ("weight_function", "bias_function", "forge_online_loras")]
        return any(functions) or getattr(layer, "scale_weight", None) is not None

    def cast(self, layer: Any, like: torch.Tensor) -> tuple[Weight, Weight]:
        operations = importlib.import_module("backend.operations")
        if not getattr(layer, "parameters_manual_cast", False):
            plain: tuple[Weight, Weight] = operations.get_weight_and_bias(layer)
            return plain
        weight, bias, signal = operations.weights_manual_cast(layer, like)
        with operations.main_stream_worker(weight, bias, signal):
            return _cloned(weight), _cloned(bias)

    def why_unreadable(self, layer: torch.nn.Module) -> str | None:
        home, name = type(layer).__module__, type(layer).__qualname__
        is_other = home == "backend.operations" and not name.startswith("ForgeOperations.")
        return _quantised(layer) if is_other or home.startswith("backend.operations_") else None

    def predict(self) -> Callable[..., torch.Tensor]:
        found: Callable[..., torch.Tensor] = importlib.import_module(
            "backend.sampling.sampling_function"
        ).sampling_function_inner
        return found


class _Patched(Family):
    name = "ldm_patched"
    unet = ("ldm_patched.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
    attention = ("ldm_patched.ldm.modules.attention", "optimized_attention")
    memory = "ldm_patched.modules.model_management"
    options = "ldm_patched.modules.args_parser"
    _depth = 2

    def config(self, model: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = model.model_config.unet_config
        return found

    def build(self, config: Mapping[str, Any]) -> torch.nn.Module:
        operations = importlib.import_module("ldm_patched.modules.ops").disable_weight_init
        made: torch.nn.Module = self.unet_class()(**config, dtype=torch.float32, operations=operations)
        return made

    def dtype(self, model: Any) -> torch.dtype:
        found: torch.dtype = getattr(model, "manual_cast_dtype", None) or model.get_dtype()
        return found

    def loras(self, patcher: Any) -> Hashable:
        kinds = ("patches", "weight_wrapper_patches", "hook_patches")
        return tuple(str(key) for kind in kinds for key in getattr(patcher, kind, None) or ())

    def applied(self, patcher: Any) -> Hashable:
        uuid = getattr(patcher, "patches_uuid", None)
        return uuid, getattr(patcher.model, "current_weight_patches_uuid", None), len(patcher.backup)

    def originals(self, patcher: Any) -> Mapping[str, torch.Tensor]:
        return {name: getattr(kept, "weight", kept) for name, kept in patcher.backup.items()}

    def casts(self, layer: Any) -> bool:
        return bool(getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None))

    def cast(self, layer: Any, like: torch.Tensor) -> tuple[Weight, Weight]:
        operations = importlib.import_module("ldm_patched.modules.ops")
        if not getattr(layer, "ldm_patched_cast_weights", False) and not self.casts(layer):
            return layer.weight, layer.bias
        weight, bias, *signal = operations.cast_bias_weight(layer, like)
        with operations.main_stream_worker(weight, bias, signal[0] if signal else None):
            return _cloned(weight), _cloned(bias)

    def why_unreadable(self, layer: torch.nn.Module) -> str | None:
        home = type(layer).__module__
        return _quantised(layer) if "bnb" in home or "gguf" in home.lower() else None

    def predict(self) -> Callable[..., torch.Tensor]:
        found: Callable[..., torch.Tensor] = importlib.import_module("ldm_patched.modules.samplers").sampling_function
        return found

    def why_no_skipping(self) -> str | None:
        options = getattr(importlib.import_module("modules.shared"), "opts", None)
        # reForge decides on that where nothing outside of it sees it.
        if any(getattr(options, name, None) for name in ("s_min_uncond", "skip_early_cond")):
            return "the WebUI's settings leave the negative prompt out of some steps"
        return None


FAMILIES: Mapping[str, Family] = {family.name: family for family in (_Backend(), _Patched())}


def family_of(patcher: Any) -> Family | None:
    """The code base that a `UnetPatcher` is of; None where it is none of these."""
    homes = {kind.__module__.partition(".")[0] for kind in type(patcher).__mro__}
    return next((family for name, family in FAMILIES.items() if name in homes), None)


def enter_for_layers(name: str, checkout: str) -> Family:
    """In the build process: make a WebUI's code importable, which itself leaves the GPU alone."""
    family = FAMILIES[name]
    if name not in sys.modules:
        sys.path.insert(0, checkout)
        sys.argv = sys.argv[:1]  # the WebUI reads its options from there
        family.use_cpu()
    return family
