"""What the architectures of all hosts share: their digest, and inputs to try them on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..core.dtypes import WHOLE_NUMBERS
from ..core.errors import UnsupportedModel
from ..core.protocols import Tensors
from ..core.shapes import Shape
from .source_code import source_digest

RECIPE = 1
"""Raise when the way in which engines are exported or compiled changes: it makes new engines of all old ones."""

_KINDS = {"timesteps": 1000, "time_ids": 1024}
"""Inputs that are whole numbers below this, given as floats."""


def architecture_digest(module: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """Of all that decides what a model computes, its numbers left out.

    Args:
        module: built from `config`; may lie on the meta device.

    Raises:
        UnsupportedModel: the code of a layer, or the config, cannot be known for certain.
    """
    kind = type(module)
    facts = {
        "recipe": RECIPE,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "config": {str(name): _plain(value, str(name)) for name, value in config.items()},
        "weights": sorted((name, list(tensor.shape)) for name, tensor in module.state_dict().items()),
        "source": source_digest(module),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def random_inputs(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], device: torch.device, seed: int
) -> Tensors:
    """Inputs as a sampler would give them: noise, timesteps, text-like context."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(name, shape, generator).to(device=device, dtype=dtypes[name]) for name, shape in shapes.items()
    }


def cast_inputs(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Inputs for a module that computes in `dtype`."""
    return {name: tensor if name in WHOLE_NUMBERS else tensor.to(dtype) for name, tensor in inputs.items()}


def _random(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if name in _KINDS:
        return torch.randint(0, _KINDS[name], shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _plain(value: Any, name: str) -> Any:
    """A config's value as JSON has it; anything else could differ from itself in the next process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    raise UnsupportedModel(
        f"The model's setting {name!r} is a {type(value).__name__}, which engines cannot be told apart by; "
        "the plain model is used"
    )
