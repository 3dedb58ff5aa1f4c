"""A diffusion model of a class that engines cannot stand for: it is measured all the same, without engines."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...core.dtypes import dtype_of, precision_of
from ...core.protocols import Tensors
from ...core.shapes import Shape
from ...core.spec import Precision
from ...hosts.architecture import Draw, cast_inputs, random_inputs
from ...hosts.comfy.models.diffusion_model import split_inputs


@dataclass(frozen=True)
class Drawn:
    """How inputs of the model are made up."""

    draws: Mapping[str, Draw]

    def random_inputs(
        self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], device: torch.device, seed: int
    ) -> Tensors:
        return random_inputs(shapes, dtypes, device, seed, self.draws)


class PlainSource:
    """What `ComfyUNetSource` is to others, as far as the plain model is concerned.

    Attributes:
        why_no_engine: in plain words.
    """

    def __init__(self, patcher: Any, draws: Mapping[str, Draw], why_no_engine: str) -> None:
        self.unet: torch.nn.Module = patcher.model.diffusion_model
        self.architecture = Drawn(draws)
        self.device = torch.device(patcher.load_device)
        self.precision: Precision = precision_of(patcher.model.get_dtype())
        self.why_no_engine = why_no_engine

    def eager(self, inputs: Tensors) -> Tensors:
        return called(self.unet, cast_inputs(inputs, dtype_of(self.precision)))

    def reference(self, inputs: Tensors) -> Tensors:
        """By a copy in fp32, which is gone afterwards."""
        return called(copy.deepcopy(self.unet).float(), cast_inputs(inputs, torch.float32))


def called(module: Any, inputs: Tensors, **options: Any) -> Tensors:
    """One call of a diffusion model as ComfyUI calls it.

    Args:
        inputs: in the dtype that it computes in.
        options: for ComfyUI's `transformer_options`.
    """
    args, kwargs = split_inputs(inputs)
    return {"out": module(*args, **kwargs, transformer_options=options)}
