"""A live ComfyUI model as a `ModelSource` of the runtime."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ....core.dtypes import dtype_of, precision_of
from ....core.protocols import BoundWeights, Tensors
from ....core.spec import Precision
from ....engine_cache import WeightsMemo
from ...architecture import PREFIX, cast_inputs
from ..process.current_weights import copies, weights_token
from ..process.dynamic_vram import bind_weights
from .checkpoint_file import unet_digest
from .diffusion_model import ComfyDiffusionModel, split_inputs


class ComfyUNetSource:
    """The UNet of a `ModelPatcher` during one sampling run; ComfyUI calls transformers so too.

    Args:
        patcher: loaded on its device for the length of the run.
        memo: remembers the digests of checkpoint files between starts.
    """

    owner = ""
    """Of copies of weights, see `WeightCopies`."""

    def __init__(self, patcher: Any, memo: WeightsMemo | None = None) -> None:
        self._patcher = patcher
        self._memo = memo
        self.unet: torch.nn.Module = patcher.model.diffusion_model
        self.architecture = ComfyDiffusionModel.of(patcher.model)
        self._digest: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self._patcher.load_device)

    @property
    def precision(self) -> Precision:
        model = self._patcher.model
        return precision_of(model.manual_cast_dtype or model.get_dtype())

    @property
    def is_patched(self) -> bool:
        """Whether a LoRA, a weight hook or another function changes its weights."""
        kinds = ("patches", "weight_wrapper_patches", "hook_patches", "current_hooks")
        return any(getattr(self._patcher, kind, None) for kind in kinds)

    @property
    def pixels_per_latent(self) -> int:
        """Of a picture in each direction, to one value of its latent."""
        return int(getattr(self._patcher.model.latent_format, "spacial_downscale_ratio", 8))

    def weights_digest(self) -> str:
        if self._digest is None:
            self._digest = unet_digest(self._patcher, self._memo)
        return self._digest

    def bind(self, precision: Precision) -> BoundWeights:
        return self._bound(dtype_of(precision), weights_token(self._patcher), PREFIX)

    def eager(self, inputs: Tensors) -> Tensors:
        args, kwargs = split_inputs(cast_inputs(inputs, dtype_of(self.precision)))
        return {"out": self.unet(*args, **kwargs, transformer_options={})}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        args, rest = split_inputs(cast_inputs(inputs, torch.float32))
        kwargs = {**rest, "transformer_options": {}}
        with self._host_weights() as weights:
            return {"out": torch.func.functional_call(self.architecture.caster(), dict(weights), args, kwargs)}

    def _host_weights(self) -> BoundWeights:
        """In the dtype that the host computes in."""
        dtype, token = dtype_of(self.precision), weights_token(self._patcher)
        if not copies.has(self.device, dtype, token, self.owner):
            token = None  # another dtype's copies, which an engine is about to use, must stay
        return self._bound(dtype, token)

    def _bound(self, dtype: torch.dtype, token: Hashable | None, prefix: str = "") -> BoundWeights:
        names = self.architecture.weight_names
        return bind_weights(self._patcher, self.unet, names, dtype, token, self.owner, prefix)
