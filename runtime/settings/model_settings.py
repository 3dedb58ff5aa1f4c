"""What a user chose for one accelerated model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from ...core.shapes import Shape
from ...core.spec import Optimize, Precision, Quantised, Role

_Axes = TypeVar("_Axes")
_Choice = TypeVar("_Choice", bound=Enum)

TOKENS = 77
"""The length of a text is a multiple of it."""

MAX_BATCH = 2
"""Prompt and negative prompt of one picture, in one call."""

MAX_TOKENS = 3 * TOKENS

SWITCHED_OFF = "acceleration is switched off, in the node or in Slipstream's settings"
"""Why the plain model runs with `BackendChoice.OFF`."""


class BackendChoice(str, Enum):
    AUTO = "auto"
    TENSORRT = "tensorrt"
    COMPILED = "compiled"
    OFF = "off"


class BuildPolicy(str, Enum):
    """When a missing engine is built."""

    BACKGROUND = "background"
    FIRST_USE = "first use"
    MANUAL = "manual"


class ShapeChoice(str, Enum):
    """Which sizes one engine is for."""

    EACH = "one engine per size"
    RANGE = "one for a range"
    PROFILES = "one with a profile per size"


class Parallel(str, Enum):
    """Whether a ControlNet and the half of the model that does not need it run at the same time."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


BLOCKS_VARIABLE = "SLIPSTREAM_BLOCKS"
"""The variable of the environment that, set to "off", leaves blocks alone for which nobody asked."""


def are_blocks_welcome() -> bool:
    """Return whether blocks for which nobody asked may run on engines, by `BLOCKS_VARIABLE`."""
    return os.environ.get(BLOCKS_VARIABLE) != "off"


class ByBlocks(str, Enum):
    """Whether blocks of a model run on engines of their own where no engine of the whole model answers."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Levers:
    """Work that is not repeated in every step, or not waited for. The defaults are what measurements speak for.

    Attributes:
        hint_once: a ControlNet's hint is embedded once a picture.
        parallel: `AUTO` measures both ways once and remembers.
        one_graph: a whole step is replayed as one CUDA graph, where it is the same work in every step.
        first_step: so is the first one, where an earlier picture was the same work.
        by_blocks: `AUTO` is with `Optimize.BLOCKS`, and for diffusion models on GPUs.
    """

    hint_once: bool = True
    parallel: Parallel = Parallel.AUTO
    one_graph: bool = True
    first_step: bool = True
    by_blocks: ByBlocks = ByBlocks.AUTO


PIXELS = 8
"""Of a picture in each direction, to one value of a latent."""

_PIXELS = {"x": PIXELS, "z": PIXELS, "pixels": 1, "skip_0": PIXELS}
"""Inputs that have a picture's size, and how many of its pixels in each direction one of their values is.

The last is what a UNet's second half takes from the first block."""


@dataclass(frozen=True)
class Resolution:
    """Picture size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"

    def is_between(self, smallest: Resolution, largest: Resolution) -> bool:
        return smallest.width <= self.width <= largest.width and smallest.height <= self.height <= largest.height

    @classmethod
    def of_call(cls, shapes: Mapping[str, Shape]) -> Resolution:
        """The picture size of a call's inputs, by its latent [N, C, H, W] or [N, C, frames, H, W], or its picture."""
        name = _with_size(shapes)
        return cls(shapes[name][-1] * _PIXELS[name], shapes[name][-2] * _PIXELS[name])


def latent_of(shapes: Mapping[str, _Axes]) -> _Axes:
    """The latent or picture among a call's or a profile's inputs: UNets call it x, decoders z, encoders pixels."""
    return shapes[_with_size(shapes)]


def _with_size(names: Iterable[str]) -> str:
    return next(name for name in _PIXELS if name in set(names))


def parse_resolutions(text: str) -> tuple[Resolution, ...]:
    """Read "512x512, 768x512"; empty or "auto" means: every resolution that comes up.

    Raises:
        ValueError: a part is no resolution, or not a multiple of 8.
    """
    text = text.strip()
    if text.lower() in ("", "auto", "automatic"):
        return ()
    parts = re.split(r"[,;\s]+", re.sub(r"\s*([x×*])\s*", r"\1", text, flags=re.IGNORECASE))
    return tuple(_parse_resolution(part) for part in parts if part)


def _parse_resolution(text: str) -> Resolution:
    match = re.fullmatch(r"(\d{1,5})[x×*](\d{1,5})", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is no resolution; write width x height in pixels, such as 512x768, or auto")
    width, height = int(match[1]), int(match[2])
    if not width or not height or width % 8 or height % 8:
        raise ValueError(f"{text!r}: width and height must be multiples of 8, as latents are 8 times smaller")
    return Resolution(width, height)


AUTO = "auto"
"""The host's own precision, or every resolution."""

NUMBERS: Mapping[str, Precision | Quantised] = {each.value: each for each in (*Precision, *Quantised)}
"""What an engine may be asked to compute in, by its word."""

PRECISIONS = (AUTO, *NUMBERS)
"""The words that users choose a precision by, in the order in which they are offered."""

_QUANTISED_ROLES = (Role.UNET, Role.CONTROLNET)


def precision_named(word: object) -> Precision | Quantised | None:
    """What one of `PRECISIONS` stands for; None for `AUTO`.

    Raises:
        ValueError: it is none of them.
    """
    if word == AUTO:
        return None
    if not isinstance(word, str) or word not in NUMBERS:  # older ComfyUIs pass on what no widget offers
        raise ValueError(f"{word!r} is not offered here; choose one of: {', '.join(PRECISIONS)}")
    return NUMBERS[word]


def word_of(precision: Precision | Quantised | None) -> str:
    """The inverse of `precision_named`."""
    return AUTO if precision is None else precision.value


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        precision: None leaves it to the host, and so does a `Quantised`, for all but large linear layers.
        compute: what engines compute in where `precision` leaves that to the host; None for the host's own.
        resolutions: where not empty, only these get engines, and with `ShapeChoice.RANGE` those in between.
        max_batch, max_tokens: the most samples and the longest text of an engine that is not for one exact size.
        bake: embed the model's weights in the engine, where the backend can.
        levers: switches for measurements.

    Raises:
        ValueError: a batch or text that no call has.
    """

    backend: BackendChoice = BackendChoice.AUTO
    precision: Precision | Quantised | None = None
    optimize: Optimize = Optimize.BALANCED
    policy: BuildPolicy = BuildPolicy.BACKGROUND
    resolutions: tuple[Resolution, ...] = ()
    shapes: ShapeChoice = ShapeChoice.EACH
    max_batch: int = MAX_BATCH
    max_tokens: int = MAX_TOKENS
    bake: bool = False
    levers: Levers = Levers()
    compute: Precision | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch is {self.max_batch}; choose a whole number from 1, such as 2 for one picture")
        check_tokens(self.max_tokens)

    @classmethod
    def of_text(
        cls,
        *,
        backend: str = AUTO,
        precision: str = AUTO,
        optimize: str = Optimize.BALANCED.value,
        build: str = BuildPolicy.BACKGROUND.value,
        resolutions: str = AUTO,
        engines: str = ShapeChoice.EACH.value,
        max_batch: int = MAX_BATCH,
        max_tokens: int = MAX_TOKENS,
        bake: bool = False,
    ) -> Settings:
        """What a user chose, in the words of nodes and command line.

        Raises:
            ValueError: a word or number that is not offered, or a resolution that cannot be read.
        """
        return cls(
            backend=_chosen(BackendChoice, backend),
            precision=precision_named(precision),
            optimize=_chosen(Optimize, optimize),
            policy=_chosen(BuildPolicy, build),
            resolutions=parse_resolutions(resolutions),
            shapes=_chosen(ShapeChoice, engines),
            max_batch=max_batch,
            max_tokens=max_tokens,
            bake=bake,
        )

    @property
    def quantised(self) -> Quantised | None:
        """What large linear layers are to multiply in; None where they compute as everything else does."""
        return self.precision if isinstance(self.precision, Quantised) else None

    @property
    def is_off(self) -> bool:
        """Whether the model is to run as it is, by the node or by what is preferred."""
        return self.backend is BackendChoice.OFF

    @property
    def effort(self) -> Optimize:
        """What is spent on building one engine."""
        return Optimize.BALANCED if self.optimize is Optimize.BLOCKS else self.optimize

    def runs_by_blocks(self, role: Role, device: str) -> bool:
        """Whether blocks of a model are to run on engines of their own where no engine of the whole answers.

        Args:
            device: the type of the model's, such as "cuda".
        """
        if self.backend in (BackendChoice.OFF, BackendChoice.TENSORRT) or self.quantised is not None:
            return False
        wanted = self.levers.by_blocks
        if wanted is not ByBlocks.AUTO or self.optimize is Optimize.BLOCKS:
            return wanted is not ByBlocks.OFF
        is_wanted = self.policy is not BuildPolicy.MANUAL and are_blocks_welcome()
        return is_wanted and role is Role.UNET and device == "cuda"

    @property
    def for_blocks(self) -> Settings:
        """The same for engines of blocks: where they only serve until one of the whole model does, nobody waits."""
        if self.optimize is Optimize.BLOCKS:
            return self
        optimize = Optimize.BALANCED if self.optimize is Optimize.MAX else self.optimize
        policy = BuildPolicy.BACKGROUND if self.policy is BuildPolicy.FIRST_USE else self.policy
        return replace(self, optimize=optimize, policy=policy)

    def quantised_for(self, role: Role) -> Quantised | None:
        """The same for one part of a model: a VAE has no large linear layers, and computes in its own precision."""
        return self.quantised if role in _QUANTISED_ROLES else None

    def compute_precision(self, host: Precision) -> Precision:
        """What an engine computes in, large linear layers of a quantised one aside.

        Args:
            host: what the model itself computes in.
        """
        return self.precision if isinstance(self.precision, Precision) else self.compute or host

    def why_not_wanted(self, shapes: Mapping[str, Shape]) -> str | None:
        """Why these shapes get no engine; None when they do."""
        if self.is_off:
            return SWITCHED_OFF
        resolution = Resolution.of_call(shapes)
        if self.shapes is not ShapeChoice.EACH and not self.resolutions:
            return f"'{self.shapes.value}' needs a list of resolutions in the node, such as 512x512, 768x768"
        if self.shapes is ShapeChoice.RANGE:
            smallest, largest = range_of(self.resolutions)
            if not resolution.is_between(smallest, largest):
                return f"{resolution} is outside of the node's range of resolutions ({smallest}…{largest})"
        elif self.resolutions and resolution not in self.resolutions:
            return f"{resolution} is not in the node's list of resolutions ({', '.join(map(str, self.resolutions))})"
        return None


def range_of(resolutions: Sequence[Resolution]) -> tuple[Resolution, Resolution]:
    """The smallest and the largest width and height of a list."""
    widths, heights = [each.width for each in resolutions], [each.height for each in resolutions]
    return Resolution(min(widths), min(heights)), Resolution(max(widths), max(heights))


def check_tokens(number: int) -> int:
    """
    Raises:
        ValueError: no text is padded to this length.
    """
    if number < TOKENS or number % TOKENS:
        offered = ", ".join(str(TOKENS * times) for times in range(1, 5))
        raise ValueError(f"a text of {number} tokens is not offered here; choose a multiple of {TOKENS}: {offered}, …")
    return number


def _chosen(choices: type[_Choice], value: str) -> _Choice:
    """Older ComfyUIs pass on what no widget offers."""
    try:
        return choices(value)
    except ValueError:
        offered = ", ".join(str(choice.value) for choice in choices)
        raise ValueError(f"{value!r} is not offered here; choose one of: {offered}") from None
