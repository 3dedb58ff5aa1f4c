"""The demo model sampled through diffusers, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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


class DiffusersHost:
    """Args:
    accelerate: makes the accelerated UNet.
    """

    def __init__(self, accelerate: Callable[[Any], AcceleratedUNet]) -> None:
        diffusers.utils.logging.set_verbosity_error()
        self.name = f"diffusers {diffusers.__version__}"
        self._device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
        self._precision = "fp16" if dtype is torch.float16 else "fp32"
        self._plain = Pipeline.load(device=self._device, dtype=dtype, with_controlnet=False)
        self._accelerated = accelerate(self._plain.unet)

    def sample(self, case: Case, variant: Variant, seed: int) -> Sample:
        pipeline = replace(self._plain, unet=self._accelerated) if variant.accelerate else self._plain
        before = self._accelerated.status.to_json()
        moments: dict[int, float] = {}
        started = time.perf_counter()
        with self._accelerated.run() if variant.accelerate else nullcontext():
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
            eager_calls=status["eager_calls"] if variant.accelerate else max(moments),
            precision=self._precision,
            reasons=list(status["reasons"]),
        )

    def _moment(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
