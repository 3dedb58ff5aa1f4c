"""What the architectures of all hosts share: their digest, and inputs to try them on."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import UnsupportedModel
from ..core.protocols import Tensors
from ..core.shapes import Shape

RECIPE = 1
"""Raise when the way in which engines are exported or compiled changes: it makes new engines of all old ones."""

_KINDS = {"timesteps": 1000, "time_ids": 1024}
"""Inputs that are whole numbers below this, given as floats."""


def architecture_digest(module: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """Of all that decides what a model computes, its numbers left out.

    Args:
        module: built from `config`; may lie on the meta device.

    Raises:
        UnsupportedModel: the source of a layer cannot be read.
    """
    kind = type(module)
    facts = {
        "recipe": RECIPE,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "config": json.loads(json.dumps(dict(config), sort_keys=True, default=repr)),
        "weights": sorted((name, list(tensor.shape)) for name, tensor in module.state_dict().items()),
        "source": _source_digest(module),
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


def _random(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if name in _KINDS:
        return torch.randint(0, _KINDS[name], shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _source_digest(module: torch.nn.Module) -> str:
    """Of the files that define the module's layers: another version of a host may compute something else."""
    names = {type(part).__module__ for part in module.modules()}
    digest = hashlib.sha256()
    for name in sorted(names):
        if not name.startswith("torch."):
            digest.update(name.encode() + b"\0" + _source_of(name) + b"\0")
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _source_of(module_name: str) -> bytes:
    try:
        return inspect.getsource(sys.modules[module_name]).encode()
    except (KeyError, OSError, TypeError) as error:
        raise UnsupportedModel(
            f"The source of {module_name} cannot be read, so a change of it would go unnoticed; the plain model is used"
        ) from error
