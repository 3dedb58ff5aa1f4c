"""Whole pictures, as ComfyUI's KSampler and VAE Decode make them: from noise that is there to pixels that are there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.dtypes import precision_of
from ...core.protocols import Tensors
from ...core.shapes import Shape
from ...core.spec import Precision, Quantised
from ...runtime.checking.verify import relative_error
from .models import SD15, SDXL, SEED, VAE, half, make_patcher, make_vae
from .rows import TIMES_EAGER, Row
from .subject import Example, Judge, synchronize
from .weights import randomise_controlnet, randomise_unet

CFG, SAMPLER, SCHEDULER = 7.0, "euler", "normal"
TOKENS = 77
POOLED = 1280
"""Of SDXL's text as a whole."""

READY, PICTURE = "ready", "picture"
"""What a job tells of: a step is computed, a picture is there. The device may still be at it."""

PARTS = MODEL, OTHERS = "model", "others"
"""Whose engines can be built at the same time: the model's, and those of ControlNet and VAE."""

_AREA = 16
"""Pixels of a hint's areas in each direction."""

_LEAST_LIMIT = {Precision.FP32: 1e-3}
_LEAST_LIMIT_OF_HALVES = 5e-2


@dataclass(frozen=True)
class Parts:
    """What a picture is made with, as ComfyUI's nodes hand it on: MODEL, CONTROL_NET, VAE."""

    model: Any
    control: Any
    vae: Any

    @property
    def networks(self) -> list[torch.nn.Module]:
        found = [self.model.model.diffusion_model, self.vae.first_stage_model]
        return found if self.control is None else [*found, self.control.control_model]

    def numbers(self) -> Iterator[torch.Tensor]:
        for network in self.networks:
            yield from network.parameters()
            yield from network.buffers()


@dataclass(frozen=True)
class Wish:
    """The inputs of one picture, where ComfyUI has them: on the CPU.

    Attributes:
        hint: the ControlNet's picture; None where there is no ControlNet.
        pooled: both texts as a whole, [2, POOLED]; None where the model takes no such thing.
    """

    seed: int
    noise: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor
    hint: torch.Tensor | None
    pooled: torch.Tensor | None = None


Applied = tuple[Wish, list[Any], list[Any]]
"""A wish with both its conditionings."""


class Job:
    """How one kind of picture is made.

    Args:
        make: the parts in a dtype, with numbers by the same seed.
        context: the width of the text.
        pooled: whether the model takes the text as a whole, too.
        batch: pictures that are made at once.

    Attributes:
        tell: hears of each step and of each picture.
    """

    sets, unseen = 2, 0

    def __init__(
        self,
        make: Callable[[torch.dtype, torch.dtype], Parts],
        size: int,
        steps: int,
        context: int,
        pooled: bool = False,
        batch: int = 1,
    ) -> None:
        import comfy.model_management as management

        self.device: torch.device = management.get_torch_device()
        self.steps = steps
        self.parts = make(half(self.device), torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.tell: Callable[[str], None] = lambda what: None
        self._make = make
        self.shapes: Mapping[str, Shape] = {"latent": (batch, 4, size // 8, size // 8), "context": (1, TOKENS, context)}
        if self.parts.control is not None:
            self.shapes = {**self.shapes, "hint": (1, 3, size, size)}
        if pooled:
            self.shapes = {**self.shapes, "pooled": (1, POOLED)}

    @property
    def precision(self) -> Precision:
        return precision_of(self.parts.model.model.get_dtype())

    @property
    def engine_calls(self) -> int:
        return self.engine_calls_of(self.steps)

    def engine_calls_of(self, steps: int) -> int:
        """Model and ControlNet once a step, for both prompts at a time, and the decoder once a picture."""
        return steps * (1 if self.parts.control is None else 2) + self.shapes["latent"][0]

    def inputs(self, seed: int) -> Wish:
        import comfy.sample

        generator = torch.Generator().manual_seed(seed)
        positive, negative = torch.randn(2, *self.shapes["context"], generator=generator)
        hint = _drawing(self.shapes["hint"], generator) if "hint" in self.shapes else None
        pooled = torch.randn(2, POOLED, generator=generator) if "pooled" in self.shapes else None
        return Wish(seed, comfy.sample.prepare_noise(self._empty(), seed), positive, negative, hint, pooled)

    def apply(self, parts: Parts, wish: Wish) -> Applied:
        """As Apply ControlNet (Advanced) does; ComfyUI keeps what a node gave for the next picture."""
        extra: dict[str, Any] = {}
        if parts.control is not None:
            control = parts.control.copy().set_cond_hint(wish.hint, 1.0, (0.0, 1.0))
            extra = {"control": control, "control_apply_to_uncond": False}
        wholes = [{}, {}] if wish.pooled is None else [{"pooled_output": each[None]} for each in wish.pooled]
        return wish, [[wish.positive, {**extra, **wholes[0]}]], [[wish.negative, {**extra, **wholes[1]}]]

    def paint(self, parts: Parts, applied: Applied) -> Tensors:
        """The latent that sampling ends with, and the picture."""
        import comfy.sample

        wish, positive, negative = applied
        options = {"seed": wish.seed, "disable_pbar": True, "callback": lambda *step: self.tell(READY)}
        latent: torch.Tensor = comfy.sample.sample(
            parts.model, wish.noise, self.steps, CFG, SAMPLER, SCHEDULER, positive, negative, self._empty(), **options
        )
        painted = {"latent": latent, "picture": parts.vae.decode(latent)}
        self.tell(PICTURE)
        return painted

    def references(self, inputs: Sequence[Wish]) -> list[Tensors]:
        """With parts of their own, which are gone afterwards."""
        exact = self._make(torch.float32, torch.float32)
        for theirs, ours in zip(exact.numbers(), self.parts.numbers(), strict=True):
            theirs.copy_(ours)
        found = [self.paint(exact, self.apply(exact, wish)) for wish in inputs]
        del exact
        gc.collect()
        return found

    def judge(self, examples: Sequence[Example]) -> Judge:
        return _Judge(*self._eager(examples))

    def milliseconds(self, compute: Callable[[], object]) -> float:
        """By the clock, since the host's work is a part of it."""
        synchronize(self.device)
        started = time.perf_counter()
        compute()
        synchronize(self.device)
        return (time.perf_counter() - started) * 1000

    def _empty(self) -> torch.Tensor:
        return torch.zeros(self.shapes["latent"])

    def _eager(self, examples: Sequence[Example]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """How far the plain parts are off, and how far pictures are from each other that differ in one input."""
        painted = [self._plain(example.inputs) for example in examples]
        errors: dict[str, float] = {}
        for given, example in zip(painted, examples, strict=True):
            errors = _worst(errors, errors_of(given, example.reference))
        one, other = examples[0].inputs, examples[1].inputs
        changed = {
            "seed": replace(one, seed=other.seed, noise=other.noise),
            "prompt": replace(one, positive=other.positive, negative=other.negative, pooled=other.pooled),
        }
        if one.hint is not None:
            changed["hint"] = replace(one, hint=other.hint)
        return errors, {what: errors_of(self._plain(wish), painted[0]) for what, wish in changed.items()}

    def _plain(self, wish: Wish) -> Tensors:
        return self.paint(self.parts, self.apply(self.parts, wish))


@dataclass(frozen=True)
class _Judge:
    """Differences grow from step to step: the measure is how far the plain model in its own precision is off.

    Attributes:
        eager: its errors by output.
        distances: of pictures that differ in one input, by that and by output.
    """

    eager: Mapping[str, float]
    distances: Mapping[str, Mapping[str, float]]

    def errors(self, given: Tensors, reference: Tensors) -> dict[str, float]:
        return errors_of(given, reference)

    def limit(
        self, output: str, precision: Precision, is_ours: bool, quantised: Quantised | None = None, skips: bool = False
    ) -> float:
        """A picture of which steps were skipped must be nearer than those that differ in an input, where the plain
        model in its own precision is."""
        nearest = min(found[output] for found in self.distances.values())
        if skips:
            return max(TIMES_EAGER * self.eager[output], nearest)
        least = min(_LEAST_LIMIT.get(precision, _LEAST_LIMIT_OF_HALVES), nearest / 2)
        return max(TIMES_EAGER * self.eager[output], least)

    def facts(self, errors: Mapping[str, float]) -> Row:
        return {"errors": dict(errors), "distances": self.distances}

    def doubts(self, precision: Precision) -> str | None:
        for what, found in self.distances.items():
            if all(distance <= self.limit(output, precision, False) for output, distance in found.items()):
                return f"another {what} makes less of a difference than a row may be off by: see its `distances`"
        return None


def _drawing(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Black and white areas: white noise would mostly be gone where it has been made smaller."""
    batch, channels, height, width = shape
    areas = torch.rand(batch, 1, height // _AREA, width // _AREA, generator=generator).round()
    return torch.nn.functional.interpolate(areas, (height, width)).expand(shape).contiguous()


def errors_of(given: Tensors, reference: Tensors) -> dict[str, float]:
    return {name: relative_error(given, {name: wanted}) for name, wanted in reference.items()}


def _worst(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), error) for name, error in other.items()}


# Models


def sd15_job(
    size: int,
    steps: int,
    control: bool,
    unet: Mapping[str, Any] = SD15,
    vae: Mapping[str, Any] = VAE,
    batch: int = 1,
) -> Job:
    """
    Args:
        control: with a ControlNet of the model's size.
        unet, vae: the widths of others.
        batch: pictures that are made at once.
    """

    def make(dtype: torch.dtype, vae_dtype: torch.dtype) -> Parts:
        network = make_controlnet(unet, dtype) if control else None
        return Parts(_model("SD15", "BaseModel", unet, dtype), network, make_vae(vae, vae_dtype))

    return Job(make, size, steps, unet["context_dim"], batch=batch)


def sdxl_job(
    size: int, steps: int, unet: Mapping[str, Any] = SDXL, vae: Mapping[str, Any] = VAE, batch: int = 1
) -> Job:
    """
    Args:
        unet, vae: the widths of others.
        batch: pictures that are made at once.
    """

    def make(dtype: torch.dtype, vae_dtype: torch.dtype) -> Parts:
        return Parts(_model("SDXL", "SDXL", unet, dtype), None, make_vae(vae, vae_dtype))

    return Job(make, size, steps, unet["context_dim"], pooled=True, batch=batch)


def _model(family: str, kind: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """
    Args:
        family, kind: ComfyUI's classes of the config and of the model.
    """
    import comfy.model_base
    import comfy.supported_models

    made = getattr(comfy.supported_models, family)(dict(config))
    patcher = make_patcher(made, getattr(comfy.model_base, kind), dtype)
    randomise_unet(patcher.model.diffusion_model, SEED)
    return patcher


def make_controlnet(unet: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A CONTROL_NET that fits a UNet of SD1.5's kind."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.model_management as management
    import comfy.ops
    import comfy.supported_models

    device = management.get_torch_device()
    config = {name: value for name, value in unet.items() if name not in ("out_channels", "transformer_depth_output")}
    network = comfy.cldm.cldm.ControlNet(
        **config,
        **comfy.supported_models.SD15.unet_extra_config,
        hint_channels=3,
        dtype=dtype,
        device=device,
        operations=comfy.ops.disable_weight_init,
    )
    randomise_controlnet(network, SEED)
    return comfy.controlnet.ControlNet(network.eval(), load_device=device)
