"""What the architectures of all hosts share: their digest, and inputs to try them on."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..core.dtypes import INTEGER_INPUTS
from ..core.errors import UnsupportedModel
from ..core.protocols import BoundWeights, Tensors
from ..core.shapes import Shape
from ..core.spec import ModelFingerprint
from .live_model.held_weights import version_of
from .live_model.source_code import source_digest

PREFIX = "model."
"""Of every weight's name in the exported program."""

RECIPE = 4
"""Raise when the way in which engines are exported or compiled changes: it makes new engines of all old ones."""


_Known = TypeVar("_Known")


class Remembered(Generic[_Known]):
    """What was found out about live modules, for as long as they live.

    Reading an architecture takes tens of milliseconds, which each picture would wait for.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[torch.nn.Module, tuple[type, dict[Hashable, _Known]]] = WeakKeyDictionary()

    def get(self, module: torch.nn.Module, what: Hashable, find: Callable[[], _Known]) -> _Known:
        """What is known about a module, or `find`'s answer, which is known from then on.

        Args:
            what: tells several things about one module apart.
        """
        kind, known = self._known.get(module, (type(module), {}))
        if kind is not type(module):  # an extension made it one of another class
            known = {}
        if what not in known:
            known[what] = find()
            self._known[module] = type(module), known
        return known[what]


class NetworkArchitecture(ABC):
    """What the architectures of all hosts' networks derive from a meta module of the network.

    Attributes:
        is_part: it is that of some layers of the host's module; others lie beside them.
    """

    is_part: bool = False

    @abstractmethod
    def new_meta_module(self) -> torch.nn.Module:
        """A new network on the meta device, built by the host's own code."""

    @property
    def draws(self) -> Mapping[str, Draw]:
        """See `random_inputs`."""
        return {}

    @functools.cached_property
    def meta_module(self) -> torch.nn.Module:
        """To be looked at, not changed."""
        return self.new_meta_module()

    @property
    def fresh(self) -> torch.nn.Module:
        """The whole network as a meta module, of the host's code alone. To be looked at, not changed."""
        return self.meta_module

    @functools.cached_property
    def weight_names(self) -> frozenset[str]:
        """As the host names them, without the prefix of the exported program."""
        return frozenset(self.meta_module.state_dict())

    def random_inputs(
        self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], device: torch.device, seed: int
    ) -> Tensors:
        return random_inputs(shapes, dtypes, device, seed, self.draws)


@contextmanager
def inputs_unwritten(inputs: Tensors) -> Iterator[None]:
    """
    Raises:
        UnsupportedModel: the model wrote into its inputs, which the host's own calls would see.
    """
    versions = {name: version_of(tensor) for name, tensor in inputs.items()}
    yield
    if written := [name for name, tensor in inputs.items() if version_of(tensor) != versions[name]]:
        raise UnsupportedModel(f"the model writes into its input {written[0]!r}")


def fingerprint_of(digest: str, name: str, module: torch.nn.Module) -> ModelFingerprint:
    """
    Args:
        digest: of the architecture.
        module: what an engine stands for, of which weights are counted; may lie on the meta device.
    """
    weights = module.state_dict().values()
    return ModelFingerprint(digest, name, layers=len(weights), parameters=sum(weight.numel() for weight in weights))


class Draw(Protocol):
    """Makes random values of a shape."""

    def __call__(self, shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor: ...


def whole_numbers_below(limit: int) -> Draw:
    """As floats, from 0."""

    def draw(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator).float()

    return draw


def fractions_below(limit: float) -> Draw:
    """Evenly from 0 to `limit`."""

    def draw(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
        return limit * torch.rand(shape, generator=generator)

    return draw


def _guidance(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
    """Powers of two up to 8: models multiply them by 1000, where half precision rounds most other numbers."""
    return 2.0 ** torch.randint(0, 4, shape, generator=generator)


_DRAWS: Mapping[str, Draw] = {
    "timesteps": whole_numbers_below(1000),
    "time_ids": whole_numbers_below(1024),
    "guidance": _guidance,
}
"""Inputs that are not just noise."""


def architecture_digest(module: torch.nn.Module, config: Mapping[str, Any]) -> str:
    """A SHA-256 of everything that decides what a model computes, apart from its weights.

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
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    seed: int,
    draws: Mapping[str, Draw] = MappingProxyType({}),
) -> Tensors:
    """Inputs as a sampler would give them: noise, timesteps, text-like context, masks.

    Args:
        draws: input name -> how a model's own inputs are made, where noise would not do.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str) -> Draw:
        plain = torch.randn if dtypes[name].is_floating_point else _zeros_and_ones
        return {**_DRAWS, **draws}.get(name, plain)

    return {
        name: draw(name)(shape, generator=generator).to(device=device, dtype=dtypes[name])
        for name, shape in shapes.items()
    }


def cast_inputs(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Inputs for a module that computes in `dtype`."""
    keep = {name for name, tensor in inputs.items() if name in INTEGER_INPUTS or not tensor.is_floating_point()}
    return {name: tensor if name in keep else tensor.to(dtype) for name, tensor in inputs.items()}


def cast_weights(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> BoundWeights:
    """Weights as an engine that computes in `dtype` takes them; only those of another floating dtype are copied."""
    return BoundWeights(
        {PREFIX + name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    )


def _zeros_and_ones(shape: Shape, /, *, generator: torch.Generator) -> torch.Tensor:
    """What whole numbers are to models: a mask, or which of two."""
    return torch.randint(0, 2, shape, generator=generator)


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
        "your model runs without an engine"
    )
