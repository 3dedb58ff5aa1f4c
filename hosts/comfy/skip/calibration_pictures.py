"""Pictures that are sampled again and again, as KSampler does it, with some steps skipped or none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ....core.errors import UnsupportedModel
from ....sampling.presets import Selection, custom
from ....sampling.run import AfterRun, Skipped
from ....sampling.samplers import SamplerKind, kind_of
from ....sampling.schedule import Steps, shortened
from ..run.step_recording import Recording, watch
from .step_skip import skip_steps, without_skipping

_SEEDS = 2**64


@dataclass(frozen=True)
class Job:
    """What the user samples; in ComfyUI's own types and KSampler's words."""

    model: Any
    negative: Any
    latent: dict[str, Any]
    steps: int
    cfg: float
    sampler: str
    scheduler: str
    denoise: float = 1.0

    @property
    def kind(self) -> SamplerKind:
        return kind_of(self.sampler)

    def sigmas(self) -> torch.Tensor:
        """The schedule [N + 1]: some schedulers make more or fewer steps than were asked for."""
        from comfy.samplers import KSampler

        model, sampler, scheduler = self.model, self.sampler, self.scheduler
        return KSampler(model, self.steps, model.load_device, sampler, scheduler, self.denoise).sigmas


@dataclass(frozen=True)
class Picture:
    positive: Any
    seed: int


@dataclass
class Measured:
    """Of runs of one selection, the fastest picture: `seconds`, and how many of its steps were computed in fact."""

    seconds: float = float("inf")
    computed: int = 0


@dataclass
class CalibrationPictures:
    """
    Attributes:
        again: what is known of the full run is not computed again: quicker, but not to be timed. Only for samplers that
            are known to call the model once a step.
        measured: by the steps that were computed, None for all.
    """

    job: Job
    pictures: list[Picture]
    again: bool = False
    measured: dict[Steps | None, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if getattr(self.job.latent["samples"], "is_nested", False):
            raise UnsupportedModel("Latents of several parts, such as video with sound, cannot be compared yet.")
        self._sigmas = self.job.sigmas()
        records = self.again and self.job.kind is not SamplerKind.UNKNOWN
        self._recordings = [Recording() if records else None for _ in self.pictures]

    def sample(self, computed: Steps | None) -> torch.Tensor:
        """The final latents of all pictures, on the CPU; None computes every step. See `sampling.trial.Sample`."""
        return torch.cat([self.one(index, computed) for index in range(len(self.pictures))])

    def shortened(self, computed: Steps) -> torch.Tensor:
        """The same from the plain sampler on the sigmas of these steps."""
        sigmas = shortened(self._sigmas, computed)
        return torch.cat([self._run(self._plain(), picture, sigmas) for picture in self.pictures])

    def one(self, index: int, computed: Steps | None) -> torch.Tensor:
        """One of the pictures."""
        reports: list[Skipped] = []
        recording = self._recordings[index]
        model = self._full(recording) if computed is None else self._part(recording, computed, reports.append)
        started = time.perf_counter()
        latents = self._run(model, self.pictures[index], self._sigmas)
        seconds = time.perf_counter() - started
        measured = self.measured.setdefault(computed, Measured())
        measured.seconds = min(measured.seconds, seconds)
        measured.computed = reports[-1].computed if reports else len(self._sigmas) - 1
        return latents

    # Each run has a clone of the user's own model and of no other clone: ComfyUI goes back to that when the clone dies.

    def _plain(self) -> Any:
        model = without_skipping(self.job.model)
        watch(model)
        return model

    def _full(self, recording: Recording | None) -> Any:
        model = self._plain()
        if recording is not None:
            recording.make(model)
        return model

    def _part(self, recording: Recording | None, computed: Steps, after_run: AfterRun) -> Any:
        model = skip_steps(self.job.model, custom(Selection(listed=" ".join(map(str, computed)))), after_run)
        watch(model)
        if recording is not None:
            recording.play(model, float(self._sigmas[_unskipped(computed) - 1]))
        return model

    def _run(self, model: Any, picture: Picture, sigmas: torch.Tensor) -> torch.Tensor:
        import comfy.sample

        job, latent = self.job, self.job.latent
        image = _filled(model, latent)
        noise = comfy.sample.prepare_noise(image, picture.seed % _SEEDS, latent.get("batch_index"))
        latents: torch.Tensor = comfy.sample.sample(
            model,
            noise,
            job.steps,
            job.cfg,
            job.sampler,
            job.scheduler,
            picture.positive,
            job.negative,
            image,
            denoise=job.denoise,
            noise_mask=latent.get("noise_mask"),
            sigmas=sigmas.clone(),  # UniPC writes into them
            disable_pbar=True,
            seed=picture.seed % _SEEDS,
        )
        return latents.float().cpu()  # which waits for the device: the time is the whole run's


def _filled(model: Any, latent: dict[str, Any]) -> torch.Tensor:
    """The latent as KSampler takes it. Newer ComfyUIs write down for what size an empty one was made."""
    import comfy.sample

    ratios = {key: latent[key] for key in ("downscale_ratio_spacial", "downscale_ratio_temporal") if key in latent}
    image: torch.Tensor = comfy.sample.fix_empty_latent_channels(model, latent["samples"], **ratios)
    return image


def _unskipped(computed: Steps) -> int:
    """How many steps there are before the first that is skipped."""
    return next((number for number, step in enumerate(computed) if number != step), len(computed))
