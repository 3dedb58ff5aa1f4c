"""The specification of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any

from .shapes import ShapeProfile

NOT_IN_KEY = {"in_key": False}
"""Metadata of a dataclass field that does not enter an `EngineKey`."""

IN_KEY_IF_ANY = {"in_key_if_any": True}
"""Metadata of a field that enters a key unless it is empty: engines from before there was such a field stay valid."""


class Role(str, Enum):
    """Which part of a diffusion model an engine stands for."""

    UNET = "unet"
    CONTROLNET = "controlnet"
    VAE_ENCODE = "vae_encode"
    VAE_DECODE = "vae_decode"
    TEXT_ENCODER = "text_encoder"
    BLOCK = "block"


class Precision(str, Enum):
    """The dtype that an engine computes in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantised(str, Enum):
    """The 8-bit dtype of large linear layers, scaled dynamically in each call; all else computes in a `Precision`."""

    FP8 = "fp8"
    INT8 = "int8"


class Optimize(str, Enum):
    """How much build time to spend on speed; with `BLOCKS` engines of blocks alone are built, none of whole models."""

    BLOCKS = "blocks"
    FAST_BUILD = "fast build"
    BALANCED = "balanced"
    MAX = "max"


@dataclass(frozen=True)
class ModelFingerprint:
    """The identity of a model: its architecture, which is the computation, and its weights.

    Attributes:
        architecture: digest of class, config, parameter names and shapes, the forward code's source and the
            version of Slipstream's build recipe.
        architecture_name: for people, e.g. "SD15"; no part of any key.
        weights: digest of the unpatched tensors' bytes; None until somebody needs it. It enters a key only where
            the artifact contains the weights.
        lora: how LoRA reaches the engine: "live" (weights are supplied at load).
        layers: weight tensors, by which build times of different models compare; 0 where not counted.
        parameters: elements of all weight tensors together; 0 where not counted.
    """

    architecture: str
    architecture_name: str = field(default="", metadata=NOT_IN_KEY)
    weights: str | None = field(default=None, metadata=NOT_IN_KEY)
    lora: str = "live"
    layers: int = field(default=0, metadata=NOT_IN_KEY)
    parameters: int = field(default=0, metadata=NOT_IN_KEY)


class HoldsMappings:
    """A frozen dataclass with read-only mappings, which do not pickle by themselves."""

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self), tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)


@dataclass(frozen=True)
class BackendConfig(HoldsMappings):
    """A backend's name and the options that shape what it builds. Every option enters the key."""

    name: str
    options: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    contains_weights: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(sorted(self.options.items()))))


@dataclass(frozen=True)
class EngineSpec(HoldsMappings):
    """The specification of one engine.

    Attributes:
        dtypes: input name -> dtype name such as "float16".
        output_dtype: dtype name of every output.
        precision: what the engine computes in; where `quantised`, all but its large linear layers.
        more_profiles: further shapes that the same engine takes, each with kernels of its own.
        quantised: what its large linear layers multiply in; None where they compute as everything else does.
    """

    role: Role
    fingerprint: ModelFingerprint
    profile: ShapeProfile
    dtypes: Mapping[str, str]
    output_dtype: str
    precision: Precision
    optimize: Optimize
    backend: BackendConfig
    more_profiles: tuple[ShapeProfile, ...] = field(default=(), metadata=IN_KEY_IF_ANY)
    quantised: Quantised | None = field(default=None, metadata=IN_KEY_IF_ANY)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", MappingProxyType(dict(sorted(self.dtypes.items()))))

    @property
    def profiles(self) -> tuple[ShapeProfile, ...]:
        return self.profile, *self.more_profiles

    @property
    def is_static(self) -> bool:
        """Whether it is for one exact shape."""
        return self.profile.is_static and not self.more_profiles

    @property
    def precision_name(self) -> str:
        """For people, the word by which they chose what it computes in, e.g. "fp16" or "fp8"."""
        return str((self.quantised or self.precision).value)

    def describe(self) -> str:
        """One line for people: model, role, precision and shapes."""
        name = self.fingerprint.architecture_name or self.fingerprint.architecture[:8]
        return f"{name} {self.role.value} {self.precision_name} ({' or '.join(map(str, self.profiles))})"
