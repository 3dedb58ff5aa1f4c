"""The demo model sampled through diffusers, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import diffusers
import torch

from .pipeline import Pipeline
from .run import Case, Sample, Variant, step_seconds


class Status(Protocol):
    """Counts of an accelerated UNet."""

    def to_json(self) -> dict[str, Any]: ...

    def since(self, earlier: Mapping[str, Any]) -> dict[str, Any]: ...


class AcceleratedUNet(Protocol):
    """What takes the place of the pipeline's UNet."""

    @property
    def status(self) -> Status: ...

    def run(self) -> AbstractContextManager[None]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Skipped(Protocol):
    """What step skipping tells of a picture."""

    @property
    def computed(self) -> int: ...

    @property
    def reason(self) -> str: ...


Skip = Callable[[Pipeline, str, Callable[[Skipped], None]], AbstractContextManager[None]]
"""Skips steps of a pipeline by a preset's name, and tells of each picture."""


class DiffusersHost:
    """Args:
    accelerate: makes the accelerated UNet.
    """

    def __init__(self, accelerate: Callable[[Any], AcceleratedUNet], skip: Skip) -> None:
        diffusers.utils.logging.set_verbosity_error()
        self.name = f"diffusers {diffusers.__version__}"
        self._device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
        self._precision = "fp16" if dtype is torch.float16 else "fp32"
        self._plain = Pipeline.load(device=self._device, dtype=dtype, with_controlnet=False)
        self._accelerated = accelerate(self._plain.unet)
        self._skip = skip

    def sample(self, case: Case, variant: Variant, seed: int) -> Sample:
        before = self._accelerated.status.to_json()
        plain_calls: list[int] = []
        told: list[Skipped] = []
        moments: dict[int, float] = {}
        started = time.perf_counter()
        with self._pipeline(variant, plain_calls, told) as pipeline:
            result = pipeline(
                case.prompt,
                height=case.height,
                width=case.width,
                steps=case.steps,
                cfg=case.cfg,
                seed=seed,
                callback=lambda step, *_: moments.update({step + 1: self._moment()}),
            )
        seconds = time.perf_counter() - started
        status = self._accelerated.status.since(before)
        return Sample(
            seconds=seconds,
            step_seconds=step_seconds(moments),
            latent=result.latents[0].float().cpu().numpy(),
            picture=result.pictures[0].numpy(),
            engine_calls=status["engine_calls"],
            eager_calls=status["eager_calls"] + len(plain_calls),
            computed_steps=sum(skipped.computed for skipped in told),
            precision=self._precision,
            reasons=[*status["reasons"], *(skipped.reason for skipped in told if skipped.reason)],
        )

    @contextmanager
    def _pipeline(self, variant: Variant, plain_calls: list[int], told: list[Skipped]) -> Iterator[Pipeline]:
        """
        Args:
            plain_calls: gets an item for each call of the plain UNet.
            told: gets what step skipping tells.
        """

        def count(*args: Any, **kwargs: Any) -> Any:
            plain_calls.append(1)
            return self._plain.unet(*args, **kwargs)

        with ExitStack() as open_while_sampling:
            if variant.accelerate:
                open_while_sampling.enter_context(self._accelerated.run())
            pipeline = replace(self._plain, unet=self._accelerated if variant.accelerate else count)
            if variant.preset:
                open_while_sampling.enter_context(self._skip(pipeline, variant.preset, told.append))
            yield pipeline

    def _moment(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
