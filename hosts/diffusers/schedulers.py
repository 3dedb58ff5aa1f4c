"""diffusers' schedulers in the terms of `sampling`: kinds of samplers, noise levels, denoised latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# diffusers' class -> ComfyUI's name of the same method, by which `sampling` knows it. DDPM is left out: the presets
# were not measured with it.
_SAMPLERS = {
    "DDIMScheduler": "ddim",
    "EulerDiscreteScheduler": "euler",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "uni_pc",
    "DEISMultistepScheduler": "deis",
    "LMSDiscreteScheduler": "lms",
    "PNDMScheduler": "ipndm",
    "SASolverScheduler": "sa_solver",
    "HeunDiscreteScheduler": "heun",
    "FlowMatchHeunDiscreteScheduler": "heun",
    "KDPM2DiscreteScheduler": "dpm_2",
    "KDPM2AncestralDiscreteScheduler": "dpm_2_ancestral",
    "DPMSolverSDEScheduler": "dpmpp_sde",
}
_DISTILLED = frozenset({"LCMScheduler", "TCDScheduler"})
_PREDICTIONS = {"epsilon": "noise", "v_prediction": "velocity", "sample": "latent", "original_sample": "latent"}
_LEAST_SIGNAL = 2.0**-12
"""Stands for none at all, as in a schedule with zero terminal SNR; diffusers' Euler does the same."""


def sampler_name(scheduler: Any, eta: float = 0.0) -> str:
    """ComfyUI's name of a scheduler's method; of one that it does not know, the class.

    Args:
        eta: that DDIM's steps are given; above 0 it adds noise as DDPM does.
    """
    config = scheduler.config
    names = (_SAMPLERS.get(kind.__name__) for kind in type(scheduler).__mro__)
    name = next(filter(None, names), type(scheduler).__name__)
    if name == "dpmpp_2m" and str(config.get("algorithm_type")).startswith("sde-"):
        return "dpmpp_2m_sde"
    if name == "ddim" and eta:
        return "ddpm"
    if name == "euler" and config.get("stochastic_sampling"):
        return "euler_ancestral"
    if name == "ipndm" and not config.get("skip_prk_steps"):  # begins with Runge and Kutta's method
        return "heun"
    return name


def is_distilled(scheduler: Any) -> bool:
    """Whether it is for models that were trained to sample in few steps."""
    return any(kind.__name__ in _DISTILLED for kind in type(scheduler).__mro__)


@dataclass(frozen=True)
class Terms:
    """What a step's latent is made of, and what is predicted of it: `latent = signal * D + noise * (its noise)`.

    Attributes:
        prediction: "noise", "velocity" (signal * noise - noise * D), "latent" (D itself) or "flow" (noise - D).
    """

    prediction: str
    signal: float
    noise: float

    @property
    def sigma(self) -> float:
        """As ComfyUI's samplers count it: for flow models the share of noise, else noise over signal."""
        return self.noise if self.prediction == "flow" else self.noise / self.signal

    def common(self, latent: Tensor) -> Tensor:
        """The latent as `D + sigma * …`."""
        return latent if self.prediction == "flow" else latent / self.signal

    def denoised(self, latent: Tensor, predicted: Tensor) -> Tensor:
        if self.prediction == "latent":
            return predicted
        if self.prediction == "velocity":
            return self.signal * latent - self.noise * predicted
        rest = latent - self.noise * predicted
        return rest if self.prediction == "flow" else rest / self.signal

    def predicted(self, latent: Tensor, denoised: Tensor) -> Tensor:
        """The prediction that `denoised` follows from."""
        if self.prediction == "latent":
            return denoised
        if self.prediction == "velocity":
            return (self.signal * latent - denoised) / self.noise
        return (latent - (1.0 if self.prediction == "flow" else self.signal) * denoised) / self.noise


class Timeline:
    """The steps that a scheduler was set to.

    Attributes:
        terms: of each; where there is a reason they only tell the steps apart.
        reason: why the scheduler's latents cannot be put into common terms; empty where they can.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._times: list[float] = scheduler.timesteps.tolist()
        prediction = _prediction(scheduler)
        self.reason = "" if prediction else f"{type(scheduler).__name__} works in terms that are not known here"
        self.terms = (
            _terms(scheduler, prediction, self._times)
            if prediction
            else [Terms("latent", 1.0, -float(place)) for place in range(len(self._times))]
        )

    def position(self, time: Any, after: int) -> int | None:
        """Where a call of `scheduler.step` belongs; None where that is no later step.

        Args:
            time: that the call is given.
            after: position of the call before, or -1.
        """
        found = getattr(self._scheduler, "step_index", None)
        if found is None and after < 0:
            found = getattr(self._scheduler, "begin_index", None)
        if found is None:
            time = float(time)
            found = next((place for place in range(after + 1, len(self._times)) if self._times[place] == time), None)
        return found if found is not None and after < found < len(self._times) else None


def _prediction(scheduler: Any) -> str | None:
    """What a scheduler wants predicted, in the words of `Terms`; None where that is not known."""
    wanted, has_sigmas = str(scheduler.config.get("prediction_type")), hasattr(scheduler, "sigmas")
    if any(kind.__name__.startswith("FlowMatch") for kind in type(scheduler).__mro__):
        return "flow" if has_sigmas else None
    if scheduler.config.get("use_flow_sigmas") or wanted == "flow_prediction":
        return "flow" if has_sigmas and wanted == "flow_prediction" else None
    return _PREDICTIONS.get(wanted) if hasattr(scheduler, "alphas_cumprod") else None


def _terms(scheduler: Any, prediction: str, times: list[float]) -> list[Terms]:
    if not hasattr(scheduler, "sigmas"):
        left = scheduler.alphas_cumprod.tolist()
        signals = [max(math.sqrt(left[int(time)]), _LEAST_SIGNAL) for time in times]
        return [Terms(prediction, signal, math.sqrt(1 - signal**2)) for signal in signals]
    sigmas = scheduler.sigmas.tolist()[: len(times)]
    if prediction == "flow":
        return [Terms(prediction, 1 - sigma, sigma) for sigma in sigmas]
    return [Terms(prediction, 1 / math.hypot(1, sigma), sigma / math.hypot(1, sigma)) for sigma in sigmas]
